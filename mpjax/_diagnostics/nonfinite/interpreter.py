"""Running a list of steps while something watches the values: once more, under `jit`."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from mpjax._core.types import Array, PyTree
from mpjax._diagnostics.nonfinite.program import Body, Step
from mpjax._jaxprs.atoms import aval_of, dtype_of
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.inner_jaxprs import mapped_with
from mpjax._jaxprs.primitive_facts import Holds

State: TypeAlias = PyTree
"""What was seen so far: a tree of small arrays."""

Axes: TypeAlias = tuple[Hashable, ...]
"""The axes of the `shard_map` around."""


class Around(NamedTuple):
  """What is around a body.

  Fields:
    indices: the iterations of the loops, the outermost first.
    axes: those of the devices that run it.
  """

  indices: tuple[Array, ...] = ()
  axes: Axes = ()


_NOT_AROUND = Around()


class Watch(Protocol):
  """What looks at the values of one list of steps."""

  def arguments(self, body: Body, values: Sequence[Array]) -> None:
    """Looks at the arguments of the function."""

  def operands(self, step: Step, ins: list[Any]) -> list[Any]:
    """Returns the operands with which a step is to run."""
    ...

  def step(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    """Looks at a step that has run."""

  def inside(self, state: State) -> None:
    """Takes what was seen in the inner lists of a step."""

  def state(self) -> State:
    """Returns what was seen."""


class Probe(Protocol):
  """What looks at the values of a function, and keeps what was seen first."""

  def watch(self, body: Body, indices: tuple[Array, ...], outermost: bool) -> Watch:
    """Returns what looks at the values of a body."""
    ...

  def nothing(self, bodies: Sequence[Body]) -> State:
    """Returns the state in which nothing was seen in some lists of steps."""

  def first(self, one: State, other: State) -> State:
    """Returns what was seen in `one`, which ran before `other`, else what was seen in that."""

  def of_devices(self, states: State) -> State:
    """Returns what the first device saw of those that saw something, of states in a row."""


def run(
  body: Body,
  args: Sequence[Any],
  probe: Probe,
  around: Around = _NOT_AROUND,
  *,
  outermost: bool = False,
) -> tuple[list[Any], State]:
  """Runs the steps of a body.

  Args:
    body: the steps.
    args: its arguments.
    probe: what looks at the values.
    around: the loops and devices around.
    outermost: whether it is the function itself.

  Returns:
    The results, and what the probe saw.
  """
  env: dict[int, Any] = dict(body.consts)
  env.update(zip(body.inputs, args, strict=True))
  watch = probe.watch(body, around.indices, outermost)
  if outermost:
    watch.arguments(body, args)
  last = _last_reads(body)
  for place, step in enumerate(body.steps):
    ins = [_typed(s, v) if isinstance(s, Literal) else env[s] for s, v in _operands(step)]
    if step.bodies:
      outs, state = _RUN[step.holds](step, ins, probe, around)
      watch.inside(state)
    else:
      ins = watch.operands(step, ins)
      outs = bind(step.eqn, ins)
      watch.step(step, ins, outs)
    env.update(zip(step.outs, outs, strict=True))
    for slot in last.get(place, ()):
      env.pop(slot, None)
  found = [s.val if isinstance(s, Literal) else env[s] for s in body.outputs]
  return found, _varying(watch.state(), around.axes)


def _varying(state: State, axes: Axes) -> State:
  """Returns a state of a type that says that each device has its own."""
  if not axes:
    return state
  zero = jax.lax.axis_index(axes) * 0
  return jax.tree.map(lambda x: x + zero.astype(x.dtype), state)


def _in_loop(around: Around, index: Array) -> Around:
  return around._replace(indices=(*around.indices, index))


def _operands(step: Step) -> Any:
  return zip(step.ins, step.eqn.invars, strict=True)


def _typed(literal: Literal, var: Any) -> Any:
  """Returns the value of a literal in the dtype that the equation was traced with."""
  dtype = dtype_of(literal)
  # Arguments of a call that was written out meet equations that were traced for their types.
  return literal.val if dtype is None or dtype == dtype_of(var) else jnp.asarray(literal.val, dtype)


def _last_reads(body: Body) -> dict[int, list[int]]:
  """Returns the values that nothing reads after a step, by its position."""
  last: dict[int, int] = {}
  for place, step in enumerate(body.steps):
    for slot in (*step.ins, *step.outs):
      if isinstance(slot, int):
        last[slot] = place
  for slot in body.outputs:
    if isinstance(slot, int):
      last.pop(slot, None)
  found: dict[int, list[int]] = {}
  for slot, place in last.items():
    found.setdefault(place, []).append(slot)
  return found


def _start(step: Step, ins: Sequence[Any]) -> list[Any]:
  """Returns operands with which a loop starts, in the types that it goes on with."""
  return [
    jnp.asarray(x, aval_of(v).dtype) if isinstance(s, Literal) else x
    for x, s, v in zip(ins, step.ins, step.eqn.invars, strict=True)
  ]


def _scan(step: Step, ins: list[Any], probe: Probe, around: Around) -> tuple[list[Any], State]:
  (inner,), (body,), params = step.inner, step.bodies, step.eqn.params
  ins = _start(step, ins)
  first, last = inner.carry.start, inner.carry.stop
  consts, carry, xs = ins[:first], ins[first:last], ins[last:]
  length, back = inner.times or 0, params["reverse"]

  def iteration(state: Any, x: list[Any]) -> tuple[Any, list[Any]]:
    index, seen, carry = state
    outs, new = run(body, [*consts, *carry, *x], probe, _in_loop(around, index))
    following = index - 1 if back else index + 1
    return (following, probe.first(seen, new), outs[: len(carry)]), outs[len(carry) :]

  begin = jnp.asarray(length - 1 if back else 0, jnp.int32)
  state = (begin, _varying(probe.nothing(step.bodies), around.axes), carry)
  (_, seen, carry), ys = jax.lax.scan(
    iteration, state, xs, length=length, reverse=back, unroll=params["unroll"]
  )
  return [*carry, *ys], seen


def _while(step: Step, ins: list[Any], probe: Probe, around: Around) -> tuple[list[Any], State]:
  # The condition is looked at too: it is computed at the end of an iteration, for the next one.
  (_, inner), (test, body) = step.inner, step.bodies
  ins = _start(step, ins)
  carried = len(inner.carry)
  tested = len(test.inputs) - carried
  of_test, of_body = ins[:tested], ins[tested : len(ins) - carried]

  def goes_on(carry: list[Any], index: Array, seen: State) -> tuple[Any, State]:
    (again,), new = run(test, [*of_test, *carry], probe, _in_loop(around, index))
    return again, probe.first(seen, new)

  def iteration(state: Any) -> Any:
    again, index, seen, carry = state
    lanes = [again] if len(body.inputs) > len(of_body) + len(carry) else []
    carry, new = run(body, [*of_body, *carry, *lanes], probe, _in_loop(around, index))
    again, seen = goes_on(carry, index + 1, probe.first(seen, new))
    return again, index + 1, seen, carry

  zero = jnp.zeros((), jnp.int32)
  carry = ins[len(ins) - carried :]
  again, seen = goes_on(carry, zero, _varying(probe.nothing(step.bodies), around.axes))
  state = (again, zero, seen, carry)
  _, _, seen, carry = jax.lax.while_loop(lambda state: jnp.any(state[0]), iteration, state)
  return carry, seen


def _cond(step: Step, ins: list[Any], probe: Probe, around: Around) -> tuple[list[Any], State]:
  def branch(body: Body) -> Any:
    def taken(*operands: Any) -> Any:
      outs, seen = run(body, operands, probe, around)
      avals = [aval_of(v) for v in step.eqn.outvars]
      outs = [_array(x, a) for x, a in zip(outs, avals, strict=True)]
      nothing = _varying(probe.nothing(step.bodies), around.axes)
      return outs, probe.first(seen, nothing)

    return taken

  index, *operands = _start(step, ins)
  index = index.astype(jnp.int32) if hasattr(index, "astype") else int(index)
  return jax.lax.switch(index, [branch(body) for body in step.bodies], *operands)


def _array(x: Any, aval: Any) -> Any:
  return x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)


def _shard_map(step: Step, ins: list[Any], probe: Probe, around: Around) -> tuple[list[Any], State]:
  given = mapped_with(step.eqn)
  axes = tuple(name for name in given["mesh"].axis_names if name in given["axis_names"])
  (body,) = step.bodies

  def mapped(indices: tuple[Array, ...], *operands: Any) -> Any:
    outs, seen = run(body, operands, probe, Around(indices, (*around.axes, *axes)))
    return outs, jax.tree.map(lambda x: x[None], seen)

  given["in_specs"] = (jax.P(), *given["in_specs"])
  given["out_specs"] = (list(given["out_specs"]), jax.P(axes))
  outs, seen = jax.shard_map(mapped, **given)(around.indices, *_start(step, ins))
  return outs, probe.of_devices(_gathered(seen, given["mesh"]))


def _gathered(states: State, mesh: Any) -> State:
  """Returns the states of all devices on each of them.

  One of an array that is sharded by an explicit mesh cannot be taken by its index.
  """
  if jax.sharding.AxisType.Explicit not in mesh.axis_types:
    return states
  whole = jax.sharding.NamedSharding(mesh, jax.P())
  return jax.tree.map(lambda x: jax.sharding.reshard(x, whole), states)


_RUN: Mapping[Holds | None, Callable[..., tuple[list[Any], State]]] = {
  Holds.SCAN: _scan,
  Holds.WHILE: _while,
  Holds.COND: _cond,
  Holds.SHARD_MAP: _shard_map,
}
