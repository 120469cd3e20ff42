"""The numbers of float8: arrays that are scaled, clipped and cast, and matmuls of two of them.

e4m3 has a range of 2^-9 to 448, e5m2 of 2^-16 to 57344, both with less than two digits. So an array
is divided by a scale that brings its largest element to the end of the range. The scale multiplies
the result: XLA finds no float8 where operands are scaled on their way to a matmul, if Triton takes
it. A cast alone would not do: e4m3 has no inf, and JAX casts what is above 464 to NaN.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import dot_general_p

from mpjax._core.dtypes import FLOAT32
from mpjax._core.types import Array, DType
from mpjax._jaxprs.primitive_facts import EqnParams

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)

_TINY = float(np.finfo(np.float32).tiny)


class Scaled(NamedTuple):
  """An array of float8 and what it was divided by.

  Fields:
    values: the array; in low precision if there is no scale.
    scale: float32, a number or an array with the axes of `values`, of size 1 where they share one.
  """

  values: Array
  scale: Array | None = None


def quantise(x: Array, dtype: DType, axes: Sequence[int] | None, power_of_two: bool) -> Scaled:
  """Returns an array scaled so that its largest element is the largest number of a float8 dtype.

  An inf makes the scale inf and a NaN NaN, and with it all that is multiplied by the scale. An
  array of zeros has a small scale, of which nothing but zeros comes.

  Args:
    x: a floating array.
    dtype: the float8 dtype.
    axes: the axes whose elements share a scale; None for one scale.
    power_of_two: the scale is rounded up to a power of two.
  """
  largest = jax.lax.reduce_max(jax.lax.abs(x), tuple(range(x.ndim) if axes is None else axes))
  if x.dtype != FLOAT32:
    # What is computed in float32 and rounded is read twice here. Without the barrier XLA for a GPU
    # drops the rounding and keeps the float32 array between: a third more memory in a large MLP.
    # The largest element is taken before it, so that XLA can do so where `x` is computed: if of the
    # numbers before they are rounded, it is the same once it is rounded itself.
    x, largest = jax.lax.optimization_barrier((x, largest))
  most, wide = float(jnp.finfo(dtype).max), jax.lax.convert_element_type(x, FLOAT32)
  largest = jax.lax.convert_element_type(largest, FLOAT32)
  largest = largest if axes is None else jax.lax.expand_dims(largest, axes)
  # Multiplied by reciprocals: XLA makes that of some divisions, and the last digit another.
  if power_of_two:
    exponent = 2.0 ** math.floor(math.log2(most))
    scale = _rounded_up(largest * (1 / exponent), most / exponent)
  else:
    scale = largest * (1 / most)
  # The reciprocal of a smaller one is none that float32 has.
  scale = jnp.maximum(scale, _TINY)
  # Clipped first: a cast to e4m3 makes NaN of what is above its range.
  # Bounds of one dtype with what they bound: of Python numbers JAX makes float64 where it has that.
  values = jax.lax.clamp(np.float32(-most), wide * (1 / scale), np.float32(most))
  return Scaled(jax.lax.convert_element_type(values, dtype), scale)


def _rounded_up(x: Array, mantissa: float) -> Array:
  """Returns the least powers of two that are no less than `x / mantissa`, for 1 <= mantissa < 2.

  By the bits of the number: a logarithm is not exact on every device.
  """
  bits = jax.lax.bitcast_convert_type(x, np.int32)
  carry = np.int32((1 << 23) - 1 - int((mantissa - 1) * (1 << 23)))
  up = jax.lax.bitcast_convert_type((bits + carry) & np.int32(0xFF << 23), FLOAT32)
  return jax.lax.select(x < math.inf, up, x)


def scaled_dot(params: EqnParams, operands: Sequence[Scaled], dtype: DType) -> Array:
  """Returns the matmul of two scaled arrays, in a dtype.

  Of `params`, the precision and the type of the result do not count.
  """
  # Before it is scaled the result may be 448 * 448 times the length of the sum. And a CPU adds up
  # some batches of matrices in the dtype of the result.
  batch = any(params["dimension_numbers"][1])
  holds = dtype if float(jnp.finfo(dtype).max) > 1e38 and not batch else FLOAT32
  result = dot_general_p.bind(
    *(x.values for x in operands), **{**params, "precision": None, "preferred_element_type": holds}
  )
  result = jax.lax.convert_element_type(result, FLOAT32)
  for side, operand in enumerate(operands):
    if operand.scale is not None:
      result = result * _along(result, operand.scale, side, params["dimension_numbers"])
  return jax.lax.convert_element_type(result, dtype)


def _along(result: Array, scale: Array, side: int, numbers: Any) -> Array:
  """Returns the scale of an operand with the axes of the result."""
  if scale.ndim == 0:
    return scale
  contracted, batch = numbers[0][side], numbers[1][side]
  left = [axis for axis in range(scale.ndim) if axis not in contracted]
  free = [axis for axis in left if axis not in batch]
  ordered = jax.lax.squeeze(scale, contracted)
  ordered = jax.lax.transpose(ordered, [left.index(axis) for axis in (*batch, *free)])
  start = len(batch) if side else ordered.ndim
  return jax.lax.expand_dims(ordered, range(start, start + result.ndim - ordered.ndim))
