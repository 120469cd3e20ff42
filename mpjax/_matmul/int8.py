"""Int8: its options, and its recipe: symmetric, rounded to nearest, with exact sums in int32.

An operand is divided by a scale that maps its largest element to 127. So -128 is not used, and the
format is symmetric. Qwix maps the largest element to 127.5 and clips. Its spacing is smaller by
0.4 %, and the largest elements saturate.

Gradients are straight-through. By default they are those of a matmul in the compute dtype, with
operands that are not quantised. Qwix has the same default if only the forward pass is in int8
(`use_original_residuals`). With an option, the backward pass multiplies in int8, with scales of its
own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim

from mpjax._core.errors import check_init
from mpjax._core.types import FLOAT32, Array, DType, unsigned_like
from mpjax._matmul.options import Format, FormatRecipe, Sizes
from mpjax._matmul.protocol import LEAST_SCALE, Multiply, Operand, Scaled

LARGEST = 127

_INT32 = np.dtype("int32")

LONGEST = (2**31 - 1) // LARGEST**2
"""The longest sum of products that is always in the range of int32: 133144."""


@check_init('Write mpjax.Int8() or mpjax.Int8(scaling="tensor").')
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Format):
  """Multiply in int8: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Int8())`.

  Each operand is divided by a scale, which maps its largest element to 127, and rounded to nearest.
  Sums are exact, in int32. TPUs multiply int8 since v5e, GPUs since Turing. By default only the
  forward pass is in int8: gradients are those of a matmul in the compute dtype, of operands that
  are not quantised.

  Args:
    scaling: "row" for one scale per row of the left operand and per column of the right one.
      "tensor" for one scale per operand.
    input_grad: the format in which gradients of activations are multiplied: "half" (or its name)
      for the compute dtype of the policy, or "int8".
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype, as for `mpjax.Float8`. By
      default no size is too small.

  Raises:
    MpjaxValueError: an unknown scaling or format of gradients, or a skip that is not pairs of
      sizes.

  >>> import mpjax
  >>> print(mpjax.Int8(scaling="tensor", input_grad="int8"))
  int8:tensor:input_grad=int8
  >>> mpjax.Policy.parse("mixed_int8").matmul == mpjax.Int8()
  True
  """

  scaling: Literal["row", "tensor"] = "row"
  input_grad: Literal["int8", "half", "bfloat16", "float16"] = "half"
  weight_grad: Literal["int8", "half", "bfloat16", "float16"] = "half"
  skip: Sizes = ()


@dataclasses.dataclass(frozen=True)
class Int8Recipe(FormatRecipe):
  """The recipe of an `Int8`: see `Recipe` for its methods."""

  options: Int8

  def why_not(self, depth: int, columns: int) -> str | None:
    if _may_overflow(depth):
      return f"K={depth} products may overflow int32"
    return super().why_not(depth, columns)

  def why_not_gradient(self, depth: int, *, of_weight: bool) -> str | None:
    reason = super().why_not_gradient(depth, of_weight=of_weight)
    if reason is None and _may_overflow(depth):
      return f"{depth} products may overflow int32"
    return reason

  def quantise(self, x: Array, operand: Operand) -> Scaled:
    return quantise(x, operand.summed if self.options.scaling == "row" else None)

  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    return jax.lax.convert_element_type(multiply(left, right, _INT32), dtype)


def _may_overflow(depth: int) -> bool:
  """Whether a sum of so many products may leave the range of int32."""
  # The symbolic size of an exported function may be any number.
  return is_symbolic_dim(depth) or depth > LONGEST


def quantise(x: Array, axes: Sequence[int] | None) -> Scaled:
  """Returns an array in int8, scaled so that its largest element is 127.

  Elements along `axes` share a scale; with None all elements do. An inf or NaN makes the scale NaN,
  and therefore the result of the matmul.
  """
  largest = _largest(x, axes)
  wide = jax.lax.convert_element_type(x, FLOAT32)
  scale = jnp.maximum(largest * np.float32(1 / LARGEST), LEAST_SCALE)
  scale = jnp.where(jnp.isfinite(largest), scale, np.float32(np.nan))
  # Integers have no NaN, so the scale carries it.
  rounded = jax.lax.round(wide * (1 / scale), jax.lax.RoundingMethod.TO_NEAREST_EVEN)
  values = jax.lax.clamp(np.float32(-LARGEST), rounded, np.float32(LARGEST))
  return Scaled(jax.lax.convert_element_type(values, np.dtype("int8")), scale)


def _largest(x: Array, axes: Sequence[int] | None) -> Array:
  """Returns the largest magnitude in float32; NaN if there is one. It keeps `axes`."""
  # The bits of magnitudes have the order of the magnitudes, and NaN comes last. A maximum of floats
  # may lose a NaN on a CPU.
  bits = jax.lax.bitcast_convert_type(jax.lax.abs(x), unsigned_like(x.dtype))
  most = jnp.max(bits, axis=axes, keepdims=axes is not None)
  largest = jax.lax.bitcast_convert_type(most, x.dtype)
  return jax.lax.convert_element_type(largest, FLOAT32)
