"""MXFP8 and NVFP4: their options, and the recipes of all formats with scales in blocks.

Blocks lie along the summed axis. An operand is a stack of matrices `(batch, rows, summed)`. Each
matmul has blocks along its own sum, so the forward and the backward pass cast an operand
separately. Float8 in blocks has scales that are powers of two. Its operands have the format of
MXFP8, with one scale for neighbouring blocks.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import check_init
from mpjax._core.types import FLOAT32, Array, DType
from mpjax._matmul.block_dot import E2M1, E4M3, E8M0, merge_axes, split_axes
from mpjax._matmul.float8 import MEASURED_SKIP, Float8, rounded_up, unscaled_in, with_largest
from mpjax._matmul.options import Format, FormatRecipe, Sizes
from mpjax._matmul.protocol import LEAST_SCALE, Multiply, Operand, Scaled
from mpjax._matmul.rounding import hadamard, random_bits, stochastic

_BLOCK_NVFP4 = 16
"""The elements of a block of NVFP4 along the summed axis."""

_MOST, _MOST_E2M1 = (float(jnp.finfo(dtype).max) for dtype in (E4M3, E2M1))

_LEAST_E4M3 = np.float32(2.0**-9)
"""The smallest e4m3 number above 0. A scale of 0 would lose its block."""

_LEAST_OF_TENSOR = LEAST_SCALE / _LEAST_E4M3
"""Its product with that number is a normal number. A CPU flushes subnormal numbers to 0."""


@check_init("Write mpjax.MXFP8() or mpjax.MXFP8(skip=((4096, 1024),)).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(Format):
  """Multiply in MXFP8: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.MXFP8())`.

  Each 32 elements along the summed axis share a scale, which is a power of two. Elements are e4m3,
  those of gradients too. Blackwell GPUs multiply the format; elsewhere it is emulated.

  Args:
    input_grad: the format in which gradients of activations are multiplied: "mxfp8", or "half" (or
      its name) for the compute dtype of the policy.
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype, as for `mpjax.Float8`. By
      default no size is too small.

  Raises:
    MpjaxValueError: an unknown format of gradients, or a skip that is not pairs of sizes.

  >>> import mpjax
  >>> print(mpjax.MXFP8(weight_grad="half"))
  mxfp8:weight_grad=half
  >>> mpjax.Policy.parse("mixed_mxfp8").matmul == mpjax.MXFP8()
  True
  """

  input_grad: Literal["mxfp8", "half", "bfloat16", "float16"] = "mxfp8"
  weight_grad: Literal["mxfp8", "half", "bfloat16", "float16"] = "mxfp8"
  skip: Sizes = ()


@check_init("Write mpjax.NVFP4() or mpjax.NVFP4(hadamard=False).")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(Format):
  """Multiply in NVFP4: `mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.NVFP4())`.

  Each 16 elements along the summed axis share an e4m3 scale, and all share a float32 scale.
  Elements are e2m1. Blackwell GPUs multiply the format; elsewhere it is emulated. The defaults
  follow NVIDIA's recipe for pretraining (arXiv:2509.25149). It also keeps about 15 % of the layers
  in bfloat16, the last ones among them: give these a rule.

  Args:
    stochastic_rounding: round gradients up or down at random, so that they are right on average.
      Activations and weights are rounded to nearest.
    square_weights: let 16 x 16 elements of a weight share an e4m3 scale. The forward pass and the
      gradient of the activations then multiply by the same numbers.
    hadamard: multiply both operands of the gradient of a weight by one random 16 x 16 Hadamard
      matrix, block by block along the summed axis. It spreads outliers and leaves the product as it
      is.
    seed: the seed of the random signs and of the random rounding. The bits of a gradient are
      derived from the seed and from the gradient itself. So a step is a pure function, and needs no
      key.
    input_grad: the format in which gradients of activations are multiplied: "nvfp4", or "half" (or
      its name) for the compute dtype of the policy.
    weight_grad: the same for gradients of weights. Their result is float32 either way.
    skip: sizes (K, N) up to which matmuls stay in the compute dtype, as for `mpjax.Float8`. By
      default no size is too small.

  Raises:
    MpjaxValueError: an unknown format of gradients, a seed out of range, or a skip that is not
      pairs of sizes.
    MpjaxTypeError: a stochastic_rounding, square_weights or hadamard that is not a bool, or a seed
      that is not an int.

  >>> import mpjax
  >>> print(mpjax.NVFP4(hadamard=False, seed=7))
  nvfp4:hadamard=false:seed=7
  >>> mpjax.Policy.parse("mixed_nvfp4").matmul == mpjax.NVFP4()
  True
  """

  stochastic_rounding: bool = True
  square_weights: bool = True
  hadamard: bool = True
  seed: int = 0
  input_grad: Literal["nvfp4", "half", "bfloat16", "float16"] = "nvfp4"
  weight_grad: Literal["nvfp4", "half", "bfloat16", "float16"] = "nvfp4"
  skip: Sizes = ()


@dataclasses.dataclass(frozen=True)
class BlockRecipe(FormatRecipe):
  """The recipe of e4m3 with scales that are powers of two: see `Recipe` for its methods."""

  options: Float8 | MXFP8

  @property
  def block(self) -> int:
    return 128 if isinstance(self.options, Float8) else 32

  @property
  def measured_skip(self) -> Sizes:
    return MEASURED_SKIP["block"] if isinstance(self.options, Float8) else ()

  def quantise(self, x: Array, operand: Operand) -> Scaled:
    # DeepSeek-V3 scales weights in blocks of 128 x 128, so that a weight and its transpose are
    # rounded alike.
    is_square = isinstance(self.options, Float8) and operand.role == "weight"
    return quantise_e4m3(x, self.block if is_square else 1, self.block)

  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    return jax.lax.convert_element_type(multiply(left, right, unscaled_in(dtype)), dtype)


@dataclasses.dataclass(frozen=True)
class NVFP4Recipe(FormatRecipe):
  """The recipe of an `NVFP4`: see `Recipe` for its methods."""

  options: NVFP4

  @property
  def block(self) -> int:
    return _BLOCK_NVFP4

  def quantise(self, x: Array, operand: Operand) -> Scaled:
    options = self.options
    is_random = options.stochastic_rounding and operand.role == "gradient"
    stream = int(operand.product == "weight_grad")
    bits = random_bits(x, options.seed, stream=stream) if is_random else None
    if self._is_mixed(operand):
      x = hadamard(x, 2, options.seed)
    is_square = options.square_weights and operand.role == "weight"
    return quantise_nvfp4(x, self.block if is_square else 1, bits)

  def restored(self, x: Array, operand: Operand) -> Array:
    return hadamard(x, 2, self.options.seed, inverse=True) if self._is_mixed(operand) else x

  def _is_mixed(self, operand: Operand) -> bool:
    """Whether an operand is multiplied by the Hadamard matrix before it is rounded."""
    return self.options.hadamard and operand.product == "weight_grad"

  def dot(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    # The scale `of_tensor` is applied to the sums, which must not be rounded before.
    return jax.lax.convert_element_type(multiply(left, right, FLOAT32), dtype)


def quantise_e4m3(x: Array, rows: int, block: int) -> Scaled:
  """Returns a stack of matrices in e4m3 with scales in e8m0, one per `rows` x `block` elements.

  A scale is the least power of two that brings all elements of its block within 448. An inf or NaN
  in a block makes its scale NaN.
  """
  wide, largest = with_largest(_in_blocks(x, rows, block), (2, 4))
  scale = jnp.maximum(rounded_up(largest, _MOST), LEAST_SCALE)
  # Clipped first, since a cast to e4m3 turns numbers above its range into NaN.
  clipped = jax.lax.clamp(np.float32(-_MOST), wide * (1 / scale), np.float32(_MOST))
  values = jax.lax.convert_element_type(clipped, E4M3)
  # e8m0 is the exponent of a float32. The exponent of inf and NaN is the NaN of e8m0.
  bits = jax.lax.bitcast_convert_type(scale, np.uint32) >> np.uint32(23)
  codes = jax.lax.convert_element_type(bits, np.uint8)
  scale = jax.lax.squeeze(jax.lax.bitcast_convert_type(codes, E8M0), (2, 4))
  return _kept(values, scale)


def quantise_nvfp4(x: Array, rows: int = 1, bits: Array | None = None) -> Scaled:
  """Returns a stack of matrices in e2m1 with scales in e4m3 and one in float32.

  An e4m3 scale is for `rows` x 16 elements. The largest element of the array is 6 * 448 times the
  scale of the array, in which an inf or NaN is too. Elements are rounded to nearest, or with random
  bits stochastically.
  """
  wide, largest = with_largest(_in_blocks(x, rows, _BLOCK_NVFP4), (2, 4))
  of_tensor = jnp.max(largest) * np.float32(1 / (_MOST_E2M1 * _MOST))
  # e2m1 has no NaN, and a maximum on a CPU may lose one.
  is_finite = jnp.all(jnp.isfinite(wide))
  of_tensor = jnp.where(is_finite, jnp.maximum(of_tensor, _LEAST_OF_TENSOR), np.float32(np.nan))
  # With brackets, since XLA may multiply three factors in any order.
  scale = largest * (np.float32(1 / _MOST_E2M1) * (1 / of_tensor))
  scale = jax.lax.convert_element_type(jax.lax.clamp(_LEAST_E4M3, scale, np.float32(_MOST)), E4M3)
  # Without the barrier XLA may divide by the scale before its rounding to e4m3.
  scale = jax.lax.optimization_barrier(scale)
  # One quotient, since XLA merges several, which changes the last digit.
  wide *= 1 / (jax.lax.convert_element_type(scale, FLOAT32) * of_tensor)
  if bits is None:
    values = nearest_e2m1(wide)
  else:
    values = stochastic(wide, E2M1, _in_blocks(bits, rows, _BLOCK_NVFP4))
  return _kept(values, jax.lax.squeeze(scale, (2, 4)))._replace(of_tensor=of_tensor)


def _in_blocks(x: Array, rows: int, block: int) -> Array:
  """Returns matrices with axes (batch, row blocks, rows, column blocks, columns)."""
  batch, height, depth = x.shape
  return split_axes(x, [[batch], [height // rows, rows], [depth // block, block]])


def nearest_e2m1(x: Array) -> Array:
  """Returns float32 numbers in e2m1, rounded to nearest, ties to even; they saturate.

  XLA has casts to e2m1 that round to float16 first, and therefore round some numbers wrongly.
  """
  # e2m1 has the numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6. `spacing` is the distance of neighbours.
  size = jax.lax.abs(x)
  coarse = jnp.where(size < 4, np.float32(1), np.float32(2))
  spacing = jnp.where(size < 2, np.float32(0.5), coarse)
  units = jax.lax.round(x / spacing, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
  most = np.float32(_MOST_E2M1)
  return jax.lax.convert_element_type(jax.lax.clamp(-most, units * spacing, most), E2M1)


def _kept(blocks: Array, scale: Array) -> Scaled:
  """Returns an operand as a stack of matrices, with its scales."""
  values = merge_axes(blocks, [1, 2, 2])
  # Without the barrier XLA may cancel the cast to the format with the dequantisation after it.
  return Scaled(*jax.lax.optimization_barrier((values, scale)))
