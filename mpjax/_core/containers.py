"""Containers around other leaves, in their own order and of their own type.

`jax.tree` builds them with the keys of dicts sorted, and an array or a container once for each
place that it is in. The user's code sees the difference: `mean, logvar = outputs.values()`.
"""

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import jax

from mpjax._core.types import PyTree

IsLeaf: TypeAlias = Callable[[Any], bool]

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
"""The dicts that are trees to JAX."""


class Rebuilt:
  """Containers built once more around other leaves, each once.

  Args:
    leaf: from a leaf to what replaces it.
    is_leaf: what counts as one, besides what is no tree to JAX.

  Attributes:
    made: by the identity of a container, that itself, the new one, and what the new one was given.
  """

  def __init__(self, leaf: Callable[[Any], Any], is_leaf: IsLeaf | None = None) -> None:
    self.leaf, self.is_leaf = leaf, is_leaf
    self.made: dict[int, tuple[Any, Any, list[Any]]] = {}

  def of(self, x: Any) -> Any:
    if x is None:
      return None
    if id(x) in self.made:
      return self.made[id(x)][1]
    found = None if self.is_leaf is not None and self.is_leaf(x) else children_of(x)
    if found is None:
      return self.leaf(x)
    parts, treedef = [self.of(part) for part in found[0]], found[1]
    if type(x) in DICTS:
      new = copy.copy(x)  # A `defaultdict` has a factory too.
      new.update(zip(x, parts, strict=True))
    elif treedef is None:
      new = type(x)(parts)
    else:
      new = jax.tree.unflatten(treedef, parts)
      if isinstance(x, Mapping) and list(new) != list(x):
        new = cast(Any, type(x))({key: new[key] for key in x})
    self.made[id(x)] = (x, new, parts)
    return new


def children_of(x: Any) -> tuple[list[Any], Any] | None:
  """Returns what a container holds, and its structure if JAX is to build it; None for a leaf."""
  if isinstance(x, (jax.Array, Iterator)):  # JAX warns of iterators.
    return None
  if type(x) in DICTS:
    return list(x.values()), None
  if type(x) in (list, tuple):
    return list(x), None
  parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x)
  return None if jax.tree_util.treedef_is_leaf(treedef) else (parts, treedef)


def mapped(fun: Callable[[Any], Any], tree: PyTree, is_leaf: IsLeaf | None = None) -> PyTree:
  """Returns a tree with `fun` of its leaves, in containers of the same order, type and identity."""
  return Rebuilt(fun, is_leaf).of(tree)
