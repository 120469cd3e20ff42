"""What tests of formats share: the formats, one layer with its gradients, and NumPy's operands."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax._matmul.recipes import recipe_of
from tests import format_oracle
from tests.autocast.rig import under
from tests.format_oracle import E4M3, E5M2, normal
from tests.programs import with_gradients

INT8_GRADIENTS = {"input_grad": "int8", "weight_grad": "int8"}
# NVFP4 without what is random: see `test_random_options_of_nvfp4`.
PLAIN = {"stochastic_rounding": False, "hadamard": False}
BLOCKS = {
  "mxfp8": mpjax.MXFP8(),
  "nvfp4": mpjax.NVFP4(**PLAIN),
  "float8 block": mpjax.Float8(scaling="block", skip=()),
}
FLOAT8 = {
  "float8 tensor": mpjax.Float8(skip=()),
  "float8 tensor, power of two": mpjax.Float8(skip=(), power_of_two=True),
  "float8 tensor, half": mpjax.Float8(skip=(), weight_grad="half"),
  "float8 row": mpjax.Float8(skip=(), scaling="row"),
  "float8 row, power of two": mpjax.Float8(skip=(), scaling="row", power_of_two=True),
  "float8 row, half": mpjax.Float8(skip=(), scaling="row", weight_grad="half"),
}
INT8 = {
  "int8 row": mpjax.Int8(),
  "int8 tensor": mpjax.Int8(scaling="tensor"),
  "int8 row, gradients": mpjax.Int8(**INT8_GRADIENTS),
  "int8 tensor, gradients": mpjax.Int8(scaling="tensor", **INT8_GRADIENTS),
}
FORMATS = {**BLOCKS, **FLOAT8, **INT8}
blocks = pytest.mark.parametrize("format", BLOCKS.values(), ids=BLOCKS)


def layer(w, x):
  return x.astype(jnp.float32) @ w


@functools.cache
def layer_in(format):
  """Returns the jitted layer and its gradients in a format, which all tests compile once."""
  return jax.jit(with_gradients(under(layer, matmul=format)))


def halves(seed, shape, largest=1.0):
  return normal(seed, shape, largest).astype(ml_dtypes.bfloat16)


def operands(format, *batch):
  """Returns a weight, an input and a gradient for `layer`, as small as the format allows."""
  depth, columns = (128, 128) if format in BLOCKS.values() else (32, 16)
  x, g = halves(0, (*batch, 8, depth)), halves(2, (*batch, 8, columns))
  return normal(1, (*batch, depth, columns)), x, g


def stands_for(x, names, summed, format, role, matmul):
  """What an operand is in the format, in float64; `summed` are its summed axes, in order."""
  x = np.asarray(x, np.float32)
  if matmul == "weight_grad" and getattr(format, "weight_grad", "") == "half":
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)
  if isinstance(format, mpjax.Int8) and matmul != "forward" and format.weight_grad != "int8":
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)
  if isinstance(format, (mpjax.MXFP8, mpjax.NVFP4)) or format.scaling == "block":
    return _in_blocks(x, names, summed, format, role == "weight")
  axes = tuple(map(names.index, summed)) if format.scaling == "row" else None
  if isinstance(format, mpjax.Int8):
    values, scale = format_oracle.int8(x, axes)
    return values * scale
  dtype = E5M2 if role == "gradient" else E4M3
  return format_oracle.quantised(x, dtype, axes, format.power_of_two)


def _in_blocks(x, names, summed, format, is_weight):
  # Experts are apart: no block has rows of two.
  order = sorted(names, key=lambda n: summed.index(n) + 1 if n in summed else -(n == "x"))
  moved = np.transpose(x.astype(np.float64), [names.index(n) for n in order])
  rows = moved.reshape(-1, int(np.prod(moved.shape[len(order) - len(summed) :])))
  padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % recipe_of(format).block)))
  if isinstance(format, mpjax.Float8):
    sizes = (128 if is_weight else 1, 128)
    found = format_oracle.float8_blocks(padded, sizes, power_of_two=True)
  elif isinstance(format, mpjax.NVFP4):
    sizes = (16 if is_weight and format.square_weights else 1, 16)
    found = format_oracle.nvfp4(padded, sizes)
  else:
    found = format_oracle.mxfp8(padded, -1)
  wide = format_oracle.dequantised(*found)[:, : rows.shape[1]].reshape(moved.shape)
  return np.transpose(wide, [order.index(n) for n in names])
