"""Float32 operations where low precision was asked for, and those that are float32 on purpose."""

import collections
from typing import NamedTuple

from mpjax._core.audit_record import AuditRecord
from mpjax._core.dtypes import is_low_precision
from mpjax._core.full_precision import SCOPE as FULL_PRECISION
from mpjax._core.precision import written
from mpjax._core.types import DType
from mpjax._diagnostics.audit.causes import Cause, Causes, Kind, Why, better_low
from mpjax._jaxprs.autocast.scopes import FLOAT8, MODULE, REGION, policy_of
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.graph import Graph, Operation, Value
from mpjax._jaxprs.locations import Direction, Source

_SMALL = 0.01
"""Of the largest result: what is smaller is no array that costs anything."""


class Leak(NamedTuple):
  """Float32 operations with one cause, where low precision was asked for.

  Args:
    path: of the module or named scope where a low-precision value became float32.
    operation: the operation that it happened in, by the name of its primitive.
    direction: its pass.
    dtypes: those of its operands.
    source: its line; None if unknown.
    cause: what brought float32 in.
    fix: what to change, a line of code where there is one.
    flops: floating-point operations of matmuls that run in float32 because of it.
    nbytes: bytes of the float32 results that would otherwise be half as large.
    share: that of `flops` in all matmuls; of `nbytes` in all results, if it has no matmuls.
    operations: how many operations are float32 because of it.

  >>> import jax.numpy as jnp, mpjax
  >>> def fn(x, w):
  ...   return x.astype(jnp.float32) @ w
  >>> half = jnp.ones((2, 2), "bfloat16")
  >>> leak, = mpjax.audit(fn)(half, half).leaks
  >>> leak.operation, leak.cause.kind, leak.cause.name, leak.flops
  ('dot_general', 'cast', 'convert_element_type', 16)
  """

  path: str
  operation: str
  direction: Direction
  dtypes: tuple[str, ...]
  source: Source | None
  cause: Cause
  fix: str
  flops: int
  nbytes: int
  share: float
  operations: int


class OnPurpose(NamedTuple):
  """Matmuls of one module that are float32 because somebody asked for it.

  Fields:
    path: of the module.
    reason: who asked.
    flops: of these matmuls.
  """

  path: str
  reason: str
  flops: int


class Expectations:
  """Which dtype is asked for where."""

  # Where the function runs under policies or autocast, their marks say so. Elsewhere it is the
  # low-precision dtype that the function itself uses most: it was written for that.

  def __init__(self, graph: Graph, record: AuditRecord) -> None:
    self._record = record
    self.marked = any(each.where.marked(REGION) is not None for each in graph.operations)
    self.used = None if self.marked else _most_used(graph)
    self._after = set() if self.marked else _after_gradients(graph)

  @property
  def neutral(self) -> frozenset[Kind]:
    """What takes the dtype of what it meets, and so is not why something is float32."""
    if not self.marked:
      return frozenset()
    arguments = self._record.autocast and not self._record.modules
    return frozenset(("parameter", "number", *(("argument",) if arguments else ())))

  def of(self, operation: Operation) -> tuple[DType | None, str]:
    """Returns the low-precision dtype that is asked for; None and the reason where none is."""
    where, matmul = operation.where, operation.facts.flops is not None
    if FULL_PRECISION in where.scopes:
      return None, "mpjax.full_precision"
    if FLOAT8 in where.scopes and not matmul:
      return None, "the scaling of float8"
    region = where.marked(REGION)
    policy = None if region is None else policy_of(region)
    precise = "HIGHEST" in str(operation.eqn.params.get("precision"))
    if precise and (policy is None or policy.precision is None):  # The code asks for it, no policy.
      return None, 'precision="highest"'
    if not self.marked:
      if operation in self._after:
        return None, "the optimizer"
      return self.used, "" if self.used else "no low precision anywhere"
    if region is None:
      return None, "outside of every policy"
    if policy is None:
      return None, "a rule leaves it as it is"
    if not is_low_precision(policy.compute_dtype):
      asked = "" if policy.precision is None else f", precision={written(policy.precision)}"
      return None, f"a {policy.compute_dtype.name} policy{asked}"
    module = self._record.modules.get(where.marked(MODULE) or "")
    if module is not None and module.is_norm and not matmul:
      # The running statistics of a norm are float32, and what it does with them in between.
      return None, "a norm"
    return policy.compute_dtype, ""


def _most_used(graph: Graph) -> DType | None:
  """Returns the low-precision dtype with the most FLOPs of matmuls, or else the most elements."""
  counts: dict[DType, tuple[int, int]] = {}
  for operation in graph.operations:
    flops = flops_of(operation.eqn) or 0
    for v in operation.operands:
      if v.is_low and v.dtype is not None:
        before = counts.get(v.dtype, (0, 0))
        counts[v.dtype] = before[0] + flops, before[1] + v.size
  return max(counts, key=lambda dtype: counts[dtype], default=None)


def _after_gradients(graph: Graph) -> set[Operation]:
  """Returns the operations that use gradients and are in no backward pass: an optimizer's."""
  after: set[Operation] = set()
  gradients: set[Value] = set()
  for operation in graph.operations:
    if operation.where.direction != "forward":
      gradients.update(operation.results)
    elif any(v in gradients for v in operation.operands):
      gradients.update(operation.results)
      after.add(operation)
  return after


class _Group:
  """The operations with one cause."""

  def __init__(self, entry: Operation, why: Why) -> None:
    self.entry, self.why = entry, why
    self.flops = self.nbytes = self.operations = 0


def find_leaks(
  graph: Graph, causes: Causes, expectations: Expectations
) -> tuple[tuple[Leak, ...], tuple[OnPurpose, ...]]:
  """Returns the leaks of a graph, the costliest first, and what is float32 on purpose."""
  purposes: collections.Counter[tuple[str, str]] = collections.Counter()
  groups: dict[tuple[object, object], _Group] = {}
  lines: dict[tuple[str, Source | None], _Group] = {}
  returned = [] if expectations.marked else [v for v in graph.results if len(v.aval.shape) > 0]
  low = better_low(graph, causes, (v for v in returned if v.is_wide))
  low_for_ops = better_low(graph, causes, ())
  small = _SMALL * max((v.size for each in graph.operations for v in each.results), default=0)
  total_flops = total_bytes = 0
  for operation in graph.computing():
    flops = operation.flops if operation.matmul_dtype is not None else None
    nbytes = sum(v.nbytes for v in operation.results) * operation.times
    total_bytes += nbytes
    total_flops += flops or 0
    # Is it float32 where low precision is asked for, and why?
    if flops is not None:
      if all(v.is_low for v in operation.operands[:2]):
        continue
      dtype, reason = expectations.of(operation)
      if dtype is None:
        purposes[operation.where.module, reason] += flops
        continue
      why = causes.of_operands(operation)
    else:
      why = causes.why(operation.results[0]) if _is_wide_elementwise(operation, small) else None
      if why is None or expectations.of(operation)[0] is None or _is_meant(why, expectations):
        continue
      aim = low_for_ops if why.cause.kind == "cast" else low
      if why.entry is None or not causes.widens(why.entry, why) or operation.results[0] not in aim:
        continue
    # Whose leak is it? Work of a backward pass is that of the line of the forward pass.
    backward = operation.where.direction != "forward"
    line = (operation.where.module, operation.where.source)
    group = lines.get(line) if backward else None
    if group is None:
      if backward and not flops and (why is None or why.cause.kind not in ("cast", "constant")):
        continue  # A gradient is float32 because of what is float32 in the forward pass.
      if why is None:
        first = next((v for v in operation.operands if v.is_wide), operation.operands[0])
        cause = Cause("operation", operation.name, str(first.dtype), operation.where.source)
        why = Why(cause, operation)
      entry = why.entry or operation
      where = entry.where
      # The operations of one line, as of a * cos(t) + b * sin(t), are cured together.
      same_line = (where.module, entry.name, where.direction, where.source)
      key = why.origin, same_line if where.source else entry
      group = groups.setdefault(key, _Group(entry, why))
    if not backward:
      lines.setdefault(line, group)
    group.flops += flops or 0
    group.nbytes += nbytes
    group.operations += operation.times
  ranked = sorted(groups.values(), key=lambda g: (-g.flops, -g.nbytes, g.entry.step.key))
  leaks = tuple(_leak(group, expectations, total_flops, total_bytes) for group in ranked)
  return leaks, tuple(OnPurpose(*key, flops) for key, flops in purposes.most_common() if flops)


def _is_wide_elementwise(operation: Operation, small: float) -> bool:
  """Whether an operation that low precision is good for computes a large float32 array."""
  if operation.casts or operation.moves or operation.part not in ("promote", "keep"):
    return False
  return any(v.is_wide and v.aval.shape and v.size >= small for v in operation.results[:1])


def _is_meant(why: Why, expectations: Expectations) -> bool:
  """Whether a value is to be float32: by the operation lists, or by the kinds of a policy."""
  # Under a policy RoPE is, by its positions, and the sums of a matmul that are its result.
  sums = isinstance(why.origin, Operation) and why.origin.facts.flops is not None
  positions = why.entry is not None and why.entry.facts.role == "product"
  return why.neutral or why.deliberate or (expectations.marked and (sums or positions))


def _leak(group: _Group, expectations: Expectations, flops: int, nbytes: int) -> Leak:
  entry = group.entry
  part, total = (group.flops, flops) if group.flops else (group.nbytes, nbytes)
  return Leak(
    path=entry.where.module,
    operation=entry.name,
    direction=entry.where.direction,
    dtypes=tuple(str(v.dtype) for v in entry.operands if v.dtype is not None),
    source=entry.where.source,
    cause=group.why.cause,
    fix=_fix(group.why, entry, expectations.of(entry)[0] or expectations.used),
    flops=group.flops,
    nbytes=group.nbytes,
    share=part / max(total, 1),
    operations=group.operations,
  )


def _fix(why: Why, entry: Operation, dtype: DType | None) -> str:
  """Returns what cures a leak."""
  cast = ".astype(the policy's dtype)." if dtype is None else f".astype(jnp.{dtype.name})."
  match why.cause.kind:
    case "number":
      return "Make it a Python number, float(...), which takes the dtype of what it meets."
    case "cast":
      return f"Cast the result back where float32 is no longer needed: {cast}"
    case "parameter" | "argument" | "constant":
      return f"Cast it where it is used: {cast}"
  if why.origin is entry:
    return f"Cast its operands: {cast}"
  if isinstance(why.origin, Operation) and why.origin.facts.flops is not None:
    return f"It asks for preferred_element_type=float32: cast its result, {cast}"
  return f"Cast its result: {cast}"
