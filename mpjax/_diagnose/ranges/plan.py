"""Decide what `ranges` counts: activations, gradients, state and updates of a function.

Results of the forward and the backward pass count as activations and gradients if the rewriter
puts them, or a cast of them, in low precision. Everything else that is computed stays in float32
under a policy: masks, softmax, the cotangent of a loss. See `docs/concepts.md`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from mpjax._core.leaves import Path
from mpjax._diagnose.call import Argument
from mpjax._diagnose.optimizer_work import Addition, optimizer_of
from mpjax._diagnose.parameter_scopes import name_by_parameters
from mpjax._diagnose.ranges.report import RangeKind
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.steps import Body


class Group(NamedTuple):
  """A row of the report."""

  kind: RangeKind
  path: str  # of a module, or of a leaf of the arguments


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
  # Find the optimizer before operations are named by their parameters. Those of the optimizer would
  # get the paths of modules too.
  optimizer = optimizer_of(graph, arguments, outputs)
  name_by_parameters(graph, [one.module if one.is_first else () for one in arguments])
  # Integers and keys have no exponents to count.
  pairs = zip(graph.arguments, arguments, strict=True)
  floats = {value: argument for value, argument in pairs if value.is_floating}
  additions = {each.number: each for each in optimizer.additions if each.old in floats}

  # Parameters may be in any argument, if they are updated.
  updated = {each.old for each in additions.values()}
  inputs = dict[int, Group]()
  # A model or loss alone has no optimizer, and its unused arguments are no state.
  has_optimizer = any(each.where.direction == "backward" for each in graph.computing())
  for position, value in enumerate(graph.arguments):
    argument = floats.get(value)
    if argument is None:
      continue
    if has_optimizer and value.consumers and value not in optimizer.read_by_others:
      inputs[position] = Group("optimizer state", argument.name)
    elif argument.is_first or value in updated:
      inputs[position] = Group("parameters", argument.name)

  # An update is named by its parameter, whatever module the addition is in.
  steps = {number: Group("updates", floats[each.old].name) for number, each in additions.items()}
  for operation in graph.computing():
    number, where = operation.step.number, operation.where
    # Moved and recomputed numbers would be counted twice.
    is_known = operation.moves or operation.casts or where.direction == "recomputed"
    # Results of the optimizer count as updates and new state alone.
    if is_known or operation in optimizer.operations:
      continue
    if not any(v.is_floating for v in operation.results):
      continue
    in_low: RangeKind = "gradients" if where.direction == "backward" else "activations"
    steps.setdefault(number, Group(in_low if number in low else "float32", where.path))
  return Plan(inputs, steps, additions)
