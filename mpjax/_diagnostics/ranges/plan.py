"""Under which heading the results of each equation are counted: by what they are in the graph.

A number is an activation or a gradient where a policy would hold it in low precision: the results
of matmuls and convolutions, what they take, and what is computed from such results alone. The rest
stays in float32 whatever the policy says, so that a narrow dtype loses nothing of it: masks and the
cotangent of a loss, which are constants; softmax, which the float32 list computes; and what is
computed with float32 data. These are the kinds of `docs/concepts.md`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from jax.core import ShapedArray
from jax.extend.core.primitives import add_p, sub_p

from mpjax._core.dtypes import is_low_precision
from mpjax._core.leaves import Path
from mpjax._core.trees import is_inexact
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
  readers: Mapping[int, Location]  # where an argument is read first, but by the optimizer


def plan(
  body: Body,
  inputs: Sequence[Input | None],
  outputs: Sequence[tuple[Path, ShapedArray]] = (),
) -> Plan:
  """Returns what is to be counted in a function; inputs are None where they are not floating."""
  # Results have the names of their keys, and types; there are none if nothing is updated.
  graph = Graph(body)
  floats = {v: one for v, one in zip(graph.arguments, inputs, strict=True) if one is not None}
  name_by_parameters(graph, {v: one.module for v, one in floats.items()})
  numbers, additions = _numbers(graph, floats, body.depth), _additions(graph, floats, outputs)
  origins, counted = _origins(graph, body.depth), list[Operation]()
  low: set[Value] = set()  # what a policy holds in low precision
  read: dict[Value, Location] = {}  # where, first
  backward = False
  for operation in graph.computing():
    here, results = operation.step.location, operation.results
    backward |= here.direction == "backward"
    # What follows the backward pass and is in no module is the work of the optimizer.
    work = backward and here.direction == "forward" and not here.path
    operands = {each for v in operation.operands for each in origins.get(v, ())}
    for each in () if work else operands:
      read.setdefault(each, here)
    if operation.moves or operation.casts:  # The same numbers again.
      continue
    if _is_matmul(operation, numbers):
      low |= operands
    kinds = [numbers[v] for v in results if v in numbers]
    if kinds and not work and here.direction != "recomputed":
      counted.append(operation)
      low.update(results if any(x.kind == "low" and not x.wide for x in kinds) else ())

  def group(operation: Operation) -> Group:
    kind: Kind = "gradients" if operation.where.direction == "backward" else "activations"
    is_low = not low.isdisjoint(operation.results)
    return Group(kind if is_low else "float32", operation.where.path)

  unread: Kind = "optimizer state" if backward else "parameters"
  return Plan(
    {
      i: Group("parameters" if v in read else unread, floats[v].path)
      for i, v in enumerate(graph.arguments)
      if v in floats and floats[v].is_parameter
    },
    {each.step.number: group(each) for each in counted if each.step.number not in additions},
    additions,
    {i: read[v] for i, v in enumerate(graph.arguments) if v in read},
  )


def _origins(graph: Graph, depth: int) -> Mapping[Value, frozenset[Value]]:
  """Returns the arguments and results whose numbers each value has, moved or cast."""
  origins = {v: frozenset([v]) for v in graph.arguments}
  for _ in range(depth + 1):  # What comes out of an iteration goes into the next one.
    for operation in graph.operations:
      each = (origins[v] for v in operation.operands if v in origins)
      moved = frozenset[Value]().union(*each) if operation.moves or operation.casts else None
      origins.update((v, frozenset([v]) if moved is None else moved) for v in operation.results)
  return origins


def _same(value: Value) -> set[Value]:
  """Returns what a value may be, element by element: selected, clipped, cast, out of a loop."""
  values, pending = set[Value](), [value]
  while pending:
    each = pending.pop()
    operation = each.made_by
    if each not in values and operation is not None:
      kept = operation.facts.exact or operation.casts
      pending += (
        v
        for v in operation.operands
        if operation.joins or (kept and is_inexact(v.aval) and v.aval.shape == each.aval.shape)
      )
    values.add(each)
  return values


def _additions(
  graph: Graph, floats: Mapping[Value, Input], outputs: Sequence[tuple[Path, ShapedArray]]
) -> dict[int, Addition]:
  """Returns the steps that add an update to an argument, if a result is that sum."""
  order = {v: i for i, v in enumerate(graph.arguments)}
  additions: dict[int, Addition] = {}
  for (keys, aval), result in zip(outputs, graph.results, strict=False):
    for total in _same(result):
      operation = total.made_by
      if operation is None or operation.eqn.primitive not in (add_p, sub_p):
        continue
      updated = operation.operands[: 1 if operation.eqn.primitive is sub_p else 2]
      sources = [
        (order[v], position, v)
        for position, operand in enumerate(updated)
        for v in _same(operand)
        if v in floats and floats[v].is_stored_in(aval, keys)
      ]
      if sources:  # Of `a + b`, two arguments, the first is what is updated.
        _, position, v = min(sources, key=lambda each: each[:2])
        one = Addition(Group("updates", floats[v].path), position, floats[v].dtype)
        additions.setdefault(operation.step.number, one)
  return additions


_Held: TypeAlias = Literal["neutral", "low", "data"]


class _Numbers(NamedTuple):
  """What the numbers of a floating value are."""

  # "data" is float32 for a reason, "low" what a matmul returned and what is computed from it;
  # parameters, numbers and what is computed from these alone are "neutral".
  kind: _Held
  wide: bool  # a policy holds it in float32, or it is a number that float16 does not have


def _numbers(graph: Graph, floats: Mapping[Value, Input], depth: int) -> dict[Value, _Numbers]:
  """Returns what the numbers of each floating value are."""
  numbers = {v: _of_argument(one) for v, one in floats.items()}
  for _ in range(depth + 1):  # What a carry is that starts as zeros, the body says.
    for operation in graph.operations:
      for v in operation.operands:
        if v.kind in ("literal", "constant") and is_inexact(v.aval):
          numbers[v] = _of_constant(v)
      for v in operation.results:
        if is_inexact(v.aval):
          numbers[v] = _of_result(operation, v, numbers)
  return numbers


def _of_argument(one: Input) -> _Numbers:
  if is_low_precision(one.dtype):
    return _Numbers("low", False)
  return _Numbers("neutral" if one.is_parameter else "data", not one.is_parameter)


def _of_constant(value: Value) -> _Numbers:
  if value.kind == "constant":
    return _Numbers("data", True)
  with np.errstate(over="ignore"):
    exact = np.asarray(value.data).astype(np.float16) == value.data
  return _Numbers("neutral", not bool(exact))


def _of_result(operation: Operation, out: Value, numbers: Mapping[Value, _Numbers]) -> _Numbers:
  """Returns what a result of an operation is: the table of `docs/concepts.md`."""
  facts = operation.facts
  if out.is_low or _is_matmul(operation, numbers):
    return _Numbers("low", False)
  floats = [numbers[v] for v in operation.operands if v in numbers]
  if not floats:  # Random numbers and masks are neutral, positions are data.
    neutral = facts.neutral or np.dtype(np.bool_) in (v.dtype for v in operation.operands)
    return _Numbers("neutral" if neutral else "data", not neutral)
  strongest: Sequence[_Held] = ("data", "low", "neutral")
  if facts.role == "product":
    strongest = ("low", "data", "neutral")
  kind: _Held = min((x.kind for x in floats), key=lambda kind: strongest.index(kind))
  wide = any(x.wide for x in floats)
  if operation.moves or operation.casts:
    return _Numbers(kind, wide)
  # Of a number that is computed from numbers, float16 may have it or not.
  return _Numbers(kind, wide or kind == "neutral" or operation.part in ("float32", "opaque", None))


def _is_matmul(operation: Operation, numbers: Mapping[Value, _Numbers]) -> bool:
  """Whether an operation runs in low precision whatever its operands are."""
  if operation.facts is OUTER_PRODUCT and operation.where.direction == "forward":
    return any(v in numbers and numbers[v].kind == "low" for v in operation.operands)
  return operation.part == "half"
