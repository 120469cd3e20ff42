"""Comparing numbers by their bits.

A CPU takes subnormal numbers for zero when it compares, and XLA may compare what an operation
computed in float32 instead of the bfloat16 number that it is stored as. Bits are as stored.
"""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import Array, DType, NumpyArray


def magnitude_bits(x: Array) -> Array:
  """Returns the bits of |x| for a floating array, as unsigned integers of its size."""
  bits = 8 * x.dtype.itemsize
  unsigned = np.dtype(f"uint{bits}")
  mask = np.asarray(2 ** (bits - 1) - 1, unsigned)
  return jax.lax.bitcast_convert_type(x, unsigned) & mask


def same_numbers(a: Array, b: Array) -> Array:
  """Returns where two arrays of one floating dtype are equal, as `==` of NumPy is.

  Two zeros are equal, whatever their signs, and a NaN equals nothing.
  """
  unsigned = np.dtype(f"uint{8 * a.dtype.itemsize}")
  same = jax.lax.bitcast_convert_type(a, unsigned) == jax.lax.bitcast_convert_type(b, unsigned)
  first, second = magnitude_bits(a), magnitude_bits(b)
  zeros = jnp.logical_and(first == 0, second == 0)
  # Not `isnan`, from which LLVM sees that this is a comparison of floats, and makes one of it.
  return jnp.logical_or(zeros, jnp.logical_and(same, first <= _largest(a.dtype)))


def _largest(dtype: DType) -> NumpyArray:
  """Returns the bits of the largest magnitude that is no NaN: inf, if there is one."""
  with np.errstate(all="ignore"):
    infinity = np.asarray(np.inf, dtype)
  number = np.asarray(jnp.finfo(dtype).max, dtype) if np.isnan(infinity) else infinity
  return number.view(f"uint{8 * dtype.itemsize}")


def is_nonzero(x: Array) -> Array:
  """Returns where a floating array is not zero. Subnormal numbers are not."""
  return magnitude_bits(x) != 0


def changes_nothing(old: Array, new: Array, update: Array) -> Array:
  """Returns which updates are lost: not zero, and `new`, the rounded sum, is the `old` number.

  Of a complex number either part may be lost. The update may have any floating dtype.
  """
  if jnp.issubdtype(old.dtype, jnp.complexfloating):
    real, imag = (changes_nothing(f(old), f(new), f(update)) for f in (jnp.real, jnp.imag))
    return jnp.logical_or(real, imag)
  return jnp.logical_and(same_numbers(old, new), is_nonzero(update))
