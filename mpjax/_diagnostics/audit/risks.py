"""Operations in low precision that float32 would be safer for."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import primitives as p

from mpjax._core.types import DType
from mpjax._diagnostics.audit.modules import summed
from mpjax._jaxprs.graph import Graph, Operation, Value
from mpjax._jaxprs.locations import Direction, Source

_LONG_SUM = 64
"""Terms: a sum of fewer loses no more than a few roundings."""

_LARGEST = 1 << 22
"""Elements: a constant with more is not looked at."""


class Risk(NamedTuple):
  """Operations in low precision that float32 would be safer for.

  Args:
    path: of the module or named scope.
    operation: the name of the primitive.
    direction: its pass.
    dtype: in which it runs.
    source: its line; None if unknown.
    reason: what may go wrong.
  """

  path: str
  operation: str
  direction: Direction
  dtype: str
  source: Source | None
  reason: str


def find_risks(graph: Graph) -> tuple[Risk, ...]:
  """Returns what runs in low precision and would be safer in float32, in the order it runs."""
  return summed(
    Risk(x.where.path, x.name, x.where.direction, str(dtype), x.where.source, reason)
    for x in graph.computing()
    for dtype, reason in _risks(x)
  )


def _risks(operation: Operation) -> Iterator[tuple[DType | None, str]]:
  """Yields the dtypes in which numbers of an operation are lost, and how."""
  if not operation.results:
    return
  operands, eqn, result = operation.operands, operation.eqn, operation.results[0]
  low = next((v for v in operands if v.is_low), None)
  # Integers that are counted, or cast to and from what is too coarse for them.
  if result.is_low and (operation.casts or eqn.primitive is p.iota_p):
    most = _exact_integers(result)
    length = 0 if operation.casts else result.aval.shape[eqn.params["dimension"]]
    if length > most + 1 or any(map(_is_integer, operands)):
      yield result.dtype, f"integers above {most} are rounded"
    elif operation.casts and operands[0].is_wide:
      yield from _lost_number(operands[0], result.dtype)
  if low is None:
    return
  if operation.casts and _is_integer(result):
    yield low.dtype, f"integers above {_exact_integers(low)} were rounded before this cast"
  # What the float32 list computes. JAX shows no accumulator: a sum whose result is low is added up
  # in low precision. An add of two gradients rounds once, as any other.
  if result.is_low and operation.part == "float32" and eqn.primitive is not p.add_jaxvals_p:
    terms = low.size // max(result.size, 1)
    if low.aval.shape == result.aval.shape:
      yield low.dtype, "less exact than in float32"
    elif terms >= _LONG_SUM:
      yield low.dtype, f"{terms:,} terms are added in low precision"
  # Numbers in the code, which were cast before the function was traced.
  for v in operands:
    if v.kind == "literal" and v.is_low:
      number = float(v.label)
      # What is compared with inf is inf in the source, as in the derivative of `jax.nn.softplus`,
      # and a maximum that starts at -inf, as that of `jax.nn.softmax` does, lost nothing.
      starts = eqn.primitive is (p.max_p if number < 0 else p.min_p)
      if math.isinf(number) and not (operation.moves or operation.facts.tests or starts):
        yield low.dtype, "a number became inf in low precision"
      if number == 0 and (_adds_zero(operation, v) or _divides_by_zero(operation)):
        yield low.dtype, "a number may have become 0 in low precision"


def _is_integer(value: Value) -> bool:
  """Whether it holds integers that low precision may be too coarse for."""
  dtype = value.dtype
  return dtype is not None and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 1


def _exact_integers(value: Value) -> int:
  """Returns the integer up to which a dtype has all of them."""
  return 2 ** (jnp.finfo(value.dtype).nmant + 1)


def _divides_by_zero(operation: Operation) -> bool:
  """Whether a maximum with 0, as `jnp.maximum(x, 1e-8)` is in float16, is divided by."""
  return operation.eqn.primitive is p.max_p and any(
    each.eqn.primitive in (p.log_p, p.rsqrt_p)
    or (each.eqn.primitive is p.div_p and each.operands[1] is operation.results[0])
    for each in operation.results[0].consumers
  )


def _adds_zero(operation: Operation, literal: Value) -> bool:
  """Whether 0 is added to an array: an epsilon that has become 0."""
  added = operation.facts.gradient == "added" and not operation.moves
  return added and operation.where.direction == "forward" and literal in operation.operands[1:]


def _lost_number(value: Value, dtype: DType | None) -> Iterator[tuple[DType | None, str]]:
  """Yields what a cast makes of a number that is known before the function runs: inf or 0."""
  seen, left = set[Value](), [value]
  while left:
    each = left.pop()
    if each in seen or each.dtype is None or not jnp.issubdtype(each.dtype, jnp.floating):
      continue
    seen.add(each)
    made_by, data = each.made_by, each.data
    is_number = isinstance(data, (jax.Array, np.ndarray, np.generic, float, int))
    if isinstance(data, jax.Array):
      is_number = not isinstance(data, Tracer) and data.is_fully_addressable
    if is_number and 0 < each.size <= _LARGEST:
      # Of a constant it is the largest number, regardless of its sign.
      array = np.asarray(data).astype(np.float64)
      number = array.flat[np.argmax(np.abs(array))]
      with np.errstate(over="ignore", under="ignore"):
        cast = float(number.astype(dtype))
      if (math.isfinite(number) and not math.isfinite(cast)) or (number != 0 and cast == 0):
        yield dtype, f"{number:.4g} becomes {cast if cast else 0}"
        return
    # A cast of a weakly typed number moves it too.
    elif made_by is not None and (made_by.facts.moves or (made_by.casts and each.is_wide)):
      left += made_by.operands
