"""Which numbers of a function are known before it runs: literals, constants, what is filled so."""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.types import DType
from mpjax._diagnostics.audit.causes import is_wide
from mpjax._diagnostics.audit.graph import Operation, Value
from mpjax._jaxprs.primitives import facts_of

_LARGEST = 1 << 22
"""Elements: a constant with more is not looked at."""


def lost_number(value: Value, dtype: DType) -> str | None:
  """Returns what a cast to low precision makes of a number in an array, if that is inf or 0.

  Args:
    value: what is cast.
    dtype: to which.
  """
  for number in _numbers(value):
    with np.errstate(over="ignore", under="ignore"):
      cast = float(np.asarray(number, np.float64).astype(dtype))
    if math.isfinite(number) and not math.isfinite(cast):
      return f"{number:.4g} becomes {cast}"
    if number != 0 and cast == 0:
      return f"{number:.4g} becomes 0"
  return None


def _numbers(value: Value) -> Iterator[float]:
  """Yields numbers that an array holds: of a constant the largest one, regardless of its sign."""
  seen, left = set[Value](), [value]
  while left:
    each = left.pop()
    if each in seen or each.dtype is None or not jnp.issubdtype(each.dtype, jnp.floating):
      continue
    seen.add(each)
    if each.data is not None:
      yield from _largest(each)
    elif each.made_by is not None and _moves(each.made_by):
      left += each.made_by.operands


def _moves(operation: Operation) -> bool:
  """Whether it computes no other numbers: a cast of a weakly typed number is one of these."""
  is_cast = operation.eqn.primitive is convert_element_type_p
  return facts_of(operation.eqn).moves or (is_cast and is_wide(operation.results[0]))


def _largest(value: Value) -> Iterator[float]:
  data = value.data
  known = isinstance(data, (np.ndarray, np.generic, float, int))
  if isinstance(data, jax.Array) and not isinstance(data, Tracer):
    known = data.is_fully_addressable
  if known and 0 < value.size <= _LARGEST:
    array = np.asarray(data).astype(np.float64)
    yield float(array.flat[np.argmax(np.abs(array))])
