"""Float32 operations where low precision was asked for, and those that are float32 on purpose."""

import collections
from typing import NamedTuple

from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.audit_record import AuditRecord
from mpjax._core.dtypes import is_low_precision
from mpjax._core.full_precision import SCOPE as FULL_PRECISION
from mpjax._core.precision import written
from mpjax._core.types import DType
from mpjax._diagnostics.audit.causes import Cause, Causes, Why, is_low, is_wide, wanted_low
from mpjax._diagnostics.audit.graph import Graph, Operation, Value
from mpjax._jaxprs.autocast.scopes import FLOAT8, MODULE, REGION, policy_of
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.locations import Direction, Location, Source
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitives import facts_of

_LISTS = OpLists()
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


class Expectation(NamedTuple):
  """What is asked for where an operation is: a low-precision dtype, or None and the reason."""

  dtype: DType | None
  reason: str = ""


class Expectations:
  """Which dtype is asked for where.

  Where the function runs under policies or autocast, their marks say so. Elsewhere it is the
  low-precision dtype that the function itself uses most: it was written for that.
  """

  def __init__(self, graph: Graph, record: AuditRecord) -> None:
    """Looks for marks, and else for the dtype that is used most."""
    self._modules = record.modules
    self.marked = any(_region(each.where) is not None for each in graph.operations)
    self.used = None if self.marked else _most_used(graph)
    self._after = set() if self.marked else _after_gradients(graph)

  def of(self, operation: Operation) -> Expectation:
    """Returns what is asked for where an operation is."""
    where = operation.where
    if FULL_PRECISION in where.scopes:
      return Expectation(None, "mpjax.full_precision")
    if FLOAT8 in where.scopes and flops_of(operation.eqn) is None:
      return Expectation(None, "the scaling of float8")
    region = _region(where)
    policy = None if region is None else policy_of(region)
    precise = "HIGHEST" in str(operation.eqn.params.get("precision"))
    if precise and (policy is None or policy.precision is None):  # The code asks for it, no policy.
      return Expectation(None, 'precision="highest"')
    if not self.marked:
      if operation in self._after:
        return Expectation(None, "the optimizer")
      return Expectation(self.used, "" if self.used else "no low precision anywhere")
    if region is None:
      return Expectation(None, "outside of every policy")
    if policy is None:
      return Expectation(None, "a rule leaves it as it is")
    if is_low_precision(policy.compute_dtype):
      module = self._modules.get(marked_path(where) or "")
      # The running statistics of a norm are float32, and what it does with them in between.
      norm = module is not None and module.is_norm and flops_of(operation.eqn) is None
      return Expectation(None, "a norm") if norm else Expectation(policy.compute_dtype)
    asked = "" if policy.precision is None else f", precision={written(policy.precision)}"
    return Expectation(None, f"a {policy.compute_dtype.name} policy{asked}")


def _region(where: Location) -> str | None:
  found = (s[len(REGION) :] for s in reversed(where.scopes) if s.startswith(REGION))
  return next(found, None)


def module_path(where: Location) -> str:
  """Returns the path that a report shows: that of named scopes, or of a module under a policy.

  NNX names no scopes; there the audit knows modules only where they are under a policy.
  """
  return where.path or marked_path(where) or ""


def marked_path(where: Location) -> str | None:
  """Returns the path of the module under a policy that an operation is in; None without one."""
  found = (s[len(MODULE) :] for s in reversed(where.scopes) if s.startswith(MODULE))
  return next(found, None)


def _most_used(graph: Graph) -> DType | None:
  flops: collections.Counter[DType] = collections.Counter()
  sizes: collections.Counter[DType] = collections.Counter()
  for operation in graph.operations:
    for v in operation.operands:
      if is_low(v) and v.dtype is not None:
        sizes[v.dtype] += v.size
        flops[v.dtype] += flops_of(operation.eqn) or 0
  ranked = max(sizes, key=lambda dtype: (flops[dtype], sizes[dtype]), default=None)
  return ranked


def _after_gradients(graph: Graph) -> set[Operation]:
  """Returns the operations that use gradients and are in no backward pass: an optimizer's."""
  found: set[Operation] = set()
  gradients: set[Value] = set()
  for operation in graph.operations:
    backward = operation.where.direction != "forward"
    if backward:
      gradients.update(operation.results)
    elif any(v in gradients for v in operation.operands):
      found.add(operation)
      gradients.update(operation.results)
  return found


class _Group:
  """The operations with one cause."""

  def __init__(self, entry: Operation, why: Why) -> None:
    self.entry, self.why = entry, why
    self.flops = self.nbytes = self.operations = 0


def find_leaks(
  graph: Graph, causes: Causes, expectations: Expectations
) -> tuple[tuple[Leak, ...], tuple[OnPurpose, ...]]:
  """Returns the leaks of a graph, the costliest first, and what is float32 on purpose."""
  groups: dict[tuple[object, object], _Group] = {}
  purposes: collections.Counter[tuple[str, str]] = collections.Counter()
  lines: dict[tuple[str, Source | None], _Group] = {}
  returned = [] if expectations.marked else [v for v in graph.results if len(v.aval.shape) > 0]
  wanted = wanted_low(graph, causes, (v for v in returned if is_wide(v)))
  wanted_by_ops = wanted_low(graph, causes, ())
  sizes = [v.size for each in graph.operations for v in each.results]
  small = _SMALL * max(sizes, default=0)
  total_flops = total_bytes = 0
  pending: list[tuple[Operation, int, Why | None]] = []
  for operation in graph.computing():
    flops = operation.flops
    total_bytes += sum(v.nbytes for v in operation.results) * operation.times
    inexact = any(is_wide(v) or is_low(v) for v in operation.operands[:2])
    if flops is not None and inexact:
      total_flops += flops
      if all(is_low(v) for v in operation.operands[:2]):
        continue
      asked = expectations.of(operation)
      if asked.dtype is None:
        purposes[module_path(operation.where), asked.reason] += flops
        continue
      pending.append((operation, flops, causes.of_operands(operation)))
    elif _is_wide_elementwise(operation, small) and expectations.of(operation).dtype is not None:
      why = causes.why(operation.results[0])
      if why is None or why.neutral or why.entry is None or not causes.widens(why.entry, why):
        continue
      if expectations.marked and _is_asked_for(why):
        continue
      aim = wanted_by_ops if why.cause.kind == "cast" else wanted
      if not why.deliberate and operation.results[0] in aim:
        pending.append((operation, 0, why))
  for operation, flops, why in pending:
    entry = operation if why is None or why.entry is None else why.entry
    backward = operation.where.direction != "forward"
    line = (module_path(operation.where), operation.where.source)
    group = lines.get(line) if backward else None
    if group is None:
      if backward and not flops and (why is None or why.cause.kind not in ("cast", "constant")):
        continue  # A gradient is float32 because of what is float32 in the forward pass.
      origin = operation if why is None else why.origin
      why = why or Why(_unknown(operation), operation)
      where = entry.where
      # The operations of one line, as of a * cos(t) + b * sin(t), are cured together.
      written = (module_path(where), entry.name, where.direction, where.source)
      group = groups.setdefault((origin, written if where.source else entry), _Group(entry, why))
    if not backward:
      lines.setdefault(line, group)
    group.flops += flops
    group.nbytes += sum(v.nbytes for v in operation.results) * operation.times
    group.operations += operation.times
  ranked = sorted(groups.values(), key=lambda g: (-g.flops, -g.nbytes, g.entry.position))
  leaks = tuple(_leak(group, expectations, total_flops, total_bytes) for group in ranked)
  kept = (OnPurpose(path, reason, flops) for (path, reason), flops in purposes.most_common())
  return leaks, tuple(kept)


def _is_asked_for(why: Why) -> bool:
  """Whether a policy makes a value float32: RoPE by its positions, the sums that are a result."""
  origin, entry = why.origin, why.entry
  sums = isinstance(origin, Operation) and flops_of(origin.eqn) is not None
  return sums or (entry is not None and facts_of(entry.eqn).role == "product")


def _is_wide_elementwise(operation: Operation, small: float) -> bool:
  """Whether an operation that low precision is good for computes a large float32 array."""
  if operation.eqn.primitive is convert_element_type_p or not operation.results:
    return False
  part = _LISTS.part_of(operation.name, operation.eqn.params)
  result = operation.results[0]
  large = bool(result.aval.shape) and result.size >= small
  computes = not facts_of(operation.eqn).moves
  return large and computes and part in ("promote", "keep") and is_wide(result)


def _unknown(operation: Operation) -> Cause:
  first = next((v for v in operation.operands if is_wide(v)), operation.operands[0])
  return Cause("operation", operation.name, str(first.dtype), operation.where.source)


def _leak(group: _Group, expectations: Expectations, flops: int, nbytes: int) -> Leak:
  entry = group.entry
  asked = expectations.of(entry).dtype or expectations.used
  whole = (group.flops, flops) if group.flops else (group.nbytes, nbytes)
  return Leak(
    path=module_path(entry.where),
    operation=entry.name,
    direction=entry.where.direction,
    dtypes=tuple(str(v.dtype) for v in entry.operands if v.dtype is not None),
    source=entry.where.source,
    cause=group.why.cause,
    fix=_fix(group.why, entry, asked),
    flops=group.flops,
    nbytes=group.nbytes,
    share=whole[0] / max(whole[1], 1),
    operations=group.operations,
  )


def _fix(why: Why, entry: Operation, dtype: DType | None) -> str:
  """Returns what cures a leak."""
  name = "the policy's dtype" if dtype is None else f"jnp.{dtype.name}"
  cause = why.cause
  if cause.kind == "number":
    return "Make it a Python number, float(...), which takes the dtype of what it meets."
  if cause.kind == "cast":
    return f"Cast the result back where float32 is no longer needed: .astype({name})."
  if cause.kind in ("parameter", "argument", "constant"):
    return f"Cast it where it is used: .astype({name})."
  if why.origin is entry or facts_of(_eqn(why.origin, entry)).flops is not None:
    if why.origin is not entry:
      return f"It asks for preferred_element_type=float32: cast its result, .astype({name})."
    return f"Cast its operands: .astype({name})."
  return f"Cast its result: .astype({name})."


def _eqn(origin: Operation | Value, entry: Operation) -> JaxprEqn:
  return origin.eqn if isinstance(origin, Operation) else entry.eqn
