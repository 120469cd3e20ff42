"""Choose the dtype of each matmul and convolution, and write its derivative rule if needed."""

from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import JaxprEqn

from mpjax._autocast.consumers import Flag, runs_as_written
from mpjax._autocast.kinds import Kind, Role
from mpjax._autocast.precision import asked_precision, retype
from mpjax._autocast.rewriter import Rewriter
from mpjax._autocast.scopes import TABLE, ScopePolicy
from mpjax._autocast.settings import Settings
from mpjax._autocast.values import FloatValue
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.compat import context_of
from mpjax._jaxpr.count import (
  FEWEST_PRODUCTS,
  dot_axes,
  is_small_matmul,
  matmul_sizes,
  sums_few_products,
)
from mpjax._jaxpr.locations import location
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import Atom, aval_of, dtype_of
from mpjax._matmul.format_rounding import ShownMatmul
from mpjax._matmul.matmul import Matmul, RecipeMatmul, equation
from mpjax._matmul.protocol import Recipe
from mpjax._matmul.recipes import recipe_of
from mpjax._policy.audit_record import AUDIT

Operands: TypeAlias = Sequence[FloatValue | None]
"""The operands of an equation; None for operands that are not floating."""

OF_INPUTS = "its operands are inputs and constants"
"""The reason for an audit why a matmul runs as written without a request of the user."""


def matmul(rewriter: Rewriter, eqn: JaxprEqn, values: Operands, low: DType) -> None:
  """Writes a matmul or a convolution. Its dtype depends on its operands alone."""
  # The cases are those of the table in `operations.py`.
  kinds = _kinds_of_operands(rewriter, eqn, values)
  if not kinds:  # Of complex numbers or float64.
    return rewriter.write_as_traced(eqn)
  if all(kind.role in (Role.NUMBER, Role.INPUT) for kind in kinds):
    return rewriter.write_as_traced(rewriter.explained(eqn, "low", OF_INPUTS))
  # A rounded coordinate loses detail, and a rounded rotation is no longer orthogonal.
  few_of = "a small matrix" if is_small_matmul(eqn) else None
  if any(kind.role == Role.INPUT for kind in kinds) and sums_few_products(eqn):
    few_of = "an input"
  if few_of is not None and not _has_own_precision(eqn, rewriter.scope_policy(eqn)):
    reason = f"it sums fewer than {FEWEST_PRODUCTS} products of {few_of}"
    return _in_float32(rewriter, rewriter.explained(eqn, "low", reason), values, low)
  return _in_low_precision(rewriter, eqn, values, low)


def _kinds_of_operands(rewriter: Rewriter, eqn: JaxprEqn, values: Operands) -> list[Kind]:
  """Returns the kinds of the operands; a matmul casts integers to float itself."""
  kinds = [v.kind for v in values if v is not None]
  integers = [v for v in eqn.invars[:2] if not jnp.issubdtype(aval_of(v).dtype, jnp.inexact)]
  return kinds + [rewriter.kind_of_integers(v, FLOAT32) for v in integers if kinds]


def _role_in_float32(values: Operands) -> Role:
  """Returns the role of the result of a float32 matmul, which is rounded if an operand is."""
  return max(Role.UNROUNDED, *(v.kind.role for v in values if v is not None))


def _in_float32(rewriter: Rewriter, eqn: JaxprEqn, values: Operands, low: DType) -> None:
  """Writes in float32 a matmul that sums few products. Its result is an activation."""
  operands = [rewriter.read(atom, eqn, FLOAT32) for atom in eqn.invars]
  result = Kind(_role_in_float32(values), FLOAT32)
  rewriter.write_rounding(eqn, operands, [result], low, retype(eqn, FLOAT32))


def _in_low_precision(rewriter: Rewriter, eqn: JaxprEqn, values: Operands, low: DType) -> None:
  """Writes a matmul in a recipe, with a derivative rule, or with the rule of JAX."""
  scope_policy = rewriter.scope_policy(eqn)
  policy, recipe = scope_policy.policy, None
  if policy is not None and policy.matmul is not None:
    recipe = recipe_of(policy.matmul)
    reason = _why_no_recipe(eqn, values, recipe, scope_policy, rewriter.settings)
    if reason is not None:
      eqn = rewriter.explained(eqn, "format", f"{recipe.name}:{reason}")
      recipe = None
  if recipe is None and _has_own_precision(eqn, scope_policy):
    return rewriter.write_as_traced(eqn, role=_role_in_float32(values))
  eqn = eqn.replace(params=rewriter.precise(eqn, eqn.params, [low] * len(eqn.invars)))
  # A float32 result of the policy is the float32 sum of the matmul, perhaps with a bias.
  leaves = bool(rewriter.flags_of_results(eqn) & Flag.OUTPUT)
  returns_sum = leaves and recipe is None and facts_of(eqn).dtype_param is not None
  out = FLOAT32 if returns_sum else low
  gradients = None if policy is None else policy.weight_grad_dtype
  if gradients is None and low == jnp.float16 and facts_of(eqn).flops != "convolution":
    # The gradient of a weight sums over all rows of a batch, so it may leave the range of float16
    # although no summand does. No matmul uses it, so float32 costs few bytes. cuDNN has no
    # convolution that rounds its operands only, and XLA would cast them to float32.
    gradients = FLOAT32
  # A recipe computes the gradients of weights in float32 itself.
  if recipe is not None:
    rule = _in_recipe(rewriter, eqn, values, low, recipe)
    return rewriter.write(rule, rule.invars, [Kind(Role.ACTIVATION, low)])
  if (rule := _with_rule(rewriter, eqn, values, low, out, gradients)) is not None:
    return rewriter.write(rule, rule.invars, [Kind(Role.ACTIVATION, out)])
  operands = [rewriter.read(atom, eqn, low) for atom in eqn.invars]
  return rewriter.write(eqn, operands, [Kind(Role.ACTIVATION, low)], retype(eqn, low))


def _has_own_precision(eqn: JaxprEqn, scope_policy: ScopePolicy) -> bool:
  """Whether the user has asked for a precision, or has cast all operands."""
  return FLOAT32 not in map(dtype_of, eqn.invars) or runs_as_written(eqn, scope_policy)


# Matmuls with a derivative rule.


def _why_no_recipe(
  eqn: JaxprEqn, values: Operands, recipe: Recipe, scope_policy: ScopePolicy, settings: Settings
) -> str | None:
  """Returns why a matmul stays in the compute dtype; None if the recipe applies."""
  # The texts are for `mpjax.audit`.
  if TABLE in scope_policy.scope:
    return "it is an embedding"
  if facts_of(eqn).flops == "convolution":
    return "it is no dot_general"
  if np.dtype("float64") in map(dtype_of, eqn.invars[:2]):
    return "it is in float64"
  if _asks_for_precision(eqn):
    return "the code asks for its precision"
  if settings.in_derivative:
    # JAX transposes the rule, which must be linear in its tangents. Rounding is not linear.
    return "it is in a derivative rule"
  # If the function itself takes a gradient, its jaxpr holds the backward pass as plain matmuls.
  if location(eqn).direction != "forward":
    return "its gradient is taken inside"
  if _has_other_groups(eqn):
    return "its groups are others than those of lax.ragged_dot"
  weight = _weight_of(values)
  if weight < 0:
    return "no operand is a parameter"
  *free, depth = matmul_sizes(eqn)
  # The symbolic size of an exported function may be any number.
  if min((n for n in (*free, depth) if not is_symbolic_dim(n)), default=2) < 2:
    return "it has one row or column"
  return recipe.why_not(depth, free[weight])


def _asks_for_precision(eqn: JaxprEqn) -> bool:
  """Whether the code sets a precision, or a result dtype that promotion would not give."""
  dtypes, params = {dtype_of(v) for v in eqn.invars[:2]}, eqn.params
  promoted = FLOAT32 if FLOAT32 in dtypes else min(dtypes, key=str)
  if asked_precision(params["precision"]) != "":
    return True
  return params["preferred_element_type"] not in (None, promoted)


def _has_other_groups(eqn: JaxprEqn) -> bool:
  """Whether the groups differ from those of `jax.lax.ragged_dot` with one list of sizes."""
  if len(eqn.invars) < 3:
    return False
  return not dot_axes(eqn.params).groups or aval_of(eqn.invars[2]).ndim > 1


def _weight_of(values: Operands) -> int:
  """Returns the position of the weight; of two parameters, or arguments, it is the right one."""
  # Under autocast a batch is an argument too, unless `data_argnums` names it. No rule can tell the
  # batch in `x @ (w + a @ b)` from the weight in `w @ relu(x)`.
  return max((i for i, v in enumerate(values) if v is not None and v.kind.weight), default=-1)


def _with_rule(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  values: Operands,
  low: DType,
  out: DType,
  gradients: DType | None,
) -> JaxprEqn | None:
  """Returns a matmul with a derivative rule; None if JAX's own rule suffices.

  Its result is in `out`, and the gradients of its weights are in `gradients`.
  """
  widens = gradients is not None and gradients.itemsize > low.itemsize
  wide = [gradients if widens and v is not None and _is_uncast(v) else None for v in values]
  # JAX gives a gradient the dtype of the operand, and would multiply a float32 cotangent in
  # float32. Only these two cases need a rule of mpjax.
  if out == low and not any(wide):
    return None
  operands = _operands(rewriter, eqn, values, low, wide)
  rule = Matmul(eqn.primitive, tuple(retype(eqn, low).items()), low, out, tuple(wide))
  return _equation(eqn, rule, operands)


def _in_recipe(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, low: DType, recipe: Recipe
) -> JaxprEqn:
  """Returns a matmul in the format of a recipe, with gradients of weights in float32."""
  wide = [FLOAT32 if v is not None and _is_uncast(v) else None for v in values]
  operands = _operands(rewriter, eqn, values, low, wide)
  index = _weight_of(values)
  weight = values[index]
  # Also if the function casts the weight itself: the rule takes the variable before that cast, so
  # that the gradient stays in float32.
  wide[index] = FLOAT32
  if weight is not None and weight.uncast is not None:
    operands[index] = weight.uncast
  # A recipe sees its operands in the compute dtype. The sizes of groups keep their type.
  types = list(map(aval_of, operands))
  types[:2] = (x.update(dtype=low, weak_type=False) for x in types[:2])
  params = tuple({**eqn.params, "precision": None, "preferred_element_type": low}.items())
  record = AUDIT.value
  is_shown = record is not None and record.shows_roundings
  cls = ShownMatmul if is_shown else RecipeMatmul
  rule = cls(eqn.primitive, params, low, low, (*wide,), (*types,), recipe, index)
  return _equation(eqn, rule, operands)


def _operands(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, low: DType, wide: Sequence[DType | None]
) -> list[Atom]:
  """Returns the operands; a weight is cast inside the rule, so that its gradient is `wide`."""
  return [
    v.atom if v is not None and dtype is not None else rewriter.read(atom, eqn, low)
    for atom, v, dtype in zip(eqn.invars, values, wide, strict=True)
  ]


def _equation(eqn: JaxprEqn, rule: Matmul, operands: Sequence[Atom]) -> JaxprEqn:
  """Returns an equation that runs a rule, in the context and at the line of another equation."""
  with context_of(eqn):
    product = equation(rule, eqn.ctx, *map(aval_of, operands))
  return eqn.replace(primitive=product.primitive, invars=list(operands), params=product.params)


def _is_uncast(value: FloatValue) -> bool:
  """Whether a value is a weight that the function has not cast to low precision."""
  return value.kind.weight and value.kind.role == Role.PARAMETER
