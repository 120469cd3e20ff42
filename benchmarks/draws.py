"""Parameters and batches for a model that two frameworks have: NumPy alone draws them.

Each array is drawn from its name, so that a process with JAX and one with PyTorch hold the same
numbers without a file of gigabytes between them.
"""

import concurrent.futures
import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np


def parameters(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
  """Returns a float32 array for each name, distributed as Flax initializes it.

  Args:
    shapes: those of Flax's variables, by their paths with "/" in between.
  """
  # NumPy draws without Python's lock: arrays of a gigabyte would be most of the time otherwise.
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return dict(zip(shapes, pool.map(_one, shapes, shapes.values()), strict=True))


def _one(name: str, shape: Sequence[int]) -> np.ndarray:
  last = name.rpartition("/")[2]
  if last in ("scale", "var"):
    return np.ones(shape, np.float32)
  if last in ("bias", "mean"):
    return np.zeros(shape, np.float32)
  x = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
  x *= np.float32(_deviation(name, shape))
  return x


def _deviation(name: str, shape: Sequence[int]) -> float:
  layer, _, last = name.rpartition("/")
  if last == "places":
    return 0.02
  if last == "embedding":
    return 1 / math.sqrt(shape[-1])
  if last in ("up", "down"):  # of experts, which are the first axis
    return 1 / math.sqrt(shape[1])
  if layer.endswith("/out") and len(shape) == 3:  # heads and features of each, to the width
    return 1 / math.sqrt(shape[0] * shape[1])
  # Of a projection to heads the first axis is summed; of a convolution all but the last.
  return 1 / math.sqrt(shape[0] if len(shape) == 3 else math.prod(shape[:-1]))


def batch(
  inputs: Sequence[int], integers: bool, classes: int, outputs: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Returns an input, float32 or numbers of classes, and labels."""
  rng = np.random.default_rng(0)
  labels = rng.integers(0, classes, outputs, np.int32)
  if integers:
    return rng.integers(0, classes, inputs, np.int32), labels
  return rng.standard_normal(inputs, np.float32), labels
