"""Stochastic rounding, random bits without a key, and the random Hadamard transform.

NVIDIA's recipe for NVFP4 (arXiv:2509.25149) rounds gradients stochastically, because rounding to
nearest is biased where a format has few numbers. It multiplies both operands of the gradient of a
weight by one random Hadamard matrix, in blocks of 16 along the summed axis, which spreads outliers
over their block.

Random bits are a function of a seed and of the array that is rounded. So a step needs no key and
repeats bit by bit. Any change in any element changes the bits of all, so the bits differ from step
to step. A factor that is a power of two, such as a loss scale, changes no bit. They are cheap
integer arithmetic for each element: `jax.random.bits` would cost more than the matmul.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import FLOAT32, Array, DType, NumpyArray
from mpjax._matmul.block_dot import merge_axes, split_axes

SIZE = 16
"""The elements that one Hadamard matrix transforms."""

_UINT32 = np.dtype("uint32")

_BIAS, _FRACTION_BITS = 127, 23
"""The bias of the exponent of float32, and the bits behind it."""


def stochastic(x: Array, dtype: DType, bits: Array) -> Array:
  """Round float32 numbers at random to a neighbour in a format, so that the mean is exact.

  Args:
    x: the numbers. They saturate beyond the largest of the format; NaN stays NaN where it has one.
    dtype: the format, `float8_e4m3fn`, `float8_e5m2` or `float4_e2m1fn`.
    bits: random uint32 numbers in the shape of `x`.

  Returns:
    The numbers in `dtype`. A number between two neighbours becomes the upper one with a probability
    of its distance from the lower one, in steps of 2^-24 of their distance.
  """
  info = jnp.finfo(dtype)
  most = np.float32(info.max)
  x = jax.lax.clamp(-most, x, most)
  size = jax.lax.abs(x)
  # The distance of the two neighbours is a power of two. It follows from the exponent of the
  # number, or from the least exponent of the format for subnormal numbers.
  exponent = jax.lax.bitcast_convert_type(size, np.int32) >> _FRACTION_BITS
  exponent = jax.lax.max(exponent, np.int32(int(info.minexp) + _BIAS)) - np.int32(info.nmant)
  # The size in units of that distance. Noise in [0, 1) decides whether to round up.
  steps = size * _power_of_two(2 * _BIAS - exponent)
  below = jax.lax.floor(steps)
  noise = jax.lax.convert_element_type(bits >> np.uint32(8), FLOAT32) * np.float32(2.0**-24)
  up = jax.lax.convert_element_type(noise < steps - below, FLOAT32)
  rounded = (below + up) * _power_of_two(exponent)
  return jax.lax.convert_element_type(jnp.copysign(rounded, x), dtype)


def _power_of_two(exponent: Array) -> Array:
  """Returns the power of two with a biased exponent."""
  return jax.lax.bitcast_convert_type(exponent << _FRACTION_BITS, FLOAT32)


def random_bits(x: Array, seed: int, *, stream: int = 0) -> Array:
  """Returns random uint32 numbers in the shape of an array, which depend on all its elements.

  They are a hash of the index of the element and of a key. The key is a hash of the seed, the
  stream and a sum over the bits of all elements. The sum is one of integers, so it is the same in
  any order, on any number of devices. The array is hashed without its scale: a loss scale, which
  is a power of two, then changes no rounding.

  Args:
    x: an array of a floating dtype with 16 or 32 bits.
    seed: a number that the user chooses.
    stream: numbers the uses of one array, such as its two matmuls. Their bits are independent.
  """
  # Each element is hashed before the sum. Otherwise opposite changes of two elements would cancel.
  hashed = _mixed(jax.lax.bitcast_convert_type(_without_scale(x), _UINT32))
  hash_of_all = jax.lax.reduce_sum(hashed, tuple(range(x.ndim)))
  chosen = _mixed(_mixed(np.array([seed], _UINT32)) + np.array([stream], _UINT32))
  key = _mixed(hash_of_all ^ chosen[0])
  return _mixed(_mixed(_index(x.shape) + key) ^ _mixed(key + np.uint32(1)))


def _without_scale(x: Array) -> Array:
  """Returns a float32 array, multiplied by the power of two that brings its largest below 2."""
  wide = jax.lax.convert_element_type(x, FLOAT32)
  largest = jnp.max(jax.lax.abs(wide), initial=0)
  exponent = jax.lax.bitcast_convert_type(largest, np.int32) >> _FRACTION_BITS
  # The exponents of 0, inf and NaN have no inverse.
  inverse = jax.lax.clamp(np.int32(1), 2 * _BIAS - exponent, np.int32(2 * _BIAS))
  return wide * _power_of_two(inverse)


def _index(shape: tuple[int, ...]) -> Array:
  """Returns the number of each element in an array, modulo 2^32."""
  index = jnp.zeros(shape, _UINT32)
  for axis, size in enumerate(shape):
    index = index * np.uint32(size) + jax.lax.broadcasted_iota(_UINT32, shape, axis)
  return index


def _mixed(x: Any) -> Any:
  """Returns a hash of each uint32 number of an array of JAX or NumPy.

  Of the functions with two multiplications in https://github.com/skeeto/hash-prospector, it has the
  least bias.
  """
  hashed = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
  hashed = (hashed ^ (hashed >> np.uint32(15))) * np.uint32(0xD35A2D97)
  return hashed ^ (hashed >> np.uint32(15))


def hadamard(x: Array, axis: int, seed: int, *, inverse: bool = False) -> Array:
  """Returns an array multiplied by a random orthogonal matrix, in blocks along an axis.

  It is the Hadamard matrix of size 16, divided by 4, after random signs. If both operands of a
  matmul are multiplied by it along the summed axis, the result stays the same. The signs depend on
  the seed alone: one vector for all layers and steps, as in NVIDIA's recipe.

  Args:
    x: an array. The size of the axis is a multiple of 16.
    axis: the axis over which a matmul sums.
    seed: the seed of the signs.
    inverse: whether to multiply by the inverse of the matrix instead.

  Returns:
    A float32 array. Sums are in float32 and in a fixed order, without a matmul.
  """
  axis %= x.ndim
  blocks = x.shape[axis] // SIZE
  signs = np.tile(signs_of(seed), blocks)
  signs = signs.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
  mixed = jax.lax.convert_element_type(x, FLOAT32)
  # The Hadamard matrix, divided by 4, is its own inverse.
  mixed = mixed if inverse else mixed * signs
  # The fast Hadamard transform. Each of the four axes of size 2 is one bit of the position in a
  # block. Along each, pairs become their sums and differences.
  sizes = [[blocks, 2, 2, 2, 2] if i == axis else [n] for i, n in enumerate(x.shape)]
  mixed = split_axes(mixed, sizes)
  for bit in range(axis + 1, axis + 5):
    left = jax.lax.slice_in_dim(mixed, 0, 1, axis=bit)
    right = jax.lax.slice_in_dim(mixed, 1, 2, axis=bit)
    mixed = jax.lax.concatenate([left + right, left - right], bit)
  mixed = merge_axes(mixed, [*map(len, sizes)]) * np.float32(1 / 4)
  return mixed * signs if inverse else mixed


def signs_of(seed: int) -> NumpyArray:
  """Returns the 16 signs of a seed, as float32."""
  # In NumPy, so that the signs are a constant of the trace. The top bit of each hash decides.
  hashed = _mixed(np.arange(SIZE, dtype=_UINT32) + _mixed(np.array([seed], _UINT32)))
  return np.where(np.asarray(hashed) >> np.uint32(31), np.float32(-1), np.float32(1))
