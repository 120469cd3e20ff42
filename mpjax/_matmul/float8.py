"""Float8: its options, and how operands are scaled and cast, and multiplied.

The forward pass multiplies e4m3 by e4m3. The backward pass multiplies incoming gradients in e5m2 by
the operands that the forward pass has cast. Nothing wider is kept unless `weight_grad` asks for it.
e4m3 has a range of 2^-9 to 448, and e5m2 of 2^-16 to 57344. So an array is divided by a scale that
maps its largest element to the end of the range. JAX casts numbers above 464 to NaN.

Scales are applied to the result. If they were applied to the operands, XLA would not find a float8
matmul when Triton compiles it.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import check_init
from mpjax._core.types import FLOAT32, Array, DType
from mpjax._matmul.block_dot import E4M3, E5M2
from mpjax._matmul.options import Format, FormatRecipe, Sizes
from mpjax._matmul.protocol import LEAST_SCALE, Multiply, Operand, Scaled

MEASURED_SKIP: dict[str, Sizes] = {
  "tensor": ((4096, 1024),),
  "row": ((None, 2048), (1024, None), (2048, 4096)),
  "block": ((None, 2048), (1024, None), (2048, 4096)),
}
"""Sizes (K, N) up to which torchao measured float8 to be slower than bfloat16 on H100."""


@check_init('Write mpjax.Float8() or mpjax.Float8(scaling="row").')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8(Format):
  """Multiply in float8: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8())`.

  Each operand is divided by a scale and cast: to e4m3, gradients to e5m2. The scale maps the
  largest element to the largest number of the format. There is no state. docs/float8.md lists the
  matmuls.

  Args:
    scaling: "tensor" for one scale per operand. "row" is more exact and slower: it has one scale
      per row of the left operand and per column of the right one. "block" has one scale per 128
      elements of a row, and per 128 x 128 elements of a weight, as DeepSeek-V3; these scales are
      powers of two.
    power_of_two: round scales up to a power of two, so that the division is exact.
    input_grad: the format in which gradients of activations are multiplied: "float8", or "half" (or
      its name) for the compute dtype of the policy.
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype. K is the length of the sums, N
      the number of columns of the weight; None in a pair is any size. None instead of pairs takes
      the thresholds that torchao measured; "block" takes those of "row".

  Raises:
    MpjaxValueError: an unknown scaling or format of gradients, or a skip that is not pairs of
      sizes.
    MpjaxTypeError: a power_of_two that is not a bool.

  >>> import mpjax
  >>> print(mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(scaling="row")))
  params=float32,compute=bfloat16,matmul=float8:row
  >>> mpjax.Policy.parse("mixed_float8").matmul == mpjax.Float8()
  True
  """

  scaling: Literal["tensor", "row", "block"] = "tensor"
  power_of_two: bool = False
  input_grad: Literal["float8", "half", "bfloat16", "float16"] = "float8"
  weight_grad: Literal["float8", "half", "bfloat16", "float16"] = "float8"
  skip: Sizes | None = None


@dataclasses.dataclass(frozen=True)
class Float8Recipe(FormatRecipe):
  """The recipe of a `Float8` without blocks: see `Recipe` for its methods."""

  options: Float8

  @property
  def measured_skip(self) -> Sizes:
    return MEASURED_SKIP[self.options.scaling]

  def quantise(self, x: Array, operand: Operand) -> Scaled:
    axes = operand.summed if self.options.scaling == "row" else None
    dtype = E5M2 if operand.role == "gradient" else E4M3
    return quantise(x, dtype, axes, self.options.power_of_two)

  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    return jax.lax.convert_element_type(multiply(left, right, unscaled_in(dtype)), dtype)


def unscaled_in(dtype: DType) -> DType:
  """Returns the dtype in which a matmul for a result in `dtype` sums, before that is scaled."""
  # The sum may be as large as 448 * 448 times its length. Only dtypes with the range of float32
  # hold that.
  return dtype if float(jnp.finfo(dtype).max) > 1e38 else FLOAT32


def quantise(x: Array, dtype: DType, axes: Sequence[int] | None, power_of_two: bool) -> Scaled:
  """Returns an array scaled so that its largest element is the largest number of a float8 dtype.

  Elements along `axes` share a scale; with None all elements do. An inf or NaN is in the scale, and
  therefore in the result of the matmul.
  """
  wide, largest = with_largest(x, axes)
  most = float(jnp.finfo(dtype).max)
  # XLA turns some divisions into multiplications by a reciprocal, which changes the last digit. So
  # all are written as multiplications.
  scale = rounded_up(largest, most) if power_of_two else largest * (1 / most)
  scale = jnp.maximum(scale, LEAST_SCALE)
  # Clipped first, since a cast to e4m3 turns numbers above its range into NaN. The bounds are
  # float32, since JAX makes float64 of Python numbers under `jax_enable_x64`.
  values = jax.lax.clamp(np.float32(-most), wide * (1 / scale), np.float32(most))
  return Scaled(jax.lax.convert_element_type(values, dtype), scale)


def with_largest(x: Array, axes: Sequence[int] | None) -> tuple[Array, Array]:
  """Returns an array and its largest magnitudes along `axes`, both in float32.

  The magnitudes keep the axes with size 1. With None there is one magnitude, without axes. On a
  CPU the maximum may lose a NaN, so formats whose elements have no NaN look for it themselves.
  """
  largest = jax.lax.reduce_max(jax.lax.abs(x), tuple(range(x.ndim) if axes is None else axes))
  if x.dtype != FLOAT32:
    # `x` is read twice here. It may have been computed in float32 and rounded. Without the barrier,
    # XLA for GPUs drops that rounding and stores the float32 array: a third more memory in a large
    # MLP. The maximum is taken before the barrier, so that XLA can fuse it with the computation of
    # `x`. There it may see unrounded numbers. Its own rounding then gives the same maximum.
    x, largest = jax.lax.optimization_barrier((x, largest))
  wide = jax.lax.convert_element_type(x, FLOAT32)
  return wide, jax.lax.convert_element_type(jax.lax.expand_dims(largest, axes or ()), FLOAT32)


def rounded_up(x: Array, most: float) -> Array:
  """Returns the least powers of two that are not less than `x / most`."""
  # `most` is a power of two times a number from 1 up to 2. The division by the power is exact.
  exponent = 2.0 ** math.floor(math.log2(most))
  x, mantissa = x * (1 / exponent), most / exponent
  # With the bits of the number, since a logarithm is not exact on every device. The carry reaches
  # the exponent if the fraction of `x` is larger than that of `mantissa`.
  bits = jax.lax.bitcast_convert_type(x, np.int32)
  carry = np.int32((1 << 23) - 1 - int((mantissa - 1) * (1 << 23)))
  up = jax.lax.bitcast_convert_type((bits + carry) & np.int32(0xFF << 23), FLOAT32)
  return jax.lax.select(x < math.inf, up, x)  # Inf and NaN stay.
