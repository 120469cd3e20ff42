"""What matmuls in float8 compute, by NumPy in float64 and the rounding of `ml_dtypes`."""

import re

import ml_dtypes
import numpy as np

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)

TINY = np.finfo(np.float32).tiny


def normal(seed, shape, largest=1.0):
  rng = np.random.default_rng(seed)
  return (rng.normal(size=shape) * largest).astype(np.float32)


def scale_of(x, dtype, axes, power_of_two):
  """The scale as the documentation says it, by NumPy."""
  most = float(ml_dtypes.finfo(dtype).max)
  largest = np.max(np.abs(x), axis=axes, keepdims=axes is not None).astype(np.float32)
  if not power_of_two:
    return np.maximum(largest * np.float32(1 / most), TINY)
  with np.errstate(divide="ignore"):
    up = np.exp2(np.ceil(np.log2(largest.astype(np.float64) / most)))
  return np.maximum(up.astype(np.float32), TINY)


def quantised(x, dtype, axes, power_of_two):
  """What a scaled operand stands for, in float64."""
  scale = scale_of(x, dtype, axes, power_of_two)
  most = np.float32(ml_dtypes.finfo(dtype).max)
  values = np.clip(np.asarray(x, np.float32) * (np.float32(1) / scale), -most, most).astype(dtype)
  return values.astype(np.float64) * scale.astype(np.float64)


class Oracle:
  """An einsum of two arrays and its gradients in float64, of operands that are rounded."""

  def __init__(self, formula, recipe):
    self.left, self.right, self.out = re.split(",|->", formula)
    self.recipe = recipe

  def _multiplied(self, one, x, other, y, out, dtypes):
    def cast(x, names, others, dtype):
      axes = tuple(i for i, n in enumerate(names) if n in others and n not in out)
      axes = axes if self.recipe.scaling == "row" else None
      return quantised(x, dtype, axes, self.recipe.power_of_two) if dtype else x.astype(np.float64)

    x, y = cast(x, one, other, dtypes[0]), cast(y, other, one, dtypes[1])
    result = np.einsum(f"{one},{other}->{out}", x, y)
    return result, np.einsum(f"{one},{other}->{out}", abs(x), abs(y))

  def forward(self, x, w):
    return self._multiplied(self.left, x, self.right, w, self.out, (E4M3, E4M3))

  def of_x(self, g, w):
    return self._multiplied(self.out, g, self.right, w, self.left, (E5M2, E4M3))

  def of_w(self, g, x):
    half = self.recipe.weight_grad == "half"
    x = x.astype(ml_dtypes.bfloat16) if half else x
    dtypes = (None, None) if half else (E5M2, E4M3)
    return self._multiplied(self.out, g, self.left, x, self.right, dtypes)
