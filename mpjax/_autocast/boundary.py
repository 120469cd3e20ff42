"""The boundary of a traced call: the user's objects inside of it, and the way back outside.

Inside, each container is built once more, in its own order and of its own type, around one tracer
for each array. The way back is the same map: a container that was an argument is that argument
again, with what the call has put into it.
"""

import dataclasses
import gc
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from mpjax._core.trees import DICTS, Content, IsLeaf, content_of, is_nnx_object, same_objects
from mpjax._core.types import Array, DType, Leaf, PyTree


class NotTraceable(Exception):
  """A function changed an object in place, or returned one that hides a tracer from JAX."""


@dataclasses.dataclass(frozen=True)
class InDtype:
  """An array of a result that has to have a dtype."""

  array: Array
  dtype: DType


def _around(leaves: Sequence[Leaf], numbered: Any, built: dict[int, Any]) -> Any:
  """Returns a tree of numbers with leaves instead; `built` are its containers, each once."""
  if not isinstance(numbered, Content):
    return None if numbered is None else leaves[numbered]
  if id(numbered) not in built:
    parts = [_around(leaves, part, built) for part in numbered.parts]
    built[id(numbered)] = numbered.build(parts)
  return built[id(numbered)]


def in_order(x: Any, order: Any) -> Any:
  """Returns a tree that JAX has mapped, which sorts keys, in its own order: `Boundary.order`."""
  if (content := content_of(x) if isinstance(order, Content) else None) is None:
    return x
  parts = [x[key] for key in order.like] if type(x) in DICTS else content.parts
  parts = [in_order(part, inside) for part, inside in zip(parts, order.parts, strict=True)]
  same = content.like == order.like and same_objects(parts, content.parts)
  return x if same else order.build(parts)


def jax_order(x: Any) -> Iterator[int]:
  """Yields the numbers in `Boundary.order` as JAX orders leaves: it sorts the keys of dicts."""
  if isinstance(x, Content):
    keys = x.like if isinstance(x.like, list) else range(len(x.parts))
    for _, part in sorted(zip(keys, x.parts, strict=True), key=lambda item: item[0]):
      yield from jax_order(part)
  elif x is not None:
    yield x


class Boundary:
  """The arguments of a call: their leaves, each once, and the containers that these are in.

  With `tie`, only objects for which it is true are one where they are met again.
  """

  def __init__(self, x: PyTree, is_leaf: IsLeaf | None = None, tie: IsLeaf | None = None) -> None:
    self.leaves: list[Leaf] = []
    self.containers: dict[Any, tuple[Any, Content]] = {}  # by identity
    self._is_leaf, self._tie = is_leaf or (lambda _: False), tie
    self._numbers: dict[Any, int] = {}
    self.order = self.numbered(x)  # the containers, in their own order, and no leaf

  def numbered(self, x: Any) -> Any:
    """Returns the content of a tree, with the content of containers and the number of each leaf."""
    if x is None:
      return None
    key = id(x) if self._tie is None or self._tie(x) else object()
    if key in self.containers:
      return self.containers[key][1]
    if (content := None if self._is_leaf(x) else content_of(x)) is None:
      if self._numbers.setdefault(key, len(self.leaves)) == len(self.leaves):
        self.leaves.append(x)
      return self._numbers[key]
    content = content._replace(parts=[self.numbered(part) for part in content.parts])
    self.containers[key] = (x, content)
    return content

  def inside(self, leaves: Sequence[Leaf]) -> "Inside":
    """Returns the arguments with others instead of `self.leaves`, in the same order."""
    built: dict[int, Any] = {}
    args = _around(leaves, self.order, built)
    pairs = [(x, built[id(numbered)]) for x, numbered in self.containers.values()]
    return Inside(args, pairs, self.contents([new for _, new in pairs]), self._is_leaf)

  def contents(self, containers: Sequence[Any] | None = None) -> "Contents":
    """Returns what the containers hold now, or these instead, and objects that are no trees."""
    objects = [x for x in self.leaves if not (isinstance(x, jax.Array) or self._is_leaf(x))]
    own = [x for x, _ in self.containers.values()]
    return Contents(own if containers is None else containers, objects)


class Contents:
  """What containers hold at one time; of objects that are no trees to JAX the tracers."""

  def __init__(self, containers: Sequence[Any], objects: Sequence[Any]) -> None:
    self._containers = (*containers, *objects)
    self._ids = set(map(id, containers))
    self._before = list(map(self._now, self._containers))
    own = [y for x in objects for d in [getattr(x, "__dict__", {})] for y in (d, *d.values())]
    self._attributes = [(x, c) for x in own if type(x) in (dict, list) and (c := content_of(x))]

  def _now(self, x: Any) -> Content:
    # Of others than lists and dicts all leaves: they may give new containers at each look.
    content = content_of(x, lambda y: id(y) in self._ids)
    return content or Content(_tracers_in(x), None, list)

  def changed(self) -> Iterator[tuple[int, Content]]:
    """Yields the position of each list and dict that holds something else now, and what."""
    for i, (x, before) in enumerate(zip(self._containers, self._before, strict=True)):
      now = self._now(x)
      # NNX drops what is set on a copy of a module.
      same = is_nnx_object(x) or now.like == before.like
      if not (same and same_objects(now.parts, before.parts)):
        if type(x) not in (list, *DICTS):
          for attributes, old in self._attributes:  # It is called again.
            old.refill(attributes)
          raise NotTraceable("changes an argument in place")
        yield i, now


class Inside(NamedTuple):
  """The arguments as the traced function sees them."""

  args: PyTree
  containers: Sequence[tuple[Any, Any]]  # the user's, and their copies
  before: Contents  # what the copies were given
  is_leaf: IsLeaf

  def leave(self, returned: PyTree) -> tuple[list[Leaf], Callable[[Sequence[Leaf]], PyTree]]:
    """Returns the leaves of what the function returned, each once, and the way back outside.

    That takes others instead of these, and returns what the function did. It changes the user's
    containers as the function has changed their copies, and holds no tracer.
    """
    result = Boundary(None, self.is_leaf)
    for original, new in self.containers:
      result.containers[id(new)] = (new, Content([], None, lambda _, itself=original: itself))
    changed = [
      (self.containers[i][0], now._replace(parts=[result.numbered(x) for x in now.parts]))
      for i, now in self.before.changed()
    ]
    numbered = result.numbered(returned)
    check_returned(x for x in result.leaves if not self.is_leaf(x))

    def outside(leaves: Sequence[Leaf]) -> PyTree:
      built: dict[int, Any] = {}
      for container, now in changed:
        now._replace(parts=[_around(leaves, x, built) for x in now.parts]).refill(container)
      return _around(leaves, numbered, built)

    return result.leaves, outside


def check_returned(leaves: Iterable[Leaf]) -> None:
  """Raises NotTraceable if one of the leaves is no array and hides a tracer."""
  for x in leaves:
    if not isinstance(x, (jax.Array, InDtype)) and _tracers_in(x):
      text = f"returns a {type(x).__name__} with arrays in it, which is no tree: they are not cast"
      raise NotTraceable(text)


def _tracers_in(x: object) -> list[object]:
  """Returns the tracers that what is no tree to JAX holds, and generators, which run later."""
  pending, met, tracers = [x], set[int](), dict[int, object]()
  while pending:
    x = pending.pop()
    if isinstance(x, (Tracer, types.GeneratorType)):
      tracers[id(x)] = x
    elif id(x) not in met and not isinstance(x, (type, types.ModuleType, types.TracebackType)):
      met.add(id(x))
      # Items, attributes, what a function closes over; not all that its module holds.
      # And no strings and numbers, which a collector does not track.
      around = {id(x.__globals__), id(x.__builtins__)} if isinstance(x, types.FunctionType) else ()
      pending += [y for y in filter(gc.is_tracked, gc.get_referents(x)) if id(y) not in around]
  return [tracers[i] for i in sorted(tracers)]
