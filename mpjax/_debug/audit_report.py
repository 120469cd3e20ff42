"""`audit`: which precision each operation of a function has, and what brought float32 in."""

import collections
import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._core.errors import MpjaxAssertionError, check_call
from mpjax._core.types import Args, Function, Kwargs, P, is_low_precision
from mpjax._debug.arguments import Call, name_by_parameters, parameter_trees
from mpjax._debug.audit_tables import find_float8, find_modules, residual_bytes
from mpjax._debug.collectives import compiled_collectives
from mpjax._debug.findings import DTYPES, Finding, summed_over_layers
from mpjax._debug.kernels import UNKNOWN, find_kernels, is_unknown_in_float32
from mpjax._debug.leaks import find_leaks
from mpjax._debug.lossy import find_lossy
from mpjax._debug.report import MOST, Advance, Pending, Report, Section, amount, percent, rest
from mpjax._debug.risks import Risk, risk_lines, risks_of
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import Direction
from mpjax._jaxpr.reader import inner_jaxprs, is_object, warn_not_entered
from mpjax._policy.active import AUDIT, AuditRecord
from mpjax._policy.rules import Rule

_LISTS = {
  "kernels": ("Kernels, which are not entered", "module, operation, dtype, estimate, line"),
  "on_purpose": ("Float32 on purpose", "module, because of, FLOPs"),
  "lossy": ("Low precision where float32 is safer", "module, operation, pass, line, risk"),
  "modules": ("Modules", "module, params, activations, gradients, FLOPs, decided by"),
  "float8": ("float8", "module, FLOPs, not in float8 because"),
  "collectives": ("Between devices", "module, operation, dtype, bytes, times"),
}
"""The heading of a list, and its columns."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Report):
  """What `mpjax.audit` found. It prints as a page of 80 columns.

  Args:
    flops: floating-point operations of matmuls, convolutions and kernels by pass and dtype. Kernels
      count by their `cost_estimate`, in the dtype of their largest operand.
    accumulation: FLOPs of low-precision matmuls and convolutions, by the accumulation dtype that
      they state; `BACKEND_DEFAULT` if they state none.
    residual_bytes: bytes that the forward pass keeps for the backward pass, by dtype.
    notes: what else is to be known, a sentence each.
    leaks: float32 operations where low precision was asked for, the costliest first.
    kernels: operations that are not entered, such as `pallas_call`, and objects of JAX.
    on_purpose: matmuls that are float32 because a rule, or the code, asks for it.
    risks: low-precision values that reach an operation which magnifies their error.
    lossy: operations in low precision for which float32 would be safer.
    float8: each matmul, and why it is not in float8; () where nothing asks for float8.
    collectives: what devices send to one another, by module; () unless `compiled=` was given.
    modules: dtypes and FLOPs by module, that of the most FLOPs first.
    rules: how many modules each rule picked, and how many it left to an earlier one.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> fn = mpjax.autocast(lambda x, w: jnp.tanh(x @ w), "mixed_bfloat16")
  >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
  >>> audit = mpjax.audit(fn)(x, x)
  >>> audit.half_share, audit.flops
  (1.0, {('forward', 'bfloat16'): 1024})
  """

  flops: Mapping[tuple[Direction, str], int]
  accumulation: Mapping[str, int]
  residual_bytes: Mapping[str, int]
  notes: tuple[str, ...]
  leaks: tuple[Finding, ...]
  kernels: tuple[Finding, ...]
  on_purpose: tuple[Finding, ...]
  risks: tuple[Risk, ...]
  lossy: tuple[Finding, ...]
  float8: tuple[Finding, ...]
  collectives: tuple[Finding, ...]
  modules: tuple[Finding, ...]
  rules: Mapping[Rule, tuple[int, int]]

  @property
  def half_share(self) -> float:
    """The share of the FLOPs in low precision, 8 bits included.

    It is NaN without matmuls, and if a kernel with float32 operands does not estimate its cost.
    """
    unknown = any(map(is_unknown_in_float32, self.kernels))
    return math.nan if unknown else _share(self.flops, 1, 2)

  @property
  def float8_share(self) -> float:
    """The share of the matmuls' FLOPs in float8, or in a recipe's 8 bits; NaN without matmuls."""
    return _share(self.flops, 1)

  def assert_no_leaks(self, ignore: Iterable[str] = ()) -> None:
    """Raises if a float32 operation is where low precision was asked for, for a test of yours.

    Where nothing asks for low precision there are none: assert that `half_share` is large, too.

    Args:
      ignore: globs over the paths of leaks that do not count.

    Raises:
      MpjaxAssertionError: there is one.
    """
    globs = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    leaks = [x for x in self.leaks if not any(fnmatch.fnmatchcase(x.path, g) for g in globs)]
    if leaks:
      first = leaks[0]
      raise MpjaxAssertionError(
        "AuditReport.assert_no_leaks(...)",
        expected="no float32 operation where low precision was asked for",
        got=f"{len(leaks)}: the costliest is {first.operation} in {first.path or 'the root'}, "
        f"float32 because {first.reason}",
        fix=f"{first.fix} If it is meant to be: assert_no_leaks(ignore=[{first.path!r}]).",
      )

  def sections(self) -> Sequence[Section]:
    leaks = summed_over_layers(self.leaks)
    lists = [self._list(name, *texts) for name, texts in _LISTS.items()]
    rules = [
      (repr(rule), str(picked or "never used"), str(hidden or ""))
      for rule, (picked, hidden) in self.rules.items()
    ]
    passes, lines = self._passes(), self._first_lines()
    return (
      Section.cut("Precision audit", "pass, matmuls, 16 bit, 8 bit, float32", passes, lines),
      Section("Float32 where low precision was asked for", (*self._causes(leaks), *rest(leaks))),
      Section("Risks", risk_lines(self.risks, MOST)),
      *lists,
      Section.cut("Rules", "rule, modules, earlier rule wins", rules),
    )

  @property
  def _total(self) -> int:
    return max(sum(self.flops.values()), 1)

  def _first_lines(self) -> list[str]:
    counted = f"{percent(_share(self.flops, 1, 2))} of the matmuls' FLOPs in low precision"
    parts = [counted if self.flops else "No matmuls or convolutions"]
    unknown, leaks = sum(x.times for x in self.kernels if x.reason == UNKNOWN), len(self.leaks)
    if unknown:
      parts.append(f"{unknown} kernel{'s' * (unknown != 1)} not counted")
    parts.append(f"{leaks or 'no'} leak{'s' * (leaks != 1)}")
    lines = [", ".join(parts)]
    if self.float8:
      lines.append(f"{percent(self.float8_share)} of the matmuls' FLOPs in float8")
    if self.accumulation:
      lines.append(f"Accumulation: {self._accumulation()}")
    if self.residual_bytes:
      sizes = ", ".join(f"{dtype} {amount(n, 'B')}" for dtype, n in self.residual_bytes.items())
      lines.append(f"Kept for the backward pass: {sizes}")
    return [*lines, *self.notes]

  def _accumulation(self) -> str:
    """Returns what matmuls in low precision add products in, with shares if there are several."""
    if len(self.accumulation) == 1:
      return next(iter(self.accumulation))
    total = max(sum(self.accumulation.values()), 1)
    by_flops = sorted(self.accumulation.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {percent(flops / total)}" for name, flops in by_flops)
    return f"{shares} of FLOPs in low precision"

  def _passes(self) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for direction in dict.fromkeys(direction for direction, _ in self.flops):
      flops = {key: n for key, n in self.flops.items() if key[0] == direction}
      shares = (percent(_share(flops, *nbytes)) for nbytes in ((2,), (1,), (4, 8)))
      rows.append((direction, amount(sum(flops.values()), "FLOP"), *shares))
    return rows

  def _causes(self, leaks: Sequence[Finding]) -> list[str]:
    lines: list[str] = []
    for number, x in enumerate(leaks[:MOST], 1):
      flops, nbytes = f"{percent(x.flops / self._total)} of FLOPs", amount(x.nbytes, "B of results")
      where = f"{x.path} · {x.operation} · {x.direction} · {x.source or 'unknown line'}"
      lines.append(f"{number}. {where} · {flops if x.flops else nbytes}, operations: {x.times}")
      lines += [f"   {x.dtype}: float32 because {x.reason}", f"   {x.fix}"]
    return lines

  def _list(self, name: str, title: str, columns: str) -> Section:
    """Returns the section of the findings in the field `name`."""
    rows: list[list[str]] = []
    for x in summed_over_layers(getattr(self, name)):
      cells = {
        "module": x.path,
        "operation": x.operation,
        "pass": x.direction,
        "line": str(x.source or "unknown line"),
        "dtype": x.dtype,
        "risk": f"{x.dtype}: {x.reason}",
        "FLOPs": percent(x.flops / self._total),
        "bytes": amount(x.nbytes, "B"),
        "times": str(x.times),
        "estimate": x.reason or amount(x.flops, "FLOP"),
        # The two dtypes of the most elements, as jaxprs write them.
        **{y: " ".join(getattr(x, y)[:2]).replace("float", "f") for y in DTYPES},
      }
      rows.append([cells.get(column, x.reason) for column in columns.split(", ")])
    return Section.cut(title, columns, rows)


def _share(flops: Mapping[tuple[Direction, str], int], *nbytes: int) -> float:
  """Returns the share of FLOPs in dtypes of so many bytes; NaN without FLOPs."""
  part = sum(n for (_, dtype), n in flops.items() if jnp.dtype(dtype).itemsize in nbytes)
  return part / sum(flops.values()) if any(flops.values()) else math.nan


_FIX = "Write mpjax.audit(step)(state, batch): the arguments come in a second call."


@check_call("mpjax.audit(fn)", fix=_FIX)
def audit(
  fn: Callable[P, Any], *, compiled: jax.stages.Compiled | None = None
) -> Callable[P, AuditReport]:
  """Returns a function that says which precision each operation of `fn` has.

  It takes the arguments of `fn`, or `jax.ShapeDtypeStruct` instead of arrays: `fn` is traced, and
  nothing is computed. `fn` may be a model, a loss, its gradient or an entire training step, jitted
  or not, with or without a policy. docs/audit.md says what counts as a leak, and as on purpose.

  Args:
    fn: a function of trees of arrays.
    compiled: what `jax.jit(fn).lower(*args).compile()` returned, to show the collectives that
      XLA's partitioner wrote. A CPU sends those of low precision in float32.

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

  def audited(fn: Function, args: Args, kwargs: Kwargs, advance: Advance) -> AuditReport:
    # Arrays and `jax.ShapeDtypeStruct`s are traced. All else is passed as it is, as
    # `mpjax.autocast` does it: `model.apply(variables, x, train=True)` asks if `train` is true.
    is_traced = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")  # noqa: E731
    record, call = AuditRecord(), Call(args, kwargs, "mpjax.audit(fn)", is_traced)
    with AUDIT(record):
      program, arguments = call.traced(fn)[0], call.arguments(fn)
    graph = Graph(program, [x.name for x in arguments])
    # Where a name or a class tells which are parameters, nothing is guessed.
    trees = () if any(x.is_parameter for x in arguments) else tuple(parameter_trees(graph))
    parameters = frozenset(x.name for x in arguments if x.is_parameter or x.name.startswith(trees))
    name_by_parameters(graph, [x.module if x.name in parameters else () for x in arguments])
    return _report(graph, record, parameters, (compiled and compiled.as_text()) or "")

  return Pending("mpjax.audit(fn)", fn, audited, _FIX)


def _report(
  graph: Graph, record: AuditRecord, parameters: frozenset[str], compiled: str
) -> AuditReport:
  """Returns the report of a graph; `compiled` is the text of the compiled program, or ""."""
  _warn_of_unknown(graph)
  kernels = find_kernels(graph)
  flops = _flops_by_dtype(graph, kernels)
  leaks, on_purpose = find_leaks(graph, record, parameters)
  return AuditReport(
    flops=flops,
    accumulation=_flops_by_accumulation(graph),
    residual_bytes=residual_bytes(graph),
    notes=tuple(_notes(graph, record, flops)),
    leaks=leaks,
    kernels=kernels,
    on_purpose=on_purpose,
    risks=tuple(risks_of(graph, parameters)),
    lossy=find_lossy(graph),
    float8=find_float8(graph),
    collectives=compiled_collectives(compiled, graph),
    modules=find_modules(graph, record, parameters),
    rules={rule: (n, record.hidden.get(rule, 0)) for rule, n in record.rules.items()},
  )


def _warn_of_unknown(graph: Graph) -> None:
  """Warns of primitives whose jaxprs are not entered, since nobody knows how they run them."""
  for x in graph.computing():
    if inner_jaxprs(x.eqn) is None and not is_object(x.eqn):
      warn_not_entered(x.eqn, "mpjax.audit", "What it runs is not shown.")


def _flops_by_dtype(graph: Graph, kernels: Iterable[Finding]) -> dict[tuple[Direction, str], int]:
  flops = collections.Counter[tuple[Direction, str]]()
  for operation, dtype, count in graph.matmuls():
    flops[operation.where.direction, str(dtype)] += count
  for kernel in kernels:
    flops[kernel.direction, kernel.dtype] += kernel.flops
  return dict(+flops)


BACKEND_DEFAULT = "backend default"
"""The accumulation of a matmul that states no dtype for its sums."""


def _flops_by_accumulation(graph: Graph) -> dict[str, int]:
  """Returns the FLOPs of matmuls in low precision by what they add products in."""
  flops = collections.Counter[str]()
  for operation, dtype, count in graph.matmuls():
    if is_low_precision(dtype):
      flops[_accumulation_of(operation)] += count
  return dict(+flops)


def _accumulation_of(operation: Operation) -> str:
  """Returns the dtype in which a matmul states that it adds products."""
  # A `DotAlgorithm` or a preset. A `Precision` says nothing about sums.
  stated = getattr(operation.eqn.params.get("precision"), "accumulation_type", None)
  if stated is not None:
    return str(jnp.dtype(stated))
  result = operation.results[0].dtype
  is_low = result is not None and is_low_precision(result)
  return BACKEND_DEFAULT if is_low else str(result)


def _notes(
  graph: Graph, record: AuditRecord, flops: Mapping[tuple[Direction, str], int]
) -> Iterator[str]:
  """Yields what a reader of the figures has to know."""
  if ("backward", "float16") in flops and "loss scale" not in record.uses:
    yield (
      "Float16 gradients without a loss scale: those below 3e-8 become 0. Wrap the optimizer in "
      "mpjax.loss_scaling, and differentiate with mpjax.value_and_grad."
    )
  if not all(operation.step.certain for operation, *_ in graph.matmuls()):
    yield "A while loop counts as one iteration, and each branch of a cond as taken."
