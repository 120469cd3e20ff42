"""Paths of leaves as text, and the leaves of a tree by path."""

from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, kind_of, listed
from mpjax._core.trees import is_array_like
from mpjax._core.types import DType, KeyPath, Leaf, PyTree

Path: TypeAlias = tuple[str, ...]
"""The names on the way to a leaf or a node of a tree."""


def path_text(path: KeyPath) -> str:
  """Returns a path of JAX as text, the same whatever the containers are."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def key_names(path: KeyPath) -> Path:
  """Returns the names of the keys of a path of JAX, whatever the containers are."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def leaf_paths(tree: PyTree) -> list[Path]:
  """Returns the path of each leaf. What a box holds has the path of the box."""
  # `nnx.State` holds variables and a partitioned Linen model boxes, whose array is an attribute. A
  # name with slashes in it, as Haiku's are, is several.

  def is_box(x: object) -> bool:
    return hasattr(type(x), "replace_boxed") or hasattr(type(x), "get_raw_value")

  found: list[Path] = []
  for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
    names = tuple(path_text(path).split("/")) if path else ()
    found += [names] * len(jax.tree.leaves(node))
  return found


def node_paths(tree: PyTree) -> set[str]:
  """Returns the paths of the nodes that hold leaves, and of those around; "" is the root."""
  return {"/".join(path[:n]) for path in leaf_paths(tree) for n in range(len(path))}


def leaves_by_path(tree: PyTree, where: str) -> dict[str, Leaf]:
  """Returns the leaves of `tree`, in its order, by path; two of one path as text are an error."""
  # A path does not tell a field of a class from the key of a dict, nor a position from its digits:
  # checkpoints turn one into the other.
  if isinstance(tree, Mapping) and jax.tree_util.all_leaves([tree]):
    tree = dict(tree)  # one that JAX does not know, such as numpy.load of an npz file
  leaves: dict[str, Leaf] = {}
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    text = path_text(path)
    if text in leaves:
      raise same_path(where, text)
    leaves[text] = x
  return leaves


def same_path(where: str, name: str) -> MpjaxValueError:
  """Returns the error for two leaves that have the same path."""
  return MpjaxValueError(
    where,
    expected="leaves with different paths",
    got=f"two at {name!r}",
    fix="Rename a key that contains '/' or '@'.",
  )


def check_leaves(leaves: Mapping[str, Leaf], where: str, *, abstract: bool) -> None:
  """Raises MpjaxTypeError unless all leaves are arrays, not traced; abstract ones if asked."""
  refused = (Tracer,) if abstract else (Tracer, jax.ShapeDtypeStruct)
  wrong = [
    f"{kind_of(x)} at {path or 'the root'}"
    for path, x in leaves.items()
    if not is_array_like(x) or isinstance(x, refused)
  ]
  if wrong:
    raise MpjaxTypeError(
      where,
      expected=f"arrays{' or jax.ShapeDtypeStruct' if abstract else ''} as leaves",
      got=listed(wrong),
      fix="Call it on the host, outside of jit, and leave out what is not an array.",
    )


def is_key(dtype: DType) -> bool:
  """Whether `dtype` is that of typed PRNG keys."""
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)
