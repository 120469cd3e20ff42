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
  content = content_of(x) if isinstance(order, Content) else None
  if content is None:
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
    self._is_leaf, self._tie = is_leaf, tie
    self._numbers: dict[Any, int] = {}
    self.order = self.numbered(x)  # the containers, in their own order, and no leaf

  def numbered(self, x: Any) -> Any:
    """Returns the content of a tree, with the content of containers and the number of each leaf."""
    if x is None:
      return None
    key = id(x) if self._tie is None or self._tie(x) else object()
    if key in self.containers:
      return self.containers[key][1]
    content = None if self._is_leaf is not None and self._is_leaf(x) else content_of(x)
    if content is None:
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
    return Inside(args, pairs, Contents([new for _, new in pairs]), self._is_leaf)

  def contents(self) -> "Contents":
    """Returns what the containers hold now."""
    return Contents([x for x, _ in self.containers.values()])


class Contents:
  """What containers hold at one time."""

  def __init__(self, containers: Sequence[Any]) -> None:
    self._containers = containers
    self._ids = set(map(id, containers))
    self._before = list(map(self._now, containers))

  def _now(self, x: Any) -> Content | None:
    # Of others than lists and dicts all leaves: they may give new containers at each look.
    return content_of(x, lambda y: id(y) in self._ids)

  def changed(self) -> Iterator[tuple[int, Content]]:
    """Yields the position of each list and dict that holds something else now, and what."""
    for i, (x, before) in enumerate(zip(self._containers, self._before, strict=True)):
      now = self._now(x)
      if before is None or now is None:
        continue
      # NNX drops what is set on a copy of a module.
      same = is_nnx_object(x) or now.like == before.like
      if not (same and same_objects(now.parts, before.parts)):
        if type(x) not in (list, *DICTS):
          raise NotTraceable("changes an argument in place")
        yield i, now


class Inside(NamedTuple):
  """The arguments as the traced function sees them."""

  args: PyTree
  containers: Sequence[tuple[Any, Any]]  # the user's, and their copies
  before: Contents  # what the copies were given
  is_leaf: IsLeaf | None

  def leave(
    self, returned: PyTree, *others: "Inside"
  ) -> tuple[list[Leaf], Callable[[Sequence[Leaf]], PyTree]]:
    """Returns the leaves of what the function returned, each once, and the way back outside.

    That takes others instead of these, and returns what the function did. It changes the user's
    containers as the function has changed their copies, those of `others` too, and holds no tracer.
    """
    result = Boundary(None, self.is_leaf)
    for original, new in (pair for each in (self, *others) for pair in each.containers):
      result.containers[id(new)] = (new, Content([], None, lambda _, itself=original: itself))
    changed = [
      (each.containers[i][0], now._replace(parts=[result.numbered(x) for x in now.parts]))
      for each in (self, *others)
      for i, now in each.before.changed()
    ]
    numbered = result.numbered(returned)
    is_leaf = self.is_leaf or (lambda _: False)
    check_returned(x for x in result.leaves if not is_leaf(x))

    def outside(leaves: Sequence[Leaf]) -> PyTree:
      built: dict[int, Any] = {}
      for container, now in changed:
        now._replace(parts=[_around(leaves, x, built) for x in now.parts]).refill(container)
      return _around(leaves, numbered, built)

    return result.leaves, outside


def check_returned(leaves: Iterable[Leaf]) -> None:
  """Raises NotTraceable if one of the leaves is no array and hides a tracer."""
  for x in leaves:
    if not isinstance(x, (jax.Array, InDtype)) and _holds_tracer(x):
      text = f"returns a {type(x).__name__} with arrays in it, which is no tree: they are not cast"
      raise NotTraceable(text)


def _holds_tracer(x: object) -> bool:
  """Whether what is no tree to JAX holds a tracer, or will: a generator runs later."""
  pending, met = [x], set[int]()
  while pending:
    x = pending.pop()
    if isinstance(x, (Tracer, types.GeneratorType)):
      return True
    if id(x) not in met and not isinstance(x, (type, types.ModuleType, types.TracebackType)):
      met.add(id(x))
      # Items, attributes, what a function closes over; not all that its module holds.
      around = (x.__globals__, x.__builtins__) if isinstance(x, types.FunctionType) else ()
      pending += [each for each in gc.get_referents(x) if not any(each is a for a in around)]
  return False
