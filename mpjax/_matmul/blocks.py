"""The recipes of formats with scales in blocks along the summed axis: MXFP8, NVFP4, float8.

An operand is a stack of matrices `(batch, rows, summed)`. Each matmul has blocks along its own sum,
so the forward and the backward pass cast an operand separately. Float8 in blocks has scales that
are powers of two: its operands are those of MXFP8, of which neighbouring blocks share a scale.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import FLOAT32, Array, DType
from mpjax._matmul.block_dot import E2M1, E4M3, E8M0
from mpjax._matmul.float8 import rounded_up
from mpjax._matmul.protocol import Multiply, Operand, Scaled
from mpjax._policy.formats import MXFP8, NVFP4, Float8, multiplies_gradient, name_of, why_not

_TINY = np.finfo(np.float32).tiny

_MOST, _MOST_E2M1 = (float(jnp.finfo(dtype).max) for dtype in (E4M3, E2M1))

_LEAST_SCALE = np.float32(2.0**-9)
"""The smallest e4m3 number above 0. A scale of 0 would lose its block."""


@dataclasses.dataclass(frozen=True)
class BlockRecipe:
  """A recipe with one scale for each block: see `Recipe` for what its methods are asked."""

  options: Float8 | MXFP8 | NVFP4

  @property
  def name(self) -> str:
    return name_of(type(self.options))

  @property
  def block(self) -> int:
    return {Float8: 128, MXFP8: 32, NVFP4: 16}[type(self.options)]

  def why_not(self, depth: int, columns: int) -> str | None:
    return why_not(self.options, depth, columns, multiple=self.block)

  def multiplies_gradient(self, *, of_weight: bool) -> bool:
    return multiplies_gradient(self.options, of_weight=of_weight)

  def quantise(self, x: Array, operand: Operand) -> Scaled:
    if isinstance(self.options, NVFP4):
      return quantise_nvfp4(x, self.block)
    in_squares = isinstance(self.options, Float8) and operand.role == "weight"
    return quantise_e4m3(x, self.block if in_squares else 1, self.block)

  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    # A second scale comes after the sums, which float16 may not hold before it.
    holds = float(jnp.finfo(dtype).max) > 1e38 and left.of_tensor is None
    return jax.lax.convert_element_type(multiply(left, right, dtype if holds else FLOAT32), dtype)


def quantise_e4m3(x: Array, rows: int, block: int) -> Scaled:
  """Returns a stack of matrices in e4m3 with scales in e8m0, one per `rows` x `block` elements.

  A scale is the least power of two by which no element is beyond 448. An inf or NaN in a block
  makes its scale NaN.
  """
  largest = _largest(x, rows, block)
  scale = jnp.maximum(rounded_up(largest, _MOST), _TINY)
  # By the bits of the number: e8m0 is the exponent of a float32, and NaN that of inf and NaN.
  bits = jax.lax.bitcast_convert_type(scale, np.uint32) >> np.uint32(23)
  codes = jax.lax.convert_element_type(bits, np.uint8)
  values = _rounded(_times(x, 1 / scale), _MOST, E4M3)
  return _kept(values, jax.lax.bitcast_convert_type(codes, E8M0))


def quantise_nvfp4(x: Array, block: int) -> Scaled:
  """Returns a stack of matrices in e2m1 with scales in e4m3, one per block, and one in float32.

  The largest element of the array is 6 * 448 times its own scale. An inf or NaN in the array is in
  its scale.
  """
  largest = _largest(x, 1, block)
  of_tensor = jnp.max(largest) * np.float32(1 / (_MOST_E2M1 * _MOST))
  of_tensor = jnp.maximum(of_tensor, _TINY)
  per_tensor = 1 / of_tensor
  # The two numbers first: XLA multiplies three factors in an order of its own.
  scale = largest * (np.float32(1 / _MOST_E2M1) * per_tensor)
  scale = jax.lax.convert_element_type(jax.lax.clamp(_LEAST_SCALE, scale, np.float32(_MOST)), E4M3)
  # Without the barrier XLA may leave out the rounding for what is divided by it.
  scale = jax.lax.optimization_barrier(scale)
  per_block = per_tensor * (1 / jax.lax.convert_element_type(scale, FLOAT32))
  values = _rounded(_times(x, per_block), _MOST_E2M1, E2M1)
  return _kept(values, scale)._replace(of_tensor=of_tensor)


def _split(shape: Sequence[int], rows: int, block: int) -> list[int]:
  batch, height, depth = shape
  return [batch, height // rows, rows, depth // block, block]


def _largest(x: Array, rows: int, block: int) -> Array:
  """Returns the largest absolute value of each block, in float32."""
  blocks = jax.lax.reshape(x, _split(x.shape, rows, block))
  largest = jax.lax.reduce_max(jax.lax.abs(blocks), (2, 4))
  return jax.lax.convert_element_type(largest, FLOAT32)


def _times(x: Array, factors: Array) -> Array:
  """Returns the product of an array and a number for each block, in float32."""
  _, rows, blocks = (n // m for n, m in zip(x.shape, factors.shape, strict=True))
  split = jax.lax.reshape(x, _split(x.shape, rows, blocks))
  wide = jax.lax.convert_element_type(split, FLOAT32)
  return jax.lax.reshape(wide * jax.lax.expand_dims(factors, (2, 4)), x.shape)


def _rounded(x: Array, most: float, dtype: DType) -> Array:
  # Clipped first: a cast to e4m3 makes NaN of what is above its range.
  clipped = jax.lax.clamp(np.float32(-most), x, np.float32(most))
  return jax.lax.convert_element_type(clipped, dtype)


def _kept(values: Array, scale: Array) -> Scaled:
  # Without the barrier XLA may leave out the rounding where the operand is dequantised again.
  return Scaled(*jax.lax.optimization_barrier((values, scale)))
