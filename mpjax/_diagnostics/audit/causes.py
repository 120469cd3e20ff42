"""Why a value is float32: which argument, constant or operation brought it in."""

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.dtypes import is_low_precision
from mpjax._diagnostics.audit.graph import Graph, Operation, Value
from mpjax._jaxprs.locations import Source, calls_library
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitives import facts_of

Kind: TypeAlias = Literal["parameter", "argument", "constant", "number", "cast", "operation"]

_LISTS = OpLists()
_CASTS_BY_HAND = frozenset({"astype", "_astype", "asarray", "array"})


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
  """How a value came to be float32.

  Fields:
    cause: what brought float32 in.
    origin: the operation of the cause, or the value.
    deliberate: the cause is an operation that is to run in float32: a sum, an exponential.
    neutral: under a policy or autocast it takes the dtype of what it meets: a parameter, a number.
    anyway: an operation that is to run in float32 is among the causes.
    entry: where a value in low precision met it and became float32 too; None if none did.
  """

  cause: Cause
  origin: Operation | Value
  deliberate: bool = False
  neutral: bool = False
  anyway: bool = False
  entry: Operation | None = None


def is_wide(value: Value) -> bool:
  """Whether a value is a floating array of float32 or wider."""
  dtype = value.dtype
  return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4


def is_low(value: Value) -> bool:
  """Whether a value is a floating array in low precision."""
  return value.dtype is not None and is_low_precision(value.dtype)


class Causes:
  """Why each float32 value of a graph is that.

  Attributes:
    cast_up: for a float32 value that is a low-precision one, cast: the latter.
  """

  def __init__(self, graph: Graph, parameters: frozenset[str], neutral: frozenset[Kind]) -> None:
    """Finds the causes.

    Args:
      graph: the graph.
      parameters: the names of arguments that are parameters.
      neutral: the kinds of causes that take the dtype of what they meet.
    """
    self._parameters = parameters
    self._neutral = neutral
    self._why: dict[Value, Why | None] = {}
    self._from_low: set[Value] = {v for v in graph.arguments if is_low(v)}
    self.cast_up: dict[Value, Value] = {}
    for operation in graph.operations:
      self._visit(operation)

  def why(self, value: Value) -> Why | None:
    """Returns why a value is float32; None if it is a cast of a low-precision value."""
    if value.made_by is None and value not in self._why:
      self._why[value] = self._of_input(value)
    return self._why.get(value)

  def of_operands(self, operation: Operation) -> Why | None:
    """Returns why an operation has float32 operands; None if it casts all of them by itself."""
    found = [(v, self.why(v)) for v in operation.operands if is_wide(v)]
    known = [(v, why) for v, why in found if why is not None]
    if not known:
      return None
    # What decides: an array rather than a number, and rather what nobody wanted in float32.
    source, best = min(known, key=lambda each: _rank(each[1]))
    others = (v for v in operation.operands if v is not source)
    if best.entry is None and not operation.joins and any(v in self._from_low for v in others):
      best = best._replace(entry=operation)
    anyway = any(why.deliberate or why.anyway for _, why in known)
    return self._located(best._replace(anyway=anyway), operation)

  def widens(self, operation: Operation, why: Why) -> bool:
    """Whether an operation makes a low-precision operand float32 because of another one.

    Not if all there is are casts that the code asks for.
    """
    cast = why.cause.kind == "cast"
    return any(
      is_low(v) or (v in self.cast_up and not (cast and self.why(v))) for v in operation.operands
    )

  def _located(self, why: Why, operation: Operation) -> Why:
    """Returns the same with the line where an argument or constant is first used."""
    if why.cause.source is None and operation.where.source is not None:
      return why._replace(cause=why.cause._replace(source=operation.where.source))
    return why

  def _of_input(self, value: Value) -> Why | None:
    if not is_wide(value):
      return None
    kind: Kind = "constant"
    if value.kind == "literal" or (value.kind == "constant" and not value.aval.shape):
      kind = "number"
    elif value.kind == "argument":
      kind = "parameter" if value.label in self._parameters else "argument"
    neutral = kind in self._neutral
    return Why(Cause(kind, value.label, str(value.dtype), None), value, neutral=neutral)

  def _visit(self, operation: Operation) -> None:
    low_before = any(v in self._from_low for v in operation.operands)
    for result in operation.results:
      if low_before or is_low(result):
        self._from_low.add(result)
      if is_wide(result):
        self._why[result] = self._of_result(operation, result, low_before)

  def _of_result(self, operation: Operation, result: Value, low_before: bool) -> Why | None:
    first = operation.operands[0] if operation.operands else None
    if operation.eqn.primitive is convert_element_type_p and first is not None and is_low(first):
      self.cast_up[result] = first
      by_hand = operation.eqn.source_info.traceback
      if by_hand is not None and calls_library(by_hand, _CASTS_BY_HAND):
        return self._own("cast", operation, result)
      return None
    wide = [v for v in operation.operands if is_wide(v)]
    moves = operation.joins or facts_of(operation.eqn).moves
    if moves:
      only = [v for v in wide if v not in self.cast_up]
      for v in wide[:1]:
        if v in self.cast_up and not only:
          self.cast_up[result] = self.cast_up[v]
    found = self.of_operands(operation)
    number = found is not None and found.cause.kind == "number" and found.entry is None
    if found is not None and number and result.aval.shape and moves:
      found = self._filled(found, operation, result)
    part = _LISTS.part_of(operation.name, operation.eqn.params)
    # By hand, a softmax of float32 logits is float32 because they are. A mean of a cast array is
    # one of its own: nobody asked for more in float32.
    sums = found is not None and found.cause.kind == "cast" and _reduces(operation)
    if part == "float32" and low_before and (self._neutral or found is None or sums):
      return self._own("operation", operation, result, deliberate=True)
    if found is not None:
      return found
    if not wide:
      return self._own("operation", operation, result)
    if result in self.cast_up:
      return None
    met = dict.fromkeys(str(self.cast_up[v].dtype) for v in wide if v in self.cast_up)
    if len(met) > 1 and not self._neutral:
      why = self._own("operation", operation, result)
      name = f"{operation.name} of {' and '.join(met)}"
      return why._replace(cause=why.cause._replace(name=name), entry=operation)
    # Casts of low-precision values, together: for a sum that follows, say.
    return self._own("operation", operation, result, deliberate=True)

  def _filled(self, why: Why, operation: Operation, result: Value) -> Why:
    """Returns why an array that repeats one number is float32; as the state of a loop it stays."""
    name = f"{result.dtype}[{','.join(map(str, result.aval.shape))}] filled with {why.cause.name}"
    if operation.joins:
      cause = Cause(
        "constant", f"the state of a {operation.name}", why.cause.dtype, why.cause.source
      )
      return why._replace(cause=cause, neutral=False)
    cause = Cause("constant", name, why.cause.dtype, operation.where.source)
    return why._replace(cause=cause, neutral="number" in self._neutral)

  def _own(
    self, kind: Kind, operation: Operation, result: Value, *, deliberate: bool = False
  ) -> Why:
    cause = Cause(kind, operation.name, str(result.dtype), operation.where.source)
    return Why(cause, operation, deliberate)


def _reduces(operation: Operation) -> bool:
  return operation.results[0].size < operation.operands[0].size


def _rank(why: Why) -> tuple[bool, ...]:
  """Orders causes by what decides: arrays, casts, operations that are to be float32, numbers.

  Of two numbers it is the one that a low-precision value met before: in `where(mask, x16 *
  np.float32(2), -1e9)` the other one is float32 because of it.
  """
  number = why.cause.kind == "number" or "filled with" in why.cause.name
  return why.neutral, number, why.deliberate, why.cause.kind == "cast", why.entry is None


def wanted_low(graph: Graph, causes: Causes, results: Iterable[Value]) -> set[Value]:
  """Returns the values that would better be in low precision, by their consumers.

  Those are casts to low precision and matmuls, directly or after elementwise operations. What only
  operations consume that are to run in float32 is fused with them, and costs nothing.

  Args:
    graph: the graph.
    causes: why its values are float32.
    results: values of it that are wanted in low precision anyway.
  """
  wanted = set(results)
  for _ in range(2):  # Again, for what loops carry.
    for operation in reversed(graph.operations):
      if _wants(operation, wanted):
        anyway = [v for v in operation.operands if _is_wide_anyway(causes, v)]
        wanted.update(
          v
          for v in operation.operands
          if _same_pass(v, operation) and all(v is other for other in anyway)
        )
  return wanted


def _is_wide_anyway(causes: Causes, value: Value) -> bool:
  """Whether a value makes what it meets float32 deliberately: the statistics of a norm."""
  why = causes.why(value)
  return why is not None and (why.deliberate or why.anyway)


def _same_pass(value: Value, operation: Operation) -> bool:
  made_by = value.made_by
  return made_by is None or made_by.where.direction == operation.where.direction


def _wants(operation: Operation, wanted: set[Value]) -> bool:
  if facts_of(operation.eqn).flops is not None:
    return True
  if operation.eqn.primitive is convert_element_type_p:
    result = operation.results[0]
    return is_low(result) or (is_wide(result) and result in wanted)
  part = _LISTS.part_of(operation.name, operation.eqn.params)
  passes = operation.joins or part in ("promote", "keep")
  return passes and any(v in wanted for v in operation.results)
