"""The tables of an audit: what costs time or memory, and by module which dtypes and FLOPs."""

import collections
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

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

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def fn(x):
  ...   with jax.named_scope("head"):
  ...     return x @ x
  >>> row, = mpjax.audit(fn)(jax.ShapeDtypeStruct((8, 8), "bfloat16")).modules
  >>> row.path, row.activations, row.flops
  ('head', ('bfloat16',), {'bfloat16': 1024})
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
  """Returns the modules with matmuls, in the order in which they run."""
  # Where no argument is known to be a parameter, all may be.
  modules: dict[str, list[Operation]] = {}
  for operation in graph.computing():
    modules.setdefault(operation.where.path, []).append(operation)
  flops = {path: collections.Counter[str]() for path in modules}
  for operation, dtype, count in graph.matmuls():
    flops[operation.where.path][str(dtype)] += count

  def row(path: str) -> ModuleRow:
    forward = [each for each in modules[path] if each.where.direction == "forward"]
    backward = [each for each in modules[path] if each.where.direction != "forward"]
    marks = {each.where.marked(MODULE): None for each in modules[path]}
    module = next((record.modules[mark] for mark in marks if mark in record.modules), None)
    read = dict.fromkeys(moved_from(v) for each in forward for v in each.operands)
    arguments = [v for v in read if v.kind == "argument"]
    return ModuleRow(
      path=path,
      modules=1,
      parameters=dtypes_of(v for v in arguments if v.label in parameters or not parameters),
      activations=dtypes_of(_results(forward)),
      gradients=dtypes_of(_results(backward)),
      flops=dict((+flops[path]).most_common()),
      rule="" if module is None or module.rule is None else repr(module.rule),
      own_dtype="" if module is None else module.own_dtype or "",
    )

  # What has a module around it that is shown, and no matmul of its own, is a detail of that one.
  rows = [row(path) for path in modules if any(flops[path].values())]
  return tuple(map(_one_row, together(rows, _shown)))


def _results(operations: Iterable[Operation]) -> Iterator[Value]:
  """Yields what operations compute, but for the scaling of matmuls in float8."""
  for each in operations:
    if FLOAT8 not in each.where.scopes or each.facts.flops:
      yield from each.results


def _one_row(group: Sequence[ModuleRow]) -> ModuleRow:
  """Returns one row for modules that differ in the numbers of their paths alone."""
  first, flops = group[0], collections.Counter[str]()
  for row in group:
    flops.update(row.flops)
  path = first.path if len(group) == 1 else without_numbers(first.path)
  return first._replace(path=path, modules=len(group), flops=dict(flops.most_common()))


def _shown(row: ModuleRow) -> Hashable:
  """Returns what the table shows of a module, but its path and its FLOPs."""
  dtypes = row.parameters, row.activations, row.gradients, row.flops
  return (*map(frozenset, dtypes), row.rule, row.own_dtype)


def without_numbers(path: str) -> str:
  """Returns a path with "*" for each number in it, such as "block_*/attention"."""
  return re.sub(r"\d+", "*", path)


class HasPath(Protocol):
  @property
  def path(self) -> str: ...


Row = TypeVar("Row", bound=HasPath)


def together(rows: Iterable[Row], shown: Callable[[Row], Hashable]) -> list[list[Row]]:
  """Returns what is the same but for the numbers of paths, such as those of layers, together."""
  groups: dict[Hashable, list[Row]] = {}
  for row in rows:
    groups.setdefault((without_numbers(row.path), shown(row)), []).append(row)
  return list(groups.values())


class Float8Matmul(NamedTuple):
  """The matmuls of a module that are in float8, or are not for one reason.

  Args:
    path: of the module or named scope.
    sizes: rows, columns and the length of the sum of the first one: M, N and K.
    reason: why they are not in float8; "" if they are.
    flops: floating-point operations, in all passes.

  >>> import jax, mpjax
  >>> fn = mpjax.autocast(lambda x, w: x @ w, "mixed_float8")
  >>> x, w = jax.ShapeDtypeStruct((8, 64), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
  >>> matmul, = mpjax.audit(fn)(x, w).float8
  >>> matmul.reason
  'too small to gain: K=64, N=32'
  """

  path: str
  sizes: tuple[int, int, int]
  reason: str
  flops: int


def find_float8(graph: Graph) -> tuple[Float8Matmul, ...]:
  """Returns the matmuls of a graph, the costliest first; () if nothing asks for float8."""
  rows: dict[tuple[str, str], Float8Matmul] = {}
  asked = False
  for operation, _, flops in graph.matmuls():
    path, reason = operation.where.path, _not_float8(operation)
    asked = asked or not reason or operation.where.marked(NOT_IN["float8"]) is not None
    row = rows.get((path, reason)) or Float8Matmul(path, matmul_sizes(operation.eqn), reason, 0)
    rows[path, reason] = row._replace(flops=row.flops + flops)
  return tuple(sorted(rows.values(), key=lambda row: -row.flops)) if asked else ()


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

  >>> import jax, jax.numpy as jnp, mpjax
  >>> half = jax.ShapeDtypeStruct((8, 10), "bfloat16"), jax.ShapeDtypeStruct((10, 16), "bfloat16")
  >>> fit, = mpjax.audit(jnp.matmul)(*half).misfits
  >>> fit.sizes, fit.padded
  ((8, 16, 10), (8, 16, 16))
  """

  path: str
  sizes: tuple[int, int, int]
  padded: tuple[int, int, int]
  source: Source | None
  flops: int


def find_misfits(graph: Graph) -> tuple[Misfit, ...]:
  """Returns the low-precision matmuls whose sizes do not fit Tensor Cores, the costliest first."""
  flops: collections.Counter[Misfit] = collections.Counter()
  for operation, dtype, count in graph.matmuls():
    unit = 16 if is_float8(dtype) else 8
    m, n, k = sizes = matmul_sizes(operation.eqn)
    padded = (-(-m // unit) * unit, -(-n // unit) * unit, -(-k // unit) * unit)
    if count and is_low_precision(dtype) and padded != sizes:
      flops[Misfit(operation.where.path, sizes, padded, operation.where.source, 0)] += count
  return tuple(fit._replace(flops=count) for fit, count in flops.most_common())


class OpaqueKernel(NamedTuple):
  """A kernel written by hand: what it computes is in no count."""

  path: str  # of the module or named scope, and of the kernel
  name: str  # of the primitive
  dtypes: tuple[str, ...]  # of its floating operands, that of the most elements first
  times: int


def find_opaque(graph: Graph) -> tuple[OpaqueKernel, ...]:
  """Returns the kernels that the graph does not enter, in the order they run."""
  counts: collections.Counter[OpaqueKernel] = collections.Counter()
  for each in graph.computing():
    if each.facts.holds is Holds.KERNEL:
      kernel = OpaqueKernel(each.where.path, each.name, dtypes_of(each.operands), 0)
      counts[kernel] += each.times
  return tuple(kernel._replace(times=n) for kernel, n in counts.items())


def residuals(graph: Graph) -> dict[str, int]:
  """Returns the bytes that the forward pass computes and the backward pass takes, by dtype."""
  nbytes: collections.Counter[str] = collections.Counter()
  for operation in graph.operations:
    for v in operation.results if operation.where.direction == "forward" else ():
      if any(each.where.direction != "forward" for each in v.consumers):
        nbytes[str(v.dtype)] += v.nbytes * operation.times
  return dict(nbytes.most_common())


def dtypes_of(values: Iterable[Value]) -> tuple[str, ...]:
  """Returns the floating dtypes of values, that of the most elements first."""
  sizes: collections.Counter[str] = collections.Counter()
  for v in values:
    if v.dtype is not None and jnp.issubdtype(v.dtype, jnp.inexact):
      sizes[np.dtype(v.dtype).name] += v.size
  return tuple(name for name, _ in sizes.most_common())
