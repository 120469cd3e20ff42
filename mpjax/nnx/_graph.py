"""Walk the graph of a model: its modules and variables, their order, and methods in attributes.

A *module* is any `nnx.Pytree` here: also an `nnx.List`, an `nnx.Rngs` or a user's own object.
"""

import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from mpjax._autocast.boundary import Boundary, in_order
from mpjax._core.trees import mapped
from mpjax._core.types import Leaf, PyTree

CONTAINERS = (nnx.List, nnx.Dict)
"""The containers of NNX. Their attributes are their items, with an attribute for the length."""

HOLD_METHODS = (types.MethodType, functools.partial, tuple)
"""The values of an attribute that may hold a method of a module. NNX takes methods to be static."""


def is_node(x: object) -> bool:
  """Whether `x` is a module, a variable or another object of NNX."""
  return isinstance(x, (nnx.Pytree, nnx.Variable))


def is_tree(module: nnx.Pytree) -> bool:
  """Whether a module is a pytree to JAX, which its class may decline."""
  return not jax.tree_util.all_leaves([module])


def parts_of(tree: PyTree) -> tuple[list[nnx.Pytree], list[nnx.Variable[Leaf]]]:
  """Returns the modules of a tree, and its variables, in the order of its graph.

  NNX sorts attributes by name, so a tree and its copy have one order.
  """
  # `graph=True`: shared objects count once, also if a flag of Flax makes trees the default.
  parts = [x for _, x in nnx.iter_graph(tree, graph=True)]
  variables = [x for x in parts if isinstance(x, nnx.Variable)]
  return [x for x in parts if isinstance(x, nnx.Pytree)], variables


def orders_of(modules: Iterable[nnx.Pytree]) -> list[object]:
  """Returns the order of the attributes of each module, and of the containers in them."""
  # Nodes are leaves here: each module has its own entry in the list.
  return [Boundary(vars(module), is_node).order for module in modules]


def put_in_order(modules: Iterable[nnx.Pytree], orders: Iterable[object]) -> None:
  """Puts the attributes of modules, which NNX has sorted, into the given orders."""
  for module, order in zip(modules, orders, strict=True):
    attributes = vars(module)
    ordered = in_order(attributes, order)
    if ordered is not attributes:
      attributes.clear()
      attributes.update(ordered)


def rebound(tree: PyTree, counterparts: Mapping[int, object]) -> PyTree:
  """Returns a tree with objects replaced by their counterparts, also in methods and partials.

  Args:
    tree: the tree.
    counterparts: the counterpart of each object, by the identity of the object.
  """

  def leaf(x: Any) -> Any:
    if isinstance(x, types.MethodType):
      to = counterparts.get(id(x.__self__))
      if to is None:
        return x
      # By name first, since a view overrides the method. A function that was bound to a module by
      # `MethodType` may have no such attribute.
      return getattr(to, x.__name__, None) or types.MethodType(x.__func__, to)
    if isinstance(x, functools.partial):
      parts = x.func, x.args, x.keywords
      # A partial without modules stays the same object, so that it counts as unchanged.
      new = rebound(parts, counterparts)
      if new is parts:
        return x
      func, args, kwargs = new
      return type(x)(func, *args, **kwargs)
    return counterparts.get(id(x), x)

  return mapped(leaf, tree, lambda x: is_node(x) or isinstance(x, functools.partial))


def contents_of(tree: PyTree) -> list[object]:
  """Returns the objects that a tree consists of, without the values of variables.

  They are the same objects as long as only values of variables change.
  """
  contents: list[object] = []
  for _, node in nnx.iter_graph(tree, graph=True):
    # Keys of attributes count too: an attribute may be renamed.
    if isinstance(node, nnx.Variable):
      raw = node.get_raw_value()
      # Arrays are values, and may change. The leaves of a tree are part of its structure.
      value = [jax.Array] if isinstance(raw, jax.Array) else jax.tree.leaves(raw)
      contents += [node, *node.get_metadata().values(), *value]
    elif isinstance(node, nnx.Pytree):
      contents += [node, *vars(node), *vars(node).values()]
    elif isinstance(node, dict):
      contents += [node, *node, *node.values()]
    elif isinstance(node, list):
      contents += [node, *node]
  return contents


def hides_tracer(tree: PyTree) -> bool:
  """Whether an attribute of a module is a tracer that is none of the leaves of the module."""
  # NNX passes arrays in variables through a trace. An array in another attribute is static to it,
  # and a tracer there would leak.
  leaf_ids = set(map(id, jax.tree.leaves(nnx.to_tree(tree))))
  attributes = Boundary(list(map(vars, parts_of(tree)[0])), is_node).leaves
  return any(isinstance(x, Tracer) and id(x) not in leaf_ids for x in attributes)
