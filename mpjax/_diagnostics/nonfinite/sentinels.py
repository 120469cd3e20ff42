"""A small set of values whose finiteness implies that all values are finite.

If x is inf or NaN, so is x + 1: where the sum is finite, x was. So a value needs no look if a step
that passes on what is not finite reads it. In a training step a tenth of the values is enough, and
only if one of these is not finite the steps are looked at which lead to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.types import Array
from mpjax._diagnostics.nonfinite.scales import Rescale
from mpjax._diagnostics.nonfinite.uses import can_break, is_cast, is_inexact, not_finite
from mpjax._diagnostics.runner import Around
from mpjax._jaxprs.atoms import shape_of
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.steps import Body, Step

_PASS_ON = frozenset(
  (
    *(p.add_p, p.sub_p, p.mul_p, p.neg_p, p.abs_p, p.add_jaxvals_p, p.sqrt_p, p.square_p),
    *(p.log_p, p.log1p_p, p.sin_p, p.cos_p, p.reduce_sum_p, p.reduce_prod_p, p.cumsum_p),
    *(p.dot_general_p, p.reshape_p, p.transpose_p, p.squeeze_p, p.broadcast_in_dim_p, p.rev_p),
    *(p.concatenate_p, p.copy_p),
  )
)
"""Primitives whose result is not finite where an operand is not: 0 * inf is NaN."""

_LONGEST = 24
"""How many steps a value passes before it is looked at: to know better where it began."""


def _passes_on(step: Step, position: int) -> bool:
  eqn = step.eqn
  if step.bodies or not eqn.outvars or not is_inexact(eqn.outvars[0]):
    return False
  if 0 in shape_of(eqn.outvars[0]):
    return False
  if eqn.primitive is p.div_p:
    return position == 0
  if eqn.primitive is p.integer_pow_p:
    return eqn.params["y"] > 0
  return eqn.primitive in _PASS_ON or is_cast(step)


class Sentinels(NamedTuple):
  """The values of a function that are looked at."""

  numbers: Mapping[int, int]  # of each that is looked at
  # For each argument, and each result that may break, the number of the value that says whether it
  # is finite.
  cover: Mapping[int, int]


def sentinels_of(top: Body) -> Sentinels:
  """Returns which values of a function are looked at."""
  ends: dict[int, int] = {}
  for body in top.every_body():
    following: dict[int, int] = {}
    covered = [*top.inputs, *top.consts] if body is top else []
    for step in body.steps:
      for position, slot in enumerate(step.ins):
        if isinstance(slot, int) and slot not in following and _passes_on(step, position):
          following[slot] = step.outs[0]
      if can_break(step):
        pairs = zip(step.outs, step.eqn.outvars, strict=True)
        covered += [slot for slot, v in pairs if is_inexact(v)]
    for slot in reversed(covered):
      path = [slot]
      while path[-1] in following and path[-1] not in ends and len(path) < _LONGEST:
        path.append(following[path[-1]])
      ends.update(dict.fromkeys(path, ends.get(path[-1], path[-1])))
  numbers = {slot: number for number, slot in enumerate(dict.fromkeys(ends.values()))}
  return Sentinels(numbers, {slot: numbers[end] for slot, end in ends.items()})


def suspects(top: Body, sentinels: Sentinels, flags: Sequence[bool]) -> Iterator[list[int]]:
  """Yields numbers of steps that may not be finite, of one step of the function after another."""
  # Arguments and constants have negative numbers.

  def is_bad(slot: int) -> bool:
    return slot in sentinels.cover and bool(flags[sentinels.cover[slot]])

  given = (*top.inputs, *top.consts)
  yield [number for number, slot in enumerate(given, -len(given)) if is_bad(slot)]
  for step in top.steps:
    inside = [each for body in step.bodies for each in body.every_step()]
    yield [s.number for s in (step, *inside) if can_break(s) and any(map(is_bad, s.outs))]


class FlagProbe:
  """Looks which of the sentinels are not finite, in any iteration and on any device."""

  merges = True

  def __init__(self, top: Body, sentinels: Sentinels, rescale: Rescale) -> None:
    self.top, self.numbers, self.rescale = top, sentinels.numbers, rescale

  def watch(self, body: Body, values: Sequence[Any], around: Around) -> "_Watch":
    watch = _Watch(self)
    if body is self.top:
      watch.look((*body.inputs, *body.consts), (*values, *body.consts.values()))
    return watch

  def nothing(self) -> Array:
    """Returns the state in which all is finite."""
    return jnp.zeros(len(self.numbers), bool)

  def merge(self, one: Array, other: Array) -> Array:
    """Returns what was seen in either."""
    return one | other

  def of_devices(self, states: Array) -> Array:
    """Returns what was seen on any device."""
    return jnp.any(states, axis=0)


class _Watch:
  """Looks at the values of one body."""

  def __init__(self, probe: FlagProbe) -> None:
    self.probe, self.flags = probe, probe.nothing()
    self.seen: dict[int, Array] = {}

  def look(self, slots: Sequence[int], values: Sequence[Any]) -> None:
    """Looks at values."""
    for slot, x in zip(slots, values, strict=True):
      number = self.probe.numbers.get(slot)
      if number is not None and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        self.seen[number] = jnp.any(not_finite(jnp.asarray(x)))

  def compute(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    outs = bind(step.eqn, self.probe.rescale(step, ins))
    self.look(step.outs, outs)
    return outs

  def inside(self, state: Array) -> None:
    self.flags = self.flags | state

  def state(self) -> Array:
    if not self.seen:
      return self.flags
    return self.flags.at[jnp.asarray([*self.seen])].set(jnp.stack([*self.seen.values()]))
