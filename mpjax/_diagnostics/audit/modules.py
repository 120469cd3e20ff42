"""The tables of an audit: what costs time or memory, and by module which dtypes and FLOPs."""

import collections
import re
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from mpjax._core.active import AuditRecord
from mpjax._core.dtypes import is_float8, is_low_precision
from mpjax._diagnostics.parameter_scopes import moved_from
from mpjax._jaxprs.autocast.scopes import FLOAT8, NOT_IN
from mpjax._jaxprs.count import matmul_sizes
from mpjax._jaxprs.graph import Graph, Operation, Value
from mpjax._jaxprs.locations import MODULE, Source
from mpjax._jaxprs.primitives import Holds

Row = TypeVar("Row", bound=NamedTuple)


def summed(rows: Iterable[Row], *counts: str) -> tuple[Row, ...]:
  """Returns one row for those that differ in `counts` alone, which are added; the largest first."""
  sums: dict[Row, Row] = {}
  for row in rows:
    alike = row._replace(**dict.fromkeys(counts, 0))
    before = sums.get(alike, alike)
    added = {name: getattr(before, name) + getattr(row, name) for name in counts}
    sums[alike] = row._replace(**added)
  return tuple(sorted(sums.values(), key=lambda row: [-getattr(row, name) for name in counts]))


def without_numbers(path: str) -> str:
  """Returns a path with "*" for each number in it, such as "block_*/attention"."""
  return re.sub(r"\d+", "*", path)


class ModuleRow(NamedTuple):
  """A module, or several that differ in their number only.

  Args:
    path: of the module; "*" for the numbers of several that are the same.
    modules: how many they are.
    parameters: the dtypes of the parameters.
    activations: those of what the forward pass computes.
    gradients: those of what the backward pass computes.
    flops: of matmuls and convolutions by dtype, in all passes.
    rule: the rule that decided; "" if none did.
    own_dtype: the `dtype` of the module itself, which the policy overruled; "" for none.
  """

  path: str
  modules: int
  parameters: tuple[str, ...]
  activations: tuple[str, ...]
  gradients: tuple[str, ...]
  flops: Mapping[str, int]
  rule: str
  own_dtype: str


def module_rows(
  graph: Graph, record: AuditRecord, parameters: frozenset[str]
) -> tuple[ModuleRow, ...]:
  """Returns the modules with matmuls, in the order in which they run.

  Where no argument is known to be one of `parameters`, all may be.
  """
  modules: dict[str, list[Operation]] = {}
  for operation in graph.computing():
    modules.setdefault(operation.where.path, []).append(operation)
  flops = {path: collections.Counter[str]() for path in modules}
  for operation, dtype, count in graph.matmuls():
    flops[operation.where.path][str(dtype)] += count
  rows: dict[Hashable, ModuleRow] = {}
  for path, operations in modules.items():
    # What has a module around it that is shown, and no matmul of its own, is a detail of that one.
    if not any(flops[path].values()):
      continue
    forward = [each for each in operations if each.where.direction == "forward"]
    backward = [each for each in operations if each.where.direction != "forward"]
    read = dict.fromkeys(moved_from(v) for each in forward for v in each.operands)
    arguments = [v for v in read if v.kind == "argument"]
    marks = (each.where.marked(MODULE) or "" for each in operations)
    module = next((record.modules[mark] for mark in marks if mark in record.modules), None)
    row = ModuleRow(
      path=path,
      modules=1,
      parameters=dtypes_of(v for v in arguments if v.label in parameters or not parameters),
      activations=_computed(forward),
      gradients=_computed(backward),
      flops=dict((+flops[path]).most_common()),
      rule="" if module is None or module.rule is None else repr(module.rule),
      own_dtype="" if module is None else module.own_dtype or "",
    )
    dtypes = row.parameters, row.activations, row.gradients, row.flops
    alike = without_numbers(path), *map(frozenset, dtypes), row.rule, row.own_dtype
    if other := rows.get(alike):
      both = flops[path] + collections.Counter(other.flops)
      count = other.modules + 1
      row = other._replace(
        path=without_numbers(path), modules=count, flops=dict(both.most_common())
      )
    rows[alike] = row
  return tuple(rows.values())


def _computed(operations: Iterable[Operation]) -> tuple[str, ...]:
  """Returns the dtypes that operations compute, but for the scaling of matmuls in float8."""
  shown = (each for each in operations if FLOAT8 not in each.where.scopes or each.facts.flops)
  return dtypes_of(v for each in shown for v in each.results)


def dtypes_of(values: Iterable[Value]) -> tuple[str, ...]:
  """Returns the floating dtypes of values, that of the most elements first."""
  sizes: collections.Counter[str] = collections.Counter()
  for v in values:
    if v.dtype is not None and jnp.issubdtype(v.dtype, jnp.inexact):
      sizes[np.dtype(v.dtype).name] += v.size
  return tuple(name for name, _ in sizes.most_common())


class Float8Matmul(NamedTuple):
  """The matmuls of a module that are in float8, or are not for one reason.

  Args:
    path: of the module or named scope.
    sizes: rows, columns and the length of the sum of the first one: M, N and K.
    reason: why they are not in float8; "" if they are.
    flops: floating-point operations, in all passes.
  """

  path: str
  sizes: tuple[int, int, int]
  reason: str
  flops: int


def find_float8(graph: Graph) -> tuple[Float8Matmul, ...]:
  """Returns the matmuls of a graph, the costliest first; () if nothing asks for float8."""
  rows: list[Float8Matmul] = []
  first: dict[tuple[str, str], tuple[int, int, int]] = {}
  asked = False
  for operation, _, flops in graph.matmuls():
    path, reason = operation.where.path, _not_float8(operation)
    asked = asked or not reason or operation.where.marked(NOT_IN["float8"]) is not None
    sizes = first.setdefault((path, reason), matmul_sizes(operation.eqn))
    rows.append(Float8Matmul(path, sizes, reason, flops))
  return summed(rows, "flops") if asked else ()


def _not_float8(operation: Operation) -> str:
  """Returns why a matmul is not in float8; "" if it is."""
  operands = operation.operands[:2]
  if all(v.dtype is not None and v.dtype.itemsize == 1 for v in operands):
    return ""
  if noted := operation.where.marked(NOT_IN["float8"]):
    return noted
  if FLOAT8 in operation.where.scopes:
    return 'weight_grad="half"'
  wide = any(v.is_wide for v in operands)
  return "it is in float32" if wide else "its policy has no float8"


class Misfit(NamedTuple):
  """A low-precision matmul whose sizes Tensor Cores have to pad.

  Args:
    path: of the module or named scope.
    sizes: rows, columns and the length of the sum: M, N and K.
    padded: the same as multiples of 8, or of 16 for float8.
    source: the line; None if unknown.
    flops: floating-point operations of all such matmuls there.
  """

  path: str
  sizes: tuple[int, int, int]
  padded: tuple[int, int, int]
  source: Source | None
  flops: int


def find_misfits(graph: Graph) -> tuple[Misfit, ...]:
  """Returns the low-precision matmuls whose sizes do not fit Tensor Cores, the costliest first."""
  rows: list[Misfit] = []
  for operation, dtype, flops in graph.matmuls():
    unit = 16 if is_float8(dtype) else 8
    m, n, k = sizes = matmul_sizes(operation.eqn)
    padded = (-(-m // unit) * unit, -(-n // unit) * unit, -(-k // unit) * unit)
    if flops and is_low_precision(dtype) and padded != sizes:
      rows.append(Misfit(operation.where.path, sizes, padded, operation.where.source, flops))
  return summed(rows, "flops")


class OpaqueKernel(NamedTuple):
  """A kernel written by hand: what it computes is in no count."""

  path: str  # of the module or named scope, and of the kernel
  name: str  # of the primitive
  dtypes: tuple[str, ...]  # of its floating operands, that of the most elements first


def find_opaque(graph: Graph) -> tuple[OpaqueKernel, ...]:
  """Returns the kernels that the graph does not enter, in the order they run."""
  kernels = (each for each in graph.computing() if each.facts.holds is Holds.KERNEL)
  return summed(OpaqueKernel(x.where.path, x.name, dtypes_of(x.operands)) for x in kernels)


def residuals(graph: Graph) -> dict[str, int]:
  """Returns the bytes that the forward pass computes and the backward pass takes, by dtype."""
  nbytes: collections.Counter[str] = collections.Counter()
  for operation in graph.operations:
    for v in operation.results if operation.where.direction == "forward" else ():
      if any(each.where.direction != "forward" for each in v.consumers):
        nbytes[str(v.dtype)] += v.nbytes * operation.times
  return dict(nbytes.most_common())
