"""Under which heading the results of each equation are counted: by what they are in the graph.

A number is an activation or a gradient where a policy would hold it in low precision: the results
of matmuls and convolutions, what they take, and what is computed from such results alone. The rest
stays in float32 whatever the policy says, so that a narrow dtype loses nothing of it: masks and the
cotangent of a loss, which are constants; softmax, which the float32 list computes; and what is
computed with float32 data. These are the kinds of `docs/concepts.md`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core.primitives import add_p, sub_p

from mpjax._core.dtypes import is_low_precision
from mpjax._core.leaves import Path
from mpjax._core.types import DType
from mpjax._diagnostics.parameter_scopes import name_by_parameters
from mpjax._jaxprs.graph import Graph, Operation, Value
from mpjax._jaxprs.locations import Location
from mpjax._jaxprs.primitives import OUTER_PRODUCT
from mpjax._jaxprs.steps import Body

Kind: TypeAlias = Literal[
  "activations", "gradients", "float32", "parameters", "optimizer state", "updates"
]
"""What numbers are: "gradients" are results of the backward pass, "float32" what stays in that."""


class Group(NamedTuple):
  """A heading."""

  kind: Kind
  path: str  # of the module, or of a leaf of the arguments


class Input(NamedTuple):
  """A floating argument."""

  path: str  # in the tree of arguments
  is_parameter: bool  # whether it may be one: those that the optimizer alone reads are not
  dtype: DType  # in which it is stored
  shape: tuple[int, ...]
  keys: Path = ()  # the names of its keys within its argument

  @property
  def module(self) -> Path:
    """The path of the module whose parameter it is; () for none."""
    return self.keys[self.keys[:1] == ("params",) : -1] if self.is_parameter else ()

  def is_stored_in(self, aval: ShapedArray, keys: Path) -> bool:
    """Whether a result may be the argument, changed."""
    if aval.dtype != self.dtype or aval.shape != self.shape:
      return False
    # A momentum `0.9 * mu + grads` is no update of gradients that are an argument: another path.
    return self.is_parameter or bool(self.keys and self.shape and self.keys in (keys, keys[1:]))


class Addition(NamedTuple):
  """An equation that adds an update to an argument."""

  group: Group  # of the update
  argument: int  # which of the two operands holds the argument
  dtype: DType  # in which the sum is stored


class Plan(NamedTuple):
  """What is to be counted."""

  inputs: Mapping[int, Group]  # of each argument that is a parameter, or optimizer state
  results: Mapping[int, Group]  # of the results of steps, by their numbers
  additions: Mapping[int, Addition]  # the steps that add an update
  readers: Mapping[int, Location]  # where an argument is read first


class _Sum(NamedTuple):
  """A value that is a sum of an argument and an update."""

  argument: int
  step: int
  operand: int


_Held: TypeAlias = Literal["neutral", "low", "data"]


class _Numbers(NamedTuple):
  """What the numbers of a floating value are."""

  # "data" is float32 for a reason, "low" what a matmul returned and what is computed from it;
  # parameters, numbers and what is computed from these alone are "neutral".
  kind: _Held = "data"
  wide: bool = True  # a policy holds it in float32, or it is a number that float16 does not have
  # The values whose numbers these are, moved or cast: arguments, and results.
  origins: frozenset[Value] = frozenset()
  # The arguments, or sums with one, that it is, element by element: several after a branch.
  same: frozenset[int | _Sum] = frozenset()


_WIDEST: Sequence[_Held] = ("data", "low", "neutral")
_FLOAT16 = np.dtype(np.float16)


class _Planner:
  """Goes through the operations of a function."""

  def __init__(self, graph: Graph, inputs: Sequence[Input | None], depth: int) -> None:
    self.numbers: dict[Value, _Numbers | None] = {
      v: one and _of_argument(i, v, one)
      for i, (v, one) in enumerate(zip(graph.arguments, inputs, strict=True))
    }
    self.counted: dict[int, Operation] = {}  # by the number of the step
    self.low: set[Value] = set()  # what a policy holds in low precision
    self.readers: dict[Value, Location] = {}  # where a value is read first, but by the optimizer
    for _ in range(depth + 1):  # What a carry is that starts as zeros, the body says.
      self.backward = False
      for operation in graph.operations:
        self.numbers.update(zip(operation.results, self._results(operation), strict=True))

  def of(self, value: Value) -> _Numbers | None:
    """Returns what the numbers of a value are; None if it is not floating, or not computed yet."""
    if value.kind in ("literal", "constant"):
      return _of_constant(value)
    return self.numbers.get(value)

  def _results(self, operation: Operation) -> list[_Numbers | None]:
    """Notes what is to be counted of an operation, and returns what its results are."""
    operands, here = [*map(self.of, operation.operands)], operation.step.location
    if operation.joins:
      return [functools.reduce(_either, operands)]
    self.backward |= here.direction == "backward"
    # What follows the backward pass and is in no module is the work of the optimizer.
    work = self.backward and here.direction == "forward" and not here.path
    origins = frozenset[Value]().union(*(x.origins for x in operands if x is not None))
    for each in () if work else origins:
      self.readers.setdefault(each, here)
    if operation.moves or operation.casts:  # The same numbers again.
      return [_result(operation, v, operands, origins) for v in operation.results]
    self.low |= origins if _is_matmul(operation, operands) else set()
    results = [_result(operation, v, operands, frozenset([v])) for v in operation.results]
    if not work and here.direction != "recomputed" and any(results):
      self.counted[operation.step.number] = operation
      if any(x and x.kind == "low" and not x.wide for x in results):
        self.low.update(operation.results)
    return results

  def group(self, operation: Operation) -> Group:
    """Returns the heading of an operation."""
    kind: Kind = "gradients" if operation.where.direction == "backward" else "activations"
    low = not self.low.isdisjoint(operation.results)
    return Group(kind if low else "float32", operation.where.path)


def _of_argument(position: int, value: Value, one: Input) -> _Numbers:
  origins, same = frozenset([value]), frozenset[int | _Sum]([position])
  if is_low_precision(one.dtype):
    return _Numbers("low", False, origins, same)
  return _Numbers("neutral" if one.is_parameter else "data", not one.is_parameter, origins, same)


def _of_constant(value: Value) -> _Numbers | None:
  if not is_inexact(value.dtype):
    return None
  if value.kind != "literal":
    return _Numbers()
  with np.errstate(over="ignore"):
    exact = np.asarray(value.data).astype(_FLOAT16) == value.data
  return _Numbers("neutral", not bool(np.all(exact)))


def _is_matmul(operation: Operation, operands: Sequence[_Numbers | None]) -> bool:
  """Whether an operation runs in low precision whatever its operands are."""
  if operation.facts is OUTER_PRODUCT and operation.where.direction == "forward":
    return any(x is not None and x.kind == "low" for x in operands)
  return operation.part == "half"


def _result(
  operation: Operation,
  out: Value,
  operands: Sequence[_Numbers | None],
  origins: frozenset[Value],
) -> _Numbers | None:
  """Returns what a result of an operation is: the table of `docs/concepts.md`."""
  facts, part = operation.facts, operation.part
  if not is_inexact(out.dtype):
    return None
  floats = [x for x in operands if x is not None]
  same = _same(operation, out, operands)
  if _is_matmul(operation, operands) or out.is_low:
    return _Numbers("low", False, origins, same)
  if not floats:  # Random numbers and masks are neutral, positions are data.
    neutral = facts.neutral or np.dtype(np.bool_) in (v.dtype for v in operation.operands)
    return _Numbers("neutral" if neutral else "data", not neutral, origins, same)
  order = ("low", "data", "neutral") if facts.role == "product" else _WIDEST
  kind: _Held = min((x.kind for x in floats), key=lambda kind: order.index(kind))
  # Of a number that is computed from numbers, float16 may have it or not.
  computed = kind == "neutral" and not (operation.moves or operation.casts)
  wide = part in ("float32", "opaque", None) or computed or any(x.wide for x in floats)
  return _Numbers(kind, wide, origins, same)


def _same(
  operation: Operation, out: Value, operands: Sequence[_Numbers | None]
) -> frozenset[int | _Sum]:
  """Returns which arguments, or sums with one, a result is."""
  pairs = [
    (position, x.same)
    for position, (v, x) in enumerate(zip(operation.operands, operands, strict=True))
    if x is not None and v.aval.shape == out.aval.shape
  ]
  primitive = operation.eqn.primitive
  if primitive in (add_p, sub_p):
    return frozenset(
      _Sum(one, operation.step.number, position)
      for position, same in pairs
      if primitive is add_p or position == 0
      for one in same
      if isinstance(one, int)
    )
  if operation.facts.exact or operation.casts:
    # Selected, clipped, cast: still the parameter, or the sum.
    return frozenset[int | _Sum]().union(*(same for _, same in pairs))
  return frozenset()


def _either(one: _Numbers | None, other: _Numbers | None) -> _Numbers | None:
  """Returns what a value is that comes from one of two places."""
  if one is None or other is None:
    return one or other
  kind: _Held = min(one.kind, other.kind, key=lambda kind: _WIDEST.index(kind))
  origins, same = one.origins | other.origins, one.same | other.same
  return _Numbers(kind, one.wide or other.wide, origins, same)


def is_inexact(dtype: DType | None) -> bool:
  """Whether values of a dtype are floating or complex numbers."""
  return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def plan(
  body: Body,
  inputs: Sequence[Input | None],
  outputs: Sequence[tuple[Path, ShapedArray]] = (),
) -> Plan:
  """Returns what is to be counted in a function; inputs are None where they are not floating."""
  # Results have the names of their keys, and types; there are none if nothing is updated.
  graph = Graph(body)
  owned = zip(graph.arguments, inputs, strict=True)
  name_by_parameters(graph, {v: one.module for v, one in owned if one is not None})
  planner = _Planner(graph, inputs, body.depth)
  additions: dict[int, Addition] = {}
  for (keys, aval), out in zip(outputs, map(planner.of, graph.results), strict=False):
    sums = (each for each in (out.same if out else ()) if isinstance(each, _Sum))
    for argument, number, operand in sorted(sums):
      one = inputs[argument]
      if one is not None and one.is_stored_in(aval, keys):
        # Of `a + b`, two arguments, the first is what is updated.
        additions.setdefault(number, Addition(Group("updates", one.path), operand, one.dtype))
  arguments = enumerate(graph.arguments)
  readers = {i: planner.readers[v] for i, v in arguments if v in planner.readers}
  unread: Kind = "optimizer state" if planner.backward else "parameters"
  return Plan(
    {
      i: Group("parameters" if i in readers else unread, one.path)
      for i, one in enumerate(inputs)
      if one is not None and one.is_parameter
    },
    {
      number: planner.group(operation)
      for number, operation in planner.counted.items()
      if number not in additions
    },
    additions,
    readers,
  )
