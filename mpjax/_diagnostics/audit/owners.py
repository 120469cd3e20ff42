"""The modules of operations that are in no named scope, by the parameters that they take.

Flax NNX and plain functions write no scopes. There an operation on `params["layer_1"]["kernel"]`
is in "layer_1".
"""

from collections.abc import Set

from jax.extend.core.primitives import convert_element_type_p

from mpjax._diagnostics.audit.graph import Graph, Operation, Value
from mpjax._diagnostics.audit.leaks import marked_path
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.locations import Location, Source
from mpjax._jaxprs.primitives import facts_of


def name_by_parameters(graph: Graph, parameters: Set[str]) -> None:
  """Gives operations without a path that of the module whose parameter they take.

  An operation of the backward pass has the path of the matmul on its line, if there is one only.

  Args:
    graph: its operations are changed.
    parameters: the names of the arguments that are parameters, such as "model/layer_1/kernel".
  """
  owners: dict[Value, str] = {
    v: "/".join(v.label.split("/")[1:-1]) for v in graph.arguments if v.label in parameters
  }
  lines: dict[Source | None, set[str]] = {}
  for operation in graph.operations:
    if not _is_unnamed(operation.where):
      continue
    found = {owners[v] for v in operation.operands if owners.get(v)}
    if _is_moved(operation):
      owners.update((v, path) for v in operation.results for path in found)
    if len(found) != 1:
      continue
    (path,) = found
    operation.where = _named(operation.where, path)
    if flops_of(operation.eqn) is not None:
      lines.setdefault(operation.where.source, set()).add(path)
  for operation in graph.operations:
    found = lines.get(operation.where.source, set())
    backward = operation.where.direction != "forward"
    if backward and _is_unnamed(operation.where) and len(found) == 1 and operation.where.source:
      operation.where = _named(operation.where, next(iter(found)))


def _is_unnamed(where: Location) -> bool:
  return not where.path and marked_path(where) is None


def _is_moved(operation: Operation) -> bool:
  """Whether the results are the operand, moved or cast."""
  is_cast = operation.eqn.primitive is convert_element_type_p
  return operation.joins or is_cast or facts_of(operation.eqn).moves


def _named(where: Location, path: str) -> Location:
  return where._replace(scopes=(*where.scopes, *path.split("/")))
