"""Find roundings to low precision that reach an operation which magnifies their error.

A rounding is a matmul in low precision or a cast of a float32 value, inside a policy. A sink is an
operation that magnifies its error. One forward walk gives each value a `History`: its last
rounding, and the operations since.

After an activation function, a softmax or a norm the error is relative. These therefore end the
search for most sinks. Comparisons look past them, since a monotonic function keeps the ties of a
rounding. A comparison is a risk if one side is an order statistic (maximum, sort, `top_k`) of the
other. A difference is a risk if both sides contain squares of one value after different roundings.
`argmax`, ReLU, masks and a value minus its own mean or maximum are therefore not risks.

Only the forward pass counts, since the backward pass has the same lines.
"""

import dataclasses
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from mpjax._autocast.matmuls import FEWEST_PRODUCTS, OF_INPUTS
from mpjax._autocast.scopes import REGION, policy_of
from mpjax._core.types import is_low_precision
from mpjax._debug.findings import merged, unnumbered
from mpjax._debug.suggested_changes import cure_of, low_cure
from mpjax._jaxpr.graph import Graph, Operation, Value, moved_from
from mpjax._jaxpr.locations import NOT_IN, Source, lines_of_call
from mpjax._jaxpr.primitives import Group
from mpjax._policy.active import FULL_PRECISION

RiskKind: TypeAlias = Literal[
  "angle",
  "index",
  "comparison",
  "complex exponential",
  "linear algebra",
  "difference",
  "denominator",
  "lookup",
  "float32 matmul",
]


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

_MOST_ROOTS = 16
"""The most roots of a value. With more it is a residual stream, and becomes a root itself."""

Roots: TypeAlias = Mapping[Value, frozenset[Operation]]
"""The values that a value is computed from, each with the roundings since."""

_NO_ROOTS: Roots = types.MappingProxyType({})


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


class History(NamedTuple):
  """The roundings and operations that a value is computed from.

  Fields:
    rounding: the last rounding among the operations that compute it. A float32 matmul of inputs
      counts too, since it would be one in low precision.
    passed: the kinds of operations since: "activation", "integer" or "sum".
    linear: the values in which it is linear, each with the roundings since.
    products: the factors of the products that it sums, each with the roundings since.
    own: the factors that are multiplied with themselves.
    order_of: the values of which it is a maximum, a minimum or a sorted array.
    exact: whether a low-precision dtype can hold its elements, also if it is float32.
    mask: whether its elements are 0 or 1.
    negative: whether its sign is flipped.
    given: whether it is computed from inputs and constants, without float32 on purpose.
  """

  rounding: Operation | None = None
  passed: frozenset[str] = frozenset()
  linear: Roots = _NO_ROOTS
  products: Roots = _NO_ROOTS
  own: frozenset[Value] = frozenset()
  order_of: frozenset[Value] = frozenset()
  exact: bool = False
  mask: bool = False
  negative: bool = False
  given: bool = False


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
  sinks = [*_Walk(graph, frozenset(parameters)).sinks()]
  # Low precision would make these matmuls a risk, so they are not reported as slow.
  in_risks = {rounding for kind, rounding, _ in sinks if kind != "float32 matmul"}
  for kind, rounding, sink in sinks:
    is_wide = _is_wide_matmul(rounding)
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
    cure=low_cure(first, _compute_dtype(first)) if is_wide else cure_of(first),
    share=sum(x.flops or 0 for x in roundings) / total,
  )


class _Walk:
  """The histories of the values of a graph."""

  def __init__(self, graph: Graph, parameters: frozenset[str]) -> None:
    self._graph, self._parameters = graph, parameters
    self._histories: dict[Value, History] = {}

  def sinks(self) -> Iterator[tuple[RiskKind, Operation, Operation]]:
    """Yields the kind of each risk, the operation that rounds, and the sink."""
    # The carry of a loop takes the history of the iteration before, which a second walk knows.
    for _ in range(self._graph.walks):
      for operation in self._graph.operations:
        self._add(operation)
    for operation in self._graph.computing():
      # A print has operands and no results.
      computes = operation.used and operation.operands and operation.results
      if operation.where.direction == "forward" and computes:
        yield from self._sinks(operation)

  def of(self, value: Value) -> History:
    """Returns the history of a value; an argument or a constant starts a new one."""
    if value not in self._histories:
      # A parameter only scales other values, so it is no root.
      is_parameter = value.kind == "argument" and value.label in self._parameters
      is_data = value.kind in ("argument", "constant") and not is_parameter
      # Differences cancel between functions of one value, which must be a root to be recognized.
      is_root = (is_data and not _is_only_factor(value)) or _is_squared(value)
      linear = {value: frozenset[Operation]()} if is_root else {}
      literal = value.kind == "literal"
      low = value.is_low
      self._histories[value] = History(
        linear=linear,
        exact=low and not literal,
        mask=literal and _number(value) in (0, 1),
        given=not is_parameter and not low,
      )
    return self._histories[value]

  def _add(self, operation: Operation) -> None:
    # The carry of a loop is known in the second walk.
    first = operation.operands[:1] if operation.joins == "carry" else operation.operands
    before = [self.of(v) for v in operation.operands if v in self._histories or v in first]
    # An operation without operands, such as `iota`, adds nothing. `of` starts its history.
    if not before:
      return
    for result in operation.results:
      history = _with_root(operation, result, before)
      # `given` ends at a parameter, at low precision, and at float32 on purpose.
      is_given = all(x.given for x in before) and not _is_meant_wide(operation)
      self._histories[result] = history._replace(
        given=is_given and not result.is_low, exact=history.exact or result.is_low
      )

  def _sinks(self, operation: Operation) -> Iterator[tuple[RiskKind, Operation, Operation]]:
    before = [self.of(v) for v in operation.operands]
    for kind, reached in _SINKS.items():
      # Both operands may have the same rounding.
      for rounding in dict.fromkeys(reached(operation, before)):
        yield kind, rounding, operation


# The history of a result.


def _with_root(operation: Operation, result: Value, before: list[History]) -> History:
  """Returns the history of a result, which becomes a root if it is linear in no other value."""
  history = _history(operation, result, before)
  # Unions of roots would grow with the depth of a residual network.
  is_many = max(len(history.linear), len(history.products)) > _MOST_ROOTS
  # Without any root before, the value is computed from numbers and parameters alone.
  is_data = operation.facts.flops is not None or any(x.linear for x in before)
  if not is_many and (history.linear or not is_data):
    return history
  products = _NO_ROOTS if is_many else history.products
  # The new root has no roundings since.
  return history._replace(linear={result: frozenset()}, products=products)


def _history(operation: Operation, result: Value, before: list[History]) -> History:
  if operation.casts:
    return _cast(operation, result, before[0])
  if operation.facts.flops is not None:
    return _matmul(operation, before)
  if operation.facts.group is not None:
    return _TRANSFERS[operation.facts.group](operation, before)
  if operation.facts.tests:
    return _joined(before)._replace(mask=True)
  if operation.moves or operation.facts.exact:
    return _moved(operation, before)
  return _activated(operation, before)


def _cast(operation: Operation, result: Value, before: History) -> History:
  value = operation.operands[0]
  # A cast of a bool gives a mask of 0 and 1, which is exact.
  if not value.is_floating:
    return before._replace(mask=before.mask or value.dtype == np.bool_)
  # A cast of an exact value, or of 0 and 1, changes no number.
  narrows = result.is_low and value.is_wide and not before.exact and not before.mask
  # A cast of an argument belongs to the matmul or bias that uses it. A number, such as the square
  # root of a depth, is not data.
  is_computed = moved_from(value).kind == "operation" and bool(before.linear or before.products)
  if narrows and is_computed and _in_low_region(operation):
    return _rounded(operation, before)
  return before


def _rounded(operation: Operation, before: History) -> History:
  """Returns the history after a rounding."""
  # Both sides of a later difference may have the same roots, with other roundings since.
  linear = {root: since | {operation} for root, since in before.linear.items()}
  products = {root: since | {operation} for root, since in before.products.items()}
  return before._replace(rounding=operation, passed=frozenset(), linear=linear, products=products)


def _matmul(operation: Operation, before: list[History]) -> History:
  history = _product(operation, before)
  if _is_meant_wide(operation):
    # The user has followed the advice. Otherwise the search would name one matmul after the other.
    return history._replace(rounding=None)
  # A float32 matmul of inputs counts as a rounding, since in low precision it would be one.
  if any(_float32_matmul(operation, before)):
    return _rounded(operation, history)
  if not operation.operands[0].is_low or not _in_low_region(operation):
    return history
  # A product of low-precision numbers that returns its float32 sum rounds nothing.
  wide = (moved_from(v).is_wide for v in operation.operands[:2])
  rounds = operation.results[0].is_low or any(wide)
  return _rounded(operation, history) if rounds else history


def _joined(before: Iterable[History]) -> History:
  """Returns the history of a value that is linear in several."""
  every = [*before]
  # By default an operation keeps none of these. `_moved` sets them again.
  if len(every) == 1:
    return every[0]._replace(order_of=frozenset(), exact=False, mask=False, given=False)
  # One rounding is named for each value. The latest one is closest to the sink.
  last = max(every, key=_priority)
  # Operands with another last rounding have passed other operations.
  passed = [x.passed for x in every if x.rounding is last.rounding]
  return History(
    rounding=last.rounding,
    passed=frozenset[str]().union(*passed),
    linear=_union(x.linear for x in every),
    products=_union(x.products for x in every),
    own=frozenset[Value]().union(*(x.own for x in every)),
    # The first term stands for the sign of a sum.
    negative=every[0].negative,
  )


def _priority(history: History) -> tuple[bool, bool, bool, int]:
  """Orders histories: roundings without an activation since are larger, then later ones."""
  rounding = history.rounding
  if rounding is None:
    return False, False, False, -1
  rounds = not _is_wide_matmul(rounding)
  return rounds, True, "activation" not in history.passed, rounding.step.number


def _union(roots: Iterable[Roots]) -> Roots:
  # Most unions have one member. Sharing it avoids a copy for each operation.
  some = [each for each in roots if each]
  if len(some) < 2:
    return some[0] if some else _NO_ROOTS
  union: dict[Value, frozenset[Operation]] = {}
  for each in some:
    for root, since in each.items():
      union[root] = union.get(root, frozenset()) | since
  return union


def _activated(_: Operation, before: list[History]) -> History:
  """Returns the history after an activation function, which is linear in no value."""
  history = _joined(before)
  passed = history.passed | {"activation"}
  return History(rounding=history.rounding, passed=passed)


def _moved(operation: Operation, before: list[History]) -> History:
  pairs = zip(before, operation.operands, strict=False)
  return _joined(before)._replace(
    exact=all(x.exact or v.kind == "literal" for x, v in pairs),
    mask=all(x.mask for x in before),
    order_of=frozenset[Value]().union(*(x.order_of for x in before)),
  )


def _ordered(operation: Operation, before: list[History]) -> History:
  # A comparison looks for the value before casts on its other side.
  values = {moved_from(v) for v in operation.operands if v.is_floating}
  # A maximum over rows and then over devices is a maximum of each value.
  history = _moved(operation, before)
  return history._replace(order_of=history.order_of | values)


def _select(operation: Operation, before: list[History]) -> History:
  condition, *cases = before
  # `leaky_relu`, for example, selects by the sign of the same value.
  if condition.rounding and condition.rounding is _joined(cases).rounding:
    return _activated(operation, cases)
  return _moved(operation, cases)


def _clip(operation: Operation, before: list[History]) -> History:
  """Returns the history after `max`, `min` or `clamp`, which is linear in no value."""
  return _moved(operation, before)._replace(linear=_NO_ROOTS, products=_NO_ROOTS, own=frozenset())


def _product(operation: Operation, before: list[History]) -> History:
  left, right = before[:2]
  # The sign flips once for each negative factor.
  negative = left.negative ^ right.negative ^ any(map(_is_negative, operation.operands[:2]))
  roundings = left.rounding is not None and right.rounding is not None
  # A gate multiplies a value by an activation of another one. Its error is relative.
  is_gate = ("activation" in left.passed) != ("activation" in right.passed)
  if operation.eqn.primitive is p.mul_p and roundings and is_gate:  # or a norm
    history = _activated(operation, [left, right])
  elif left.linear and right.linear and not (left.mask or right.mask):
    history = _multiplied(left, right)
  else:  # A parameter, a number or a mask scales the other factor.
    history = _joined([left, right])
  return history._replace(negative=negative)


def _multiplied(left: History, right: History) -> History:
  # A product of products keeps all factors.
  factors = [_union([x.linear, x.products]) for x in (left, right)]
  joined = _joined([left, right])
  # A factor on both sides is a square.
  own = joined.own | (factors[0].keys() & factors[1].keys())
  return joined._replace(linear=_NO_ROOTS, products=_union(factors), own=own)


def _is_negative(value: Value) -> bool:
  number = _number(moved_from(value))
  return number is not None and number < 0


def _number(value: Value) -> float | None:
  """Returns the number of a real literal; None for other values."""
  dtype = value.dtype
  # Complex literals have no sign, and a key has no number.
  is_number = dtype is not None and (dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer))
  is_literal = value.kind == "literal" and (value.is_floating or is_number)
  return float(np.asarray(value.data).item()) if is_literal else None


def _squared(operation: Operation, before: list[History]) -> History:
  # `integer_pow` has an exponent. `square` has none.
  if operation.eqn.params.get("y", 2) != 2:
    return _activated(operation, before)
  return _multiplied(before[0], before[0])


def _ratio(operation: Operation, before: list[History]) -> History:
  # Dividing by a parameter or a number scales. Dividing by a rounded value, as a norm does, makes
  # the error relative.
  over, under = before
  return _joined([over]) if under.rounding is None else _activated(operation, before)


def _added(_: Operation, before: list[History]) -> History:
  return _joined(before)


def _negated(_: Operation, before: list[History]) -> History:
  return before[0]._replace(negative=not before[0].negative, order_of=frozenset())


def _summed(_: Operation, before: list[History]) -> History:
  history = _joined(before)
  return history._replace(passed=history.passed | {"sum"})


def _to_integer(_: Operation, before: list[History]) -> History:
  return before[0]._replace(passed=before[0].passed | {"integer"})


_TRANSFERS: Mapping[Group, Callable[[Operation, list[History]], History]] = {
  "addition": _added,
  "clip": _clip,
  "move": _moved,
  "negation": _negated,
  "order": _ordered,
  "power": _squared,
  "product": _product,
  "quotient": _ratio,
  "rounding": _to_integer,
  "selection": _select,
  "sum": _summed,
}


# The roundings that an operation magnifies.


def _direct(before: Iterable[History], *barred: str) -> Iterator[Operation]:
  """Yields the last roundings without an activation function, or a kind in `barred`, since."""
  for x in before:
    # After an activation the error is relative, so the sink no longer magnifies it.
    if x.rounding is not None and x.passed.isdisjoint(("activation", *barred)):
      yield x.rounding


def _angle(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if operation.facts.role == "angle":
    yield from _direct(before)


def _index(operation: Operation, before: list[History]) -> Iterator[Operation]:
  value = operation.operands[0]
  dtype = operation.results[0].dtype
  # Integers of one byte are quantized values, not indices.
  is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 1
  if operation.casts and value.is_floating and is_integer:
    yield from _direct(before)
  # Both `x % 1` and `x - floor(x)` are the remainder of a value after whole periods.
  # The integer side has passed a floor. The other side has not.
  wraps = operation.eqn.primitive is p.sub_p and "integer" in before[1].passed - before[0].passed
  if operation.eqn.primitive is p.rem_p or (wraps and before[0].rounding is before[1].rounding):
    yield from _direct(before[:1])


def _comparison(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if not operation.facts.tests or len(before) < 2:
    return
  values = operation.operands
  # The maximum may be on either side of the comparison.
  for number, other in ((0, 1), (1, 0)):
    rounding = before[number].rounding
    is_own = moved_from(values[number]) in before[other].order_of
    if is_own and rounding is not None and not _is_derivative(operation, values[other]):
      yield rounding


def _is_derivative(comparison: Operation, order: Value) -> bool:
  """Whether a comparison belongs to the derivative of the call that computes the maximum."""
  # The derivative of a maximum compares each element with it, to find the argument that was chosen.
  made_by = order.made_by
  while made_by is not None and made_by.facts.group != "order":
    made_by = made_by.operands[0].made_by if made_by.operands else None
  return made_by is not None and _same_call(made_by, comparison)


def _same_call(one: Operation, other: Operation) -> bool:
  calls = [lines_of_call(*(step.eqn for step in x.step.enclosing())) for x in (one, other)]
  return bool(calls[0]) and calls[0] == calls[1]


def _complex_exponential(operation: Operation, before: list[History]) -> Iterator[Operation]:
  dtype = operation.operands[0].dtype
  is_complex = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
  if operation.facts.role == "exponential" and is_complex:
    yield from _direct(before)


def _linear_algebra(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if operation.facts.role == "linear algebra":
    yield from _direct(before)


def _difference(operation: Operation, before: list[History]) -> Iterator[Operation]:
  # Additions and subtractions alone can cancel.
  if operation.facts.gradient != "added":
    return
  left, right = before
  # `a - b` of equal signs cancels, and so does `a + b` of different signs.
  subtracts = (left.negative == right.negative) == (operation.eqn.primitive is p.sub_p)
  shared = left.products.keys() & right.products.keys() & (left.own | right.own)
  for root in shared if subtracts else ():
    # Roundings that both sides share cancel exactly.
    differing = left.products[root] ^ right.products[root]
    yield from sorted(differing, key=lambda x: x.step.number)


def _denominator(operation: Operation, before: list[History]) -> Iterator[Operation]:
  # `integer_pow` divides only with a negative exponent. Other primitives here always divide.
  power = operation.eqn.params.get("y", -1)
  if operation.facts.divides and (operation.eqn.primitive is not p.integer_pow_p or power < 0):
    for rounding in _direct(before[-1:], "sum"):
      # Bfloat16 has the range of float32, so it neither overflows nor underflows here.
      if any(v.dtype == jnp.float16 for v in rounding.results):
        yield rounding


def _lookup(operation: Operation, before: list[History]) -> Iterator[Operation]:
  if operation.facts.flops is None or operation.matmul_dtype is None:
    return
  # A one-hot matmul in low precision selects rounded rows of the table.
  low = all(v.is_low for v in operation.operands[:2]) and _in_low_region(operation)
  for mask, table in ((0, 1), (1, 0)):
    source = moved_from(operation.operands[table])
    if low and before[mask].mask and source.is_wide and source.kind == "constant":
      yield operation


def _uses(value: Value) -> Iterator[Operation]:
  """Yields the operations that use a value, directly or through moves and casts."""
  # The list grows while it is read: moves and casts lead to further uses.
  uses = [*value.consumers]
  seen = set[Operation]()  # The carry of a loop leads back to itself.
  for each in uses:
    if each in seen:
      continue
    seen.add(each)
    if each.casts or each.moves:
      uses += [x for result in each.results for x in result.consumers]
    else:
      yield each


def _is_only_factor(value: Value) -> bool:
  """Whether only matmuls use an argument or a constant, as for a weight."""
  uses = [*_uses(value)]
  # Such an array is a weight in all but name. Its own value reaches no difference.
  return bool(uses) and all(each.facts.flops is not None for each in uses)


def _is_squared(value: Value) -> bool:
  """Whether a parameter is multiplied with itself, as the entries of a codebook are."""
  if value.kind not in ("argument", "constant"):
    return False
  for each in _uses(value):
    is_product = each.eqn.primitive is p.mul_p and len({moved_from(v) for v in each.operands}) == 1
    if is_product or each.facts.group == "power":
      return True
  return False


def _float32_matmul(operation: Operation, before: list[History]) -> Iterator[Operation]:
  # The rewriter gives other reasons, such as a high precision, which the user chose.
  is_asked = operation.where.marked(NOT_IN["low"]) != OF_INPUTS
  if operation.facts.flops is None or is_asked or not _in_low_region(operation):
    return
  # A matmul with few products runs in float32 anyway.
  if all(x.given for x in before[:2]) and _contracted(operation) >= FEWEST_PRODUCTS:
    yield operation


def _is_wide_matmul(operation: Operation) -> bool:
  values = (*operation.operands[:2], *operation.results)
  return operation.facts.flops is not None and not any(v.is_low for v in values)


def _contracted(operation: Operation) -> int:
  """Returns how many products each element of a matmul sums."""
  # A product and its addition are two FLOPs.
  flops = operation.flops or 0
  size = operation.results[0].size
  return flops // max(2 * size * operation.times, 1)


_SINKS: Mapping[RiskKind, Callable[[Operation, list[History]], Iterator[Operation]]] = {
  "angle": _angle,
  "index": _index,
  "comparison": _comparison,
  "complex exponential": _complex_exponential,
  "linear algebra": _linear_algebra,
  "difference": _difference,
  "denominator": _denominator,
  "lookup": _lookup,
  "float32 matmul": _float32_matmul,
}


def _in_low_region(operation: Operation) -> bool:
  """Whether a policy with a low compute dtype applies to an operation."""
  return bool(_compute_dtype(operation)) and FULL_PRECISION not in operation.where.scopes


def _is_meant_wide(operation: Operation) -> bool:
  """Whether a float32 policy, or a float32 region, applies to an operation."""
  scopes = operation.where.scopes
  # A region without a low compute dtype has a float32 policy, or a rule exempts it.
  has_policy = operation.where.marked(REGION) is not None and not _compute_dtype(operation)
  return FULL_PRECISION in scopes or has_policy


def _compute_dtype(operation: Operation) -> str:
  """Returns the compute dtype of its policy if it is low precision; otherwise ""."""
  region = operation.where.marked(REGION)
  policy = None if region is None else policy_of(region)
  is_low = policy is not None and is_low_precision(policy.compute_dtype)
  return policy.compute_dtype.name if policy is not None and is_low else ""
