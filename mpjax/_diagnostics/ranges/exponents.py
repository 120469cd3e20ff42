"""Counting the exponents of floating values exactly, and what narrow dtypes lose.

All is read from the bits of the numbers: a CPU flushes subnormal numbers to zero in arithmetic and
in comparisons.
"""

import collections
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._core.types import Array, DType, NumpyArray

FORMATS: tuple[str, ...] = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes for which it is counted what they would lose."""

FATES: tuple[str, ...] = ("zero", "subnormal", "overflow")
"""What becomes of a number that a dtype cannot represent."""


class Tally:
  """Counts of numbers: the fields of a `GroupRanges`."""

  def __init__(self) -> None:
    self.exponents: collections.Counter[int] = collections.Counter()
    self.zero = self.inf = self.nan = self.lost_updates = 0
    self.lost = {name: dict.fromkeys(FATES, 0) for name in FORMATS}
    self.largest = 0.0

  def add(self, x: Array, lost: Array | None = None) -> None:
    """Counts the elements of an array, of which some, updates, are `lost`: they change nothing."""
    bits = _magnitude(np.asarray(x).reshape(-1))
    dtype = np.dtype(f"float{8 * bits.itemsize}")
    digits, infinity = int(np.finfo(dtype).nmant), _bits(math.inf, dtype)
    ends = infinity >> digits
    counts = np.bincount((bits >> bits.dtype.type(digits)).astype(np.intp), minlength=ends + 1)
    zero = int(np.count_nonzero(bits == 0)) if counts[0] else 0
    inf = int(np.count_nonzero(bits == infinity)) if counts[ends] else 0
    self.zero, self.inf, self.nan = (
      self.zero + zero,
      self.inf + inf,
      self.nan + int(counts[ends]) - inf,
    )
    self.lost_updates += 0 if lost is None else int(np.count_nonzero(lost))
    counts[0] -= zero
    finite = int(counts[:ends].sum())
    if not finite:
      return
    largest = np.max(bits, where=bits < infinity, initial=0) if counts[ends] else bits.max()
    self.largest = max(self.largest, float(largest.view(dtype)))
    bias = 1 - int(np.finfo(dtype).minexp)
    fields = np.flatnonzero(counts[1:ends]) + 1
    self.exponents.update({int(e) - bias: int(counts[e]) for e in fields})
    if counts[0]:
      tiny = bits[(bits > 0) & (bits >> bits.dtype.type(digits) == 0)]
      self.exponents.update((np.frexp(tiny.view(dtype))[1] - 1).tolist())
    below = np.cumsum(counts) - counts

    def smaller(border: int) -> int:
      """How many are not zero and smaller; few of the borders lie among the numbers of an array."""
      field = border >> digits
      return int(np.count_nonzero(bits < border)) - zero if counts[field] else int(below[field])

    for name, fates in self.lost.items():
      to_zero, to_subnormal, to_finite = map(smaller, limits(name, dtype.name))
      fates["zero"] += to_zero
      fates["subnormal"] += to_subnormal - to_zero
      fates["overflow"] += finite - to_finite

  def as_dict(self) -> Mapping[str, Any]:
    """Returns the counts by name."""
    return {**vars(self), "exponents": {e: self.exponents[e] for e in sorted(self.exponents)}}


def _magnitude(x: NumpyArray) -> NumpyArray:
  """Returns the bits of |x| in float32, or in float64 if it is that wide."""
  if np.iscomplexobj(x):
    x = np.concatenate([x.real, x.imag])
  x = x if x.dtype.itemsize > 4 else x.astype(np.float32)
  unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}").type
  return np.ascontiguousarray(x).view(unsigned) & (np.iinfo(unsigned).max >> unsigned(1))


def _bits(number: float, dtype: DType) -> int:
  return int(np.asarray(number, dtype).view(f"uint{8 * dtype.itemsize}"))


@functools.cache
def limits(name: str, source: str) -> tuple[int, int, int]:
  """Returns the bits of the smallest numbers whose cast is not zero, not subnormal, not finite.

  The cast is to the dtype `name`, from "float32" or "float64".
  """
  narrow, wide = jnp.dtype(name), np.dtype(source)
  normal = float(jnp.finfo(narrow).smallest_normal)

  def first(border: float) -> int:
    """The bits of the smallest number whose cast is at least `border`, or NaN."""
    below, above = 0, _bits(math.inf, wide)
    while above - below > 1:
      middle = (below + above) // 2
      number = np.asarray(middle, f"uint{8 * wide.itemsize}").view(wide)
      with np.errstate(all="ignore"):
        rounded = float(number.astype(narrow))
      below, above = (middle, above) if rounded < border else (below, middle)
    return above

  smallest = float(jnp.finfo(narrow).smallest_subnormal)
  return first(smallest), first(normal), first(math.inf)
