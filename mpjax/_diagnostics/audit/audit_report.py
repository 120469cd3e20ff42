"""What an audit found, and what of it a page shows: the largest cost first."""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import jax.numpy as jnp

from mpjax._core.errors import MpjaxAssertionError
from mpjax._core.rules import Rule
from mpjax._diagnostics.audit.compiled import Collective, Kernel
from mpjax._diagnostics.audit.leaks import Cause, Leak, OnPurpose
from mpjax._diagnostics.audit.modules import (
  Float8Matmul,
  Misfit,
  ModuleRow,
  OpaqueKernel,
  summed,
  without_numbers,
)
from mpjax._diagnostics.audit.risks import Risk
from mpjax._diagnostics.report import Column, Report, Section, amount, percent, right
from mpjax._jaxprs.locations import Direction

_MOST = 12
"""Rows of a table as text: JSON and the attributes of the audit have all."""

_WORTH_PADDING = 2**30
"""FLOPs of matmuls whose sizes are worth a line: Tensor Cores take microseconds for them."""

_Row = TypeVar("_Row", Leak, OnPurpose, Risk, Float8Matmul, Misfit, OpaqueKernel, Collective)

_UNKNOWN = "unknown line"
_MODULE, _FLOPS = Column("module", wide=True), Column("FLOPs", "right")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Report):
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
    collectives: what devices send to one another, by module; with `compiled=`, as compiled.
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

  flops: Mapping[tuple[Direction, str], int]
  tf32_flops: int
  operations: Mapping[str, int]
  residual_bytes: Mapping[str, int]
  leaks: tuple[Leak, ...]
  on_purpose: tuple[OnPurpose, ...]
  risks: tuple[Risk, ...]
  modules: tuple[ModuleRow, ...]
  misfits: tuple[Misfit, ...]
  collectives: tuple[Collective, ...]
  float8: tuple[Float8Matmul, ...]
  rules: Mapping[Rule, int]
  hidden_rules: Mapping[Rule, int]
  opaque: tuple[OpaqueKernel, ...]
  kernels: tuple[Kernel, ...]
  certain: bool
  scaled: bool

  @property
  def half_share(self) -> float:
    """The share of the matmuls' FLOPs in low precision, 8 bits included; NaN without matmuls."""
    return _share(self.flops, 1, 2)

  @property
  def float8_share(self) -> float:
    """The share of the matmuls' FLOPs in float8, or in a recipe's 8 bits; NaN without matmuls."""
    return _share(self.flops, 1)

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
    leaks = [x for x in self.leaks if not any(fnmatch.fnmatchcase(x.path, g) for g in globs)]
    if leaks:
      first = leaks[0]
      raise MpjaxAssertionError(
        "AuditReport.assert_no_leaks(...)",
        expected="no float32 operation where low precision was asked for",
        got=f"{len(leaks)}: the costliest is {first.operation} in {first.path or 'the root'} "
        f"({first.source}), float32 because {_because(first.cause)}",
        fix=f"{first.fix} If it is meant to be: assert_no_leaks(ignore=[{first.path!r}]).",
      )

  def sections(self) -> Sequence[Section]:
    """Returns what is shown, in order."""
    flops = sum(self.flops.values())
    because, risk = Column("because of", wide=True), Column("risk", wide=True)
    rule, kernel = Column("rule", wide=True), Column("compiled as", wide=True)
    return (
      _headline(self),
      _leaks(self.leaks),
      _table(
        "Float32 on purpose",
        (_MODULE, because, _FLOPS),
        [(x.path, x.reason, percent(x.flops / flops)) for x in _layers(self.on_purpose, "flops")],
      ),
      _table(
        "Low precision where float32 is safer",
        (_MODULE, Column("operation"), Column("pass"), Column("line"), risk),
        [
          (x.path, x.operation, x.direction, f"{x.source or _UNKNOWN}", f"{x.dtype}: {x.reason}")
          for x in _layers(self.risks)
        ],
      ),
      _modules(self),
      _float8(self),
      _costs(self),
      _table(
        "Between devices",
        (_MODULE, Column("collective"), Column("dtype"), *right("bytes", "times")),
        [
          (x.path, x.operation, x.dtype, amount(x.nbytes, "B"), str(x.times))
          for x in _layers(self.collectives, "nbytes", "times")
        ],
      ),
      _table(
        "Rules",
        (rule, *right("modules", "earlier rule wins")),
        [
          (repr(rule), str(n or "never used"), str(self.hidden_rules.get(rule) or ""))
          for rule, n in self.rules.items()
        ],
      ),
      _table(
        "Compiled as",
        (kernel, Column("dtype"), Column("count", "right")),
        [(x.name, x.dtype, str(x.times)) for x in self.kernels],
      ),
    )

  def as_dict(self) -> Mapping[str, object]:
    """Returns what `to_json` writes; FLOPs and bytes are integers."""
    flops = [
      {"direction": direction, "dtype": dtype, "flops": n}
      for (direction, dtype), n in self.flops.items()
    ]
    rules = [
      {"rule": repr(rule), "modules": n, "hidden": self.hidden_rules.get(rule, 0)}
      for rule, n in self.rules.items()
    ]
    fields = {**vars(self), "half_share": self.half_share, "flops": flops, "rules": rules}
    return {name: value for name, value in fields.items() if name != "hidden_rules"}

  def __repr__(self) -> str:
    return f"AuditReport(half_share={self.half_share:.4f}, leaks={len(self.leaks)})"


def _share(flops: Mapping[tuple[Direction, str], int], *nbytes: int) -> float:
  """Returns the share of FLOPs in dtypes of so many bytes; NaN without FLOPs."""
  part = sum(n for (_, dtype), n in flops.items() if jnp.dtype(dtype).itemsize in nbytes)
  return part / sum(flops.values()) if any(flops.values()) else math.nan


def _headline(audit: AuditReport) -> Section:
  rows = []
  for direction in ("forward", "backward", "recomputed"):
    here = {key: n for key, n in audit.flops.items() if key[0] == direction}
    if any(here.values()):
      shares = (percent(_share(here, *nbytes)) for nbytes in ((2,), (1,), (4, 8)))
      rows.append((direction, amount(sum(here.values()), "FLOP"), *shares))
  columns = (Column("pass"), *right("matmuls", "16 bit", "8 bit", "float32"))
  count = len(audit.leaks)
  leaks = f"{count or 'no'} leak{'' if count == 1 else 's'}"
  share = f"{percent(audit.half_share)} of the matmuls' FLOPs in low precision"
  lines = [f"{share if rows else 'No matmuls or convolutions'}, {leaks}"]
  if audit.residual_bytes:
    sizes = ", ".join(f"{dtype} {amount(n, 'B')}" for dtype, n in audit.residual_bytes.items())
    lines.append(f"Kept for the backward pass: {sizes}")
  if ("backward", "float16") in audit.flops and not audit.scaled:
    lines.append(
      "Float16 gradients without a loss scale: those below 6e-8 become 0. Wrap the optimizer in "
      "mpjax.loss_scaling, and differentiate with mpjax.value_and_grad."
    )
  if not audit.certain:
    lines.append("A while loop counts as one iteration, and each branch of a cond as taken.")
  return Section("Precision audit", tuple(lines), columns, tuple(rows))


def _layers(rows: Iterable[_Row], *counts: str) -> tuple[_Row, ...]:
  """Returns one row for layers that differ in their number alone, with the sums of `counts`."""
  groups: dict[_Row, list[_Row]] = {}
  nothing = dict.fromkeys(counts, 0)
  for row in rows:
    groups.setdefault(_unnumbered(row, **nothing), []).append(row)
  shown: list[_Row] = []
  for alike, group in groups.items():
    paths = {row.path for row in group}
    path = next(iter(paths)) if len(paths) == 1 else f"{alike.path} ({len(paths)})"
    # A cause that all layers have in common, such as an argument, keeps the number in its name.
    same = {row._replace(path=path or "(root)", **nothing) for row in group}
    one = same.pop() if len(same) == 1 else alike._replace(path=path or "(root)")
    shown += [one._replace(**{x: getattr(row, x) for x in counts}) for row in group]
  return summed(shown, *counts)


def _unnumbered(row: _Row, **counts: int) -> _Row:
  """Returns a row with "*" for the numbers of layers, which the names of parameters have too."""
  row = row._replace(path=without_numbers(row.path), **counts)
  if isinstance(row, Leak) and row.cause.kind in ("parameter", "argument"):
    row = row._replace(cause=row.cause._replace(name=without_numbers(row.cause.name)))
  return row


def _rest(count: int) -> tuple[str, ...]:
  return (f"… and {count - _MOST} more",) if count > _MOST else ()


def _table(
  title: str,
  columns: Sequence[Column],
  rows: Sequence[tuple[str, ...]],
  lines: tuple[str, ...] = (),
) -> Section:
  """Returns a table of the first rows, without its last column if that says nothing."""
  blank = [""] * (len(columns) - 1)
  shown = [*rows[:_MOST], *((text, *blank) for text in _rest(len(rows)))]
  if not any(row[-1] for row in shown):
    columns, shown = columns[:-1], [row[:-1] for row in shown]
  return Section(title, lines, tuple(columns), tuple(shown))


def _leaks(leaks: Sequence[Leak]) -> Section:
  groups = _layers(leaks, "flops", "nbytes", "share", "operations")
  lines: list[str] = []
  for number, leak in enumerate(groups[:_MOST], 1):
    cost = f"{percent(leak.share)} of {'FLOPs' if leak.flops else 'the bytes computed'}"
    more = f", {leak.operations} operations" if leak.operations > 1 else ""
    what = leak.path, leak.operation, leak.direction, f"{leak.source or _UNKNOWN}", cost + more
    dtypes = " x ".join(leak.dtypes)
    lines += [
      f"{number}. {' · '.join(what)}",
      f"   {dtypes}: float32 because {_because(leak.cause)} at {leak.cause.source or _UNKNOWN}",
      f"   {leak.fix}",
    ]
  return Section("Float32 where low precision was asked for", (*lines, *_rest(len(groups))))


def _because(cause: Cause) -> str:
  match cause.kind:
    case "number":
      return f"of the {cause.dtype} scalar {cause.name}"
    case "cast":
      return f"of a cast to {cause.dtype}"
    case "operation":
      return f"{cause.name} computes {cause.dtype}"
    case _:
      return f"of {cause.name} ({cause.kind}, {cause.dtype})"


def _modules(audit: AuditReport) -> Section:
  total = sum(sum(row.flops.values()) for row in audit.modules)
  selectors = {repr(rule): _selector(rule) for rule in audit.rules}
  rows = []
  for row in sorted(audit.modules, key=lambda row: -sum(row.flops.values())):
    count = f" ({row.modules})" if row.modules > 1 else ""
    overruled = f"over dtype={row.own_dtype}" if row.own_dtype else ""
    decider = selectors.get(row.rule) or ("the policy" if overruled else "")
    # The two dtypes of the most elements, as jaxprs write them.
    dtypes = (
      " ".join(name.replace("float", "f") for name in names[:2])
      for names in (row.parameters, row.activations, row.gradients)
    )
    share = percent(sum(row.flops.values()) / total)
    decided = f"{decider} {overruled}".strip()
    rows.append((f"{row.path or '(root)'}{count}", *dtypes, share, decided))
  names = map(Column, ("params", "activations", "gradients"))
  columns = (_MODULE, *names, _FLOPS, Column("decided by", wide=True))
  return _table("Modules with matmuls", columns, rows)


def _selector(rule: Rule) -> str:
  """Returns a rule without its policy, which the dtypes beside it show."""
  selectors = (("path", rule.path), ("module", rule.module), ("where", rule.where))
  name, selector = next((name, x) for name, x in selectors if x is not None)
  several = selector if isinstance(selector, tuple) else (selector,)
  return f"{name}=" + ", ".join(getattr(x, "__name__", repr(x)) for x in several)


def _float8(audit: AuditReport) -> Section:
  total = max(sum(row.flops for row in audit.float8), 1)
  rows = [
    (x.path, _sizes(x.sizes), percent(x.flops / total), x.reason)
    for x in _layers(audit.float8, "flops")
  ]
  sizes, reason = Column("M x N x K", "right"), Column("not in float8 because", wide=True)
  lines = (f"{percent(audit.float8_share)} of the matmuls' FLOPs in float8",) if rows else ()
  return _table("float8", (_MODULE, sizes, _FLOPS, reason), rows, lines)


def _sizes(sizes: Sequence[int]) -> str:
  return " x ".join(map(str, sizes))


def _costs(audit: AuditReport) -> Section:
  """Returns what costs time or memory, a sentence each."""
  lines: list[str] = []
  misfits = [x for x in _layers(audit.misfits, "flops") if x.flops >= _WORTH_PADDING]
  for x in misfits[:_MOST]:
    # A layer of Flax that a list of layers calls has no line of the user's.
    line = "" if x.source is None else f" · {x.source}"
    lines.append(f"{x.path}{line}: M, N, K = {_sizes(x.sizes)} padded to {_sizes(x.padded)}")
  lines += _rest(len(misfits))
  for x in _layers(audit.opaque)[:_MOST]:
    operands = " x ".join(x.dtypes) or "no floating operands"
    lines.append(f"{x.path}: {x.name} is not entered; it gets {operands}")
  if audit.tf32_flops and audit.half_share > 0:
    lines.append(
      f"{amount(audit.tf32_flops, 'FLOP')} in float32: a GPU since Ampere rounds their operands to "
      'TF32, unless precision="highest" is asked for.'
    )
  return Section("Tensor Cores and kernels", tuple(lines))
