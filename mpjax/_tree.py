"""Casting, selecting and checking the leaves of trees."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._errors import MpjaxValueError, message
from mpjax._types import Array, PyTree


def is_floating(x: Any) -> bool:
  """Whether `x` is an array (of JAX or NumPy, concrete, traced or abstract) with a floating dtype.

  Python numbers are not arrays: JAX already lets them follow the dtype of what they meet.
  """
  return isinstance(
    x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
  ) and jnp.issubdtype(x.dtype, jnp.floating)


def cast_leaf(x: Any, dtype: np.dtype[Any]) -> Any:
  """Returns `x` in `dtype` if it is a floating array, else `x` itself.

  A NumPy value stays one: code that uses it as a constant (a schedule, a rate) keeps a value
  that it can look at under `jit`.
  """
  if not is_floating(x) or x.dtype == dtype:
    return x
  if isinstance(x, jax.ShapeDtypeStruct):
    return x.update(dtype=dtype)
  if isinstance(x, (np.ndarray, np.generic)):
    # JAX would narrow float64 first; rounding twice is then what the same input gives anywhere.
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype)).astype(dtype)
  return x.astype(dtype)


def cast_floating(tree: PyTree, dtype: np.dtype[Any]) -> PyTree:
  """Returns `tree` with its floating arrays in `dtype` and every other leaf as it is."""
  return jax.tree.map(lambda x: cast_leaf(x, dtype), tree)


def all_finite(tree: PyTree) -> Array:
  """Whether no array in `tree` holds an inf or a NaN.

  Each element is looked at by itself: a sum or a norm of finite values may overflow. Integers,
  booleans, keys, `float0` and leaves that are not arrays are finite; of a complex number both
  parts must be.

  Args:
    tree: any tree of arrays, of any shapes and dtypes.

  Returns:
    A scalar bool array; True for a tree without floating leaves.

  >>> import jax.numpy as jnp, mpjax
  >>> bool(mpjax.all_finite({"w": jnp.ones(3), "step": 7, "nothing": None}))
  True
  >>> bool(mpjax.all_finite([jnp.ones(3), jnp.array([0.0, jnp.nan])]))
  False
  """
  finite = jnp.asarray(True)
  for x in jax.tree.leaves(tree):
    if isinstance(x, (float, complex)) or (
      hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
    ):
      finite = jnp.logical_and(finite, jnp.all(jnp.isfinite(x)))
  return finite


def select(condition: Array, on_true: PyTree, on_false: PyTree, where: str) -> PyTree:
  """Returns `on_true` where the scalar `condition` holds and `on_false` where it does not.

  Never a product with a mask: 0 * NaN is NaN.

  Args:
    condition: a scalar bool.
    on_true: a tree of arrays.
    on_false: a tree with the same structure, shapes and dtypes.
    where: the public call, for the error.

  Raises:
    MpjaxValueError: `condition` is not a scalar, or a leaf differs in dtype or shape.
  """
  if jnp.shape(condition) != ():
    raise MpjaxValueError(
      message(
        where,
        expected="a scalar flag",
        got=f"one of shape {jnp.shape(condition)}",
        fix="Reduce it first, or jax.vmap the whole call: one flag decides for the whole tree.",
      )
    )

  def pick(path: Any, new: Any, old: Any) -> Any:
    if jnp.shape(new) != jnp.shape(old) or jnp.result_type(new) != jnp.result_type(old):
      raise MpjaxValueError(
        message(
          f"{where} at {jax.tree_util.keystr(path) or 'the root'}",
          expected=f"{jax.typeof(old)}, as in the old tree",
          got=str(jax.typeof(new)),
          fix="Give both trees the same shapes and dtypes: nothing is cast or broadcast here.",
        )
      )
    return new if new is old else jnp.where(condition, new, old)

  return jax.tree_util.tree_map_with_path(pick, on_true, on_false)
