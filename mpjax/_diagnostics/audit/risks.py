"""Operations in low precision that float32 would be safer for."""

import collections
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core.primitives import (
  add_jaxvals_p,
  convert_element_type_p,
  div_p,
  iota_p,
  log_p,
  max_p,
  rsqrt_p,
)

from mpjax._core.dtypes import is_low_precision
from mpjax._core.types import DType
from mpjax._diagnostics.audit.causes import is_low, is_wide
from mpjax._diagnostics.audit.graph import Graph, Operation, Value
from mpjax._diagnostics.audit.leaks import module_path
from mpjax._diagnostics.audit.numbers import lost_number
from mpjax._jaxprs.locations import Direction, Source
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitives import facts_of

_LISTS = OpLists()
_LONG_SUM = 64
"""Terms: a sum of fewer loses no more than a few roundings."""


class Risk(NamedTuple):
  """Operations in low precision that float32 would be safer for.

  Args:
    path: of the module or named scope.
    operation: the name of the primitive.
    direction: its pass.
    dtype: in which it runs.
    source: its line; None if unknown.
    reason: what may go wrong.
    operations: how many of them run.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> risk, = mpjax.audit(jnp.exp)(jax.ShapeDtypeStruct((8,), "float16")).risks
  >>> risk.operation, risk.dtype
  ('exp', 'float16')
  """

  path: str
  operation: str
  direction: Direction
  dtype: str
  source: Source | None
  reason: str
  operations: int


def find_risks(graph: Graph) -> tuple[Risk, ...]:
  """Returns what runs in low precision and would be safer in float32, in the order it runs."""
  counts: collections.Counter[Risk] = collections.Counter()
  for operation in graph.computing():
    for dtype, reason in _risks(operation):
      where = operation.where
      path = module_path(where)
      risk = Risk(path, operation.name, where.direction, dtype, where.source, reason, 0)
      counts[risk] += operation.times
  return tuple(risk._replace(operations=n) for risk, n in counts.items())


def _risks(operation: Operation) -> Iterator[tuple[str, str]]:
  first = next((v for v in operation.operands if is_low(v)), None)
  result = operation.results[0] if operation.results else None
  if operation.eqn.primitive is convert_element_type_p and result is not None:
    yield from _of_cast(operation.operands[0], result)
  if operation.eqn.primitive is iota_p and result is not None and is_low(result):
    most, length = (
      _exact_integers(result.dtype),
      result.aval.shape[operation.eqn.params["dimension"]],
    )
    if length > most + 1:
      yield str(result.dtype), f"integers above {most} are rounded"
  if first is None or first.dtype is None:
    return
  dtype = str(first.dtype)
  if _LISTS.part_of(operation.name, operation.eqn.params) == "float32":
    terms = first.size // max(result.size if result is not None else 1, 1)
    elementwise = result is not None and first.aval.shape == result.aval.shape
    # JAX shows no accumulator: a sum whose result is low is added up in low precision.
    # An add of two gradients rounds once, as any other.
    adds = operation.eqn.primitive is add_jaxvals_p
    if result is not None and is_low(result) and not adds and (elementwise or terms >= _LONG_SUM):
      yield (
        dtype,
        "less exact than in float32"
        if elementwise
        else f"{terms:,} terms are added in low precision",
      )
  for v in operation.operands:
    if v.kind == "literal" and v.dtype is not None and is_low_precision(v.dtype):
      number = float(v.label)
      if math.isinf(number) and not facts_of(operation.eqn).moves:
        yield dtype, "a number became inf in low precision"
      if number == 0 and (_adds_zero(operation, v) or _divides_by_zero(operation)):
        yield dtype, "a number may have become 0 in low precision"


def _of_cast(source: Value, result: Value) -> Iterator[tuple[str, str]]:
  """Yields what is lost in a cast between integers and low precision, and of numbers known."""
  if is_low(result) and result.dtype is not None:
    if _is_integer(source):
      yield str(result.dtype), f"integers above {_exact_integers(result.dtype)} are rounded"
    lost = lost_number(source, result.dtype) if is_wide(source) else None
    if lost is not None:
      yield str(result.dtype), lost
  if is_low(source) and source.dtype is not None and _is_integer(result):
    most = _exact_integers(source.dtype)
    yield str(source.dtype), f"integers above {most} were rounded before this cast"


def _is_integer(value: Value) -> bool:
  """Whether it holds integers that low precision may be too coarse for."""
  dtype = value.dtype
  return dtype is not None and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 1


def _exact_integers(dtype: DType | None) -> int:
  """Returns the integer up to which a dtype has all of them."""
  return 2 ** (jnp.finfo(dtype).nmant + 1)


def _divides_by_zero(operation: Operation) -> bool:
  """Whether a maximum with 0, of which `jnp.maximum(x, 1e-8)` is one in float16, is divided by."""
  if operation.eqn.primitive is not max_p:
    return False
  (result,) = operation.results
  return any(
    each.eqn.primitive in (log_p, rsqrt_p)
    or (each.eqn.primitive is div_p and each.operands[1] is result)
    for each in result.consumers
  )


def _adds_zero(operation: Operation, literal: Value) -> bool:
  """Whether 0 is added to an array: an epsilon, of which nothing is left."""
  added = facts_of(operation.eqn).gradient == "added" and not facts_of(operation.eqn).moves
  return added and operation.where.direction == "forward" and literal in operation.operands[1:]
