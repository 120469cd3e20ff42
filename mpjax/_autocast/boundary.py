"""Give a traced call copies of its arguments, and put its changes into the originals.

Each container is copied in its own order and type. The copy holds one tracer for each array. If the
call returns the copy of an argument, the caller gets the argument itself, with the changes.
"""

import collections
import contextlib
import dataclasses
import functools
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from mpjax._core.frameworks import is_nnx_object
from mpjax._core.trees import DICTS, Content, IsLeaf, content_of, same_objects
from mpjax._core.types import Array, DType, Leaf, PyTree


class NotTraceable(Exception):
  """A function changed an object in place, or returned one that hides a tracer from JAX."""


@dataclasses.dataclass(frozen=True)
class InDtype:
  """An array of a result, and the dtype that it must have."""

  array: Array
  dtype: DType


def _around(leaves: Sequence[Leaf], numbered: Any, built: dict[int, Any]) -> Any:
  """Replaces the numbers in a tree by leaves; `built` holds each container once, by identity."""
  if not isinstance(numbered, Content):
    return None if numbered is None else leaves[numbered]
  # An object that occurs at several places of the tree is one object in the copy too.
  if id(numbered) not in built:
    parts = [_around(leaves, part, built) for part in numbered.parts]
    built[id(numbered)] = numbered.build(parts)
  return built[id(numbered)]


def in_order(x: Any, order: Any) -> Any:
  """Restores the order of `Boundary.order` in a tree whose keys JAX has sorted."""
  content = content_of(x) if isinstance(order, Content) else None
  if content is None:
    return x
  # The items of a dict are found by key, since JAX has sorted them. Other containers kept theirs.
  parts = [x[key] for key in order.like] if type(x) in DICTS else content.parts
  parts = [in_order(part, inside) for part, inside in zip(parts, order.parts, strict=True)]
  # Without a change the object itself is returned, so that its identity is kept.
  same = content.like == order.like and same_objects(parts, content.parts)
  return x if same else order.build(parts)


def jax_order(x: Any) -> Iterator[int]:
  """Yields the numbers in `Boundary.order` in the order of JAX, which sorts the keys of dicts."""
  if isinstance(x, Content):
    # `like` holds the keys of a dict. Other containers have their items in the order of JAX.
    keys = x.like if isinstance(x.like, list) else range(len(x.parts))
    for _, part in sorted(zip(keys, x.parts, strict=True), key=lambda item: item[0]):
      yield from jax_order(part)
  elif x is not None:
    yield x


class Boundary:
  """The arguments of a call: each leaf and each container once.

  An object that occurs twice counts once, if `tie` is None or true for it.
  """

  def __init__(self, x: PyTree, is_leaf: IsLeaf | None = None, tie: IsLeaf | None = None) -> None:
    self.leaves: list[Leaf] = []
    # Both dicts are by id. The objects stay alive in `leaves` and `containers`, so no id is reused.
    self.containers: dict[Any, tuple[Any, Content]] = {}
    self._numbers: dict[Any, int] = {}
    self._is_leaf, self._tie = is_leaf or (lambda _: False), tie
    self.order = self.numbered(x)  # containers in their own order, with numbers for leaves

  def numbered(self, x: Any) -> Any:
    """Returns the content of a tree, with a number in place of each leaf."""
    if x is None:
      return None
    # A new object equals nothing, so each occurrence of an untied object counts.
    key = id(x) if self._tie is None or self._tie(x) else object()
    if key in self.containers:
      return self.containers[key][1]
    content = None if self._is_leaf(x) else content_of(x)
    if content is None:
      if key not in self._numbers:
        self._numbers[key] = len(self.leaves)
        self.leaves.append(x)
      return self._numbers[key]
    content = content._replace(parts=[self.numbered(part) for part in content.parts])
    self.containers[key] = (x, content)
    return content

  def inside(self, leaves: Sequence[Leaf]) -> "Inside":
    """Returns copies of the arguments with other leaves, in the order of `self.leaves`."""
    built: dict[int, Any] = {}
    args = _around(leaves, self.order, built)
    pairs = [(x, built[id(numbered)]) for x, numbered in self.containers.values()]
    return Inside(args, pairs, self.contents([new for _, new in pairs]), self._is_leaf)

  def contents(self, containers: Sequence[Any] | None = None) -> "Contents":
    """Returns the current contents of the containers, or of copies, and of other objects."""
    objects = [x for x in self.leaves if not (isinstance(x, jax.Array) or self._is_leaf(x))]
    own = [x for x, _ in self.containers.values()]
    return Contents(own if containers is None else containers, objects)


class Contents:
  """The contents of containers at one time, and the tracers in objects that are not pytrees."""

  def __init__(self, containers: Sequence[Any], objects: Sequence[Any]) -> None:
    self._containers = (*containers, *objects)
    self._ids = set(map(id, containers))
    self._before = list(map(self._now, self._containers))
    # Attributes of objects that are not pytrees. If the trace changes them, `changed` restores them
    # before the function runs again as Python.
    self._attributes: list[tuple[Any, Content]] = []
    for x in objects:
      attributes = getattr(x, "__dict__", {})
      for part in (attributes, *attributes.values()):
        content = content_of(part) if type(part) in (dict, list) else None
        if content is not None:
          self._attributes.append((part, content))

  def _now(self, x: Any) -> Content:
    # Other pytrees may flatten into new containers each time, so they are compared by leaves.
    content = content_of(x, lambda y: id(y) in self._ids)
    return content or Content(tracers_in(x), None, list)

  def changed(self) -> Iterator[tuple[int, Content]]:
    """Yields the position and the new content of each list and dict that has changed."""
    for i, (x, before) in enumerate(zip(self._containers, self._before, strict=True)):
      now = self._now(x)
      # NNX drops attributes that are set on a copy of a module.
      same = is_nnx_object(x) or now.like == before.like
      if not (same and same_objects(now.parts, before.parts)):
        if type(x) not in (list, *DICTS):
          # No result can carry this change out of the trace. The function runs again as Python,
          # which would otherwise see the attributes with tracers in them.
          for attributes, old in self._attributes:
            old.refill(attributes)
          raise NotTraceable("changes an argument in place")
        yield i, now


class Inside(NamedTuple):
  """The arguments as the traced function sees them."""

  args: PyTree
  containers: Sequence[tuple[Any, Any]]  # the user's, and their copies
  before: Contents  # of the copies before the call
  is_leaf: IsLeaf

  def leave(self, returned: PyTree) -> tuple[list[Leaf], Callable[[Sequence[Leaf]], PyTree]]:
    """Returns the leaves of a result, each once, and a function that builds the user's result.

    The function takes other leaves in the same order. It also changes the user's containers as the
    call has changed their copies. It holds no tracer.
    """
    # The copy of an argument stands for the argument: it has no leaves, and building it returns the
    # user's object.
    result = Boundary(None, self.is_leaf)
    for original, new in self.containers:
      result.containers[id(new)] = (new, Content([], None, lambda _, itself=original: itself))
    changed = [
      (self.containers[i][0], now._replace(parts=[result.numbered(x) for x in now.parts]))
      for i, now in self.before.changed()
    ]
    # After `changed`, since the new items of a container are results of the trace too.
    numbered = result.numbered(returned)
    check_returned(x for x in result.leaves if not self.is_leaf(x))

    def outside(leaves: Sequence[Leaf]) -> PyTree:
      built: dict[int, Any] = {}
      for container, now in changed:
        now._replace(parts=[_around(leaves, x, built) for x in now.parts]).refill(container)
      return _around(leaves, numbered, built)

    return result.leaves, outside


def check_returned(leaves: Iterable[Leaf]) -> None:
  """Raises NotTraceable if a leaf is not an array and hides a tracer."""
  for x in leaves:
    if not isinstance(x, (jax.Array, InDtype)) and tracers_in(x):
      # Its arrays could not leave the trace, nor could they be cast.
      text = f"returns a {type(x).__name__} that holds arrays and is not a pytree"
      raise NotTraceable(text)


_NO_PARTS = frozenset((bool, bytes, complex, float, int, str, type(None)))
"""Types that hold no tracer. Most items of containers are of these."""

_NOT_SEARCHED = (types.ModuleType, types.TracebackType, jax.Array, np.ndarray)


def tracers_in(x: object) -> list[object]:
  """Returns the tracers in an object that is not a pytree, and iterators, which run later."""
  pending = [x]
  # Both are by id. `met` keeps the objects alive, so that no id is reused.
  met: dict[int, object] = {}
  tracers: dict[int, object] = {}
  while pending:
    each = pending.pop()
    if id(each) in met:
      continue
    met[id(each)] = each
    if isinstance(each, Tracer) or _runs_later(each):
      tracers[id(each)] = each
    elif not isinstance(each, _NOT_SEARCHED):
      pending += [part for part in _parts_of(each) if type(part) not in _NO_PARTS]
  # Sorted, because `Contents` compares two searches of one object, and a set has no fixed order.
  return [tracers[number] for number in sorted(tracers)]


def _runs_later(x: object) -> bool:
  """Whether an object is a generator, a `map` or the like, whose variables cannot be read."""
  return isinstance(x, (Iterator, AsyncIterator, Coroutine)) and not hasattr(x, "__dict__")


def _parts_of(x: object) -> list[object]:
  """Returns the attributes and items of an object, and the variables that a function captures."""
  if isinstance(x, type):
    # The methods of a class that is defined in a function may close over what is traced there.
    local = [base for base in x.__mro__ if "<locals>" in base.__qualname__]
    return [part for base in local for part in vars(base).values()]
  parts = [type(x), *_attributes_of(x), *_items_of(x)]
  if isinstance(x, types.FunctionType):
    parts += _captured(x)
  elif isinstance(x, functools.partial):
    parts += [x.func, *x.args, *x.keywords.values()]
  elif isinstance(x, types.MethodType):
    parts += [x.__func__, x.__self__]
  elif isinstance(x, types.BuiltinMethodType):
    parts.append(x.__self__)
  elif isinstance(x, property):
    parts.append(x.fget)
  return parts


def _attributes_of(x: object) -> Iterator[object]:
  """Yields the values of the attributes of an object."""
  yield from getattr(x, "__dict__", {}).values()
  for slot in _slots_of(type(x)):
    with contextlib.suppress(AttributeError):  # It is not set.
      yield slot.__get__(x)


@functools.lru_cache(maxsize=1024)
def _slots_of(cls: type) -> list[types.MemberDescriptorType]:
  """Returns the slots of a class and of its bases, which read attributes of its instances."""
  with_slots = [vars(base) for base in cls.__mro__ if "__slots__" in vars(base)]
  members = [member for names in with_slots for member in names.values()]
  return [each for each in members if isinstance(each, types.MemberDescriptorType)]


_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: Sequence[Any] = (list, tuple, set, frozenset, collections.deque, *_VIEWS)


def _items_of(x: object) -> list[object]:
  """Returns the items of a container of Python, and the keys of a dict."""
  # Call the methods of Python's own classes: a subclass may override them with user code.
  if isinstance(x, dict):
    return [*dict.keys(x), *dict.values(x)]
  if isinstance(x, types.MappingProxyType):
    return [*x.keys(), *x.values()]
  for cls in _CONTAINERS:
    if isinstance(x, cls):
      return [*cls.__iter__(x)]
  return []


def _captured(function: types.FunctionType) -> Iterator[object]:
  """Yields the closure variables of a function, and the defaults of its parameters."""
  # Its globals belong to a Python module, which outlives the call.
  for cell in function.__closure__ or ():
    with contextlib.suppress(ValueError):  # The variable is not assigned yet.
      yield cell.cell_contents
  yield from function.__defaults__ or ()
  yield from (function.__kwdefaults__ or {}).values()
