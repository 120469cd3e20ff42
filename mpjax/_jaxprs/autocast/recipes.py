"""Matmuls in the format of a recipe: what a recipe is, which matmuls it takes, their derivatives.

`Policy(matmul=...)`: float8 (`float8.py`), or a format of a user's. A matmul is a `dot_general`, or
a `ragged_dot` of rows in groups, as those of experts are: what differs is in `_product`. The
derivative is that of any matmul with a rule (`wide_sums.py`).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from mpjax._core.dtypes import FLOAT32
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.types import Array, DType
from mpjax._jaxprs.autocast.rewriter import Rewriter, wants_precision
from mpjax._jaxprs.autocast.run import remembered_off_mesh
from mpjax._jaxprs.autocast.scopes import FLOAT8, TABLE
from mpjax._jaxprs.autocast.values import Scope, Settings, Value
from mpjax._jaxprs.autocast.wide_sums import (
  Levels,
  Matmul,
  into,
  mapped_over,
  with_matmuls_by,
  with_rule,
)
from mpjax._jaxprs.compat import WRITTEN_OUT
from mpjax._jaxprs.count import dot_axes, matmul_sizes
from mpjax._jaxprs.locations import location
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.reader import aval_of, dtype_of

# What a recipe is.


class Scaled(NamedTuple):
  """An operand in the format of a recipe, and what it was divided by.

  Fields:
    values: the array; in low precision if there is no scale.
    scale: float32, a number or an array with the axes of `values`, of size 1 where they share one.
  """

  values: Array
  scale: Array | None = None


class Recipe(Protocol):
  """A low-precision format for matmuls: all that is known of one.

  It can be hashed, and `str(recipe)` leads back to it: "package.module:NAME".

  Fields:
    name: that of what is kept for the backward pass, for policies of `jax.checkpoint`.
    why_not: why a matmul with sums of this length, and a weight of so many columns, is left in the
      compute dtype; None if it is not.
    multiplies_gradient: whether the gradient of an operand is multiplied in the format too.
    quantise: an operand, or the gradient that comes in, to be summed over these axes.
    dot: the matmul of two of them in `dtype`.
  """

  @property
  def name(self) -> str: ...
  def why_not(self, depth: int, columns: int) -> str | None: ...
  def multiplies_gradient(self, *, of_weight: bool) -> bool: ...
  def quantise(self, x: Array, summed: Sequence[int], *, is_gradient: bool) -> Scaled: ...
  def dot(self, multiply: "Multiply", left: Scaled, right: Scaled, dtype: DType) -> Array: ...


Multiply: TypeAlias = Callable[[Scaled, Scaled, DType], Array]
"""Returns the matmul of two scaled arrays in float32, which is in this dtype until it is scaled."""


def _product(
  primitive: Primitive,
  params: Mapping[str, Any],
  sizes: Sequence[Array],
  left: Scaled,
  right: Scaled,
  sums: DType,
) -> Array:
  """Returns the matmul of two scaled arrays, in float32."""
  axes, pair = dot_axes(params), (left, right)
  if sums.itemsize < 4 and (axes.batch[0] or axes.ragged in axes.contracted[0]):
    sums = FLOAT32  # A CPU adds up some batches of matrices in the dtype of the result.
  params = {**params, "precision": None, "preferred_element_type": sums}
  result = primitive.bind(*(x.values for x in pair), *sizes, **params)
  result = jax.lax.convert_element_type(result, FLOAT32)
  for places, (values, scale) in zip(axes.of_result(left.values, right.values), pair, strict=True):
    if scale is None or scale.ndim == 0:
      result = result if scale is None else result * scale
      continue
    for axis in axes.groups if values is right.values else ():  # Each row has that of its group.
      row = jax.lax.iota(sizes[0].dtype, result.shape[places[axis]])
      group = jnp.sum(row[:, None] >= jax.lax.cumsum(sizes[0])[None], axis=1)
      scale = jnp.take(scale, group, axis=axis, mode="fill", fill_value=0)
    sized = {place: scale.shape[axis] for axis, place in places.items()}
    order = sorted(range(scale.ndim), key=lambda axis, places=places: places.get(axis, -1))
    result = result * jax.lax.reshape(scale, [sized.get(i, 1) for i in range(result.ndim)], order)
  return result


def _only_in_groups(x: Array, axis: int | None, sizes: Sequence[Array]) -> Array:
  """Returns an array with zeros for the rows of no group: they count for no scale either."""
  if axis is None:
    return x
  row = jax.lax.broadcasted_iota(sizes[0].dtype, x.shape, axis)
  return jnp.where(row < jnp.sum(sizes[0]), x, jnp.zeros((), x.dtype))


# Which matmuls are in it.


def why_not(
  eqn: JaxprEqn, values: Sequence[Value | None], recipe: Recipe, scope: Scope, settings: Settings
) -> str | None:
  """Returns why a matmul is left in the compute dtype; None if it is to be in the recipe's."""
  if TABLE in scope or facts_of(eqn).flops == "convolution":
    return "it is an embedding" if TABLE in scope else "it is no dot_general"
  dtypes, params = {dtype_of(v) for v in eqn.invars[:2]}, eqn.params
  plain = (None, FLOAT32 if FLOAT32 in dtypes else min(dtypes, key=str))
  precise = wants_precision({"precision": params["precision"]})
  if precise or params["preferred_element_type"] not in plain:
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
  if min(*free, depth) < 2:
    return "it has one row or column"
  return recipe.why_not(depth, free[weight])


def is_weight(value: Value | None) -> bool:
  """Whether an operand is created from parameters alone, or a parameter that was cast."""
  return value is not None and (value.is_parameter or value.kind.weight)


def _weight_of(values: Sequence[Value | None]) -> int:
  """Returns which operand is the weight; of two parameters, or arguments, it is the right one.

  Under autocast a batch is an argument too, unless the user names it as data. No rule tells the
  batch in `x @ (w + a @ b)` from the weight in `w @ relu(x)`, nor the attention of a batch,
  `softmax(x @ x.T) @ x`, from a weight that is used twice.
  """
  return max((i for i, value in enumerate(values) if is_weight(value)), default=-1)


# A matmul with its derivatives.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecipeMatmul(Matmul):
  """A matmul in the format of a recipe.

  Fields:
    operands: the types of its operands in `half`; the third are the sizes of groups.
    recipe: how to scale.
    weight: which operand is the weight, by its index.
  """

  operands: tuple[ShapedArray, ...]
  recipe: Recipe
  weight: int

  # A model has many layers of few kinds, and JAX traces what is jitted once for each: the matmuls
  # of 60 layers are traced in a third of the time. They are written out in the jaxpr around.

  @functools.partial(jax.jit, static_argnums=(0, 1), inline=WRITTEN_OUT)
  @jax.named_scope(FLOAT8)
  def with_kept(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, moving: tuple[int, ...], x: Array, w: Array, *sizes: Array
  ) -> tuple[Array, Sequence[Sequence[Array]]]:
    params = dict(self.params)
    axes = dot_axes(params)
    pair = (_only_in_groups(x, axes.ragged, sizes), w)
    summed = zip(pair, axes.contracted, strict=True)
    left, right = (self.recipe.quantise(x, each, is_gradient=False) for x, each in summed)
    multiply = functools.partial(_product, self.primitive, params, sizes)
    kept: list[list[Array]] = []
    for side in moving:  # The gradient of an operand is computed from the other one.
      other, scaled = 1 - side, (right, left)[side]
      if not self.recipe.multiplies_gradient(of_weight=side == self.weight):
        scaled = Scaled(jax.lax.convert_element_type(pair[other], self.half))
      elif scaled.scale is not None and scaled.scale.ndim > 0:
        # The gradient adds up over other axes of it than the result: it has other rows.
        free = axes.own(other, pair[other])
        scaled = self.recipe.quantise(pair[other], free, is_gradient=False)
      named = [checkpoint_name(x, self.recipe.name) for x in scaled if x is not None]
      kept.append([*named, *sizes])
    return self.recipe.dot(multiply, left, right, self.half), kept

  def split(self, others: Sequence[Array]) -> tuple[Scaled, Sequence[Array]]:
    """Returns what is kept of the other operand, and the sizes of groups."""
    count = len(others) - len(self.operands[2:])
    return Scaled(*others[:count]), others[count:]

  def tangent(self, side: int, t: Array, *others: Array) -> Array:
    other, sizes = self.split(others)
    values = jax.lax.convert_element_type(other.values, FLOAT32)
    values = values if other.scale is None else values * other.scale
    x, values = (jax.lax.convert_element_type(each, self.half) for each in (t, values))
    with jax.named_scope(FLOAT8):
      return self.in_half(side, x, *sizes, values)

  def gradient(
    self, side: int, like: ShapedArray, levels: Levels, cotangent: Array, *others: Array
  ) -> Array:
    like, sums = self.operands[side] if levels else like, 0
    other, sizes = self.split(others)
    if not sizes and (other.scale is None or other.scale.ndim == sum(lv[2] for lv in levels)):
      # The innermost `vmap`s that do not map over the operand: one matmul adds up over them too.
      sums = len(list(itertools.takewhile(lambda level: not level[0], levels)))
    call = functools.partial(_gradient, self, side, like, sums)
    for mapped, *kept in levels[sums:]:
      each = jax.vmap(call, in_axes=[0, *(0 if axis else None for axis in kept)])
      call = each if mapped else lambda *args, each=each: jnp.sum(each(*args), axis=0)
    with jax.named_scope(FLOAT8):
      return call(cotangent, *others)

  def check_second_order(self) -> None:
    raise MpjaxTypeError(
      f"a matmul in {self.recipe.name}",
      expected="first derivatives",
      got="a derivative of its gradient, or of its tangent",
      fix="Second derivatives are for low precision or float32: take them of the function under "
      '"mixed_bfloat16", or put a rule for the module before others.',
    )

  def in_half(self, side: int, x: Array, *others: Array) -> Array:
    *sizes, other = others
    dtypes = {"precision": None, "preferred_element_type": self.half}
    pair = (other, x) if side else (x, other)
    return self.primitive.bind(*pair, *sizes, **{**dict(self.params), **dtypes})


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _multiplied(
  matmul: RecipeMatmul, side: int, like: ShapedArray, sums: int, cotangent: Array, *others: Array
) -> Array:
  """Returns the gradient of an operand, inside of all `vmap`s but for the first `sums`."""
  other, sizes = matmul.split(others)
  axes = dot_axes(dict(matmul.params))
  rows = axes.of_result(*matmul.operands[:2])[0]
  cotangent = _only_in_groups(cotangent, rows.get(axes.ragged), sizes)
  if sums and other.scale is not None:
    # The scales of what is added up go to the gradient before it.
    scale = jax.lax.expand_dims(other.scale, range(sums, cotangent.ndim))
    cotangent = jax.lax.convert_element_type(cotangent, FLOAT32) * scale
    other = Scaled(other.values, jnp.ones((), FLOAT32))
  out = matmul.wide[side] or matmul.half

  def multiply(eqn: JaxprEqn, operands: Sequence[Array], places: Sequence[int]) -> Array:
    if not matmul.recipe.multiplies_gradient(of_weight=side == matmul.weight):
      return into(eqn.primitive, operands, {**eqn.params, "preferred_element_type": out})
    product = functools.partial(_product, eqn.primitive, eqn.params, operands[2:])
    summed = dot_axes(eqn.params).contracted
    left, right = (
      Scaled(x, other.scale) if i in places else matmul.recipe.quantise(x, axes, is_gradient=True)
      for i, (x, axes) in enumerate(zip(operands, summed, strict=False))
    )
    return matmul.recipe.dot(product, left, right, out)

  types = [jax.typeof(x).update(dtype=matmul.half) for x in (cotangent, other.values)]
  program = _transposed(matmul, side, like, sums, types[0], *map(jax.typeof, sizes), types[1])
  return with_matmuls_by(multiply, program, cotangent, *sizes, other.values)


@_multiplied.defjvp
def _multiplied_jvp(matmul: RecipeMatmul, *args: object) -> Any:
  matmul.check_second_order()


_gradient = jax.jit(_multiplied, static_argnums=(0, 1, 2, 3), inline=WRITTEN_OUT)


@remembered_off_mesh
def _transposed(
  matmul: RecipeMatmul, side: int, like: ShapedArray, sums: int, *avals: ShapedArray
) -> ClosedJaxpr:
  """Returns the jaxpr of the gradient of an operand, in low precision."""

  def pull(cotangent: Array, *others: Array) -> Array:
    def linear(x: Array) -> Array:
      call = functools.partial(matmul.in_half, side, x)
      return mapped_over(call, ((True,),) * sums)(*others)

    return jax.linear_transpose(linear, like.update(dtype=matmul.half))(cotangent)[0]

  return jax.make_jaxpr(pull)(*avals)


# The equation.


def in_recipe(
  rewriter: Rewriter, eqn: JaxprEqn, values: Sequence[Value | None], half: DType, recipe: Recipe
) -> JaxprEqn:
  """Returns a matmul in the format of a recipe, for one that `why_not` has nothing against.

  A weight is cast from the dtype that it is stored in, and gets its gradient in float32. What the
  model computes comes in low precision, as by hand.
  """
  weight = _weight_of(values)
  kept = [value is not None and value.is_parameter for value in values]
  operands = [
    value.atom if value is not None and value.is_parameter else rewriter.read(atom, eqn, half)
    for atom, value in zip(eqn.invars, values, strict=True)
  ]
  parameter = values[weight]
  if parameter is not None and parameter.stored is not None:
    operands[weight] = parameter.stored
  left, right, *sizes = map(aval_of, operands)
  matmul = RecipeMatmul(
    primitive=eqn.primitive,
    params=tuple(eqn.params.items()),
    half=half,
    out=half,
    operands=(*(x.update(dtype=half, weak_type=False) for x in (left, right)), *sizes),
    recipe=recipe,
    wide=tuple(FLOAT32 if i == weight or each else None for i, each in enumerate(kept)),
    weight=weight,
  )
  return with_rule(eqn, matmul, operands)
