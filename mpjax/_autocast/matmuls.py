"""Which matmuls have a rule, and their equations."""

from collections.abc import Sequence

from jax.export import is_symbolic_dim
from jax.extend.core import JaxprEqn

from mpjax._autocast.rewriter import Rewriter, asked_precision, retype
from mpjax._autocast.scopes import TABLE
from mpjax._autocast.values import Scope, Settings, Value
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.compat import context_of
from mpjax._jaxpr.count import dot_axes, matmul_sizes
from mpjax._jaxpr.locations import location
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of
from mpjax._matmul.matmul import Matmul, Recipe, RecipeMatmul, equation


def why_in_half(
  eqn: JaxprEqn, values: Sequence[Value | None], recipe: Recipe, scope: Scope, settings: Settings
) -> str | None:
  """Returns why a matmul is left in the compute dtype; None if it is to be in the recipe's."""
  if TABLE in scope or facts_of(eqn).flops == "convolution":
    return "it is an embedding" if TABLE in scope else "it is no dot_general"
  dtypes, params = {dtype_of(v) for v in eqn.invars[:2]}, eqn.params
  plain = (None, FLOAT32 if FLOAT32 in dtypes else min(dtypes, key=str))
  if asked_precision(params["precision"]) or params["preferred_element_type"] not in plain:
    return "the code asks for its precision"
  if settings.in_derivative:
    # JAX transposes what is linear in a tangent, and an operand that is rounded is not linear.
    return "it is in a derivative rule"
  if location(eqn).direction != "forward":
    return "its gradient is taken inside"
  if len(eqn.invars) > 2 and (not dot_axes(params).groups or aval_of(eqn.invars[2]).ndim > 1):
    return "its groups are others than those of lax.ragged_dot"
  weight = _weight_of(values)
  if weight < 0:
    return "no operand is a parameter"
  *free, depth = matmul_sizes(eqn)
  # A size that is a symbol, of what is exported, may be any.
  if min((n for n in (*free, depth) if not is_symbolic_dim(n)), default=2) < 2:
    return "it has one row or column"
  return recipe.why_not(depth, free[weight])


def _weight_of(values: Sequence[Value | None]) -> int:
  """Returns which operand is the weight; of two parameters, or arguments, it is the right one."""
  # Under autocast a batch is an argument too, unless the user names it as data. No rule tells the
  # batch in `x @ (w + a @ b)` from the weight in `w @ relu(x)`, nor the attention of a batch,
  # `softmax(x @ x.T) @ x`, from a weight that is used twice.
  return max((i for i, v in enumerate(values) if v is not None and v.kind.parameter), default=-1)


def by_rule(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  half: DType,
  out: DType,
  wide: DType | None,
  recipe: Recipe | None = None,
) -> JaxprEqn | None:
  """Returns a matmul into `out`, with gradients of weights in `wide`; None if it needs no rule."""
  wide = None if wide is None or wide.itemsize <= half.itemsize else wide
  each = [wide if v is not None and v.is_parameter else None for v in values]
  if recipe is None and out == half and not any(each):
    return None
  operands = [
    value.atom if value is not None and keeps else rewriter.read(atom, eqn, half)
    for atom, value, keeps in zip(eqn.invars, values, each, strict=True)
  ]
  if recipe is None:
    rule = Matmul(eqn.primitive, tuple(retype(eqn, half).items()), half, out, tuple(each))
  else:
    weight = _weight_of(values)
    parameter, each[weight] = values[weight], wide
    if parameter is not None and parameter.stored is not None:
      operands[weight] = parameter.stored
    types = list(map(aval_of, operands))
    types[:2] = (x.update(dtype=half, weak_type=False) for x in types[:2])
    params = tuple({**eqn.params, "precision": None, "preferred_element_type": half}.items())
    rule = RecipeMatmul(eqn.primitive, params, half, out, (*each,), (*types,), recipe, weight)
  with context_of(eqn):
    product = equation(rule, eqn.ctx, *map(aval_of, operands))
  return eqn.replace(primitive=product.primitive, invars=operands, params=product.params)
