"""Find operations in low precision that would be safer in float32.

They are casts that lose integers or numbers of the code, the operations of the float32 list, and
numbers that were cast before the function was traced.
"""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import primitives as p

from mpjax._core.types import DType
from mpjax._diagnose.audit.findings import Lossy, summed
from mpjax._jaxpr.graph import Graph, Operation, Value

_LONG_SUM = 64
"""The fewest terms of a sum that is listed. A shorter sum has only a few roundings."""

_MOST_ELEMENTS = 1 << 22
"""The most elements of a constant whose numbers are read."""


_Loss: TypeAlias = tuple[DType | None, str]
"""A loss of precision: the dtype in which it happens, and a text for the report."""


def find_lossy(graph: Graph) -> tuple[Lossy, ...]:
  """Returns the operations in low precision that would be safer in float32.

  >>> import jax, jax.numpy as jnp
  >>> from mpjax._jaxpr.graph import Graph
  >>> graph = Graph(jax.make_jaxpr(jnp.exp)(jnp.ones(3, "bfloat16")))
  >>> [row.reason for row in find_lossy(graph)]
  ['less exact than in float32']
  """
  rows: list[Lossy] = []
  for operation in graph.computing():
    # A print or a callback has no result whose dtype could round.
    if not operation.results:
      continue
    losses = [
      *_of_integers(operation),
      *_of_known_numbers(operation),
      *_of_the_float32_list(operation),
      *_of_literals(operation),
    ]
    where = operation.where
    rows += [
      Lossy(where.path, operation.name, where.direction, str(dtype), where.source, reason)
      for dtype, reason in losses
    ]
  return summed(rows)


# Integers.


def _of_integers(operation: Operation) -> Iterator[_Loss]:
  """Yields the loss of integers that are cast to or from low precision, or counted in it."""
  result = operation.results[0]
  if operation.eqn.primitive is p.iota_p and result.is_low:
    # `jnp.arange(257, dtype=bfloat16)` ends with 256, which is exact.
    most = _largest_integer(result)
    length = result.aval.shape[operation.eqn.params["dimension"]]
    if length > most + 1:
      yield result.dtype, f"integers above {most} are rounded"
  if not operation.casts:
    return
  operand = operation.operands[0]
  # Rounding to an integer type shows that whole numbers are meant, such as positions.
  were_rounded = operand.is_low and _is_integer(result)
  are_rounded = result.is_low and _is_integer(operand)
  if not (were_rounded or are_rounded) or _is_known_and_exact(operand, result):
    return
  if were_rounded:
    text = f"integers above {_largest_integer(operand)} were rounded before this cast"
    yield operand.dtype, text
  else:
    yield result.dtype, f"integers above {_largest_integer(result)} are rounded"


def _is_known_and_exact(operand: Value, result: Value) -> bool:
  """Whether a cast is of numbers in the code, such as the 0 of `jnp.pad`, and rounds none."""
  ends = _ends(operand, lambda _, made_by: made_by.moves)
  # The numbers of an array that the function closes over may be others in the next call.
  numbers = [None if v.aval.shape else _largest_number(v) for v in ends]
  # JAX writes the rounded number into the jaxpr. Up to the largest integer, none was rounded.
  if operand.is_low:
    most = _largest_integer(operand)
    return all(n is not None and abs(n) <= most for n in numbers)
  with np.errstate(over="ignore"):
    return all(n is not None and float(n.astype(result.dtype)) == n for n in numbers)


def _ends(value: Value, passes: Callable[[Value, Operation], bool]) -> Iterator[Value]:
  """Yields the values that become a value by operations that `passes` names.

  Args:
    value: the value.
    passes: returns whether to go on from a value to the operands of its operation.
  """
  seen = set[Value]()
  pending = [value]
  while pending:
    each = pending.pop()
    # A loop leads back to its carry.
    if each in seen:
      continue
    seen.add(each)
    if each.made_by is not None and passes(each, each.made_by):
      pending += each.made_by.operands
    else:
      yield each


def _is_integer(value: Value) -> bool:
  """Whether a value is an integer of more than 8 bits, which all low precisions could hold."""
  dtype = value.dtype
  return dtype is not None and dtype.itemsize > 1 and jnp.issubdtype(dtype, jnp.integer)


def _largest_integer(value: Value) -> int:
  """Returns the integer up to which a floating dtype holds every integer."""
  # The mantissa has one implicit bit.
  return 2 ** (jnp.finfo(value.dtype).nmant + 1)


# Numbers that are known before the function runs.


def _of_known_numbers(operation: Operation) -> Iterator[_Loss]:
  """Yields the loss of a cast to low precision that makes a known number inf or 0."""
  result = operation.results[0]
  if not (operation.casts and result.is_low and operation.operands[0].is_wide):
    return

  def passes(value: Value, made_by: Operation) -> bool:
    # JAX casts a weakly typed number before it fills an array with it.
    is_number = made_by.casts and value.is_wide
    return value.is_floating and (made_by.facts.moves or is_number)

  for source in _ends(operation.operands[0], passes):
    # One number of an array is enough evidence, and one row per cast is enough text.
    text = _lost(source, result.dtype) if source.is_floating else ""
    if text:
      yield result.dtype, text
      return


def _lost(value: Value, dtype: DType | None) -> str:
  """Returns how a cast changes the largest number of a constant to inf or 0; "" if it does not."""
  # The number of the largest magnitude overflows first. If it becomes 0, all numbers do.
  number = _largest_number(value)
  if number is None:
    return ""
  with np.errstate(over="ignore", under="ignore"):
    cast = float(number.astype(dtype))
  is_overflow = math.isfinite(number) and not math.isfinite(cast)
  is_underflow = number != 0 and cast == 0
  if not is_overflow and not is_underflow:
    return ""
  return f"{number:.4g} becomes {cast if cast else 0}"


def _largest_number(value: Value) -> np.float64 | None:
  """Returns the number of the largest magnitude in a constant; None if it cannot be read."""
  data = value.data
  # A traced array has no numbers, and an array of other hosts cannot be read here.
  is_readable = not isinstance(data, Tracer) and getattr(data, "is_fully_addressable", True)
  if data is None or not is_readable or not 0 < value.size <= _MOST_ELEMENTS:
    return None
  array = np.asarray(data, np.float64)
  return array.flat[np.argmax(np.abs(array))]


# Operations of the float32 list.


def _of_the_float32_list(operation: Operation) -> Iterator[_Loss]:
  """Yields the loss of an operation of the float32 list, or of a long sum, in low precision."""
  low = next((v for v in operation.operands if v.is_low), None)
  result = operation.results[0]
  # An addition of two gradients rounds once, like any other addition.
  is_listed = operation.part == "float32" and operation.eqn.primitive is not p.add_jaxvals_p
  if low is None or not result.is_low or not is_listed:
    return
  # The ratio of the sizes is the number of terms of each sum.
  terms = low.size // max(result.size, 1)
  if low.aval.shape == result.aval.shape:
    yield low.dtype, "less exact than in float32"
  elif terms >= _LONG_SUM:  # A jaxpr states no accumulator of a sum but the dtype of its result.
    yield low.dtype, f"{terms:,} terms are added in low precision"


# Numbers that were cast before the function was traced.


def _of_literals(operation: Operation) -> Iterator[_Loss]:
  """Yields the losses of numbers that may have become inf or 0 when they were cast."""
  for literal in operation.operands:
    # JAX writes the rounded number into the jaxpr, so the original number is unknown.
    if literal.kind != "literal" or not literal.is_low:
      continue
    number = float(literal.label)
    if math.isinf(number) and not _may_be_infinite(operation, number):
      yield literal.dtype, "a number became inf in low precision"
    # Adding 0 is useless, so the code must have named a small epsilon that became 0.
    if number == 0 and (_is_added_epsilon(operation, literal) or _bounds_a_divisor(operation)):
      yield literal.dtype, "a number may have become 0 in low precision"


def _may_be_infinite(operation: Operation, number: float) -> bool:
  """Whether code writes inf for an operand of such an operation.

  It does in comparisons, as the derivative of `jax.nn.softplus`, in masks, and as the start of a
  maximum, as in `jax.nn.softmax`.
  """
  # -inf is the start of a maximum, and inf the start of a minimum.
  starts = operation.eqn.primitive is (p.max_p if number < 0 else p.min_p)
  return operation.moves or operation.facts.tests or starts


def _is_added_epsilon(operation: Operation, literal: Value) -> bool:
  """Whether a literal is the second term of an addition in the forward pass."""
  is_added = operation.facts.gradient == "added" and not operation.moves
  # Derivative rules add zeros, and `0 + x` comes from sums that start at 0.
  return is_added and operation.where.direction == "forward" and literal in operation.operands[1:]


def _bounds_a_divisor(operation: Operation) -> bool:
  """Whether an operation is a maximum whose result is a divisor, or an operand of log or rsqrt."""
  result = operation.results[0]
  # `x / jnp.maximum(norm, eps)` with an epsilon of 0 may divide by 0.
  return operation.eqn.primitive is p.max_p and any(
    consumer.eqn.primitive in (p.log_p, p.rsqrt_p)
    or (consumer.eqn.primitive is p.div_p and consumer.operands[1] is result)
    for consumer in result.consumers
  )
