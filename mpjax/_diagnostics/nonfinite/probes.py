"""What `find_nonfinite` looks at while a function runs, in three runs: each needs the one before.

`FlagProbe` looks at a small set of values whose finiteness implies that all values are finite. If x
is inf or NaN, so is x + 1: where the sum is finite, x was. In a training step a tenth of the values
is enough. Only if one of these is not finite, `FirstProbe` looks at the steps that lead to it, for
the first whose result is not finite though its operands are, and `CaptureProbe` at the numbers of
that one.

An inf counts only if something reads it, other than a comparison, `is_finite`, or a `where` that
discards it: of `jnp.where(x > 0, x * jnp.log(x), 0)` nobody sees log(0). `Uses` says which values
may be discarded. Which of their elements are is known while the function runs: the number of the
step that broke follows each element of them, until something computes with it.
"""

import enum
import functools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import primitives as p

from mpjax._core.types import Array, NumpyArray
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.in_float32 import is_low, results_in_float32, to_float32
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.reader import Atom, aval_of, shape_of
from mpjax._jaxprs.runner import Around, Observer
from mpjax._jaxprs.steps import Body, Step

Row: TypeAlias = dict[str, Array]
"""What is known of an array: fields of `Range`."""

Captured: TypeAlias = tuple[Array, Array, list[Row]]

_PASS_ON = frozenset(
  (
    *(p.add_p, p.sub_p, p.mul_p, p.neg_p, p.abs_p, p.add_jaxvals_p, p.sqrt_p, p.square_p),
    *(p.log_p, p.log1p_p, p.sin_p, p.cos_p, p.reduce_sum_p, p.reduce_prod_p, p.cumsum_p),
    *(p.dot_general_p, p.reshape_p, p.transpose_p, p.squeeze_p, p.broadcast_in_dim_p, p.rev_p),
    *(p.concatenate_p, p.copy_p),
  )
)
"""Primitives whose result is not finite where an operand is not: 0 * inf is NaN."""


def is_inexact(atom: Atom) -> bool:
  """Whether a value holds floating or complex numbers."""
  # A reference to memory that is written in place has a dtype too, and is no array.
  array = isinstance(atom.aval, ShapedArray)
  return array and jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def is_cast(step: Step) -> bool:
  """Whether a step casts floating numbers to floating numbers."""
  casts = step.eqn.primitive is p.convert_element_type_p
  return casts and is_inexact(step.eqn.invars[0]) and is_inexact(step.eqn.outvars[0])


def is_move(step: Step) -> bool:
  """Whether a step only moves numbers: one that can do it to numbers of another type too."""
  # A gather may fill in numbers of its own, and a `where` chooses.
  fills = step.eqn.primitive in (p.gather_p, p.select_n_p)
  return facts_of(step.eqn).moves and not fills


def _is_elementwise(step: Step) -> bool:
  """Whether each element of a result depends on the elements at its own position alone."""
  return facts_of(step.eqn).elementwise or is_cast(step)


def _chooses(step: Step) -> bool:
  """Whether a step takes some numbers and discards others: what `jnp.where` becomes, and so on."""
  return step.eqn.primitive in (p.select_n_p, p.max_p, p.min_p)


def _is_backward_factor(step: Step) -> bool:
  """Whether a step multiplies in the backward pass, where a factor that is inf may meet a 0."""
  return step.eqn.primitive is p.mul_p and step.location.direction == "backward"


def _sums(step: Step) -> bool:
  """Whether a step adds up elements of an operand."""
  adds = step.eqn.primitive in (p.reduce_sum_p, p.cumsum_p)
  return adds or facts_of(step.eqn).flops is not None


def _asks(step: Step) -> bool:
  """Whether a step asks if numbers are finite, or NaN, or something inside of it does."""
  same = step.eqn.primitive is p.ne_p and len(step.reads) == 2 and len({*step.reads}) == 1
  inside = (each for body in step.bodies for each in body.every_step())
  return same or step.eqn.primitive is p.is_finite_p or any(map(_asks, inside))


def can_break(step: Step) -> bool:
  """Whether a step may make an inf or a NaN of finite numbers, or a NaN of an inf."""
  eqn, facts = step.eqn, facts_of(step.eqn)
  if step.bodies or not any(map(is_inexact, eqn.outvars)):
    return False
  if eqn.primitive is p.gather_p:
    return "FILL" in str(eqn.params["mode"])
  if eqn.primitive is p.convert_element_type_p:
    old, new = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
    if old == np.bool_:
      return False
    largest = jnp.iinfo(old).max if jnp.issubdtype(old, jnp.integer) else jnp.finfo(old).max
    return float(largest) > float(jnp.finfo(new).max)
  return not (facts.exact or facts.moves or facts.bounded)


def not_finite(x: Array) -> Array:
  """Returns where elements are inf or NaN."""
  return jnp.logical_not(jnp.isfinite(_at_least_16_bits(x)))


def is_nan(x: Array) -> Array:
  """Returns where elements are NaN."""
  return jnp.isnan(_at_least_16_bits(x))


def _at_least_16_bits(x: Array) -> Array:
  return x.astype(jnp.float32) if x.dtype.itemsize < 2 else x


def births(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> dict[int, Array]:
  """Returns where each result broke, of those that can."""
  # An element broke if it is not finite and what it was computed from is, or if it is NaN and that
  # is not: -inf - -inf, and 0 * inf. Of what is not computed element by element, all operands
  # count. An inf that is added up is no mask: the sum broke, if nothing did before.
  if not can_break(step):
    return {}
  pairs = zip(ins, step.eqn.invars, strict=True)
  operands = [jnp.asarray(x) for x, v in pairs if is_inexact(v)]

  def reaching(flags: Iterable[Array]) -> Array:
    return functools.reduce(jnp.logical_or, (_reach(step, x) for x in flags), jnp.asarray(False))

  nan = reaching(map(is_nan, operands))
  bad = nan if _sums(step) else reaching(map(not_finite, operands))
  results = zip(step.outs, outs, step.eqn.outvars, strict=True)
  return {
    slot: (not_finite(out) & ~bad) | (is_nan(out) & ~nan)
    for slot, out, var in results
    if is_inexact(var)
  }


def _reach(step: Step, flags: Array) -> Array:
  """Returns for each element of the result, or for all at once, whether a flag reaches it."""
  axes = step.eqn.params.get("axes")
  if isinstance(axes, tuple) and {*axes} <= {*range(flags.ndim)}:
    by_row = jnp.any(flags, axis=axes)
    if by_row.shape == shape_of(step.eqn.outvars[0]):
      return by_row
  return flags if _is_elementwise(step) else jnp.any(flags)


class Use(enum.IntEnum):
  """What becomes of an inf in a value, given all that reads the value."""

  COUNTS = 0  # Something computes with it.
  # Nothing does but comparisons, what may discard it, and a multiplication of the backward pass: 0
  # tells there that the value did not count in the forward pass.
  COMPARED = 1
  # Nothing does but what may discard it, also if the value was computed from an inf: then a
  # comparison reads it, as in a training step that asks whether to skip.
  HIDDEN = 2


class Uses:
  """What becomes of the values of a function, those in its loops and branches included."""

  def __init__(self, top: Body) -> None:
    """Goes through all steps, and again from the last to the first."""
    bodies, steps = [*top.every_body()], [*top.every_step()]
    arguments = {slot for body in bodies for slot in body.inputs}  # moved and cast, too
    self.numbers: set[int] = set()  # that the code names, moved and cast
    self._asked: dict[int, set[tuple[int, ...] | None]] = {}
    for step in steps:
      moves = is_move(step) or step.eqn.primitive is p.convert_element_type_p
      if moves and step.ins and self.numbers.issuperset(step.reads):
        self.numbers.update(step.outs)
      if moves and arguments.issuperset(step.reads) and not can_break(step):
        arguments.update(step.outs)
      shapes = {shape for slot in step.reads for shape in self._asked.get(slot, ())}
      if shapes or _asks(step):
        for slot, v in zip(step.outs, step.eqn.outvars, strict=True):
          if not is_inexact(v):
            shape = None if step.bodies else getattr(v.aval, "shape", None)
            self._asked[slot] = shapes | {shape}
    outputs = {slot for body in bodies for slot in body.outputs if isinstance(slot, int)}
    self.returned = outputs.difference(*(step.reads for step in steps))  # that nothing else reads
    # Whose elements are added up, moved, cast or scaled before at most: a mask's are not.
    self.summed: set[int] = set()
    # To return an argument computes nothing.
    self._uses = dict.fromkeys(outputs - arguments, Use.COUNTS)
    for step in reversed(steps):
      scales = step.eqn.primitive in (p.mul_p, p.div_p) and len(step.reads) == 1
      passes = is_move(step) or is_cast(step) or scales
      if _sums(step) or (passes and not self.summed.isdisjoint(step.outs)):
        self.summed.update(step.reads)
      use = self._read(step)
      self._uses.update((slot, min(self.of(slot), use)) for slot in step.reads)

  def of(self, slot: int) -> Use:
    """Returns what becomes of a value."""
    return self._uses.get(slot, Use.HIDDEN)

  def _read(self, step: Step) -> Use:
    """Returns what becomes of an inf in an operand of a step."""
    if step.bodies:
      return Use.COUNTS
    if facts_of(step.eqn).tests:
      return Use.COMPARED
    if _chooses(step):
      return Use.COUNTS if self._is_skip(step) else Use.HIDDEN
    results = min(map(self.of, step.outs), default=Use.HIDDEN)
    if is_move(step) or is_cast(step):
      return results
    if _is_elementwise(step) and results is Use.HIDDEN:
      return Use.HIDDEN
    return Use.COMPARED if _is_backward_factor(step) else Use.COUNTS

  def _is_skip(self, step: Step) -> bool:
    """Whether a `where` discards since another value was not finite: a skipped step."""
    # To ask for each element of a value by itself is to mask it.
    predicate, shape = step.ins[0], shape_of(step.eqn.outvars[0])
    answers = self._asked.get(predicate, set()) if isinstance(predicate, int) else set()
    return any(answer != shape for answer in answers)


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

  def __init__(self, top: Body, sentinels: Mapping[int, int]) -> None:
    self.top = top
    self.numbers = {slot: i for i, slot in enumerate(dict.fromkeys(sentinels.values()))}

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.flags = dict[int, Array]()
    if body is self.top:
      self._flag((*body.inputs, *body.consts), (*values, *body.consts.values()))

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


class FirstProbe(Observer):
  """Looks, among the steps and arguments `only`, for the first whose result is not finite.

  It returns in int32 the number of the step, negative for arguments and constants, and `NONE` if no
  value broke; the iterations of the loops inside of one another, -1 where there is no loop; and the
  position in the mesh of a `shard_map`, -1 outside of one.
  """

  def __init__(self, top: Body, uses: Uses, only: Collection[int]) -> None:
    self.top, self.uses, self.only = top, uses, only

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.indices, self.followed = around.indices, dict[int, Array]()
    self.broken = list[Array]()  # the first step that broke, of each value that counts
    if body is not self.top:
      return
    # An argument that holds a NaN or +inf is at fault; -inf may be a mask, if it is not added up,
    # and so may each inf in a constant.
    pairs = [*zip(body.inputs, values, strict=True), *body.consts.items()]
    for number, (slot, x) in enumerate(pairs, -len(pairs)):
      if number in self.only:
        x = jnp.asarray(x)
        masks = (jnp.real(x) < 0) & (slot not in self.uses.summed) | (slot in body.consts)
        self._broke(slot, number, is_nan(x) | (not_finite(x) & ~masks))

  def nothing(self) -> Array:
    return jnp.asarray([NONE] + [-1] * (self.top.depth + 1), jnp.int32)

  def merge(self, one: Array, other: Array) -> Array:
    """Returns what ran first."""
    return jnp.where(one[0] < NONE, one, other)

  def of_devices(self, seen: Array) -> Array:
    """Returns what the device saw on which the first step broke."""
    device = jnp.argmin(seen[:, 0]).astype(jnp.int32)
    return jnp.where(jnp.any(seen[:, 0] < NONE), seen[device].at[-1].set(device), self.nothing())

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._follow(step, ins, outs)
    if step.number in self.only and not self.uses.numbers.issuperset(step.outs):
      for slot, mask in births(step, ins, outs).items():
        self._broke(slot, step.number, mask)

  def all_seen(self) -> Array:
    if not self.broken:
      return self.seen
    number = functools.reduce(jnp.minimum, self.broken)
    own = jnp.stack([number, *self.indices, *self.nothing()[len(self.indices) + 1 :]])
    return jnp.where(number <= self.seen[0], own, self.seen)

  def _broke(self, slot: int, number: int, mask: Array) -> None:
    """Takes which elements of a value broke."""
    numbers = jnp.where(mask, jnp.asarray(number, jnp.int32), NONE)
    if self.uses.of(slot) is Use.COUNTS:
      self.broken.append(jnp.min(numbers, initial=NONE))
    else:
      self.followed[slot] = jnp.minimum(self.followed.get(slot, NONE), numbers)

  def _follow(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    """Takes for each element of the results which step broke what it comes from."""
    numbers = [self.followed.get(slot) if isinstance(slot, int) else None for slot in step.ins]
    if all(each is None for each in numbers) or facts_of(step.eqn).tests:
      return
    if _is_backward_factor(step) and self.uses.of(step.outs[0]) is not Use.HIDDEN:
      # A factor counts where it is NaN, or meets something else than 0. 0 * inf is NaN, and that it
      # is 0 tells that the value did not count in the forward pass: there, the multiplication is
      # what broke. 0 * NaN breaks nothing that was not broken before.
      both = [(jnp.asarray(x), jnp.asarray(other)) for x, other in (ins, ins[::-1])]
      counts = [not_finite(x) & ~not_finite(y) & (is_nan(x) | (y != 0)) for x, y in both]
      pairs = zip(numbers, counts, strict=True)
      numbers = [None if each is None else jnp.where(c, each, NONE) for each, c in pairs]
    if _is_elementwise(step):
      # What a maximum discards is gone, where its result is finite.
      first = functools.reduce(jnp.minimum, [each for each in numbers if each is not None])
      carried = [jnp.where(not_finite(outs[0]) | (not _chooses(step)), first, NONE)]
    else:
      operands = [
        number if number is not None else _none_of(jnp.asarray(x)) if is_inexact(v) else x
        for number, x, v in zip(numbers, ins, step.eqn.invars, strict=True)
      ]
      carried = bind(step.eqn, operands)
    passes = is_move(step) or is_cast(step) or _chooses(step)
    for slot, v, each in zip(step.outs, step.eqn.outvars, carried, strict=True):
      if self.uses.of(slot) > (Use.COUNTS if passes else Use.COMPARED):
        self.followed[slot] = each
      elif is_inexact(v):
        if slot in self.uses.returned:  # An argument that is returned as it came.
          each = jnp.where(each < 0, NONE, each)
        self.broken.append(jnp.min(each, initial=NONE))


def _none_of(x: Array) -> Array:
  """Returns the number of no step for each element: on the devices that an array is on."""
  return jnp.where(not_finite(x), jnp.asarray(NONE, jnp.int32), NONE)


BEFORE = 10
"""How many operations before the one that broke are shown."""


class CaptureProbe(Observer):
  """Looks at the operands and results of one step, and at the results of those before it.

  It returns whether the step was met in its iteration, the position of the first element that
  broke, counted along the last axis first, and a row of numbers for each value.
  """

  # The device is that on which it broke, -1 outside of a `shard_map`.

  def __init__(self, top: Body, number: int, iterations: Sequence[int], device: int) -> None:
    self.iterations, self.device = iterations, device
    inside, self.step = next(
      (body, step) for body in top.every_body() for step in body.steps if step.number == number
    )
    earlier = (s for s in inside.steps if s.number < number and not s.bodies)
    self.before = [s for s in earlier if any(map(is_inexact, s.eqn.outvars[:1]))][-BEFORE:]
    self.positions = [i for i, v in enumerate(self.step.eqn.invars) if is_inexact(v)]
    self.result = next(i for i, v in enumerate(self.step.eqn.outvars) if is_inexact(v))

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.indices, self.rows = around.indices, list[Row]()

  def nothing(self) -> Captured:
    rows = [row_of(jnp.zeros(()))] * (len(self.before) + len(self.positions) + 2)
    return jnp.asarray(False), jnp.zeros((), jnp.int32), rows

  def merge(self, one: Captured, other: Captured) -> Captured:
    """Returns that in which something was seen."""
    return jax.tree.map(lambda a, b: jnp.where(one[0], a, b), one, other)

  def of_devices(self, seen: Captured) -> Captured:
    """Returns what the device saw on which the step broke."""
    return jax.tree.map(lambda x: x[max(self.device, 0)], seen)

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    if step in self.before:
      self.rows.append(row_of(outs[0]))
    if step is not self.step:
      return
    result = outs[self.result]
    mask = births(step, ins, outs)[step.outs[self.result]]
    # By reductions, which sharded arrays take as well: they may not be reshaped.
    places = jnp.arange(result.size, dtype=jnp.int32).reshape(result.shape)
    first = jnp.min(jnp.where(mask, places, NONE), initial=NONE)
    values = [*(jnp.asarray(ins[position]) for position in self.positions), result, result]
    if any(map(is_low, values)):
      wide = results_in_float32(step.eqn, [*map(to_float32, ins)])
      values[-1] = result if wide is None else wide[self.result]
    for x in values:
      number = jnp.real(x).astype(jnp.float32)
      if not _is_elementwise(step):
        number = jnp.nan
      elif x.size == 1:
        number = jnp.reshape(number, ())
      else:
        number = jnp.sum(jnp.where(places == first, number, 0))
      self.rows.append(row_of(x, number))
    hit = jnp.asarray(True)
    for now, then in zip(self.indices, self.iterations, strict=False):
      hit = hit & (now == then)
    self.seen = hit, first.astype(jnp.int32), self.rows


def row_of(x: Array, value: Array | float = math.nan) -> Row:
  """Returns the numbers of an array, given that at the element which broke."""
  bad, nan = not_finite(x), is_nan(x)
  size = jnp.abs(_at_least_16_bits(x)).astype(jnp.float32)
  nothing = jnp.where(jnp.all(bad), jnp.nan, 0.0).astype(jnp.float32)
  return {
    "least": nothing + jnp.min(jnp.where(bad, jnp.inf, size), initial=jnp.inf),
    "most": nothing + jnp.max(jnp.where(bad, 0.0, size), initial=0.0),
    "inf": jnp.sum(bad & ~nan, dtype=jnp.int32),
    "nan": jnp.sum(nan, dtype=jnp.int32),
    "value": jnp.asarray(value, jnp.float32),
  }
