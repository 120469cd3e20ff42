"""`mpjax.audit`: the precision of each operation of a function, and the causes of float32."""

import collections
import dataclasses
import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import Precision

from mpjax._autocast.matmuls import OF_INPUTS
from mpjax._autocast.precision import asked_precision
from mpjax._autocast.scopes import REGION, policy_of
from mpjax._core.errors import MpjaxAssertionError, check_call
from mpjax._core.types import FLOAT32, Args, Function, Kwargs, Leaf, P, is_low_precision
from mpjax._diagnose.audit.collectives import compiled_collectives
from mpjax._diagnose.audit.findings import DTYPES, Finding, summed_over_layers
from mpjax._diagnose.audit.leaks import find_leaks
from mpjax._diagnose.audit.lossy import find_lossy
from mpjax._diagnose.audit.not_entered import UNKNOWN, find_kernels, is_unknown_in_float32
from mpjax._diagnose.audit.tables import (
  asked_recipes,
  find_formats,
  find_modules,
  find_operations,
  residual_bytes,
)
from mpjax._diagnose.call import Argument, Call, name_by_parameters, parameter_trees
from mpjax._diagnose.paths import unnumbered
from mpjax._diagnose.report import MOST, Advance, Pending, Report, Section, amount, percent, rest
from mpjax._jaxpr.count import sums_few_products
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import NOT_IN, Direction
from mpjax._jaxpr.reader import is_object, warn_not_entered
from mpjax._policy.audit_record import AUDIT, AuditRecord
from mpjax._policy.full_precision import FULL_PRECISION
from mpjax._policy.policy import EXACT_FLOAT32
from mpjax._policy.rules import Rule, glob_of

_TABLES = {
  "kernels": ("Kernels, which are not entered", "module, operation, dtype, estimate, line"),
  "on_purpose": ("Float32 on purpose", "module, because of, FLOPs"),
  "lossy": ("Low precision where float32 is safer", "module, operation, pass, line, risk"),
  "modules": ("Modules", "module, params, activations, gradients, FLOPs, decided by"),
  "formats": ("Formats of matmuls", "module, FLOPs, format, in no format because"),
  "collectives": ("Between devices", "module, operation, dtype, bytes, times"),
}
"""The heading and the columns of the table of each field, in the order of the page."""

_8_BIT, _16_BIT, _WIDE = (1,), (2,), (4, 8, 16)
_LOW = (*_8_BIT, *_16_BIT)
"""The sizes of floating and complex dtypes, in bytes."""

_MOST_DTYPES = 2
"""The most dtypes of a cell."""

_COSTLY = 0.05
"""The share of FLOPs above which a note names a module for its matmuls that stay in float32."""

_SENSITIVITY = "What its roundings do to the result: mpjax.sensitivity(fn)(*args)."


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Report):
  """The report of `mpjax.audit`. It prints as a page of 80 columns.

  Args:
    flops: floating-point operations of matmuls, convolutions and kernels by pass and dtype. Kernels
      count by their `cost_estimate`, in the dtype of their largest operand.
    accumulation: FLOPs of low-precision matmuls and convolutions, by the accumulation dtype that
      they state; `BACKEND_DEFAULT` if they state none.
    residual_bytes: bytes that the forward pass keeps for the backward pass, by dtype.
    notes: sentences about the limits of the figures.
    leaks: float32 operations where low precision was asked for, the costliest first.
    kernels: operations that are not entered, such as `pallas_call`, and objects of JAX.
    on_purpose: matmuls that are float32 because a rule, or the code, asks for it.
    lossy: operations in low precision for which float32 would be safer.
    recipes: the names of the recipes that policies ask for.
    formats: each matmul and its format, or why it is in none; () where nothing asks for a format.
    collectives: the collectives of a compiled program by module; () without `compiled=`.
    modules: dtypes and FLOPs by module. The module with the most FLOPs comes first.
    operations: how often each primitive runs in each dtype, and the bytes of its results. The dtype
      is that of its widest floating operand, so that a cast has the dtype before it.
    rules: the number of modules that each rule picked, and that it left to an earlier rule.

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
  lossy: tuple[Finding, ...]
  recipes: tuple[str, ...]
  formats: tuple[Finding, ...]
  collectives: tuple[Finding, ...]
  modules: tuple[Finding, ...]
  operations: tuple[Finding, ...]
  rules: Mapping[Rule, tuple[int, int]]

  @property
  def half_share(self) -> float:
    """The share of the FLOPs in low precision, 8 bits included.

    It is NaN without matmuls, and if a kernel with float32 operands does not estimate its cost.
    """
    # A share of known FLOPs alone would look better than it is.
    unknown = any(map(is_unknown_in_float32, self.kernels))
    return math.nan if unknown else _share(self.flops, _LOW)

  @property
  def format_share(self) -> float:
    """The share of the matmuls' FLOPs in a format, emulated or not; NaN without matmuls."""
    total = sum(self.flops.values())
    return sum(row.flops for row in self._in_a_format) / total if total else math.nan

  @property
  def _in_a_format(self) -> list[Finding]:
    return [row for row in self.formats if not row.reason]

  def assert_no_leaks(self, ignore: Iterable[str] = ()) -> None:
    """Raises an error if there is a leak, for tests.

    Code that does not ask for low precision has no leaks. A test should therefore also assert that
    `half_share` is large.

    Args:
      ignore: globs over the paths of leaks that do not count.

    Raises:
      MpjaxAssertionError: there is a leak.
    """
    # A string is an iterable of characters, none of which is a useful glob.
    globs = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    leaks = [leak for leak in self.leaks if not _is_matched(leak.path, globs)]
    if not leaks:
      return
    first = leaks[0]
    raise MpjaxAssertionError(
      "AuditReport.assert_no_leaks(...)",
      expected="no float32 operation where low precision was asked for",
      got=f"{len(leaks)}: the costliest is {first.operation} in {first.path or 'the root'}, "
      f"float32 because {first.reason}",
      fix=f"{first.fix} If it is meant to be: assert_no_leaks(ignore=[{glob_of(first.path)!r}]).",
    )

  def sections(self) -> Sequence[Section]:
    # A leak in twelve equal layers is one entry.
    leaks = summed_over_layers(self.leaks)
    is_low = any(is_low_precision(jnp.dtype(row.dtype)) for row in self.operations)
    return (
      Section.cut(
        "Precision audit",
        "pass, matmuls, 16 bit, ≤ 8 bit, float32",
        self._passes(),
        self._first_lines(),
      ),
      Section(
        "Float32 where low precision was asked for",
        (*_leak_lines(leaks, self._total), *rest(leaks)),
      ),
      # Empty sections are not printed.
      *(self._table(field) for field in _TABLES),
      self._operations(),
      Section("Rules", (*self._rule_lines(),)),
      Section("", (_SENSITIVITY,) if is_low else ()),
    )

  @property
  def _total(self) -> int:
    """The FLOPs of all operations; 1 without any, as a denominator."""
    return max(sum(self.flops.values()), 1)

  def _first_lines(self) -> list[str]:
    lines = [self._headline()]
    if self.formats:
      formats = dict.fromkeys(row.dtype for row in self._in_a_format) or self.recipes
      lines.append(f"{percent(self.format_share)} of the matmuls' FLOPs in {' and '.join(formats)}")
    if self.accumulation:
      lines.append(f"Accumulation: {self._accumulation()}")
    if self.residual_bytes:
      sizes = ", ".join(f"{dtype} {amount(n, 'B')}" for dtype, n in self.residual_bytes.items())
      lines.append(f"Kept for the backward pass: {sizes}")
    return [*lines, *self.notes]

  def _headline(self) -> str:
    """Returns the share of low precision, and the number of unknown kernels and of leaks."""
    parts = ["No matmuls or convolutions"]
    if self.flops:
      parts = [f"{percent(_share(self.flops, _LOW))} of the matmuls' FLOPs in low precision"]
    # A headline with a share must say what the share leaves out.
    unknown = sum(kernel.times for kernel in self.kernels if kernel.reason == UNKNOWN)
    if unknown:
      parts.append(f"{_number_of(unknown, 'kernel')} not counted")
    parts.append(_number_of(len(self.leaks), "leak"))
    return ", ".join(parts)

  def _accumulation(self) -> str:
    """Returns the accumulation dtype of low-precision matmuls, with shares if there are several."""
    if len(self.accumulation) == 1:
      return next(iter(self.accumulation))
    # Matmuls that nothing uses have 0 FLOPs.
    total = max(sum(self.accumulation.values()), 1)
    by_flops = sorted(self.accumulation.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {percent(flops / total)}" for name, flops in by_flops)
    return f"{shares} of FLOPs in low precision"

  def _passes(self) -> list[tuple[str, ...]]:
    """Returns a row for each pass: its FLOPs, and the shares of 16 bits, 8 bits and float32."""
    rows: list[tuple[str, ...]] = []
    # The passes in the order of the program, each once.
    for direction in dict.fromkeys(direction for direction, _ in self.flops):
      flops = {key: n for key, n in self.flops.items() if key[0] == direction}
      shares = (percent(_share(flops, sizes)) for sizes in (_16_BIT, _8_BIT, _WIDE))
      rows.append((direction, amount(sum(flops.values()), "FLOP"), *shares))
    return rows

  def _table(self, field: str) -> Section:
    """Returns the section of the rows in a field."""
    title, columns = _TABLES[field]
    rows: list[list[str]] = []
    for row in summed_over_layers(getattr(self, field)):
      # A table takes those cells that its columns name.
      cells = _cells(row, self._total)
      cells["decided by"] = self._numbered(row.reason)
      rows.append([cells[column] for column in columns.split(", ")])
    return Section.cut(title, columns, rows)

  def _numbered(self, reason: str) -> str:
    """Returns the number of the rule that is a reason, which "Rules" shows; or the reason."""
    # A finding holds the `repr` of its rule. The table shows the number, since rules are long.
    numbers = {repr(rule): number for number, rule in enumerate(self.rules, 1)}
    if reason in numbers:
      return f"rule {numbers[reason]}"
    # Rules that differ in numbers, and decide modules that do, have one row.
    alike = [str(n) for code, n in numbers.items() if unnumbered(code) == unnumbered(reason)]
    return f"rules {', '.join(alike)}" if alike else reason

  def _rule_lines(self) -> Iterator[str]:
    """Yields how many modules each rule decides, and the rule."""
    for number, (rule, (picked, hidden)) in enumerate(self.rules.items(), 1):
      count = f"decides {_number_of(picked, 'module')}" if picked else "never used"
      earlier = f", an earlier rule wins in {_number_of(hidden, 'module')}" if hidden else ""
      yield f"{number}. {count}{earlier}"
      yield f"   {rule}"

  def _operations(self) -> Section:
    """Returns the section of operations by dtype. Those with the most bytes come first."""
    groups: dict[str, list[Finding]] = {}
    for row in self.operations:
      groups.setdefault(row.operation, []).append(row)
    # Operations with many bytes of results cost most memory traffic.
    by_bytes = sorted(groups.items(), key=lambda group: -sum(row.nbytes for row in group[1]))
    rows = [
      (name, *(_runs_and_bytes(group, sizes) for sizes in (_16_BIT, _8_BIT, _WIDE)))
      for name, group in by_bytes
    ]
    columns = "operation, 16 bit, ≤ 8 bit, float32"
    return Section.cut("Operations: runs, and bytes of results", columns, rows)


def _runs_and_bytes(rows: Iterable[Finding], sizes: Collection[int]) -> str:
  """Returns the runs and bytes of operations in dtypes of some sizes; "" if there are none."""
  # The columns are sizes, as in the table of passes.
  rows = [row for row in rows if jnp.dtype(row.dtype).itemsize in sizes]
  if not rows:
    return ""
  times, nbytes = sum(row.times for row in rows), sum(row.nbytes for row in rows)
  return f"{amount(times)}, {amount(nbytes, 'B')}"


def _cells(row: Finding, total: int) -> dict[str, str]:
  """Returns the cells of a row by column; `total` is the FLOPs of all operations."""
  cells = {
    "module": row.path,
    "operation": row.operation,
    "pass": row.direction,
    "line": str(row.source or "unknown line"),
    "dtype": row.dtype,
    "format": row.dtype,
    "risk": f"{row.dtype}: {row.reason}",
    "FLOPs": percent(row.flops / total),
    "bytes": amount(row.nbytes, "B"),
    "times": str(row.times),
    "estimate": row.reason or amount(row.flops, "FLOP"),
    "because of": row.reason,
    "in no format because": row.reason,
  }
  for name in DTYPES:
    # The dtypes with the most elements are first.
    dtypes = getattr(row, name)[:_MOST_DTYPES]
    cells[name] = " ".join(dtypes).replace("float", "f")  # As jaxprs write them: "bf16".
  return cells


def _leak_lines(leaks: Sequence[Finding], total: int) -> Iterator[str]:
  """Yields the lines of the first leaks: their place and cost, their cause, and their cure."""
  for number, leak in enumerate(leaks[:MOST], 1):
    place = f"{leak.path} · {leak.operation} · {leak.direction} · {leak.source or 'unknown line'}"
    if leak.flops:
      cost = f"{percent(leak.flops / total)} of FLOPs"
    else:
      cost = amount(leak.nbytes, "B of results")
    yield f"{number}. {place} · {cost}, operations: {leak.times}"
    yield f"   {leak.dtype}: float32 because {leak.reason}"
    yield f"   {leak.fix}"


def _number_of(count: int, noun: str) -> str:
  """Returns a count with its noun: "no leaks", "1 leak", "2 leaks"."""
  plural = "" if count == 1 else "s"
  return f"{count or 'no'} {noun}{plural}"


def _is_matched(path: str, globs: Iterable[str]) -> bool:
  return any(fnmatch.fnmatchcase(path, glob) for glob in globs)


def _share(flops: Mapping[tuple[Direction, str], int], sizes: Collection[int]) -> float:
  """Returns the share of FLOPs in dtypes of some sizes in bytes; NaN without FLOPs."""
  total = sum(flops.values())
  if total == 0:
    return math.nan
  return sum(n for (_, dtype), n in flops.items() if jnp.dtype(dtype).itemsize in sizes) / total


_FIX = "Write mpjax.audit(step)(state, batch): the arguments come in a second call."


@check_call("mpjax.audit(fn)", fix=_FIX)
def audit(
  fn: Callable[P, Any], *, compiled: jax.stages.Compiled | None = None
) -> Callable[P, AuditReport]:
  """Report the precision of each operation of a function.

  The result takes the arguments of `fn`, or `jax.ShapeDtypeStruct` instead of arrays: `fn` is
  traced, and nothing is computed. `fn` may be a model, a loss, its gradient or an entire training
  step, jitted or not, with or without a policy. docs/audit.md defines leaks, and float32 on
  purpose.

  Args:
    fn: a function of trees of arrays.
    compiled: the result of `jax.jit(fn).lower(*args).compile()`. The report then lists the
      collectives that XLA's partitioner wrote. XLA for CPUs sends low precision as float32.

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
  # XLA describes a compiled program by its text only.
  text = "" if compiled is None else compiled.as_text() or ""

  def audited(fn: Function, args: Args, kwargs: Kwargs, _: Advance) -> AuditReport:
    return _audited(fn, args, kwargs, text)

  return Pending("mpjax.audit(fn)", fn, audited, _FIX)


def _audited(fn: Function, args: Args, kwargs: Kwargs, compiled: str) -> AuditReport:
  """Returns the report of a call; `compiled` is the text of the compiled program, or ""."""
  # The record collects modules and rules, and with it models mark their operations.
  record = AuditRecord()
  call = Call(args, kwargs, "mpjax.audit(fn)", _is_array_or_shape)
  with AUDIT(record):
    program, _ = call.traced(fn)
    arguments = call.arguments(fn)
  graph = Graph(program, [argument.name for argument in arguments])
  # Operations in plain functions get the module of the parameter that they use.
  parameters = _parameters(graph, arguments)
  modules = [x.module if x.name in parameters else () for x in arguments]
  name_by_parameters(graph, modules)
  return _report(graph, record, parameters, compiled)


def _is_array_or_shape(x: Leaf) -> bool:
  """Whether a leaf is traced. Others, such as `train=True`, are passed as they are."""
  return hasattr(x, "shape") and hasattr(x, "dtype")


def _parameters(graph: Graph, arguments: Sequence[Argument]) -> frozenset[str]:
  """Returns the names of the arguments that are parameters.

  If neither names nor classes say so, they are the leaves of the trees that have the operand of a
  matmul at the path of its module.
  """
  named = frozenset(x.name for x in arguments if x.is_parameter)
  if named:
    return named
  # `str.startswith` takes a tuple of prefixes. An empty one matches nothing.
  trees = tuple(parameter_trees(graph))
  return frozenset(x.name for x in arguments if x.name.startswith(trees))


def _report(
  graph: Graph, record: AuditRecord, parameters: frozenset[str], compiled: str
) -> AuditReport:
  """Returns the report of a graph; `compiled` is the text of the compiled program, or ""."""
  # The report counts an unknown primitive as one operation.
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
    lossy=find_lossy(graph),
    recipes=asked_recipes(graph),
    formats=find_formats(graph, compiled),
    collectives=compiled_collectives(compiled, graph) if compiled else (),
    modules=find_modules(graph, record, parameters),
    operations=find_operations(graph),
    rules={rule: (n, record.hidden.get(rule, 0)) for rule, n in record.rules.items()},
  )


def _warn_of_unknown(graph: Graph) -> None:
  """Warns of unknown primitives that hold jaxprs, whose operations the report cannot show."""
  for operation in graph.computing():
    # An object of JAX cannot be changed, and `find_kernels` lists it.
    if operation.step.is_unknown and not is_object(operation.eqn):
      warn_not_entered(operation.eqn, "mpjax.audit", "What it runs is not shown.")


def _flops_by_dtype(graph: Graph, kernels: Iterable[Finding]) -> dict[tuple[Direction, str], int]:
  flops = collections.Counter[tuple[Direction, str]]()
  for operation, dtype, count in graph.matmuls():
    flops[operation.where.direction, str(dtype)] += count
  for kernel in kernels:
    flops[kernel.direction, kernel.dtype] += kernel.flops
  # Kernels without an estimate have 0 FLOPs.
  return {key: n for key, n in flops.items() if n}


BACKEND_DEFAULT = "backend default"
"""The accumulation of a matmul that states no dtype for its sums."""


def _flops_by_accumulation(graph: Graph) -> dict[str, int]:
  """Returns the FLOPs of matmuls in low precision by their accumulation dtype."""
  flops = collections.Counter[str]()
  for operation, dtype, count in graph.matmuls():
    # A float32 matmul adds in float32.
    if is_low_precision(dtype):
      flops[_accumulation_of(operation)] += count
  return {dtype: n for dtype, n in flops.items() if n}


def _accumulation_of(operation: Operation) -> str:
  """Returns the dtype in which a matmul states that it adds products."""
  # Only a `DotAlgorithm` and a preset have this attribute, no `Precision`.
  # The result dtype is `preferred_element_type`, in which XLA adds. A low-precision result leaves
  # the accumulator to the backend.
  stated = getattr(operation.eqn.params.get("precision"), "accumulation_type", None)
  if stated is not None:
    return str(jnp.dtype(stated))
  result = operation.results[0].dtype
  is_low = result is not None and is_low_precision(result)
  return BACKEND_DEFAULT if is_low else str(result)


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
  policy = None if region is None else policy_of(region)
  # A matmul of few products, as of coordinates, loses detail and gains no speed.
  if policy is not None and reason == OF_INPUTS and not sums_few_products(matmul.eqn):
    return f"If they need no float32, cast them: x.astype(jnp.{policy.compute_dtype.name})."
  return 'A policy with precision="default" multiplies them in TF32 or bfloat16.'
