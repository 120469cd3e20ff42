"""Choose the dtype of each matmul and convolution, and write its derivative rule if needed."""

from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import JaxprEqn

from mpjax._autocast.consumers import Flag, runs_as_written
from mpjax._autocast.kinds import Kind, Role
from mpjax._autocast.precision import asked_precision, in_precision, retype
from mpjax._autocast.rewriter import FloatValue, Rewriter
from mpjax._autocast.scopes import TABLE
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.compat import context_of, with_scope
from mpjax._jaxpr.count import (
  FEWEST_PRODUCTS,
  dot_axes,
  is_small_matmul,
  matmul_sizes,
  sums_few_products,
)
from mpjax._jaxpr.locations import NOT_IN, location
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of
from mpjax._matmul.format_rounding import ShownMatmul
from mpjax._matmul.matmul import Matmul, RecipeMatmul, equation
from mpjax._matmul.protocol import Recipe
from mpjax._matmul.recipes import recipe_of

Operands: TypeAlias = Sequence[FloatValue | None]
"""The operands of an equation; None for operands that are not floating."""

OF_INPUTS = "its operands are inputs and constants"
"""The reason for an audit why a matmul runs as written without a request of the user."""


def matmul(rewriter: Rewriter, eqn: JaxprEqn, values: Operands, low: DType) -> None:
  """Writes a matmul or a convolution. Its dtype depends on its operands alone."""
  # The cases are those of the table in `operations.py`.
  kinds = [v.kind for v in values if v is not None]
  if not kinds:  # Of complex numbers or float64.
    return rewriter.write_as_traced(eqn)
  # A matmul casts an operand of integers to float itself.
  integers = [v for v in eqn.invars[:2] if not jnp.issubdtype(aval_of(v).dtype, jnp.inexact)]
  roles = {kind.role for kind in kinds}
  roles |= {rewriter.kind_of_integers(v, FLOAT32).role for v in integers}
  if roles <= {Role.NUMBER, Role.INPUT}:
    return rewriter.write_as_traced(_explained(eqn, "low", OF_INPUTS))
  # Whether the user has asked for a precision, or has cast all operands.
  is_cast = FLOAT32 not in map(dtype_of, eqn.invars)
  own = is_cast or runs_as_written(eqn, rewriter.scope_policies(eqn))
  # A float32 result is rounded if an operand is.
  role = max(Role.UNROUNDED, *(kind.role for kind in kinds))
  # A rounded coordinate loses detail, and a rounded rotation is no longer orthogonal.
  few_of = "a small matrix" if is_small_matmul(eqn) else None
  if Role.INPUT in roles and sums_few_products(eqn):
    few_of = "an input"
  if few_of is not None and not own:
    reason = f"it sums fewer than {FEWEST_PRODUCTS} products of {few_of}"
    eqn = _explained(eqn, "low", reason)
    operands = [rewriter.read(atom, eqn, FLOAT32) for atom in eqn.invars]
    return rewriter.write_rounding(eqn, operands, [Kind(role, FLOAT32)], low, retype(eqn, FLOAT32))
  recipe, policy = None, rewriter.scope_policies(eqn).region.policy
  if policy is not None and policy.matmul is not None:
    recipe = recipe_of(policy.matmul)
    reason = _why_no_recipe(rewriter, eqn, values, recipe)
    if reason is not None:
      eqn, recipe = _explained(eqn, "format", f"{recipe.name}:{reason}"), None
  if own and recipe is None:
    return rewriter.write_as_traced(eqn, role=role)
  return _in_low_precision(rewriter, eqn, values, low, recipe)


def _explained(eqn: JaxprEqn, precision: str, reason: str) -> JaxprEqn:
  """Returns a matmul whose name stack tells an audit why it is not in a precision."""
  names = with_scope(eqn.source_info.name_stack, NOT_IN[precision] + reason)
  return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))


def _why_no_recipe(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, recipe: Recipe
) -> str | None:
  """Returns why a matmul stays in the compute dtype; None if the recipe applies."""
  # The texts are for `mpjax.audit`.
  if TABLE in rewriter.scope_policies(eqn).scope:
    return "it is an embedding"
  if facts_of(eqn).flops == "convolution":
    return "it is no dot_general"
  dtypes = {dtype_of(v) for v in eqn.invars[:2]}
  if np.dtype("float64") in dtypes:
    return "it is in float64"
  # The code may also set a dtype of the result that promotion would not give.
  promoted = FLOAT32 if FLOAT32 in dtypes else min(dtypes, key=str)
  result = eqn.params["preferred_element_type"]
  has_result = result is not None and result != promoted  # None would equal float64
  if asked_precision(eqn.params["precision"]) != "" or has_result:
    return "the code asks for its precision"
  if rewriter.settings.in_derivative:
    # JAX transposes the rule, which must be linear in its tangents. Rounding is not linear.
    return "it is in a derivative rule"
  # If the function itself takes a gradient, its jaxpr holds the backward pass as plain matmuls.
  if location(eqn).direction != "forward":
    return "its gradient is taken inside"
  is_grouped = len(eqn.invars) > 2
  if is_grouped and (not dot_axes(eqn.params).groups or aval_of(eqn.invars[2]).ndim > 1):
    return "its groups are others than those of lax.ragged_dot"
  weight = _weight_of(values)
  if weight < 0:
    return "no operand is a parameter"
  *free, depth = matmul_sizes(eqn)
  # The symbolic size of an exported function may be any number.
  if min((n for n in (*free, depth) if not is_symbolic_dim(n)), default=2) < 2:
    return "it has one row or column"
  return recipe.why_not(depth, free[weight])


def _weight_of(values: Operands) -> int:
  """Returns the position of the weight; of two parameters, or arguments, it is the right one."""
  # Under autocast a batch is an argument too, unless `data_argnums` names it. No rule can tell the
  # batch in `x @ (w + a @ b)` from the weight in `w @ relu(x)`.
  return max((i for i, v in enumerate(values) if v is not None and v.kind.weight), default=-1)


def _in_low_precision(
  rewriter: Rewriter, eqn: JaxprEqn, values: Operands, low: DType, recipe: Recipe | None
) -> None:
  """Writes a matmul in a recipe, with a derivative rule of mpjax, or with the rule of JAX."""
  scope_policy = rewriter.scope_policies(eqn)
  policy, asked = scope_policy.region.policy, scope_policy.asked
  # `Rewriter.write` sets them too, but a derivative rule of mpjax holds them inside.
  params = in_precision(eqn.primitive, eqn.params, [low] * len(eqn.invars), asked)
  eqn = eqn.replace(params=params)
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
  if recipe is not None:  # It computes the gradients of weights in float32 itself.
    gradients = FLOAT32
  widens = gradients is not None and gradients.itemsize > low.itemsize
  # The dtype of the gradient of each weight that the function has not cast to low precision.
  kinds = [None if v is None else v.kind for v in values]
  uncast = [kind is not None and kind.weight and kind.role == Role.PARAMETER for kind in kinds]
  gradient_dtypes = [gradients if widens and each else None for each in uncast]
  # JAX gives a gradient the dtype of the operand, and would multiply a float32 cotangent in
  # float32. Only these two cases, and recipes, need a rule of mpjax.
  if recipe is None and out == low and not any(gradient_dtypes):
    operands = [rewriter.read(atom, eqn, low) for atom in eqn.invars]
    return rewriter.write(eqn, operands, [Kind(Role.ACTIVATION, low)], retype(eqn, low))
  # A weight is cast inside the rule, so that its gradient is wide.
  operands = [
    v.atom if v is not None and dtype is not None else rewriter.read(atom, eqn, low)
    for atom, v, dtype in zip(eqn.invars, values, gradient_dtypes, strict=True)
  ]
  if recipe is None:
    rule = Matmul(eqn.primitive, tuple(retype(eqn, low).items()), low, out, tuple(gradient_dtypes))
  else:
    index = _weight_of(values)
    weight = values[index]
    # Also if the function casts the weight itself: the rule takes the variable before that cast, so
    # that the gradient stays in float32.
    gradient_dtypes[index] = FLOAT32
    if weight is not None and weight.uncast is not None:
      operands[index] = weight.uncast
    # A recipe sees its operands in the compute dtype. The sizes of groups keep their type.
    types = list(map(aval_of, operands))
    types[:2] = (x.update(dtype=low, weak_type=False) for x in types[:2])
    params = tuple({**eqn.params, "precision": None, "preferred_element_type": low}.items())
    cls = ShownMatmul if rewriter.settings.shows_roundings else RecipeMatmul
    rule = cls(eqn.primitive, params, low, low, (*gradient_dtypes,), (*types,), recipe, index)
  with context_of(eqn):
    product = equation(rule, eqn.ctx, *map(aval_of, operands))
  # In the context and at the line of the matmul.
  written = eqn.replace(primitive=product.primitive, params=product.params)
  return rewriter.write(written, operands, [Kind(Role.ACTIVATION, out)])
