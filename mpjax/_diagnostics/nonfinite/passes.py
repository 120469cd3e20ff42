"""Which pass a step belongs to: what JAX computes ahead for the backward pass belongs to that."""

from collections.abc import Sequence
from typing import Literal

import jax
from jax.extend.core import JaxprEqn, Primitive

from mpjax._core.errors import REFUSALS
from mpjax._core.types import Array
from mpjax._diagnostics.nonfinite.uses import is_elementwise, is_inexact
from mpjax._jaxprs.atoms import aval_of, shape_of
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.locations import location
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.steps import Body, Step


def direction_of(top: Body, step: Step) -> Literal["forward", "backward"]:
  """Returns the pass of a step: what `remat` computes again is part of the forward pass."""
  # The slope of a square root, 0.5 / sqrt(x), is computed beside the root, and only the backward
  # pass reads it: of a function that is not differentiated it is no part.
  if step.location.direction != "forward":
    return "backward" if step.location.direction == "backward" else "forward"
  *around, (body, _) = top.path_to(step.number)
  backward: set[int] = set()
  for each, holder in around:
    backward = _read_by_backward(each, backward)
    inside = next(inner for inner in holder.bodies if inner.path_to(step.number))
    # What an iteration hands to the next one is read by the forward pass.
    carried = len(holder.inner[-1].carry) if holder.holds in (Holds.SCAN, Holds.WHILE) else 0
    results = [*zip(inside.outputs, holder.outs, strict=False)][carried:]
    backward = {slot for slot, out in results if isinstance(slot, int) and out in backward}
  ahead = _read_by_backward(body, backward).issuperset(step.outs)
  return "backward" if ahead and _is_slope(body, step) else "forward"


def _read_by_backward(body: Body, returned: set[int]) -> set[int]:
  """Returns the values that the backward pass alone reads, given those that are returned to it."""
  outputs = {slot for slot in body.outputs if isinstance(slot, int)}
  forward = outputs - returned
  read = returned & outputs
  for step in reversed(body.steps):
    direction = step.location.direction
    only = read.issuperset(step.outs) and forward.isdisjoint(step.outs)
    ahead = only and direction == "forward" and not step.bodies
    (read if direction == "backward" or ahead else forward).update(step.reads)
  return read - forward


def _is_slope(body: Body, step: Step) -> bool:
  """Whether the derivative rule of a primitive wrote a step: of one before it on the same line."""
  # It takes what that one takes or returns, or what its rule has computed of these.
  source = step.location.source
  before = [
    each
    for each in body.steps
    if each.number <= step.number and not each.bodies and each.location.source == source
  ]
  rules: dict[tuple[Primitive, str], set[Primitive]] = {}
  for place, each in enumerate(before):
    is_other = each.eqn.primitive is not step.eqn.primitive and is_elementwise(each)
    if not (is_other and any(map(is_inexact, each.eqn.outvars))):
      continue
    kind = (each.eqn.primitive, repr(each.eqn.params))
    if kind not in rules:
      rules[kind] = _rule_of(each.eqn)
    rule = rules[kind]
    if step.eqn.primitive not in rule:
      continue
    values = {*each.reads, *each.outs}
    for other in before[place + 1 :]:
      if other.eqn.primitive in rule and not values.isdisjoint(other.reads):
        values.update(other.outs)
    if values.issuperset(step.outs):
      return True
  return False


def _rule_of(eqn: JaxprEqn) -> set[Primitive]:
  """Returns the primitives of the forward pass if an elementwise operation is differentiated."""
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
  return {each.primitive for each in eqns if location(each).direction == "forward"}
