"""Where a result is not finite though the operands are, which can be discarded, and in which pass.

An inf counts only if something reads it, other than a comparison, `is_finite`, or a `where` that
discards it: of `jnp.where(x > 0, x * jnp.log(x), 0)` nobody sees log(0). Which elements a `where`
discards is known only while it runs; here it is decided for which values that has to be followed.
"""

import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from mpjax._core.errors import REFUSALS
from mpjax._core.types import Array
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.graph import Graph, Operation
from mpjax._jaxprs.locations import location
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.reader import Atom, aval_of, shape_of
from mpjax._jaxprs.steps import Body, Step


def is_inexact(atom: Atom) -> bool:
  """Whether a value holds floating or complex numbers."""
  # A reference to memory that is written in place has a dtype too, and is no array.
  array = isinstance(atom.aval, ShapedArray)
  return array and jnp.issubdtype(aval_of(atom).dtype, jnp.inexact)


def is_select(step: Step) -> bool:
  """Whether a step is what `jnp.where` becomes."""
  return step.eqn.primitive is p.select_n_p


def is_cast(step: Step) -> bool:
  """Whether a step casts floating numbers to floating numbers."""
  casts = step.eqn.primitive is p.convert_element_type_p
  return casts and is_inexact(step.eqn.invars[0]) and is_inexact(step.eqn.outvars[0])


def narrows(eqn: JaxprEqn) -> bool:
  """Whether a cast to floating numbers is to a dtype that ends earlier."""
  old, new = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
  if old == np.bool_ or jnp.issubdtype(new, jnp.complexfloating):
    return False
  largest = jnp.iinfo(old).max if jnp.issubdtype(old, jnp.integer) else jnp.finfo(old).max
  return float(largest) > float(jnp.finfo(new).max)


def is_move(step: Step) -> bool:
  """Whether a step only moves numbers: one that can do it to numbers of another type too."""
  # A gather may fill in numbers of its own.
  fills = step.eqn.primitive is p.gather_p or is_select(step)
  return facts_of(step.eqn).moves and not fills


def is_elementwise(step: Step) -> bool:
  """Whether each element of a result depends on the elements at its own position alone."""
  return facts_of(step.eqn).elementwise or is_cast(step)


def is_backward_factor(step: Step) -> bool:
  """Whether a step multiplies in the backward pass, where a factor that is inf may meet a 0."""
  return step.eqn.primitive is p.mul_p and step.location.direction == "backward"


class Use(enum.IntEnum):
  """What becomes of an inf in a value, given all that reads the value."""

  COUNTS = 0  # Something computes with it.
  # Nothing does but comparisons, a `where` that may discard it, and a multiplication of the
  # backward pass: 0 tells there that the value did not count in the forward pass.
  COMPARED = 1
  # Nothing does but a `where`, also if the value was computed from an inf: then a comparison reads
  # it, as in a training step that asks whether to skip.
  HIDDEN = 2


class Uses:
  """What becomes of the values of a function, those in its loops and branches included."""

  def __init__(self, top: Body) -> None:
    """Goes through all steps, and again from the last to the first: no two lists share values."""
    bodies, steps = [*top.every_body()], [*top.every_step()]
    inputs = [slot for body in bodies for slot in body.inputs]
    self._readers: dict[int, list[tuple[Step, int]]] = {}
    self._asked: dict[int, set[tuple[int, ...] | None]] = {}
    self.constants: set[int] = set()  # of the jaxpr, moved and cast
    arguments = set(inputs)  # moved and cast, too
    for step in steps:
      for position, slot in enumerate(step.ins):
        if isinstance(slot, int):
          self._readers.setdefault(slot, []).append((step, position))
      self._ask(step)
      moves, casts = is_move(step), step.eqn.primitive is p.convert_element_type_p
      if step.ins and (moves or casts) and self.constants.issuperset(step.reads):
        self.constants.update(step.outs)
      if arguments.issuperset(step.reads) and (moves or (is_cast(step) and not narrows(step.eqn))):
        arguments.update(step.outs)
    self._outputs = {slot for body in bodies for slot in body.outputs if isinstance(slot, int)}
    self.returned = self._outputs - self._readers.keys()  # that nothing else reads
    # Whose elements are added up, moved, cast or scaled before at most: a mask's are not.
    self.summed: set[int] = set()
    self._uses: dict[int, Use] = {}
    for step in reversed(steps):
      scales = step.eqn.primitive in (p.mul_p, p.div_p) and len(step.reads) == 1
      passes = is_move(step) or is_cast(step) or scales
      if sums(step) or (passes and not self.summed.isdisjoint(step.outs)):
        self.summed.update(step.reads)
      for slot, var in zip(step.outs, step.eqn.outvars, strict=True):
        if is_inexact(var):
          self._uses[slot] = self._use(slot, slot in arguments)
    self._uses.update({slot: self._use(slot, is_argument=True) for slot in inputs})

  def of(self, slot: int) -> Use:
    """Returns what becomes of a value."""
    return self._uses.get(slot, Use.COUNTS)

  def _use(self, slot: int, is_argument: bool) -> Use:
    readers = self._readers.get(slot, [])
    if is_argument:
      # To return it computes nothing; and a best loss that starts at inf is compared by a minimum.
      readers = [r for r in readers if r[0].eqn.primitive not in (p.max_p, p.min_p)]
    elif not readers or slot in self._outputs:
      return Use.COUNTS
    return min((self._read(*reader) for reader in readers), default=Use.HIDDEN)

  def _read(self, step: Step, position: int) -> Use:
    """Returns what becomes of an inf in an operand of a step."""
    if step.bodies:
      return Use.COUNTS
    if facts_of(step.eqn).tests:
      return Use.COMPARED
    if is_select(step):
      return Use.COUNTS if position > 0 and self._is_skip(step) else Use.HIDDEN
    results = min(map(self.of, step.outs), default=Use.HIDDEN)
    if is_move(step) or is_cast(step):
      return results
    if is_elementwise(step) and results is Use.HIDDEN:
      return Use.HIDDEN
    return Use.COMPARED if is_backward_factor(step) else Use.COUNTS

  def _ask(self, step: Step) -> None:
    """Notes the shapes of the answers, if a step asks whether something is finite, or reads one."""
    inside = any(_asks(each) for body in step.bodies for each in body.every_step())
    shapes = {shape for slot in step.reads for shape in self._asked.get(slot, ())}
    if _asks(step) or inside or shapes:
      shapes |= {None} if step.bodies else set()
      results = zip(step.outs, step.eqn.outvars, strict=True)
      answers = [(slot, v) for slot, v in results if not is_inexact(v) and hasattr(v.aval, "shape")]
      self._asked.update({slot: shapes | {shape_of(v)} for slot, v in answers})

  def _is_skip(self, step: Step) -> bool:
    """Whether a `where` discards since another value was not finite: a skipped step."""
    # To ask for each element of a value by itself is to mask it.
    predicate, shape = step.ins[0], shape_of(step.eqn.outvars[0])
    answers = self._asked.get(predicate, set()) if isinstance(predicate, int) else set()
    return any(answer != shape for answer in answers)


def _asks(step: Step) -> bool:
  """Whether a step asks if numbers are finite, or NaN."""
  eqn = step.eqn
  same = eqn.primitive is p.ne_p and len(step.reads) == 2 and len({*step.reads}) == 1
  return eqn.primitive is p.is_finite_p or same


def sums(step: Step) -> bool:
  """Whether a step adds up elements of an operand."""
  adds = step.eqn.primitive in (p.reduce_sum_p, p.cumsum_p)
  return adds or facts_of(step.eqn).flops is not None


def not_finite(x: Array) -> Array:
  """Returns where elements are inf or NaN."""
  return jnp.logical_not(jnp.isfinite(_at_least_16_bits(x)))


def is_nan(x: Array) -> Array:
  """Returns where elements are NaN."""
  return jnp.isnan(_at_least_16_bits(x))


def _at_least_16_bits(x: Array) -> Array:
  return x.astype(jnp.float32) if x.dtype.itemsize < 2 else x


def can_break(step: Step) -> bool:
  """Whether a step may make an inf or a NaN of finite numbers, or a NaN of an inf."""
  eqn, facts = step.eqn, facts_of(step.eqn)
  if step.bodies or not any(map(is_inexact, eqn.outvars)):
    return False
  if eqn.primitive is p.gather_p:
    return "FILL" in str(eqn.params["mode"])
  if eqn.primitive is p.convert_element_type_p:
    return narrows(eqn)
  return not (facts.exact or facts.moves or facts.bounded)


def births(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> dict[int, Array]:
  """Returns where each result broke, of those that can."""
  # An element broke if it is not finite and what it was computed from is, or if it is NaN and that
  # is not: -inf - -inf, and 0 * inf. Of what is not computed element by element, all operands
  # count. An inf that is added up is no mask: the sum broke, if nothing did before.
  if not can_break(step):
    return {}
  pairs = zip(ins, step.eqn.invars, strict=True)
  operands = [jnp.asarray(x) for x, v in pairs if is_inexact(v)]
  nan = _reaching(step, map(is_nan, operands))
  bad = nan if sums(step) else _reaching(step, map(not_finite, operands))
  results = zip(step.outs, outs, step.eqn.outvars, strict=True)
  return {
    slot: (not_finite(out) & ~bad) | (is_nan(out) & ~nan)
    for slot, out, var in results
    if is_inexact(var)
  }


def _reaching(step: Step, flags: Iterable[Array]) -> Array:
  """Returns for each element of the result, or for all at once, whether a flag reaches it."""
  return functools.reduce(jnp.logical_or, (_reach(step, x) for x in flags), jnp.asarray(False))


def _reach(step: Step, flags: Array) -> Array:
  axes = step.eqn.params.get("axes")
  if isinstance(axes, tuple) and {*axes} <= {*range(flags.ndim)}:
    by_row = jnp.any(flags, axis=axes)
    if by_row.shape == shape_of(step.eqn.outvars[0]):
      return by_row
  return flags if is_elementwise(step) else jnp.any(flags)


def direction_of(graph: Graph, operation: Operation) -> Literal["forward", "backward"]:
  """Returns the pass of an operation: what `remat` computes again is part of the forward pass."""
  # The slope of a square root, 0.5 / sqrt(x), is computed beside the root, and only the backward
  # pass reads it: of a function that is not differentiated it is no part.
  direction = operation.where.direction
  if direction == "forward" and _is_read_by_backward(graph, operation):
    return "backward" if _is_slope(graph, operation) else "forward"
  return "backward" if direction == "backward" else "forward"


def _is_read_by_backward(graph: Graph, operation: Operation) -> bool:
  """Whether the backward pass reads what an operation computes, and nothing else does."""
  returned, seen, pending, is_read = set(graph.results), {operation}, [operation], False
  while pending:
    for value in pending.pop().results:
      if value in returned:
        return False
      for reader in value.consumers:
        if reader.where.direction == "backward":
          is_read = True
        elif reader.joins == "carry" and value is not reader.operands[0]:
          return False  # What an iteration hands to the next one is read by the forward pass.
        elif reader not in seen:
          seen.add(reader)
          pending.append(reader)
  return is_read


def _is_slope(graph: Graph, operation: Operation) -> bool:
  """Whether the derivative rule of a primitive wrote it: of one before it on the same line."""
  # It takes what that one takes or returns, or what its rule has computed of these.
  last, source = operation.step.number, operation.where.source
  line = [o for o in graph.computing() if o.step.number <= last and o.where.source == source]
  rules: dict[tuple[Primitive, str], set[Primitive]] = {}
  for place, each in enumerate(line):
    if each is operation or not is_elementwise(each.step):
      continue
    kind = (each.eqn.primitive, repr(each.eqn.params))
    rule = rules[kind] if kind in rules else rules.setdefault(kind, _rule_of(each.eqn))
    values = {*each.operands, *each.results}
    for other in line[place + 1 :]:
      if other.eqn.primitive in rule and not values.isdisjoint(other.operands):
        values.update(other.results)
    if values.issuperset(operation.results):
      return True
  return False


def _rule_of(eqn: JaxprEqn) -> set[Primitive]:
  """Returns the primitives that the derivative of an elementwise operation adds to its pass."""
  moving = [i for i, v in enumerate(eqn.invars) if is_inexact(v)]

  def gradient(*operands: Array) -> Sequence[Array]:
    def moved(*some: Array) -> list[Array]:
      new = dict(zip(moving, some, strict=True))
      return bind(eqn, [new.get(i, x) for i, x in enumerate(operands)])

    outs, pullback = jax.vjp(moved, *(operands[i] for i in moving))
    return pullback(outs)

  shapes = [jax.ShapeDtypeStruct(shape_of(v), aval_of(v).dtype) for v in eqn.invars]
  try:
    eqns = jax.make_jaxpr(gradient)(*shapes).eqns
  except REFUSALS:
    return set()  # It has no derivative.
  forward = [each.primitive for each in eqns if location(each).direction == "forward"]
  return {each for each in forward if each is not eqn.primitive or forward.count(each) > 1}
