"""Names for the types that signatures share."""

from typing import Any, TypeAlias

import jax
import numpy as np

PyTree: TypeAlias = Any
"""Any nesting of containers that `jax.tree` understands."""

DTypeLike: TypeAlias = str | type[Any] | np.dtype[Any]
"""What names a dtype: a string, a scalar type such as `jnp.bfloat16`, or a `np.dtype`."""

Array: TypeAlias = jax.Array
