"""The observers of `find_nonfinite`, which look at values while a function runs.

`FlagProbe` looks at few values, the sentinels. If they are finite, all values are: if x is inf or
NaN, so is x + 1. If a sentinel is not finite, `FirstProbe` looks at the steps that lead to it, for
the first whose result is not finite though its operands are. A `where` may discard that result.
Therefore the number of the step that broke follows each element until something computes with it
(`Uses`).
"""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.trees import low_to_float32
from mpjax._core.types import Array, NumpyArray
from mpjax._diagnose.nonfinite.uses import (
  ELEMENTWISE,
  Uses,
  can_break,
  effect_of,
  faults_in,
  newly_nonfinite,
)
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.in_float32 import is_low, results_in_float32
from mpjax._jaxpr.reader import is_inexact_atom, shape_of
from mpjax._jaxpr.runner import Enclosing, Observer
from mpjax._jaxpr.steps import Body, Step

NONE = 2**31 - 1
"""Stands for no step and for no element. It is larger than all other numbers and positions."""


# The first look


class FlagProbe(Observer):
  """Looks which of the sentinels are not finite, in any iteration and on any device."""

  def __init__(self, body: Body, arguments: Mapping[int, int]) -> None:
    self.body, self.arguments = body, arguments
    ends = _ends(body)
    # Values that cannot break are finite if their operands are.
    steps = [step for step in body.every_step() if can_break(step)]
    pairs = [pair for step in steps for pair in zip(step.outs, step.eqn.outvars, strict=True)]
    covered = [slot for slot in (*body.inputs, *body.consts) if slot in arguments]
    covered += [slot for slot, v in pairs if is_inexact_atom(v)]
    # From each argument and each result that may break to its sentinel.
    self.sentinels = {slot: ends.get(slot, slot) for slot in covered}
    self.flag_of = {slot: i for i, slot in enumerate(dict.fromkeys(self.sentinels.values()))}

  def suspects(self, flags: NumpyArray) -> frozenset[int]:
    """Returns the steps and the arguments that may not be finite, by their numbers."""
    # All values that share a sentinel are suspects.
    bad = {slot for slot, sentinel in self.sentinels.items() if flags[self.flag_of[sentinel]]}
    breaking = (step for step in self.body.every_step() if can_break(step))
    steps = {step.number for step in breaking if not bad.isdisjoint(step.outs)}
    return frozenset(steps | {self.arguments[slot] for slot in bad & self.arguments.keys()})

  def begin(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> None:
    self.flags = dict[int, Array]()
    self._flag((*body.inputs, *body.consts), (*values, *body.consts.values()))

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._flag(step.outs, outs)

  def _flag(self, slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, x in zip(slots, values, strict=True):
      # The runner may give a Python number for a literal. A token or key has no numbers.
      if slot in self.flag_of and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        self.flags[self.flag_of[slot]] = jnp.any(~jnp.isfinite(jnp.asarray(x)))

  def all_seen(self) -> Array:
    if not self.flags:
      return self.seen
    # One update for all flags keeps the compiled function small.
    return self.seen.at[jnp.asarray([*self.flags])].set(jnp.stack([*self.flags.values()]))

  def nothing(self) -> Array:
    return jnp.zeros(len(self.flag_of), bool)

  def merge(self, one: Array, other: Array) -> Array:
    return one | other

  def of_devices(self, seen: Array) -> Array:
    return jnp.any(seen, axis=0)


def _ends(top: Body) -> dict[int, int]:
  """Returns for each value that is passed on the last value that is not finite where it is not."""
  ends = dict[int, int]()
  for body in top.every_body():
    # Backwards, the end of a result is known before that of its operand.
    for step in reversed(body.steps):
      primitive = step.eqn.primitive
      operands: Sequence[Any] = ()
      if primitive.name in _PASS_ON or effect_of(step) == "casts":
        operands = step.ins
      elif primitive is p.div_p:
        operands = step.ins[:1]  # 1 / inf is 0, so a divisor is not passed on.
      slots = [slot for slot in operands if isinstance(slot, int)]
      # An empty result is finite, whatever its operands are.
      if slots and is_inexact_atom(step.eqn.outvars[0]) and 0 not in shape_of(step.eqn.outvars[0]):
        # A value with several consumers takes the last assignment, which is its first consumer.
        ends.update(dict.fromkeys(slots, ends.get(step.outs[0], step.outs[0])))
  return ends


_PASS_ON = frozenset(
  primitive.name
  for primitive in (
    *(p.add_p, p.sub_p, p.mul_p, p.neg_p, p.abs_p, p.add_jaxvals_p, p.sqrt_p, p.square_p),
    *(p.log_p, p.log1p_p, p.sin_p, p.cos_p, p.reduce_sum_p, p.reduce_prod_p, p.cumsum_p),
    *(p.dot_general_p, p.reshape_p, p.transpose_p, p.squeeze_p, p.broadcast_in_dim_p, p.rev_p),
    *(p.concatenate_p, p.copy_p),
  )
)
"""Primitives whose result is not finite where an operand is not: 0 * inf is NaN."""


# The close look

ValuesByName: TypeAlias = dict[str, Array]
"""The numbers of an array: fields of `Range`."""


class Seen(NamedTuple):
  """The first step that broke.

  Fields:
    first: in int32, the number of the step, or `NONE`; the iterations of the loops around it, -1
      where there is no loop; and the position in the mesh of a `shard_map`, -1 outside of one.
    place: the first element of the result of `shown` that broke, counted along the last axis first.
    rows: of `shown`, a row for each operand, for the result, and for the result in float32.
    followed: for each value that leaves the body, the first step that broke each element. Values
      without an element that broke may be missing.
  """

  first: Array
  place: Array
  rows: list[ValuesByName]
  followed: Mapping[int, Array]


class FirstProbe(Observer):
  """Looks, among the steps and arguments `only`, for the first whose result is not finite.

  Arguments and constants have negative numbers. If a step is `shown`, its numbers are seen too. The
  body may be a piece of the function: `given` are the values followed so far that it takes, and
  those that it returns are followed on.
  """

  def __init__(
    self,
    uses: Uses,
    only: Collection[int],
    shown: Step | None = None,
    given: Mapping[int, Array] | None = None,
    returned: Collection[int] = (),
  ) -> None:
    self.uses, self.only, self.shown = uses, only, shown
    self.given, self.returned = given or {}, returned

  def begin(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> None:
    # For each value that does not count yet, the first step that broke each element.
    self.followed = {slot: self.given[slot] for slot in body.inputs if slot in self.given}
    self.broken = list[Array]()  # the first step that broke, of each value that counts
    self.indices = enclosing.indices
    _, self.place, self.rows, _ = self.nothing()
    for slot, x in [*zip(body.inputs, values, strict=True), *body.consts.items()]:
      number = self.uses.arguments.get(slot)
      if number is not None and number in self.only:
        self._take(slot, _number_where(faults_in(jnp.asarray(x), slot, self.uses), number))

  def nothing(self) -> Seen:
    # The number, an iteration for each nested loop, and the device.
    first = jnp.asarray([NONE] + [-1] * (self.uses.top.depth + 1), jnp.int32)
    count = 0 if self.shown is None else sum(map(is_inexact_atom, self.shown.eqn.invars)) + 2
    return Seen(first, jnp.zeros((), jnp.int32), [row_of(jnp.zeros(()))] * count, {})

  def merge(self, one: Seen, other: Seen) -> Seen:
    # Of two iterations the earlier one wins, although step numbers repeat.
    return jax.tree.map(lambda a, b: jnp.where(one.first[0] < NONE, a, b), one, other)

  def of_devices(self, seen: Seen) -> Seen:
    """Returns the report of the device on which the first step broke."""
    # Devices run at the same time, so the smallest step number is first.
    device = jnp.argmin(seen.first[:, 0]).astype(jnp.int32)
    one = jax.tree.map(lambda x: x[device], seen)
    first = jnp.where(one.first[0] < NONE, one.first.at[-1].set(device), one.first)
    return one._replace(first=first)

  def looks_inside(self, step: Step) -> bool:
    # No value is followed into a loop, so XLA removes loops without suspects that nothing reads.
    inside = (each for body in step.bodies for each in body.every_step())
    return any(each.number in self.only for each in inside)

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._follow(step, ins, outs)
    # Numbers that the code names may be inf on purpose.
    if step.number not in self.only or self.uses.literals.issuperset(step.outs):
      return
    # A result with a broken element passes the number on until something counts it.
    masks = newly_nonfinite(step, ins, outs)
    for slot, mask in masks.items():
      self._take(slot, _number_where(mask, step.number))
    if step is self.shown:
      self._show(step, ins, outs, next(iter(masks.values())))

  def all_seen(self) -> Seen:
    followed = {slot: self.followed[slot] for slot in self.returned if slot in self.followed}
    # No value of this body counts as broken.
    if not self.broken:
      return self.seen._replace(followed=followed)
    number = functools.reduce(jnp.minimum, self.broken)
    nothing = self.nothing().first
    first = jnp.stack([number, *self.indices, *nothing[len(self.indices) + 1 :]])
    # Loops inside of the body have reported to `seen`. The smaller number ran first.
    is_first = number <= self.seen.first[0]
    own = Seen(first, self.place, self.rows, {})
    seen = jax.tree.map(lambda a, b: jnp.where(is_first, a, b), own, self.seen)
    return seen._replace(followed=followed)

  def _take(self, slot: int, numbers: Array, computed: bool = False) -> None:
    """Takes for each element of a value which step broke, or one that it was computed from."""
    if slot in self.uses.counted or (computed and slot in self.uses.compared):
      self.broken.append(jnp.min(numbers, initial=NONE))
    else:
      self.followed[slot] = jnp.minimum(self.followed.get(slot, NONE), numbers)

  def _follow(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    """Notes for each element of the results the step that broke the elements it comes from."""
    effect = effect_of(step)
    # Literals have no number, and nothing breaks them.
    numbers = [self.followed.get(slot) if isinstance(slot, int) else None for slot in step.ins]
    # The result of a comparison is a bool, in which no inf goes on.
    if effect in ("asks", "tests", "enters") or all(number is None for number in numbers):
      return
    if effect == "factor":
      numbers = _of_factors(numbers, ins)
    if effect == "moves" or step.eqn.primitive is p.select_n_p:
      # Numbers of steps move like the elements that they belong to. An operand of which no element
      # broke has `NONE` everywhere. Indices stay as they are.
      none = jnp.asarray(NONE, jnp.int32)
      operands = [*ins]
      for i, (number, v) in enumerate(zip(numbers, step.eqn.invars, strict=True)):
        if is_inexact_atom(v):
          # Compute it from the operand, so that it is on the same devices.
          empty = jnp.where(~jnp.isfinite(jnp.asarray(ins[i])), none, none)
          operands[i] = empty if number is None else number
      carried = bind(step.eqn, operands)
    else:
      first = functools.reduce(jnp.minimum, [number for number in numbers if number is not None])
      # A finite maximum has discarded the inf.
      carried = [jnp.where(~jnp.isfinite(outs[0]) | (effect != "chooses"), first, NONE)]
    for slot, v, number in zip(step.outs, step.eqn.outvars, carried, strict=True):
      if is_inexact_atom(v):
        # An argument that is returned as it came breaks nothing.
        is_returned = effect == "chooses" and slot in self.uses.outputs
        number = jnp.where((number < 0) & is_returned, NONE, number)
        self._take(slot, number, computed=effect == "factor")

  def _show(self, step: Step, ins: Sequence[Any], outs: Sequence[Array], mask: Array) -> None:
    """Takes the numbers of a step, of whose first result some elements broke."""
    # Only the first floating result is shown.
    position = next(i for i, v in enumerate(step.eqn.outvars) if is_inexact_atom(v))
    pairs = zip(ins, step.eqn.invars, strict=True)
    result = outs[position]
    values = [*(jnp.asarray(x) for x, v in pairs if is_inexact_atom(v)), result, result]
    # Run the step in float32 as well, to see whether low precision is at fault.
    if any(map(is_low, values)):
      wide = results_in_float32(step.eqn, [*map(low_to_float32, ins)])
      values[-1] = result if wide is None else wide[position]
    # A sharded array may not be reshaped, so the place is found by reductions.
    places = jnp.arange(result.size, dtype=jnp.int32).reshape(result.shape)
    self.place = jnp.min(jnp.where(mask, places, NONE), initial=NONE)
    self.rows = []
    for x in values:
      # Without corresponding elements the value is unknown.
      number = jnp.nan
      if effect_of(step) in ELEMENTWISE:
        number = jnp.sum(jnp.where(places == self.place, jnp.real(x).astype(jnp.float32), 0))
      self.rows.append(row_of(x, number))


_Numbers: TypeAlias = Sequence[Array | None]
"""For each operand, the step that broke each element; None if no step did."""


def _number_where(mask: Array, number: int) -> Array:
  return jnp.where(mask, jnp.asarray(number, jnp.int32), NONE)


def _of_factors(numbers: _Numbers, factors: Sequence[Any]) -> _Numbers:
  """Returns which factors of a multiplication in the backward pass count as broken.

  A factor counts if it is NaN, or an inf that meets something else than 0. In 0 * inf the 0 says
  that the value did not count in the forward pass: there, the multiplication is what broke.
  0 * NaN breaks nothing that was not broken before.
  """
  counting = list[Array | None]()
  for number, factor, other in zip(numbers, factors, factors[::-1], strict=True):
    x, y = jnp.asarray(factor), jnp.asarray(other)
    counts = ~jnp.isfinite(x) & jnp.isfinite(y) & (jnp.isnan(x) | (y != 0))
    counting.append(None if number is None else jnp.where(counts, number, NONE))
  return counting


def row_of(x: Array, value: Array | float = math.nan) -> ValuesByName:
  """Returns the numbers of an array, given the number at the element that broke."""
  # Least and largest are those of the finite elements.
  bad, nan = ~jnp.isfinite(x), jnp.isnan(x)
  size = jnp.abs(x).astype(jnp.float32)
  # NaN plus a number is NaN, which marks an array without finite elements.
  unknown = jnp.where(jnp.all(bad), jnp.float32(jnp.nan), 0)
  return {
    "least": unknown + jnp.min(jnp.where(bad, jnp.inf, size), initial=jnp.inf),
    "most": unknown + jnp.max(jnp.where(bad, 0, size), initial=0),
    "inf": jnp.sum(bad & ~nan, dtype=jnp.int32),
    "nan": jnp.sum(nan, dtype=jnp.int32),
    "value": jnp.asarray(value, jnp.float32),
  }
