"""Running a list of steps while something watches the values: the one runner of the diagnostics.

Under `jit` all of it is traced once more, and what was seen in loops is carried along; `on_host`
has what differs where a function runs without `jit`.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mpjax._core.types import Array, PyTree
from mpjax._jaxprs.atoms import aval_of, dtype_of
from mpjax._jaxprs.compat import context_of, varying_axes
from mpjax._jaxprs.inner_jaxprs import mapped_with
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.steps import Body, Step

State: TypeAlias = PyTree
"""What was seen: a tree of arrays."""


class Around(NamedTuple):
  """What is around a body.

  Fields:
    indices: the iterations of the loops, the outermost first.
    axes: those of the devices that run it.
    enter: what runs loops and the like on the host; None under `jit`.
  """

  indices: tuple[Array, ...] = ()
  axes: tuple[Hashable, ...] = ()
  enter: "Mapping[Holds | None, Enter] | None" = None


TRACED = Around()

Entered: TypeAlias = tuple[list[Any], State]
"""The results of a step, and what was seen inside."""

Enter: TypeAlias = "Callable[[Step, Sequence[Any], Observer, Around], Entered]"


class Watch(Protocol):
  """What looks at the values of a body while it runs."""

  def compute(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    """Returns the results of a step for these operands, and looks at them."""
    ...

  def inside(self, state: State) -> None:
    """Takes what was seen inside of a step."""

  def state(self) -> State:
    """Returns what was seen."""


class Observer(Protocol):
  """What looks at the values of a function.

  Attributes:
    merges: whether what was seen twice is put together by `merge`. If not, it is returned for each
      iteration of a loop, and `while` and `cond` run as one step where they are compiled.
  """

  merges: bool

  def watch(self, body: Body, values: Sequence[Any], around: Around) -> Watch:
    """Returns what looks at the values of a body, which runs with these arguments."""
    ...

  def nothing(self) -> State:
    """Returns the state in which nothing was seen."""

  def merge(self, one: State, other: State) -> State:
    """Returns what was seen in `one`, which ran before `other`, and in that."""

  def of_devices(self, states: State) -> State:
    """Returns what was seen by all devices, given the states of each in a row."""


def run(
  body: Body, values: Sequence[Any], observer: Observer, around: Around = TRACED
) -> tuple[list[Any], State]:
  """Runs the steps of a body.

  Args:
    body: the steps.
    values: its arguments.
    observer: what looks at the values.
    around: the loops and devices around.

  Returns:
    The results, and what was seen.
  """
  env: dict[int, Any] = {**body.consts, **dict(zip(body.inputs, values, strict=True))}
  watch = observer.watch(body, values, around)
  for step, unread in zip(body.steps, body.last_reads, strict=True):
    pairs = zip(step.ins, step.eqn.invars, strict=True)
    ins = [_typed(slot, v) if isinstance(slot, Literal) else env[slot] for slot, v in pairs]
    depends = step.holds in (Holds.COND, Holds.WHILE)
    if step.bodies and (observer.merges or around.enter or not depends):
      enter = (around.enter or _ENTER)[step.holds]
      # A loop goes on in the types that it starts with.
      ins = [
        x if hasattr(x, "dtype") else _array(x, v)
        for x, v in zip(ins, step.eqn.invars, strict=True)
      ]
      with context_of(step.eqn):
        outs, state = enter(step, ins, observer, around)
      watch.inside(state)
      del state
    else:
      outs = watch.compute(step, ins)
    env.update(zip(step.outs, outs, strict=True))
    del ins, outs
    for slot in unread:
      env.pop(slot, None)
  outs = [slot.val if isinstance(slot, Literal) else env[slot] for slot in body.outputs]
  return outs, _varying(watch.state(), around.axes) if observer.merges else watch.state()


def _typed(literal: Literal, var: Any) -> Any:
  """Returns the value of a literal in the dtype that the equation was traced with."""
  dtype = dtype_of(literal)
  # Arguments of a call that was written out meet equations that were traced for their types.
  return literal.val if dtype is None or dtype == dtype_of(var) else jnp.asarray(literal.val, dtype)


def _array(x: Any, var: Any) -> Any:
  return x if isinstance(x, jax.Array) else jnp.asarray(x, aval_of(var).dtype)


def _varying(state: State, axes: tuple[Hashable, ...]) -> State:
  """Returns a state of a type that says that each device has its own."""
  if not axes:
    return state
  zero = jax.lax.axis_index(axes) * 0
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), state)


def _start(observer: Observer, around: Around) -> State:
  return _varying(observer.nothing(), around.axes) if observer.merges else None


def _in_loop(around: Around, index: Array) -> Around:
  return around._replace(indices=(*around.indices, index))


def _scan(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  first, last = step.inner[0].carry.start, step.inner[0].carry.stop
  length = step.inner[0].times or 0
  start = jnp.asarray(length - 1 if step.eqn.params["reverse"] else 0, jnp.int32)
  advance = functools.partial(iterations, step, observer, around)
  carry, ys, seen = advance(ins[:first], ins[first:last], ins[last:], start, length)
  return [*carry, *ys], seen


def iterations(
  step: Step,
  observer: Observer,
  around: Around,
  constants: Sequence[Any],
  carry: Sequence[Any],
  xs: Sequence[Any],
  start: Array | int,
  length: int,
) -> tuple[list[Any], list[Any], State]:
  """Traces some iterations of a scan."""
  (body,), reverse = step.bodies, step.eqn.params["reverse"]

  def iteration(state: Any, x: Sequence[Any]) -> tuple[Any, Any]:
    index, seen, carry = state
    outs, new = run(body, [*constants, *carry, *x], observer, _in_loop(around, index))
    seen, note = (observer.merge(seen, new), None) if observer.merges else (seen, new)
    return (index - 1 if reverse else index + 1, seen, outs[: len(carry)]), (
      outs[len(carry) :],
      note,
    )

  state = (start, _start(observer, around), [*carry])
  (_, seen, carry), (ys, notes) = jax.lax.scan(iteration, state, [*xs], length, reverse)
  return [*carry], ys, seen if observer.merges else notes


def _while(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  # The condition is looked at too: it is computed at the end of an iteration, for the next one.
  test, body = step.bodies
  of_test, of_body, carry = parts_of(step, ins)

  def goes_on(carry: Sequence[Any], index: Array, seen: State) -> tuple[Any, State]:
    (again,), new = run(test, [*of_test, *carry], observer, _in_loop(around, index))
    return again, observer.merge(seen, new)

  def iteration(state: Any) -> Any:
    again, index, seen, carry = state
    operands = [*of_body, *carry, *lanes(again)]
    carry, new = run(body, operands, observer, _in_loop(around, index))
    again, seen = goes_on(carry, index + 1, observer.merge(seen, new))
    return again, index + 1, seen, carry

  zero = jnp.zeros((), jnp.int32)
  again, seen = goes_on(carry, zero, _start(observer, around))
  state = (again, zero, seen, carry)
  _, _, seen, carry = jax.lax.while_loop(lambda state: jnp.any(state[0]), iteration, state)
  return carry, seen


def parts_of(step: Step, ins: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
  """Returns the constants of the condition of a while, those of its body, and its carry."""
  carried = len(step.inner[1].carry)
  tested = len(step.bodies[0].inputs) - carried
  return [*ins[:tested]], [*ins[tested : len(ins) - carried]], [*ins[len(ins) - carried :]]


def lanes(again: Any) -> list[Any]:
  """Returns the last argument of the body of a while under `vmap`: which lanes go on."""
  return [again] if np.ndim(again) else []


def _cond(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  def branch(body: Body) -> Callable[..., Entered]:
    def taken(*operands: Any) -> Entered:
      outs, seen = run(body, operands, observer, around)
      return [_array(x, v) for x, v in zip(outs, step.eqn.outvars, strict=True)], seen

    return taken

  index, *operands = ins
  return jax.lax.switch(index.astype(jnp.int32), [*map(branch, step.bodies)], *operands)


def run_shard_map(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  arguments, (body,) = mapped_with(step.eqn), step.bodies
  axes = tuple(name for name in arguments["mesh"].axis_names if name in arguments["axis_names"])

  def one_device(indices: tuple[Array, ...], *operands: Any) -> Any:
    outs, seen = run(body, operands, observer, Around(indices, (*around.axes, *axes)))
    return outs, jax.tree.map(lambda x: _of_device(x, axes), seen)

  arguments["in_specs"] = (jax.P(), *arguments["in_specs"])
  arguments["out_specs"] = (list(arguments["out_specs"]), jax.P(axes))
  outs, seen = jax.shard_map(one_device, **arguments)(around.indices, *ins)
  return outs, observer.of_devices(_gathered(seen, arguments["mesh"]))


def _of_device(x: Any, axes: tuple[Hashable, ...]) -> Array:
  """Returns an array with a first axis for the devices, each of which has its own."""
  x = jnp.asarray(x)[None]
  return jax.lax.pcast(x, tuple(set(axes) - set(varying_axes(jax.typeof(x)))), to="varying")


def _gathered(states: State, mesh: Any) -> State:
  """Returns the states of all devices on each of them.

  One of an array that is sharded by an explicit mesh cannot be taken by its index.
  """
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return states
  everywhere = jax.sharding.NamedSharding(mesh, jax.P())
  return jax.tree.map(lambda x: jax.sharding.reshard(x, everywhere), states)


_ENTER: Mapping[Holds | None, Enter] = {
  Holds.SCAN: _scan,
  Holds.WHILE: _while,
  Holds.COND: _cond,
  Holds.SHARD_MAP: run_shard_map,
}
