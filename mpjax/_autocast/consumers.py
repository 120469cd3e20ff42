"""Describe the consumers of each value of a jaxpr by four flags.

One backward walk finds the flags before any equation is written. They pass from a result to its
operands through arithmetic and moves. A matmul, the end of a Flax layer and the user's cast to low
precision stop them. The addition of two arrays stops them too, and gives its operands `SUM`.
A flag can only widen an operation.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import convert_element_type_p, reduce_precision_p

from mpjax._autocast.kinds import FLOATS
from mpjax._autocast.precision import wants_precision
from mpjax._autocast.scopes import ScopePolicy, policy_at, scope_of
from mpjax._autocast.settings import Scope, Settings
from mpjax._core.types import FLOAT32, HALVES, DType
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.compat import NameStack
from mpjax._jaxpr.op_lists import part_of
from mpjax._jaxpr.primitives import AS_TRACED, OUTER_PRODUCT, Row, facts_of, is_higher_order
from mpjax._jaxpr.reader import Atom, Inner, dtype_of, inner_jaxprs, shape_of


class Flag:
  """Bit flags that describe the consumers of a value. They are plain integers for speed.

  A float32 value with any flag is not rounded.
  """

  # A consumer is a float32 operation, `-`, a comparison, the carry of a loop or a float32 result.
  # It widens all arithmetic except the addition of two arrays.
  FLOAT32 = 1
  # A consumer is an addition, perhaps after moves and additions. It widens all arithmetic except
  # the addition of an array or a bias.
  SUM = 2
  # A consumer is a multiplication, or a result of any dtype. It widens nothing.
  PRODUCT = 4
  # A consumer is a float32 result of the policy, perhaps after moves and the addition of a bias.
  # It widens every operation, and a matmul returns its float32 sum.
  OUTPUT = 8


class ScopePolicies:
  """The scope of each equation of a jaxpr, below the scope of the jaxpr."""

  def __init__(self, settings: Settings, scope: Scope) -> None:
    self.settings, self.scope = settings, scope
    self._by_stack: dict[int, tuple[NameStack, ScopePolicy]] = {}

  def __call__(self, eqn: JaxprEqn) -> ScopePolicy:
    """Returns the scope of an equation with its policy."""
    stack = eqn.source_info.name_stack  # It is kept, so its id stays unique.
    if id(stack) not in self._by_stack:
      self._by_stack[id(stack)] = stack, policy_at(self.scope + scope_of(stack), self.settings)
    return self._by_stack[id(stack)][1]


@cached_per_jaxpr
def flags_of(
  jaxpr: Jaxpr, outs: tuple[int, ...], settings: Settings, scope: Scope
) -> tuple[Mapping[Atom, int], ScopePolicies]:
  """Returns the flags of each variable, and the policies; `outs` are the flags of each result."""
  flags, scope_policies = dict[Atom, int](), ScopePolicies(settings, scope)

  def note(atoms: Sequence[Atom], each: Iterable[int]) -> None:
    # Flags are only added, so another consumer never lowers a precision.
    for atom, new in zip(atoms, each, strict=True):
      if new and not isinstance(atom, Literal):
        flags[atom] = flags.get(atom, 0) | new

  note(jaxpr.outvars, outs)
  # Backwards: the flags of a result are complete when the equation that computes it is reached.
  for eqn in reversed(jaxpr.eqns):
    results = tuple([flags.get(v, 0) for v in eqn.outvars])
    if is_higher_order(eqn):
      note(eqn.invars, _of_call(eqn, results, scope_policies))
    else:
      note(eqn.invars, [_of_operation(eqn, results, scope_policies)] * len(eqn.invars))
  return flags, scope_policies


def flags_of_result(dtype: DType | None, *, output: bool) -> int:
  """Returns the flags of a result of the function; `dtype` is None if it may have any dtype."""
  if dtype is None:
    return Flag.PRODUCT
  if dtype != FLOAT32:
    return 0
  return Flag.OUTPUT if output else Flag.FLOAT32


def _of_operation(eqn: JaxprEqn, results: Sequence[int], scope_policies: ScopePolicies) -> int:
  """Returns the flags that an operation without inner jaxprs gives its operands."""
  scope_policy, behind = scope_policies(eqn), 0
  for var, flags in zip(eqn.outvars, results, strict=True):
    # Booleans and integers have no flags. Their operations are consumers like `-`.
    behind |= flags if dtype_of(var) in FLOATS else Flag.FLOAT32
  if eqn.primitive is reduce_precision_p and scope_policy.ends is not None:
    return _of_mark(scope_policy, behind)
  if runs_as_written(eqn, scope_policy):
    return Flag.FLOAT32
  if eqn.primitive is convert_element_type_p:
    # The user's cast to low precision rounds anyway. A cast to float32 changes no value.
    return 0 if eqn.params["new_dtype"] in HALVES else behind
  match part_of(eqn, scope_policies.settings.ops):
    case "half" if facts_of(eqn) is not OUTER_PRODUCT:
      # A matmul reads its operands in the compute dtype. Consumers of its result do not matter.
      return 0
    case "half" | "promote" | "keep":
      return _through_arithmetic(eqn, behind)
    case _:  # the float32 list, and operations in their traced dtypes
      return Flag.FLOAT32


def runs_as_written(eqn: JaxprEqn, scope_policy: ScopePolicy) -> bool:
  """Whether the user or a rule has chosen the precision of an operation."""
  if scope_policy.compute_dtype is None or eqn.params.get("out_dtype") is not None:
    return True
  # A precision only matters for float32. A matmul of low-precision operands reads no float32.
  return wants_precision(eqn.params) and FLOAT32 in map(dtype_of, eqn.invars)


def _of_mark(scope_policy: ScopePolicy, behind: int) -> int:
  """Returns the flags that the end of a layer or of a policy gives its operand."""
  if scope_policy.ends_policy:
    return Flag.OUTPUT if scope_policy.ends == FLOAT32 else 0
  # The end of a layer rounds, unless the policy returns the result of the layer in float32.
  return behind & Flag.OUTPUT


def _through_arithmetic(eqn: JaxprEqn, behind: int) -> int:
  """Returns the flags that arithmetic, a selection or a move gives its operands."""
  facts = facts_of(eqn)
  if facts.moves:
    # A move reads each element as its consumers do.
    return behind | _own_flags(facts)
  if not behind & Flag.OUTPUT:
    # Otherwise a norm of a residual stream would make the stream and all its branches float32.
    passed = 0 if adds_arrays(eqn) else behind
    # Arithmetic that a sum widens is itself a consumer in float32.
    widened = behind & Flag.SUM and facts.arithmetic and facts.folds is not operator.add
    return _own_flags(facts) | passed | (Flag.FLOAT32 if widened else 0)
  # A float32 result of the policy widens this operation, so it is a consumer in float32. Only the
  # addition of a bias passes OUTPUT on: the matmul before it then returns its float32 sum.
  passes = facts.gradient == "added" and not all(map(_is_array, eqn.invars))
  return behind & ~(0 if passes else Flag.OUTPUT) | Flag.FLOAT32 | _own_flags(facts)


def _own_flags(facts: Row) -> int:
  """Returns the flag of an operation as a consumer, without the flags of its result."""
  if facts.folds is operator.add:
    return Flag.SUM
  # Subtractions, floors and sorts: the rounding of an operand may change all of the result.
  if facts.role == "sum" or facts.orders:
    return Flag.FLOAT32
  return Flag.PRODUCT if facts.role == "product" else 0


def adds_arrays(eqn: JaxprEqn) -> bool:
  """Whether an operation adds two arrays, as in a residual sum; a bias is not an array."""
  return facts_of(eqn).folds is operator.add and all(map(_is_array, eqn.invars))


def _is_array(atom: Atom) -> bool:
  """Whether more than one axis is longer than 1."""
  # `!=` also works for the symbolic sizes of an exported function.
  return sum(size != 1 for size in shape_of(atom)) > 1


def _of_call(eqn: JaxprEqn, outs: tuple[int, ...], scope_policies: ScopePolicies) -> Sequence[int]:
  """Returns the flags that an equation with inner jaxprs gives each operand."""
  inners = inner_jaxprs(eqn)
  # An equation that is not entered reads its operands in the dtypes of the trace.
  if (
    facts_of(eqn).holds in AS_TRACED
    or not inners
    or any(inner.operands is None for inner in inners)
  ):
    return (Flag.FLOAT32,) * len(eqn.invars)
  each, inside = [0] * len(eqn.invars), (scope_policies.settings, scope_policies(eqn).inside)
  for inner in inners:
    # The condition of a `while` returns a boolean, which has no flags.
    results = outs if inner.returns else (0,) * len(inner.jaxpr.outvars)
    if inner.carry:
      results = flags_of_loop(inner, results, *inside)
    flags, _ = flags_of(inner.jaxpr, results, *inside)
    for i, var in zip(inner.operands or (), inner.jaxpr.invars, strict=True):
      each[i] |= flags.get(var, 0)
  return each


def flags_of_loop(
  body: Inner, outs: tuple[int, ...], settings: Settings, scope: Scope
) -> tuple[int, ...]:
  """Returns the flags of the results of a loop's body; the next iteration is a consumer too."""
  count = len(body.carry)
  # The roundings of a carry add up over the iterations, so each carry has a consumer in float32.
  outs = (*(flags | Flag.FLOAT32 for flags in outs[:count]), *outs[count:])
  # A fixed point: the flags with which the body reads a carry are also flags of the result that
  # becomes this carry. Flags are only added, so the loop ends.
  while True:
    flags, _ = flags_of(body.jaxpr, outs, settings, scope)
    back = [flags.get(v, 0) for v in body.jaxpr.invars[body.carry.start : body.carry.stop]]
    again = tuple(a | b for a, b in zip(outs, back, strict=False)) + outs[count:]
    if again == outs:
      return outs
    outs = again
