"""Float32 operations where low precision was asked for, why they are, and what is on purpose."""

import collections
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from mpjax._core.active import SCOPE as FULL_PRECISION
from mpjax._core.active import AuditRecord
from mpjax._core.dtypes import is_low_precision, written
from mpjax._core.types import DType
from mpjax._diagnostics.audit.modules import summed
from mpjax._jaxprs.autocast.scopes import FLOAT8, NOT_IN, REGION, policy_of
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.graph import Graph, Operation, Value
from mpjax._jaxprs.locations import MODULE, Direction, Source, call_of

Kind: TypeAlias = Literal["parameter", "argument", "constant", "number", "cast", "operation"]


class Cause(NamedTuple):
  """What made a value float32.

  Args:
    kind: what it is. "number": a scalar with a dtype, such as `np.float32(2)`; "cast": a cast that
      the code asks for; "operation": one that computes in float32.
    name: the path of an argument, the shape of a constant, the name of an operation.
    dtype: that which it brought in.
    source: the line of an operation, or where something else is first used; None if unknown.
  """

  kind: Kind
  name: str
  dtype: str
  source: Source | None


class Why(NamedTuple):
  """How a value came to be float32."""

  cause: Cause
  origin: Operation | Value  # that of the cause
  deliberate: bool = False  # the cause is to run in float32: a sum, an exponential
  neutral: bool = False  # under a policy it takes the dtype of what it meets: a parameter, a number
  anyway: bool = False  # an operation that is to run in float32 is among the causes
  entry: Operation | None = None  # where a low-precision value met it and became float32 too

  @property
  def rank(self) -> tuple[bool, ...]:
    """Orders causes by what decides: arrays, casts, operations that are to be float32, numbers."""
    # Of two numbers it is the one that a low-precision value met before: in `where(mask, x16 *
    # np.float32(2), -1e9)` the other one is float32 because of it.
    number = self.cause.kind == "number" or "filled with" in self.cause.name
    return self.neutral, number, self.deliberate, self.cause.kind == "cast", self.entry is None


class Causes:
  """Why each float32 value of a graph is that."""

  def __init__(self, graph: Graph, parameters: frozenset[str], neutral: frozenset[Kind]) -> None:
    """Finds the causes; those of the kinds `neutral` take the dtype of what they meet."""
    self._parameters, self._neutral = parameters, neutral
    self._why: dict[Value, Why | None] = {}
    self._from_low = {v for v in graph.arguments if v.is_low}
    self.cast_up: dict[Value, Value] = {}  # from a float32 value to what it is a cast of
    for operation in graph.operations:
      low_before = any(v in self._from_low for v in operation.operands)
      self._from_low.update(v for v in operation.results if low_before or v.is_low)
      for result in operation.results:
        if result.is_wide:
          self._why[result] = self._of_result(operation, result, low_before)

  def why(self, value: Value) -> Why | None:
    """Returns why a value is float32; None if it is a cast of a low-precision value."""
    if value.made_by is not None or not value.is_wide:
      return self._why.get(value)
    kind: Kind = "constant"
    if value.kind == "literal" or (value.kind == "constant" and not value.aval.shape):
      kind = "number"
    elif value.kind == "argument":
      kind = "parameter" if value.label in self._parameters else "argument"
    cause = Cause(kind, value.label, str(value.dtype), None)
    return Why(cause, value, neutral=kind in self._neutral)

  def of_operands(self, operation: Operation) -> Why | None:
    """Returns why an operation has float32 operands; None if it casts all of them by itself."""
    pairs = [(v, why) for v in operation.operands if v.is_wide and (why := self.why(v))]
    if not pairs:
      return None
    # What decides: an array rather than a number, and rather what nobody asked for in float32.
    source, why = min(pairs, key=lambda pair: pair[1].rank)
    others = (v for v in operation.operands if v is not source)
    if why.entry is None and not operation.joins and any(v in self._from_low for v in others):
      why = why._replace(entry=operation)
    if why.cause.source is None:  # Of an argument or a constant: the line that uses it first.
      why = why._replace(cause=why.cause._replace(source=operation.where.source))
    return why._replace(anyway=any(each.deliberate or each.anyway for _, each in pairs))

  def widens(self, operation: Operation, why: Why) -> bool:
    """Whether an operation makes a low-precision operand float32 because of another one."""
    # Not if all there is are casts that the code asks for.
    cast = why.cause.kind == "cast"
    return any(
      v.is_low or (v in self.cast_up and not (cast and self.why(v))) for v in operation.operands
    )

  def _of_result(self, operation: Operation, result: Value, low_before: bool) -> Why | None:
    if operation.casts and operation.operands[0].is_low:
      self.cast_up[result] = operation.operands[0]
      # By hand: that of `x + table` is written by the call that adds.
      call = call_of(operation.eqn)
      by_hand = bool(call) and all(call_of(each.eqn) != call for each in result.consumers)
      return _own("cast", operation, result) if by_hand else None
    if operation.casts and operation.operands[0].kind == "literal":
      return self.why(Value(result.aval, "literal", operation.operands[0].label))
    wide = [v for v in operation.operands if v.is_wide]
    if operation.moves and wide and all(v in self.cast_up for v in wide):
      self.cast_up[result] = self.cast_up[wide[0]]
    why = self.of_operands(operation)
    number = why is not None and why.cause.kind == "number" and why.entry is None
    if why is not None and number and result.aval.shape and operation.moves:
      shape = ",".join(map(str, result.aval.shape))
      name = f"{result.dtype}[{shape}] filled with {why.cause.name}"
      cause = Cause("constant", name, why.cause.dtype, operation.where.source)
      why = why._replace(cause=cause, neutral="number" in self._neutral)
    # By hand, a softmax of float32 logits is float32 because they are. A mean of a cast array is
    # one of its own: nobody asked for more in float32.
    reduces = any(result.size < v.size for v in operation.operands[:1])
    sums = why is not None and why.cause.kind == "cast" and reduces
    if operation.part == "float32" and low_before and (self._neutral or why is None or sums):
      return _own("operation", operation, result, deliberate=True)
    if why is not None or result in self.cast_up:
      return why
    met = dict.fromkeys(str(self.cast_up[v].dtype) for v in wide if v in self.cast_up)
    why = _own("operation", operation, result)
    if len(met) > 1 and not self._neutral:
      name = f"{operation.name} of {' and '.join(met)}"
      return why._replace(cause=why.cause._replace(name=name), entry=operation)
    # Casts of low-precision values, together: for a sum that follows, say.
    return why._replace(deliberate=bool(wide))


def _own(kind: Kind, operation: Operation, result: Value, *, deliberate: bool = False) -> Why:
  """Returns that an operation is the cause itself."""
  cause = Cause(kind, operation.name, str(result.dtype), operation.where.source)
  return Why(cause, operation, deliberate)


def better_low(graph: Graph, causes: Causes, results: Iterable[Value]) -> set[Value]:
  """Returns the values that would better be in low precision: `results`, and by their consumers."""
  # Those are casts to low precision and matmuls, directly or after elementwise operations. What
  # only operations consume that are to run in float32 is fused with them, and costs nothing.
  low = set(results)
  for _ in range(2):  # Again, for what loops carry.
    for operation in reversed(graph.operations):
      if not _wants_low(operation, low):
        continue
      # What makes all that it meets float32 deliberately: the statistics of a norm.
      causing = [why for why in map(causes.why, operation.operands) if why is not None]
      if any(why.deliberate or why.anyway for why in causing):
        continue
      for v in operation.operands:
        if v.made_by is None or v.made_by.where.direction == operation.where.direction:
          low.add(v)
  return low


def _wants_low(operation: Operation, low: set[Value]) -> bool:
  if operation.facts.flops is not None:
    return True
  if operation.casts:
    result = operation.results[0]
    return result.is_low or (result.is_wide and result in low)
  passes = operation.joins or operation.part in ("promote", "keep")
  return bool(passes) and any(v in low for v in operation.results)


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
  flops: int = 0
  nbytes: int = 0
  share: float = 0.0
  operations: int = 0


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
    flops, sizes = collections.Counter[DType](), collections.Counter[DType]()
    gradients: set[Value] = set()
    self._after: set[Operation] = set()  # what uses gradients in no backward pass: an optimizer
    for operation in () if self.marked else graph.operations:
      for v in operation.operands:
        if v.is_low and v.dtype is not None:
          flops[v.dtype] += flops_of(operation.eqn) or 0
          sizes[v.dtype] += v.size
      if operation.where.direction != "forward":
        gradients.update(operation.results)
      elif any(v in gradients for v in operation.operands):
        gradients.update(operation.results)
        self._after.add(operation)
    # That with the most FLOPs of matmuls, or else the most elements.
    self.used = max(sizes, key=lambda dtype: (flops[dtype], sizes[dtype]), default=None)
    # What takes the dtype of what it meets, and so is not why something is float32.
    neutral: tuple[Kind, ...] = ("parameter", "number") if self.marked else ()
    if neutral and record.autocast and not record.modules:
      neutral = (*neutral, "argument")
    self.neutral = frozenset(neutral)

  def of(self, operation: Operation) -> tuple[DType | None, str]:
    """Returns the low-precision dtype that is asked for; None and the reason where none is."""
    where, matmul = operation.where, operation.facts.flops is not None
    if FULL_PRECISION in where.scopes:
      return None, "mpjax.full_precision"
    if FLOAT8 in where.scopes and not matmul:
      return None, "the scaling of float8"
    if reason := where.marked(NOT_IN["low"]):
      return None, reason
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


def find_leaks(
  graph: Graph, causes: Causes, expectations: Expectations
) -> tuple[tuple[Leak, ...], tuple[OnPurpose, ...]]:
  """Returns the leaks of a graph, the costliest first, and what is float32 on purpose."""
  purposes: list[OnPurpose] = []
  leaks: list[Leak] = []
  lines: dict[tuple[str, Source | None], Leak] = {}
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
      if not any(v.is_wide for v in operation.operands[:2]):
        continue
      dtype, reason = expectations.of(operation)
      if dtype is None:
        purposes += [OnPurpose(operation.where.path, reason, flops)] if flops else []
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
    line = operation.where.path, operation.where.source
    leak = lines.get(line) if backward else None
    if leak is None:
      if backward and not flops and (why is None or why.cause.kind not in ("cast", "constant")):
        continue  # A gradient is float32 because of what is float32 in the forward pass.
      if why is None:
        first = next((v for v in operation.operands if v.is_wide), operation.operands[0])
        why = _own("operation", operation, first)
      entry = why.entry or operation
      leak = Leak(
        path=entry.where.path,
        operation=entry.name,
        direction=entry.where.direction,
        dtypes=tuple(str(v.dtype) for v in entry.operands if v.dtype is not None),
        source=entry.where.source,
        cause=why.cause,
        fix=_fix(why, entry, expectations.of(entry)[0] or expectations.used),
      )
    if not backward:
      lines.setdefault(line, leak)
    leaks.append(leak._replace(flops=flops or 0, nbytes=nbytes, operations=operation.times))
  # The operations of one line, as of a * cos(t) + b * sin(t), are cured together.
  ranked = summed(leaks, "flops", "nbytes", "operations")
  shares = (x.flops / total_flops if x.flops else x.nbytes / max(total_bytes, 1) for x in ranked)
  shared = (leak._replace(share=share) for leak, share in zip(ranked, shares, strict=True))
  return tuple(shared), summed(purposes, "flops")


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


def _fix(why: Why, entry: Operation, dtype: DType | None) -> str:
  cast = ".astype(the policy's dtype)." if dtype is None else f".astype(jnp.{dtype.name})."
  match why.cause.kind:
    case "number":
      return "Make it a Python number, float(...), which takes the dtype of what it meets."
    case "cast":
      return f"Cast the result back where float32 is no longer needed: {cast}"
    case "parameter" | "argument" | "constant":
      return f"Cast it where it is used: {cast}"
  if isinstance(why.origin, Operation) and why.origin.facts.flops is not None:
    return f"It asks for preferred_element_type=float32: cast its result, {cast}"
  return f"Cast the operands of that {entry.name}: {cast}"
