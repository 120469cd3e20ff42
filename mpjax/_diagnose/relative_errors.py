"""The relative error of arrays, which all diagnostics share."""

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import Array, NumpyArray

Pair: TypeAlias = tuple[Array | NumpyArray, Array | NumpyArray]
"""An array, and the exact one."""


class RelativeErrors(NamedTuple):
  """Relative errors, by the leading axes of the arrays.

  Fields:
    values: the norm of the differences over the norm of the exact arrays; inf if one array of a
      pair alone is not finite, or if the exact arrays are zero and the others are not.
    of_zero: which errors are inf because the exact arrays are zero.
  """

  values: NumpyArray
  of_zero: NumpyArray


def relative_errors(pairs: Iterable[Pair], lead: int = 0) -> RelativeErrors:
  """Returns the errors of some arrays together, for each index of their first `lead` axes."""
  difference, total = np.zeros(()), np.zeros(())
  for found, exact in pairs:
    # Errors may be below the spacing of float32, and squares overflow float16.
    is_complex = np.iscomplexobj(found) or np.iscomplexobj(exact)
    wide = np.complex128 if is_complex else np.float64
    x, y = np.asarray(found).astype(wide), np.asarray(exact).astype(wide)
    with np.errstate(all="ignore"):
      # If both arrays have the same inf or NaN, as in a mask, they do not differ there.
      same = (x == y) | (np.isnan(x) & np.isnan(y))
      away = np.where(same, 0, np.abs(x - y) ** 2)
      size = np.where(np.isfinite(y), np.abs(y) ** 2, 0)
    axes = tuple(range(lead, x.ndim))
    # If one array alone is not finite, the error is inf rather than NaN, so that it counts.
    difference = difference + np.where(np.isfinite(away), away, math.inf).sum(axes)
    total = total + size.sum(axes)
  with np.errstate(all="ignore"):
    # Equal arrays have the error 0, also where both are 0.
    errors = np.where(difference == 0, 0.0, np.sqrt(difference / total))
  return RelativeErrors(errors, (difference > 0) & np.isfinite(difference) & (total == 0))


def relative_error(pairs: Iterable[Pair]) -> float:
  """Returns the error of some arrays together, see `RelativeErrors`."""
  return float(relative_errors(pairs).values)


def norm_of(arrays: Iterable[NumpyArray]) -> float:
  """Returns the norm of all elements of some arrays together."""
  # Squares of gradients overflow float32. NumPy's complex128 holds those of all float32 numbers.
  with np.errstate(over="ignore", invalid="ignore"):
    return math.sqrt(sum(float(np.sum(np.abs(np.asarray(x, complex)) ** 2)) for x in arrays))
