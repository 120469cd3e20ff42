"""What no traced jaxpr can do: it would lose a change, or let a tracer out."""

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
from jax.core import Tracer

from mpjax._core.types import Leaf, PyTree

R = TypeVar("R")


class NotTraceable(Exception):
  """A function changed an argument in place, or returned an object that hides a tracer from JAX.

  It is raised where the caller can call the function in another way.
  """


def traceable(fn: Callable[..., R]) -> Callable[..., R]:
  """Returns `fn`, which raises NotTraceable where a traced jaxpr would not do what it does.

  Args:
    fn: a function of trees of arrays and of anything else, called while it is traced.
  """

  @functools.wraps(fn)
  def checked(*args: PyTree, **kwargs: PyTree) -> R:
    before = tree_leaves((args, kwargs), "is given")
    returned = fn(*args, **kwargs)
    now = tree_leaves((args, kwargs), "is given")
    if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
      raise NotTraceable("changes an argument in place")
    for x in tree_leaves(returned, "returns", is_leaf=_is_generator):
      if not isinstance(x, jax.Array) and _holds_tracer(x):
        raise NotTraceable(f"returns a {type(x).__name__} with arrays in it, which is no tree")
    return returned

  return checked


def tree_leaves(
  tree: PyTree, does: str, *, is_leaf: Callable[[PyTree], bool] | None = None
) -> list[Leaf]:
  """Returns the leaves of a tree; raises NotTraceable where JAX cannot flatten it.

  Args:
    tree: the tree.
    does: what the function does with it, for the error.
    is_leaf: as for `jax.tree.leaves`.
  """
  try:
    return jax.tree.leaves(tree, is_leaf=is_leaf)
  except (TypeError, ValueError) as error:
    raise NotTraceable(f"{does} a dict whose keys do not sort") from error


def _is_generator(x: object) -> bool:
  return isinstance(x, types.GeneratorType)


def _holds_tracer(x: object) -> bool:
  """Whether what is no tree to JAX holds a tracer, or will: a generator runs later."""
  pending, known = [x], set[int]()
  while pending:
    x = pending.pop()
    if isinstance(x, (Tracer, types.GeneratorType)):
      return True
    if id(x) not in known:
      known.add(id(x))
      pending += _parts(x)
  return False


def _parts(x: object) -> Iterable[object]:
  """Returns what an object holds: items, attributes, and what a function closes over."""
  if isinstance(x, (type, types.ModuleType)):
    return ()
  if isinstance(x, Mapping):
    return x.values()
  if isinstance(x, (list, tuple, set, frozenset)):
    return x
  if isinstance(x, functools.partial):
    return (x.func, *x.args, *x.keywords.values())
  if isinstance(x, types.MethodType):
    return (x.__self__, x.__func__)
  if isinstance(x, types.FunctionType):
    filled = [cell for cell in x.__closure__ or () if cell != types.CellType()]
    return (*(cell.cell_contents for cell in filled), *(x.__defaults__ or ()))
  slots = [name for cls in type(x).__mro__ for name in getattr(cls, "__slots__", ())]
  return (*getattr(x, "__dict__", {}).values(), *(getattr(x, name, None) for name in slots))
