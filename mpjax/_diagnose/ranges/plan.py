"""Decide what `ranges` counts: activations, gradients, state and updates of a function.

Results of the forward and the backward pass count as activations and gradients if the rewriter
puts them, or a cast of them, in low precision. Everything else that is computed stays in float32
under a policy: masks, softmax, the cotangent of a loss. See `docs/concepts.md`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core.primitives import add_p, bitcast_convert_type_p, scatter_add_p, sub_p

from mpjax._core.leaves import Path
from mpjax._diagnose.call import Argument
from mpjax._diagnose.parameter_scopes import name_by_parameters
from mpjax._diagnose.ranges.report import RangeKind
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.steps import Body


class Group(NamedTuple):
  """A row of the report."""

  kind: RangeKind
  path: str  # of a module, or of a leaf of the arguments


class Addition(NamedTuple):
  """A step that adds an update to an argument."""

  old: Value  # the argument
  operand: int  # the position of the argument among the operands of the step


class Plan(NamedTuple):
  """The group in which each argument and step is counted."""

  inputs: Mapping[int, Group]  # by the positions of arguments
  steps: Mapping[int, Group]  # by the numbers of steps: their results, or what they add
  additions: Mapping[int, Addition]  # by the numbers of steps, of the group "updates"


def plan(
  body: Body, arguments: Sequence[Argument], low: Collection[int], outputs: Sequence[Path] = ()
) -> Plan:
  """Returns the plan of a function.

  Args:
    body: its steps.
    arguments: its arguments.
    low: the numbers of the steps that a policy puts in low precision.
    outputs: the paths of its results.
  """
  graph = Graph(body)
  # Find the optimizer before operations are named by their parameters. Its operations have no path.
  of_optimizer = _optimizer_work(graph)
  name_by_parameters(graph, [one.module if one.is_first else () for one in arguments])
  # Integers and keys have no exponents to count.
  pairs = zip(graph.arguments, arguments, strict=True)
  floats = {value: argument for value, argument in pairs if value.is_floating}
  read = _read_outside(graph, of_optimizer, body.depth)
  additions = _additions(graph, floats, outputs, read)

  inputs = dict[int, Group]()
  # A model or loss alone has no optimizer, and its unused arguments are no state.
  has_optimizer = any(each.where.direction == "backward" for each in graph.computing())
  for position, value in enumerate(graph.arguments):
    argument = floats.get(value)
    if argument is None:
      continue
    if has_optimizer and value.consumers and value not in read:
      inputs[position] = Group("optimizer state", argument.name)
    elif argument.is_first:
      inputs[position] = Group("parameters", argument.name)

  # An update is named by its parameter, whatever module the addition is in.
  steps = {number: Group("updates", floats[each.old].name) for number, each in additions.items()}
  for operation in graph.computing():
    number, where = operation.step.number, operation.where
    # Moved and recomputed numbers would be counted twice.
    is_known = operation.moves or operation.casts or where.direction == "recomputed"
    # Results of the optimizer count as updates and new state alone.
    if is_known or operation in of_optimizer or not any(v.is_floating for v in operation.results):
      continue
    in_low: RangeKind = "gradients" if where.direction == "backward" else "activations"
    steps.setdefault(number, Group(in_low if number in low else "float32", where.path))
  return Plan(inputs, steps, additions)


def _optimizer_work(graph: Graph) -> set[Operation]:
  """Returns the optimizer's operations, which follow the backward pass and are in no module."""
  # Forward operations before the backward pass belong to the loss, also if they have no path.
  has_gradients = False
  work = set[Operation]()
  for operation in graph.computing():
    where = operation.where
    if where.direction == "backward":
      has_gradients = True
    elif has_gradients and where.direction == "forward" and not where.path:
      work.add(operation)
  return work


def _read_outside(graph: Graph, of_optimizer: set[Operation], depth: int) -> set[Value]:
  """Returns the values that anything but the optimizer reads."""
  read = set[Value]()
  # Backwards, it is known for results before operands. What holds for the carry at the start of a
  # body holds at its end too, in the next round, so there is one round more than loops are nested.
  for _ in range(depth + 1):
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


# Updates


def _additions(
  graph: Graph, floats: Mapping[Value, Argument], outputs: Sequence[Path], read: Collection[Value]
) -> dict[int, Addition]:
  """Returns the steps that add an update to an argument, by their numbers.

  A result that is a sum with an argument is that argument, updated. An argument that the optimizer
  alone reads must be a copy of parameters, such as float32 masters. Otherwise it is a running sum,
  as of accumulated gradients.
  """
  # Parameters are read outside of the optimizer, or known by their name.
  parameters = {
    value: argument
    for value, argument in floats.items()
    if value in read or (argument.is_first and argument.is_parameter)
  }
  # Masters in float32 are arguments that only the optimizer reads. The new parameters are copies of
  # them, or `p + (master - p)`, as `optax.apply_updates` computes them.
  stored = set[Value]()
  paths = {argument.keys for argument in parameters.values()}
  for path, result in zip(outputs, graph.results, strict=False):
    # A step may return the parameters alone, or first in a tuple.
    if path in paths or path[1:] in paths:
      stored.update(_copies(result))
      for operation in _sums_behind(result):
        stored.update(*(_copies(x.operands[0]) for x in _differences(operation.operands)))

  additions = dict[int, Addition]()
  for path, result in zip(outputs, graph.results, strict=False):
    # The result must have the type of the argument, since a training step returns its state.
    olds = [v for v, argument in floats.items() if _may_become(v, argument, result, path)]
    for operation in _sums_behind(result):
      # A sum with an argument that is no parameter counts only if it becomes a parameter.
      is_stored = operation.results[0] in stored
      addition = _addition(operation, olds)
      if addition is not None and (is_stored or addition.old in parameters):
        additions.setdefault(operation.step.number, addition)
  return additions


def _may_become(value: Value, argument: Argument, result: Value, path: Path) -> bool:
  """Whether an argument and a result may be an array before and after an update."""
  if (value.dtype, value.aval.shape) != (result.dtype, getattr(result.aval, "shape", None)):
    return False
  if argument.is_first:
    return True
  # Other arguments are returned under their own path, with the position in the result before it.
  # Without that, a new momentum `0.9 * mu + grads` would be `grads`, updated.
  # A scalar outside of the first argument is a step count or a scale.
  is_array = value.aval.shape != ()
  return is_array and argument.keys != () and argument.keys in (path, path[1:])


def _sums_behind(result: Value) -> list[Operation]:
  """Returns the additions whose sum a result may be, but for stochastic rounding.

  That computes with the bits of the sum, and loses nothing on average.
  """
  makers = _makers([result])
  if any(each.eqn.primitive is bitcast_convert_type_p for each in makers):
    return []
  return [each for each in makers if each.eqn.primitive in (add_p, sub_p, scatter_add_p)]


def _differences(values: Iterable[Value]) -> list[Operation]:
  """Returns the subtractions of which values may be the results."""
  return [each for each in _makers(values) if each.eqn.primitive is sub_p]


def _makers(values: Iterable[Value]) -> list[Operation]:
  """Returns the operations that computed the elements of values."""
  return [x.made_by for value in values for x in _copies(value) if x.made_by is not None]


def _addition(operation: Operation, olds: Sequence[Value]) -> Addition | None:
  """Returns which of the arguments `olds` an operation adds to, if any."""
  # `update - old` and a scatter into the update do not update the argument.
  is_symmetric = operation.eqn.primitive is add_p
  candidates = [_copies(v) for v in operation.operands[: 2 if is_symmetric else 1]]
  # In a sum of two arguments, the first one is updated.
  for old in olds:
    for position, copies in enumerate(candidates):
      # The sum may take a cast or clipped argument.
      if old not in copies:
        continue
      # If the update is `master - old`, it is the master that an optimizer updates.
      differences = _differences([operation.operands[1 - position]])
      is_of_master = any(old in _copies(each.operands[1]) for each in differences)
      return None if is_of_master else Addition(old, position)
  return None


def _copies(value: Value) -> dict[Value, None]:
  """Returns the values, in order, whose elements a value has: selected, clipped, cast, carried."""
  copies = dict[Value, None]()
  pending = [value]
  while pending:
    each = pending.pop()
    if each in copies:
      continue
    copies[each] = None
    operation = each.made_by
    if operation is None:
      continue
    # A loop carries elements at their positions, and a branch returns them.
    if operation.joins:
      pending += operation.operands
    elif operation.facts.exact or operation.casts:
      # A selection takes its mask and its scalars as operands too. These are no copies.
      shape = _without_ones(each)
      pending += [v for v in operation.operands if v.is_floating and _without_ones(v) == shape]
  return copies


def _without_ones(value: Value) -> list[int]:
  """Returns the shape of a value without axes of length 1, which `pmap` adds and removes."""
  return [length for length in value.aval.shape if length != 1]
