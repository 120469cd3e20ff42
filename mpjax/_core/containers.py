"""Containers around other leaves, in their own order and of their own type.

`jax.tree` builds them with the keys of dicts sorted, and an array or a container once for each
place that it is in. The user's code sees the difference: `mean, logvar = outputs.values()`.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.tree_util import default_registry

from mpjax._core.types import PyTree

IsLeaf: TypeAlias = Callable[[Any], bool]

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
"""The dicts that are trees to JAX."""


class Content(NamedTuple):
  """What a container holds.

  Fields:
    parts: its parts, in its own order.
    like: what tells it from another container of the same parts: keys, or its structure to JAX.
    build: makes one of other parts. It holds none of these.
  """

  parts: list[Any]
  like: Any
  build: Callable[[list[Any]], Any]


def content_of(x: Any, is_leaf: IsLeaf | None = None) -> Content | None:
  """Returns what a container holds; None for a leaf.

  `is_leaf` says which parts of another container than a list, tuple or dict are not looked into.
  """
  cls: Any = type(x)
  if cls in DICTS:
    keys = list(x)
    more: list[Any] = [x.default_factory] if cls is collections.defaultdict else []
    make: Any = cls
    return Content(list(x.values()), keys, lambda parts: make(*more, zip(keys, parts, strict=True)))
  if cls in (list, tuple):
    return Content(list(x), None, cls)
  if isinstance(x, jax.Array) or default_registry.flatten_one_level(x) is None:
    return None
  stop = is_leaf or (lambda _: True)
  parts, treedef = jax.tree.flatten(x, is_leaf=lambda y: y is not x and stop(y))
  order = list(x) if cls.__name__ == "FrozenDict" else []  # JAX sorts those of Flax's too.

  def build(parts: list[Any]) -> Any:
    new = jax.tree.unflatten(treedef, parts)
    return cls({key: new[key] for key in order}) if order else new

  return Content(parts, treedef, build)


def mapped(fun: Callable[[Any], Any], tree: PyTree, is_leaf: IsLeaf | None = None) -> PyTree:
  """Returns a tree with `fun` of its leaves, in containers of the same order, type and identity.

  A container of which no leaf changes is itself in the result.
  """
  return _mapped(fun, tree, is_leaf, {})


def _mapped(fun: Any, x: Any, is_leaf: IsLeaf | None, built: dict[int, Any]) -> Any:
  # No closure that calls itself: that cycle would keep tracers alive until the next collection.
  if x is None:
    return None
  if id(x) not in built:
    content = None if is_leaf is not None and is_leaf(x) else content_of(x)
    if content is None:
      return fun(x)
    parts = [_mapped(fun, part, is_leaf, built) for part in content.parts]
    built[id(x)] = (x, x if same_objects(parts, content.parts) else content.build(parts))
  return built[id(x)][1]


def same_objects(a: Sequence[object], b: Sequence[object]) -> bool:
  """Whether two sequences have the same objects, not only equal ones."""
  return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def refill(container: Any, content: Content) -> None:
  """Gives a list or dict what another one holds."""
  container.clear()
  if isinstance(container, list):
    container.extend(content.parts)
  else:
    container.update(zip(content.like, content.parts, strict=True))
