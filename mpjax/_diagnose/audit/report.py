"""The report of `mpjax.audit`: which operations run in which dtype, and the causes of float32."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from mpjax._core.errors import MpjaxAssertionError
from mpjax._core.types import DType, is_low_precision
from mpjax._diagnose.audit.findings import (
  Format,
  Kernel,
  Leak,
  Lossy,
  Module,
  OnPurpose,
  Primitive,
  Row,
  summed_over_layers,
)
from mpjax._diagnose.audit.not_entered import UNKNOWN
from mpjax._diagnose.paths import unnumbered
from mpjax._diagnose.report import MOST, Report, Section, amount, percent, rest
from mpjax._jaxpr.locations import Direction, Source
from mpjax._policy.rules import Rule, glob_of

_8_BIT, _16_BIT, _WIDE = (1,), (2,), (4, 8, 16)
_LOW = (*_8_BIT, *_16_BIT)
"""The sizes of floating and complex dtypes, in bytes."""

_MOST_DTYPES = 2
"""The most dtypes of a cell."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Report):
  """The report of `mpjax.audit`. It prints as a page of 80 columns.

  Args:
    flops: floating-point operations of matmuls, convolutions and kernels by pass and dtype. Kernels
      count by their `cost_estimate`, in the dtype of their largest operand.
    accumulation: FLOPs of low-precision matmuls and convolutions, by the accumulation dtype that
      they state; "backend default" if they state none.
    residual_bytes: bytes that the forward pass keeps for the backward pass, by dtype.
    notes: sentences about the limits of the figures.
    leaks: float32 operations where low precision was asked for, the costliest first.
    kernels: operations that are not entered, such as `pallas_call`, and objects of JAX.
    on_purpose: matmuls that are float32 because a rule, or the code, asks for it.
    lossy: operations in low precision for which float32 would be safer.
    recipes: the names of the recipes that policies ask for.
    formats: each matmul and its format, or why it is in none; () where nothing asks for a format.
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
  leaks: tuple[Leak, ...]
  kernels: tuple[Kernel, ...]
  on_purpose: tuple[OnPurpose, ...]
  lossy: tuple[Lossy, ...]
  recipes: tuple[str, ...]
  formats: tuple[Format, ...]
  modules: tuple[Module, ...]
  operations: tuple[Primitive, ...]
  rules: Mapping[Rule, tuple[int, int]]

  @property
  def half_share(self) -> float:
    """The share of the FLOPs in low precision, 8 bits included.

    It is NaN without matmuls, and if a kernel with float32 operands does not estimate its cost.
    """
    # A share of known FLOPs alone would look better than it is.
    unknown = (kernel for kernel in self.kernels if kernel.reason == UNKNOWN)
    if not all(is_low_precision(DType(kernel.dtype)) for kernel in unknown):
      return math.nan
    return _share(self.flops, _LOW)

  @property
  def format_share(self) -> float:
    """The share of the matmuls' FLOPs in a format, emulated or not; NaN without matmuls."""
    total = sum(self.flops.values())
    in_a_format = sum(row.flops for row in self.formats if not row.reason)
    return in_a_format / total if total else math.nan

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
    leaks = [
      leak for leak in self.leaks if not any(fnmatch.fnmatchcase(leak.path, glob) for glob in globs)
    ]
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
    # A denominator. Matmuls that nothing uses have 0 FLOPs.
    total = max(sum(self.flops.values()), 1)
    is_low = any(is_low_precision(jnp.dtype(row.dtype)) for row in self.operations)
    sensitivity = "What its roundings do to the result: mpjax.sensitivity(fn)(*args)."
    # Empty sections are not printed.
    return (
      self._passes(),
      Section("Float32 where low precision was asked for", (*self._leak_lines(total),)),
      _table(
        "Kernels, which are not entered",
        self.kernels,
        lambda row: {
          "module": row.path,
          "operation": row.operation,
          "dtype": row.dtype,
          "estimate": row.reason or amount(row.flops, "FLOP"),
          "line": _line(row.source),
        },
      ),
      _table(
        "Float32 on purpose",
        self.on_purpose,
        lambda row: {
          "module": row.path,
          "because of": row.reason,
          "FLOPs": percent(row.flops / total),
        },
      ),
      _table(
        "Low precision where float32 is safer",
        self.lossy,
        lambda row: {
          "module": row.path,
          "operation": row.operation,
          "pass": row.direction,
          "line": _line(row.source),
          "risk": f"{row.dtype}: {row.reason}",
        },
      ),
      _table(
        "Modules",
        self.modules,
        lambda row: {
          "module": row.path,
          "params": _dtypes(row.params),
          "activations": _dtypes(row.activations),
          "gradients": _dtypes(row.gradients),
          "FLOPs": percent(row.flops / total),
          "decided by": self._numbered(row.reason),
        },
      ),
      _table(
        "Formats of matmuls",
        self.formats,
        lambda row: {
          "module": row.path,
          "FLOPs": percent(row.flops / total),
          "format": row.dtype,
          "in no format because": row.reason,
        },
      ),
      self._operations(),
      Section("Rules", (*self._rule_lines(),)),
      Section("", (sensitivity,) if is_low else ()),
    )

  def _passes(self) -> Section:
    """Returns the section with the result in a few lines, and the shares of dtypes by pass."""
    headline = ["No matmuls or convolutions"]
    if self.flops:
      headline = [f"{percent(_share(self.flops, _LOW))} of the matmuls' FLOPs in low precision"]
    # A headline with a share must say what the share leaves out.
    unknown = sum(kernel.times for kernel in self.kernels if kernel.reason == UNKNOWN)
    if unknown:
      headline.append(f"{_number_of(unknown, 'kernel')} not counted")
    headline.append(_number_of(len(self.leaks), "leak"))
    lines = [", ".join(headline)]
    if self.formats:
      formats = dict.fromkeys(row.dtype for row in self.formats if not row.reason) or self.recipes
      lines.append(f"{percent(self.format_share)} of the matmuls' FLOPs in {' and '.join(formats)}")
    if len(self.accumulation) == 1:
      lines.append(f"Accumulation: {next(iter(self.accumulation))}")
    elif self.accumulation:
      total = max(sum(self.accumulation.values()), 1)
      by_flops = sorted(self.accumulation.items(), key=lambda item: -item[1])
      shares = ", ".join(f"{name} {percent(flops / total)}" for name, flops in by_flops)
      lines.append(f"Accumulation: {shares} of FLOPs in low precision")
    if self.residual_bytes:
      sizes = ", ".join(f"{dtype} {amount(n, 'B')}" for dtype, n in self.residual_bytes.items())
      lines.append(f"Kept for the backward pass: {sizes}")
    rows: list[tuple[str, ...]] = []
    # The passes in the order of the program, each once.
    for direction in dict.fromkeys(direction for direction, _ in self.flops):
      flops = {key: n for key, n in self.flops.items() if key[0] == direction}
      shares = (percent(_share(flops, sizes)) for sizes in (_16_BIT, _8_BIT, _WIDE))
      rows.append((direction, amount(sum(flops.values()), "FLOP"), *shares))
    columns = "pass, matmuls, 16 bit, ≤ 8 bit, float32"
    return Section.cut("Precision audit", columns, rows, [*lines, *self.notes])

  def _leak_lines(self, total: int) -> Iterator[str]:
    """Yields the lines of the first leaks: their place and cost, their cause, and their cure."""
    # A leak in twelve equal layers is one entry.
    leaks = summed_over_layers(self.leaks)
    for number, leak in enumerate(leaks[:MOST], 1):
      place = f"{leak.path} · {leak.operation} · {leak.direction} · {_line(leak.source)}"
      if leak.flops:
        cost = f"{percent(leak.flops / total)} of FLOPs"
      else:
        cost = amount(leak.nbytes, "B of results")
      yield f"{number}. {place} · {cost}, operations: {leak.times}"
      yield f"   {leak.dtype}: float32 because {leak.reason}"
      yield f"   {leak.fix}"
    yield from rest(leaks)

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
    groups: dict[str, list[Primitive]] = {}
    for row in self.operations:
      groups.setdefault(row.operation, []).append(row)
    rows: list[tuple[str, ...]] = []
    # Operations with many bytes of results cost most memory traffic.
    for name, group in sorted(groups.items(), key=lambda item: -sum(x.nbytes for x in item[1])):
      cells: list[str] = []
      # The columns are sizes, as in the table of passes.
      for sizes in (_16_BIT, _8_BIT, _WIDE):
        of_size = [row for row in group if jnp.dtype(row.dtype).itemsize in sizes]
        times, nbytes = sum(row.times for row in of_size), sum(row.nbytes for row in of_size)
        cells.append(f"{amount(times)}, {amount(nbytes, 'B')}" if of_size else "")
      rows.append((name, *cells))
    columns = "operation, 16 bit, ≤ 8 bit, float32"
    return Section.cut("Operations: runs, and bytes of results", columns, rows)


def _table(title: str, rows: Iterable[Row], cells: Callable[[Row], Mapping[str, str]]) -> Section:
  """Returns the section of a table, of whose rows `cells` returns the cells by column."""
  table = [cells(row) for row in summed_over_layers(rows)]
  columns = tuple(table[0]) if table else ()
  return Section(title, (), columns, tuple(tuple(each.values()) for each in table), MOST)


def _line(source: Source | None) -> str:
  return str(source or "unknown line")


def _dtypes(names: Sequence[str]) -> str:
  # The dtypes with the most elements are first.
  return " ".join(names[:_MOST_DTYPES]).replace("float", "f")  # As jaxprs write them: "bf16".


def _number_of(count: int, noun: str) -> str:
  """Returns a count with its noun: "no leaks", "1 leak", "2 leaks"."""
  plural = "" if count == 1 else "s"
  return f"{count or 'no'} {noun}{plural}"


def _share(flops: Mapping[tuple[Direction, str], int], sizes: Collection[int]) -> float:
  """Returns the share of FLOPs in dtypes of some sizes in bytes; NaN without FLOPs."""
  total = sum(flops.values())
  if total == 0:
    return math.nan
  return sum(n for (_, dtype), n in flops.items() if jnp.dtype(dtype).itemsize in sizes) / total
