"""Matmuls in a recipe whose roundings are operations: quantising an operand is one of them.

A recipe takes many steps, which have no derivative or a false one. `mpjax.sensitivity` traces this
form instead, in which two dequantised operands are multiplied. Products are the same. Sums are in
float32 and in another order, and are rounded once to the dtype of the result.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from mpjax._core.types import FLOAT32, Array, DType
from mpjax._jaxpr.locations import EMULATED
from mpjax._jaxpr.reader import aval_of
from mpjax._matmul.block_dot import Layout
from mpjax._matmul.matmul import Levels, RecipeMatmul
from mpjax._matmul.protocol import Multiply, Operand, OperandRole, Product, Scaled

format_rounding_p = Primitive("format_rounding")
"""An operand of a matmul, quantised by its `rule` and dequantised, in float32.

The first `mapped` axes are those of `vmap`s, in which each index has scales of its own. The
derivative is that of the operand itself.
"""


class ShownMatmul(RecipeMatmul):
  """A matmul in a recipe with an operation for each rounding of an operand."""

  def once_differentiable(self, x: Array) -> Array:
    # The derivative of the roundings is right here. The derivative of a gradient is refused still.
    return x

  def quantised(self, x: Array, layout: Layout, role: OperandRole, product: Product) -> Scaled:
    params = {"layout": layout, "role": role, "product": product}
    return Scaled(format_rounding_p.bind(x, rule=self, mapped=0, **params))

  def rounded(self, layout: Layout, role: OperandRole, product: Product, x: Array) -> Array:
    """Returns an operand in the numbers of the format, as float32."""
    scaled = super().quantised(x, layout, role, product)
    return self.dequantised(scaled, jax.typeof(x), layout, role, product)

  def types_in_format(
    self, like: ShapedArray, layout: Layout, role: OperandRole, product: Product
  ) -> Scaled:
    """Returns the types of an operand in the format, and of its scales."""
    quantise = functools.partial(super().quantised, layout=layout, role=role, product=product)
    return jax.eval_shape(quantise, jax.ShapeDtypeStruct(like.shape, like.dtype))

  def multiply(
    self,
    primitive: Primitive,
    params: Mapping[str, Any],
    layouts: Sequence[Layout],
    told: Sequence[Operand],
    operands: Sequence[Any],
    sizes: Sequence[Array],
  ) -> Multiply:
    def call(left: Scaled, right: Scaled, sums: DType) -> Array:
      dtypes = {**params, "preferred_element_type": sums}
      with jax.named_scope(EMULATED):
        return primitive.bind(left.values, right.values, *sizes, **dtypes)

    return call

  def product(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    return jax.lax.convert_element_type(multiply(left, right, FLOAT32), dtype)

  def is_requantised(self, side: int, scaled: Scaled) -> bool:
    # `scaled` is dequantised already, so it has no scales.
    other = 1 - side
    layout = self.layouts(dict(self.params), self.operands[:2], first=0)[other]
    types = self.types_in_format(self.operands[other], layout, self.role_of(other), "forward")
    return super().is_requantised(side, types)

  def sums_examples(self, side: int, other: Scaled, levels: Levels) -> bool:
    return self.why_not_gradient(side) is not None or not self.is_requantised(side, other)

  def _wide(self, side: int, kept: Scaled) -> Array:
    return kept.values


def format_of(eqn: JaxprEqn) -> tuple[str, float]:
  """Returns the name of the format of a `format_rounding`, and the mean relative error of it."""
  params = dict(eqn.params)
  rule, like, mapped = params.pop("rule"), aval_of(eqn.invars[0]), params.pop("mapped")
  dtype = rule.types_in_format(like.update(shape=like.shape[mapped:]), **params).values.dtype
  name = dtype.name if rule.recipe.block is None else rule.recipe.name
  if not jnp.issubdtype(dtype, jnp.integer):
    return name, roundoff(dtype)
  # A recipe may use fewer integers than the dtype has. It maps the largest element to the largest.
  # The spacing of numbers is the largest element over it, and the error is the spacing / sqrt(12).
  # Of about a thousand normal numbers, the largest is sqrt(12) times the root mean square, and both
  # factors cancel.
  block = rule.recipe.block
  ones = jnp.ones([1] * (like.ndim - mapped) if block is None else [1, block, block], like.dtype)
  operand = Operand(rule.summed(params["layout"]), params["role"], params["product"])
  values, *_ = rule.recipe.quantise(ones, operand)
  return name, 1 / float(jnp.max(jnp.abs(values)))


def roundoff(dtype: DType) -> float:
  """Returns the relative error of a rounding to a floating dtype, as a mean: half the largest."""
  return float(jnp.finfo(dtype).eps) / 4


def _evaluate(
  x: Array, *, rule: ShownMatmul, layout: Layout, role: OperandRole, product: Product, mapped: int
) -> Array:
  call = functools.partial(rule.rounded, layout, role, product)
  for _ in range(mapped):
    call = jax.vmap(call)
  return call(x)


def _batch(
  operands: Sequence[Array], dims: Sequence[int], *, mapped: int, **params: Any
) -> tuple[Array, int]:
  x = jnp.moveaxis(operands[0], dims[0], 0)
  return format_rounding_p.bind(x, mapped=mapped + 1, **params), 0


format_rounding_p.def_impl(_evaluate)
format_rounding_p.def_abstract_eval(lambda aval, **_: aval.update(dtype=FLOAT32, weak_type=False))
ad.defjvp(format_rounding_p, lambda t, x, **_: jax.lax.convert_element_type(t, FLOAT32))
batching.primitive_batchers[format_rounding_p] = _batch
mlir.register_lowering(format_rounding_p, mlir.lower_fun(_evaluate, multiple_results=False))
