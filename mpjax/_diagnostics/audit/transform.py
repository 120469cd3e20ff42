"""`audit`: which precision each operation of a function has, and what brought float32 in."""

import collections
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import jax

from mpjax._core.audit_record import AUDIT, AuditRecord
from mpjax._core.errors import MpjaxAssertionError, check_call
from mpjax._diagnostics.arguments import Argument, check_function, trace
from mpjax._diagnostics.audit.causes import Causes, Kind, is_low, is_wide
from mpjax._diagnostics.audit.compiled_text import kernels
from mpjax._diagnostics.audit.costs import (
  find_collectives,
  find_misfits,
  find_opaque,
  find_round_trips,
  residuals,
)
from mpjax._diagnostics.audit.float8 import find_float8
from mpjax._diagnostics.audit.graph import Graph
from mpjax._diagnostics.audit.leaks import Expectations, find_leaks
from mpjax._diagnostics.audit.modules import module_rows
from mpjax._diagnostics.audit.owners import name_by_parameters
from mpjax._diagnostics.audit.result import Findings
from mpjax._diagnostics.audit.risks import find_risks
from mpjax._diagnostics.audit.sections import sections
from mpjax._diagnostics.report import Json, Pending, Report, Section
from mpjax._jaxprs.locations import Direction

P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Findings, Report):
  """What `mpjax.audit` found. It prints as a page of 80 columns.

  Args:
    flops: floating-point operations of matmuls and convolutions by pass and dtype.
    tf32_flops: those of float32 matmuls that do not ask for precision="highest": a GPU since Ampere
      rounds their operands to TF32.
    operations: how often each primitive is written, loops counted once.
    residual_bytes: bytes that the forward pass keeps for the backward pass, by dtype.
    leaks: float32 operations where low precision was asked for, the costliest first.
    on_purpose: matmuls that are float32 because a rule, or the code, asks for it.
    risks: operations in low precision for which float32 would be safer.
    modules: dtypes and FLOPs by module.
    misfits: low-precision matmuls whose sizes Tensor Cores have to pad.
    collectives: what devices send to one another.
    round_trips: casts that undo one another.
    float8: the matmuls in float8 and, with the reason, those that are not; () where nothing asks
      for it.
    rules: how many modules each rule picked.
    hidden_rules: how many modules a rule matches that an earlier one picked.
    opaque: kernels written by hand, which are not entered.
    kernels: what it is compiled to; () unless `compiled=` was given.
    certain: whether each operation's count is known: not so inside `while` and `cond`.
    scaled: whether a loss was multiplied by a loss scale of mpjax.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> fn = mpjax.autocast(lambda x, w: jnp.tanh(x @ w), "mixed_bfloat16")
  >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
  >>> audit = mpjax.audit(fn)(x, x)
  >>> audit.half_share, audit.flops
  (1.0, {('forward', 'bfloat16'): 1024})
  """

  def assert_half_share(self, least: float) -> None:
    """Raises unless a share of the matmuls' FLOPs is in low precision, for a test of yours.

    Args:
      least: the share, 0 to 1.

    Raises:
      MpjaxAssertionError: it is less, or there are no matmuls.
    """
    if not self.half_share >= least:
      raise MpjaxAssertionError(
        "AuditReport.assert_half_share(...)",
        expected=f"at least {least:.2%} of the FLOPs of matmuls in low precision",
        got=f"{self.half_share:.2%}, and {len(self.leaks)} leaks",
        fix="Print the audit. " + (self.leaks[0].fix if self.leaks else "See what is on purpose."),
      )

  def assert_no_leaks(self, ignore: Iterable[str] = ()) -> None:
    """Raises if a float32 operation is where low precision was asked for, for a test of yours.

    A function in which nothing asks for low precision has no leaks: a test that is to notice a
    policy that was forgotten calls `assert_half_share` too.

    Args:
      ignore: globs over the paths of leaks that do not count.

    Raises:
      MpjaxAssertionError: there is one.
    """
    globs = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    found = [x for x in self.leaks if not any(fnmatch.fnmatchcase(x.path, g) for g in globs)]
    if found:
      first = found[0]
      raise MpjaxAssertionError(
        "AuditReport.assert_no_leaks(...)",
        expected="no float32 operation where low precision was asked for",
        got=f"{len(found)}: the costliest is {first.operation} in {first.path or 'the root'} "
        f"({first.source}), float32 because of {first.cause.kind} {first.cause.name}",
        fix=f"{first.fix} If it is meant to be: assert_no_leaks(ignore=[{first.path!r}]).",
      )

  def sections(self) -> Sequence[Section]:
    """Returns what is shown, in order."""
    return sections(self)

  def as_dict(self) -> Mapping[str, Json]:
    """Returns what `to_json` writes; FLOPs and bytes are integers."""
    return {
      "half_share": self.half_share,
      "flops": [
        {"direction": direction, "dtype": dtype, "flops": n}
        for (direction, dtype), n in self.flops.items()
      ],
      "tf32_flops": self.tf32_flops,
      "operations": dict(self.operations),
      "residual_bytes": dict(self.residual_bytes),
      "leaks": [
        {**_plain(x), "source": _text(x.source), "cause": _plain(x.cause)} for x in self.leaks
      ],
      "on_purpose": [_plain(x) for x in self.on_purpose],
      "risks": [_plain(x) for x in self.risks],
      "modules": [_plain(x) for x in self.modules],
      "misfits": [_plain(x) for x in self.misfits],
      "collectives": [_plain(x) for x in self.collectives],
      "round_trips": _plain(self.round_trips),
      "float8": [_plain(x) for x in self.float8],
      "opaque": [_plain(x) for x in self.opaque],
      "rules": [
        {"rule": repr(rule), "modules": n, "hidden": self.hidden_rules.get(rule, 0)}
        for rule, n in self.rules.items()
      ],
      "kernels": [_plain(x) for x in self.kernels],
      "certain": self.certain,
      "scaled": self.scaled,
    }

  def __repr__(self) -> str:
    return f"AuditReport(half_share={self.half_share:.4f}, leaks={len(self.leaks)})"


def _text(x: object) -> str | None:
  return None if x is None else str(x)


def _plain(row: Any) -> dict[str, Json]:
  """Returns the fields of a row as JSON holds them."""
  fields = row._asdict()
  return {
    name: value
    if isinstance(value, (str, int, float, tuple, dict)) and name != "source"
    else _text(value)
    for name, value in fields.items()
  }


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
  constant or operation that brought float32 in. What is float32 on purpose is listed apart: norms,
  softmax and sums never count, nor what a rule, `mpjax.full_precision` or `precision="highest"`
  asks for.

  FLOPs are those of matmuls and convolutions: two for each multiplication and addition, times the
  length of a scan; `while` and each branch of a `cond` count once. Work that `jax.checkpoint`
  repeats is shown apart from the forward pass. What no result depends on is not counted, as a
  compiler drops it: the last matmul of a forward pass of which only the gradient is wanted. A
  kernel of Pallas is not entered; its line says what it gets.

  Args:
    fn: a function of trees of arrays.
    compiled: what `jax.jit(fn).lower(*args).compile()` returned, to show its kernels too.

  Returns:
    A function with the signature of `fn` that returns an `AuditReport`.

  Raises:
    MpjaxTypeError: `fn` is no function, or a Linen model without its variables.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def fn(params, x):
  ...   return (x @ params["kernel"] + params["table"]) @ params["kernel"]
  >>> half = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  >>> params = {"kernel": half, "table": jax.ShapeDtypeStruct((8, 8), "float32")}
  >>> found = mpjax.audit(fn)(params, half)
  >>> found.half_share
  0.5
  >>> found.leaks[0].operation, found.leaks[0].cause.name
  ('add', 'params/table')
  """
  check_function(fn, "mpjax.audit(fn)", _FIX)

  def call(*args: P.args, **kwargs: P.kwargs) -> AuditReport:
    record = AuditRecord()
    with AUDIT(record):
      program, names = trace(fn, args, kwargs, "mpjax.audit(fn)")
    graph = Graph(program, [x.name for x in names])
    name_by_parameters(graph, {x.name for x in names if x.is_parameter})
    return _audited(graph, names, record, compiled)

  return Pending(call, "audit", fn)


def _neutral(expectations: Expectations, record: AuditRecord) -> frozenset[Kind]:
  """Returns what takes the dtype of what it meets, and so is not why something is float32."""
  if not expectations.marked:
    return frozenset()
  more: tuple[Kind, ...] = ("argument",) if record.autocast and not record.modules else ()
  return frozenset(("parameter", "number", *more))


def _audited(
  graph: Graph,
  names: Sequence[Argument],
  record: AuditRecord,
  compiled: jax.stages.Compiled | None,
) -> AuditReport:
  expectations = Expectations(graph, record)
  parameters = frozenset(each.name for each in names if each.is_parameter)
  causes = Causes(graph, parameters, _neutral(expectations, record))
  leaks, on_purpose = find_leaks(graph, causes, expectations)
  flops: collections.Counter[tuple[Direction, str]] = collections.Counter()
  certain, tf32 = True, 0
  for operation in graph.computing():
    operands = operation.operands[:2]
    count = operation.flops if operation.used else None
    if count is None or not all(is_low(v) or is_wide(v) for v in operands):
      continue
    low = [str(v.dtype) for v in operands if is_low(v)]
    wide = [str(v.dtype) for v in operands if is_wide(v)]
    flops[operation.where.direction, (wide or low)[0]] += count
    certain = certain and operation.certain
    if wide and "HIGHEST" not in str(operation.eqn.params.get("precision")):
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
    collectives=find_collectives(graph),
    round_trips=find_round_trips(graph),
    float8=find_float8(graph),
    opaque=find_opaque(graph),
    rules=dict(record.rules),
    hidden_rules=dict(record.hidden),
    kernels=() if compiled is None else kernels(compiled.as_text() or ""),
    certain=certain,
    scaled=record.scaled,
  )
