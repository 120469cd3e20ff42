"""Why a value is float32: which argument, constant or operation brought it in."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from mpjax._jaxprs.graph import Graph, Operation, Value
from mpjax._jaxprs.locations import Source, call_of

Kind: TypeAlias = Literal["parameter", "argument", "constant", "number", "cast", "operation"]


class Cause(NamedTuple):
  """What made a value float32.

  Args:
    kind: what it is. "number": a scalar with a dtype, such as `np.float32(2)`; "cast": a cast that
      the code asks for; "operation": one that computes in float32.
    name: the path of an argument, the shape of a constant, the name of an operation.
    dtype: that which it brought in.
    source: the line of an operation, or where something else is first used; None if unknown.

  >>> import jax.numpy as jnp, mpjax
  >>> def fn(x, table):
  ...   return (x + table) @ x
  >>> half = jnp.ones((2, 2), "bfloat16")
  >>> leak, = mpjax.audit(fn)(half, jnp.ones((2, 2))).leaks
  >>> leak.cause.kind, leak.cause.name, leak.cause.dtype
  ('argument', 'table', 'float32')
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
    first = operation.operands[0] if operation.operands else None
    if operation.casts and first is not None and first.is_low:
      self.cast_up[result] = first
      return _own("cast", operation, result) if _is_by_hand(operation) else None
    wide = [v for v in operation.operands if v.is_wide]
    if operation.moves and wide and all(v in self.cast_up for v in wide):
      self.cast_up[result] = self.cast_up[wide[0]]
    why = self.of_operands(operation)
    number = why is not None and why.cause.kind == "number" and why.entry is None
    if why is not None and number and result.aval.shape and operation.moves:
      why = self._filled(why, operation, result)
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

  def _filled(self, why: Why, operation: Operation, result: Value) -> Why:
    """Returns why an array that repeats one number is float32; as the state of a loop it stays."""
    if operation.joins:
      name, source = f"the state of a {operation.name}", why.cause.source
    else:
      shape = ",".join(map(str, result.aval.shape))
      name = f"{result.dtype}[{shape}] filled with {why.cause.name}"
      source = operation.where.source
    neutral = not operation.joins and "number" in self._neutral
    return why._replace(cause=Cause("constant", name, why.cause.dtype, source), neutral=neutral)


def _is_by_hand(cast: Operation) -> bool:
  """Whether the code asks for a cast. That of `x + table` is written by the call that adds."""
  call = call_of(cast.eqn)
  return bool(call) and all(call_of(each.eqn) != call for each in cast.results[0].consumers)


def _own(kind: Kind, operation: Operation, result: Value, *, deliberate: bool = False) -> Why:
  """Returns that an operation is the cause itself."""
  cause = Cause(kind, operation.name, str(result.dtype), operation.where.source)
  return Why(cause, operation, deliberate)


def better_low(graph: Graph, causes: Causes, results: Iterable[Value]) -> set[Value]:
  """Returns the values that would better be in low precision: `results`, and by their consumers."""
  # Those are casts to low precision and matmuls, directly or after elementwise operations. What
  # only operations consume that are to run in float32 is fused with them, and costs nothing.
  low = set(results)

  def is_wide_anyway(value: Value) -> bool:
    # It makes what it meets float32 deliberately: the statistics of a norm.
    why = causes.why(value)
    return why is not None and (why.deliberate or why.anyway)

  def in_pass_of(value: Value, operation: Operation) -> bool:
    made_by = value.made_by
    return made_by is None or made_by.where.direction == operation.where.direction

  for _ in range(2):  # Again, for what loops carry.
    for operation in reversed(graph.operations):
      if _wants_low(operation, low):
        anyway = [v for v in operation.operands if is_wide_anyway(v)]
        low.update(
          v
          for v in operation.operands
          if in_pass_of(v, operation) and all(v is other for other in anyway)
        )
  return low


def _wants_low(operation: Operation, low: set[Value]) -> bool:
  if operation.facts.flops is not None:
    return True
  if operation.casts:
    result = operation.results[0]
    return result.is_low or (result.is_wide and result in low)
  passes = operation.joins or operation.part in ("promote", "keep")
  return bool(passes) and any(v in low for v in operation.results)
