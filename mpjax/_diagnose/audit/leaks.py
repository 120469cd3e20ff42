"""Find float32 operations where low precision is asked for, and float32 matmuls on purpose.

`Expectations` says where low precision is asked for, and `Causes` why a value is float32. A leak is
a float32 matmul, or arithmetic on a large array that `better_low` names.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias

from mpjax._core.types import DType
from mpjax._diagnose.audit.causes import Cause, Causes, own_cause
from mpjax._diagnose.audit.findings import Finding, summed
from mpjax._diagnose.audit.not_entered import kernel_leaks
from mpjax._diagnose.expectations import Expectations
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import Source
from mpjax._policy.audit_record import AuditRecord

_LEAST_SIZE = 0.01
"""The smallest array that is a leak, as a share of the largest result of the graph."""

_REASONS = {
  "number": "of the {dtype} scalar {name}",
  "cast": "of a cast to {dtype}",
  "matmul": "{name} computes {dtype}",
  "promotion": "{name} computes {dtype}",
  "operation": "{name} computes {dtype}",
}
"""Why a leak is float32, by the kind of its cause."""

_REASON = "of {name} ({kind}, {dtype})"
"""Likewise for all other kinds."""

_FIXES = {
  "number": "Make it a Python number, float(...), which does not promote arrays.",
  "cast": "Cast the result back where float32 is no longer needed: .astype({low}).",
  "matmul": "It asks for preferred_element_type=float32: cast its result, .astype({low}).",
  "promotion": "That call casts its operands: give it dtype={low}, or operands of one dtype.",
  "operation": "Cast the operands of that {entry}: .astype({low}).",
  "parameter": "Cast it, .astype({low}), or give its layer dtype={low}.",
}
"""The cure of a leak, by the kind of its cause."""

_FIX = "Cast it where it is used: .astype({low})."
"""The cure for all other kinds."""

_FIX_FLOAT64 = "No policy casts float64: cast the batch to float32."
"""Likewise if the cause has dtype float64."""


_LeaksOfLines: TypeAlias = dict[tuple[str, Source | None], Finding]
"""The first leak of each module and line of the forward pass."""


class Leaks(NamedTuple):
  """The float32 operations of a graph.

  Fields:
    leaks: the operations where low precision is asked for, the costliest first.
    on_purpose: the matmuls where float32 is asked for.
  """

  leaks: tuple[Finding, ...]
  on_purpose: tuple[Finding, ...]


def find_leaks(graph: Graph, record: AuditRecord, parameters: Collection[str]) -> Leaks:
  """Returns the leaks of a graph, and the matmuls in float32 on purpose.

  Args:
    graph: the graph of a function that was traced for an audit.
    record: the modules that were noted while it was traced.
    parameters: the names of the arguments that are parameters.
  """
  expectations = Expectations(graph, record)
  search = _search(graph, expectations, parameters)
  on_purpose: list[Finding] = []
  leaks: list[Finding] = []
  of_lines: _LeaksOfLines = {}
  # A compiler drops the others, such as the forward pass in an `init` that returns parameters.
  for operation in (each for each in graph.computing() if each.used):
    expected = expectations.of(operation)
    # Float32 is right here. A matmul is listed with the reason, because it costs the most.
    if expected.dtype is None:
      on_purpose += _on_purpose(operation, expected.reason)
    elif cause := _cause(operation, search):
      leaks += _leak(operation, cause, expected.dtype, of_lines)
  # Without a policy nobody asked for a dtype at the kernel.
  if expectations.marked:
    leaks += kernel_leaks(graph, expectations.of_kernel)
  return Leaks(summed(leaks), summed(on_purpose))


def better_low(graph: Graph, causes: Causes, results: Iterable[Value]) -> set[Value]:
  """Returns the values that would better be in low precision, because of their consumers.

  They are the operands of matmuls and of casts to low precision, and the values of which these are
  computed elementwise. A value of which only float32 operations are computed is no such value: XLA
  fuses it with them, so it costs nothing.

  Args:
    graph: the graph of a function.
    causes: the causes of its float32 values.
    results: further values that would better be in low precision.
  """
  low = {*results, *_casts_to_low(graph)}
  # A walk backwards passes the property from results to operands. A loop needs a second walk.
  for _ in range(graph.walks):
    for operation in reversed(graph.operations):
      if _gains_from_low(operation, low) and not _is_meant(operation, causes):
        low.update(_operands_of_pass(operation))
  return low


def _casts_to_low(graph: Graph) -> Iterable[Value]:
  casts = (operation for operation in graph.operations if operation.casts)
  return (v for cast in casts for v in cast.results if v.is_low)


def _gains_from_low(operation: Operation, low: set[Value]) -> bool:
  """Whether the operands of an operation would better be in low precision."""
  if operation.facts.flops is not None:
    return True
  is_elementwise = operation.part in ("promote", "keep")
  passes = operation.casts or operation.joins is not None or is_elementwise
  # Operations of the float32 list stop the search: their operands are wide on purpose.
  return passes and not low.isdisjoint(operation.results)


def _is_meant(operation: Operation, causes: Causes) -> bool:
  """Whether a deliberate float32 value, such as a norm's statistics, makes its results float32."""
  # If float32 is deliberate for one operand, low precision of the others saves nothing.
  of_operands = (causes.why(v) for v in operation.operands)
  return any(cause.deliberate or cause.anyway for cause in of_operands if cause is not None)


def _operands_of_pass(operation: Operation) -> Iterable[Value]:
  """Returns the floating operands of an operation that no other pass computed."""
  # A gradient that uses a float32 residual does not ask for a low-precision residual.
  direction = operation.where.direction
  return (
    v
    for v in operation.operands
    if v.is_floating and (v.made_by is None or v.made_by.where.direction == direction)
  )


class _Search(NamedTuple):
  """What decides whether a float32 operation is a leak.

  Fields:
    expectations: where low precision is asked for.
    causes: why values are float32.
    low: the values that would better be in low precision, for operations inside of the graph and
      for its caller.
    low_inside: the same for operations inside of the graph alone. A result that the user casts and
      returns is no leak.
    least_size: the elements of the smallest array that is a leak.
  """

  expectations: Expectations
  causes: Causes
  low: set[Value]
  low_inside: set[Value]
  least_size: float


def _search(graph: Graph, expectations: Expectations, parameters: Collection[str]) -> _Search:
  causes = Causes(graph, parameters, expectations.neutral)
  # A policy states the dtype of its results. Other functions return float32 by accident.
  # A float32 scalar, such as a loss, costs nothing.
  wide = [v for v in graph.results if v.is_wide and v.aval.shape]
  returned = [] if expectations.marked else wide
  sizes = [v.size for operation in graph.operations for v in operation.results]
  return _Search(
    expectations=expectations,
    causes=causes,
    low=better_low(graph, causes, returned),
    low_inside=better_low(graph, causes, ()),
    # Small arrays, such as norm statistics, cost too little to be reported.
    least_size=_LEAST_SIZE * max(sizes, default=0),
  )


def _cause(operation: Operation, search: _Search) -> Cause | None:
  """Returns why an operation is a leak; None if it is none."""
  # A float32 matmul is always a leak, whatever reads its result.
  if _is_wide_matmul(operation):
    wide = next(v for v in operation.operands if v.is_wide)
    return search.causes.of_operands(operation) or own_cause(operation, wide)
  # Moves and casts pass on a leak. The arithmetic before or after them is the leak.
  if operation.moves or operation.casts or operation.part not in ("promote", "keep"):
    return None
  return _cause_of_arithmetic(operation, search)


def _cause_of_arithmetic(operation: Operation, search: _Search) -> Cause | None:
  """Returns why arithmetic is a leak; None if it is none."""
  result = next(iter(operation.results), None)
  if result is None or not result.aval.shape or result.size < search.least_size:
    return None
  cause = search.causes.why(result)
  # Without an entry, the operation met no low-precision value: its inputs are all float32.
  if cause is None or cause.entry is None or cause.deliberate:
    return None
  # The policy casts neutral values to the dtype of the other operands by itself.
  if cause.kind in search.expectations.neutral or _is_by_policy(cause, cause.entry, search):
    return None
  # A user who casts and returns float32 wants float32.
  low = search.low_inside if cause.kind == "cast" else search.low
  is_leak = result in low and search.causes.widens(cause.entry, cause.kind)
  return cause if is_leak else None


def _is_by_policy(cause: Cause, entry: Operation, search: _Search) -> bool:
  """Whether a policy itself makes a value float32.

  Positions do so in RoPE. So do a matmul that returns its float32 sum, and a matmul that sums few
  products of an input.
  """
  if not search.expectations.marked:
    return False
  # A policy keeps the float32 sum of a matmul, and widens some products (docs/concepts.md).
  is_product = cause.kind in ("matmul", "promotion") or entry.facts.role == "product"
  return is_product or search.expectations.of(entry).dtype is None


def _is_wide_matmul(operation: Operation) -> bool:
  is_matmul = operation.matmul_dtype is not None
  return is_matmul and any(v.is_wide for v in operation.operands[:2])


def _wide_flops(operation: Operation) -> int:
  """Returns the FLOPs of a float32 matmul; 0 for any other operation."""
  flops = operation.flops if _is_wide_matmul(operation) else None
  return flops or 0


def _on_purpose(operation: Operation, reason: str) -> list[Finding]:
  """Returns a float32 matmul on purpose; [] for any other operation."""
  flops = _wide_flops(operation)
  return [Finding(operation.where.path, reason=reason, flops=flops)] if flops else []


# The texts of a leak, and the line that it belongs to.


def _leak(operation: Operation, cause: Cause, low: DType, of_lines: _LeaksOfLines) -> list[Finding]:
  """Returns the leak that an operation belongs to, with the counts of the operation.

  An operation of a backward pass belongs to the leak on the same line of the forward pass.

  Args:
    operation: a float32 operation where low precision is asked for.
    cause: why it is float32.
    low: the dtype that is asked for.
    of_lines: the leaks of the forward pass so far, to which a new one is added.

  Returns:
    The leak; [] for a gradient that is float32 because its values are in the forward pass.
  """
  # Forward and backward pass share a line, and one cure. They become one row.
  line = (operation.where.path, operation.where.source)
  flops = _wide_flops(operation)
  if operation.where.direction == "forward":
    leak = _described(operation, cause, low)
    of_lines.setdefault(line, leak)
  elif line in of_lines:
    leak = of_lines[line]
  # The derivative has a cause of its own, for example a custom rule that casts.
  elif flops or cause.kind in ("cast", "constant", "filled"):
    leak = _described(operation, cause, low)
  else:
    return []
  nbytes = sum(v.nbytes for v in operation.results) * operation.times
  return [leak._replace(flops=flops, nbytes=nbytes, times=operation.times)]


def _described(operation: Operation, cause: Cause, low: DType) -> Finding:
  """Returns a leak at the operation where a low-precision value became float32."""
  # The cure belongs to the line where float32 began, not to each operation after it.
  entry = cause.entry or operation

  def filled_in(template: str) -> str:
    return template.format(
      name=cause.name,
      kind=cause.kind,
      dtype=cause.dtype,
      entry=entry.name,
      low=f"jnp.{low.name}",
    )

  reason = filled_in(_REASONS.get(cause.kind, _REASON))
  return Finding(
    entry.where.path,
    entry.name,
    entry.where.direction,
    dtype=" x ".join(str(v.dtype) for v in entry.operands if v.dtype is not None),
    source=entry.where.source,
    reason=f"{reason} at {cause.source or 'an unknown line'}",
    kind=cause.kind,
    cause=cause.name,
    fix=filled_in(_fix(cause)),
  )


def _fix(cause: Cause) -> str:
  """Returns the template of the cure for a cause."""
  # Arguments and constants in float64 come from NumPy data under `jax_enable_x64`.
  if cause.kind not in _FIXES and cause.dtype == "float64":
    return _FIX_FLOAT64
  return _FIXES.get(cause.kind, _FIX)
