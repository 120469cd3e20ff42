"""The leaves of a tree by path, as text and as NumPy arrays that any file format can hold."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mpjax._errors import MpjaxTypeError, MpjaxValueError, listed, message
from mpjax._tree import is_array_like
from mpjax._types import PyTree

_KEY = "key:"

Place: TypeAlias = tuple[str, ...]
"""The names on the way to a leaf or a node of a tree."""


def to_arrays(tree: PyTree) -> dict[str, np.ndarray[Any, Any]]:
  """Returns the leaves of `tree` as NumPy arrays by path, which any file format can hold.

  NumPy's files and msgpack know no typed keys, and NumPy's neither bfloat16 nor the 8-bit types.
  Those are stored as unsigned integers, and a tag behind an "@" in the name says what they are:
  `"params/w@bfloat16"`, `"rng@key:threefry2x32"`. `mpjax.restore_like` understands the tags.

  Args:
    tree: any tree of arrays, keys and Python numbers. This process must hold all of each array.

  Returns:
    One array per leaf; the parts of a path are joined by "/". What has no leaf (None, an empty
    state) is not in it.

  Raises:
    MpjaxValueError: two leaves have the same path as text.
    MpjaxTypeError: a leaf is not an array, or is traced or abstract.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> arrays = mpjax.to_arrays({"w": jnp.ones(2, jnp.bfloat16), "rng": [jax.random.key(7)]})
  >>> for name, array in arrays.items():
  ...   print(name, array)
  rng/0@key:threefry2x32 [0 7]
  w@bfloat16 [16256 16256]
  """
  where = "mpjax.to_arrays(tree)"
  leaves = leaves_by_path(tree, where)
  check_leaves(leaves, where, abstract=False)
  arrays: dict[str, np.ndarray[Any, Any]] = {}
  for path, x in leaves.items():
    tag, array = _encode(x)
    name = f"{path}@{tag}" if tag else path
    if name in arrays:
      raise same_path(where, name)
    arrays[name] = array
  return arrays


def path_text(path: Any) -> str:
  """Returns a path of JAX as text, the same whatever the containers are."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def places(tree: PyTree) -> list[Place]:
  """Returns where each leaf is. What a box holds is where the box is.

  `nnx.State` holds variables and a partitioned Linen model boxes, whose array is an attribute. A
  name with slashes in it, as Haiku's are, is several.
  """

  def is_box(x: Any) -> bool:
    return hasattr(type(x), "replace_boxed") or hasattr(type(x), "get_raw_value")

  found: list[Place] = []
  for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
    place = tuple(path_text(path).split("/")) if path else ()
    found += [place] * len(jax.tree.leaves(node))
  return found


def leaves_by_path(tree: PyTree, where: str) -> dict[str, Any]:
  """Returns the leaves of `tree`, in its order, by path.

  A path does not tell a field of a class from the key of a dict, nor a position from its digits:
  checkpoints turn one into the other.

  Raises:
    MpjaxValueError: two leaves have the same path as text.
  """
  if isinstance(tree, Mapping) and jax.tree_util.all_leaves([tree]):
    tree = dict(tree)  # one that JAX does not know, such as numpy.load of an npz file
  leaves: dict[str, Any] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    text = path_text(path)
    if text in leaves:
      raise same_path(where, text)
    leaves[text] = x
  return leaves


def same_path(where: str, name: str) -> MpjaxValueError:
  """Returns the error for two leaves that have the same path."""
  return MpjaxValueError(
    message(
      where,
      expected="leaves with different paths",
      got=f"two at {name!r}",
      fix="Rename a key that contains '/' or '@'.",
    )
  )


def check_leaves(leaves: Mapping[str, Any], where: str, *, abstract: bool) -> None:
  """Raises unless all leaves are arrays that are there: not traced, `abstract` only if that is set.

  Raises:
    MpjaxTypeError: some are not; all of them are named.
  """
  refused = (Tracer,) if abstract else (Tracer, jax.ShapeDtypeStruct)
  wrong = [
    f"a {type(x).__name__} at {path or 'the root'}"
    for path, x in leaves.items()
    if not is_array_like(x) or isinstance(x, refused)
  ]
  if wrong:
    raise MpjaxTypeError(
      message(
        where,
        expected=f"arrays{' or jax.ShapeDtypeStruct' if abstract else ''} as leaves",
        got=listed(wrong),
        fix="Call it on the host, outside of jit, and leave out what is not an array.",
      )
    )


def is_key(dtype: Any) -> bool:
  """Whether `dtype` is that of typed PRNG keys."""
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _encode(x: Any) -> tuple[str, np.ndarray[Any, Any]]:
  """Returns the tag ("" for what NumPy's files know) and the array to store."""
  if not hasattr(x, "dtype"):
    return "", np.asarray(x, jnp.result_type(x))
  if is_key(x.dtype):
    return f"{_KEY}{jax.random.key_impl(x)}", np.asarray(jax.random.key_data(x))
  array = np.asarray(x)
  if not _is_registered(array.dtype):
    return "", array
  return array.dtype.name, array.view(_bits(array.dtype))


def _is_registered(dtype: np.dtype[Any]) -> bool:
  """Whether `dtype` is one that another package has added to NumPy, such as bfloat16."""
  return dtype.isbuiltin == 2


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
  return np.dtype(f"uint{8 * dtype.itemsize}")


def decode(name: str, x: Any) -> tuple[str, Any]:
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
