"""What `find_nonfinite` looks at while a function runs.

`FlagProbe` looks at a small set of values whose finiteness implies that all values are finite: if x
is inf or NaN, so is x + 1. Only if one is not, `FirstProbe` looks at the steps that lead to it, for
the first whose result is not finite though its operands are. A `where` may discard that: the number
of the step that broke follows each element, until something computes with it (`Uses`).
"""

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import primitives as p

from mpjax._core.types import Array, NumpyArray
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.in_float32 import is_low, results_in_float32, to_float32
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import Atom, aval_of, shape_of
from mpjax._jaxpr.runner import Around, Observer
from mpjax._jaxpr.steps import Body, Step

_PASS_ON = frozenset(
  (
    *(p.add_p, p.sub_p, p.mul_p, p.neg_p, p.abs_p, p.add_jaxvals_p, p.sqrt_p, p.square_p),
    *(p.log_p, p.log1p_p, p.sin_p, p.cos_p, p.reduce_sum_p, p.reduce_prod_p, p.cumsum_p),
    *(p.dot_general_p, p.reshape_p, p.transpose_p, p.squeeze_p, p.broadcast_in_dim_p, p.rev_p),
    *(p.concatenate_p, p.copy_p),
  )
)
"""Primitives whose result is not finite where an operand is not: 0 * inf is NaN."""

_CLOSELY = 64
"""How many steps are looked at closely in the first run: what comes after is not compiled."""

_ELEMENTWISE = ("each", "factor", "casts")

NONE = 2**31 - 1
"""The number of no step, or position of no element: it comes after all others."""


def is_inexact(atom: Atom) -> bool:
  """Whether a value holds floating or complex numbers."""
  # A reference to memory that is written in place has a dtype too, and is no array.
  array = isinstance(atom.aval, ShapedArray)
  return array and jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def kind_of(step: Step) -> str:
  """Returns what a step does: it "enters" inner lists, "asks" if numbers are finite, and so on."""
  # It computes "each" element from those at its own position, or "all" from others too. A "factor"
  # is one of a multiplication in the backward pass, where an inf may meet a 0.
  eqn, facts = step.eqn, facts_of(step.eqn)
  if step.bodies:
    return "enters"
  same = eqn.primitive is p.ne_p and len(step.reads) == 2 and len({*step.reads}) == 1
  if same or eqn.primitive is p.is_finite_p:
    return "asks"
  if facts.tests:
    return "tests"
  if eqn.primitive in (p.select_n_p, p.max_p, p.min_p):
    return "chooses"
  if eqn.primitive is p.convert_element_type_p:
    return "casts" if is_inexact(eqn.invars[0]) and is_inexact(eqn.outvars[0]) else "all"
  # A gather may fill in numbers of its own.
  if facts.moves and eqn.primitive is not p.gather_p:
    return "moves"
  if eqn.primitive is p.mul_p and step.location.direction == "backward":
    return "factor"
  if eqn.primitive in (p.reduce_sum_p, p.cumsum_p) or facts.flops is not None:
    return "sums"
  return "each" if facts.elementwise else "all"


def can_break(step: Step) -> bool:
  """Whether a step may make an inf or a NaN of finite numbers, or a NaN of an inf."""
  eqn, facts = step.eqn, facts_of(step.eqn)
  if step.bodies or not any(map(is_inexact, eqn.outvars)):
    return False
  if eqn.primitive is p.gather_p:
    return "FILL" in str(eqn.params["mode"])
  if eqn.primitive is p.convert_element_type_p:
    return not np.can_cast(aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype)
  return not (facts.exact or facts.moves or facts.bounded)


def births(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> dict[int, Array]:
  """Returns where each result broke, of those that can."""
  # An element broke if it is not finite and what it was computed from is, or if it is NaN and that
  # is not: -inf - -inf, and 0 * inf. Of what is not computed element by element, all operands
  # count. An inf that is added up is no mask: the sum broke, if nothing did before.
  if not can_break(step):
    return {}
  nan = bad = jnp.asarray(False)
  for x, v in zip(ins, step.eqn.invars, strict=True):
    if is_inexact(v):
      nan = nan | _reach(step, jnp.isnan(jnp.asarray(x)))
      bad = bad | _reach(step, ~jnp.isfinite(jnp.asarray(x)))
  bad = nan if kind_of(step) == "sums" else bad
  results = zip(step.outs, outs, step.eqn.outvars, strict=True)
  return {
    slot: (~jnp.isfinite(out) & ~bad) | (jnp.isnan(out) & ~nan)
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
  return flags if kind_of(step) in _ELEMENTWISE else jnp.any(flags)


class Uses:
  """How values of a function are used, those in its loops and branches included.

  Attributes:
    outputs: the values that a jaxpr returns.
    counted: those in which an inf counts: something computes with it. To return it does, unless it
      is an argument.
    compared: those that a comparison reads, or a multiplication of the backward pass: there an inf
      does no harm, but what is computed from one does.
    numbers: those that the code names, moved and cast.
    summed: those whose elements are added up, moved, cast or scaled before at most: no masks.
  """

  def __init__(self, top: Body) -> None:
    self.top, bodies, steps = top, [*top.every_body()], [*top.every_step()]
    self.outputs = {slot for body in bodies for slot in body.outputs if isinstance(slot, int)}
    inputs = {slot for body in bodies for slot in body.inputs}  # moved and cast, too
    self.counted, self.compared = set[int](), set[int]()
    self.numbers, self.summed = set[int](), set[int]()
    # Of what comes from asking whether values are finite, the shapes of the answers; None in loops.
    asked: dict[int, set[tuple[int, ...] | None]] = {}
    for step in steps:
      kind, shapes = kind_of(step), {x for slot in step.reads for x in asked.get(slot, ())}
      if kind in ("moves", "casts") and step.ins and self.numbers.issuperset(step.reads):
        self.numbers.update(step.outs)
      if kind in ("moves", "casts") and inputs.issuperset(step.reads) and not can_break(step):
        inputs.update(step.outs)
      inside = (each for body in step.bodies for each in body.every_step())
      if shapes or "asks" in (kind, *map(kind_of, inside)):
        for slot, v in zip(step.outs, step.eqn.outvars, strict=True):
          if not is_inexact(v):
            asked[slot] = shapes | {None if step.bodies else getattr(v.aval, "shape", None)}
      # To discard all elements of a value since others are not finite is to skip a step. To ask for
      # each element by itself is to mask it.
      answers = asked.get(step.reads[0], set()) if step.reads else set()
      skips = kind == "chooses" and any(x != shape_of(step.eqn.outvars[0]) for x in answers)
      if skips or kind in ("sums", "all", "enters"):
        self.counted.update(step.reads)
      elif kind in ("asks", "tests", "factor"):
        self.compared.update(step.reads)
    self.counted |= self.outputs - inputs
    for step in reversed(steps):
      kind, compares = kind_of(step), not self.compared.isdisjoint(step.outs)
      passes = kind in ("moves", "casts")
      if (passes or kind == "each") and not self.counted.isdisjoint(step.outs):
        self.counted.update(step.reads)
      elif compares and (passes or kind == "each"):
        (self.compared if passes else self.counted).update(step.reads)
      passes = passes or (step.eqn.primitive in (p.mul_p, p.div_p) and len(step.reads) == 1)
      if kind == "sums" or (passes and not self.summed.isdisjoint(step.outs)):
        self.summed.update(step.reads)


class FlagProbe(Observer):
  """Looks which of the sentinels are not finite, in any iteration and on any device."""

  def __init__(self, top: Body) -> None:
    self.top = top
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
    # Of each argument, and each result that may break, the value that is looked at.
    self.sentinels = {slot: ends.get(slot, slot) for slot in covered}
    self.numbers = {slot: i for i, slot in enumerate(dict.fromkeys(self.sentinels.values()))}

  def suspects(self, flags: NumpyArray) -> Iterator[frozenset[int]]:
    """Yields numbers of steps, negative ones of arguments, that may not be finite: few at first."""
    bad = {slot for slot, sentinel in self.sentinels.items() if flags[self.numbers[sentinel]]}
    slots = (*self.top.inputs, *self.top.consts)
    some, most = {n for n, slot in enumerate(slots, -len(slots)) if slot in bad}, _CLOSELY
    for step in self.top.steps:
      inside = [each for body in step.bodies for each in body.every_step()]
      some |= {s.number for s in (step, *inside) if can_break(s) and not bad.isdisjoint(s.outs)}
      if len(some) >= most:
        yield frozenset(some)
        some, most = set(), 4 * most
    if some:
      yield frozenset(some)

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.flags = dict[int, Array]()
    self._flag((*body.inputs, *body.consts), (*values, *body.consts.values()))

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._flag(step.outs, outs)

  def _flag(self, slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, x in zip(slots, values, strict=True):
      if slot in self.numbers and jnp.issubdtype(jnp.result_type(x), jnp.inexact):
        self.flags[self.numbers[slot]] = jnp.any(~jnp.isfinite(jnp.asarray(x)))

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


def _passes_on(step: Step, position: int) -> bool:
  """Whether the first result of a step is not finite where an operand is not."""
  passes = step.eqn.primitive in _PASS_ON or kind_of(step) == "casts"
  passes = passes or (step.eqn.primitive is p.div_p and position == 0)
  return passes and is_inexact(step.eqn.outvars[0]) and 0 not in shape_of(step.eqn.outvars[0])


Row: TypeAlias = dict[str, Array]
"""What is known of an array: fields of `Range`."""

Seen: TypeAlias = tuple[Array, Array, list[Row]]


class FirstProbe(Observer):
  """Looks, among the steps and arguments `only`, for the first whose result is not finite."""

  # It returns in int32 the number of that step, negative for arguments and constants, and `NONE` if
  # no value broke; the iterations of the loops inside of one another, -1 where there is no loop;
  # and the position in the mesh of a `shard_map`, -1 outside of one. If `shown` is the step, also
  # the position of the first element of it that broke, counted along the last axis first, and a row
  # for each operand, for the result and for the result in float32.

  def __init__(self, uses: Uses, only: Collection[int], shown: Step | None = None) -> None:
    self.top, self.uses, self.only, self.shown = uses.top, uses, only, shown

  def begin(self, body: Body, values: Sequence[Any], around: Around) -> None:
    self.indices, self.followed = around.indices, dict[int, Array]()
    self.broken = list[Array]()  # the first step that broke, of each value that counts
    _, self.place, self.rows = self.nothing()
    if body is not self.top:
      return
    # An argument that holds a NaN or +inf is at fault; -inf may be a mask, if it is not added up,
    # and so may each inf in a constant.
    pairs = [*zip(body.inputs, values, strict=True), *body.consts.items()]
    for number, (slot, x) in enumerate(pairs, -len(pairs)):
      if number in self.only:
        x = jnp.asarray(x)
        masks = (jnp.real(x) < 0) & (slot not in self.uses.summed) | (slot in body.consts)
        mask = jnp.isnan(x) | (~jnp.isfinite(x) & ~masks)
        self._take(slot, jnp.where(mask, jnp.asarray(number, jnp.int32), NONE))

  def nothing(self) -> Seen:
    first = jnp.asarray([NONE] + [-1] * (self.top.depth + 1), jnp.int32)
    count = 0 if self.shown is None else sum(map(is_inexact, self.shown.eqn.invars)) + 2
    return first, jnp.zeros((), jnp.int32), [row_of(jnp.zeros(()))] * count

  def merge(self, one: Seen, other: Seen) -> Seen:
    return jax.tree.map(lambda a, b: jnp.where(one[0][0] < NONE, a, b), one, other)

  def of_devices(self, seen: Seen) -> Seen:
    """Returns what the device saw on which the first step broke."""
    device = jnp.argmin(seen[0][:, 0]).astype(jnp.int32)
    first, place, rows = jax.tree.map(lambda x: x[device], seen)
    return jnp.where(first[0] < NONE, first.at[-1].set(device), first), place, rows

  def look(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    self._follow(step, ins, outs)
    if step.number in self.only and not self.uses.numbers.issuperset(step.outs):
      masks = births(step, ins, outs)
      for slot, mask in masks.items():
        self._take(slot, jnp.where(mask, jnp.asarray(step.number, jnp.int32), NONE))
      if step is self.shown:
        self._show(step, ins, outs, next(iter(masks.values())))

  def all_seen(self) -> Seen:
    if not self.broken:
      return self.seen
    number, nothing = functools.reduce(jnp.minimum, self.broken), self.nothing()[0]
    first = jnp.stack([number, *self.indices, *nothing[len(self.indices) + 1 :]])
    is_first, own = number <= self.seen[0][0], (first, self.place, self.rows)
    return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), own, self.seen)

  def _take(self, slot: int, numbers: Array, computed: bool = False) -> None:
    """Takes for each element of a value which step broke, or one that it was computed from."""
    if slot in self.uses.counted or (computed and slot in self.uses.compared):
      self.broken.append(jnp.min(numbers, initial=NONE))
    else:
      self.followed[slot] = jnp.minimum(self.followed.get(slot, NONE), numbers)

  def _follow(self, step: Step, ins: Sequence[Any], outs: Sequence[Array]) -> None:
    """Takes for each element of the results which step broke what it comes from."""
    kind = kind_of(step)
    numbers = [self.followed.get(slot) if isinstance(slot, int) else None for slot in step.ins]
    if kind in ("asks", "tests") or all(each is None for each in numbers):
      return
    if kind == "factor":
      # A factor counts where it is NaN, or meets something else than 0. 0 * inf is NaN, and that it
      # is 0 tells that the value did not count in the forward pass: there, the multiplication is
      # what broke. 0 * NaN breaks nothing that was not broken before.
      for i, (number, *factors) in enumerate(zip(numbers, ins, ins[::-1], strict=True)):
        x, y = map(jnp.asarray, factors)
        counts = ~jnp.isfinite(x) & jnp.isfinite(y) & (jnp.isnan(x) | (y != 0))
        numbers[i] = None if number is None else jnp.where(counts, number, NONE)
    if kind == "moves" or step.eqn.primitive is p.select_n_p:
      none, operands = jnp.asarray(NONE, jnp.int32), [*ins]
      for i, (number, v) in enumerate(zip(numbers, step.eqn.invars, strict=True)):
        if is_inexact(v):  # On the devices that it is on.
          empty = jnp.where(~jnp.isfinite(jnp.asarray(ins[i])), none, none)
          operands[i] = empty if number is None else number
      carried = bind(step.eqn, operands)
    else:
      # What a maximum discards is gone, where its result is finite.
      first = functools.reduce(jnp.minimum, [each for each in numbers if each is not None])
      carried = [jnp.where(~jnp.isfinite(outs[0]) | (kind != "chooses"), first, NONE)]
    for slot, v, number in zip(step.outs, step.eqn.outvars, carried, strict=True):
      if is_inexact(v):
        # An argument that is returned as it came breaks nothing.
        came = (number < 0) & (kind == "chooses" and slot in self.uses.outputs)
        self._take(slot, jnp.where(came, NONE, number), computed=kind == "factor")

  def _show(self, step: Step, ins: Sequence[Any], outs: Sequence[Array], mask: Array) -> None:
    """Takes the numbers of a step, of whose first result some elements broke."""
    position = next(i for i, v in enumerate(step.eqn.outvars) if is_inexact(v))
    pairs, result = zip(ins, step.eqn.invars, strict=True), outs[position]
    values = [*(jnp.asarray(x) for x, v in pairs if is_inexact(v)), result, result]
    if any(map(is_low, values)):
      wide = results_in_float32(step.eqn, [*map(to_float32, ins)])
      values[-1] = result if wide is None else wide[position]
    # By reductions, which sharded arrays take as well: they may not be reshaped.
    places = jnp.arange(result.size, dtype=jnp.int32).reshape(result.shape)
    self.place = jnp.min(jnp.where(mask, places, NONE), initial=NONE)
    self.rows = []
    for x in values:
      number = jnp.nan
      if kind_of(step) in _ELEMENTWISE:
        number = jnp.sum(jnp.where(places == self.place, jnp.real(x).astype(jnp.float32), 0))
      self.rows.append(row_of(x, number))


def row_of(x: Array, value: Array | float = math.nan) -> Row:
  """Returns what is known of an array, given the number at the element that broke."""
  bad, nan = ~jnp.isfinite(x), jnp.isnan(x)
  size = jnp.abs(x).astype(jnp.float32)
  unknown = jnp.where(jnp.all(bad), jnp.float32(jnp.nan), 0)
  return {
    "least": unknown + jnp.min(jnp.where(bad, jnp.inf, size), initial=jnp.inf),
    "most": unknown + jnp.max(jnp.where(bad, 0, size), initial=0),
    "inf": jnp.sum(bad & ~nan, dtype=jnp.int32),
    "nan": jnp.sum(nan, dtype=jnp.int32),
    "value": jnp.asarray(value, jnp.float32),
  }
