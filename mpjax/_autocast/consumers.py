"""Describe the consumers of each value of a jaxpr by flags.

One backward walk finds the flags before any equation is written. They pass from a result to its
operands through arithmetic and moves. A matmul, the end of a Flax layer and the user's cast to low
precision stop them. The addition of two arrays stops them too, and gives its operands `SUM`, or
`GATED` if one of them is a product.
A flag can only widen an operation.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import convert_element_type_p

from mpjax._autocast.origins import (
  Origin,
  Origins,
  adds_arrays,
  deciding,
  has_one_product,
  is_array,
  is_rounded,
  of_atoms,
  origins_inside,
  origins_of,
)
from mpjax._autocast.precision import asked_precision
from mpjax._autocast.scopes import ScopedSettings, ScopePolicies, ScopePolicy
from mpjax._core.types import FLOAT32, FLOATS, HALVES, DType
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.count import is_small_matmul
from mpjax._jaxpr.op_lists import part_of
from mpjax._jaxpr.primitives import AS_TRACED, Row, facts_of, is_higher_order
from mpjax._jaxpr.reader import Atom, Inner, dtype_of, inner_jaxprs


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
  # A consumer is a float32 result of the policy, perhaps after moves, a loss scale and the addition
  # of a bias. It widens every operation, and a matmul returns its float32 sum.
  OUTPUT = 8
  # A consumer is the sum of an array and a product, perhaps after arithmetic and moves. It widens
  # like `FLOAT32` if the array is float32, and otherwise widens nothing.
  GATED = 16


class Flags(NamedTuple):
  """The consumers of the variables of a jaxpr, as flags."""

  of: Mapping[Atom, int]  # the flags of each variable
  addends: Mapping[Atom, tuple[Atom, ...]]  # the arrays to which values with `GATED` are added
  sums: Mapping[Atom, tuple[Atom, ...]]  # the operands that decide the dtype of each sum of arrays
  # The origin of each variable, if the jaxpr has sums of arrays or jaxprs inside.
  origins: Mapping[Atom, Origin]


@cached_per_jaxpr
def flags_of(
  jaxpr: Jaxpr, outs: tuple[int, ...], ins: Origins, scoped: ScopedSettings
) -> tuple[Flags, ScopePolicies]:
  """Returns the flags of each variable, and the policies.

  `outs` are the flags of each result, and `ins` the origins of the arguments.
  """
  flags, addends = dict[Atom, int](), dict[Atom, tuple[Atom, ...]]()
  scope_policies = ScopePolicies(scoped)
  adding = [eqn for eqn in jaxpr.eqns if adds_arrays(eqn)]
  # Only sums of arrays, here or inside, depend on where values come from.
  has_sums = bool(adding) or any(map(is_higher_order, jaxpr.eqns))
  origins = origins_of(jaxpr, ins, scoped).of if has_sums else {}
  sums: dict[Atom, tuple[Atom, ...]] = {eqn.outvars[0]: deciding(eqn, origins) for eqn in adding}

  def note(atoms: Sequence[Atom], each: Iterable[int], added: Sequence[Iterable[Atom]]) -> None:
    # Flags are only added, so another consumer never lowers a precision.
    for atom, new, arrays in zip(atoms, each, added, strict=True):
      if new and not isinstance(atom, Literal):
        flags[atom] = flags.get(atom, 0) | new
        if new & Flag.GATED:
          addends[atom] = tuple(dict.fromkeys((*addends.get(atom, ()), *arrays)))

  note(jaxpr.outvars, outs, [()] * len(jaxpr.outvars))
  # Backwards: the flags of a result are complete when the equation that computes it is reached.
  for eqn in reversed(jaxpr.eqns):
    results = tuple([flags.get(v, 0) for v in eqn.outvars])
    behind = tuple(x for v in eqn.outvars for x in addends.get(v, ()))
    if is_higher_order(eqn):
      operands = of_atoms(eqn.invars, origins)
      note(eqn.invars, *_of_call(eqn, results, behind, operands, scope_policies))
      continue
    each, added = _of_operation(eqn, results, scope_policies), [behind] * len(eqn.invars)
    # In `x + gate * y` the sum rounds `x`, unless it is float32. An array may be a literal with
    # `jax_use_simplified_jaxpr_constants`; then the sum widens its operands.
    has_literal = any(isinstance(atom, Literal) for atom in eqn.invars)
    is_sum = bool(each & Flag.SUM) and adds_arrays(eqn)
    if is_sum and not has_literal and has_one_product(of_atoms(eqn.invars, origins)):
      each = each & ~Flag.SUM | Flag.GATED
      added = [eqn.invars[1:], eqn.invars[:1]]
    note(eqn.invars, [each] * len(eqn.invars), added)
  return Flags(flags, addends, sums, origins), scope_policies


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
  if (end := scope_policies.end(eqn)) is not None:
    if end.of_policy:
      return Flag.OUTPUT if end.dtype == FLOAT32 else 0
    # The end of a layer rounds, unless the policy returns the result of the layer in float32.
    return behind & Flag.OUTPUT
  if runs_as_written(eqn, scope_policy):
    return Flag.FLOAT32
  if eqn.primitive is convert_element_type_p:
    # The user's cast to low precision rounds anyway. A cast to float32 changes no value.
    return 0 if eqn.params["new_dtype"] in HALVES else behind
  match part_of(eqn, scope_policies.scoped.settings.ops):
    case "half":
      # A matmul casts its operands to its own dtype, so the consumers of its result do not matter.
      return Flag.FLOAT32 if is_small_matmul(eqn) else 0
    case "promote" | "keep":
      return _through_arithmetic(eqn, behind)
    case _:  # the float32 list, and operations in their traced dtypes
      return Flag.FLOAT32 | (behind & Flag.OUTPUT if facts_of(eqn).scales else 0)


def runs_as_written(eqn: JaxprEqn, scope_policy: ScopePolicy) -> bool:
  """Whether the user or a rule has chosen the precision of an operation."""
  if scope_policy.low_dtype is None or eqn.params.get("out_dtype") is not None:
    return True
  # A precision only matters for float32. A matmul of low-precision operands reads no float32.
  if FLOAT32 not in map(dtype_of, eqn.invars):
    return False
  result = eqn.params.get("preferred_element_type")
  # NumPy takes None for float64 in a comparison.
  has_result = result is not None and result != FLOAT32
  return asked_precision(eqn.params.get("precision")) != "" or has_result


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
    widened = behind & Flag.SUM and facts.arithmetic and not facts.adds
    return _own_flags(facts) | passed | (Flag.FLOAT32 if widened else 0)
  # A float32 result of the policy widens this operation, so it is a consumer in float32. Only the
  # addition of a bias passes OUTPUT on: the matmul before it then returns its float32 sum.
  passes = facts.gradient == "added" and not all(map(is_array, eqn.invars))
  return behind & ~(0 if passes else Flag.OUTPUT) | Flag.FLOAT32 | _own_flags(facts)


def _own_flags(facts: Row) -> int:
  """Returns the flag of an operation as a consumer, without the flags of its result."""
  if facts.adds:
    return Flag.SUM
  # Subtractions, floors and sorts: the rounding of an operand may change all of the result.
  if facts.acts_as == "sum" or facts.orders:
    return Flag.FLOAT32
  return Flag.PRODUCT if facts.acts_as == "product" else 0


def _of_call(
  eqn: JaxprEqn,
  outs: tuple[int, ...],
  behind: tuple[Atom, ...],
  operands: Sequence[Origin],
  scope_policies: ScopePolicies,
) -> tuple[Sequence[int], Sequence[Iterable[Atom]]]:
  """Returns the flags that an equation with inner jaxprs gives each operand, and its addends.

  `behind` are the addends of the results.
  """
  inners, count = inner_jaxprs(eqn), len(eqn.invars)
  # An equation that is not entered reads its operands in the dtypes of the trace.
  if (
    facts_of(eqn).holds in AS_TRACED
    or not inners
    or any(inner.operands is None for inner in inners)
  ):
    return (Flag.FLOAT32,) * count, [()] * count
  each, added = [0] * count, [behind] * count
  inside = scope_policies.inside(eqn)
  for inner in inners:
    # The condition of a `while` returns a boolean, which has no flags.
    results = outs if inner.returns else (0,) * len(inner.jaxpr.outvars)
    ins = origins_inside(operands, inner, inside)
    if inner.carry:
      results = flags_of_loop(inner, results, ins, inside)
    flags, _ = flags_of(inner.jaxpr, results, ins, inside)
    outside = dict[Atom, int](zip(inner.jaxpr.invars, inner.operands or (), strict=True))
    # Constants inside have no kind here.
    origins = {**flags.origins, **dict.fromkeys(inner.jaxpr.constvars, Origin())}
    for var, i in outside.items():
      each[i] |= flags.of.get(var, 0)
      arrays, others = terms_of(flags.addends.get(var, ()), outside, flags.sums, origins)
      added[i] = (*added[i], *(eqn.invars[outside[x]] for x in arrays))
      each[i] |= Flag.FLOAT32 if others else 0
  return each, added


def terms_of(
  arrays: Iterable[Atom],
  known: Container[Atom],
  sums: Mapping[Atom, tuple[Atom, ...]],
  origins: Mapping[Atom, Origin],
) -> tuple[list[Atom], bool]:
  """Returns the known variables that arrays are or add, and whether others may be float32.

  An array may be written after the product that is added to it. A sum is then as wide as the
  operands that decide its dtype. Results of matmuls, ends of layers and casts are rounded. Any
  other array counts as float32, since the order of operations must not lower a precision.
  """
  found, others, todo = list[Atom](), False, list(arrays)
  while todo:
    atom = todo.pop()
    if isinstance(atom, Literal):
      others = True
    elif atom in known:
      found.append(atom)
    elif atom in sums:
      todo += sums[atom]
    else:
      others = others or not is_rounded(atom, origins)
  return found, others


def flags_of_loop(
  body: Inner, outs: tuple[int, ...], ins: Origins, scoped: ScopedSettings
) -> tuple[int, ...]:
  """Returns the flags of the results of a loop's body; the next iteration is a consumer too."""
  count = len(body.carry)
  # The roundings of a carry add up over the iterations, so each carry has a consumer in float32.
  outs = (*(flags | Flag.FLOAT32 for flags in outs[:count]), *outs[count:])
  # A fixed point: the flags with which the body reads a carry are also flags of the result that
  # becomes this carry. Flags are only added, so the loop ends.
  while True:
    flags, _ = flags_of(body.jaxpr, outs, ins, scoped)
    back = [flags.of.get(v, 0) for v in body.jaxpr.invars[body.carry.start : body.carry.stop]]
    again = tuple(a | b for a, b in zip(outs, back, strict=False)) + outs[count:]
    if again == outs:
      return outs
    outs = again
