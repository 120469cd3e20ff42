"""The tables of an audit: modules, operations by dtype, formats, bytes between the passes."""

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp

from mpjax._core.types import DType, is_inexact_dtype
from mpjax._diagnose.audit.findings import Finding, summed
from mpjax._jaxpr.graph import Graph, Operation, Value, moved_from
from mpjax._jaxpr.locations import EMULATED, MODULE, NOT_IN, RECIPE
from mpjax._matmul.block_dot import block_dot_p
from mpjax._policy.audit_record import AuditRecord
from mpjax._policy.dtypes import hardware_of

_NO_FORMAT, _IN_FLOAT32 = "its policy has no format", "it is in float32"
"""Why a matmul is in no format where nothing asks for one."""

_OF_CUDNN = "__cudnn$blockScaledDot"
"""The operation of a compiled program that multiplies operands with scales in blocks."""


@dataclasses.dataclass
class _Module:
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
) -> tuple[Finding, ...]:
  """Returns the modules with matmuls. The module with the most FLOPs comes first.

  Args:
    graph: the graph of a function that was traced for an audit.
    record: the modules and rules that were noted while it was traced.
    parameters: the names of the arguments that are parameters. If it is empty, all may be.
  """
  modules = collections.defaultdict[str, _Module](_Module)
  for operation in graph.computing():
    module = modules[operation.where.path]
    # The rule is the same for all operations of a module, except those without a mark.
    module.decided_by = module.decided_by or _decided_by(operation, record)
    _count_results(module, operation)
    # The forward pass reads every parameter of a module.
    if operation.where.direction == "forward":
      module.reads |= dict.fromkeys(moved_from(v) for v in operation.operands)
  for operation, dtype, flops in graph.matmuls():
    modules[operation.where.path].flops[str(dtype)] += flops
  # A scope without a matmul is a detail of a module around it.
  return summed(
    _row(path, module, parameters) for path, module in modules.items() if module.flops.total()
  )


def _decided_by(operation: Operation, record: AuditRecord) -> str:
  """Returns the rule, or the overruled `dtype`, of the module of an operation; "" for neither."""
  module = record.modules.get(operation.where.marked(MODULE) or "")
  if module is None:
    return ""
  # A rule decides before the `dtype` of a module, which a policy overrules.
  if module.rule is not None:
    return repr(module.rule)
  return f"the policy over dtype={module.own_dtype}" if module.own_dtype else ""


def _count_results(module: _Module, operation: Operation) -> None:
  is_scaling = operation.where.marked(RECIPE) is not None and not operation.facts.flops
  if is_scaling:
    return  # The casts and scales of a format are part of its matmul.
  elements = _elements_by_dtype(operation.results)
  if operation.where.direction == "forward":
    module.activations += elements
  else:
    module.gradients += elements


def _row(path: str, module: _Module, parameters: Collection[str]) -> Finding:
  # Without known parameters, every argument may be one.
  arguments = [v for v in module.reads if v.kind == "argument"]
  params = [v for v in arguments if v.label in parameters or not parameters]
  return Finding(
    path,
    dtype=" ".join(module.flops),
    reason=module.decided_by,
    flops=module.flops.total(),
    params=_most_common(_elements_by_dtype(params)),
    activations=_most_common(module.activations),
    gradients=_most_common(module.gradients),
  )


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


_Kind: TypeAlias = tuple[str, DType]
"""The name of a primitive, and the dtype in which it runs."""


def find_operations(graph: Graph) -> tuple[Finding, ...]:
  """Returns a row for each primitive and dtype, with its runs and the bytes of its results.

  The dtype is that of its widest floating operand, or of its result if it has no floating operand.
  Operations without floating values do not count.

  >>> import jax, jax.numpy as jnp
  >>> from mpjax._jaxpr.graph import Graph
  >>> graph = Graph(jax.make_jaxpr(lambda x: jnp.tanh(x) + 1)(jnp.ones(3, "bfloat16")))
  >>> [(row.operation, row.dtype, row.nbytes, row.times) for row in find_operations(graph)]
  [('tanh', 'bfloat16', 6, 1), ('add', 'bfloat16', 6, 1)]
  """
  nbytes, times = collections.Counter[_Kind](), collections.Counter[_Kind]()
  for operation in graph.computing():
    dtype = _dtype_of(operation)
    if operation.used and dtype is not None:
      kind = operation.name, dtype
      nbytes[kind] += sum(v.nbytes for v in operation.results) * operation.times
      times[kind] += operation.times
  return summed(
    Finding("", name, dtype=dtype.name, nbytes=nbytes[name, dtype], times=times[name, dtype])
    for name, dtype in times
  )


def _dtype_of(operation: Operation) -> DType | None:
  """Returns the dtype of the widest floating or complex operand, or else result; None for none."""
  # A cast from float32 runs in float32, so operands come before results.
  for values in (operation.operands, operation.results):
    dtypes = [v.dtype for v in values if v.dtype is not None]
    inexact = [dtype for dtype in dtypes if is_inexact_dtype(dtype)]
    if inexact:
      return max(inexact, key=_itemsize)
  return None


def _itemsize(dtype: DType) -> int:
  return dtype.itemsize


def find_formats(graph: Graph, compiled: str = "") -> tuple[Finding, ...]:
  """Returns the matmuls by format and by why they are in none; () if nothing asks for one.

  Args:
    graph: the graph of a function that was traced for an audit.
    compiled: the text of the compiled program, or "" for the devices of this process.
  """
  rows: list[Finding] = []
  for operation, _, flops in graph.matmuls():
    reason = _why_in_no_format(operation)
    dtype = "" if reason else _format_of(operation, compiled)
    rows.append(Finding(operation.where.path, dtype=dtype, reason=reason, flops=flops))
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


def asked_recipes(graph: Graph) -> tuple[str, ...]:
  """Returns the names of the recipes that the policies of matmuls ask for."""
  marks = (
    operation.where.marked(mark)
    for operation, *_ in graph.matmuls()
    for mark in (RECIPE, NOT_IN["format"])
  )
  return tuple(dict.fromkeys(mark.partition(":")[0] for mark in marks if mark is not None))


def _format_of(matmul: Operation, compiled: str) -> str:
  """Returns the name of the format of a matmul, and whether the format is emulated."""
  recipe = matmul.where.marked(RECIPE)
  name = str(matmul.operands[0].dtype) if recipe is None else recipe.rpartition(":")[0]
  return f"{name}, emulated" if _is_emulated(matmul, compiled) else name


def _is_emulated(matmul: Operation, compiled: str) -> bool:
  """Whether the operands of a matmul are dequantised before it."""
  # Formats with one scale have a mark. Formats with blocks have a primitive of their own.
  if matmul.eqn.primitive is not block_dot_p:
    return EMULATED in matmul.where.scopes
  if matmul.eqn.params["native"] is None:
    return True
  # The compiled program says what runs. Otherwise judge by the hardware of this process.
  if compiled:
    return _OF_CUDNN not in compiled
  device = jax.devices()[0]
  hardware = hardware_of(device.platform, getattr(device, "compute_capability", None))
  is_float4 = matmul.operands[0].dtype == jnp.float4_e2m1fn
  return ("nvfp4" if is_float4 else "mxfp8") not in hardware.dtypes


def residual_bytes(graph: Graph) -> Mapping[str, int]:
  """Returns the bytes that the forward pass computes and the backward pass uses, by dtype."""
  nbytes = collections.Counter[str]()
  for operation in graph.operations:
    if operation.where.direction == "forward":
      # A tuple of results may be a residual in part.
      for v in filter(_is_residual, operation.results):
        # A value in a loop is stacked over its iterations.
        nbytes[str(v.dtype)] += v.nbytes * operation.times
  return dict(nbytes.most_common())


def _is_residual(value: Value) -> bool:
  """Whether another pass uses a value that the forward pass computes."""
  # An argument of the same size is in memory anyway, such as a parameter that enters `scaled`.
  source = moved_from(value)
  if source.kind == "argument" and source.nbytes == value.nbytes:
    return False
  return any(consumer.where.direction != "forward" for consumer in value.consumers)
