"""The boundary of a traced call: the user's objects inside of it, and the way back outside.

Inside, each container is built once more, in its own order and of its own type, around one tracer
for each array: `q is kv` says what it says without a trace. The way back is the same map: a
container that was an argument is that argument again, with what the call has put into it.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from mpjax._core.containers import DICTS, IsLeaf, Rebuilt, children_of
from mpjax._core.types import Array, DType, Leaf, PyTree


class NotTraceable(Exception):
  """A function changed an object in place, or returned one that hides a tracer from JAX.

  It is raised where the caller can call the function in another way.
  """


@dataclasses.dataclass(frozen=True)
class InDtype:
  """An array of a result that has to have a dtype."""

  array: Array
  dtype: DType


class _Place(NamedTuple):
  """Replaces a leaf: its number."""

  number: int


class _Argument(NamedTuple):
  """Replaces the copy of a container that is an argument: that container."""

  container: Any


class _Leaves:
  """The distinct leaves of trees, and the trees with the number of each instead."""

  def __init__(self, is_leaf: IsLeaf | None) -> None:
    self.all: list[Leaf] = []
    self.trees = Rebuilt(self._place, is_leaf)
    self._places: dict[int, _Place] = {}

  def _place(self, x: Leaf) -> _Place:
    if id(x) not in self._places:
      self._places[id(x)] = _Place(len(self.all))
      self.all.append(x)
    return self._places[id(x)]


def _filled(leaves: Sequence[Leaf]) -> Rebuilt:
  """Returns what puts leaves back into trees that have their numbers."""

  def leaf(x: _Place | _Argument) -> Any:
    return leaves[x.number] if isinstance(x, _Place) else x.container

  return Rebuilt(leaf, lambda x: isinstance(x, (_Place, _Argument)))


class Boundary:
  """The arguments of a call: the leaves, each once, and the containers that they are in.

  Attributes:
    leaves: the distinct objects that are leaves.
  """

  def __init__(self, args: PyTree, is_leaf: IsLeaf | None = None) -> None:
    self._found = _Leaves(is_leaf)
    self._numbered = self._found.trees.of(args)
    self.leaves = self._found.all

  def inside(self, leaves: Sequence[Leaf]) -> "Inside":
    """Returns the arguments with others instead of `self.leaves`, in the same order."""
    fill = _filled(leaves)
    args = fill.of(self._numbered)
    made = self._found.trees.made.values()
    # What is inside of an object that builds its own containers is not among them.
    pairs = [(original, fill.made.get(id(numbered))) for original, numbered, _ in made]
    containers = [(original, *found[1:]) for original, found in pairs if found is not None]
    return Inside(args, containers, self._found.trees.is_leaf)


class Inside(NamedTuple):
  """The arguments as the traced function sees them.

  Fields:
    args: the tree.
    containers: the user's containers, their copies, and what these were given.
    is_leaf: as for `Boundary`.
  """

  args: PyTree
  containers: Sequence[tuple[Any, Any, list[Any]]]
  is_leaf: IsLeaf | None

  def leave(self, returned: PyTree) -> tuple[list[Leaf], Callable[[Sequence[Leaf]], PyTree]]:
    """Returns the leaves of what the function returned, each once, and the way back outside.

    That takes others instead of these, and returns what the function did. It changes the user's
    containers as the function has changed their copies, and holds no tracer.

    Raises:
      NotTraceable: the function changed an argument that is no dict and no list, or returned an
        object that hides a tracer.
    """
    found = _Leaves(self.is_leaf)
    for original, new, _ in self.containers:
      found.trees.made[id(new)] = (new, _Argument(original), [])
    changed: list[tuple[Any, list[Any] | None, list[Any]]] = []
    for original, new, before in self.containers:
      now, treedef = children_of(new) or ([], None)
      keys = list(new) if type(new) in DICTS else None
      same_keys = keys is None or keys == list(original)
      fixed = isinstance(new, Mapping) and not isinstance(new, MutableMapping)
      if fixed or (same_keys and len(now) == len(before) and all(map(_is, now, before))):
        continue
      if treedef is not None:
        raise NotTraceable("changes an argument in place")
      changed.append((original, keys, [found.trees.of(x) for x in now]))
    numbered = found.trees.of(returned)
    is_leaf = self.is_leaf or (lambda _: False)
    check_returned(x for x in found.all if not is_leaf(x))

    def outside(leaves: Sequence[Leaf]) -> PyTree:
      fill = _filled(leaves)
      for container, keys, parts in changed:
        container.clear()
        filled = map(fill.of, parts)
        if keys is None:
          container.extend(filled)
        else:
          container.update(zip(keys, filled, strict=True))
      return fill.of(numbered)

    return found.all, outside


def _is(a: object, b: object) -> bool:
  return a is b


def check_returned(leaves: Iterable[Leaf]) -> None:
  """Raises NotTraceable if one of the leaves is no array and hides a tracer."""
  for x in leaves:
    if not isinstance(x, (jax.Array, InDtype)) and _holds_tracer(x):
      name = type(x).__name__
      raise NotTraceable(f"returns a {name} with arrays in it, which is no tree: they are not cast")


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
