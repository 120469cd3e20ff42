"""Run a list of steps while an observer looks at the values. All diagnostics use this runner.

Under `jit` the steps are traced again, and loops carry the observations. On the host the steps run
one after the other. JAX compiles each of them, and the iterations of loops, and caches the results.
A value is freed after its last consumer, so the memory is that of the function without `jit`.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from mpjax._core.types import Array, PyTree
from mpjax._jaxpr.compat import bind, context_of, varying_axes
from mpjax._jaxpr.primitives import Holds
from mpjax._jaxpr.reader import Inner, aval_of, dtype_of, mapped_with, shape_of
from mpjax._jaxpr.steps import Body, Step


class Enclosing(NamedTuple):
  """The loops and devices around a body."""

  indices: tuple[Array, ...] = ()  # the numbers of the current iterations, the outermost loop first
  axes: tuple[Hashable, ...] = ()  # the mesh axes of the devices that run the body
  on_host: bool = False  # whether the steps run one by one, with concrete values

  def in_loop(self, index: Array) -> Self:
    """Returns this with one more loop inside, at an iteration."""
    return self._replace(indices=(*self.indices, index))


_TRACED = Enclosing()


class Observer:
  """Looks at the values of a function while it runs. This base class looks at none.

  Each body has an observer of its own, which collects observations in a tree of arrays.
  """

  # Whether the observations of two steps or iterations merge into one tree of the same shape. Loops
  # then carry it. Otherwise a `scan` returns the observations of each iteration. A compiled `while`
  # or `cond` runs as one step, since the number of its observations depends on values.
  merges: ClassVar[bool] = True
  seen: PyTree = None  # the observations in this body so far

  def of(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> Self:
    """Returns the observer of a body, which runs with these arguments."""
    one = copy.copy(self)
    one.seen = self.nothing()
    one.begin(body, values, enclosing)
    return one

  def begin(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> None:
    """Looks at a body before it runs."""

  def looks_inside(self, step: Step) -> bool:
    """Whether the bodies of a step are looked at. Otherwise it runs as one equation."""
    return True

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    """Returns the results of a step for these operands, and looks at them."""
    outs = bind(step.eqn, ins)
    self.look(step, ins, outs)
    return outs

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    """Looks at the operands and results of a step."""

  def inside(self, seen: PyTree) -> None:
    """Takes the observations inside a step."""
    self.seen = self.merge(self.seen, seen)

  def after(self, step: Step, outs: list[Any]) -> list[Any]:
    """Looks at the results of a step whose bodies have run, and returns them."""
    return outs

  def slices(self, step: Step) -> PyTree:
    """Returns arrays of which each iteration of a `scan` gets a slice, and each device all."""
    return None

  def in_iteration(self, slices: PyTree) -> Self:
    """Returns the observer of an iteration or a device, given its slices."""
    return self

  def bound(self, step: Step) -> int | None:
    """Returns the most iterations of a `while`, which then runs as a `scan`; None if unknown."""
    return None

  def all_seen(self) -> PyTree:
    """Returns the observations at the end of the body."""
    return self.seen

  def nothing(self) -> PyTree:
    """Returns the observations before the first step."""

  def merge(self, one: PyTree, other: PyTree) -> PyTree:
    """Returns the observations of `one` and of `other`, which ran after it."""
    return other

  def of_devices(self, seen: PyTree) -> PyTree:
    """Returns the observations of all devices. The first axis of `seen` is the device."""
    return seen


Ran: TypeAlias = tuple[list[Any], PyTree]
"""The results of a body or of a step, and the observations."""


def run(
  body: Body, values: Sequence[Any], observer: Observer, enclosing: Enclosing = _TRACED
) -> Ran:
  """Returns the results of a body for some arguments, and the observations."""
  env: dict[int, Any] = {**body.consts, **dict(zip(body.inputs, values, strict=True))}
  watch = observer.of(body, values, enclosing)
  for step, unread in zip(body.steps, body.last_reads, strict=True):
    ins = _operands(step, env)
    if _is_entered(step, observer, enclosing):
      outs = run_step(step, ins, watch, enclosing)
    else:
      outs = watch.results_of(step, ins)
    env.update(zip(step.outs, outs, strict=True))
    # Only `env` may hold a value while the next step runs. It drops values after their last reader,
    # so that their memory is freed.
    del ins, outs
    for slot in unread:
      env.pop(slot, None)
  outs = [slot.val if isinstance(slot, Literal) else env[slot] for slot in body.outputs]
  seen = watch.all_seen()
  return outs, _varying(seen, enclosing.axes) if observer.merges else seen


def _operands(step: Step, env: Mapping[int, Any]) -> list[Any]:
  """Returns the operands of a step; `env` has all values except literals."""
  pairs = zip(step.ins, step.eqn.invars, strict=True)
  return [_typed(slot, v) if isinstance(slot, Literal) else env[slot] for slot, v in pairs]


def _is_entered(step: Step, observer: Observer, enclosing: Enclosing) -> bool:
  """Whether the bodies of a step run step by step. Otherwise the step runs as one equation."""
  if not step.bodies or not observer.looks_inside(step):
    return False
  is_compiled = not enclosing.on_host
  depends_on_values = step.holds in (Holds.COND, Holds.WHILE)
  return observer.merges or not (is_compiled and depends_on_values)


def run_step(
  step: Step, ins: Sequence[Any], watch: Observer, enclosing: Enclosing = _TRACED
) -> list[Any]:
  """Returns the results of a step that holds bodies; `watch` takes the observations in them."""
  ways = _ENTER[step.holds]
  enter = ways.on_host if enclosing.on_host else ways.traced
  # The carry of a loop keeps the type of its start. A Python number would have a weak type.
  pairs = zip(ins, step.eqn.invars, strict=True)
  typed = [x if hasattr(x, "dtype") else _array(x, v) for x, v in pairs]
  with context_of(step.eqn):
    outs, seen = enter(step, typed, watch, enclosing)
  watch.inside(seen)
  return watch.after(step, outs)


def _typed(literal: Literal, var: Any) -> Any:
  """Returns the value of a literal in the dtype with which the equation was traced."""
  dtype = dtype_of(literal)
  # A literal argument of a call that was written out becomes an operand inside. The equation was
  # traced for the type of a variable there.
  return literal.val if dtype is None or dtype == dtype_of(var) else jnp.asarray(literal.val, dtype)


def _array(x: Any, var: Any) -> Any:
  """Returns a value as an array of the dtype of a variable."""
  return x if isinstance(x, jax.Array) else jnp.asarray(x, aval_of(var).dtype)


def _varying(seen: PyTree, axes: tuple[Hashable, ...]) -> PyTree:
  """Returns observations in a type that says that each device has its own."""
  if not axes:
    return seen
  # Inside a `shard_map`, the carry of a loop must have one type in all iterations. An operand that
  # varies makes the sum vary.
  zero = jax.lax.axis_index(axes) * 0
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), seen)


# Running the bodies of steps under `jit`: observations are carried or returned.


def _scan(step: Step, ins: Sequence[Any], observer: Observer, enclosing: Enclosing) -> Ran:
  """Runs all iterations of a `scan`."""
  length = step.inner[0].times or 0
  start = jnp.asarray(length - 1 if step.inner[0].reverse else 0, jnp.int32)
  return _iterations(step, ins, observer, enclosing, start, length)


def _iterations(
  step: Step,
  ins: Sequence[Any],
  observer: Observer,
  enclosing: Enclosing,
  start: Array,
  length: int,
) -> Ran:
  """Runs some iterations of a `scan`, the first of which has the number `start`."""
  (body,), (inner,), reverse = step.bodies, step.inner, step.inner[0].reverse
  # `ins` are the constants up to `first`, the carry up to `last`, and arrays with a slice for each
  # iteration.
  first, last = inner.carry.start, inner.carry.stop

  def iteration(state: Any, x: tuple[Sequence[Any], PyTree]) -> tuple[Any, Any]:
    (index, seen, carry), (own, slices) = state, x
    watch = observer.in_iteration(slices)
    outs, new = run(body, [*ins[:first], *carry, *own], watch, enclosing.in_loop(index))
    # Observations that merge are carried. Others leave the loop stacked, one for each iteration.
    each = None if observer.merges else new
    if observer.merges:
      seen = observer.merge(seen, new)
    following = index - 1 if reverse else index + 1
    return (following, seen, outs[: len(carry)]), (outs[len(carry) :], each)

  state = (start, _varying(observer.nothing(), enclosing.axes), [*ins[first:last]])
  xs = [*ins[last:]], observer.slices(step)
  (_, seen, carry), (ys, of_each) = jax.lax.scan(iteration, state, xs, length, reverse)
  return [*carry, *ys], seen if observer.merges else of_each


def _while(step: Step, ins: Sequence[Any], observer: Observer, enclosing: Enclosing) -> Ran:
  """Runs a `while` loop."""
  # JAX computes a condition where no observation can be returned. So it is computed at the end of
  # each iteration, and its result is part of the state.
  test, body = step.bodies
  of_test, of_body, carry = _parts_of(step, ins)

  def goes_on(carry: Sequence[Any], index: Array, seen: PyTree) -> tuple[Any, PyTree]:
    (again,), new = run(test, [*of_test, *carry], observer, enclosing.in_loop(index))
    return again, observer.merge(seen, new)

  def iteration(state: Any, watch: Observer = observer) -> Any:
    again, index, seen, carry = state
    operands = [*of_body, *carry, *_lanes(again)]
    carry, new = run(body, operands, watch, enclosing.in_loop(index))
    again, seen = goes_on(carry, index + 1, observer.merge(seen, new))
    return again, index + 1, seen, carry

  zero = jnp.zeros((), jnp.int32)
  again, seen = goes_on(carry, zero, _varying(observer.nothing(), enclosing.axes))
  state = (again, zero, seen, carry)
  most = observer.bound(step)
  if most is None:
    _, _, seen, carry = jax.lax.while_loop(lambda state: jnp.any(state[0]), iteration, state)
    return carry, seen

  # A `scan` has a backward pass. Iterations after the last one change nothing.
  def bounded(state: Any, slices: PyTree) -> tuple[Any, None]:
    advance = functools.partial(iteration, watch=observer.in_iteration(slices))
    return jax.lax.cond(jnp.any(state[0]), advance, lambda state: state, state), None

  (_, _, seen, carry), _ = jax.lax.scan(bounded, state, observer.slices(step), most)
  return carry, seen


def _parts_of(step: Step, ins: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
  """Returns the constants of the condition of a `while`, those of its body, and its carry."""
  carried = len(step.inner[1].carry)
  tested = len(step.bodies[0].inputs) - carried
  return [*ins[:tested]], [*ins[tested : len(ins) - carried]], [*ins[len(ins) - carried :]]


def _lanes(again: Any) -> list[Any]:
  """Returns the last argument of the body of a `while` under `vmap`: the lanes that go on.

  See `_of_lanes` in steps.py.
  """
  return [again] if np.ndim(again) else []


def _cond(step: Step, ins: Sequence[Any], observer: Observer, enclosing: Enclosing) -> Ran:
  """Runs one branch of a `cond`."""

  def branch(body: Body, *operands: Any) -> Ran:
    outs, seen = run(body, operands, observer, enclosing)
    # A branch may return a literal, and all branches must return the same types.
    return [_array(x, v) for x, v in zip(outs, step.eqn.outvars, strict=True)], seen

  index, *operands = ins
  branches = [functools.partial(branch, body) for body in step.bodies]
  return jax.lax.switch(index.astype(jnp.int32), branches, *operands)


def _shard_map(step: Step, ins: Sequence[Any], observer: Observer, enclosing: Enclosing) -> Ran:
  """Runs the body of a `shard_map` on each device, and gathers the observations."""
  arguments, (body,) = mapped_with(step.eqn), step.bodies
  # `axis_names` is a set. The order of the mesh gives the devices a fixed order.
  axes = tuple(name for name in arguments["mesh"].axis_names if name in arguments["axis_names"])

  def one_device(indices: tuple[Array, ...], slices: PyTree, *operands: Any) -> Any:
    watch = observer.in_iteration(slices)
    outs, seen = run(body, operands, watch, Enclosing(indices, (*enclosing.axes, *axes)))
    return outs, jax.tree.map(lambda x: _of_device(x, axes), seen)

  # The numbers of the iterations are the same on all devices, and so are the arrays of an observer,
  # which may not be closed over. Observations have an axis of devices.
  arguments["in_specs"] = (jax.P(), jax.P(), *arguments["in_specs"])
  arguments["out_specs"] = (list(arguments["out_specs"]), jax.P(axes))
  run_on_devices = jax.jit(jax.shard_map(one_device, **arguments))
  outs, seen = run_on_devices(enclosing.indices, observer.slices(step), *ins)
  return outs, observer.of_devices(_gathered(seen, arguments["mesh"]))


def _of_device(x: Any, axes: tuple[Hashable, ...]) -> Array:
  """Returns an array with a new first axis for the devices."""
  # An observation that is equal on all devices varies over fewer axes than its out_spec says.
  x = jnp.asarray(x)[None]
  return jax.lax.pcast(x, tuple(set(axes) - set(varying_axes(jax.typeof(x)))), to="varying")


def _gathered(seen: PyTree, mesh: Any) -> PyTree:
  """Returns the observations of all devices, replicated on each device."""
  # With explicit axes, an array that is sharded along an axis cannot be indexed along it.
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return seen
  everywhere = jax.sharding.NamedSharding(mesh, jax.P())
  return jax.tree.map(lambda x: jax.sharding.reshard(x, everywhere), seen)


@dataclasses.dataclass
class Look(Observer):
  """An observer on the host, made of three functions. It shows arrays as soon as they exist."""

  merges: ClassVar[bool] = False
  # Computes the results of a step.
  compute: Callable[[Step, Sequence[Any]], list[Array]] = lambda step, ins: bind(step.eqn, ins)
  # Chooses arrays among the operands and results of a step, or computes arrays from them.
  pick: Callable[[Step, Sequence[Any], Sequence[Array]], Sequence[Array]] = lambda *_: ()
  # Takes the picked arrays, if there are any. They may be those of several iterations of a loop, or
  # of all devices of a `shard_map`. Each of these adds an axis in front.
  see: Callable[[Step, Sequence[Array]], None] = lambda *_: None
  steps: Mapping[int, Step] = dataclasses.field(default_factory=dict)  # all steps by number
  on_host: bool = False  # whether the current body runs step by step

  def begin(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> None:
    self.seen, self.on_host = {}, enclosing.on_host

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    outs = self.compute(step, ins)
    picked = self.pick(step, ins, outs)
    if picked:
      self.inside({step.number: [*picked]})
    return outs

  def inside(self, seen: Mapping[int, Sequence[Array]]) -> None:
    # Inside compiled iterations the arrays are tracers. They are kept, and shown by the body around
    # that runs on the host.
    for number, picked in seen.items():
      if self.on_host:
        self.see(self.steps[number], picked)
      else:
        self.seen[number] = picked


def run_on_host(body: Body, values: Sequence[Any], look: Look) -> list[Any]:
  """Returns the results of a function. The condition of a `while` runs unobserved."""
  look = dataclasses.replace(look, steps={step.number: step for step in body.every_step()})
  return run(body, values, look, Enclosing(on_host=True))[0]


_TOGETHER = 2**20
"""The largest number of elements that the iterations of one compiled group take and return.

It counts elements and not bytes, so a function has the same groups under a policy.
"""


# Running the bodies of steps on the host.


def _scan_on_host(step: Step, ins: Sequence[Any], observer: Observer, enclosing: Enclosing) -> Ran:
  """Runs a `scan` in groups of iterations that are compiled, or in single iterations."""
  (body,), (inner,) = step.bodies, step.inner
  length = inner.times or 0
  if length == 0:
    return bind(step.eqn, ins), {}
  # A `cond` or `while` inside needs values on the host, so such a body runs step by step.
  if body.is_straight:
    size = _iterations_together(inner, length)
    run_some = _compiled_iterations(step, observer)
  else:
    size = 1
    run_some = _one_iteration(step, observer, enclosing)

  first, last = inner.carry.start, inner.carry.stop
  constants, carry, xs = ins[:first], ins[first:last], ins[last:]
  starts = range(0, length, size)
  parts: list[list[Any]] = []
  for start in reversed(starts) if inner.reverse else starts:
    outs = run_some([*constants, *carry], xs, start, min(size, length - start))
    carry, ys = outs[: len(carry)], outs[len(carry) :]
    parts.append(ys)
  # The groups of a reversed `scan` run from the last to the first. Its results are in ascending
  # order.
  if inner.reverse:
    parts.reverse()
  return [*carry, *map(_joined, zip(*parts, strict=True))], {}


def _iterations_together(inner: Inner, length: int) -> int:
  """Returns the number of iterations of a `scan` that run at once, to bound the memory."""
  arrays = (*inner.jaxpr.invars[inner.carry.start :], *inner.jaxpr.outvars)
  numbers = max(sum(math.prod(shape_of(v)) for v in arrays), 1)
  most = max(min(_TOGETHER // numbers, length), 1)
  # If the number does not divide the length, the rest is a group of another size, which is compiled
  # too. A somewhat smaller divisor avoids this.
  for count in range(most, most // 2, -1):
    if length % count == 0:
      return count
  return most


_Iterations: TypeAlias = Callable[[Sequence[Any], Sequence[Any], int, int], list[Any]]
"""A function that runs iterations of a `scan`, and returns their results.

It takes the constants with the carry, the arrays with a slice for each iteration, the number of the
first iteration, and the number of iterations.
"""


def _compiled_iterations(step: Step, observer: Observer) -> _Iterations:
  """Returns a function that compiles several iterations of a `scan` as one function."""

  @functools.partial(jax.jit, static_argnums=2)
  def together(ins: Sequence[Any], start: Array, count: int) -> Ran:
    return _iterations(step, ins, observer, _TRACED, start, count)

  def run_some(ins: Sequence[Any], xs: Sequence[Any], start: int, count: int) -> list[Any]:
    some = [jax.lax.dynamic_slice_in_dim(x, start, count) for x in xs]
    outs, picked = together([*ins, *some], start, count)
    observer.inside(picked)
    return outs

  return run_some


def _one_iteration(step: Step, observer: Observer, enclosing: Enclosing) -> _Iterations:
  """Returns a function that runs one iteration of a `scan` step by step."""
  (body,), (inner,) = step.bodies, step.inner

  def run_some(ins: Sequence[Any], xs: Sequence[Any], start: int, count: int) -> list[Any]:
    outs, _ = run(body, [*ins, *(x[start] for x in xs)], observer, enclosing)
    carried = len(inner.carry)
    return [*outs[:carried], *(jnp.asarray(y)[None] for y in outs[carried:])]

  return run_some


def _joined(parts: Sequence[Any]) -> Array:
  """Returns the stacked results of a `scan` from those of its groups."""
  traced = any(isinstance(part, Tracer) for part in parts)  # The first may be a constant.
  if traced or jnp.issubdtype(parts[0].dtype, jax.dtypes.extended):
    return jnp.concatenate(parts)
  if len(parts) == 1:
    return parts[0]
  # In NumPy, since XLA would compile a concatenation for each number of operands.
  return jnp.asarray(np.concatenate(parts))


def _while_on_host(step: Step, ins: Sequence[Any], observer: Observer, enclosing: Enclosing) -> Ran:
  """Runs a `while` loop whose condition Python reads."""
  test, body = step.bodies
  of_test, of_body, carry = _parts_of(step, ins)
  goes_on = jax.jit(lambda values: run(test, values, Look())[0][0])
  advance = functools.partial(run, body, observer=observer)
  advance = (
    jax.jit(advance) if body.is_straight else functools.partial(advance, enclosing=enclosing)
  )
  while bool(jnp.any(again := goes_on([*of_test, *carry]))):
    carry, picked = advance([*of_body, *carry, *_lanes(again)])
    observer.inside(picked)
  return carry, {}


def _cond_on_host(step: Step, ins: Sequence[Any], observer: Observer, enclosing: Enclosing) -> Ran:
  """Runs the branch of a `cond` that Python chooses."""
  index, *operands = ins
  # `jax.lax.switch` clamps the index.
  chosen = min(max(int(index), 0), len(step.bodies) - 1)
  return run(step.bodies[chosen], operands, observer, enclosing)


class _Ways(NamedTuple):
  """The functions that run the bodies of a step."""

  traced: Callable[..., Ran]  # under `jit`
  on_host: Callable[..., Ran]  # with concrete values


_ENTER: Mapping[Holds | None, _Ways] = {
  Holds.SCAN: _Ways(traced=_scan, on_host=_scan_on_host),
  Holds.WHILE: _Ways(traced=_while, on_host=_while_on_host),
  Holds.COND: _Ways(traced=_cond, on_host=_cond_on_host),
  Holds.SHARD_MAP: _Ways(traced=_shard_map, on_host=_shard_map),  # Its devices run together.
}
"""The functions for each kind of step that is entered."""
