"""`audit`: which precision each operation of a function has, and what brought float32 in."""

import collections
from collections.abc import Callable
from typing import Any, ParamSpec

import jax

from mpjax._core.active import AUDIT, AuditRecord
from mpjax._core.errors import check_call
from mpjax._core.types import Args, Function, Kwargs
from mpjax._diagnostics.arguments import check_function, trace
from mpjax._diagnostics.audit.audit_report import AuditReport
from mpjax._diagnostics.audit.compiled import compiled_collectives, find_collectives, kernels
from mpjax._diagnostics.audit.leaks import Causes, Expectations, find_leaks
from mpjax._diagnostics.audit.modules import (
  find_float8,
  find_misfits,
  find_opaque,
  module_rows,
  residuals,
)
from mpjax._diagnostics.audit.risks import find_risks
from mpjax._diagnostics.parameter_scopes import name_by_parameters, parameter_trees
from mpjax._diagnostics.report import Pending
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.locations import Direction
from mpjax._jaxprs.reader import inner_jaxprs, warn_not_entered

P = ParamSpec("P")

_FIX = "Write mpjax.audit(step)(state, batch): the arguments come in a second call."


@check_call("mpjax.audit(fn)", fix=_FIX)
def audit(
  fn: Callable[P, Any], *, compiled: jax.stages.Compiled | None = None
) -> Callable[P, AuditReport]:
  """Returns a function that says which precision each operation of `fn` has.

  It takes the arguments of `fn`, or `jax.ShapeDtypeStruct` instead of arrays: `fn` is traced, and
  nothing is computed. What is no array, such as `train=True`, is passed as it is. `fn` may be a
  model, a loss, its gradient or an entire training step, jitted or not, with or without a policy.

  A leak is a matmul, or an elementwise operation on a large array, that runs in float32 where low
  precision was asked for: by the policy of its module, by autocast, or, in a function that casts by
  hand, by the low-precision dtype that it uses most. Its cause is the parameter, argument,
  constant or operation that brought float32 in. What is float32 on purpose is listed apart.

  FLOPs are those of matmuls and convolutions that a result depends on: two for each multiplication
  and addition, times the length of a scan; `while` and each branch of a `cond` count once. A
  kernel of Pallas is not entered; its line says what it gets.

  Args:
    fn: a function of trees of arrays.
    compiled: what `jax.jit(fn).lower(*args).compile()` returned, to show its kernels too, and the
      collectives that XLA's partitioner wrote. A CPU sends those of low precision in float32.

  Returns:
    A function with the signature of `fn` that returns an `AuditReport`.

  Raises:
    MpjaxTypeError: `fn` is no function, or a Linen model without its variables.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def fn(params, x):
  ...   return (x @ params["kernel"] + params["table"]) @ params["kernel"]
  >>> half = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  >>> params = {"kernel": half, "table": jax.ShapeDtypeStruct((8, 8), "float32")}
  >>> report = mpjax.audit(fn)(params, half)
  >>> report.half_share
  0.5
  >>> report.leaks[0].operation, report.leaks[0].cause.name
  ('add', 'params/table')
  """
  check_function(fn, "mpjax.audit(fn)", _FIX)

  def call(*args: P.args, **kwargs: P.kwargs) -> AuditReport:
    return _audited(fn, args, kwargs, "" if compiled is None else compiled.as_text() or "")

  return Pending(call, "audit", fn)


def _audited(fn: Function, args: Args, kwargs: Kwargs, hlo: str) -> AuditReport:
  record = AuditRecord()
  with AUDIT(record):
    program, names = trace(fn, args, kwargs, "mpjax.audit(fn)")
  graph = Graph(program, [x.name for x in names])
  trees = tuple(parameter_trees(graph))
  parameters = frozenset(x.name for x in names if x.is_parameter or x.name.startswith(trees))
  owners = {v: tuple(v.label.split("/")[1:-1]) for v in graph.arguments if v.label in parameters}
  name_by_parameters(graph, owners)
  for each in graph.computing():
    if inner_jaxprs(each.eqn) is None:
      warn_not_entered(each.eqn, "mpjax.audit", "What it runs is not shown.")
  expectations = Expectations(graph, record)
  causes = Causes(graph, parameters, expectations.neutral)
  leaks, on_purpose = find_leaks(graph, causes, expectations)
  flops: collections.Counter[tuple[Direction, str]] = collections.Counter()
  tf32 = 0
  for operation, dtype, count in graph.matmuls():
    flops[operation.where.direction, str(dtype)] += count
    if dtype.itemsize >= 4 and "HIGHEST" not in str(operation.eqn.params.get("precision")):
      tf32 += count
  return AuditReport(
    flops=dict(flops),
    tf32_flops=tf32,
    operations=dict(collections.Counter(each.name for each in graph.computing()).most_common()),
    residual_bytes=residuals(graph),
    leaks=leaks,
    on_purpose=on_purpose,
    risks=find_risks(graph),
    modules=module_rows(graph, record, parameters),
    misfits=find_misfits(graph),
    collectives=compiled_collectives(hlo, graph) if hlo else find_collectives(graph),
    float8=find_float8(graph),
    opaque=find_opaque(graph),
    rules=dict(record.rules),
    hidden_rules=dict(record.hidden),
    kernels=kernels(hlo),
    certain=all(operation.step.certain for operation, *_ in graph.matmuls()),
    scaled=record.scaled,
  )
