"""Values for the variables of a model, without running its initialisers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def shapes(model: Any, *args: Any, **kwargs: Any) -> Any:
  """Returns the shapes and dtypes of a model's initial variables, by tracing alone."""
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  return jax.eval_shape(lambda args: model.init(keys, *args, **kwargs), args)


def filled(tree: Any, seed: int = 0) -> Any:
  """Returns NumPy arrays for a tree of shapes: matrices about orthonormal, scales about 1.

  Compiling the initialisers of a model takes longer than everything that is asked of it here.
  """
  rng = np.random.default_rng(seed)

  def leaf(path: Any, x: Any) -> Any:
    name = str(path[-1])
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return np.zeros(x.shape, x.dtype)
    noise = rng.normal(size=x.shape)
    if "scale" in name or "var" in name:
      return np.asarray(1 + 0.1 * np.abs(noise), x.dtype)
    if len(x.shape) < 2:
      return np.asarray(0.1 * noise, x.dtype)
    inputs = np.prod(x.shape[-4:-1]) if "kernel" in name else x.shape[-2]
    return np.asarray(noise / np.sqrt(inputs), x.dtype)

  return jax.tree_util.tree_map_with_path(leaf, tree)


def normal(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
  """Returns normally distributed float32 inputs."""
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(*shape: int, below: int, seed: int = 0) -> np.ndarray[Any, Any]:
  """Returns uniformly distributed int32 inputs."""
  return np.random.default_rng(seed).integers(0, below, shape, np.int32)


def integral(seed: int, shape: tuple[int, ...], largest: int) -> jax.Array:
  """Returns whole float32 numbers of up to a largest: sums of products of them are exact."""
  numbers = np.random.default_rng(seed).integers(-largest, largest + 1, shape)
  return jnp.asarray(numbers, jnp.float32)
