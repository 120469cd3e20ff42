"""Names for the types that signatures share, and predicates of dtypes.

Trees stay `Any` underneath: `optax.Params` is a union of arrays, iterables and mappings, which an
Equinox model or a dataclass is not, and which cannot be indexed.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any  # any nesting of containers that `jax.tree` understands
Params: TypeAlias = PyTree
Grads: TypeAlias = PyTree  # like the parameters, and of their shapes
Updates: TypeAlias = PyTree  # what `optax.GradientTransformation.update` takes and returns
OptState: TypeAlias = PyTree
Variables: TypeAlias = Mapping[str, PyTree]  # collections of a Linen model, by name
KeyPath: TypeAlias = tuple[Any, ...]  # as `jax.tree_util` gives it: keys, indices, names of fields

DType: TypeAlias = np.dtype[Any]
DTypeLike: TypeAlias = str | type[Any] | np.dtype[Any]
Array: TypeAlias = jax.Array
NumpyArray: TypeAlias = np.ndarray[Any, Any]
Leaf: TypeAlias = Any  # an array, a Python number, or any object of the user's

Module: TypeAlias = Any  # a module of Linen or of NNX: neither is imported for its type alone
Class: TypeAlias = type[Any]
Function: TypeAlias = Callable[..., Any]  # of a user: nothing is known but that it is called
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]

P = ParamSpec("P")  # the arguments of a function that a decorator gives back

FLOAT32 = np.dtype("float32")

HALVES = frozenset(map(np.dtype, (jnp.bfloat16, jnp.float16)))
"""The floating dtypes of 16 bits, in which mpjax computes."""

FLOATS = HALVES | {FLOAT32}
"""The floating dtypes whose operations the rewriter may write in another of them."""

HALF_NAMES = tuple(sorted(dtype.name for dtype in HALVES))


def unsigned_like(dtype: DType) -> DType:
  """Returns the unsigned integer dtype of the same size, for the bits of an array."""
  return np.dtype(f"uint{8 * dtype.itemsize}")


# Cached: an audit asks this several times for each value, and `jnp.issubdtype` is slow.
@functools.lru_cache(maxsize=256)
def is_floating_dtype(dtype: DType) -> bool:
  return jnp.issubdtype(dtype, jnp.floating)


@functools.lru_cache(maxsize=256)
def is_inexact_dtype(dtype: DType) -> bool:
  """Whether `dtype` is floating or complex."""
  return jnp.issubdtype(dtype, jnp.inexact)


def is_inexact(x: Leaf) -> bool:
  """Whether `x` holds floating or complex numbers: a Python number or an array of any kind."""
  is_array = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
  return is_array or isinstance(x, (float, complex))


def is_low_precision(dtype: DType) -> bool:
  """Whether `dtype` is floating and narrower than float32: bfloat16, float16 or 8 bits."""
  return is_floating_dtype(dtype) and dtype.itemsize < FLOAT32.itemsize
