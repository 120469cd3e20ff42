"""What `find_nonfinite` looks at while a function runs, in three runs: each needs the one before.

Flags: a small set of values whose finiteness implies that all values are finite. If x is inf or
NaN, so is x + 1: where the sum is finite, x was. So a value needs no look if a step that passes on
what is not finite reads it. In a training step a tenth of the values is enough, and only if one of
these is not finite the steps are looked at which lead to it: for the first whose result is not
finite though its operands are, and then for what the numbers were where it broke.
"""

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.types import Array, NumpyArray
from mpjax._diagnostics.nonfinite.scales import Rescale
from mpjax._diagnostics.nonfinite.uses import (
  Use,
  Uses,
  births,
  can_break,
  is_backward_factor,
  is_cast,
  is_elementwise,
  is_inexact,
  is_move,
  is_nan,
  is_select,
  not_finite,
)
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.in_float32 import is_low, results_in_float32, to_float32
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.reader import shape_of
from mpjax._jaxprs.runner import Around, Observer
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


def sentinels_of(top: Body) -> Mapping[int, int]:
  """Returns for each argument, and each result that may break, the value that is looked at."""
  ends: dict[int, int] = {}  # of each value that is passed on, where that ends
  covered = [*top.inputs, *top.consts]
  for body in top.every_body():
    for step in reversed(body.steps):
      for position, slot in reversed([*enumerate(step.ins)]):
        if isinstance(slot, int) and _passes_on(step, position):
          ends[slot] = ends.get(step.outs[0], step.outs[0])
      if can_break(step):
        results = zip(step.outs, step.eqn.outvars, strict=True)
        covered += [slot for slot, v in results if is_inexact(v)]
  return {slot: ends.get(slot, slot) for slot in covered}


_CLOSELY = 64
"""How many steps are looked at closely in the first run: what comes after is not compiled."""


def suspects(
  top: Body, sentinels: Mapping[int, int], flags: NumpyArray
) -> Iterator[frozenset[int]]:
  """Yields numbers of steps that may not be finite, few at first: the fault is most often there."""
  # Arguments and constants have negative numbers.
  flagged = dict(zip(dict.fromkeys(sentinels.values()), flags, strict=True))
  bad = {slot for slot, sentinel in sentinels.items() if flagged[sentinel]}
  slots = (*top.inputs, *top.consts)
  some, most = {n for n, slot in enumerate(slots, -len(slots)) if slot in bad}, _CLOSELY
  for step in top.steps:
    inside = [each for body in step.bodies for each in body.every_step()]
    some |= {s.number for s in (step, *inside) if can_break(s) and not bad.isdisjoint(s.outs)}
    if len(some) >= most:
      yield frozenset(some)
      some, most = set(), 4 * most
  if some:
    yield frozenset(some)


class FlagProbe(Observer):
  """Looks which of the sentinels are not finite, in any iteration and on any device."""

  def __init__(self, top: Body, sentinels: Mapping[int, int], rescale: Rescale) -> None:
    self.top, self.rescale = top, rescale
    self.numbers = {slot: i for i, slot in enumerate(dict.fromkeys(sentinels.values()))}

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.flags = dict[int, Array]()
    if body is self.top:
      self._flag((*body.inputs, *body.consts), (*values, *body.consts.values()))

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    return super().results_of(step, self.rescale(step, ins))

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._flag(step.outs, outs)

  def _flag(self, slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, x in zip(slots, values, strict=True):
      if slot in self.numbers and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        self.flags[self.numbers[slot]] = jnp.any(not_finite(jnp.asarray(x)))

  def all_seen(self) -> Array:
    if not self.flags:
      return self.seen
    return self.seen.at[jnp.asarray([*self.flags])].set(jnp.stack([*self.flags.values()]))

  def nothing(self) -> Array:
    return jnp.zeros(len(self.numbers), bool)

  def merge(self, one: Array, other: Array) -> Array:
    return one | other

  def of_devices(self, seen: Array) -> Array:
    return jnp.any(seen, axis=0)


NONE = 2**31 - 1
"""The number of no step, or position of no element: it comes after all others."""

_TOGETHER = 16
"""How many arrays of one type are reduced at once."""


class FirstProbe(Observer):
  """Looks, among the steps and arguments `only`, for the first whose result is not finite.

  It returns in int32 the number of the step, negative for arguments and constants, and `NONE` if no
  value broke; the iterations of the loops inside of one another, -1 where there is no loop; and the
  position in the mesh of a `shard_map`, -1 outside of one.
  """

  # Of a value that may be discarded, the number of the step that broke follows each element, until
  # something computes with it.

  def __init__(self, top: Body, uses: Uses, only: Collection[int], rescale: Rescale) -> None:
    self.top, self.uses, self.only, self.rescale = top, uses, only, rescale

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.indices, self.followed = around.indices, dict[int, Array]()
    self.counted, self.broken = dict[Any, list[Array]](), list[Array]()
    if body is self.top:
      self._look_at_arguments(body, values)

  def nothing(self) -> Array:
    return jnp.asarray([NONE] + [-1] * (self.top.depth + 1), jnp.int32)

  def merge(self, one: Array, other: Array) -> Array:
    """Returns what ran first."""
    return jnp.where(one[0] < NONE, one, other)

  def of_devices(self, seen: Array) -> Array:
    """Returns what the device saw on which the first step broke."""
    device = jnp.argmin(seen[:, 0]).astype(jnp.int32)
    return jnp.where(jnp.any(seen[:, 0] < NONE), seen[device].at[-1].set(device), self.nothing())

  def _look_at_arguments(self, body: Body, values: Sequence[Any]) -> None:
    """Looks at arguments: one that holds a NaN or +inf is at fault, -inf may be a mask."""
    pairs = [*zip(body.inputs, values, strict=True), *body.consts.items()]
    for number, (slot, x) in enumerate(pairs, -len(pairs)):
      if number in self.only and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        x = jnp.asarray(x)
        # What is added up is no mask.
        may_be_mask = (jnp.real(x) < 0) & (slot not in self.uses.summed)
        inf_counts = slot not in body.consts
        self._broke(slot, number, is_nan(x) | (inf_counts & not_finite(x) & ~may_be_mask))

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    return super().results_of(step, self.rescale(step, ins))

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._follow(step, ins, outs)
    if step.number in self.only and not self.uses.constants.issuperset(step.outs):
      for slot, mask in births(step, ins, outs).items():
        self._broke(slot, step.number, mask)

  def all_seen(self) -> Array:
    self.broken += [_first_of(some) for some in self.counted.values() if some]
    if not self.broken:
      return self.seen
    number = functools.reduce(jnp.minimum, self.broken)
    own = jnp.stack([number, *self.indices, *self.nothing()[len(self.indices) + 1 :]])
    return jnp.where(number <= self.seen[0], own, self.seen)

  def _broke(self, slot: int, number: int, mask: Array) -> None:
    """Takes which elements of a value broke."""
    numbers = jnp.where(mask, jnp.asarray(number, jnp.int32), NONE)
    if self.uses.of(slot) is Use.COUNTS:
      self._count(numbers)
    else:
      self.followed[slot] = jnp.minimum(self.followed.get(slot, NONE), numbers)

  def _count(self, numbers: Array) -> None:
    """Takes for each element which step broke, if something computes with it."""
    # To reduce one array after the other would be as many kernels as steps.
    some = self.counted.setdefault(jax.typeof(numbers), [])
    some.append(numbers)
    if len(some) == _TOGETHER:
      self.broken.append(_first_of(some))
      some.clear()

  def _follow(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    numbers = [self.followed.get(slot) if isinstance(slot, int) else None for slot in step.ins]
    if all(each is None for each in numbers) or facts_of(step.eqn).tests:
      return
    if is_backward_factor(step) and self.uses.of(step.outs[0]) is not Use.HIDDEN:
      # A factor counts where it is NaN, or meets something else than 0. 0 * inf is NaN, and that it
      # is 0 tells that the value did not count in the forward pass: there, the multiplication is
      # what broke. 0 * NaN breaks nothing that was not broken before.
      both = [(jnp.asarray(x), jnp.asarray(other)) for x, other in (ins, ins[::-1])]
      counts = [not_finite(x) & ~not_finite(y) & (is_nan(x) | (y != 0)) for x, y in both]
      pairs = zip(numbers, counts, strict=True)
      numbers = [None if each is None else jnp.where(c, each, NONE) for each, c in pairs]
    passes = is_move(step) or is_cast(step) or is_select(step)
    for slot, carried in _carried(step, ins, numbers, outs).items():
      if self.uses.of(slot) > (Use.COUNTS if passes else Use.COMPARED):
        self.followed[slot] = carried
      else:
        if slot in self.uses.returned:  # An argument that is returned as it came.
          carried = jnp.where(carried < 0, NONE, carried)
        self._count(carried)


def _first_of(numbers: Sequence[Array]) -> Array:
  return jnp.min(functools.reduce(jnp.minimum, numbers), initial=NONE)


def _carried(
  step: Step, ins: Sequence[Any], numbers: Sequence[Array | None], outs: Sequence[Array]
) -> Mapping[int, Array]:
  """Returns which steps broke the elements of the results, given those of the operands."""
  if is_elementwise(step):
    followed = [each for each in numbers if each is not None]
    return {step.outs[0]: functools.reduce(jnp.minimum, [*followed, _none_of(outs[0])])}
  operands = [
    number if number is not None else _none_of(jnp.asarray(x)) if is_inexact(v) else x
    for number, x, v in zip(numbers, ins, step.eqn.invars, strict=True)
  ]
  moved = bind(step.eqn, operands)
  pairs = zip(step.outs, step.eqn.outvars, moved, strict=True)
  return {slot: each for slot, var, each in pairs if is_inexact(var)}


def _none_of(x: Array) -> Array:
  """Returns the number of no step for each element: on the devices that an array is on."""
  return jnp.where(not_finite(x), jnp.asarray(NONE, jnp.int32), NONE)


BEFORE = 10
"""How many operations before the one that broke are shown."""


class Seen(NamedTuple):
  """What was seen, of all values that are looked at in a row."""

  hit: Array  # whether the step was met in its iteration
  # float32 of shape (values, 3): the least and the largest absolute value of those that are
  # finite, and the value at the first element that broke.
  sizes: Array
  counts: Array  # int32 of shape (values, 2): how many are inf, and how many NaN
  place: Array  # int32, the first element that broke, counted along the last axis first
  broken: Array  # int32, how many did


class CaptureProbe(Observer):
  """Looks at the operands and results of one step, and at the results of those before it."""

  # The device is that on which it broke, -1 outside of a `shard_map`.

  def __init__(self, top: Body, number: int, iterations: Sequence[int], device: int) -> None:
    self.iterations, self.device = iterations, device
    inside, self.step = next(
      (body, step) for body in top.every_body() for step in body.steps if step.number == number
    )
    earlier = (s for s in inside.steps if s.number < number and not s.bodies)
    self.before = [s for s in earlier if any(map(is_inexact, s.eqn.outvars[:1]))][-BEFORE:]
    self.positions = tuple(i for i, v in enumerate(self.step.eqn.invars) if is_inexact(v))
    self.result = next(i for i, v in enumerate(self.step.eqn.outvars) if is_inexact(v))

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.indices, self.rows = around.indices, list[tuple[Array, Array]]()

  def nothing(self) -> Seen:
    zero, rows = jnp.zeros((), jnp.int32), len(self.before) + len(self.positions) + 2
    sizes, counts = jnp.zeros((rows, 3), jnp.float32), jnp.zeros((rows, 2), jnp.int32)
    return Seen(jnp.asarray(False), sizes, counts, zero, zero)

  def merge(self, one: Seen, other: Seen) -> Seen:
    """Returns that in which something was seen."""
    return jax.tree.map(lambda a, b: jnp.where(one.hit, a, b), one, other)

  def of_devices(self, seen: Seen) -> Seen:
    """Returns what the device saw on which the step broke."""
    return jax.tree.map(lambda x: x[max(self.device, 0)], seen)

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    if step in self.before:
      self.rows.append(row_of(outs[0]))
    if step is self.step:
      self.seen = self._captured(ins, outs)

  def _captured(self, ins: Sequence[Any], outs: Sequence[Array]) -> Seen:
    result = outs[self.result]
    mask = births(self.step, ins, outs)[self.step.outs[self.result]]
    # By reductions, which sharded arrays take as well: they may not be reshaped.
    places = jnp.arange(result.size, dtype=jnp.int32).reshape(result.shape)
    index = jnp.min(jnp.where(mask, places, NONE), initial=NONE)
    operands = [jnp.asarray(ins[position]) for position in self.positions]
    in_float32 = None
    if any(map(is_low, (*operands, result))):
      in_float32 = results_in_float32(self.step.eqn, [*map(to_float32, ins)])
    for x in (*operands, result, result if in_float32 is None else in_float32[self.result]):
      number = jnp.real(x).astype(jnp.float32)
      if not is_elementwise(self.step):
        number = jnp.nan
      elif x.size == 1:
        number = jnp.reshape(number, ())
      else:
        number = jnp.sum(jnp.where(places == index, number, 0))
      self.rows.append(row_of(x, number))
    sizes, counts = (jnp.stack(each) for each in zip(*self.rows, strict=True))
    hit = jnp.asarray(True)
    for now, then in zip(self.indices, self.iterations, strict=False):
      hit = hit & (now == then)
    return Seen(hit, sizes, counts, index.astype(jnp.int32), jnp.sum(mask, dtype=jnp.int32))


def row_of(x: Array, value: Array | float = 0.0) -> tuple[Array, Array]:
  """Returns a row of `Seen.sizes` and one of `Seen.counts`, given the value that broke."""
  size = jnp.abs(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x).astype(jnp.float32)
  bad, nan = not_finite(x), is_nan(x)
  least = jnp.min(jnp.where(bad, jnp.inf, size), initial=jnp.inf)
  most = jnp.max(jnp.where(bad, -1.0, size), initial=-1.0)
  counts = jnp.sum(bad & ~nan, dtype=jnp.int32), jnp.sum(nan, dtype=jnp.int32)
  return jnp.stack([least, most, jnp.float32(value)]), jnp.stack(counts)
