"""What steps do to inf and NaN, and how the values of a function are used.

Not every inf is a fault: a `where` may discard it, or a comparison reads it. The uses of a value
tell, and are known before the function runs.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from mpjax._core.types import Array
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import aval_of, is_inexact_atom, shape_of
from mpjax._jaxpr.steps import Body, Step

Effect: TypeAlias = Literal[
  "enters",  # runs a loop, a branch or a map over devices
  "asks",  # whether numbers are finite
  "tests",  # compares numbers
  "chooses",  # each element among those of operands, as `where` and a maximum do
  "casts",  # floating numbers
  "moves",  # elements
  "factor",  # multiplies in the backward pass, where an inf may meet a 0
  "sums",  # elements, as a matmul does too
  "each",  # computes each element from those at its position
  "all",  # computes each element from those at other positions too
]
"""The effect of a step on inf and NaN."""

ELEMENTWISE: Collection[Effect] = ("each", "factor", "casts")


def effect_of(step: Step) -> Effect:
  """Returns the effect of a step on inf and NaN: the first one that applies."""
  primitive, facts = step.eqn.primitive, facts_of(step.eqn)
  if step.bodies:
    return "enters"
  # `isnan(x)` is written as `x != x`.
  is_of_itself = len(step.reads) == 2 and step.reads[0] == step.reads[1]
  if primitive is p.is_finite_p or (primitive is p.ne_p and is_of_itself):
    return "asks"
  if facts.tests:
    return "tests"
  if primitive in (p.select_n_p, p.max_p, p.min_p):
    return "chooses"
  # A cast from or to integers cannot keep inf and NaN.
  if primitive is p.convert_element_type_p:
    is_cast = is_inexact_atom(step.eqn.invars[0]) and is_inexact_atom(step.eqn.outvars[0])
    return "casts" if is_cast else "all"
  # A gather may fill in numbers of its own.
  if facts.moves and primitive is not p.gather_p:
    return "moves"
  # Derivative rules multiply a cotangent, which may be 0, by a slope, which may be inf.
  if primitive is p.mul_p and step.location.direction == "backward":
    return "factor"
  if primitive in (p.reduce_sum_p, p.cumsum_p) or facts.flops is not None:
    return "sums"
  return "each" if facts.elementwise else "all"


def can_break(step: Step) -> bool:
  """Whether a step may make an inf or a NaN of finite numbers, or a NaN of an inf."""
  eqn, facts = step.eqn, facts_of(step.eqn)
  # The steps inside of a loop are looked at themselves.
  if step.bodies or not any(map(is_inexact_atom, eqn.outvars)):
    return False
  # An index out of bounds fills in NaN in this mode.
  if eqn.primitive is p.gather_p:
    return "FILL" in str(eqn.params["mode"])
  # Only a cast to a smaller range can overflow.
  if eqn.primitive is p.convert_element_type_p:
    return not np.can_cast(aval_of(eqn.invars[0]).dtype, aval_of(eqn.outvars[0]).dtype)
  return not (facts.exact or facts.moves or facts.bounded)


def newly_nonfinite(step: Step, ins: Sequence[Array], outs: Sequence[Array]) -> dict[int, Array]:
  """Returns which elements of each result broke, if the step can break.

  An element breaks if it is not finite though its operands are, or if it is NaN though they are
  not: -inf - -inf, and 0 * inf. All elements of an operand count, unless the step computes element
  by element. A sum also breaks if it adds up an inf: then the inf was no mask.
  """
  if not can_break(step):
    return {}
  # An operand may be an integer, which is always finite.
  was_nan = was_bad = jnp.asarray(False)
  for x, v in zip(ins, step.eqn.invars, strict=True):
    if is_inexact_atom(v):
      was_nan = was_nan | _reach(step, jnp.isnan(jnp.asarray(x)))
      was_bad = was_bad | _reach(step, ~jnp.isfinite(jnp.asarray(x)))
  # An inf in a sum is a fault even if an operand had it. Only NaN is passed on without blame.
  if effect_of(step) == "sums":
    was_bad = was_nan
  results = zip(step.outs, outs, step.eqn.outvars, strict=True)
  return {
    slot: (~jnp.isfinite(out) & ~was_bad) | (jnp.isnan(out) & ~was_nan)
    for slot, out, var in results
    if is_inexact_atom(var)
  }


def _reach(step: Step, flags: Array) -> Array:
  """Returns for each element of the result, or for all at once, whether a flag reaches it."""
  # A reduction has one element for each row. An inf in another row does not excuse it.
  axes = step.eqn.params.get("axes")
  if isinstance(axes, tuple) and {*axes} <= {*range(flags.ndim)}:
    by_row = jnp.any(flags, axis=axes)
    if by_row.shape == shape_of(step.eqn.outvars[0]):
      return by_row
  return flags if effect_of(step) in ELEMENTWISE else jnp.any(flags)


class Uses(NamedTuple):
  """How the values of a function are used, also in its loops and branches.

  Fields:
    top: the steps of the function.
    arguments: the arguments and constants, each with a negative number in place of a step's. The
      last one has -1.
    outputs: the values that a jaxpr returns.
    counted: values in which an inf is a fault, since something computes with it. A returned value
      counts, unless it is an argument.
    compared: values that a comparison reads, or a multiplication in the backward pass. An inf does
      no harm there, but what is computed from an inf before does.
    literals: numbers that the code names, moved and cast.
    summed: values whose elements are added up, after moves, casts and scaling. Their inf is no
      mask.
  """

  top: Body
  arguments: Mapping[int, int]
  outputs: set[int]
  counted: set[int]
  compared: set[int]
  literals: set[int]
  summed: set[int]


def uses_of(top: Body) -> Uses:
  """Returns how the values of a function are used."""
  # Loops and branches are part of the lists, since values keep their numbers inside.
  steps = [*top.every_step()]
  bodies = [*top.every_body()]
  outputs = {slot for body in bodies for slot in body.outputs if isinstance(slot, int)}

  # Forwards, in the order of execution, operands are decided before results.
  unchanged = {slot for body in bodies for slot in body.inputs}
  literals = set[int]()
  for step in steps:
    if effect_of(step) not in _PASS:
      continue
    # A cast to a smaller dtype may overflow, so its result is no argument any more.
    if not can_break(step) and unchanged.issuperset(step.reads):
      unchanged.update(step.outs)
    if step.ins and literals.issuperset(step.reads):
      literals.update(step.outs)

  counted, compared, summed = outputs - unchanged, set[int](), set[int]()
  answers = _answers(steps)
  for step in steps:
    effect = effect_of(step)
    skips = False
    if effect == "chooses" and step.reads:
      # It discards all elements of a value if some number is not finite, which skips a training
      # step. An answer of the shape of the result decides for each element, as a mask does.
      shape = shape_of(step.eqn.outvars[0])
      skips = any(answer != shape for answer in answers.get(step.reads[0], ()))
    # A loop computes with its operands in ways that are not followed.
    if effect in ("sums", "all", "enters") or skips:
      counted.update(step.reads)
    elif effect in ("asks", "tests", "factor"):
      compared.update(step.reads)

  # Backwards, the use of a result decides that of the operands.
  for step in reversed(steps):
    effect = effect_of(step)
    # If only one operand is a value, the other is a literal: the mean divides by a count.
    scales = step.eqn.primitive in (p.mul_p, p.div_p) and len(step.reads) == 1
    passes_sum = (effect in _PASS or scales) and not summed.isdisjoint(step.outs)
    if effect == "sums" or passes_sum:
      summed.update(step.reads)
    if effect in _PASS or effect == "each":
      if not counted.isdisjoint(step.outs):
        counted.update(step.reads)
      elif not compared.isdisjoint(step.outs):
        (compared if effect in _PASS else counted).update(step.reads)
  slots = (*top.inputs, *top.consts)
  arguments = {slot: number for number, slot in enumerate(slots, -len(slots))}
  return Uses(top, arguments, outputs, counted, compared, literals, summed)


def faults_in(x: Array, slot: int, uses: Uses) -> Array:
  """Returns which elements of an argument or constant are faults: NaN, and an inf of no mask."""
  # A mask may hold -inf if it is an argument that is not added up, and any inf if it is a constant.
  is_mask = (jnp.real(x) < 0) & (slot not in uses.summed) | (slot in uses.top.consts)
  return jnp.isnan(x) | (~jnp.isfinite(x) & ~is_mask)


_PASS: Collection[Effect] = ("moves", "casts")
"""The effects by which each element of a result is one of an operand."""


def _answers(steps: Sequence[Step]) -> Mapping[int, Collection[tuple[int, ...] | None]]:
  """Returns the values that are computed from whether others are finite.

  They have the shapes of the answers on the way to them, None for an answer of a loop.
  """
  answers = dict[int, set[tuple[int, ...] | None]]()
  for step in steps:
    shapes = {shape for slot in step.reads for shape in answers.get(slot, ())}
    inside = (each for body in step.bodies for each in body.every_step())
    asks = any(effect_of(each) == "asks" for each in (step, *inside))
    if not shapes and not asks:
      continue
    for slot, v in zip(step.outs, step.eqn.outvars, strict=True):
      # Only bools and integers carry answers. A float that a `where` selects is a value again.
      if not is_inexact_atom(v):
        answers[slot] = shapes | {None if step.bodies else getattr(v.aval, "shape", None)}
  return answers
