"""What `find_nonfinite` looks at while a function runs, in three runs: each needs the one before.

Flags: a small set of values whose finiteness implies that all values are finite. If x is inf or
NaN, so is x + 1: where the sum is finite, x was. So a value needs no look if a step that passes on
what is not finite reads it. In a training step a tenth of the values is enough, and only if one of
these is not finite the steps are looked at which lead to it: for the first whose result is not
finite though its operands are, and then for what the numbers were where it broke.
"""

import copy
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from mpjax._core.types import Array, NumpyArray
from mpjax._diagnostics.nonfinite.scales import Rescale
from mpjax._diagnostics.nonfinite.uses import (
  Uses,
  births,
  can_break,
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


def suspects(top: Body, sentinels: Sentinels, flags: NumpyArray) -> Iterator[list[int]]:
  """Yields numbers of steps that may not be finite, of one step of the function after another."""
  # Arguments and constants have negative numbers.

  def is_bad(slot: int) -> bool:
    return slot in sentinels.cover and bool(flags[sentinels.cover[slot]])

  slots = (*top.inputs, *top.consts)
  yield [number for number, slot in enumerate(slots, -len(slots)) if is_bad(slot)]
  for step in top.steps:
    inside = [each for body in step.bodies for each in body.every_step()]
    yield [s.number for s in (step, *inside) if can_break(s) and any(map(is_bad, s.outs))]


class FlagProbe(Observer):
  """Looks which of the sentinels are not finite, in any iteration and on any device."""

  def __init__(self, top: Body, sentinels: Sentinels, rescale: Rescale) -> None:
    self.top, self.sentinels, self.rescale = top, sentinels, rescale
    self.flags, self.seen = self.nothing(), dict[int, Array]()

  def of(self, body: Body, values: Sequence[Any], around: Around) -> "FlagProbe":
    probe = FlagProbe(self.top, self.sentinels, self.rescale)
    if body is self.top:
      probe._look((*body.inputs, *body.consts), (*values, *body.consts.values()))
    return probe

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    outs = bind(step.eqn, self.rescale(step, ins))
    self._look(step.outs, outs)
    return outs

  def _look(self, slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, x in zip(slots, values, strict=True):
      number = self.sentinels.numbers.get(slot)
      if number is not None and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        self.seen[number] = jnp.any(not_finite(jnp.asarray(x)))

  def inside(self, seen: Array) -> None:
    self.flags = self.flags | seen

  def all_seen(self) -> Array:
    if not self.seen:
      return self.flags
    return self.flags.at[jnp.asarray([*self.seen])].set(jnp.stack([*self.seen.values()]))

  def nothing(self) -> Array:
    return jnp.zeros(len(self.sentinels.numbers), bool)

  def merge(self, one: Array, other: Array) -> Array:
    return one | other

  def of_devices(self, seen: Array) -> Array:
    return jnp.any(seen, axis=0)


NONE = 2**31 - 1
"""The number of no step, or position of no element: it comes after all others."""

_TOGETHER = 16
"""How many masks of one shape are reduced at once."""


class First(NamedTuple):
  """Where the first value broke, in int32."""

  number: Array  # that of the step; negative for arguments and constants, `NONE` if no value did
  iterations: Array  # of the loops inside of one another, -1 where there is no loop
  device: Array  # the position in the mesh of a `shard_map`; -1 outside of one


class FirstProbe(Observer):
  """Looks, among the steps and arguments `only`, for the first whose result is not finite."""

  # Of a value that a `where` may discard, the number of the step that broke follows each element,
  # until something computes with it.

  def __init__(
    self,
    top: Body,
    uses: Uses,
    only: Collection[int],
    rescale: Rescale,
    indices: tuple[Array, ...] = (),
  ) -> None:
    self.top, self.uses, self.only, self.rescale = top, uses, only, rescale
    self.indices = indices
    self.followed: dict[int, Array] = {}
    self.factors: dict[int, tuple[int, Array]] = {}
    self.masks: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
    self.broken: list[Array] = []
    self.inner: list[First] = []

  def of(self, body: Body, values: Sequence[Any], around: Around) -> "FirstProbe":
    probe = FirstProbe(self.top, self.uses, self.only, self.rescale, around.indices)
    if body is self.top:
      probe._look_at_arguments(body, values)
    return probe

  def nothing(self) -> First:
    return self._at(jnp.asarray(NONE, jnp.int32), ())

  def _at(self, number: Array, indices: tuple[Array, ...]) -> First:
    """Returns the state of a step of a body."""
    none = jnp.asarray(-1, jnp.int32)
    iterations = [*indices, *[none] * (self.top.depth - len(indices))]
    return First(number, jnp.stack(iterations) if iterations else jnp.zeros(0, jnp.int32), none)

  def merge(self, one: First, other: First) -> First:
    """Returns the state of what ran first."""
    return jax.tree.map(lambda a, b: jnp.where(one.number < NONE, a, b), one, other)

  def of_devices(self, seen: First) -> First:
    """Returns the state of the device on which the first step broke."""
    device = jnp.argmin(seen.number)
    first = First(*(each[device] for each in seen))
    return first._replace(device=jnp.where(first.number < NONE, device.astype(jnp.int32), -1))

  def _look_at_arguments(self, body: Body, values: Sequence[Any]) -> None:
    """Looks at arguments: one that holds a NaN or +inf is at fault, -inf may be a mask."""
    pairs = [*zip(body.inputs, values, strict=True), *body.consts.items()]
    for number, (slot, x) in enumerate(pairs, -len(pairs)):
      x = jnp.asarray(x) if number in self.only else x
      if number not in self.only or not jnp.issubdtype(x.dtype, jnp.inexact):
        continue
      # What is added up is no mask.
      may_be_mask = (jnp.real(x) < 0) & (slot not in self.uses.summed)
      inf_counts = slot not in body.consts
      self._broke(slot, number, is_nan(x) | (inf_counts & not_finite(x) & ~may_be_mask))

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    ins = self.rescale(step, ins)
    outs = bind(step.eqn, ins)
    self._multiply(step, ins)
    self._follow(step, ins, outs)
    if step.number in self.only and not self.uses.constants.issuperset(step.outs):
      for slot, mask in zip(step.outs, births(step, ins, outs), strict=True):
        if mask is not None:
          self._broke(slot, step.number, mask)
    return outs

  def inside(self, seen: First) -> None:
    self.inner.append(seen)

  def all_seen(self) -> First:
    for shape in list(self.masks):
      self._reduce(shape)
    state = self.nothing()
    if self.broken:
      state = self._at(functools.reduce(jnp.minimum, self.broken), self.indices)
    for each in self.inner:
      earlier = state.number <= each.number
      state = jax.tree.map(lambda a, b, earlier=earlier: jnp.where(earlier, a, b), state, each)
    return state

  def _broke(self, slot: int, number: int, mask: Array) -> None:
    """Takes which elements of a value broke."""
    numbers = jnp.where(mask, jnp.asarray(number, jnp.int32), NONE)
    if slot in self.uses.discarded:
      old = self.followed.get(slot)
      self.followed[slot] = numbers if old is None else jnp.minimum(old, numbers)
    elif slot in self.uses.factors:
      self.factors[slot] = (number, jnp.any(mask))
      if slot in self.uses.derived:
        self.followed[slot] = numbers
    else:
      self._mask(number, mask)

  def _mask(self, number: int, mask: Array) -> None:
    """Takes which elements broke that something computes with."""
    # To reduce one mask after the other would be as many kernels as steps: those of one shape are
    # put together first.
    masks = self.masks.setdefault(mask.shape, [])
    masks.append((number, mask))
    if len(masks) == _TOGETHER:
      self._reduce(mask.shape)

  def _reduce(self, shape: tuple[int, ...]) -> None:
    numbers = jnp.full(shape, NONE, jnp.int32)
    for number, mask in reversed(self.masks.pop(shape)):
      numbers = jnp.where(mask, jnp.asarray(number, jnp.int32), numbers)
    self.broken.append(jnp.min(numbers, initial=NONE))

  def _follow(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    numbers = [self.followed.get(slot) if isinstance(slot, int) else None for slot in step.ins]
    if all(each is None for each in numbers) or facts_of(step.eqn).tests:
      return
    for slot, carried in _carried(step, ins, numbers, outs).items():
      if slot in self.uses.derived or (
        slot in self.uses.discarded and (is_move(step) or is_cast(step) or is_select(step))
      ):
        self.followed[slot] = carried
      else:
        if slot in self.uses.returned:  # An argument that is returned as it came.
          carried = jnp.where(carried < 0, NONE, carried)
        self.broken.append(jnp.min(carried, initial=NONE))

  def _multiply(self, step: Step, ins: Sequence[Any]) -> None:
    """A factor of the backward pass counts where it is NaN, or meets something else than 0."""
    # 0 * inf is NaN, and that it is 0 tells that the value did not count in the forward pass:
    # there, the multiplication is what broke. 0 * NaN breaks nothing that was not broken before.
    for position, slot in enumerate(step.ins):
      if isinstance(slot, Literal) or slot not in self.factors:
        continue
      number, broke = self.factors[slot]
      if is_move(step) or is_cast(step):
        self.factors.update(dict.fromkeys(step.outs, (number, broke)))
      elif len(ins) == 2 and is_elementwise(step) and step.location.direction == "backward":
        other = jnp.asarray(ins[1 - position])
        counts = is_nan(ins[position]) | (other != 0)
        self._mask(number, broke & not_finite(ins[position]) & ~not_finite(other) & counts)


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
    self.iterations, self.device, self.indices = iterations, device, tuple[Array, ...]()
    inside, self.step = next(
      (body, step) for body in top.every_body() for step in body.steps if step.number == number
    )
    earlier = (s for s in inside.steps if s.number < number and not s.bodies)
    self.before = [s for s in earlier if any(map(is_inexact, s.eqn.outvars[:1]))][-BEFORE:]
    self.positions = tuple(i for i, v in enumerate(self.step.eqn.invars) if is_inexact(v))
    self.result = next(i for i, v in enumerate(self.step.eqn.outvars) if is_inexact(v))
    self.rows, self.seen = list[tuple[Array, Array]](), self.nothing()

  def of(self, body: Body, values: Sequence[Any], around: Around) -> "CaptureProbe":
    probe = copy.copy(self)
    probe.indices, probe.rows, probe.seen = around.indices, [], self.nothing()
    return probe

  def nothing(self) -> Seen:
    zero, rows = jnp.zeros((), jnp.int32), len(self.before) + len(self.positions) + 2
    sizes, counts = jnp.zeros((rows, 3), jnp.float32), jnp.zeros((rows, 2), jnp.int32)
    return Seen(jnp.asarray(False), sizes, counts, zero, zero)

  def merge(self, one: Seen, other: Seen) -> Seen:
    """Returns the state in which something was seen."""
    return jax.tree.map(lambda a, b: jnp.where(one.hit, a, b), one, other)

  def of_devices(self, seen: Seen) -> Seen:
    """Returns what the device saw on which the step broke."""
    return jax.tree.map(lambda x: x[max(self.device, 0)], seen)

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Array]:
    outs = bind(step.eqn, ins)
    if step in self.before:
      self.rows.append(row_of(outs[0], jnp.zeros((), jnp.float32)))
    if step is self.step:
      self.seen = self._captured(step, ins, outs)
    return outs

  def inside(self, seen: Seen) -> None:
    self.seen = self.merge(self.seen, seen)

  def all_seen(self) -> Seen:
    return self.seen

  def _captured(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> Seen:
    result = outs[self.result]
    mask = births(step, ins, outs)[self.result]
    mask = not_finite(result) if mask is None else jnp.broadcast_to(mask, result.shape)
    # By reductions, which sharded arrays take as well: they may not be reshaped.
    places = jnp.arange(result.size, dtype=jnp.int32).reshape(result.shape)
    index = jnp.min(jnp.where(mask, places, NONE), initial=NONE)

    def value(x: Array) -> Array:
      if not is_elementwise(step):
        return jnp.full((), jnp.nan, jnp.float32)
      if jnp.size(x) == 1:
        return _as_float32(jnp.reshape(x, ()))
      return jnp.sum(jnp.where(places == index, _as_float32(x), 0))

    operands = [jnp.asarray(ins[position]) for position in self.positions]
    wide = None
    if any(map(is_low, (*operands, result))):
      wide = results_in_float32(step.eqn, [*map(to_float32, ins)])
    wide = result if wide is None else wide[self.result]
    self.rows += [row_of(x, value(x)) for x in (*operands, result, wide)]
    sizes, counts = (jnp.stack(each) for each in zip(*self.rows, strict=True))
    hit = jnp.asarray(True)
    for now, then in zip(self.indices, self.iterations, strict=False):
      hit = hit & (now == then)
    count = jnp.sum(mask, dtype=jnp.int32)
    return Seen(hit, sizes, counts, index.astype(jnp.int32), count)


def _as_float32(x: Array) -> Array:
  return jnp.real(x).astype(jnp.float32)


def row_of(x: Array, value: Array) -> tuple[Array, Array]:
  size = jnp.abs(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x).astype(jnp.float32)
  bad, nan = not_finite(x), is_nan(x)
  least = jnp.min(jnp.where(bad, jnp.inf, size), initial=jnp.inf)
  most = jnp.max(jnp.where(bad, -1.0, size), initial=-1.0)
  inf = jnp.sum(bad & ~nan, dtype=jnp.int32)
  return jnp.stack([least, most, value]), jnp.stack([inf, jnp.sum(nan, dtype=jnp.int32)])
