"""Under which heading the results of each equation are counted: by what they are in the graph.

A number is an activation or a gradient where a policy would hold it in low precision: the results
of matmuls and convolutions, what they take, and what is computed from such results alone. The rest
stays in float32 whatever the policy says, so that a narrow dtype loses nothing of it: masks and the
cotangent of a loss, which are constants; softmax, which the float32 list computes; and what is
computed with float32 data. These are the kinds of `docs/concepts.md`.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend.core.primitives import add_p, sub_p

from mpjax._core.leaves import Path, key_names
from mpjax._core.trees import is_inexact
from mpjax._core.types import Args, DType, Kwargs, Leaf
from mpjax._diagnostics.arguments import is_array
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
  """An array among the arguments."""

  path: str  # in the tree of arguments
  is_parameter: bool  # whether it may be one: those that the optimizer alone reads are not
  keys: Path = ()  # the names of its keys within its argument

  @property
  def module(self) -> Path:
    """The path of the module whose parameter it is; () for none."""
    return self.keys[self.keys[:1] == ("params",) : -1] if self.is_parameter else ()


def inputs_of(args: Args, kwargs: Kwargs, scales: Sequence[Leaf] = ()) -> list[Input]:
  """Returns what the arrays among the leaves of arguments are; `scales` are no parameters."""
  inputs: list[Input] = []
  for position, one in enumerate((*args, *(kwargs[name] for name in sorted(kwargs)))):
    held = hasattr(one, "params") or (isinstance(one, Mapping) and "params" in one)
    for path, x in jax.tree_util.tree_leaves_with_path(one):
      # "value" is that of a Variable of NNX.
      keys = tuple(name for name in key_names(path) if name != "value")
      inside = position == 0 and held and keys[:1] == ("params",)
      text = ("" if position == 0 else f"args[{position}]/") + (
        "/".join(keys[inside:]) or "(array)"
      )
      is_parameter = position == 0 and inside == held and not any(x is each for each in scales)
      inputs += [Input(text, is_parameter, keys)] * is_array(x)
  return inputs


class Plan(NamedTuple):
  """What is to be counted."""

  inputs: Mapping[int, Group]  # of each argument that is a parameter, or optimizer state
  steps: Mapping[int, Group]  # of the results of steps, by their numbers, or of the update
  # Of the steps that add an update to an argument, which operand that is, and how it is stored.
  additions: Mapping[int, tuple[int, DType]]
  readers: Mapping[int, Location]  # where an argument is read first, but by the optimizer


def plan(body: Body, inputs: Sequence[Input], outputs: Sequence[Path] = ()) -> Plan:
  """Returns what is to be counted in a function; of its results, the names of their keys."""
  graph = Graph(body)
  pairs = zip(graph.arguments, inputs, strict=True)
  floats = {v: one for v, one in pairs if is_inexact(v.aval)}
  name_by_parameters(graph, {v: one.module for v, one in floats.items()})
  held, steps = _held(graph, floats, body.depth), dict[int, Group]()

  # A result that is a sum with an argument is that one, updated.
  additions = dict[int, tuple[int, DType]]()
  for keys, result in zip(outputs, graph.results, strict=False):
    # A momentum `0.9 * mu + grads` is no update of gradients that are an argument: another path.
    stored = [
      v
      for v, one in floats.items()
      if (v.dtype, v.aval.shape) == (result.dtype, getattr(result.aval, "shape", None))
      and (one.is_parameter or (v.aval.shape and one.keys and one.keys in (keys, keys[1:])))
    ]
    for operation in (total.made_by for total in _copies(result)):
      if operation is None or operation.eqn.primitive not in (add_p, sub_p):
        continue
      updated = operation.operands[: 1 if operation.eqn.primitive is sub_p else 2]
      copies = [*enumerate(map(_copies, updated))]
      # Of `a + b`, two arguments, the first is what is updated.
      for v, i in [(v, i) for v in stored for i, values in copies if v in values][:1]:
        steps.setdefault(operation.step.number, Group("updates", floats[v].path))
        additions.setdefault(operation.step.number, (i, v.aval.dtype))

  # What follows the backward pass and is in no module is the work of the optimizer.
  where = {each: each.step.location for each in graph.operations}
  since = itertools.dropwhile(lambda each: where[each].direction != "backward", graph.computing())
  after = [*since]
  work = {each for each in after if where[each].direction == "forward" and not where[each].path}

  # Backwards: which numbers matmuls take, moved or cast perhaps, and who reads one first.
  taken, read = set[Value](), dict[Value, Location]()
  for operation in [*reversed(graph.operations)] * (body.depth + 1):
    operands, results = operation.operands, operation.results
    moved = (operation.moves or operation.casts) and not taken.isdisjoint(results)
    taken.update(operands if moved or _is_matmul(operation, held) else ())
    if operation.joins:
      read.update((v, read[out]) for out in results if out in read for v in operands)
    elif operation not in work:
      read.update(dict.fromkeys(operands, where[operation]))

  for operation in graph.computing():
    kinds = [held[v] for v in operation.results if v in held]
    again = operation.moves or operation.casts or where[operation].direction == "recomputed"
    if kinds and not again and operation not in work:
      low = any(each.kind == "low" and not each.wide for each in kinds)
      backward, low = operation.where.direction == "backward", low or taken & {*operation.results}
      kind: Kind = "float32" if not low else "gradients" if backward else "activations"
      steps.setdefault(operation.step.number, Group(kind, operation.where.path))
  unread: Kind = "optimizer state" if after else "parameters"
  places = dict(enumerate(graph.arguments))
  return Plan(
    {
      i: Group("parameters" if v in read else unread, floats[v].path)
      for i, v in places.items()
      if v in floats and floats[v].is_parameter
    },
    steps,
    additions,
    {i: read[v] for i, v in places.items() if v in read},
  )


def _copies(value: Value) -> set[Value]:
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


class _Held(NamedTuple):
  """What the numbers of a floating value are."""

  # "data" is float32 for a reason, "low" what a matmul returned and what is computed from it;
  # parameters, numbers and what is computed from these alone are "neutral".
  kind: Literal["neutral", "low", "data"]
  wide: bool  # a policy holds it in float32, or it is a number that float16 does not have


_LOW, _NEUTRAL, _DATA = _Held("low", False), _Held("neutral", False), _Held("data", True)


def _held(graph: Graph, floats: Mapping[Value, Input], depth: int) -> dict[Value, _Held]:
  """Returns what the numbers of each floating value are."""
  held = dict[Value, _Held]()
  for v, one in floats.items():
    unless_low = _NEUTRAL if one.is_parameter else _DATA
    held[v] = _LOW if v.is_low else unless_low
  for _ in range(depth + 1):  # What a carry is that starts as zeros, the body says.
    for operation in graph.operations:
      for v in (*operation.operands, *operation.results):
        if not is_inexact(v.aval):
          continue
        if v.kind == "constant":
          held[v] = _DATA
        elif v.kind == "literal":
          with np.errstate(over="ignore"):
            held[v] = _Held("neutral", bool(np.asarray(v.data).astype(np.float16) != v.data))
        elif v.made_by is operation:
          held[v] = _of_result(operation, v, held)
  return held


def _of_result(operation: Operation, out: Value, held: Mapping[Value, _Held]) -> _Held:
  """Returns what a result of an operation is: the table of `docs/concepts.md`."""
  facts = operation.facts
  if out.is_low or _is_matmul(operation, held):
    return _LOW
  floats = [held[v] for v in operation.operands if v in held]
  if not floats:  # Random numbers and masks are neutral, positions are data.
    neutral = facts.neutral or np.dtype(np.bool_) in (v.dtype for v in operation.operands)
    return _NEUTRAL if neutral else _DATA
  strongest = ("low", "data", "neutral") if facts.role == "product" else ("data", "low", "neutral")
  kind = min((each.kind for each in floats), key=strongest.index)
  wide = any(each.wide for each in floats)
  if operation.moves or operation.casts:
    return _Held(kind, wide)
  # Of a number that is computed from numbers, float16 may have it or not.
  return _Held(kind, wide or kind == "neutral" or operation.part in ("float32", "opaque", None))


def _is_matmul(operation: Operation, held: Mapping[Value, _Held]) -> bool:
  """Whether an operation runs in low precision whatever its operands are."""
  if operation.facts is OUTER_PRODUCT and operation.where.direction == "forward":
    return any(held[v].kind == "low" for v in operation.operands if v in held)
  return operation.part == "half"
