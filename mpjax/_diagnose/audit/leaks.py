"""Find float32 operations where low precision is asked for, and float32 matmuls on purpose.

`Expectations` says where low precision is asked for, and `Causes` why a value is float32. A leak is
a float32 matmul, arithmetic on a large array that would better be in low precision, or a kernel.
"""

from collections.abc import Callable, Collection, Iterable, Iterator

from mpjax._core.types import DType, is_low_precision
from mpjax._diagnose.audit.causes import Cause, Causes, own_cause
from mpjax._diagnose.audit.findings import Leak, OnPurpose, summed
from mpjax._diagnose.audit.not_entered import operations_of_kernels
from mpjax._diagnose.expectations import Expectations
from mpjax._diagnose.suggested_changes import module_of
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import Source
from mpjax._policy.audit_record import AuditRecord
from mpjax._policy.rules import Rule, glob_of

_LEAST_SIZE = 0.01
"""The smallest array that is a leak, as a share of the largest result of the graph."""


def find_leaks(
  graph: Graph, record: AuditRecord, parameters: Collection[str]
) -> tuple[tuple[Leak, ...], tuple[OnPurpose, ...]]:
  """Returns the leaks of a graph, and its matmuls in float32 on purpose. The costliest come first.

  Args:
    graph: the graph of a function that was traced for an audit.
    record: the modules that were noted while it was traced.
    parameters: the names of the arguments that are parameters.
  """
  expectations = Expectations(graph, record)
  causes = Causes(graph, parameters, expectations.neutral)
  cause_of_arithmetic = _causes_of_arithmetic(graph, expectations, causes)
  on_purpose: list[OnPurpose] = []
  leaks: list[Leak] = []
  # The first leak of each module and line of the forward pass.
  of_lines: dict[tuple[str, Source | None], Leak] = {}
  for operation in graph.computing():
    # A compiler drops the others, such as the forward pass in an `init` that returns parameters.
    if not operation.used:
      continue
    where = operation.where
    is_matmul = operation.matmul_dtype is not None
    wide = [v for v in operation.operands[:2] if v.is_wide] if is_matmul else []
    flops = (operation.flops or 0) if wide else 0
    expected = expectations.of(operation)
    if expected.dtype is None:
      # Float32 is right here. A matmul is listed with the reason, because it costs the most.
      if flops:
        on_purpose.append(OnPurpose(where.path, expected.reason, flops))
      continue
    # A float32 matmul is always a leak, whatever reads its result.
    if wide:
      cause = causes.of_operands(operation) or own_cause(operation, wide[0])
    else:
      cause = cause_of_arithmetic(operation)
    if cause is None:
      continue
    # Forward and backward pass share a line, and one cure. They become one row.
    leak = of_lines.get((where.path, where.source))
    if where.direction == "forward":
      leak = _described(operation, cause, expected.dtype)
      of_lines.setdefault((where.path, where.source), leak)
    elif leak is None:
      # A gradient is float32 because its values are in the forward pass, unless the derivative has
      # a cause of its own, for example a custom rule that casts.
      if not flops and cause.kind not in ("cast", "constant", "filled"):
        continue
      leak = _described(operation, cause, expected.dtype)
    nbytes = sum(v.nbytes for v in operation.results) * operation.times
    leaks.append(leak._replace(flops=flops, nbytes=nbytes, times=operation.times))
  # Without a policy nobody asked for a dtype at the kernel.
  if expectations.marked:
    leaks += _kernel_leaks(graph, expectations)
  return summed(leaks), summed(on_purpose)


def _causes_of_arithmetic(
  graph: Graph, expectations: Expectations, causes: Causes
) -> Callable[[Operation], Cause | None]:
  """Returns a function that returns why an operation other than a matmul is a leak; None if not."""
  sizes = [v.size for operation in graph.operations for v in operation.results]
  # Small arrays, such as norm statistics, cost too little to be reported.
  least_size = _LEAST_SIZE * max(sizes, default=0)
  # A policy states the dtype of its results. Other functions return float32 by accident.
  # A float32 scalar, such as a loss, costs nothing.
  returned = [v for v in graph.results if v.is_wide and v.aval.shape and not expectations.marked]
  low = _better_low(graph, causes, returned)
  # For a result that the user casts and returns, which is no leak.
  low_inside = _better_low(graph, causes, ())

  def is_by_policy(cause: Cause, entry: Operation) -> bool:
    # A policy keeps the float32 sum of a matmul, and widens some products (docs/dtype_rules.md).
    is_product = cause.kind in ("matmul", "promotion") or entry.facts.acts_as == "product"
    # It also makes positions of RoPE float32, and a matmul that sums few products of an input.
    return expectations.marked and (is_product or expectations.of(entry).dtype is None)

  def why(operation: Operation) -> Cause | None:
    # Moves and casts pass on a leak. The arithmetic before or after them is the leak.
    if operation.moves or operation.casts or operation.part not in ("promote", "keep"):
      return None
    result = next(iter(operation.results), None)
    if result is None or not result.aval.shape or result.size < least_size:
      return None
    cause = causes.why(result)
    # Without an entry, the operation met no low-precision value: its inputs are all float32.
    if cause is None or cause.entry is None or cause.deliberate:
      return None
    # The policy casts neutral values to the dtype of the other operands by itself.
    if cause.kind in expectations.neutral or is_by_policy(cause, cause.entry):
      return None
    # A user who casts and returns float32 wants float32.
    is_wanted_low = result in (low_inside if cause.kind == "cast" else low)
    return cause if is_wanted_low and causes.widens(cause.entry, cause.kind) else None

  return why


def _better_low(graph: Graph, causes: Causes, results: Iterable[Value]) -> set[Value]:
  """Returns the values that would better be in low precision, because of their consumers.

  They are the operands of matmuls and of casts to low precision, and the values of which these are
  computed elementwise. A value of which only float32 operations are computed is no such value: XLA
  fuses it with them, so it costs nothing.

  Args:
    graph: the graph of a function.
    causes: the causes of its float32 values.
    results: further values that would better be in low precision.
  """
  low = {*results}
  for cast in (each for each in graph.operations if each.casts):
    low.update(v for v in cast.results if v.is_low)
  # A walk backwards passes the property from results to operands. A loop needs a second walk.
  for _ in range(graph.walks):
    for operation in reversed(graph.operations):
      # Operations of the float32 list stop the search: their operands are wide on purpose.
      is_elementwise = operation.part in ("promote", "keep")
      passes = operation.casts or operation.joins is not None or is_elementwise
      is_matmul = operation.facts.flops is not None
      if not is_matmul and (not passes or low.isdisjoint(operation.results)):
        continue
      # If float32 is deliberate for one operand, such as a norm's statistics, low precision of the
      # others saves nothing.
      of_operands = (causes.why(v) for v in operation.operands)
      if any(cause.deliberate or cause.anyway for cause in of_operands if cause is not None):
        continue
      direction = operation.where.direction
      # A gradient that uses a float32 residual does not ask for a low-precision residual.
      low.update(
        v
        for v in operation.operands
        if v.is_floating and (v.made_by is None or v.made_by.where.direction == direction)
      )
  return low


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


def _described(operation: Operation, cause: Cause, low: DType) -> Leak:
  """Returns a leak, without its counts, at the operation where a value became float32.

  Args:
    operation: a float32 operation where low precision is asked for.
    cause: why it is float32.
    low: the dtype that is asked for.
  """
  # The cure belongs to the line where float32 began, not to each operation after it.
  entry = cause.entry or operation
  reason, fix = _REASONS.get(cause.kind, _REASON), _FIXES.get(cause.kind, _FIX)
  # Arguments and constants in float64 come from NumPy data under `jax_enable_x64`.
  if cause.kind not in _FIXES and cause.dtype == "float64":
    fix = _FIX_FLOAT64
  why = reason.format(name=cause.name, kind=cause.kind, dtype=cause.dtype)
  return Leak(
    entry.where.path,
    entry.name,
    entry.where.direction,
    dtype=" x ".join(str(v.dtype) for v in entry.operands if v.dtype is not None),
    source=entry.where.source,
    reason=f"{why} at {cause.source or 'an unknown line'}",
    kind=cause.kind,
    cause=cause.name,
    fix=fix.format(entry=entry.name, low=f"jnp.{low.name}"),
    flops=0,
    nbytes=0,
    times=0,
  )


def _kernel_leaks(graph: Graph, expectations: Expectations) -> Iterator[Leak]:
  """Yields the kernels that get float32 where a policy asks for low precision."""
  for operation, kernel in operations_of_kernels(graph):
    low = expectations.of_kernel(operation)
    # A kernel in low precision needs no cure, nor does one outside of all policies.
    if low is None or is_low_precision(DType(kernel.dtype)):
      continue
    fix = "Call it in the compute dtype, its parameters too: mpjax.low_precision(kernel)(...)."
    if path := module_of(operation):
      # The policy has no output dtype: a mixed one would return float32 into the modules around.
      fix += f" Or run its module so: {Rule(f'c={low}', path=glob_of(path), rewrite=False)}"
    yield Leak(
      kernel.path,
      kernel.operation,
      kernel.direction,
      kernel.dtype,
      kernel.source,
      reason="its operands were traced in float32, and a kernel cannot be rewritten",
      kind="kernel",
      cause=kernel.operation,
      fix=fix,
      flops=kernel.flops,
      nbytes=sum(v.nbytes for v in operation.results) * operation.times,
      times=kernel.times,
    )
