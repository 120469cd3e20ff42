"""Which values are looked at to know of all values that they are finite: few of them.

If x is inf or NaN, so is x + 1: where the sum is finite, x was. So a value needs no look if a step
that passes on what is not finite reads it. In a training step a tenth of the values is enough, and
only if one of these is not finite the steps are looked at which lead to it.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.types import Array
from mpjax._diagnostics.nonfinite.births import can_break, not_finite
from mpjax._diagnostics.nonfinite.program import Body, Step
from mpjax._diagnostics.nonfinite.uses import is_cast, is_inexact
from mpjax._jaxprs.atoms import shape_of

Key: TypeAlias = tuple[int, int]
"""The number of the first step of a body, and that of a group of values in it."""

Flags: TypeAlias = dict[Key, Array]
"""Whether values are not finite, by their groups."""

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

_TOGETHER = 8
"""How many values of one shape are looked at together."""


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
  """The values of a body that are looked at.

  Fields:
    cover: from the value of each step that may break, and each argument of the function, to the
      group that says whether it is finite.
    groups: the values that are looked at together.
  """

  cover: Mapping[int, Key]
  groups: Mapping[Key, tuple[int, ...]]


@functools.lru_cache(maxsize=256)
def sentinels_of(body: Body, outermost: bool = False) -> Sentinels:
  """Returns which values of a body are looked at."""
  readers: dict[int, tuple[Step, int]] = {}
  shapes = {}
  made = {slot: step for step in body.steps for slot in step.outs}
  order = {slot: place for place, slot in enumerate(made)}
  for step in body.steps:
    for slot, var in zip(
      (*step.ins, *step.outs), (*step.eqn.invars, *step.eqn.outvars), strict=True
    ):
      if isinstance(slot, int) and is_inexact(var):
        shapes[slot] = shape_of(var)
    for position, slot in enumerate(step.ins):
      if isinstance(slot, int) and slot not in readers and _passes_on(step, position):
        readers[slot] = (step, position)
  given = (*body.inputs, *body.consts) if outermost else ()
  wanted = [slot for slot in given if slot in shapes]
  for step in body.steps:
    if can_break(step):
      wanted += [s for s, v in zip(step.outs, step.eqn.outvars, strict=True) if is_inexact(v)]
  ends: dict[int, int] = {}
  for slot in reversed(wanted):
    path = [slot]
    while path[-1] in readers and path[-1] not in ends and len(path) < _LONGEST:
      path.append(readers[path[-1]][0].outs[0])
    end = ends.get(path[-1], path[-1])
    ends.update(dict.fromkeys(path, end))
  open_groups: dict[tuple[int, ...], list[int]] = {}
  groups: list[list[int]] = []
  for end in sorted({ends[slot] for slot in wanted}, key=lambda s: order.get(s, -1)):
    group = open_groups.get(shapes[end])
    if group is None or len(group) == _TOGETHER:
      open_groups[shapes[end]] = group = []
      groups.append(group)
    group.append(end)
  first = body.steps[0].number if body.steps else 0
  numbered = {(first, place): tuple(group) for place, group in enumerate(groups)}
  of_end = {end: key for key, group in numbered.items() for end in group}
  return Sentinels({slot: of_end[ends[slot]] for slot in wanted}, numbered)


class FlagProbe:
  """Looks which of the sentinels are not finite, in any iteration and on any device."""

  def watch(self, body: Body, indices: Sequence[Array], outermost: bool) -> "_Watch":
    """Returns what looks at the values of a body."""
    return _Watch(body, outermost)

  def nothing(self, bodies: Sequence[Body]) -> Flags:
    """Returns the state in which all is finite."""
    found: Flags = {}
    for body in bodies:
      inner = self.nothing([each for step in body.steps for each in step.bodies])
      found |= inner | {key: jnp.asarray(False) for key in sentinels_of(body).groups}
    return found

  def first(self, one: Flags, other: Flags) -> Flags:
    """Returns what was seen in either."""
    both = {key: one[key] | other[key] for key in one.keys() & other.keys()}
    return one | other | both

  def of_devices(self, states: Flags) -> Flags:
    """Returns what was seen on any device."""
    return jax.tree.map(jnp.any, states)


class _Watch:
  """Looks at the values of one body."""

  def __init__(self, body: Body, outermost: bool) -> None:
    self.groups = sentinels_of(body, outermost).groups
    self.wanted = {slot: key for key, group in self.groups.items() for slot in group}
    self.values: dict[Key, list[Array]] = {}
    self.flags: Flags = {}

  def arguments(self, body: Body, values: Sequence[Array]) -> None:
    """Looks at the arguments of the function, and at its constants."""
    for slot, x in (*zip(body.inputs, values, strict=True), *body.consts.items()):
      self._look(slot, x)

  def operands(self, step: Step, ins: list[Any]) -> list[Any]:
    """Changes nothing."""
    return ins

  def step(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    """Looks at the results of a step."""
    for slot, x in zip(step.outs, outs, strict=True):
      self._look(slot, x)

  def inside(self, state: Flags) -> None:
    """Takes what was seen in the inner lists of a step."""
    self.flags |= state

  def state(self) -> Flags:
    """Returns what was seen."""
    return self.flags

  def _look(self, slot: int, x: Array) -> None:
    key = self.wanted.get(slot)
    if key is None:
      return
    values = self.values.setdefault(key, [])
    values.append(not_finite(jnp.asarray(x)))
    if len(values) == len(self.groups[key]):
      self.flags[key] = jnp.any(functools.reduce(jnp.logical_or, self.values.pop(key)))


def suspects(body: Body, flags: Mapping[Key, bool]) -> Iterator[list[int]]:
  """Yields the numbers of steps that may not be finite, of one step of the function after another.

  Args:
    body: the function.
    flags: which of its sentinels were not finite.
  """
  yield [n for n, slot in enumerate((*body.inputs, *body.consts)) if _bad(body, slot, flags, True)]
  for step in body.steps:
    found = list(_suspects(body, step, flags, True))
    if found:
      yield found


def _suspects(body: Body, step: Step, flags: Mapping[Key, bool], outermost: bool) -> Iterator[int]:
  if can_break(step) and any(_bad(body, slot, flags, outermost) for slot in step.outs):
    yield step.number
  for inner in step.bodies:
    for each in inner.steps:
      yield from _suspects(inner, each, flags, False)


def _bad(body: Body, slot: int, flags: Mapping[Key, bool], outermost: bool) -> bool:
  key = sentinels_of(body, outermost).cover.get(slot)
  return key is not None and flags[key]
