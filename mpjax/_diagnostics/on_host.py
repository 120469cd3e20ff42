"""Running a function on the host, one step after the other, with a look at each.

Single steps are compiled, which JAX remembers, and what loops repeat. No number lives longer than
something reads it: that is what a function costs that runs without `jit`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._core.types import Array
from mpjax._diagnostics.runner import (
  TRACED,
  Around,
  Enter,
  Entered,
  Observer,
  State,
  iterations,
  lanes,
  parts_of,
  run,
  run_shard_map,
)
from mpjax._jaxprs.atoms import shape_of
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.steps import Body, Step


class Look(NamedTuple):
  """An observer on the host, as three functions.

  Fields:
    compute: computes the results of a step.
    pick: chooses arrays among its operands and results, or computes some from these.
    see: takes them, if there are any: of a loop perhaps those of several iterations together, and
      of a `shard_map` those of all devices, with one more axis in front.
  """

  compute: Callable[[Step, Sequence[Any]], list[Array]] = lambda step, ins: bind(step.eqn, ins)
  pick: Callable[[Step, Sequence[Any], Sequence[Array]], Sequence[Array]] = lambda *_: ()
  see: Callable[[Step, Sequence[Array]], None] = lambda *_: None


def run_on_host(body: Body, values: Sequence[Any], look: Look) -> list[Any]:
  """Returns the results of a function. The condition of a `while` runs unobserved."""
  steps = {step.number: step for step in body.every_step()}
  return run(body, values, _Looking(look, steps), Around(enter=_ENTER))[0]


class _Looking:
  """A `Look` as an observer: what it picks is seen as soon as it has been computed."""

  merges = False

  def __init__(self, look: Look, steps: Mapping[int, Step]) -> None:
    self.look, self.steps = look, steps

  def watch(self, body: Body, values: Sequence[Any], around: Around) -> "_Picks":
    return _Picks(self, around.enter is not None)

  def nothing(self) -> State:
    return None

  def merge(self, one: State, other: State) -> State:
    return other

  def of_devices(self, states: State) -> State:
    return states


class _Picks:
  """What is picked in one body, by the numbers of its steps."""

  def __init__(self, looking: _Looking, on_host: bool) -> None:
    self.looking, self.on_host, self.picked = looking, on_host, dict[int, Sequence[Array]]()

  def compute(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    outs = self.looking.look.compute(step, ins)
    picked = self.looking.look.pick(step, ins, outs)
    if picked:
      self.inside({step.number: [*picked]})
    return outs

  def inside(self, state: Mapping[int, Sequence[Array]]) -> None:
    if not self.on_host:
      self.picked.update(state)
      return
    for number, picked in state.items():
      self.looking.look.see(self.looking.steps[number], picked)

  def state(self) -> Mapping[int, Sequence[Array]]:
    return self.picked


_TOGETHER = 2**20
"""How many numbers of the inputs and results of a loop are seen together, some iterations of it.

They have the same shapes under a policy, so that iterations are seen together as without it.
"""


def _scan(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  (body,), (inner,), reverse = step.bodies, step.inner, step.eqn.params["reverse"]
  first, last, length = inner.carry.start, inner.carry.stop, inner.times or 0
  constants, carry, xs = ins[:first], [*ins[first:last]], ins[last:]
  if not length:
    return bind(step.eqn, ins), {}
  size = 1
  if body.is_straight:
    each = (*inner.jaxpr.invars[first:], *inner.jaxpr.outvars)
    most = max(min(_TOGETHER // max(sum(math.prod(shape_of(v)) for v in each), 1), length), 1)
    # What is left over would be compiled too.
    size = next((count for count in range(most, most // 2, -1) if length % count == 0), most)

  @functools.partial(jax.jit, static_argnums=4)
  def advance(
    constants: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any], start: int, count: int
  ) -> Any:
    part = [jax.lax.dynamic_slice_in_dim(x, start, count) for x in xs]
    return iterations(step, observer, TRACED, constants, carry, part, start, count)

  watch, parts = observer.watch(body, (), around), list[Any]()
  for start in range(0, length, size)[:: -1 if reverse else 1]:
    count = min(size, length - start)
    if body.is_straight:
      carry, ys, picked = advance(constants, carry, xs, start, count)
      watch.inside(picked)
      del picked
    else:
      outs, _ = run(body, [*constants, *carry, *(x[start] for x in xs)], observer, around)
      carry, ys = outs[: len(carry)], [jnp.asarray(y)[None] for y in outs[len(carry) :]]
    parts.append(ys)
  return [*carry, *map(_joined, zip(*parts[:: -1 if reverse else 1], strict=True))], {}


def _joined(parts: Sequence[Any]) -> Array:
  if isinstance(parts[0], Tracer) or jnp.issubdtype(parts[0].dtype, jax.dtypes.extended):
    return jnp.concatenate(parts)
  # XLA would compile an operation of as many operands.
  return parts[0] if len(parts) == 1 else jnp.asarray(np.concatenate(parts))


def _while(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  test, body = step.bodies
  of_test, of_body, carry = parts_of(step, ins)
  unobserved = _Looking(Look(), {})
  goes_on = jax.jit(lambda values: run(test, values, unobserved)[0][0])
  advance = functools.partial(run, body, observer=observer)
  advance = jax.jit(advance) if body.is_straight else functools.partial(advance, around=around)
  watch = observer.watch(body, (), around)
  while bool(jnp.any(again := goes_on([*of_test, *carry]))):
    carry, picked = advance([*of_body, *carry, *lanes(again)])
    watch.inside(picked)
  return carry, {}


def _cond(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  index, *operands = ins
  return run(step.bodies[min(max(int(index), 0), len(step.bodies) - 1)], operands, observer, around)


def _shard_map(step: Step, ins: Sequence[Any], observer: Observer, around: Around) -> Entered:
  return jax.jit(lambda *ins: run_shard_map(step, ins, observer, TRACED))(*ins)


_ENTER: Mapping[Holds | None, Enter] = {
  Holds.SCAN: _scan,
  Holds.WHILE: _while,
  Holds.COND: _cond,
  Holds.SHARD_MAP: _shard_map,
}
