"""Leaves as NumPy arrays by path, which any file format can hold."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.paths import check_leaves, is_key, leaves_by_path, same_path
from mpjax._core.types import DType, Leaf, NumpyArray, PyTree

_KEY = "key:"


def to_arrays(tree: PyTree) -> dict[str, NumpyArray]:
  """Returns the leaves of `tree` as NumPy arrays by path, which any file format can hold.

  NumPy's files and msgpack know no typed keys, and NumPy's neither bfloat16 nor the 8-bit types.
  Those are stored as unsigned integers, and a tag behind an "@" in the name says what they are:
  `"params/w@bfloat16"`, `"rng@key:threefry2x32"`. `mpjax.checkpoints.restore_like` reads the tags.

  Args:
    tree: any tree of arrays, keys and Python numbers. This process must hold all of each array.

  Returns:
    One array per leaf; the parts of a path are joined by "/". What has no leaf (None, an empty
    state) is not in it.

  Raises:
    MpjaxValueError: two leaves have the same path as text.
    MpjaxTypeError: a leaf is not an array, or is traced or abstract.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> tree = {"w": jnp.ones(2, jnp.bfloat16), "rng": [jax.random.key(7)]}
  >>> arrays = mpjax.checkpoints.to_arrays(tree)
  >>> for name, array in arrays.items():
  ...   print(name, array)
  rng/0@key:threefry2x32 [0 7]
  w@bfloat16 [16256 16256]
  """
  where = "mpjax.checkpoints.to_arrays(tree)"
  leaves = leaves_by_path(tree, where)
  check_leaves(leaves, where, abstract=False)
  arrays: dict[str, NumpyArray] = {}
  for path, x in leaves.items():
    tag, array = _encode(x)
    name = f"{path}@{tag}" if tag else path
    if name in arrays:
      raise same_path(where, name)
    arrays[name] = array
  return arrays


def _encode(x: Leaf) -> tuple[str, NumpyArray]:
  """Returns the tag ("" for what NumPy's files know) and the array to store."""
  if not hasattr(x, "dtype"):
    return "", np.asarray(x, jnp.result_type(x))
  if is_key(x.dtype):
    return f"{_KEY}{jax.random.key_impl(x)}", np.asarray(jax.random.key_data(x))
  array = np.asarray(x)
  if not _is_registered(array.dtype):
    return "", array
  return array.dtype.name, array.view(_bits(array.dtype))


def _is_registered(dtype: DType) -> bool:
  """Whether `dtype` is one that another package has added to NumPy, such as bfloat16."""
  return dtype.isbuiltin == 2


def _bits(dtype: DType) -> DType:
  return np.dtype(f"uint{8 * dtype.itemsize}")


def decode(name: str, x: Leaf) -> tuple[str, Leaf]:
  """Returns the path and the leaf behind a name and an array of `to_arrays`.

  Without a tag of ours they are what was given: a key of a tree may well hold an "@".
  """
  path, _, tag = name.rpartition("@")
  try:
    if tag.startswith(_KEY):
      return path, jax.random.wrap_key_data(jnp.asarray(x), impl=tag.removeprefix(_KEY))
    dtype = jnp.dtype(tag)
  except (TypeError, ValueError):
    return name, x
  if _is_registered(dtype) and getattr(x, "dtype", None) == _bits(dtype):
    return path, np.asarray(x).view(dtype)
  return name, x
