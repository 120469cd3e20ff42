"""The recipe of float8: how operands are scaled and cast, and multiplied.

The forward pass multiplies e4m3 by e4m3. In the backward pass the gradient that comes in is e5m2,
and the operand that it meets is one that the forward pass cast: nothing wider is kept, unless
`weight_grad` asks for it. e4m3 has a range of 2^-9 to 448, e5m2 of 2^-16 to 57344. So an array is
divided by a scale that brings its largest element to the end of the range; JAX casts what is above
464 to NaN.

Scales are applied to the result: XLA finds no float8 where the operands of a `dot_general` are
multiplied by a scale on their way to it, if Triton takes the matmul.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import FLOAT32, Array, DType
from mpjax._matmul.block_dot import E4M3, E5M2
from mpjax._matmul.protocol import Multiply, Operand, Scaled
from mpjax._policy.formats import Float8, multiplies_gradient, why_not


@dataclasses.dataclass(frozen=True)
class Float8Recipe:
  """The recipe of a `Float8`: see `Recipe` for what its methods are asked."""

  options: Float8
  name = "float8"
  block = None

  def why_not(self, depth: int, columns: int) -> str | None:
    return why_not(self.options, depth, columns)

  def multiplies_gradient(self, *, of_weight: bool) -> bool:
    return multiplies_gradient(self.options, of_weight=of_weight)

  def quantise(self, x: Array, operand: Operand) -> Scaled:
    axes = operand.summed if self.options.scaling == "row" else None
    dtype = E5M2 if operand.role == "gradient" else E4M3
    return quantise(x, dtype, axes, self.options.power_of_two)

  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    # Before it is scaled the result may be 448 * 448 times the length of the sum.
    holds = dtype if float(jnp.finfo(dtype).max) > 1e38 else FLOAT32
    return jax.lax.convert_element_type(multiply(left, right, holds), dtype)


def quantise(x: Array, dtype: DType, axes: Sequence[int] | None, power_of_two: bool) -> Scaled:
  """Returns an array scaled so that its largest element is the largest number of a float8 dtype.

  Elements of one index along the other axes than `axes` share a scale; all do for None. An inf or
  NaN is in the scale, and so in all that is multiplied by it.
  """
  wide, largest = with_largest(x, axes)
  most = float(jnp.finfo(dtype).max)
  # Multiplied by reciprocals: XLA makes that of some divisions, and the last digit another.
  scale = rounded_up(largest, most) if power_of_two else largest * (1 / most)
  # The reciprocal of a smaller one is none that float32 has.
  scale = jnp.maximum(scale, np.finfo(np.float32).tiny)
  # Clipped first: a cast to e4m3 makes NaN of what is above its range.
  # Bounds of one dtype with what they bound: of Python numbers JAX makes float64 where it has that.
  values = jax.lax.clamp(np.float32(-most), wide * (1 / scale), np.float32(most))
  return Scaled(jax.lax.convert_element_type(values, dtype), scale)


def with_largest(x: Array, axes: Sequence[int] | None) -> tuple[Array, Array]:
  """Returns an array, and the largest magnitude along `axes`, or of all elements for None.

  Both are in float32. The magnitudes have the axes of the array unless `axes` is None.
  """
  largest = jax.lax.reduce_max(jax.lax.abs(x), tuple(range(x.ndim) if axes is None else axes))
  if x.dtype != FLOAT32:
    # What is computed in float32 and rounded is read twice here. Without the barrier XLA for a GPU
    # drops the rounding and keeps the float32 array between: a third more memory in a large MLP.
    # The largest element is taken before it, so that XLA can do so where `x` is computed: if of the
    # numbers before they are rounded, it is the same once it is rounded itself.
    x, largest = jax.lax.optimization_barrier((x, largest))
  wide = jax.lax.convert_element_type(x, FLOAT32)
  return wide, jax.lax.convert_element_type(jax.lax.expand_dims(largest, axes or ()), FLOAT32)


def rounded_up(x: Array, most: float) -> Array:
  """Returns the least powers of two that are no less than `x / most`."""
  exponent = 2.0 ** math.floor(math.log2(most))
  x, mantissa = x * (1 / exponent), most / exponent
  # By the bits of the number: a logarithm is not exact on every device.
  bits = jax.lax.bitcast_convert_type(x, np.int32)
  carry = np.int32((1 << 23) - 1 - int((mantissa - 1) * (1 << 23)))
  up = jax.lax.bitcast_convert_type((bits + carry) & np.int32(0xFF << 23), FLOAT32)
  return jax.lax.select(x < math.inf, up, x)
