"""Where a result is not finite though the operands are, and which values can be discarded.

An inf counts only if something reads it, other than a comparison, `is_finite`, or a `where` that
discards it: of `jnp.where(x > 0, x * jnp.log(x), 0)` nobody sees log(0). Which elements a `where`
discards is known only while it runs; here it is decided for which values that has to be followed.
"""

from collections.abc import Sequence
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
  eqn = step.eqn
  return (
    eqn.primitive is p.convert_element_type_p
    and is_inexact(eqn.invars[0])
    and is_inexact(eqn.outvars[0])
  )


def narrows(eqn: JaxprEqn) -> bool:
  """Whether a cast is to a dtype that ends earlier."""
  old, new = aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype
  if not jnp.issubdtype(new, jnp.floating):
    return not jnp.issubdtype(new, jnp.complexfloating)
  if old == np.bool_:
    return False
  if jnp.issubdtype(old, jnp.integer):
    return float(jnp.iinfo(old).max) > float(jnp.finfo(new).max)
  return float(jnp.finfo(old).max) > float(jnp.finfo(new).max)


def is_move(step: Step) -> bool:
  """Whether a step only moves numbers: one that can do it to numbers of another type too."""
  # A gather may fill in numbers of its own.
  fills = step.eqn.primitive is p.gather_p or is_select(step)
  return facts_of(step.eqn).moves and not fills


def is_elementwise(step: Step) -> bool:
  """Whether each element of a result depends on the elements at its own position alone."""
  return facts_of(step.eqn).elementwise or is_cast(step)


class Uses:
  """What becomes of the values of a function, those in its loops and branches included."""

  def __init__(self, top: Body) -> None:
    """Goes through all steps from the last to the first: no two lists share values."""
    bodies, steps = [*top.every_body()], [*top.every_step()]
    self._readers: dict[int, list[tuple[Step, int]]] = {}
    for step in steps:
      for position, slot in enumerate(step.ins):
        if isinstance(slot, int):
          self._readers.setdefault(slot, []).append((step, position))
    self._outputs = {slot for body in bodies for slot in body.outputs if isinstance(slot, int)}
    self._noticed = _noticed(steps)
    self.returned = self._outputs - self._readers.keys()  # that nothing else reads
    self.constants = _constants(steps)  # of the jaxpr, moved and cast
    self.summed = _summed(steps)  # whose elements are added up as they are, which a mask's are not
    inputs = [slot for body in bodies for slot in body.inputs]
    arguments = set(inputs)  # moved and cast, too
    for step in steps:
      moves = is_move(step) or (is_cast(step) and not narrows(step.eqn))
      if moves and arguments.issuperset(step.reads):
        arguments.update(step.outs)
    # Those that nothing reads but comparisons, and a `where` that may discard them.
    self.discarded: set[int] = set()
    # Those among them where that is true if they were computed from an inf: then a comparison reads
    # it, as in a training step that asks whether to skip.
    self.derived: set[int] = set()
    self.factors: set[int] = set()  # that, besides, multiply a value of the backward pass
    for step in reversed(steps):
      argument = not arguments.isdisjoint(step.outs)
      for slot, var in zip(step.outs, step.eqn.outvars, strict=True):
        if is_inexact(var):
          self._decide(slot, argument)
    for slot in inputs:
      self._decide(slot, argument=True)

  def _decide(self, slot: int, argument: bool = False) -> None:
    readers = self._readers.get(slot, [])
    if argument:
      # To return it computes nothing; and a best loss that starts at inf is compared by a minimum.
      readers = [r for r in readers if r[0].eqn.primitive not in (p.max_p, p.min_p)]
      if not readers:
        self.discarded.add(slot)
        self.derived.add(slot)
    if not readers or (slot in self._outputs and not argument):
      return
    if all(self._discards(step, position, True) for step, position in readers):
      self.derived.add(slot)
    if all(self._discards(step, position, False) for step, position in readers):
      self.discarded.add(slot)
    elif all(
      self._discards(step, position, False) or self._multiplies(step) for step, position in readers
    ):
      self.factors.add(slot)

  def _discards(self, step: Step, position: int, derived: bool) -> bool:
    if step.bodies:
      return False
    if facts_of(step.eqn).tests:
      return not derived
    if is_select(step):
      return position == 0 or not self._is_skip(step)
    if is_move(step) or is_cast(step):
      outs = self.derived if derived else self.discarded
      return all(slot in outs for slot in step.outs)
    return is_elementwise(step) and all(slot in self.derived for slot in step.outs)

  def _multiplies(self, step: Step) -> bool:
    if is_move(step) or is_cast(step):
      return all(slot in self.factors for slot in step.outs)
    return step.eqn.primitive is p.mul_p and step.location.direction == "backward"

  def _is_skip(self, step: Step) -> bool:
    """Whether a `where` discards since a value was not finite: a skipped step."""
    predicate = step.ins[0]
    answer = self._noticed.get(predicate, "") if isinstance(predicate, int) else ""
    spread = shape_of(step.eqn.invars[0]) == () and shape_of(step.eqn.outvars[0]) != ()
    return answer == "all" or (answer == "each" and spread)


def _noticed(steps: Sequence[Step]) -> dict[int, str]:
  """Returns which values say whether something is finite: "each" element, or "all" of them."""
  answers: dict[int, str] = {}
  for step in steps:
    eqn = step.eqn
    pairs = [(s, v) for s, v in zip(step.ins, eqn.invars, strict=True) if isinstance(s, int)]
    asked = [(answers[s], v) for s, v in pairs if s in answers]
    if step.bodies:
      inside = any(_asks(each) for b in step.bodies for each in b.every_step())
      answer = "all" if asked or inside else ""
    elif _asks(step):
      answer = "each"
    else:
      arrays = [v for v in (*(v for _, v in asked), *eqn.outvars) if hasattr(v.aval, "shape")]
      alike = len(set(map(shape_of, arrays))) < 2
      answer = min((each for each, _ in asked), default="") if alike else "all" * bool(asked)
    if answer:
      results = zip(step.outs, eqn.outvars, strict=True)
      answers.update({slot: answer for slot, var in results if not is_inexact(var)})
  return answers


def _asks(step: Step) -> bool:
  """Whether a step asks if numbers are finite, or NaN."""
  eqn = step.eqn
  same = eqn.primitive is p.ne_p and len(step.reads) == 2 and len({*step.reads}) == 1
  return eqn.primitive is p.is_finite_p or same


def _constants(steps: Sequence[Step]) -> set[int]:
  constants: set[int] = set()
  for step in steps:
    fixed = all(not isinstance(slot, int) or slot in constants for slot in step.ins)
    if step.ins and fixed and (is_move(step) or step.eqn.primitive is p.convert_element_type_p):
      constants.update(step.outs)
  return constants


def _summed(steps: Sequence[Step]) -> set[int]:
  """Returns which values are added up, moved, cast or scaled before at most."""
  summed: set[int] = set()
  for step in reversed(steps):
    scales = step.eqn.primitive in (p.mul_p, p.div_p) and len(step.reads) == 1
    passes = is_move(step) or is_cast(step) or scales
    if sums(step) or (passes and not summed.isdisjoint(step.outs)):
      summed.update(step.reads)
  return summed


def sums(step: Step) -> bool:
  """Whether a step adds up elements of an operand."""
  adds = step.eqn.primitive in (p.reduce_sum_p, p.cumsum_p)
  return adds or facts_of(step.eqn).flops is not None


def wide(x: Array) -> Array:
  """Returns an array in a type that every operation takes: what is below 16 bits in float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 2 else x


def not_finite(x: Array) -> Array:
  """Returns where elements are inf or NaN."""
  return jnp.logical_not(jnp.isfinite(wide(x)))


def is_nan(x: Array) -> Array:
  """Returns where elements are NaN."""
  return jnp.isnan(wide(x))


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


def births(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> list[Array | None]:
  """Returns for each result where it broke; None for one that cannot."""
  # An element broke if it is not finite and what it was computed from is, or if it is NaN and that
  # is not: -inf - -inf, and 0 * inf. Of what is not computed element by element, all operands
  # count. An inf that is added up is no mask: the sum broke, if nothing did before.
  if not can_break(step):
    return [None] * len(outs)
  pairs = zip(ins, step.eqn.invars, strict=True)
  operands = [jnp.asarray(x) for x, v in pairs if is_inexact(v)]
  bad, nan = (
    [_reaching(step, is_broken(x)) for x in operands] for is_broken in (not_finite, is_nan)
  )
  results = []
  for out, var in zip(outs, step.eqn.outvars, strict=True):
    if not is_inexact(var):
      results.append(None)
      continue
    broke, broke_to_nan = not_finite(out), is_nan(out)
    for each in nan if sums(step) else bad:
      broke = broke & ~each
    for each in nan:
      broke_to_nan = broke_to_nan & ~each
    results.append(broke | broke_to_nan)
  return results


def _reaching(step: Step, flags: Array) -> Array:
  """Returns for each element of the result, or for all at once, whether a flag reaches it."""
  if is_elementwise(step):
    return flags
  axes, shape = step.eqn.params.get("axes"), shape_of(step.eqn.outvars[0])
  if isinstance(axes, tuple) and all(isinstance(axis, int) and axis < flags.ndim for axis in axes):
    kept = tuple(n for axis, n in enumerate(flags.shape) if axis not in axes)
    if kept == shape:
      return jnp.any(flags, axis=axes)
  return jnp.any(flags)


def direction_of(graph: Graph, operation: Operation) -> Literal["forward", "backward"]:
  """Returns the pass of an operation: what `remat` computes again is part of the forward pass."""
  # The slope of a square root, 0.5 / sqrt(x), is computed beside the root, and only the backward
  # pass reads it: of a function that is not differentiated it is no part.
  forward = operation.where.direction == "forward"
  if forward and _is_read_by_backward(graph, operation) and _is_slope(graph, operation):
    return "backward"
  return "backward" if operation.where.direction == "backward" else "forward"


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
  before = [
    each
    for each in graph.computing()
    if each.step.number <= operation.step.number and each.where.source == operation.where.source
  ]
  primitive = operation.eqn.primitive
  rules: dict[tuple[Primitive, str], set[Primitive]] = {}
  for place, each in enumerate(before):
    is_other = each is not operation and is_elementwise(each.step)
    if not (is_other and any(map(is_inexact, each.eqn.outvars))):
      continue
    kind = (each.eqn.primitive, repr(each.eqn.params))
    if kind not in rules:
      rules[kind] = _rule_of(each.eqn)
    if primitive not in rules[kind]:
      continue
    values = {*each.operands, *each.results}
    for other in before[place + 1 :]:
      if other.eqn.primitive in rules[kind] and not values.isdisjoint(other.operands):
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
