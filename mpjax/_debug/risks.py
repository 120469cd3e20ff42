"""Report roundings to low precision that reach an operation which magnifies their error."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from mpjax._debug.findings import merged, unnumbered
from mpjax._debug.risk_histories import histories_of, is_wide_matmul, low_compute_dtype
from mpjax._debug.risk_sinks import RiskKind, sinks_of
from mpjax._debug.suggested_changes import cure_of, low_cure
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import Source

_TEXTS: Mapping[RiskKind, str] = {
  "angle": "{name} gets an angle rounded to {dtype}. Its error grows with the angle.",
  "index": "An integer is computed from a number rounded to {dtype}, and may be off by one.",
  "comparison": "A value in {dtype} is compared with its own maximum. Rounding creates ties.",
  "complex exponential": "A complex exponential of a number rounded to {dtype} has a phase error.",
  "linear algebra": "{name} multiplies the rounding to {dtype} by the condition number.",
  "difference": "Squares cancel in {name}. The result may consist of their rounding to {dtype}.",
  "denominator": "A denominator from a {dtype} matmul may overflow to inf or underflow to 0.",
  "lookup": "A mask selects entries of a float32 table, which are rounded to {dtype}.",
  "float32 matmul": "A matmul of inputs and constants runs in {dtype}, without Tensor Cores.",
}

_LEAST_SHARE = 0.05
"""The smallest share of the FLOPs at which a float32 matmul is reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Risk:
  """A rounding that reaches an operation which magnifies its error, or a costly float32 matmul.

  Args:
    kind: the kind of operation that the rounding reaches.
    path: the path of the module or named scope of the rounding.
    source: the line of the rounding; None if unknown.
    sink: the line of the operation that it reaches; None if unknown.
    reason: a sentence that describes the possible error.
    cure: Python code to paste.
    share: the share of these matmuls in the FLOPs of all matmuls.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def fn(w, x):
  ...   phase = x @ w
  ...   return jnp.sin(phase)
  >>> shapes = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((4, 8), "float32")
  >>> mpjax.audit(mpjax.autocast(fn))(*shapes).risks[0].kind
  'angle'
  """

  kind: RiskKind
  path: str
  source: Source | None
  sink: Source | None
  reason: str
  cure: str
  share: float = 0.0


def risks_of(graph: Graph, parameters: Collection[str] = ()) -> list[Risk]:
  """Returns the risks of a graph.

  Args:
    graph: the graph of a function that was traced for an audit, with the marks of its policies.
    parameters: the names of the arguments that are parameters of a model.

  Returns:
    One risk for each kind, module and line.

  >>> import jax, jax.numpy as jnp
  >>> from mpjax._jaxpr.graph import Graph
  >>> risks_of(Graph(jax.make_jaxpr(jnp.sin)(1.0)))  # no policy
  []
  """
  rows: dict[tuple[RiskKind, str, Source | None], tuple[Operation, dict[Operation, None]]] = {}
  sinks = [*sinks_of(graph, histories_of(graph, frozenset(parameters)))]
  # Low precision would make these matmuls a risk, so they are not reported as slow.
  in_risks = {rounding for kind, rounding, _ in sinks if kind != "float32 matmul"}
  for kind, rounding, sink in sinks:
    is_wide = is_wide_matmul(rounding)
    # A float32 matmul of inputs stands in for a rounding in the walk. It rounds nothing yet.
    if is_wide and (kind != "float32 matmul" or rounding in in_risks):
      continue
    # One line may round several values, which have one cure.
    key = kind, rounding.where.path, rounding.where.source
    rows.setdefault(key, (sink, {}))[1][rounding] = None
  # A graph without matmuls has no FLOPs, and no share.
  total = max(sum(flops for *_, flops in graph.matmuls()), 1)
  risks = (_risk(key[0], [*roundings], sink, total) for key, (sink, roundings) in rows.items())
  return [x for x in risks if x.kind != "float32 matmul" or x.share >= _LEAST_SHARE]


def risk_lines(risks: Iterable[Risk], most: int) -> tuple[str, ...]:
  """Returns the lines of a report, with one group for modules that differ only in numbers.

  Args:
    risks: the risks of a report.
    most: the largest number of groups.

  >>> risk_lines([], 12)
  ()
  """
  groups: dict[tuple[object, ...], list[Risk]] = {}
  for x in risks:
    # Layers that differ in their numbers only share one entry of the report.
    key = (x.kind, unnumbered(x.path), x.source, x.reason, unnumbered(x.cure))
    groups.setdefault(key, []).append(x)
  lines: list[str] = []
  for number, group in enumerate([*groups.values()][:most], 1):
    first = group[0]
    paths = {x.path for x in group}
    count = f" ({len(paths)})" if len(paths) > 1 else ""
    path = (merged([*paths]) or "(root)") + count
    share = sum(x.share for x in group)
    shown = f" · {100 * share:.1f} % of FLOPs" if share else ""
    line = first.source or "unknown line"
    lines += [f"{number}. {path} · {first.kind} · {line}{shown}", f"   {first.reason}"]
    lines.append(f"   {merged([x.cure for x in group])}")
  return (*lines, f"… and {len(groups) - most} more") if len(groups) > most else tuple(lines)


def _risk(kind: RiskKind, roundings: list[Operation], sink: Operation, total: int) -> Risk:
  """Returns the risk of operations of one line; the first one describes it."""
  first = roundings[0]
  where = roundings[0].where
  # A float32 matmul names its own dtype. Other risks name the low-precision one.
  is_wide = kind == "float32 matmul"
  values = (v for v in (*first.results, *first.operands) if is_wide or v.is_low)
  dtype = str(next(values).dtype)
  return Risk(
    kind=kind,
    path=where.path,
    source=where.source,
    sink=sink.where.source,
    reason=_TEXTS[kind].format(name=sink.name, dtype=dtype),
    cure=low_cure(first, low_compute_dtype(first)) if is_wide else cure_of(first.step).code,
    share=sum(x.flops or 0 for x in roundings) / total,
  )
