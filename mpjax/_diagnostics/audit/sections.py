"""What an audit shows, largest cost first."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax.numpy as jnp

from mpjax._core.dtypes import is_float8, is_low_precision
from mpjax._core.rules import Rule
from mpjax._diagnostics.audit.float8 import Float8Matmul
from mpjax._diagnostics.audit.leaks import Leak, OnPurpose
from mpjax._diagnostics.audit.modules import without_numbers
from mpjax._diagnostics.audit.result import Findings
from mpjax._diagnostics.audit.risks import Risk
from mpjax._diagnostics.report import Column, Section, amount, percent
from mpjax._jaxprs.locations import Source

_MOST = 12
"""Rows of a table as text: JSON and the attributes of the audit have all."""

_WORTH_PADDING = 2**30
"""FLOPs of matmuls whose sizes are worth a line: Tensor Cores take microseconds for them."""

_Found = TypeVar("_Found", Leak, Risk, OnPurpose, Float8Matmul)


def sections(audit: Findings) -> list[Section]:
  """Returns the sections of an audit."""
  found = [
    _headline(audit),
    _leaks(audit),
    _on_purpose(audit),
    _risks(audit),
    _modules(audit),
    _float8(audit),
    _tensor_cores(audit),
    _rules(audit),
    _kernels(audit),
  ]
  return [each for each in found if each is not None]


def _headline(audit: Findings) -> Section:
  flops = audit.flops
  rows = []
  for direction in ("forward", "backward", "recomputed"):
    here = {dtype: n for (d, dtype), n in flops.items() if d == direction}
    total = sum(here.values())
    if total:
      shares = [_family_share(here, family) for family in ("low", "float8", "float32")]
      count = amount(total, "FLOP")
      rows.append((direction, count, *(percent(share) for share in shares)))
  columns = (
    Column("pass"),
    Column("matmuls", "right"),
    Column("16 bit", "right"),
    Column("float8", "right"),
    Column("float32", "right"),
  )
  lines = [
    f"{percent(audit.half_share)} of the matmuls' FLOPs in low precision, {_leak_count(audit)}"
  ]
  if not rows:
    lines = [f"No matmuls or convolutions, {_leak_count(audit)}"]
  if audit.residual_bytes:
    kept = ", ".join(f"{dtype} {amount(n, 'B')}" for dtype, n in audit.residual_bytes.items())
    lines.append(f"Kept for the backward pass: {kept}")
  if ("backward", "float16") in flops and not audit.scaled:
    lines.append(
      "Float16 gradients without a loss scale: those below 6e-8 become 0. Wrap the optimizer in "
      "mpjax.loss_scaling, and differentiate with mpjax.value_and_grad."
    )
  if not audit.certain:
    lines.append("A while loop counts as one iteration, and each branch of a cond as taken.")
  return Section("Precision audit", tuple(lines), columns, tuple(rows))


def _leak_count(audit: Findings) -> str:
  count = len(audit.leaks)
  return "no leaks" if not count else f"{count} leak{'s' if count > 1 else ''}"


def _family_share(flops: Mapping[str, int], family: str) -> float:
  def kind(dtype: str) -> str:
    known = jnp.dtype(dtype)
    return "float8" if is_float8(known) else "low" if is_low_precision(known) else "float32"

  total = sum(flops.values())
  return sum(n for dtype, n in flops.items() if kind(dtype) == family) / total


def _leaks(audit: Findings) -> Section | None:
  if not audit.leaks:
    return None
  found = _together(audit.leaks, lambda x: (*_alike(x), x.direction, x.dtypes))
  lines: list[str] = []
  for number, group in enumerate(found[:_MOST], 1):
    leak = _of_all(group)
    cost = percent(sum(x.share for x in group))
    cost += " of FLOPs" if any(x.flops for x in group) else " of the bytes computed"
    operations = sum(x.operations for x in group)
    more = f", {operations} operations" if operations > 1 else ""
    what = (_paths(group), leak.operation, leak.direction, at(leak.source), cost + more)
    lines += [
      f"{number}. {' · '.join(what)}",
      f"   {' x '.join(leak.dtypes)}: {because(leak)}",
      f"   {leak.fix}",
    ]
  return Section("Float32 where low precision was asked for", (*lines, *_rest(len(found))))


def _together(found: Iterable[_Found], shown: Callable[[_Found], Hashable]) -> list[list[_Found]]:
  """Returns what is the same but for the numbers of paths, such as those of layers, together."""
  groups: dict[Hashable, list[_Found]] = {}
  for each in found:
    groups.setdefault((without_numbers(each.path), shown(each)), []).append(each)
  return list(groups.values())


def _alike(leak: Leak) -> tuple[Hashable, ...]:
  """Returns what leaks of one line in several layers have in common."""
  cause = leak.cause
  named = cause.kind in ("parameter", "argument")
  cause = cause._replace(name=without_numbers(cause.name)) if named else cause
  return leak.operation, leak.source, cause


def _of_all(group: Sequence[Leak]) -> Leak:
  """Returns the first leak, with "*" for the numbers that the others have in its cause and cure."""
  leak = group[0]
  if all(x.cause == leak.cause and x.fix == leak.fix for x in group):
    return leak
  cause, last = leak.cause, leak.path.rsplit("/", 1)[-1]
  if any(x.cause != cause for x in group):
    cause = cause._replace(name=without_numbers(cause.name))
  return leak._replace(cause=cause, fix=leak.fix.replace(f"/{last}", f"/{without_numbers(last)}"))


def _paths(group: Sequence[Leak | Risk | OnPurpose | Float8Matmul]) -> str:
  """Returns the path of one, or "*" for the number of several and how many they are."""
  paths = {x.path for x in group}
  path = group[0].path if len(paths) == 1 else f"{without_numbers(group[0].path)} ({len(paths)})"
  return path or "(root)"


def at(source: Source | None) -> str:
  """Returns a line of code as a report shows it."""
  return "unknown line" if source is None else str(source)


def because(leak: Leak) -> str:
  """Returns the cause of a leak as a sentence."""
  cause = leak.cause
  where = at(cause.source)
  match cause.kind:
    case "parameter" | "argument" | "constant":
      return f"float32 because of {cause.name} ({cause.kind}, {cause.dtype}) at {where}"
    case "number":
      return f"float32 because of the {cause.dtype} scalar {cause.name} at {where}"
    case "cast":
      return f"float32 because of a cast to {cause.dtype} at {where}"
    case _:
      return f"float32 because {cause.name} computes {cause.dtype} at {where}"


def _rest(count: int) -> tuple[str, ...]:
  return (f"… and {count - _MOST} more",) if count > _MOST else ()


def _on_purpose(audit: Findings) -> Section | None:
  if not audit.on_purpose:
    return None
  total = sum(audit.flops.values())
  columns = (Column("module", wide=True), Column("because of", wide=True), Column("FLOPs", "right"))
  found = _together(audit.on_purpose, lambda x: x.reason)
  counts = [(group, sum(x.flops for x in group)) for group in found]
  rows = tuple(
    (_paths(group), group[0].reason, percent(n / total))
    for group, n in sorted(counts, key=lambda each: -each[1])[:_MOST]
  )
  rest = _rest(len(found))
  return Section("Float32 on purpose", (), columns, rows, footer=rest)


def _risks(audit: Findings) -> Section | None:
  if not audit.risks:
    return None
  columns = (
    Column("module", wide=True),
    Column("operation"),
    Column("pass"),
    Column("line"),
    Column("risk", wide=True),
  )
  found = _together(audit.risks, lambda x: (x.operation, x.dtype, x.direction, x.source, x.reason))
  rows = tuple(
    (_paths(group), x.operation, x.direction, at(x.source), f"{x.dtype}: {x.reason}")
    for group in found[:_MOST]
    for x in group[:1]
  )
  title = "Low precision where float32 is safer"
  return Section(title, (), columns, rows, footer=_rest(len(found)))


def _modules(audit: Findings) -> Section | None:
  if not audit.modules:
    return None
  total = max(sum(sum(x.flops.values()) for x in audit.modules), 1)
  columns = (
    Column("module", wide=True),
    Column("params"),
    Column("activations"),
    Column("gradients"),
    Column("FLOPs", "right"),
    Column("decided by", wide=True),
  )
  selectors = {repr(rule): _selector(rule) for rule in audit.rules}
  rows = []
  for x in sorted(audit.modules, key=lambda x: -sum(x.flops.values()))[:_MOST]:
    count = f" ({x.modules})" if x.modules > 1 else ""
    overruled = f"over dtype={x.own_dtype}" if x.own_dtype else ""
    decider = selectors.get(x.rule) or (overruled and "the policy")
    decided = " ".join(filter(None, (decider, overruled)))
    n = sum(x.flops.values())
    dtypes = (_short(each) for each in (x.parameters, x.activations, x.gradients))
    rows.append((f"{x.path or '(root)'}{count}", *dtypes, percent(n / total), decided))
  if not any(row[-1] for row in rows):
    columns, rows = columns[:-1], [row[:-1] for row in rows]
  rest = _rest(len(audit.modules))
  return Section("Modules with matmuls", (), columns, tuple(rows), footer=rest)


def _selector(rule: Rule) -> str:
  """Returns a rule without its policy, which the dtypes beside it show."""
  found = (("path", rule.path), ("module", rule.module), ("where", rule.where))
  return ", ".join(f"{name}={_named(x)}" for name, x in found if x is not None)


def _named(selector: object) -> str:
  if isinstance(selector, tuple):
    return ", ".join(map(_named, selector))
  return getattr(selector, "__name__", None) or repr(selector)


def _short(dtypes: Sequence[str]) -> str:
  """Returns the two dtypes of the most elements, as jaxprs write them."""
  return " ".join(name.replace("float", "f") for name in dtypes[:2])


def _float8(audit: Findings) -> Section | None:
  if not audit.float8:
    return None
  total = sum(x.flops for x in audit.float8)
  columns = (
    Column("module", wide=True),
    Column("M x N x K", "right"),
    Column("FLOPs", "right"),
    Column("not in float8 because", wide=True),
  )
  found = _together(audit.float8, lambda x: (x.reason, x.sizes))
  counts = [(group, sum(x.flops for x in group)) for group in found]
  rows = tuple(
    (_paths(group), _sizes(group[0].sizes), percent(n / total), group[0].reason)
    for group, n in sorted(counts, key=lambda each: -each[1])[:_MOST]
  )
  lines = (f"{percent(audit.float8_share)} of the matmuls' FLOPs in float8",)
  return Section("float8", lines, columns, rows, footer=_rest(len(found)))


def _tensor_cores(audit: Findings) -> Section | None:
  lines: list[str] = []
  misfits = [x for x in audit.misfits if x.flops >= _WORTH_PADDING]
  for x in misfits[:_MOST]:
    # A layer of Flax that a list of layers calls has no line of the user's.
    where = x.path or "(root)" if x.source is None else f"{x.path or '(root)'} · {at(x.source)}"
    lines.append(f"{where}: M, N, K = {_sizes(x.sizes)} padded to {_sizes(x.padded)}")
  lines += _rest(len(misfits))
  for x in audit.opaque[:_MOST]:
    operands = " x ".join(x.dtypes) or "no floating operands"
    lines.append(f"{x.path or '(root)'}: {x.name} is not entered; it gets {operands}")
  if audit.tf32_flops and audit.half_share > 0:
    lines.append(
      f"{amount(audit.tf32_flops, 'FLOP')} in float32: a GPU since Ampere rounds their operands to "
      'TF32, unless precision="highest" is asked for.'
    )
  for x in audit.collectives:
    times = "once" if x.times == 1 else f"{x.times} times"
    lines.append(f"{x.operation} sends {amount(x.nbytes, 'B')} of {x.dtype}, {times}")
  if audit.round_trips.operations:
    trips, nbytes = audit.round_trips
    lines.append(f"{trips} casts undo the cast before them: {amount(nbytes, 'B')}")
  return Section("Tensor Cores, kernels, collectives and casts", tuple(lines)) if lines else None


def _sizes(sizes: Sequence[int]) -> str:
  return " x ".join(map(str, sizes))


def _rules(audit: Findings) -> Section | None:
  if not audit.rules:
    return None
  columns = (Column("rule", wide=True), Column("modules", "right"))
  rows: tuple[tuple[str, ...], ...] = tuple(
    (repr(rule), str(n) if n else "never used") for rule, n in audit.rules.items()
  )
  if audit.hidden_rules:
    columns += (Column("earlier rule wins", "right"),)
    hidden = [audit.hidden_rules.get(rule, 0) for rule in audit.rules]
    rows = tuple((*row, str(n or "")) for row, n in zip(rows, hidden, strict=True))
  return Section("Rules", (), columns, rows)


def _kernels(audit: Findings) -> Section | None:
  if not audit.kernels:
    return None
  columns = (Column("compiled as", wide=True), Column("dtype"), Column("count", "right"))
  rows = tuple((x.name, x.dtype, str(x.times)) for x in audit.kernels)
  return Section("Compiled as", (), columns, rows)
