"""The table of an audit by module: dtypes of parameters, activations and gradients, and FLOPs."""

import collections
import re
from collections.abc import Mapping
from typing import NamedTuple

from mpjax._core.audit_record import AuditedModule, AuditRecord
from mpjax._diagnostics.audit.causes import is_low, is_wide
from mpjax._diagnostics.audit.costs import dtypes_of
from mpjax._diagnostics.audit.graph import Graph, Value
from mpjax._diagnostics.audit.leaks import marked_path, module_path
from mpjax._jaxprs.autocast.scopes import FLOAT8
from mpjax._jaxprs.count import flops_of


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


class _Row:
  def __init__(self) -> None:
    self.parameters: dict[Value, None] = {}
    self.activations: list[Value] = []
    self.gradients: list[Value] = []
    self.flops: collections.Counter[str] = collections.Counter()
    self.module: AuditedModule | None = None


def module_rows(
  graph: Graph, record: AuditRecord, parameters: frozenset[str]
) -> tuple[ModuleRow, ...]:
  """Returns the modules with matmuls, in the order in which they run.

  Args:
    graph: the graph.
    record: what was noted of modules under a policy.
    parameters: the names of arguments that are parameters; if there are none, all may be.
  """
  found: dict[str, _Row] = {}
  for operation in graph.computing():
    row = found.setdefault(module_path(operation.where), _Row())
    forward = operation.where.direction == "forward"
    if forward:
      row.parameters |= {
        v: None
        for v in operation.operands
        if v.kind == "argument" and (v.label in parameters or not parameters)
      }
    if FLOAT8 not in operation.where.scopes or flops_of(operation.eqn):  # Its scaling is no result.
      (row.activations if forward else row.gradients).extend(operation.results)
    row.module = row.module or record.modules.get(marked_path(operation.where) or "")
    operands = operation.operands[:2]
    if operation.flops and all(is_low(v) or is_wide(v) for v in operands):
      names = [str(v.dtype) for v in operands if is_wide(v)] or [str(operands[0].dtype)]
      row.flops[names[0]] += operation.flops
  # What has a module around it that is shown, and no matmul of its own, is a detail of that one.
  kept = {path: row for path, row in found.items() if row.flops}
  return _collapsed({path: _finished(path, row) for path, row in kept.items()})


def _finished(path: str, row: _Row) -> ModuleRow:
  module = row.module
  return ModuleRow(
    path=path,
    modules=1,
    parameters=dtypes_of(row.parameters),
    activations=dtypes_of(row.activations),
    gradients=dtypes_of(row.gradients),
    flops=dict(row.flops.most_common()),
    rule="" if module is None or module.rule is None else repr(module.rule),
    own_dtype="" if module is None or module.own_dtype is None else module.own_dtype,
  )


def without_numbers(path: str) -> str:
  """Returns a path with "*" for each number in it, such as "block_*/attention"."""
  return re.sub(r"\d+", "*", path)


def _collapsed(rows: Mapping[str, ModuleRow]) -> tuple[ModuleRow, ...]:
  """Returns one row for modules that differ in the numbers of their paths and in nothing shown."""
  groups: dict[tuple[object, ...], list[ModuleRow]] = {}
  for path, row in rows.items():
    pattern = without_numbers(path)
    dtypes = (*map(frozenset, row[2:5]), frozenset(row.flops))
    groups.setdefault((pattern, *dtypes, *row[6:]), []).append(row)
  made = []
  for key, group in groups.items():
    total: collections.Counter[str] = collections.Counter()
    for row in group:
      total.update(row.flops)
    path = group[0].path if len(group) == 1 else str(key[0])
    made.append(group[0]._replace(path=path, modules=len(group), flops=dict(total.most_common())))
  return tuple(made)
