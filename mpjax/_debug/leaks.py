"""Float32 operations where low precision was asked for, why they are, and what is on purpose.

`Causes` says forward what made each value float32, `better_low` says backward, from the matmuls,
which would better be low, and `Expectations` what a policy, autocast or the function asks for.
"""

import collections
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from mpjax._autocast.precision import asked_precision
from mpjax._autocast.scopes import AS_IT_IS_IN, NOT_IN, REGION, policy_of
from mpjax._core.types import DType, is_low_precision
from mpjax._debug.findings import Finding, summed
from mpjax._debug.kernels import kernel_leaks
from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import FLOAT8, MODULE, Source, call_of
from mpjax._jaxpr.primitives import AS_TRACED
from mpjax._jaxpr.steps import Step
from mpjax._policy.active import SCOPE as FULL_PRECISION
from mpjax._policy.active import AuditRecord
from mpjax._policy.dtypes import written
from mpjax._policy.policy import Policy

_SMALL = 0.01
"""Of the largest result: what is smaller is no array that costs anything."""

_REASONS = {
  "number": "of the {dtype} scalar {name}",
  "cast": "of a cast to {dtype}",
  **dict.fromkeys(("matmul", "promotion", "operation"), "{name} computes {dtype}"),
}
_FIXES = {
  "number": "Make it a Python number, float(...), which takes the dtype of what it meets.",
  "cast": "Cast the result back where float32 is no longer needed: .astype({low}).",
  "matmul": "It asks for preferred_element_type=float32: cast its result, .astype({low}).",
  "promotion": "That call casts its operands: give it dtype={low}, or operands of one dtype.",
  "operation": "Cast the operands of that {entry}: .astype({low}).",
  "parameter": "Cast it, .astype({low}), or give its layer dtype={low}.",
  "float64": "No policy casts float64: cast the batch to float32.",
}
_FIX = "Cast it where it is used: .astype({low})."


class Why(NamedTuple):
  kind: str  # of the cause, as `Finding` has it
  name: str
  dtype: str
  source: Source | None = None
  deliberate: bool = False  # the cause is to run in float32: a sum, an exponential
  anyway: bool = False  # such an operation is among the causes
  entry: Operation | None = None  # where a low-precision value met it and became float32 too


class Causes:
  """Why each float32 value of a graph is that; the kinds `neutral` take the dtype they meet."""

  def __init__(self, graph: Graph, parameters: Collection[str], neutral: Collection[str]) -> None:
    self.parameters, self.neutral = parameters, neutral
    self._why: dict[Value, Why | None] = {}
    self._from_low = {v for v in graph.arguments if v.is_low}
    self._cast_up: dict[Value, Value] = {}  # from a float32 value to what it is a cast of
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
    kind = "constant" if value.aval.shape else "number"
    if value.kind == "argument":
      kind = "parameter" if value.label in self.parameters else "argument"
    return Why(kind, value.label, str(value.dtype))

  def of_operands(self, operation: Operation) -> Why | None:
    """Returns why an operation has float32 operands; None if it casts all of them by itself."""
    pairs = [(self._rank(why), v, why) for v in operation.operands if (why := self.why(v))]
    if not pairs:
      return None
    _, source, why = min(pairs, key=lambda pair: pair[0])
    others = (v for v in operation.operands if v is not source)
    if why.entry is None and not operation.joins and any(v in self._from_low for v in others):
      why = why._replace(entry=operation)
    if why.source is None:  # Of an argument or a constant: the line that uses it first.
      why = why._replace(source=operation.where.source)
    return why._replace(anyway=any(each.deliberate or each.anyway for *_, each in pairs))

  def widens(self, operation: Operation, kind: str) -> bool:
    """Whether an operation makes a low-precision operand float32 because of another one."""
    # Not if all there is are casts that the code asks for.
    met = [v for v in operation.operands if v.is_low or v in self._cast_up]
    return any(kind != "cast" or self.why(v) is None for v in met)

  def _rank(self, why: Why) -> tuple[bool, ...]:
    """Orders causes by what decides: arrays, casts, operations that are to be float32, numbers."""
    # A number that made a low-precision value float32 comes before a cast, as `w.astype(x.dtype)`.
    # Of two numbers it is the one that a low-precision value met before: in `where(mask, x16 *
    # np.float32(2), -1e9)` the other one is float32 because of it.
    is_number, is_cast = why.kind in ("number", "filled"), why.kind == "cast"
    neutral = why.kind in self.neutral and why.dtype != "float64"  # Which nothing takes.
    alone = is_number and why.entry is None
    return neutral, alone, why.deliberate, is_cast, is_number, why.entry is None

  def _of_result(self, operation: Operation, result: Value, low_before: bool) -> Why | None:
    operands, own = operation.operands, _own(operation, result)
    if operation.casts and operands[0].is_low:
      self._cast_up[result] = operands[0]
      # By hand: that of `x + table` is written by the call that adds.
      call = call_of(operation.eqn)
      by_hand = bool(call) and all(call_of(each.eqn) != call for each in result.consumers)
      return own._replace(kind="cast") if by_hand else None
    if operation.casts and operands[0].kind == "literal":
      return Why("number", operands[0].label, str(result.dtype))
    wide = [v for v in operands if v.is_wide]
    if operation.moves and wide and all(v in self._cast_up for v in wide):
      self._cast_up[result] = self._cast_up[wide[0]]
    why = self.of_operands(operation)
    # By hand, a softmax of float32 logits is float32 because they are. A mean of a cast array is
    # one of its own: nobody asked for more in float32.
    reduces = any(result.size < v.size for v in operands[:1])
    sums = why is None or (why.kind == "cast" and reduces)
    if operation.part == "float32" and low_before and (self.neutral or sums):
      return own._replace(deliberate=True)
    if why is not None and why.kind == "number" and why.entry is None and operation.moves:
      shape = ",".join(map(str, result.aval.shape))
      name = f"{result.dtype}[{shape}] of {why.name}"
      return Why("filled", name, why.dtype, operation.where.source) if shape else why
    if why is not None or result in self._cast_up:
      return why
    met = dict.fromkeys(str(self._cast_up[v].dtype) for v in wide if v in self._cast_up)
    if len(met) > 1 and not self.neutral:
      name = f"{operation.name} of {' and '.join(met)}"
      return own._replace(kind="operation", name=name, entry=operation)
    # Casts of low-precision values, together: for a sum that follows, say.
    return own._replace(deliberate=bool(wide))


def _own(operation: Operation, result: Value) -> Why:
  """Returns that an operation is the cause itself."""
  kind = "promotion" if any(v.is_wide for v in operation.operands) else "matmul"
  kind = "operation" if operation.facts.flops is None else kind
  return Why(kind, operation.name, str(result.dtype), operation.where.source)


def better_low(graph: Graph, causes: Causes, results: Iterable[Value]) -> set[Value]:
  """Returns the values that would better be in low precision: `results`, and by their consumers."""
  # Those are casts to low precision and matmuls, directly or after elementwise operations. What
  # only operations consume that are to run in float32 is fused with them, and costs nothing.
  casts = (each for each in graph.operations if each.casts)
  low = {*results, *(v for each in casts for v in each.results if v.is_low)}
  for _ in range(2):  # Again, for what loops carry.
    for operation in reversed(graph.operations):
      passes = operation.casts or operation.joins or operation.part in ("promote", "keep")
      useful = passes and not low.isdisjoint(operation.results)
      # What makes all that it meets float32 deliberately: the statistics of a norm.
      causing = [why for why in map(causes.why, operation.operands) if why is not None]
      meant = any(why.deliberate or why.anyway for why in causing)
      if (useful or operation.facts.flops is not None) and not meant:
        direction = operation.where.direction
        pairs = ((v, v.made_by) for v in operation.operands if v.is_floating)
        low.update(v for v, by in pairs if by is None or by.where.direction == direction)
  return low


class Expectations:
  """Which dtype is asked for where."""

  # Where the function runs under policies or autocast, their marks say so. Elsewhere it is the
  # low-precision dtype that the function itself uses most: it was written for that.

  def __init__(self, graph: Graph, record: AuditRecord) -> None:
    self._record = record
    self.marked = any(each.where.marked(REGION) is not None for each in graph.operations)
    elements = collections.Counter[DType | None]()
    gradients: set[Value] = set()
    self._after: set[Operation] = set()  # what uses gradients in no backward pass: an optimizer
    for operation in () if self.marked else graph.operations:
      elements.update({v.dtype: v.size for v in operation.operands if v.is_low})
      forward = operation.where.direction == "forward"
      if not forward or any(v in gradients for v in operation.operands):
        gradients.update(operation.results)
        self._after |= {operation} if forward else set()
    self.used = max(elements, key=elements.__getitem__, default=None)
    # What takes the dtype of what it meets, and so is not why something is float32.
    arguments = ("argument",) if "autocast" in record.uses and not record.modules else ()
    self.neutral = ("parameter", "number", "filled", *arguments) if self.marked else ()

  def of(self, operation: Operation) -> tuple[DType | None, str]:
    """Returns the low-precision dtype that is asked for; None and the reason where none is."""
    region = operation.where.marked(REGION)
    policy = None if region is None else policy_of(region)
    dtype = self.used if policy is None else policy.compute_dtype
    reasons = {**self._by_code(operation, policy), **self._by_policy(operation, region, policy)}
    reason = next((reason for reason, applies in reasons.items() if applies), "")
    return None if reason else dtype, reason

  def of_kernel(self, operation: Operation) -> DType | None:
    """Returns the low-precision dtype that is asked for where a kernel is, if any."""
    region = operation.where.marked(REGION) or ""
    if region.startswith(AS_IT_IS_IN):
      return DType(region.removeprefix(AS_IT_IS_IN))
    return self.of(operation)[0]

  def _by_code(self, operation: Operation, policy: Policy | None) -> dict[str, bool]:
    """Returns the reasons that the code gives for float32, and whether each applies."""
    where, is_matmul = operation.where, operation.facts.flops is not None
    not_low = where.marked(NOT_IN["low"])
    own = asked_precision(operation.eqn.params.get("precision"))
    as_traced = next((x.eqn.primitive.name for x in _within_what_runs_as_traced(operation)), "")
    return {
      "mpjax.full_precision": FULL_PRECISION in where.scopes,
      "the scaling of float8": FLOAT8 in where.scopes and not is_matmul,
      f"{as_traced}, which runs as written": bool(as_traced) and self.marked,
      f"{not_low}": not_low is not None,
      # The code asks for it, no policy.
      f'precision="{own}"': bool(own) and (policy is None or policy.precision is None),
      "the optimizer": operation in self._after,
    }

  def _by_policy(
    self, operation: Operation, region: str | None, policy: Policy | None
  ) -> dict[str, bool]:
    """Returns the reasons that policies and modules give, and whether each applies."""
    dtype = self.used if policy is None else policy.compute_dtype
    precision = None if policy is None else policy.precision
    asked = "" if precision is None else f", precision={written(precision)}"
    module = self._record.modules.get(operation.where.marked(MODULE) or "")
    is_matmul = operation.facts.flops is not None
    return {
      "no low precision anywhere": not self.marked and dtype is None,
      "outside of every policy": self.marked and region is None,
      "a rule leaves it as it is": self.marked and policy is None,
      f"a {dtype} policy{asked}": dtype is not None and not is_low_precision(dtype),
      # The running statistics of a norm are float32, and what it does with them in between.
      "a norm": module is not None and module.is_norm and not is_matmul,
    }


def _within_what_runs_as_traced(operation: Operation) -> Iterator[Step]:
  """Yields the equations around an operation that no policy enters, such as a linear solve."""
  yield from (x for x in operation.step.enclosing() if x.holds in AS_TRACED)


def find_leaks(
  graph: Graph, record: AuditRecord, parameters: Collection[str]
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
  """Returns the leaks of a graph, the costliest first, and the matmuls in float32 on purpose."""
  expectations = Expectations(graph, record)
  marked, neutral = expectations.marked, expectations.neutral
  causes = Causes(graph, parameters, neutral)
  returned = [] if marked else [v for v in graph.results if v.is_wide and v.aval.shape]
  low, low_for_ops = better_low(graph, causes, returned), better_low(graph, causes, ())
  small = _SMALL * max((v.size for each in graph.operations for v in each.results), default=0)
  purposes, leaks = list[Finding](), list[Finding]()
  lines: dict[tuple[str, Source | None], Finding] = {}
  for operation in graph.computing():
    where, backward = operation.where, operation.where.direction != "forward"
    dtype, reason = expectations.of(operation)
    wide = [v for v in operation.operands[:2] if v.is_wide]
    matmul = operation.matmul_dtype is not None and bool(wide)
    flops = (operation.flops or 0) * matmul
    if dtype is None:
      purposes += [Finding(where.path, reason=reason, flops=flops)] if flops else []
      continue
    # Is it float32, and why?
    if matmul:
      why = causes.of_operands(operation) or _own(operation, wide[0])
    else:
      large = [v for v in operation.results[:1] if v.aval.shape and v.size >= small]
      moves = operation.moves or operation.casts or operation.part not in ("promote", "keep")
      why = causes.why(large[0]) if large and not moves else None
      if why is None or why.entry is None or why.kind in neutral or why.deliberate:
        continue
      # Under a policy RoPE is to be float32, by its positions, and so are the sums of a matmul that
      # are its result, and what follows a matmul that sums few products of an input.
      meant = why.kind in ("matmul", "promotion") or why.entry.facts.role == "product"
      meant = meant or expectations.of(why.entry)[0] is None
      if (marked and meant) or large[0] not in (low_for_ops if why.kind == "cast" else low):
        continue
      if not causes.widens(why.entry, why.kind):
        continue
    # Whose leak is it? Work of a backward pass is that of the line of the forward pass.
    line = where.path, where.source
    leak = lines.get(line) if backward else None
    if leak is None:
      if backward and not flops and why.kind not in ("cast", "constant", "filled"):
        continue  # A gradient is float32 because of what is float32 in the forward pass.
      entry = why.entry or operation
      dtypes = " x ".join(str(v.dtype) for v in entry.operands if v.dtype is not None)
      words = {**why._asdict(), "entry": entry.name, "low": f"jnp.{dtype.name}"}
      reason = _REASONS.get(why.kind, "of {name} ({kind}, {dtype})").format(**words)
      reason += f" at {why.source or 'an unknown line'}"
      fix = _FIXES.get(why.kind, _FIXES.get(why.dtype, _FIX)).format(**words)
      path, direction, source = entry.where.path, entry.where.direction, entry.where.source
      leak = Finding(path, entry.name, direction, dtypes, source, reason, why.kind, why.name, fix)
    if not backward:
      lines.setdefault(line, leak)
    nbytes = sum(v.nbytes for v in operation.results) * operation.times
    leaks.append(leak._replace(flops=flops, nbytes=nbytes, times=operation.times))
  # The operations of one line, as of a * cos(t) + b * sin(t), are cured together.
  if marked:
    leaks += kernel_leaks(graph, expectations.of_kernel)
  return summed(leaks), summed(purposes)
