"""Decide what `ranges` counts: activations, gradients, state and updates of a function.

Results of the forward and the backward pass count as activations and gradients if the rewriter
puts them, or a cast of them, in low precision. Everything else that is computed stays in float32
under a policy: masks, softmax, the cotangent of a loss. See `docs/concepts.md`.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from jax.extend.core.primitives import add_p, bitcast_convert_type_p, scatter_add_p, sub_p

from mpjax._core.leaves import Path
from mpjax._core.types import DType
from mpjax._diagnose.call import Argument
from mpjax._diagnose.parameter_scopes import name_by_parameters
from mpjax._diagnose.ranges.report import RangeKind
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import Location
from mpjax._jaxpr.steps import Body


class Group(NamedTuple):
  """A row of the report."""

  kind: RangeKind
  path: str  # of a module, or of a leaf of the arguments


class Addition(NamedTuple):
  """A step that adds an update to an argument."""

  old: Value  # the argument
  name: str  # the name of the argument
  operand: int  # the position of the argument among the operands of the step

  @property
  def dtype(self) -> DType:
    """The dtype in which the argument is stored, and to which the sum rounds."""
    return self.old.aval.dtype


class Plan(NamedTuple):
  """The group in which each argument and step is counted."""

  inputs: Mapping[int, Group]  # by the positions of arguments
  steps: Mapping[int, Group]  # by the numbers of steps: their results, or what they add
  additions: Mapping[int, Addition]  # by the numbers of steps, of the group "updates"
  readers: Mapping[int, Location]  # by the positions of arguments: the first consumer of each

  def of_kind(self, kind: RangeKind) -> Self:
    """Returns a plan that counts the results of steps of one kind alone."""
    # Gradients at another scale need no parameters and no updates.
    steps = {number: group for number, group in self.steps.items() if group.kind == kind}
    return self._replace(inputs={}, steps=steps, additions={})


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

  readers = _first_readers(graph, of_optimizer, body.depth)
  additions = _additions(graph, floats, outputs, readers)

  # An update is named by its parameter, whatever module the addition is in.
  steps = {number: Group("updates", each.name) for number, each in additions.items()}
  for operation in graph.computing():
    # Results of the optimizer count as updates and new state alone.
    if operation not in of_optimizer and _computes_floats(operation):
      steps.setdefault(operation.step.number, _group_of_results(operation, low))
  read = {i: readers[value] for i, value in enumerate(graph.arguments) if value in readers}
  return Plan(_groups_of_arguments(graph, floats, readers), steps, additions, read)


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


def _backwards(graph: Graph, depth: int) -> Iterator[Operation]:
  """Yields the operations from the last to the first, in one round more than loops are nested.

  A fact about the carry at the start of a body holds at its end too, in the next round.
  """
  for _ in range(depth + 1):
    yield from reversed(graph.operations)


def _first_readers(
  graph: Graph, of_optimizer: set[Operation], depth: int
) -> Mapping[Value, Location]:
  """Returns where each value is read first, if anything but the optimizer reads it."""
  readers = dict[Value, Location]()
  for operation in _backwards(graph, depth):
    if _hands_on(operation):
      # The walk is backwards, so later writes come from earlier readers.
      later = [readers[result] for result in operation.results if result in readers]
      readers.update((v, location) for location in later for v in operation.operands)
    elif operation not in of_optimizer:
      readers.update(dict.fromkeys(operation.operands, operation.where))
  return readers


def _hands_on(operation: Operation) -> bool:
  """Whether the consumers of its results read the operands, rather than the operation.

  Values come into a loop, or out of it. `pmap` squeezes all arguments, outside of any module.
  """
  return operation.joins is not None or (operation.moves and not operation.where.path)


def _computes_floats(operation: Operation) -> bool:
  """Whether an operation computes floating numbers that were not counted before."""
  # Moved and recomputed numbers would be counted twice.
  if operation.moves or operation.casts or operation.where.direction == "recomputed":
    return False
  return any(v.is_floating for v in operation.results)


def _group_of_results(operation: Operation, low: Collection[int]) -> Group:
  path = operation.where.path
  if operation.step.number not in low:
    return Group("float32", path)
  if operation.where.direction == "backward":
    return Group("gradients", path)
  return Group("activations", path)


def _groups_of_arguments(
  graph: Graph, floats: Mapping[Value, Argument], readers: Mapping[Value, Location]
) -> dict[int, Group]:
  """Returns the groups of parameters, and of the arguments that the optimizer alone reads."""
  # A model or loss alone has no optimizer, and its unused arguments are no state.
  has_optimizer = any(each.where.direction == "backward" for each in graph.computing())
  groups = dict[int, Group]()
  for position, value in enumerate(graph.arguments):
    if value not in floats:
      continue
    argument = floats[value]
    if has_optimizer and value.consumers and value not in readers:
      groups[position] = Group("optimizer state", argument.name)
    elif argument.is_first:
      groups[position] = Group("parameters", argument.name)
  return groups


# Updates


def _additions(
  graph: Graph,
  floats: Mapping[Value, Argument],
  outputs: Sequence[Path],
  readers: Mapping[Value, Location],
) -> dict[int, Addition]:
  """Returns the steps that add an update to an argument, by their numbers.

  A result that is a sum with an argument is that argument, updated. An argument that the optimizer
  alone reads must be a copy of parameters, such as float32 masters. Otherwise it is a running sum,
  as of accumulated gradients.
  """
  parameters = _parameters(floats, readers)
  # Masters in float32 are arguments that only the optimizer reads. The new parameters are copies of
  # them.
  stored = _stored_in(parameters, graph, outputs)
  additions = dict[int, Addition]()
  for path, result in zip(outputs, graph.results, strict=False):
    # The result must have the type of the argument, since a training step returns its state.
    olds = [v for v, argument in floats.items() if _may_become(v, argument, result, path)]
    for operation in _sums_behind(result):
      # A sum with an argument that is no parameter counts only if it becomes a parameter.
      is_stored = operation.results[0] in stored
      addition = _addition(operation, olds, floats)
      if addition is not None and (is_stored or addition.old in parameters):
        additions.setdefault(operation.step.number, addition)
  return additions


def _parameters(
  floats: Mapping[Value, Argument], readers: Mapping[Value, Location]
) -> dict[Value, Argument]:
  """Returns the arguments that are read outside of the optimizer, or are parameters by name."""
  return {
    value: argument
    for value, argument in floats.items()
    if value in readers or (argument.is_first and argument.is_parameter)
  }


def _stored_in(
  parameters: Mapping[Value, Argument], graph: Graph, outputs: Sequence[Path]
) -> set[Value]:
  """Returns the values that new parameters are: copies, or `p + (value - p)`."""
  # A step may return the parameters alone, or first in a tuple.
  paths = {argument.keys for argument in parameters.values()}
  pairs = zip(outputs, graph.results, strict=False)
  news = [result for path, result in pairs if path in paths or path[1:] in paths]
  stored = {copy for new in news for copy in _copies(new)}
  for operation in [each for new in news for each in _sums_behind(new)]:
    # `optax.apply_updates` with masters computes `p + (master - p)`. Its result is the master.
    stored.update(*(_copies(each.operands[0]) for each in _differences(operation)))
  return stored


def _differences(operation: Operation) -> list[Operation]:
  """Returns the subtractions whose results an operation takes."""
  copies = [copy for v in operation.operands for copy in _copies(v)]
  makers = [v.made_by for v in copies if v.made_by is not None]
  return [each for each in makers if each.eqn.primitive is sub_p]


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
  makers = [v.made_by for v in _copies(result) if v.made_by is not None]
  if any(each.eqn.primitive is bitcast_convert_type_p for each in makers):
    return []
  return [each for each in makers if each.eqn.primitive in (add_p, sub_p, scatter_add_p)]


def _addition(
  operation: Operation, olds: Sequence[Value], floats: Mapping[Value, Argument]
) -> Addition | None:
  """Returns which of the arguments `olds` an operation adds to, if any."""
  # `update - old` and a scatter into the update do not update the argument.
  is_symmetric = operation.eqn.primitive is add_p
  candidates = [_copies(v) for v in operation.operands[: 2 if is_symmetric else 1]]
  # In a sum of two arguments, the first one is updated.
  for old in olds:
    for position, copies in enumerate(candidates):
      # The sum may take a cast or clipped argument.
      if old in copies:
        if _adds_difference_from(old, operation.operands[1 - position]):
          return None
        return Addition(old, floats[old].name, position)
  return None


def _adds_difference_from(old: Value, update: Value) -> bool:
  """Whether an update is `master - old`: then it is the master that an optimizer updates."""
  makers = [v.made_by for v in _copies(update) if v.made_by is not None]
  differences = [each for each in makers if each.eqn.primitive is sub_p]
  return any(old in _copies(each.operands[1]) for each in differences)


def _copies(value: Value) -> dict[Value, None]:
  """Returns the values, in order, whose elements a value has: selected, clipped, cast, carried."""
  copies = dict[Value, None]()
  pending = [value]
  while pending:
    each = pending.pop()
    if each not in copies:
      copies[each] = None
      pending += _copied_by(each)
  return copies


def _copied_by(value: Value) -> list[Value]:
  """Returns the operands whose elements a value has at the same positions."""
  operation = value.made_by
  if operation is None:
    return []
  # A loop carries elements at their positions, and a branch returns them.
  if operation.joins:
    return operation.operands
  if not (operation.facts.exact or operation.casts):
    return []
  shape = _without_ones(value)
  # A selection takes its mask and its scalars as operands too. These are no copies.
  return [v for v in operation.operands if v.is_floating and _without_ones(v) == shape]


def _without_ones(value: Value) -> list[int]:
  """Returns the shape of a value without axes of length 1, which `pmap` adds and removes."""
  return [length for length in value.aval.shape if length != 1]
