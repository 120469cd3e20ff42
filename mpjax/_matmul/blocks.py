"""The recipes of formats with scales in blocks along the summed axis: MXFP8, NVFP4, float8.

An operand is a stack of matrices `(batch, rows, summed)`. Each matmul has blocks along its own sum,
so the forward and the backward pass cast an operand separately. Float8 in blocks has scales that
are powers of two. Its operands have the format of MXFP8, with one scale for neighbouring blocks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import FLOAT32, Array, DType
from mpjax._matmul.block_dot import E2M1, E4M3, E8M0, merge_axes, split_axes
from mpjax._matmul.float8 import rounded_up, with_largest
from mpjax._matmul.protocol import Multiply, Operand, Scaled
from mpjax._matmul.rounding import hadamard, random_bits, stochastic
from mpjax._policy.formats import MXFP8, NVFP4, Float8, format_name, why_not, why_not_gradient

# The least scale. The reciprocal of a smaller one may overflow float32.
_TINY = np.finfo(np.float32).tiny

_MOST, _MOST_E2M1 = (float(jnp.finfo(dtype).max) for dtype in (E4M3, E2M1))

_LEAST_SCALE = np.float32(2.0**-9)
"""The smallest e4m3 number above 0. A scale of 0 would lose its block."""

_LEAST_OF_TENSOR = _TINY / _LEAST_SCALE
"""Its product with the least scale is a normal number. A CPU flushes subnormal numbers to 0."""


# The elements of a block along the summed axis.
_BLOCKS: dict[type[Any], int] = {Float8: 128, MXFP8: 32, NVFP4: 16}


@dataclasses.dataclass(frozen=True)
class BlockRecipe:
  """A recipe with one scale for each block: see `Recipe` for its methods."""

  options: Float8 | MXFP8 | NVFP4

  @property
  def name(self) -> str:
    return format_name(type(self.options))

  @property
  def block(self) -> int:
    return _BLOCKS[type(self.options)]

  def why_not(self, depth: int, columns: int) -> str | None:
    return why_not(self.options, depth, columns, multiple=self.block)

  def why_not_gradient(self, depth: int, *, of_weight: bool) -> str | None:
    return why_not_gradient(self.options, of_weight=of_weight)

  def quantise(self, x: Array, operand: Operand) -> Scaled:
    rows = self.block if self._in_squares(operand) else 1
    if isinstance(self.options, NVFP4):
      return _for_nvfp4(x, operand, self.options, rows)
    return quantise_e4m3(x, rows, self.block)

  def restored(self, x: Array, operand: Operand) -> Array:
    if isinstance(self.options, NVFP4) and _is_mixed(operand, self.options):
      return hadamard(x, 2, self.options.seed, inverse=True)
    return x

  def _in_squares(self, operand: Operand) -> bool:
    """Whether blocks are squares, so that a weight and its transpose are rounded alike."""
    if isinstance(self.options, NVFP4):
      has_squares = self.options.square_weights
    else:
      # DeepSeek-V3 scales weights in blocks of 128 x 128.
      has_squares = isinstance(self.options, Float8)
    return has_squares and operand.role == "weight"

  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    # The scale `of_tensor` is applied to the sums, which may be out of the range of float16 before.
    # bfloat16 has the range of float32.
    holds = float(jnp.finfo(dtype).max) > 1e38 and left.of_tensor is None
    return jax.lax.convert_element_type(multiply(left, right, dtype if holds else FLOAT32), dtype)


def quantise_e4m3(x: Array, rows: int, block: int) -> Scaled:
  """Returns a stack of matrices in e4m3 with scales in e8m0, one per `rows` x `block` elements.

  A scale is the least power of two that brings all elements of its block within 448. An inf or NaN
  in a block makes its scale NaN.
  """
  wide, largest = with_largest(_in_blocks(x, rows, block), (2, 4))
  scale = jnp.maximum(rounded_up(largest, _MOST), _TINY)
  # Clipped first, since a cast to e4m3 turns numbers above its range into NaN.
  clipped = jax.lax.clamp(np.float32(-_MOST), wide * (1 / scale), np.float32(_MOST))
  values = jax.lax.convert_element_type(clipped, E4M3)
  # e8m0 is the exponent of a float32. The exponent of inf and NaN is the NaN of e8m0.
  bits = jax.lax.bitcast_convert_type(scale, np.uint32) >> np.uint32(23)
  codes = jax.lax.convert_element_type(bits, np.uint8)
  scale = jax.lax.squeeze(jax.lax.bitcast_convert_type(codes, E8M0), (2, 4))
  return _kept(values, scale)


def _for_nvfp4(x: Array, operand: Operand, options: NVFP4, rows: int) -> Scaled:
  """Returns an operand in NVFP4 as the options ask for it."""
  is_random = options.stochastic_rounding and operand.role == "gradient"
  stream = int(operand.product == "weight_grad")
  bits = random_bits(x, options.seed, stream=stream) if is_random else None
  if _is_mixed(operand, options):
    x = hadamard(x, 2, options.seed)
  return quantise_nvfp4(x, rows, bits)


def _is_mixed(operand: Operand, options: NVFP4) -> bool:
  """Whether an operand is multiplied by the Hadamard matrix before it is rounded."""
  return options.hadamard and operand.product == "weight_grad"


def quantise_nvfp4(x: Array, rows: int = 1, bits: Array | None = None) -> Scaled:
  """Returns a stack of matrices in e2m1 with scales in e4m3 and one in float32.

  An e4m3 scale is for `rows` x 16 elements. The largest element of the array is 6 * 448 times the
  scale of the array, in which an inf or NaN is too. Elements are rounded to nearest, or with random
  bits stochastically.
  """
  wide, largest = with_largest(_in_blocks(x, rows, _BLOCKS[NVFP4]), (2, 4))
  of_tensor = jnp.max(largest) * np.float32(1 / (_MOST_E2M1 * _MOST))
  # e2m1 has no NaN, and a maximum on a CPU may lose one.
  is_finite = jnp.all(jnp.isfinite(wide))
  of_tensor = jnp.where(is_finite, jnp.maximum(of_tensor, _LEAST_OF_TENSOR), np.float32(np.nan))
  # With brackets, since XLA may multiply three factors in any order.
  scale = largest * (np.float32(1 / _MOST_E2M1) * (1 / of_tensor))
  scale = jax.lax.convert_element_type(jax.lax.clamp(_LEAST_SCALE, scale, np.float32(_MOST)), E4M3)
  # Without the barrier XLA may divide by the scale before its rounding to e4m3.
  scale = jax.lax.optimization_barrier(scale)
  # One quotient, since XLA merges several, which changes the last digit.
  wide *= 1 / (jax.lax.convert_element_type(scale, FLOAT32) * of_tensor)
  if bits is None:
    values = nearest_e2m1(wide)
  else:
    values = stochastic(wide, E2M1, _in_blocks(bits, rows, _BLOCKS[NVFP4]))
  return _kept(values, jax.lax.squeeze(scale, (2, 4)))._replace(of_tensor=of_tensor)


def _in_blocks(x: Array, rows: int, block: int) -> Array:
  """Returns matrices with axes (batch, row blocks, rows, column blocks, columns)."""
  batch, height, depth = x.shape
  return split_axes(x, [[batch], [height // rows, rows], [depth // block, block]])


def nearest_e2m1(x: Array) -> Array:
  """Returns float32 numbers in e2m1, rounded to nearest, ties to even; they saturate.

  XLA has casts to e2m1 that round to float16 first, and therefore round some numbers wrongly.
  """
  # e2m1 has the numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6. `step` is the distance of the neighbours.
  size = jax.lax.abs(x)
  coarse = jnp.where(size < 4, np.float32(1), np.float32(2))
  step = jnp.where(size < 2, np.float32(0.5), coarse)
  units = jax.lax.round(x / step, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
  most = np.float32(_MOST_E2M1)
  return jax.lax.convert_element_type(jax.lax.clamp(-most, units * step, most), E2M1)


def _kept(blocks: Array, scale: Array) -> Scaled:
  """Returns an operand as a stack of matrices, with its scales."""
  values = merge_axes(blocks, [1, 2, 2])
  # Without the barrier XLA may cancel the cast to the format with the dequantisation after it.
  return Scaled(*jax.lax.optimization_barrier((values, scale)))
