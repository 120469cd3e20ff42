"""Counting the exponents of floating values under `jit`, exactly, and what narrow dtypes lose.

All is read from the bits of the numbers: a CPU flushes subnormal numbers to zero in arithmetic and
in comparisons, and XLA may leave out a rounding to bfloat16 that only a wider operation reads.
"""

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.bits import magnitude_bits
from mpjax._core.types import Array, DType, NumpyArray

FORMATS: tuple[str, ...] = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes for which it is counted what they would lose."""

FATES: tuple[str, ...] = ("zero", "subnormal", "overflow")
"""What becomes of a number that a dtype cannot represent: see `Shares`."""


class Grid(NamedTuple):
  """The magnitudes that are told apart: one column of counts for each.

  Fields:
    dtype: float32, or float64 where some value is that wide.
    starts: the bits with which each column begins: every exponent, subnormal ones too, and where
      within an exponent the fate of a number changes in a narrow dtype. Column 0 is zero.
    splits: those of `starts` that are within an exponent.
  """

  dtype: DType
  starts: tuple[int, ...]
  splits: tuple[int, ...]

  @property
  def columns(self) -> int:
    """How many counts there are: those of `starts`, inf, NaN, and lost updates."""
    return len(self.starts) + 3


def grid(dtypes: Iterable[DType]) -> Grid:
  """Returns the grid for values of these dtypes."""
  inexact = [d for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
  return _grid("float64" if any(jnp.finfo(d).bits > 32 for d in inexact) else "float32")


@functools.cache
def _grid(name: str) -> Grid:
  dtype = np.dtype(name)
  digits = int(np.finfo(dtype).nmant)
  # Subnormal numbers: the last digit alone, the last but one, ...; then one exponent at a time.
  whole = {1 << place for place in range(digits)}
  whole |= set(range(1 << digits, int(_infinity(dtype)), 1 << digits))
  splits = {bits for narrow in FORMATS for bits in limits(narrow, name)} - whole
  splits -= {int(_infinity(dtype))}
  return Grid(dtype, (0, *sorted(whole | splits)), tuple(sorted(splits)))


class Counts(NamedTuple):
  """Counts by row, as a jitted function updates them.

  Fields:
    low: uint32 of shape (rows, columns), the last 32 bits of each count.
    high: likewise, the first ones: the logits of one large model are 2**32 numbers in few steps.
    largest: unsigned of shape (rows,), the bits of the largest finite magnitude.
    waiting: what is to be counted yet, see `settled`. A loop cannot carry it.
  """

  low: Array
  high: Array
  largest: Array
  waiting: tuple["Item", ...] = ()


class Item(NamedTuple):
  """Numbers to be counted in a row.

  Fields:
    row: the row.
    bits: their magnitudes, unsigned of shape (n,).
    lost: bool of shape (n,), which of them are lost updates; None for what are no updates.
  """

  row: int
  bits: Array
  lost: Array | None


_SMALL, _TOGETHER = 2**16, 2**18
"""How many numbers are few, and how many wait for each other: XLA takes a tenth of a second to
compile one histogram on a CPU, and a small model has hundreds of values."""


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
  item = Item(row, bits, None if lost is None else lost.reshape(-1))
  if bits.size > _SMALL:
    return _flushed(counts, [item], on)
  counts = counts._replace(waiting=(*counts.waiting, item))
  many = sum(item.bits.size for item in counts.waiting) > _TOGETHER
  return settled(counts, on) if many else counts


def settled(counts: Counts, on: Grid) -> Counts:
  """Returns counts in which nothing waits."""
  if not counts.waiting:
    return counts
  return _flushed(counts._replace(waiting=()), counts.waiting, on)


def _flushed(counts: Counts, items: Sequence[Item], on: Grid) -> Counts:
  rows, columns = counts.low.shape
  bits = jnp.concatenate([item.bits for item in items])
  row = jnp.concatenate([jnp.full(item.bits.shape, item.row, jnp.uint32) for item in items])
  index = [row * np.uint32(columns) + _column(bits, on)]
  for item in items:
    if item.lost is not None:
      # The last column; what lies outside of the table is dropped.
      last = np.uint32((item.row + 1) * columns - 1)
      index.append(jnp.where(item.lost, last, np.uint32(rows * columns)))
  new = jnp.zeros((rows * columns,), jnp.uint32)
  new = new.at[jnp.concatenate(index)].add(np.uint32(1), mode="drop").reshape(rows, columns)
  finite = jnp.where(bits < _infinity(on.dtype), bits, jnp.zeros_like(bits))
  largest = counts.largest.at[row].max(finite, mode="drop")
  low = counts.low + new
  carry = (low < new).astype(jnp.uint32)
  return counts._replace(low=low, high=counts.high + carry, largest=largest)


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
  low, high, largest = map(np.asarray, counts[:3])
  total = low.astype(np.int64) + (high.astype(np.int64) << np.int64(32))
  return total, largest.view(np.float32 if largest.itemsize == 4 else np.float64)


def _unsigned(dtype: DType) -> DType:
  return np.dtype(f"uint{8 * dtype.itemsize}")


def _bitcast(x: Array, dtype: DType) -> Array:
  return jax.lax.bitcast_convert_type(x, dtype)


def _infinity(dtype: DType) -> NumpyArray:
  return np.asarray(np.inf, dtype).view(_unsigned(dtype))


def _magnitude(x: Array, on: Grid) -> Array:
  """Returns the bits of |x| in the dtype of a grid, as unsigned integers."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    parts = jnp.stack([jnp.real(x), jnp.imag(x)])
    return _magnitude(parts, on)
  if x.dtype == jnp.bfloat16:
    # The first half of the bits of a float32; a cast would flush subnormal numbers.
    x = _bitcast(
      _bitcast(x, np.dtype(np.uint16)).astype(jnp.uint32) << np.uint32(16), np.dtype(np.float32)
    )
  elif x.dtype.itemsize < 4:
    x = x.astype(jnp.float32)  # What is subnormal there is not in float32.
  if x.dtype.itemsize < on.dtype.itemsize:
    x = x.astype(on.dtype)
  return magnitude_bits(x)


def _column(bits: Array, on: Grid) -> Array:
  """Returns the column of each number with these bits, as uint32."""
  kind, digits = bits.dtype.type, int(np.finfo(on.dtype).nmant)
  infinity = _infinity(on.dtype)
  biased = (bits >> kind(digits)).astype(jnp.uint32)
  last = np.uint32(8 * on.dtype.itemsize) - jax.lax.clz(bits).astype(jnp.uint32)
  # Column 1 is the smallest subnormal number, of which only the last digit is set.
  index = jnp.where(biased == 0, last, biased + np.uint32(digits))
  for split in on.splits:
    index = index + (bits >= kind(split)).astype(jnp.uint32)
  end = len(on.starts)
  index = jnp.where(bits == infinity, np.uint32(end), index)
  return jnp.where(bits > infinity, np.uint32(end + 1), index)


def exponents_of(counts: NumpyArray, on: Grid) -> dict[int, int]:
  """Returns how many of the finite nonzero numbers in a row of counts have which exponent."""
  found: dict[int, int] = {}
  for start, count in zip(on.starts[1:], counts[1:], strict=False):
    if count:
      exponent = math.frexp(_number(start, on))[1] - 1
      found[exponent] = found.get(exponent, 0) + int(count)
  return found


def fates_of(counts: NumpyArray, on: Grid, name: str) -> dict[str, int]:
  """Returns how many of the finite nonzero numbers in a row of counts have which fate in a dtype.

  Args:
    counts: of shape (columns,).
    on: the grid of the counts.
    name: the narrow dtype.
  """
  nonzero, normal, over = limits(name, on.dtype.name)
  found = dict.fromkeys(FATES, 0)
  for start, count in zip(on.starts[1:], counts[1:], strict=False):
    if start < normal:
      found["zero" if start < nonzero else "subnormal"] += int(count)
    elif start >= over:
      found["overflow"] += int(count)
  return found


def _number(bits: int, on: Grid) -> float:
  return float(np.asarray(bits, _unsigned(on.dtype)).view(on.dtype))


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
