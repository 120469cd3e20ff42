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
from mpjax._jaxprs.graph import Graph, Operation
from mpjax._jaxprs.locations import location


def direction_of(graph: Graph, operation: Operation) -> Literal["forward", "backward"]:
  """Returns the pass of an operation: what `remat` computes again is part of the forward pass."""
  # The slope of a square root, 0.5 / sqrt(x), is computed beside the root, and only the backward
  # pass reads it: of a function that is not differentiated it is no part.
  direction = operation.where.direction
  ahead = direction == "forward" and _is_read_by_backward(graph, operation)
  return (
    "backward" if direction == "backward" or (ahead and _is_slope(graph, operation)) else "forward"
  )


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
    is_other = each.eqn.primitive is not primitive and is_elementwise(each.step)
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
