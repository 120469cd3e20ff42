"""Find what the optimizer of a traced step does: its operations, and the arguments it updates."""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core.primitives import add_p, bitcast_convert_type_p, scatter_add_p, sub_p

from mpjax._core.leaves import Path
from mpjax._core.types import is_inexact_dtype
from mpjax._diagnose.call import Argument
from mpjax._jaxpr.graph import Graph, Operation, Value


class Addition(NamedTuple):
  """A step of the program that adds an update to an argument."""

  number: int  # of the step
  old: Value  # the argument
  operand: int  # the position of the argument among the operands of the step
  result: int  # the position of the new argument among the results of the program


class Optimizer(NamedTuple):
  """What an optimizer does. A function without a gradient inside has no optimizer."""

  operations: set[Operation]
  read_by_others: set[Value]  # the values that any other operation reads
  additions: Sequence[Addition]


def optimizer_of(graph: Graph, arguments: Sequence[Argument], outputs: Sequence[Path]) -> Optimizer:
  """Returns what the optimizer of a function does.

  Args:
    graph: the graph of the function.
    arguments: its arguments.
    outputs: the paths of its results.
  """
  # JAX marks what it differentiates, also in a second loss that follows the optimizer of the first.
  of_loss = {
    operation
    for operation in graph.computing()
    if operation.where.direction != "forward" or operation.where.differentiated
  }
  # A model may run again after the update, with its scopes. Other scopes are of the optimizer.
  scopes_of_model = {operation.where.path for operation in of_loss} - {""}
  # Operations before the backward pass belong to the loss, also outside of what is differentiated.
  has_gradients = False
  operations = set[Operation]()
  for operation in graph.computing():
    if operation.where.direction == "backward":
      has_gradients = True
    is_of_model = operation in of_loss or operation.where.path in scopes_of_model
    if has_gradients and not is_of_model:
      operations.add(operation)
  read = _read_by_others(graph, operations)
  additions = _additions(graph, arguments, outputs, operations, read)
  return Optimizer(operations, read, additions)


def _read_by_others(graph: Graph, of_optimizer: set[Operation]) -> set[Value]:
  """Returns the values that anything but the optimizer reads."""
  read, before = set[Value](), -1
  # Backwards, it is known for results before operands. What holds for the carry at the start of a
  # body holds at its end too, which the next round finds.
  while len(read) > before:
    before = len(read)
    for operation in reversed(graph.operations):
      # Values come into a loop, or out of it, and `pmap` squeezes all arguments, outside of any
      # module. The consumers of the results read them, rather than the operation.
      if operation.joins is not None or (operation.moves and not operation.where.path):
        is_read = not read.isdisjoint(operation.results)
      else:
        is_read = operation not in of_optimizer
      if is_read:
        read.update(operation.operands)
  return read


class _Rank(NamedTuple):
  """How much a result that is a sum with an argument looks like its new version; the least wins.

  Another such result may be the change of the argument, an average that begins as its new version,
  a target that is a copy of it at times, or the same array again.
  """

  depth: int  # 0, or more for a sum of a sum
  others: int  # what else the result may be a copy of
  has_other_path: bool  # whether it is returned under another path than that of the argument
  position: int  # among the results


def _additions(
  graph: Graph,
  arguments: Sequence[Argument],
  outputs: Sequence[Path],
  of_optimizer: set[Operation],
  read: set[Value],
) -> list[Addition]:
  """Returns the additions of updates to arguments.

  A result that is a sum with an argument is that argument, updated. An argument that the optimizer
  alone reads must be a copy of parameters, such as float32 masters. Otherwise it is a running sum,
  as of accumulated gradients.
  """
  inexact = {
    value: argument
    for value, argument in zip(graph.arguments, arguments, strict=True)
    if _is_inexact(value)
  }
  # Parameters are read outside of the optimizer, or known by their name.
  parameters = {
    value: argument
    for value, argument in inexact.items()
    if value in read or (argument.is_first and argument.is_parameter)
  }
  results = [*zip(outputs, graph.results, strict=False)]
  copied_to = _copied_to(results, {argument.keys for argument in parameters.values()})

  def may_update(value: Value, operation: Operation, path: Path) -> bool:
    """Whether a sum with an argument, which is the result with this path, may update it."""
    # A sum in the loss is a state of the model, such as a running mean.
    if of_optimizer:
      return operation in of_optimizer
    # Where no backward pass tells the optimizer, arguments behind the first are returned under
    # their own path. Otherwise a new momentum `0.9 * mu + grads` would be `grads`, updated. A
    # scalar there is a step count or a scale.
    argument = inexact[value]
    return argument.is_first or (value.aval.shape != () and _has_path(argument, path))

  found = list[tuple[_Rank, Addition]]()
  for position, (path, result) in enumerate(results):
    type_of_result = result.dtype, getattr(result.aval, "shape", None)
    same_type = [v for v in inexact if (v.dtype, v.aval.shape) == type_of_result]
    # What the result may be a copy of: arguments and computed values.
    sources = {v for v in _copies(result) if not _copied(v)}
    sums, seen, depth = _sums_behind([result]), set[Operation](), 0
    while sums:
      seen.update(sums)
      without = list[Operation]()
      for operation in sums:
        olds = [v for v in same_type if may_update(v, operation, path)]
        match = _updated_operand(operation, olds)
        if match is None:
          without.append(operation)
          continue
        old, operand = match
        # A sum with an argument that is no parameter counts only if it becomes a parameter too. If
        # the update is `master - old`, it is the master that an optimizer updates.
        is_counted = old in parameters or copied_to.get(operation.results[0], set()) - {position}
        differences = _differences([operation.operands[1 - operand]])
        if is_counted and not any(old in _copies(each.operands[1]) for each in differences):
          is_elsewhere = not _has_path(inexact[old], path)
          rank = _Rank(depth, len(sources - {old}), is_elsewhere, position)
          found.append((rank, Addition(operation.step.number, old, operand, position)))
      # `p - rate * grads - rate * decay * p` is a sum of a sum. In a model such sums add up layers.
      terms = [v for operation in without if operation in of_optimizer for v in operation.operands]
      sums = [operation for operation in _sums_behind(terms) if operation not in seen]
      depth += 1

  first = dict[Value, _Rank]()
  for rank, each in found:
    first[each.old] = min(rank, first.get(each.old, rank))
  return [each for rank, each in found if rank == first[each.old]]


def _copied_to(results: Sequence[tuple[Path, Value]], paths: set[Path]) -> Mapping[Value, set[int]]:
  """Returns the positions of the new parameters that are copies of a value; `paths` are theirs.

  Masters in float32 are arguments that only the optimizer reads. The new parameters are copies of
  them, or `p + (master - p)`, as `optax.apply_updates` computes them.
  """
  copied_to = collections.defaultdict[Value, set[int]](set)
  for position, (path, result) in enumerate(results):
    # A step may return the parameters alone, or in a tuple.
    if path in paths or path[1:] in paths:
      differences = _differences(v for each in _sums_behind([result]) for v in each.operands)
      for value in (result, *(each.operands[0] for each in differences)):
        for copy in _copies(value):
          copied_to[copy].add(position)
  return copied_to


def _has_path(argument: Argument, path: Path) -> bool:
  """Whether a result has the path of an argument, with the position in the results before it."""
  return argument.keys != () and argument.keys in (path, path[1:])


def _updated_operand(operation: Operation, olds: Sequence[Value]) -> tuple[Value, int] | None:
  """Returns which of the arguments `olds` a sum is taken with, if any, and as which operand."""
  # `update - old` and a scatter into the update do not update the argument.
  is_symmetric = operation.eqn.primitive is add_p
  # The sum may take a cast or clipped argument.
  candidates = [_copies(v) for v in operation.operands[: 2 if is_symmetric else 1]]
  # In a sum of two arguments, the first one is updated.
  for old in olds:
    for position, copies in enumerate(candidates):
      if old in copies:
        return old, position
  return None


def _sums_behind(values: Iterable[Value]) -> list[Operation]:
  """Returns the additions whose sums values may be, but for stochastic rounding.

  That computes with the bits of the sum, and loses nothing on average.
  """
  makers = _makers(values)
  if any(each.eqn.primitive is bitcast_convert_type_p for each in makers):
    return []
  return [each for each in makers if each.eqn.primitive in (add_p, sub_p, scatter_add_p)]


def _differences(values: Iterable[Value]) -> list[Operation]:
  """Returns the subtractions of which values may be the results."""
  return [each for each in _makers(values) if each.eqn.primitive is sub_p]


def _makers(values: Iterable[Value]) -> list[Operation]:
  """Returns the operations that computed the elements of values."""
  return [x.made_by for value in values for x in _copies(value) if x.made_by is not None]


def _copies(value: Value) -> dict[Value, None]:
  """Returns the values, in order, whose elements a value has: selected, clipped, cast, carried."""
  copies = dict[Value, None]()
  pending = [value]
  while pending:
    each = pending.pop()
    if each in copies:
      continue
    copies[each] = None
    pending += _copied(each)
  return copies


def _copied(value: Value) -> list[Value]:
  """Returns the values whose elements the operation that made a value selects, clips or casts."""
  operation = value.made_by
  if operation is None:
    return []
  # A loop carries elements at their positions, and a branch returns them.
  if operation.joins:
    return operation.operands
  if not operation.facts.exact and not operation.casts:
    return []
  # A selection takes its mask and its scalars as operands too. These are no copies.
  shape = _without_ones(value)
  return [v for v in operation.operands if _is_inexact(v) and _without_ones(v) == shape]


def _is_inexact(value: Value) -> bool:
  return value.dtype is not None and is_inexact_dtype(value.dtype)


def _without_ones(value: Value) -> list[int]:
  """Returns the shape of a value without axes of length 1, which `pmap` adds and removes."""
  return [length for length in value.aval.shape if length != 1]
