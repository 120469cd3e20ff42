"""Names for the types that signatures share.

Trees stay `Any` underneath: `optax.Params` is a union of arrays, iterables and mappings, which an
Equinox model or a dataclass is not, and which cannot be indexed.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

PyTree: TypeAlias = Any
"""Any nesting of containers that `jax.tree` understands."""

Params: TypeAlias = PyTree
"""The parameters of a model: a tree of arrays, as in `optax.Params`."""

Grads: TypeAlias = PyTree
"""Gradients: a tree like the parameters, of their shapes."""

Updates: TypeAlias = PyTree
"""What `optax.GradientTransformation.update` takes and returns: a tree like the parameters."""

OptState: TypeAlias = PyTree
"""The state of an optimizer, as in `optax.OptState`."""

Variables: TypeAlias = Mapping[str, PyTree]
"""The variables of a Linen model: collections, such as "params", by name."""

DType: TypeAlias = np.dtype[Any]

DTypeLike: TypeAlias = str | type[Any] | np.dtype[Any]
"""What names a dtype: a string, a scalar type such as `jnp.bfloat16`, or a `np.dtype`."""

Array: TypeAlias = jax.Array

NumpyArray: TypeAlias = np.ndarray[Any, Any]

Function: TypeAlias = Callable[..., Any]
"""A function of a user: nothing is known but that it is called."""

Class: TypeAlias = type[Any]

Leaf: TypeAlias = Any
"""A leaf of a tree: an array, a Python number, or what a user has put there."""

Module: TypeAlias = Any
"""A model or a part of one, of Linen or of NNX: neither is imported for its type alone."""

KeyPath: TypeAlias = tuple[Any, ...]
"""A path as `jax.tree_util` gives it: keys, indices and names of fields."""

Args: TypeAlias = tuple[Any, ...]
"""The positional arguments of a call of a user's function, which are passed as they came."""

Kwargs: TypeAlias = dict[str, Any]
"""The keyword arguments of such a call."""
