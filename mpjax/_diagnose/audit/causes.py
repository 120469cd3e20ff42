"""Find out why each float32 value of a graph is float32.

A cause is an argument, a constant, a number with a dtype, a cast or an operation. Each result has
the cause of its operands, unless the operation itself is the cause.
"""

from collections.abc import Collection
from typing import NamedTuple

from mpjax._jaxpr.graph import Graph, Operation, Value
from mpjax._jaxpr.locations import Source, lines_of_call


class Cause(NamedTuple):
  """Why a value is float32.

  Fields:
    kind: the kind of the cause, as in `Leak.kind`.
    name: the path of an argument, the type of a constant, or the name of an operation.
    dtype: the dtype that the cause has, which may be float64.
    source: the line of the cause; None if unknown.
    deliberate: whether it is an operation that runs in float32 deliberately, such as a sum.
    anyway: whether another operand has a deliberate cause, so that the value would be float32
      without this cause too.
    entry: the operation at which a low-precision value became float32 because of it; None if it
      met no low-precision value.
  """

  kind: str
  name: str
  dtype: str
  source: Source | None = None
  deliberate: bool = False
  anyway: bool = False
  entry: Operation | None = None


class Causes:
  """The causes of the float32 values of a graph.

  Args:
    graph: the graph of a function.
    parameters: the names of the arguments that are parameters.
    neutral: the kinds of causes that take the dtype of the other operands, as parameters do under
      a policy.
  """

  def __init__(self, graph: Graph, parameters: Collection[str], neutral: Collection[str]) -> None:
    self.parameters, self.neutral = parameters, neutral
    self._causes: dict[Value, Cause | None] = {}
    # Values in low precision, and all that is computed from them.
    self._from_low = {v for v in graph.arguments if v.is_low}
    # From a float32 value to the low-precision value that it is a cast of.
    self._cast_from: dict[Value, Value] = {}
    # Operands come before their results, so one walk in order suffices. The carry of a loop has the
    # cause of its initial value.
    for operation in graph.operations:
      is_from_low = any(v in self._from_low for v in operation.operands)
      # A float32 result of low-precision operands still counts as computed from them.
      self._from_low.update(v for v in operation.results if is_from_low or v.is_low)
      for result in operation.results:
        if result.is_wide:
          self._causes[result] = self._of_result(operation, result, is_from_low)

  def why(self, value: Value) -> Cause | None:
    """Returns why a value is float32; None if it is not, or is a cast of a low-precision value."""
    if value.made_by is not None or not value.is_wide:
      return self._causes.get(value)
    if value.kind == "argument":
      # No operation made the value, so it is an argument, a constant or a literal.
      kind = "parameter" if value.label in self.parameters else "argument"
    else:
      kind = "constant" if value.aval.shape else "number"
    return Cause(kind, value.label, str(value.dtype))

  def of_operands(self, operation: Operation) -> Cause | None:
    """Returns why an operation has float32 operands; None if it casts all of them itself."""
    pairs = [(v, cause) for v in operation.operands if (cause := self.why(v)) is not None]
    if not pairs:
      return None
    # One float32 operand is enough to widen a result. Name the operand that the user can change.
    value, cause = min(pairs, key=lambda pair: self._rank(pair[1]))
    # The first operation where the cause meets low precision is where the dtype changes. In `x * x`
    # both operands are the value itself, which meets nothing else. Loops and branches compute none.
    others = (v for v in operation.operands if v is not value)
    meets_low = not operation.joins and any(v in self._from_low for v in others)
    if cause.entry is None and meets_low:
      cause = cause._replace(entry=operation)
    if cause.source is None:  # An argument or a constant has the line that uses it first.
      cause = cause._replace(source=operation.where.source)
    return cause._replace(anyway=any(each.deliberate or each.anyway for _, each in pairs))

  def widens(self, operation: Operation, kind: str) -> bool:
    """Whether an operation makes a low-precision operand float32 because of another operand.

    Args:
      operation: the entry of a cause.
      kind: the kind of the cause. An operation of which all operands were cast by the code widens
        nothing.
    """
    low = [v for v in operation.operands if v.is_low or v in self._cast_from]
    return any(kind != "cast" or self.why(v) is None for v in low)

  def _rank(self, cause: Cause) -> tuple[bool, ...]:
    """Returns the order of the causes of several operands. The smallest decides."""
    # Arrays come before numbers, whether they are numbers with a dtype or arrays of it.
    is_number = cause.kind in ("number", "filled")
    met_nothing = cause.entry is None
    # Neutral causes come last, but nothing gives a float64 operand another dtype.
    is_neutral = cause.kind in self.neutral and cause.dtype != "float64"
    # In `where(mask, x16 * np.float32(2), -1e9)` the second number is float32 because of the first.
    is_number_alone = is_number and met_nothing
    # A number that made a value float32 comes before a later cast to the dtype of that value, such
    # as `w.astype(x.dtype)`.
    is_cast = cause.kind == "cast"
    return is_neutral, is_number_alone, cause.deliberate, is_cast, is_number, met_nothing

  def _of_result(self, operation: Operation, result: Value, is_from_low: bool) -> Cause | None:
    """Returns the cause of a result, and notes whether it is a cast of a low-precision value."""
    own = own_cause(operation, result)
    if operation.casts and operation.operands[0].is_low:
      # Later checks treat a cast value as the low-precision value that it is.
      self._cast_from[result] = operation.operands[0]
      call = lines_of_call(operation.eqn)
      # The promotion in `x + table` belongs to the same call as the addition. A cast whose
      # consumers belong to other calls is in the user's code, and a cause.
      others = all(lines_of_call(each.eqn) != call for each in result.consumers)
      return own._replace(kind="cast") if call and others else None
    if operation.casts and operation.operands[0].kind == "literal":
      return Cause("number", operation.operands[0].label, str(result.dtype))
    wide = [v for v in operation.operands if v.is_wide]
    # A moved cast is still that value, for example after a broadcast.
    if operation.moves and wide and all(v in self._cast_from for v in wide):
      self._cast_from[result] = self._cast_from[wide[0]]
    cause = self.of_operands(operation)
    if is_from_low and self._is_deliberate(operation, result, cause):
      return own._replace(deliberate=True)
    if cause is not None:
      # `jnp.full(shape, 2, float32)` broadcasts a literal. The report names the array that the user
      # wrote.
      is_number_alone = cause.kind == "number" and cause.entry is None
      if is_number_alone and operation.moves and result.aval.shape:
        name = f"{result.dtype}[{','.join(map(str, result.aval.shape))}] of {cause.name}"
        return Cause("filled", name, cause.dtype, operation.where.source)
      return cause
    if result in self._cast_from:
      return None
    # All float32 operands are casts by the call of the operation itself.
    dtypes = dict.fromkeys(str(self._cast_from[v].dtype) for v in wide if v in self._cast_from)
    # Bfloat16 and float16 promote to float32. Neither operand is wrong by itself, so the operation
    # is the cause.
    if len(dtypes) > 1 and not self.neutral:
      name = f"{operation.name} of {' and '.join(dtypes)}"
      return own._replace(kind="operation", name=name, entry=operation)
    # Such a call casts on purpose: `jnp.sum` of a bfloat16 array does.
    return own._replace(deliberate=bool(wide))

  def _is_deliberate(self, operation: Operation, result: Value, cause: Cause | None) -> bool:
    """Whether an operation on low precision is itself the cause, being of the float32 list.

    Without a policy it runs in the dtype of its operands: a softmax of float32 logits is float32
    because of the logits. The mean of a cast array is a cause of its own, since the cast was meant
    for the mean alone.
    """
    if operation.part != "float32":
      return False
    # An elementwise function, such as `exp`, returns as many elements as the cast array. There the
    # cast would be the cause.
    reduces = any(result.size < v.size for v in operation.operands[:1])
    # With a policy, `neutral` is not empty. Then the float32 list decides alone.
    return bool(self.neutral) or cause is None or (cause.kind == "cast" and reduces)


def own_cause(operation: Operation, value: Value) -> Cause:
  """Returns the operation itself as the cause of a float32 operand or result."""
  # Matmuls have kinds of their own, because their cures differ: an operand's cast or
  # `preferred_element_type`.
  if operation.facts.flops is None:
    kind = "operation"
  else:
    kind = "promotion" if any(v.is_wide for v in operation.operands) else "matmul"
  return Cause(kind, operation.name, str(value.dtype), operation.where.source)
