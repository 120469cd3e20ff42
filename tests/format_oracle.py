"""What formats of matmuls compute, by NumPy in float64 from their definitions.

Elements: e4m3 and e5m2 are those of the OCP 8-bit Floating Point Specification 1.0 (e4m3 without
inf), e2m1 and e8m0 those of the OCP Microscaling Formats Specification 1.0. Elements are rounded to
nearest, ties to even, and saturate. Scales:

- mxfp8: the least power of two by which no element of the block is beyond 448, as `jax.nn` and
  TransformerEngine have it. The specification's own 2^(floor(log2(amax)) - 8) is less by half for
  an amax above 448 * 2^n, and such elements saturate. The least scale is 2^-126, of zeros too:
  2^-127 is subnormal in float32, so that `jax.nn` divides 0 by 0 on CPUs.
- nvfp4: a float32 scale amax / (448 * 6) of the array; for each block, 16 x 16 of a weight and else
  1 x 16 elements, the e4m3 number nearest to
  amax / 6 of the block by the scale of the array (arXiv:2509.25149, appendix C). Less than the
  least e4m3 number becomes that one: a scale of 0 would lose the block, and `jax.nn` has NaN there.
- float8 in blocks: a float32 scale amax / 448 for each block (DeepSeek-V3, arXiv:2412.19437).
- int8: amax / 127, without -128.

Float8 with scales for tensors and rows uses the rounding of `ml_dtypes`.
"""

from typing import NamedTuple

import ml_dtypes
import numpy as np

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)

TINY = np.finfo(np.float32).tiny


def normal(seed, shape, largest=1.0):
  rng = np.random.default_rng(seed)
  return (rng.normal(size=shape) * largest).astype(np.float32)


def scale_of(x, dtype, axes, power_of_two):
  """The scale as the documentation says it, by NumPy."""
  most = float(ml_dtypes.finfo(dtype).max)
  largest = np.max(np.abs(x), axis=axes, keepdims=axes is not None).astype(np.float32)
  if not power_of_two:
    return np.maximum(largest * np.float32(1 / most), TINY)
  with np.errstate(divide="ignore"):
    up = np.exp2(np.ceil(np.log2(largest.astype(np.float64) / most)))
  return np.maximum(up.astype(np.float32), TINY)


def quantised(x, dtype, axes, power_of_two):
  """What a scaled operand stands for, in float64."""
  scale = scale_of(x, dtype, axes, power_of_two)
  most = np.float32(ml_dtypes.finfo(dtype).max)
  values = np.clip(np.asarray(x, np.float32) * (np.float32(1) / scale), -most, most).astype(dtype)
  return values.astype(np.float64) * scale.astype(np.float64)


# Formats by definition.


class Elements(NamedTuple):
  """A floating format: bits of its exponent and of its fraction, its bias, its largest number."""

  exponent: int
  fraction: int
  bias: int
  largest: float

  @property
  def numbers(self):
    """The numbers that are not negative, in the order of their codes."""
    codes = np.arange(2 ** (self.exponent + self.fraction))
    exponents, fractions = np.divmod(codes, 2**self.fraction)
    steps = fractions / 2**self.fraction
    normal = (1 + steps) * np.exp2(exponents - float(self.bias))
    found = np.where(exponents == 0, steps * np.exp2(1.0 - self.bias), normal)
    return found[found <= self.largest]


FORMATS = {
  "float8_e4m3fn": Elements(4, 3, 7, 448.0),
  "float8_e5m2": Elements(5, 2, 15, 57344.0),
  "float4_e2m1fn": Elements(2, 1, 1, 6.0),
}


def around(x, elements):
  """The codes of the numbers below and above |x|, or of one number twice, and the way to the upper.

  Numbers beyond the largest are the largest.
  """
  numbers, size = elements.numbers, np.minimum(np.abs(x), elements.largest)
  below = np.searchsorted(numbers, size, side="right") - 1
  above = np.minimum(below + 1, len(numbers) - 1)
  gap = np.where(above > below, numbers[above] - numbers[below], 1.0)
  return below, above, (size - numbers[below]) / gap


def nearest(x, elements):
  """`x` rounded to nearest, ties to the even code; it saturates, and NaN stays."""
  x = np.asarray(x, np.float64)
  below, above, way = around(x, elements)
  up = (way > 0.5) | ((way == 0.5) & (below % 2 == 1))
  found = np.copysign(elements.numbers[np.where(up, above, below)], x)
  return np.where(np.isnan(x), x, found)


def stochastic(x, elements, bits):
  """`x` rounded up where 24 random bits are less than the way to the upper number."""
  x = np.asarray(x, np.float64)
  below, above, way = around(x, elements)
  up = (bits >> np.uint32(8)) / 2.0**24 < way
  found = np.copysign(elements.numbers[np.where(up, above, below)], x)
  return np.where(np.isnan(x), x, found)


def e8m0(scale):
  """The code of a power of two in e8m0, or 255 for NaN."""
  codes = np.log2(np.where(np.isnan(scale), 1.0, scale)) + 127
  assert np.all(codes == np.rint(codes))
  return np.where(np.isnan(scale), 255, codes).astype(np.uint8)


# Scaled arrays: (values, scales) in float64. Scales have the axes of the array, of which an axis
# is shorter by the size of a block. The array is the product of both, see `dequantised`.


def largest_of_blocks(x, sizes):
  """The largest |x| of each block; `sizes` are those of a block along each axis."""
  pairs = [(n // size, size) for n, size in zip(x.shape, sizes, strict=True)]
  split = np.abs(np.asarray(x, np.float64)).reshape([n for pair in pairs for n in pair])
  return np.max(split, axis=tuple(range(1, split.ndim, 2)))


def spread(scales, shape):
  """Scales of blocks, one for each element."""
  for axis, size in enumerate(shape):
    scales = np.repeat(scales, size // scales.shape[axis], axis=axis)
  return scales


def dequantised(values, scales, of_array=1.0):
  return values * spread(scales, values.shape) * of_array


def block(x, axis, size):
  """The sizes of a block of `size` elements along one axis."""
  return tuple(size if i == axis % x.ndim else 1 for i in range(x.ndim))


def mxfp8(x, axis, elements=FORMATS["float8_e4m3fn"]):
  largest = largest_of_blocks(x, block(x, axis, 32))
  # largest / 448 is mantissa * 2**exponent with a mantissa in [0.5, 1).
  mantissa, exponent = np.frexp(largest / elements.largest)
  exponent = np.clip(np.where(mantissa == 0.5, exponent - 1, exponent), -126, 127)
  exponent = np.where(largest == 0, -126, exponent)
  scales = np.where(np.isfinite(largest), np.exp2(exponent.astype(np.float64)), np.nan)
  return nearest(np.asarray(x, np.float64) / spread(scales, x.shape), elements), scales


def nvfp4(x, sizes):
  """Returns (values, scales of blocks, scale of the array); `sizes` are those of a block."""
  e2m1, e4m3 = FORMATS["float4_e2m1fn"], FORMATS["float8_e4m3fn"]
  of_array = np.float32(np.max(np.abs(x))) * np.float32(1 / (6 * 448))
  of_array = np.maximum(of_array, TINY / e4m3.numbers[1]).astype(np.float32)
  # In float32, which decides ties.
  largest = largest_of_blocks(x, sizes).astype(np.float32)
  scales = nearest(largest * (np.float32(1 / 6) * (np.float32(1) / of_array)), e4m3)
  scales = np.maximum(scales, e4m3.numbers[1])
  inverse = np.float32(1) / (scales.astype(np.float32) * of_array)
  values = np.asarray(x, np.float32) * spread(inverse, x.shape)
  return nearest(values, e2m1), scales, np.float64(of_array)


def float8_blocks(x, sizes, *, power_of_two=False, elements=FORMATS["float8_e4m3fn"]):
  """Blocks of `sizes`: (1, 128) of an activation, (128, 128) of a weight."""
  largest = largest_of_blocks(x, sizes).astype(np.float32)
  scales = np.maximum(largest * np.float32(1 / elements.largest), TINY)
  if power_of_two:
    mantissa, exponent = np.frexp(largest.astype(np.float64) / elements.largest)
    up = np.exp2(np.where(mantissa == 0.5, exponent - 1, exponent).astype(np.float64))
    scales = np.maximum(np.where(largest == 0, 0, up).astype(np.float32), TINY)
  values = np.asarray(x, np.float32) * spread(np.float32(1) / scales, x.shape)
  return nearest(values, elements), scales.astype(np.float64)


def int8(x, axes):
  """Scales of size 1 along `axes`, or of no axes for None."""
  largest = np.max(np.abs(x), axis=axes, keepdims=axes is not None).astype(np.float32)
  scale = np.maximum(largest * np.float32(1 / 127), TINY)
  values = np.rint(np.asarray(x, np.float32) * (np.float32(1) / scale))
  return np.clip(values, -127, 127).astype(np.float64), scale.astype(np.float64)
