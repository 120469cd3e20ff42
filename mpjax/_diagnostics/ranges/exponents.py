"""Counting the exponents of floating values under `jit`, exactly, and what narrow dtypes lose.

All is read from the bits of the numbers: a CPU flushes subnormal numbers to zero in arithmetic and
in comparisons, and XLA may leave out a rounding to bfloat16 that only a wider operation reads.
"""

import functools
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import Array, DType, NumpyArray

FORMATS: tuple[str, ...] = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes for which it is counted what they would lose."""

FATES: tuple[str, ...] = ("zero", "subnormal", "overflow")
"""What becomes of a number that a dtype cannot represent: see `Shares`."""


class Grid(NamedTuple):
  """The exponents that are told apart.

  Fields:
    dtype: float32, or float64 where some value is that wide.
    low: the exponent of the smallest subnormal number.
    high: that of the largest number.
  """

  dtype: DType
  low: int
  high: int

  @property
  def bins(self) -> int:
    """How many exponents there are."""
    return self.high - self.low + 1

  @property
  def columns(self) -> int:
    """How many counts there are: exponents, zero, inf, NaN, fates by dtype, lost updates."""
    return self.bins + 3 + len(FORMATS) * len(FATES) + 1


def grid(dtypes: Iterable[DType]) -> Grid:
  """Returns the grid for values of these dtypes."""
  wide = any(jnp.finfo(d).bits > 32 for d in dtypes if jnp.issubdtype(d, jnp.floating))
  dtype = np.dtype(np.float64 if wide else np.float32)
  info = np.finfo(dtype)
  return Grid(dtype, int(info.minexp) - int(info.nmant), int(info.maxexp) - 1)


class Counts(NamedTuple):
  """Counts by row, as a jitted function updates them.

  Fields:
    low: uint32 of shape (rows, columns), the last 32 bits of each count.
    high: likewise, the first ones: the logits of one large model are 2**32 numbers in few steps.
    largest: unsigned of shape (rows,), the bits of the largest finite magnitude.
  """

  low: Array
  high: Array
  largest: Array


def no_counts(rows: int, on: Grid) -> Counts:
  """Returns the counts of nothing."""
  # Two buffers, which a jitted function may overwrite one by one.
  low, high = (jnp.zeros((rows, on.columns), jnp.uint32) for _ in range(2))
  return Counts(low, high, jnp.zeros((rows,), _unsigned(on.dtype)))


def counted(counts: Counts, row: int, x: Array, on: Grid, lost: Array | None = None) -> Counts:
  """Returns counts with the elements of `x` added to a row.

  Args:
    counts: the counts so far.
    row: the row.
    x: floating or complex, of any shape. Real and imaginary parts are two numbers.
    on: the exponents.
    lost: which elements of `x`, an update, change nothing.
  """
  bits = _magnitude(x, on).reshape(-1)
  new = _columns(bits, on, lost)
  low = counts.low[row] + new
  carry = (low < new).astype(jnp.uint32)
  finite = jnp.where(bits < _infinity(on.dtype), bits, jnp.zeros_like(bits))
  return Counts(
    counts.low.at[row].set(low),
    counts.high.at[row].add(carry),
    counts.largest.at[row].max(jnp.max(finite, initial=bits.dtype.type(0))),
  )


def added(counts: Counts, more: Counts) -> Counts:
  """Returns the sum of two counts."""
  low = counts.low + more.low
  high = counts.high + more.high + (low < more.low).astype(jnp.uint32)
  return Counts(low, high, jnp.maximum(counts.largest, more.largest))


def over_devices(counts: Counts, axes: frozenset[Hashable]) -> Counts:
  """Returns the sum of the counts of all devices, in a `shard_map` over these axes."""
  names = tuple(axes)
  half = np.uint32(16)
  # The sum of 2**16 devices' parts does not overflow.
  last, middle = counts.low & np.uint32(0xFFFF), counts.low >> half
  last, middle, high = jax.lax.psum((last, middle, counts.high), names)
  middle = middle + (last >> half)
  low = (last & np.uint32(0xFFFF)) | (middle << half)
  return Counts(low, high + (middle >> half), jax.lax.pmax(counts.largest, names))


def as_integers(counts: Counts) -> tuple[NumpyArray, NumpyArray]:
  """Returns the counts as int64 of shape (rows, columns), and the largest magnitudes."""
  low, high, largest = map(np.asarray, counts)
  total = low.astype(np.int64) + (high.astype(np.int64) << np.int64(32))
  return total, largest.view(np.float32 if largest.itemsize == 4 else np.float64)


def same_bits(a: Array, b: Array) -> Array:
  """Returns where two arrays of one floating dtype are equal, as `==` of NumPy is.

  Two zeros are equal, and a NaN equals nothing. On a CPU `==` of JAX also finds two different
  subnormal numbers equal.
  """
  on = grid([a.dtype])
  first, second = _magnitude(a, on), _magnitude(b, on)
  zero = jnp.logical_and(first == 0, second == 0)
  unsigned = _unsigned(a.dtype)
  equal = _bitcast(a, unsigned) == _bitcast(b, unsigned)
  return jnp.logical_or(zero, jnp.logical_and(equal, first <= _infinity(on.dtype)))


def is_nonzero(x: Array) -> Array:
  """Returns where a floating array is not zero, which subnormal numbers are not."""
  return _magnitude(x, grid([x.dtype])) != 0


def _unsigned(dtype: DType) -> DType:
  return np.dtype(f"uint{8 * dtype.itemsize}")


def _bitcast(x: Array, dtype: DType) -> Array:
  return jax.lax.bitcast_convert_type(x, dtype)


def _infinity(dtype: DType) -> np.unsignedinteger:
  return np.asarray(np.inf, dtype).view(_unsigned(dtype))[()]


def _magnitude(x: Array, on: Grid) -> Array:
  """Returns the bits of |x| in the dtype of a grid, as unsigned integers."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    parts = jnp.stack([jnp.real(x), jnp.imag(x)])
    return _magnitude(parts, on)
  unsigned = _unsigned(on.dtype)
  if x.dtype == jnp.bfloat16:
    # The first half of the bits of a float32; a cast would flush subnormal numbers.
    x = _bitcast(_bitcast(x, np.dtype(np.uint16)).astype(jnp.uint32) << np.uint32(16), np.float32)
  elif x.dtype.itemsize < 4:
    x = x.astype(jnp.float32)  # What is subnormal there is not in float32.
  if x.dtype.itemsize < on.dtype.itemsize:
    x = x.astype(on.dtype)
  mask = np.asarray(~(1 << (8 * on.dtype.itemsize - 1)) & (2 ** (8 * on.dtype.itemsize) - 1))
  return _bitcast(x, unsigned) & mask.astype(unsigned)


def _columns(bits: Array, on: Grid, lost: Array | None) -> Array:
  """Returns the counts of the elements with these bits, uint32 of shape (columns,)."""
  info = np.finfo(on.dtype)
  kind = bits.dtype.type
  infinity = _infinity(on.dtype)
  biased = (bits >> kind(info.nmant)).astype(jnp.int32)
  digits = 8 * on.dtype.itemsize - 1 - jax.lax.clz(bits).astype(jnp.int32)
  # Position 0 is the smallest subnormal number, of which only the last digit is set.
  index = jnp.where(biased == 0, digits, biased + np.int32(info.nmant - 1))
  index = jnp.where(bits == 0, np.int32(on.bins), index)
  index = jnp.where(bits == infinity, np.int32(on.bins + 1), index)
  index = jnp.where(bits > infinity, np.int32(on.bins + 2), index)
  histogram = jnp.zeros((on.bins + 3,), jnp.uint32).at[index].add(np.uint32(1))
  masks = []
  for name in FORMATS:
    nonzero, normal, over = (kind(b) for b in limits(name, on.dtype.name))
    masks += [
      jnp.logical_and(bits > 0, bits < nonzero),
      jnp.logical_and(bits >= nonzero, bits < normal),
      jnp.logical_and(bits >= over, bits < infinity),
    ]
  masks.append(jnp.zeros_like(masks[0]) if lost is None else lost.reshape(-1))
  sums = jnp.sum(jnp.stack(masks), axis=1, dtype=jnp.uint32)
  return jnp.concatenate([histogram, sums])


@functools.cache
def limits(name: str, source: str) -> tuple[int, int, int]:
  """Returns where a cast of a positive number begins to lose nothing, and to overflow.

  Args:
    name: the narrow dtype.
    source: "float32" or "float64".

  Returns:
    The bits of the smallest numbers of dtype `source` whose cast is not zero, is not subnormal, and
    is not finite.
  """
  narrow, wide = jnp.dtype(name), np.dtype(source)
  normal = jnp.finfo(narrow).smallest_normal

  def first(is_true: str) -> int:
    below, above = 0, int(_infinity(wide))
    while above - below > 1:
      middle = (below + above) // 2
      number = np.asarray(middle, _unsigned(wide)).view(wide)
      with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = float(number.astype(narrow))
      truth = {
        "nonzero": rounded != 0,
        "normal": not rounded < float(normal),
        "over": not np.isfinite(rounded),
      }
      below, above = (below, middle) if truth[is_true] else (middle, above)
    return above

  return first("nonzero"), first("normal"), first("over")
