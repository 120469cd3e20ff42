"""Follow the errors of roundings to low precision through a graph.

A rounding is a matmul in low precision or a cast of a float32 value, inside a policy. One forward
walk gives each value a `History`: its last rounding, and the operations since. The group of a
primitive decides what an operation does to a history.

After an activation function, a softmax or a norm the error is relative.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from mpjax._autocast.matmuls import OF_INPUTS
from mpjax._autocast.scopes import REGION, policy_of
from mpjax._core.types import is_low_precision
from mpjax._jaxpr.count import sums_few_products
from mpjax._jaxpr.graph import Graph, Operation, Value, moved_from
from mpjax._jaxpr.locations import NOT_IN
from mpjax._jaxpr.primitives import Group
from mpjax._policy.active import FULL_PRECISION

_MOST_ROOTS = 16
"""The most roots of a value. With more it is a residual stream, and becomes a root itself."""

Roots: TypeAlias = Mapping[Value, frozenset[Operation]]
"""The values that a value is computed from, each with the roundings since."""

_NO_ROOTS: Roots = types.MappingProxyType({})


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


class Histories:
  """The histories of the values of a graph."""

  def __init__(self, graph: Graph, parameters: frozenset[str]) -> None:
    self._graph, self._parameters = graph, parameters
    self._histories: dict[Value, History] = {}

  def add_all(self) -> None:
    """Adds the results of every operation."""
    # The carry of a loop takes the history of the iteration before, which a second walk knows.
    for _ in range(self._graph.walks):
      for operation in self._graph.operations:
        self._add(operation)

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


def histories_of(graph: Graph, parameters: frozenset[str]) -> Histories:
  """Returns the histories of all values of a graph.

  Args:
    graph: the graph of a function that was traced for an audit.
    parameters: the names of the arguments that are parameters of a model.
  """
  histories = Histories(graph, parameters)
  histories.add_all()
  return histories


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
  if narrows and is_computed and in_low_region(operation):
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
  if is_float32_of_inputs(operation, before):
    return _rounded(operation, history)
  if not operation.operands[0].is_low or not in_low_region(operation):
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
  rounds = not is_wide_matmul(rounding)
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


# How arguments and constants are used.


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


# Matmuls and policies.


def is_float32_of_inputs(operation: Operation, before: list[History]) -> bool:
  """Whether a matmul of inputs and constants runs in float32 under a low-precision policy."""
  # The rewriter gives other reasons, such as a high precision, which the user chose.
  is_asked = operation.where.marked(NOT_IN["low"]) != OF_INPUTS
  if operation.facts.flops is None or is_asked or not in_low_region(operation):
    return False
  # A matmul with few products runs in float32 anyway.
  return all(x.given for x in before[:2]) and not sums_few_products(operation.eqn)


def is_wide_matmul(operation: Operation) -> bool:
  """Whether an operation is a matmul without any low precision."""
  values = (*operation.operands[:2], *operation.results)
  return operation.facts.flops is not None and not any(v.is_low for v in values)


def in_low_region(operation: Operation) -> bool:
  """Whether a policy with a low compute dtype applies to an operation."""
  return bool(low_compute_dtype(operation)) and FULL_PRECISION not in operation.where.scopes


def _is_meant_wide(operation: Operation) -> bool:
  """Whether a float32 policy, or a float32 region, applies to an operation."""
  scopes = operation.where.scopes
  # A region without a low compute dtype has a float32 policy, or a rule exempts it.
  has_policy = operation.where.marked(REGION) is not None and not low_compute_dtype(operation)
  return FULL_PRECISION in scopes or has_policy


def low_compute_dtype(operation: Operation) -> str:
  """Returns the compute dtype of its policy if it is low precision; otherwise ""."""
  region = operation.where.marked(REGION)
  policy = None if region is None else policy_of(region)
  is_low = policy is not None and is_low_precision(policy.compute_dtype)
  return policy.compute_dtype.name if policy is not None and is_low else ""
