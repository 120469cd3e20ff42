"""The tables of an audit: modules, operations by dtype, formats, bytes between the passes."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping

import jax
import jax.numpy as jnp

from mpjax._core.types import DType, is_inexact_dtype
from mpjax._diagnose.audit.findings import Format, Module, Primitive, summed
from mpjax._diagnose.matmul_formats import format_of_matmul
from mpjax._jaxpr.graph import Graph, Operation, Value, moved_from
from mpjax._jaxpr.locations import EMULATED, MODULE, NOT_IN, RECIPE
from mpjax._matmul.block_dot import block_dot_p
from mpjax._policy.audit_record import AuditRecord
from mpjax._policy.dtypes import hardware_of


@dataclasses.dataclass
class _Counts:
  """The counts of a module.

  Attributes:
    decided_by: the rule or the `dtype` that decided its precision; "" for neither.
    reads: the values that its forward pass uses, in order. A dict serves as an ordered set.
    activations: the elements that its forward pass computes, by dtype.
    gradients: the elements that its backward pass computes, by dtype.
    flops: the FLOPs of its matmuls, by dtype.
  """

  decided_by: str = ""
  reads: dict[Value, None] = dataclasses.field(default_factory=dict)
  activations: collections.Counter[DType] = dataclasses.field(default_factory=collections.Counter)
  gradients: collections.Counter[DType] = dataclasses.field(default_factory=collections.Counter)
  flops: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


def find_modules(
  graph: Graph, record: AuditRecord, parameters: Collection[str]
) -> tuple[Module, ...]:
  """Returns the modules with matmuls. The module with the most FLOPs comes first.

  Args:
    graph: the graph of a function that was traced for an audit.
    record: the modules and rules that were noted while it was traced.
    parameters: the names of the arguments that are parameters. If it is empty, all may be.
  """
  modules = collections.defaultdict[str, _Counts](_Counts)
  for operation in graph.computing():
    where = operation.where
    module = modules[where.path]
    noted = record.modules.get(where.marked(MODULE) or "")
    # The rule is the same for all operations of a module, except those without a mark.
    if noted is not None and not module.decided_by:
      # A rule decides before the `dtype` of a module, which a policy overrules.
      if noted.rule is not None:
        module.decided_by = repr(noted.rule)
      elif noted.own_dtype:
        module.decided_by = f"the policy over dtype={noted.own_dtype}"
    # The casts and scales of a format are part of its matmul.
    is_scaling = where.marked(RECIPE) is not None and not operation.facts.flops
    if not is_scaling:
      elements = module.activations if where.direction == "forward" else module.gradients
      elements += _elements_by_dtype(operation.results)
    # The forward pass reads every parameter of a module.
    if where.direction == "forward":
      module.reads |= dict.fromkeys(moved_from(v) for v in operation.operands)
  for operation, dtype, flops in graph.matmuls():
    modules[operation.where.path].flops[str(dtype)] += flops
  rows: list[Module] = []
  for path, module in modules.items():
    # A scope without a matmul is a detail of a module around it.
    if not module.flops.total():
      continue
    arguments = [v for v in module.reads if v.kind == "argument"]
    params = [v for v in arguments if v.label in parameters or not parameters]
    rows.append(
      Module(
        path,
        dtype=" ".join(module.flops),
        reason=module.decided_by,
        params=_most_common(_elements_by_dtype(params)),
        activations=_most_common(module.activations),
        gradients=_most_common(module.gradients),
        flops=module.flops.total(),
      )
    )
  return summed(rows)


def _elements_by_dtype(values: Iterable[Value]) -> collections.Counter[DType]:
  """Returns the number of elements of floating or complex values, by dtype."""
  elements = collections.Counter[DType]()
  for v in values:
    # Indices, masks and keys have no precision.
    if v.dtype is not None and is_inexact_dtype(v.dtype):
      elements[v.dtype] += v.size
  return elements


def _most_common(elements: collections.Counter[DType]) -> tuple[str, ...]:
  return tuple(dtype.name for dtype, _ in elements.most_common())


def find_operations(graph: Graph) -> tuple[Primitive, ...]:
  """Returns a row for each primitive and dtype, with its runs and the bytes of its results.

  The dtype is that of its widest floating operand, or of its result if it has no floating operand.
  Operations without floating values do not count.

  >>> import jax, jax.numpy as jnp
  >>> from mpjax._jaxpr.graph import Graph
  >>> graph = Graph(jax.make_jaxpr(lambda x: jnp.tanh(x) + 1)(jnp.ones(3, "bfloat16")))
  >>> [(row.operation, row.dtype, row.nbytes, row.times) for row in find_operations(graph)]
  [('tanh', 'bfloat16', 6, 1), ('add', 'bfloat16', 6, 1)]
  """
  rows: list[Primitive] = []
  for operation in graph.computing():
    # A cast from float32 runs in float32, so operands come before results.
    of_operands, of_results = (
      [v.dtype for v in values if v.dtype is not None and is_inexact_dtype(v.dtype)]
      for values in (operation.operands, operation.results)
    )
    dtypes = of_operands or of_results
    if operation.used and dtypes:
      dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
      nbytes = sum(v.nbytes for v in operation.results) * operation.times
      rows.append(Primitive(operation.name, dtype.name, nbytes, operation.times))
  return summed(rows)


_NO_FORMAT, _IN_FLOAT32 = "its policy has no format", "it is in float32"
"""Why a matmul is in no format where nothing asks for one."""


def find_formats(graph: Graph) -> tuple[Format, ...]:
  """Returns the matmuls by format and by why they are in none; () if nothing asks for one."""
  rows: list[Format] = []
  for operation, dtype, flops in graph.matmuls():
    reason, name = _why_in_no_format(operation), ""
    if not reason:
      emulated = ", emulated" if _is_emulated(operation) else ""
      name = format_of_matmul(operation, dtype) + emulated
    rows.append(Format(operation.where.path, name, reason, flops))
  is_asked = any(row.reason not in (_NO_FORMAT, _IN_FLOAT32) for row in rows)
  return summed(rows) if is_asked else ()


def _why_in_no_format(matmul: Operation) -> str:
  """Returns why a matmul is in no format; "" if it is in one."""
  operands = matmul.operands[:2]
  if EMULATED in matmul.where.scopes:
    return ""
  if all(v.dtype is not None and v.dtype.itemsize == 1 for v in operands):
    return ""
  left_out = matmul.where.marked(NOT_IN["format"])
  if left_out is not None:
    return left_out.partition(":")[2]
  return _IN_FLOAT32 if any(v.is_wide for v in operands) else _NO_FORMAT


def _is_emulated(matmul: Operation) -> bool:
  """Whether the operands of a matmul are dequantised before it."""
  # Formats with one scale have a mark. Formats with blocks have a primitive of their own.
  if matmul.eqn.primitive is not block_dot_p:
    return EMULATED in matmul.where.scopes
  if matmul.eqn.params["native"] is None:
    return True
  device = jax.devices()[0]
  hardware = hardware_of(device.platform, getattr(device, "compute_capability", None))
  is_float4 = matmul.operands[0].dtype == jnp.float4_e2m1fn
  return ("nvfp4" if is_float4 else "mxfp8") not in hardware.dtypes


def asked_recipes(graph: Graph) -> tuple[str, ...]:
  """Returns the names of the recipes that the policies of matmuls ask for."""
  marks = (
    operation.where.marked(mark)
    for operation, *_ in graph.matmuls()
    for mark in (RECIPE, NOT_IN["format"])
  )
  return tuple(dict.fromkeys(mark.partition(":")[0] for mark in marks if mark is not None))


def residual_bytes(graph: Graph) -> Mapping[str, int]:
  """Returns the bytes that the forward pass computes and the backward pass uses, by dtype."""
  nbytes = collections.Counter[str]()
  for operation in graph.operations:
    if operation.where.direction != "forward":
      continue
    # A tuple of results may be a residual in part.
    for v in operation.results:
      # An argument of the same size is in memory anyway, such as a parameter that enters `scaled`.
      source = moved_from(v)
      is_in_memory = source.kind == "argument" and source.nbytes == v.nbytes
      is_used = any(consumer.where.direction != "forward" for consumer in v.consumers)
      if is_used and not is_in_memory:
        # A value in a loop is stacked over its iterations.
        nbytes[str(v.dtype)] += v.nbytes * operation.times
  return dict(nbytes.most_common())
