"""What an audit shows, largest cost first."""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from mpjax._core.dtypes import is_float8, is_low_precision
from mpjax._diagnostics.audit.leaks import Leak
from mpjax._diagnostics.audit.result import Findings
from mpjax._diagnostics.report import Cell, Column, Section, amount, percent
from mpjax._jaxprs.locations import Source

_MOST = 12
"""Rows of a table as text: JSON and the attributes of the audit have all."""


def sections(audit: Findings) -> list[Section]:
  """Returns the sections of an audit."""
  found = [
    _headline(audit),
    _leaks(audit),
    _on_purpose(audit),
    _risks(audit),
    _modules(audit),
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
      count = Cell(amount(total, "FLOP"), total)
      rows.append((direction, count, *(Cell(percent(share), share) for share in shares)))
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
  lines: list[str] = []
  for number, leak in enumerate(audit.leaks[:_MOST], 1):
    cost = percent(leak.share) + (" of FLOPs" if leak.flops else " of the bytes computed")
    more = f", {leak.operations} operations" if leak.operations > 1 else ""
    what = (leak.path or "(root)", leak.operation, leak.direction, at(leak.source), cost + more)
    lines += [
      f"{number}. {' · '.join(what)}",
      f"   {' x '.join(leak.dtypes)}: {because(leak)}",
      f"   {leak.fix}",
    ]
  return Section("Float32 where low precision was asked for", (*lines, *_rest(len(audit.leaks))))


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
  rows = tuple(
    (x.path or "(root)", x.reason, Cell(percent(x.flops / total), x.flops))
    for x in audit.on_purpose[:_MOST]
  )
  return Section("Float32 on purpose", _rest(len(audit.on_purpose)), columns, rows)


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
  rows = tuple(
    (x.path or "(root)", f"{x.operation} {x.dtype}", x.direction, at(x.source), x.reason)
    for x in audit.risks[:_MOST]
  )
  return Section("Low precision where float32 is safer", _rest(len(audit.risks)), columns, rows)


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
  rows = []
  for x in sorted(audit.modules, key=lambda x: -sum(x.flops.values()))[:_MOST]:
    count = f" ({x.modules})" if x.modules > 1 else ""
    decided = x.rule + (f" over dtype={x.own_dtype}" if x.own_dtype else "")
    n = sum(x.flops.values())
    dtypes = (_short(each) for each in (x.parameters, x.activations, x.gradients))
    rows.append((f"{x.path or '(root)'}{count}", *dtypes, Cell(percent(n / total), n), decided))
  if not any(row[-1] for row in rows):
    columns, rows = columns[:-1], [row[:-1] for row in rows]
  return Section("Modules with matmuls", _rest(len(audit.modules)), columns, tuple(rows))


def _short(dtypes: Sequence[str]) -> str:
  """Returns the two dtypes of the most elements, as jaxprs write them."""
  return " ".join(name.replace("float", "f") for name in dtypes[:2])


def _tensor_cores(audit: Findings) -> Section | None:
  lines = [
    f"{x.path or '(root)'} · {at(x.source)}: M, N, K = {_sizes(x.sizes)} run as {_sizes(x.padded)}"
    for x in audit.misfits[:_MOST]
  ] + list(_rest(len(audit.misfits)))
  wide = sum(n for (_, dtype), n in audit.flops.items() if not is_low_precision(jnp.dtype(dtype)))
  if wide and audit.half_share > 0:
    lines.append(
      f"{amount(wide, 'FLOP')} in float32: a GPU since Ampere rounds their operands to TF32, "
      'unless precision="highest" is asked for.'
    )
  for x in audit.collectives:
    times = "once" if x.times == 1 else f"{x.times} times"
    lines.append(f"{x.operation} sends {amount(x.nbytes, 'B')} of {x.dtype}, {times}")
  if audit.round_trips.operations:
    trips, nbytes = audit.round_trips
    lines.append(f"{trips} casts undo the cast before them: {amount(nbytes, 'B')}")
  return Section("Tensor Cores, collectives and casts", tuple(lines)) if lines else None


def _sizes(sizes: Sequence[int]) -> str:
  return " x ".join(map(str, sizes))


def _rules(audit: Findings) -> Section | None:
  if not audit.rules:
    return None
  columns = (Column("rule", wide=True), Column("modules", "right"))
  rows = tuple(
    (repr(rule), Cell(str(n) if n else "never used", n)) for rule, n in audit.rules.items()
  )
  return Section("Rules", (), columns, rows)


def _kernels(audit: Findings) -> Section | None:
  if not audit.kernels:
    return None
  columns = (Column("compiled as", wide=True), Column("dtype"), Column("count", "right"))
  rows = tuple((x.name, x.dtype, Cell(str(x.times), x.times)) for x in audit.kernels)
  return Section("Compiled as", (), columns, rows)


def compared(before: Findings, after: Findings) -> list[Section]:
  """Returns the sections of two audits side by side."""
  columns = (Column("", wide=True), Column("before", "right"), Column("after", "right"))
  rows: list[tuple[Cell | str, ...]] = [
    ("FLOPs in low precision", percent(before.half_share), percent(after.half_share)),
    ("leaks", str(len(before.leaks)), str(len(after.leaks))),
    ("risks", str(len(before.risks)), str(len(after.risks))),
  ]
  for key in dict.fromkeys((*before.flops, *after.flops)):
    row = (amount(each.flops.get(key, 0), "FLOP") for each in (before, after))
    rows.append((f"{key[0]}, {key[1]}", *row))
  for dtype in dict.fromkeys((*before.residual_bytes, *after.residual_bytes)):
    row = (amount(each.residual_bytes.get(dtype, 0), "B") for each in (before, after))
    rows.append((f"kept for the backward pass, {dtype}", *row))
  found = [Section("Two audits", (), columns, tuple(rows))]
  changed = _changed(before, after)
  if changed:
    heads = (Column("module", wide=True), Column("before"), Column("after"))
    found.append(Section("Modules whose activations changed", (), heads, tuple(changed)))
  gone = {_key(x) for x in before.leaks} - {_key(x) for x in after.leaks}
  new = [x for x in after.leaks if _key(x) not in {_key(y) for y in before.leaks}]
  lines = [
    f"fixed: {path or '(root)'} · {operation} · {line}" for path, operation, line in sorted(gone)
  ]
  lines += [f"new: {x.path or '(root)'} · {x.operation} · {at(x.source)}" for x in new]
  if lines:
    found.append(Section("Leaks", tuple(lines)))
  return found


def _key(leak: Leak) -> tuple[str, str, str]:
  return leak.path, leak.operation, at(leak.source)


def _changed(before: Findings, after: Findings) -> list[tuple[str, str, str]]:
  dtypes = [{x.path: _short(x.activations) for x in each.modules} for each in (before, after)]
  paths = dict.fromkeys((*dtypes[0], *dtypes[1]))
  pairs = ((path, dtypes[0].get(path, "-"), dtypes[1].get(path, "-")) for path in paths)
  return [(path or "(root)", a, b) for path, a, b in pairs if a != b]
