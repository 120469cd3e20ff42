"""The calls of modules in a function: which values each call takes and returns.

A module is a path: that of a Flax module, else the named scopes, else the line of code.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core.primitives import convert_element_type_p

from mpjax._jaxpr.locations import MODULE, Direction, Location, path_of
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import aval_of
from mpjax._jaxpr.steps import Body, Step

Scopes: TypeAlias = tuple[str, ...]


MOST = 2**20
"""How many elements of an array are kept. Of a larger one they are evenly spaced."""


def most_of(repeats: int) -> int:
  """Returns how many elements are kept of each of several arrays, such as those of iterations."""
  return max(MOST // max(repeats, 1), 1)


class Loop(NamedTuple):
  """A scan that a call is in.

  Fields:
    number: the number of its step.
    length: how many iterations it has.
    reverse: whether the last one runs first.
  """

  number: int
  length: int
  reverse: bool


class Origin(NamedTuple):
  """The origin of a value that nothing has computed.

  Fields:
    argument: the position of the argument; None for a constant.
    stacked: how many of its leading axes scans took slices along, one for each iteration.
    moved: whether its elements are in another order than in the argument.
  """

  argument: int | None
  stacked: int = 0
  moved: bool = False


class Reader(NamedTuple):
  """The first module that computes with an argument.

  Fields:
    path: its path.
    stacked: how many leading axes of the argument are iterations of the scans around it.
  """

  path: str
  stacked: int


@dataclasses.dataclass(eq=False)
class ComparedCall:
  """One call of a module.

  Attributes:
    path: the path of the module.
    direction: the pass. A step that computes gradients itself has calls in both.
    call: how many calls of the path came before, in the same pass and body.
    loops: the scans around it, the outermost first.
    first: the number of its first step.
    last: the number of its last step.
    outputs: the values that code outside reads. The key is the value as it was computed. The item
      is the value that is read, which may be a cast of it.
    inputs: the values that it reads and has not computed, without parameters, in the same form.
    matmuls: the weights of its matmuls, or the line where a path is one.
    is_leaf: whether no other module is called inside.
  """

  path: str
  direction: Direction
  call: int
  loops: tuple[Loop, ...]
  first: int
  last: int = 0
  outputs: dict[int, int] = dataclasses.field(default_factory=dict)
  inputs: dict[int, int] = dataclasses.field(default_factory=dict)
  matmuls: set[object] = dataclasses.field(default_factory=set)
  is_leaf: bool = True

  def values(self) -> Iterator[int]:
    """Yields the values that are read of it, and that it reads."""
    yield from self.outputs.values()
    yield from self.inputs.values()


class Modules(NamedTuple):
  """The modules of a function.

  Fields:
    calls: in the order in which they begin.
    readers: by the position of an argument, the module that reads it.
    avals: the types of all values.
    loops: by value, the scans that it is in. A value in a `shard_map` is left out.
    makers: by value, the innermost module that made it, with the number of the call.
  """

  calls: tuple[ComparedCall, ...]
  readers: Mapping[int, Reader]
  avals: Mapping[int, ShapedArray]
  loops: Mapping[int, tuple[Loop, ...]]
  makers: Mapping[int, str]

  def reader(self, argument: int) -> Reader:
    """Returns the module that computes first with a parameter, by its position."""
    # A parameter that nothing computes with belongs to no module. Its gradient is 0.
    return self.readers.get(argument, Reader("", 0))

  def limit(self, slot: int) -> int:
    """Returns how many elements of a value are kept in each iteration."""
    return most_of(math.prod(loop.length for loop in self.loops.get(slot, ())))


# A `while` has no fixed number of iterations, and one branch of a `cond` does not run.
_LOOPS = (Holds.SCAN, Holds.SHARD_MAP)
"""The steps in which each value has one shape for all iterations and devices."""


def find_modules(body: Body, weights: Collection[int]) -> Modules:
  """Returns the calls of modules in a function.

  Args:
    body: the steps of the function.
    weights: the positions of its parameters.
  """
  finder = _Finder(weights)
  for position, slot in enumerate(body.inputs):
    finder.origins[slot] = Origin(position)
  finder.read_body(body, frozenset(), ())
  # A call without outputs computes nothing that another module reads. It has no row.
  calls = sorted((each for each in finder.calls if each.outputs), key=lambda each: each.first)
  # The stack of a value ends with the innermost call. Path and number name it in both runs.
  makers = {slot: f"{x[-1].path} {x[-1].call}" for slot, x in finder.makers.items() if x}
  return Modules(tuple(calls), finder.readers, finder.avals, finder.loops, makers)


@functools.lru_cache(maxsize=4096)
def module_paths(scopes: Scopes) -> tuple[str, ...]:
  """Returns the paths of the modules around an operation, the outermost first."""
  paths: list[str] = []
  # Each prefix of the scopes is a candidate, and several prefixes may have one path.
  for end in range(1, len(scopes) + 1):
    path = _module_path(scopes[:end])
    # An item of a list, "layers/0", is a module. The list "layers" is not.
    is_item = bool(paths) and path.removeprefix(f"{paths[-1]}/").isdigit()
    if path and path not in paths:
      if is_item:
        paths.pop()
      paths.append(path)
  return tuple(paths)


def _module_path(scopes: Scopes) -> str:
  """Returns the path of the module that the innermost scope is in."""
  where = Location(scopes)
  marked = where.marked(MODULE)
  # Without a mark, or with scopes that contain the whole path, every scope is a module, as in
  # Linen.
  if not marked or where.path != marked:
    return where.path
  # In NNX the scopes inside of a module are parts of it.
  inside = itertools.takewhile(lambda scope: scope != MODULE + marked, reversed(scopes))
  names = path_of(tuple(inside)[::-1])
  return f"{marked}/{names}" if names else marked


class _Finder:
  """Reads the steps of a function once, in order."""

  def __init__(self, weights: Collection[int]) -> None:
    self.weights = weights
    self.calls: list[ComparedCall] = []
    self.readers: dict[int, Reader] = {}
    self.avals: dict[int, ShapedArray] = {}
    self.loops: dict[int, tuple[Loop, ...]] = {}
    self.origins: dict[int, Origin] = {}
    self.makers: dict[int, Sequence[ComparedCall]] = {}
    # From a cast to the value before all casts. A cast is the same activation in another dtype.
    self._uncast: dict[int, int] = {}
    # How many calls of each path and pass have begun.
    self._counts = collections.Counter[tuple[str, Direction]]()

  def read_body(self, body: Body, outer: frozenset[str], loops: tuple[Loop, ...] | None) -> None:
    """Reads a list of steps.

    Args:
      body: the list.
      outer: the paths of the modules around it, whose calls are those of another body.
      loops: the scans around it; None inside of a `shard_map`.
    """
    self._define(body.inputs, map(body.avals.__getitem__, body.inputs), loops)
    self.origins.update(dict.fromkeys(body.consts, Origin(None)))
    self._define(body.consts, map(body.avals.__getitem__, body.consts), loops)
    # The open calls, the outermost first. Each list of steps starts with none.
    stack: list[ComparedCall] = []
    for step in body.steps:
      self._open(stack, step, outer, loops or ())
      for call in stack:
        call.last = step.number
      self._read(step, stack)
      self._define(step.outs, map(aval_of, step.eqn.outvars), loops)
      self._write(step, stack)
      if self._is_entered(step):
        self._read_bodies(step, outer, loops)
    for slot in body.outputs:
      # What a body returns leaves all of its modules.
      if isinstance(slot, int):
        self._leave(slot, (), "forward")

  def _define(
    self, slots: Iterable[int], avals: Iterable[ShapedArray], loops: tuple[Loop, ...] | None
  ) -> None:
    for slot, aval in zip(slots, avals, strict=True):
      self.avals[slot] = aval
      # Inside of a `shard_map` each device has its own value, which is not kept.
      if loops is not None:
        self.loops[slot] = loops

  def _is_entered(self, step: Step) -> bool:
    return step.holds in _LOOPS and bool(step.bodies)

  def _read_bodies(self, step: Step, outer: frozenset[str], loops: tuple[Loop, ...] | None) -> None:
    """Reads the steps inside of a `scan` or a `shard_map`."""
    # The module around a loop has its call outside. Its path inside would be a second call of it.
    outer |= set(paths_of(step.location))
    for inner, body in zip(step.inner, step.bodies, strict=True):
      inside = loops
      if step.holds is Holds.SHARD_MAP:
        inside = None
      elif loops is not None:
        inside = (*loops, Loop(step.number, inner.times or 0, inner.reverse))
      for position, (slot, i) in enumerate(zip(body.inputs, inner.operands or (), strict=True)):
        outside = step.ins[i]
        origin = self.origins.get(outside) if isinstance(outside, int) else Origin(None)
        # The carry has the value of the last iteration, which the body computed.
        if origin is None or position in inner.carry:
          continue
        # Parameters that are stacked by layer lead with the axis of the scan. If it was moved
        # before, the iteration is on another axis.
        is_slice = step.holds is Holds.SCAN and position >= inner.carry.stop and not origin.moved
        self.origins[slot] = origin._replace(stacked=origin.stacked + is_slice)
      self.read_body(body, outer, inside)

  def _open(
    self, stack: list[ComparedCall], step: Step, outer: frozenset[str], loops: tuple[Loop, ...]
  ) -> None:
    """Ends the open calls that do not contain a step, and begins the calls that start with it."""
    where = step.location
    constant = all(self.origins.get(slot) == Origin(None) for slot in step.reads)
    if constant and not module_paths(where.scopes):
      return  # JAX moves constants out of loops, without their scopes.
    # `remat` repeats a forward pass whose outputs are known. Values of it count as no module's.
    if where.direction == "recomputed":
      stack.clear()
      return
    paths = [path for path in paths_of(where) if path not in outer]
    keys: list[tuple[str, Direction]] = [(path, where.direction) for path in paths]
    # A step continues the calls that it shares with the step before, from the outermost on.
    pairs = itertools.takewhile(
      lambda pair: (pair[0].path, pair[0].direction) == pair[1], zip(stack, keys, strict=False)
    )
    kept = len([*pairs])
    # Two calls of one layer in a row have the same path. A repeated weight tells them apart, if no
    # module is called inside.
    matmul = self._matmul_keys(step)
    continues = kept == len(keys) == len(stack)
    if continues and stack and stack[-1].is_leaf and not stack[-1].matmuls.isdisjoint(matmul):
      kept -= 1
    del stack[kept:]
    for path, direction in keys[kept:]:
      if stack:
        stack[-1].is_leaf = False
      # The number is the position among the calls of the path, by which two runs are matched.
      number = self._counts[path, direction]
      self._counts[path, direction] += 1
      stack.append(ComparedCall(path, direction, number, loops, step.number))
      self.calls.append(stack[-1])
    if stack and stack[-1].is_leaf:
      stack[-1].matmuls |= matmul

  def _matmul_keys(self, step: Step) -> set[object]:
    """Returns the weights of a matmul, outside of modules its line; nothing for other steps."""
    where = step.location
    if facts_of(step.eqn).flops is None or where.direction != "forward":
      return set()
    # Without a module, the path is the line. The same line again is another call.
    if not module_paths(where.scopes):
      return {where.source}
    arguments = {self.origins[slot].argument for slot in step.reads if slot in self.origins}
    return {argument for argument in arguments if argument in self.weights}

  def _read(self, step: Step, stack: Sequence[ComparedCall]) -> None:
    direction: Direction = "forward" if step.location.direction == "forward" else "backward"
    # A cast or a move of a parameter is no use of it. The module that computes with it is its
    # reader.
    computes = not (self._is_entered(step) or _passes_on(step))
    for slot in step.reads:
      self._leave(slot, stack, direction)
      # It is an input of the calls that are open and did not make it. The key is the value before
      # casts, so a cast in one function alone does not change the pairs.
      for call in stack:
        if call not in self.makers.get(slot, ()):
          self._note(call.inputs, self._uncast.get(slot, slot), slot)
      origin = self.origins.get(slot)
      if computes and origin is not None and origin.argument is not None:
        reader = Reader(stack[-1].path if stack else "", origin.stacked)
        self.readers.setdefault(origin.argument, reader)

  def _leave(self, slot: int, stack: Sequence[ComparedCall], direction: Direction) -> None:
    """Notes that a value is read: it is an output of the calls that made it and are not open."""
    # A module that only casts a value has not made it, so look up the value before all casts.
    makers, root = self.makers.get(slot, ()), self._uncast.get(slot, slot)
    for call in makers:
      # A backward pass reads values inside of modules.
      is_kept = call.direction == "forward" and direction != "forward"
      if call not in stack and not is_kept and call in self.makers.get(root, ()):
        self._note(call.outputs, root, slot)

  def _note(self, values: dict[int, int], root: int, slot: int) -> None:
    """Notes a value. Of several casts of it, the one in the narrowest dtype counts."""
    dtype = getattr(self.avals[slot], "dtype", None)
    # Only computed floating values are compared: integers do not round, and arguments are given.
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or root in self.origins:
      return
    # The narrowest cast has all rounding that the reader gets.
    before = self.avals[values.get(root, slot)]
    if dtype.itemsize <= before.dtype.itemsize:
      values[root] = slot

  def _write(self, step: Step, stack: Sequence[ComparedCall]) -> None:
    self.makers.update(dict.fromkeys(step.outs, tuple(stack)))
    # What is computed from constants alone is a constant, whatever module it is in.
    if step.outs and all(self.origins.get(slot) == Origin(None) for slot in step.reads):
      self.origins.update(dict.fromkeys(step.outs, Origin(None)))
    # The rest notes what a cast or a move passes on of its operand.
    if not _passes_on(step):
      return
    (read,), (out,) = step.reads, step.outs
    casts = step.eqn.primitive is convert_element_type_p
    root = self._uncast.get(read, read)
    # A cast and a cast back may round, so their result is a value of its own. So is the cast of a
    # mask or of integers, which have no gradient.
    of = self.avals[root].dtype
    if casts and self.avals[out].dtype != of and jnp.issubdtype(of, jnp.inexact):
      self._uncast[out] = root
    if read in self.origins:
      origin = self.origins[read]
      self.origins[out] = origin._replace(moved=origin.moved or not casts)


def paths_of(where: Location) -> tuple[str, ...]:
  """Returns the paths of the modules around a place; without any, its line of code."""
  line = () if where.source is None else (str(where.source),)
  return module_paths(where.scopes) or line


def _passes_on(step: Step) -> bool:
  """Whether a step casts or moves the elements of one value."""
  one = len(step.reads) == len(step.outs) == 1 and not step.bodies
  return one and (step.eqn.primitive is convert_element_type_p or facts_of(step.eqn).moves)
