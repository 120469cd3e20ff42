"""Find the operations that magnify the error of a rounding.

An operation is a sink if the history of an operand has a rounding that it magnifies. An activation
function since the rounding ends the search for most sinks. Comparisons look past them, since a
monotonic function keeps the ties of a rounding. A comparison is a risk if one side is an order
statistic (maximum, sort, `top_k`) of the other. A difference is a risk if both sides contain
squares of one value after different roundings. `argmax`, ReLU, masks and a value minus its own mean
or maximum are therefore not risks.

Only the forward pass counts, since the backward pass has the same lines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._debug.risk_histories import Histories, History, in_low_region, is_float32_of_inputs
from mpjax._jaxpr.graph import Graph, Operation, Value, moved_from
from mpjax._jaxpr.locations import lines_of_call

RiskKind: TypeAlias = Literal[
  "angle",
  "index",
  "comparison",
  "complex exponential",
  "linear algebra",
  "difference",
  "denominator",
  "lookup",
  "float32 matmul",
]


def sinks_of(graph: Graph, histories: Histories) -> Iterator[tuple[RiskKind, Operation, Operation]]:
  """Yields the kind of each risk, the operation that rounds, and the sink."""
  for operation in graph.computing():
    # A print has operands and no results.
    computes = operation.used and operation.operands and operation.results
    if operation.where.direction != "forward" or not computes:
      continue
    before = [histories.of(v) for v in operation.operands]
    for kind, reached in _SINKS.items():
      # Both operands may have the same rounding.
      for rounding in dict.fromkeys(reached(operation, before)):
        yield kind, rounding, operation


# The roundings that an operation magnifies.


def _direct(before: Iterable[History], *barred: str) -> Iterator[Operation]:
  """Yields the last roundings without an activation function, or a kind in `barred`, since."""
  for x in before:
    # After an activation the error is relative, so the sink no longer magnifies it.
    if x.rounding is not None and x.passed.isdisjoint(("activation", *barred)):
      yield x.rounding


def _angle(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if operation.facts.role == "angle":
    yield from _direct(before)


def _index(operation: Operation, before: list[History]) -> Iterator[Operation]:
  value = operation.operands[0]
  dtype = operation.results[0].dtype
  # Integers of one byte are quantized values, not indices.
  is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 1
  if operation.casts and value.is_floating and is_integer:
    yield from _direct(before)
  # Both `x % 1` and `x - floor(x)` are the remainder of a value after whole periods.
  # The integer side has passed a floor. The other side has not.
  wraps = operation.eqn.primitive is p.sub_p and "integer" in before[1].passed - before[0].passed
  if operation.eqn.primitive is p.rem_p or (wraps and before[0].rounding is before[1].rounding):
    yield from _direct(before[:1])


def _comparison(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if not operation.facts.tests or len(before) < 2:
    return
  values = operation.operands
  # The maximum may be on either side of the comparison.
  for number, other in ((0, 1), (1, 0)):
    rounding = before[number].rounding
    is_own = moved_from(values[number]) in before[other].order_of
    if is_own and rounding is not None and not _is_derivative(operation, values[other]):
      yield rounding


def _is_derivative(comparison: Operation, order: Value) -> bool:
  """Whether a comparison belongs to the derivative of the call that computes the maximum."""
  # The derivative of a maximum compares each element with it, to find the argument that was chosen.
  made_by = order.made_by
  while made_by is not None and made_by.facts.group != "order":
    made_by = made_by.operands[0].made_by if made_by.operands else None
  return made_by is not None and _same_call(made_by, comparison)


def _same_call(one: Operation, other: Operation) -> bool:
  calls = [lines_of_call(*(step.eqn for step in x.step.enclosing())) for x in (one, other)]
  return bool(calls[0]) and calls[0] == calls[1]


def _complex_exponential(operation: Operation, before: list[History]) -> Iterator[Operation]:
  dtype = operation.operands[0].dtype
  is_complex = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
  if operation.facts.role == "exponential" and is_complex:
    yield from _direct(before)


def _linear_algebra(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if operation.facts.role == "linear algebra":
    yield from _direct(before)


def _difference(operation: Operation, before: list[History]) -> Iterator[Operation]:
  # Additions and subtractions alone can cancel.
  if operation.facts.gradient != "added":
    return
  left, right = before
  # `a - b` of equal signs cancels, and so does `a + b` of different signs.
  subtracts = (left.negative == right.negative) == (operation.eqn.primitive is p.sub_p)
  shared = left.products.keys() & right.products.keys() & (left.own | right.own)
  for root in shared if subtracts else ():
    # Roundings that both sides share cancel exactly.
    differing = left.products[root] ^ right.products[root]
    yield from sorted(differing, key=lambda x: x.step.number)


def _denominator(operation: Operation, before: list[History]) -> Iterator[Operation]:
  # `integer_pow` divides only with a negative exponent. Other primitives here always divide.
  power = operation.eqn.params.get("y", -1)
  if operation.facts.divides and (operation.eqn.primitive is not p.integer_pow_p or power < 0):
    for rounding in _direct(before[-1:], "sum"):
      # Bfloat16 has the range of float32, so it neither overflows nor underflows here.
      if any(v.dtype == jnp.float16 for v in rounding.results):
        yield rounding


def _lookup(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if operation.facts.flops is None or operation.matmul_dtype is None:
    return
  # A one-hot matmul in low precision selects rounded rows of the table.
  low = all(v.is_low for v in operation.operands[:2]) and in_low_region(operation)
  for mask, table in ((0, 1), (1, 0)):
    source = moved_from(operation.operands[table])
    if low and before[mask].mask and source.is_wide and source.kind == "constant":
      yield operation


def _float32_matmul(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if is_float32_of_inputs(operation, before):
    yield operation


_SINKS: Mapping[RiskKind, Callable[[Operation, list[History]], Iterator[Operation]]] = {
  "angle": _angle,
  "index": _index,
  "comparison": _comparison,
  "complex exponential": _complex_exponential,
  "linear algebra": _linear_algebra,
  "difference": _difference,
  "denominator": _denominator,
  "lookup": _lookup,
  "float32 matmul": _float32_matmul,
}
