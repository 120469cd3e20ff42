"""`mpjax.audit`: the precision of each operation of a function, and the causes of float32."""

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.lax import Precision

from mpjax._autocast.matmuls import OF_INPUTS
from mpjax._autocast.precision import asked_precision
from mpjax._autocast.scopes import REGION, region_in
from mpjax._core.errors import check_call
from mpjax._core.types import FLOAT32, Args, Function, Kwargs, Leaf, P, is_low_precision
from mpjax._diagnose.audit.leaks import find_leaks
from mpjax._diagnose.audit.lossy import find_lossy
from mpjax._diagnose.audit.not_entered import find_kernels
from mpjax._diagnose.audit.report import AuditReport
from mpjax._diagnose.audit.tables import (
  asked_recipes,
  find_formats,
  find_modules,
  find_operations,
  residual_bytes,
)
from mpjax._diagnose.call import Call
from mpjax._diagnose.parameter_scopes import name_by_parameters, parameter_trees
from mpjax._diagnose.report import Advance, Pending, percent
from mpjax._jaxpr.count import sums_few_products
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import NOT_IN, Direction
from mpjax._jaxpr.reader import is_object, warn_not_entered
from mpjax._policy.active import AUDIT, FULL_PRECISION
from mpjax._policy.audit_record import AuditRecord
from mpjax._policy.policy import EXACT_FLOAT32

_COSTLY = 0.05
"""The share of FLOPs above which a note names a module for its matmuls that stay in float32."""

_FIX = "Write mpjax.audit(step)(state, batch): the arguments come in a second call."


@check_call("mpjax.audit(fn)", fix=_FIX)
def audit(fn: Callable[P, Any]) -> Callable[P, AuditReport]:
  """Report the precision of each operation of a function.

  The result takes the arguments of `fn`, or `jax.ShapeDtypeStruct` instead of arrays: `fn` is
  traced, and nothing is computed. `fn` may be a model, a loss, its gradient or an entire training
  step, jitted or not, with or without a policy. docs/audit.md defines leaks, and float32 on
  purpose.

  Args:
    fn: a function of trees of arrays.

  Returns:
    A function with the signature of `fn` that returns an `AuditReport`.

  Raises:
    MpjaxTypeError: `fn` is no function, or a Linen model instead of its `apply`.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def fn(params, x):
  ...   return (x @ params["kernel"] + params["table"]) @ params["kernel"]
  >>> half = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  >>> params = {"kernel": half, "table": jax.ShapeDtypeStruct((8, 8), "float32")}
  >>> report = mpjax.audit(fn)(params, half)
  >>> report.half_share, report.leaks[0].operation, report.leaks[0].cause
  (0.5, 'add', 'params/table')
  """
  return Pending("mpjax.audit(fn)", fn, _report, _FIX)


def _report(fn: Function, args: Args, kwargs: Kwargs, _advance: Advance) -> AuditReport:
  """Returns the report of a call."""

  # Other leaves, such as `train=True`, are passed as they are.
  def is_traced(x: Leaf) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")

  # The record collects modules and rules, and with it models mark their operations.
  record = AuditRecord()
  call = Call(args, kwargs, "mpjax.audit(fn)", is_traced)
  with AUDIT(record):
    program = call.traced(fn).program
    arguments = call.arguments(fn)
  graph = Graph(program, [argument.name for argument in arguments])
  parameters = {x.name for x in arguments if x.is_parameter}
  if not parameters:
    # Neither names nor classes say so. Parameters are the leaves of the trees that have the operand
    # of a matmul at the path of its module. `str.startswith` takes a tuple of prefixes.
    trees = tuple(parameter_trees(graph))
    parameters = {x.name for x in arguments if x.name.startswith(trees)}
  # Operations in plain functions get the module of the parameter that they use.
  name_by_parameters(graph, [x.module if x.name in parameters else () for x in arguments])
  for operation in graph.computing():
    # The report counts an unknown primitive as one operation, and cannot show those in its jaxprs.
    # An object of JAX cannot be changed, and `find_kernels` lists it.
    if operation.step.is_unknown and not is_object(operation.eqn):
      warn_not_entered(operation.eqn, "mpjax.audit", "What it runs is not shown.")
  kernels = find_kernels(graph)
  every = collections.Counter[tuple[Direction, str]]()
  for operation, dtype, count in graph.matmuls():
    every[operation.where.direction, str(dtype)] += count
  for kernel in kernels:
    every[kernel.direction, kernel.dtype] += kernel.flops
  # Kernels without an estimate have 0 FLOPs.
  flops = {key: n for key, n in every.items() if n}
  leaks, on_purpose = find_leaks(graph, record, parameters)
  return AuditReport(
    flops=flops,
    accumulation=_flops_by_accumulation(graph),
    residual_bytes=residual_bytes(graph),
    notes=tuple(_notes(graph, record, flops)),
    leaks=leaks,
    kernels=kernels,
    on_purpose=on_purpose,
    lossy=find_lossy(graph),
    recipes=asked_recipes(graph),
    formats=find_formats(graph),
    modules=find_modules(graph, record, parameters),
    operations=find_operations(graph),
    rules={rule: (n, record.hidden.get(rule, 0)) for rule, n in record.rules.items()},
  )


def _flops_by_accumulation(graph: Graph) -> dict[str, int]:
  """Returns the FLOPs of matmuls in low precision by the dtype in which they say that they add."""
  flops = collections.Counter[str]()
  for operation, dtype, count in graph.matmuls():
    # A float32 matmul adds in float32.
    if not is_low_precision(dtype):
      continue
    # Only a `DotAlgorithm` and a preset have this attribute, no `Precision`.
    stated = getattr(operation.eqn.params.get("precision"), "accumulation_type", None)
    # The result dtype is `preferred_element_type`, in which XLA adds. A low-precision result leaves
    # the accumulator to the backend.
    result = operation.results[0].dtype
    if stated is not None:
      name = str(jnp.dtype(stated))
    elif result is not None and is_low_precision(result):
      name = "backend default"
    else:
      name = str(result)
    flops[name] += count
  return {dtype: n for dtype, n in flops.items() if n}


def _notes(
  graph: Graph, record: AuditRecord, flops: Mapping[tuple[Direction, str], int]
) -> Iterator[str]:
  """Yields sentences about a missing loss scale, costly float32, and limits of the figures."""
  # Float16 has no numbers below 2^-25, about 3e-8. The record notes whether a loss scale was used.
  if ("backward", "float16") in flops and "loss scale" not in record.uses:
    yield (
      "Float16 gradients without a loss scale: those below 3e-8 become 0. Wrap the optimizer in "
      "mpjax.loss_scaling, and differentiate mpjax.scaled(loss_fn, opt_state)."
    )
  total, by_default = sum(flops.values()), 0
  kept = collections.Counter[tuple[str, str, str]]()
  for operation, dtype, count in graph.matmuls():
    asked = asked_precision(operation.eqn.params.get("precision", Precision.HIGHEST))
    if dtype == FLOAT32 and not asked:
      by_default += count
    # The rewriter marks each matmul that it keeps in float32 with the reason.
    reason = operation.where.marked(NOT_IN["low"])
    if reason is None and FULL_PRECISION in operation.where.scopes:
      reason = "it is inside mpjax.full_precision"
    if dtype == FLOAT32 and asked == "highest" and reason is not None:
      kept[operation.where.path, reason, _cure_of_kept(operation, reason)] += count
  if by_default:
    yield (
      f"{percent(by_default / total)} of the matmuls' FLOPs are in float32 of default precision: "
      "TF32 on GPUs since Ampere, one bfloat16 pass on TPUs. The policy "
      f'"{EXACT_FLOAT32}" and precision="highest" multiply float32 as float32.'
    )
  # Only a function with low precision has matmuls that a policy keeps in float32.
  is_mixed = any(is_low_precision(jnp.dtype(dtype)) for _, dtype in flops)
  for (path, reason, cure), count in kept.items() if is_mixed else ():
    if count > _COSTLY * total:
      yield (
        f"{path or 'A matmul'}: {percent(count / total)} of the matmuls' FLOPs are in float32 of "
        f"the highest precision, because {reason}. {cure}"
      )
  # A jaxpr does not say how often a `while` runs, or which branch.
  if not all(operation.step.certain for operation, *_ in graph.matmuls()):
    yield "A while loop counts as one iteration, and each branch of a cond as taken."


def _cure_of_kept(matmul: Operation, reason: str) -> str:
  """Returns the sentence that makes a matmul faster, which a policy keeps in float32."""
  region = matmul.where.marked(REGION)
  policy = None if region is None else region_in(region).policy
  # A matmul of few products, as of coordinates, loses detail and gains no speed.
  if policy is not None and reason == OF_INPUTS and not sums_few_products(matmul.eqn):
    return f"If they need no float32, cast them: x.astype(jnp.{policy.compute_dtype.name})."
  return 'A policy with precision="default" multiplies them in TF32 or bfloat16.'
