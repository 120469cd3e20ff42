"""Matmuls with a derivative rule: into a wider dtype, or in the format of a recipe.

A float32 result is the float32 sum of the matmul. Its gradient is cast to the compute dtype, which
JAX would multiply in float32. With a `weight_grad_dtype` the matmul takes the weight as it is
stored. The gradient of the weight is a matmul of low-precision operands into the wide dtype. JAX
would compute it in the compute dtype, and sum over devices and uses in that dtype.

The rewritten jaxpr holds each matmul inside a `jax.custom_jvp`, so that all code that walks jaxprs
finds it. The derivative is a primitive of mpjax, which is linear in its tangent. Only its transpose
differs from JAX's. A `jax.custom_vjp` would refuse forward mode, and the transpose of
`jax.custom_derivatives.linear_call` cannot be batched.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import AbstractValue, ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from mpjax._core.errors import MpjaxTypeError, kind_of
from mpjax._core.types import FLOAT32, Array, DType
from mpjax._jaxpr.caches import remembered_off_mesh
from mpjax._jaxpr.calls import equation_with_rule, jaxpr_for, placed_like
from mpjax._jaxpr.compat import WRITTEN_OUT, bind, with_equations
from mpjax._jaxpr.count import DotAxes, dot_axes
from mpjax._jaxpr.locations import EMULATED, NOT_IN, RECIPE
from mpjax._jaxpr.reader import Atom, aval_of
from mpjax._matmul.block_dot import (
  Layout,
  block_dot,
  dequantised,
  of_stacks,
  placed,
  spec_of,
  split_axes,
  stacked,
  unstacked,
)
from mpjax._matmul.protocol import (
  Multiply,
  Operand,
  OperandRole,
  Product,
  Recipe,
  Scaled,
  Transforms,
)

Levels: TypeAlias = tuple[tuple[bool, ...], ...]
"""For each `vmap`, the innermost first: whether the first axis of each operand is mapped."""


@remembered_off_mesh
def equation(rule: "Matmul", _: object, *avals: ShapedArray) -> JaxprEqn:
  """Returns an equation for operands of these types, which layers in one context share.

  The second argument is the context, which is only part of the cache key.
  """

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    # The derivative is a sum of one part for each operand that has a tangent.
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
    result, kept = rule.with_kept(moving, *primals)
    placed = [placed_like(tangents[side], primals[side]) for side in moving]
    parts = [
      tangent_p.bind(t, *others, rule=rule, side=side, levels=())
      for side, t, others in zip(moving, placed, kept, strict=True)
    ]
    # None stands for this equation itself, see `Matmul.with_kept`.
    results = bind(eqn, primals) if result is None else [result]
    return results, [functools.reduce(operator.add, parts)]

  def matmul(*operands: Array) -> Any:  # Its name is that of the call in a printed jaxpr.
    return rule.with_kept((), *operands)[0]

  eqn = equation_with_rule(jaxpr_for(matmul, *avals), tangent, avals, "matmul")
  return eqn


# A matmul and its derivatives.


@dataclasses.dataclass(frozen=True)
class Matmul:
  """A matmul with a derivative rule. It is part of JAX's cache keys, so it can be hashed."""

  primitive: Primitive
  params: tuple[tuple[str, Any], ...]  # for operands and a result in `half`
  half: DType  # the compute dtype
  out: DType  # the dtype of the result
  # The dtype of each operand's gradient, for weights that are cast here; None for other operands,
  # which are in `half` already.
  gradient_dtypes: tuple[DType | None, ...]

  def _low(self, operands: Sequence[Array], dtypes: Sequence[DType | None]) -> list[Array]:
    """Returns operands in the compute dtype; `dtypes` are those of their gradients."""
    pairs = zip(operands, dtypes, strict=True)
    return [x if d is None else jax.lax.convert_element_type(x, self.half) for x, d in pairs]

  def __call__(self, *operands: Array) -> Array:
    """Returns the matmul in its output dtype."""
    result = {} if self.out == self.half else {"preferred_element_type": self.out}
    low = self._low(operands, self.gradient_dtypes)
    return into(self.primitive, low, {**dict(self.params), **result})

  def with_kept(
    self, moving: tuple[int, ...], *operands: Array
  ) -> tuple[Array | None, Sequence[Sequence[Array]]]:
    """Returns the matmul, and the residuals for the gradient of each operand with a tangent.

    The matmul is None if the caller should bind the equation itself.
    """
    kept = [(*operands[:side], *operands[side + 1 :]) for side in moving]
    # A plain matmul is visible to policies of `jax.checkpoint` such as `dots_saveable`. With a
    # wider result, a second derivative needs this rule again, so the equation itself is bound.
    if moving and self.out != self.half:
      return None, kept
    return self(*operands), kept

  def tangent(self, side: int, t: Array, *others: Array) -> Array:
    """Returns the matmul of a tangent of the operand `side` and the other operands."""
    return self(*others[:side], t, *others[side:])

  def gradient(
    self, side: int, like: ShapedArray, levels: Levels, cotangent: Array, *others: Array
  ) -> Array:
    """Returns the gradient of an operand of the type `like`, summed over `vmap`s that it lacks."""
    dtypes = self.gradient_dtypes
    low = self._low(others, dtypes[:side] + dtypes[side + 1 :])
    cotangent = jax.lax.convert_element_type(cotangent, self.half)
    result = {} if dtypes[side] is None else {"preferred_element_type": dtypes[side]}

    def multiply(eqn: JaxprEqn, operands: Sequence[Array], _: Sequence[int]) -> Array:
      return into(eqn.primitive, operands, {**eqn.params, **result})

    args = (cotangent, *low)
    return self.transposed(multiply, side, like, levels, [*map(jax.typeof, args)], *args)

  def transposed(
    self,
    multiply: Callable[..., Array],
    side: int,
    like: ShapedArray,
    levels: Levels,
    types: Sequence[Any],
    *args: Array,
  ) -> Array:
    """Returns the transpose for a cotangent and the other operands, multiplied by `multiply`.

    JAX's own jaxpr of the transpose is run, so that axes, strides, dilations and groups are JAX's.
    Its other equations move elements or sum over axes of the mesh, and accept any dtype. `multiply`
    takes the positions of the operands that come from the other operand. `types` are the types of
    the operands that `args` stand for.
    """
    # Traced in the compute dtype. `multiply` then chooses formats and the dtype of the result.
    halves = [t.update(dtype=self.half, weak_type=False) for t in types[:2]]
    like = like.update(dtype=self.half)
    program = _transpose_of(self, side, like, levels, *halves, *types[2:])
    jaxpr = program.jaxpr
    env: dict[Atom, Array] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env |= zip(jaxpr.invars, args, strict=True)
    # Variables that come from the other operand. The cotangent is the first argument.
    others: set[Atom] = {jaxpr.invars[1]}

    def read(atom: Atom) -> Array:
      return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
      operands = list(map(read, eqn.invars))
      positions = [i for i, v in enumerate(eqn.invars) if v in others]
      if "preferred_element_type" in eqn.params:
        results = [multiply(eqn, operands, positions)]
      else:
        results = bind(eqn, operands)
        others.update(eqn.outvars if positions else ())
      env.update(zip(eqn.outvars, results, strict=True))
    return read(jaxpr.outvars[0])


@remembered_off_mesh
def _transpose_of(
  rule: Matmul, side: int, like: ShapedArray, levels: Levels, *avals: ShapedArray
) -> ClosedJaxpr:
  """Returns JAX's transpose of a matmul as a jaxpr of the cotangent and the other operands."""

  def linear(x: Array, *others: Array) -> Array:
    return rule.primitive.bind(*others[:side], x, *others[side:], **dict(rule.params))

  def pull(cotangent: Array, *others: Array) -> Array:
    call = _mapped_over(linear, levels)
    return jax.linear_transpose(lambda x: call(x, *others), like)(cotangent)[0]

  return jax.make_jaxpr(pull)(*avals)


def _mapped_over(call: Callable[..., Any], levels: Levels) -> Callable[..., Any]:
  """Returns a function under the `vmap`s of `levels`."""
  for level in levels:
    call = jax.vmap(call, in_axes=[0 if each else None for each in level])
  return call


def into(primitive: Primitive, operands: Sequence[Array], params: Mapping[str, Any]) -> Array:
  """Returns the result of a matmul, perhaps in a wider dtype than the operands."""
  out = params["preferred_element_type"]
  wider = out is not None and out.itemsize > max(x.dtype.itemsize for x in operands)
  into_wider = wider and primitive is dot_general_p
  return (wide_dot_general_p if into_wider else primitive).bind(*operands, **params)


# In the format of a recipe.


@dataclasses.dataclass(frozen=True)
class RecipeMatmul(Matmul):
  """A matmul in the format of a recipe."""

  operands: tuple[ShapedArray, ...]  # their types in `half`; a third one has the sizes of groups
  recipe: Recipe
  weight: int  # the position of the weight, 0 or 1

  @property
  def axes(self) -> DotAxes:
    """The axes of the forward matmul."""
    return dot_axes(dict(self.params))

  def layouts(self, params: Mapping[str, Any], operands: Sequence[Any], first: int) -> list[Layout]:
    """Returns the layouts of both operands; blocks lie along the sums in the order of `first`."""
    axes = dot_axes(params)
    # Blocks of both operands must hold the same products, so both have one order of the sums.
    if self.recipe.block is not None:
      axes = _in_order(axes, first)
    return [_layout(axes, side, operand) for side, operand in enumerate(operands)]

  def scope(self, product: Product) -> str:
    """Returns the mark of a product, for audits."""
    return f"{RECIPE}{self.recipe.name}:{product}"

  def left_out(self, reason: str | None) -> contextlib.AbstractContextManager[Any]:
    """Returns the scope that tells an audit why a product is in the compute dtype."""
    if reason is None:
      return contextlib.nullcontext()
    return jax.named_scope(f"{NOT_IN['format']}{self.recipe.name}:{reason}")

  def why_not_gradient(self, side: int, examples: int = 1) -> str | None:
    """Returns why the gradient of an operand is in the compute dtype; None if it is not.

    Args:
      side: which operand it is.
      examples: the number of examples of a `vmap` that one matmul adds up too.
    """
    other = self.operands[1 - side]
    rows = _layout(self.axes, 1 - side, other).rows
    depth = examples * math.prod(other.shape[axis] for axis in rows)
    return self.recipe.why_not_gradient(depth, of_weight=side == self.weight)

  def product_of(self, side: int) -> Product:
    """Returns the product that computes the gradient of an operand."""
    return "weight_grad" if side == self.weight else "input_grad"

  def role_of(self, side: int) -> OperandRole:
    """Returns the role of an operand of the forward pass."""
    return "weight" if side == self.weight else "input"

  def quantised(self, x: Array, layout: Layout, role: OperandRole, product: Product) -> Scaled:
    """Returns an operand in the format, as a stack of matrices if the format has blocks."""
    block = self.recipe.block
    array = x if block is None else stacked(x, layout, block)
    scaled = self.recipe.quantise(array, Operand(self.summed(layout), role, product))
    # A user may have written the recipe. JAX would fail later, without the name of the method.
    if not isinstance(scaled, tuple) or getattr(scaled[0], "shape", None) != array.shape:
      raise MpjaxTypeError(
        f"quantise(x, operand) of the recipe {self.recipe.name!r}",
        expected=f"a tuple of values with the shape {array.shape} of x, and their scale",
        got=kind_of(scaled[0] if isinstance(scaled, tuple) else scaled),
        fix="Return values, scale: the elements of x divided by their scale, in place.",
      )
    return Scaled(*scaled)

  def product(self, multiply: Multiply, left: Scaled, right: Scaled, dtype: DType) -> Array:
    """Returns the matmul of two operands in the format, in a dtype that the recipe casts to."""
    result = self.recipe.dot(multiply, left, right, dtype)
    if getattr(result, "dtype", None) != dtype:
      raise MpjaxTypeError(
        f"dot(multiply, left, right, dtype) of the recipe {self.recipe.name!r}",
        expected=f"a result in {dtype}, the dtype that dot was given",
        got=kind_of(result),
        fix="Cast the result, since multiply returns float32: "
        "multiply(left, right, dtype).astype(dtype).",
      )
    return result

  # A model has many layers of few shapes, and JAX traces a jitted function once for each shape. The
  # matmuls of 60 layers are traced in a third of the time. JAX inlines them in the jaxpr around.

  @functools.partial(jax.jit, static_argnums=(0, 1), inline=WRITTEN_OUT)
  def with_kept(  # pyright: ignore[reportIncompatibleMethodOverride]
    self, moving: tuple[int, ...], x: Array, w: Array, *sizes: Array
  ) -> tuple[Array, Sequence[Sequence[Array]]]:
    with jax.named_scope(self.scope("forward")):
      if moving:
        x, w = map(self.once_differentiable, (x, w))
      pair = (_only_in_groups(x, self.axes.ragged, sizes), w)
      layouts = self.layouts(dict(self.params), pair, first=0)
      left, right = (
        self.quantised(each, layout, self.role_of(i), "forward")
        for i, (each, layout) in enumerate(zip(pair, layouts, strict=True))
      )
      # The gradient of an operand is computed from the other one.
      kept = [self._kept(side, pair[1 - side], (right, left)[side], sizes) for side in moving]
      told = [
        Operand(self.summed(each), self.role_of(i), "forward") for i, each in enumerate(layouts)
      ]
      multiply = self.multiply(self.primitive, dict(self.params), layouts, told, pair, sizes)
      return self.product(multiply, left, right, self.half), kept

  def once_differentiable(self, x: Array) -> Array:
    """Returns an operand that refuses a derivative of the code that computes with it."""
    # The rounding would be differentiated: NaN in float8, 0 in int8.
    return first_order_p.bind(x, rule=self)

  def multiply(
    self,
    primitive: Primitive,
    params: Mapping[str, Any],
    layouts: Sequence[Layout],
    told: Sequence[Operand],
    operands: Sequence[Any],
    sizes: Sequence[Array],
  ) -> Multiply:
    """Returns a function that multiplies two scaled arrays in place of these operands.

    `told` is what the recipe was told of them.
    """
    if self.recipe.block is None:
      return functools.partial(_product, primitive, params, sizes)
    restore = [functools.partial(self.restored, operand=each) for each in told]
    call = primitive, params, layouts, restore, operands, sizes
    return functools.partial(_product_of_stacks, *call)

  def is_requantised(self, side: int, scaled: Scaled) -> bool:
    """Whether the gradient of the operand `side` needs other scales of the other operand."""
    # It sums over other axes of that than the result does, and scales are constant along a sum.
    return scaled.scale is not None and scaled.scale.ndim > 0

  def _kept(
    self, side: int, other: Array, scaled: Scaled, sizes: Sequence[Array]
  ) -> Sequence[Array]:
    """Returns the residuals of the other operand for the gradient of the operand `side`."""
    if self.why_not_gradient(side) is not None:
      scaled = Scaled(jax.lax.convert_element_type(other, self.half))
    elif self.is_requantised(side, scaled):
      layout = self._layout_kept(1 - side)
      scaled = self.quantised(other, layout, self.role_of(1 - side), self.product_of(side))
    # Users can save these residuals by the name of the recipe in a policy of `jax.checkpoint`.
    named = [checkpoint_name(x, self.recipe.name) for x in scaled if x is not None]
    return [*named, *sizes]

  def _layout_kept(self, side: int) -> Layout:
    """Returns the layout of an operand in the gradient of the other, which sums over its rows."""
    batch, rows, summed = _layout(self.axes, side, self.operands[side])
    return Layout(batch, tuple(sorted(summed)), rows)

  def split(self, others: Sequence[Array]) -> tuple[Scaled, Sequence[Array]]:
    """Returns the residuals as one scaled array and the sizes of groups, see `_kept`."""
    count = len(others) - len(self.operands[2:])
    return Scaled(*others[:count]), others[count:]

  def is_stacked(self, scaled: Scaled) -> bool:
    """Whether a residual is a stack of matrices, as formats with blocks have it."""
    return self.recipe.block is not None and scaled.scale is not None

  def tangent(self, side: int, t: Array, *others: Array) -> Array:
    # In forward mode the tangent is multiplied in the compute dtype. Only the transpose is in the
    # format.
    other, sizes = self.split(others)
    values = self._wide(1 - side, other)
    pair = [jax.lax.convert_element_type(each, self.half) for each in (t, values)]
    with jax.named_scope(self.scope("forward")), self.left_out("it is a tangent"):
      return self.primitive.bind(*(pair[::-1] if side else pair), *sizes, **dict(self.params))

  def _wide(self, side: int, kept: Scaled) -> Array:
    """Returns the residual of the operand `side`, dequantised."""
    if self.why_not_gradient(1 - side) is not None:
      return kept.values
    product = self.product_of(1 - side)
    return self.dequantised(
      kept, self.operands[side], self._layout_kept(side), self.role_of(side), product
    )

  def dequantised(
    self, scaled: Scaled, like: ShapedArray, layout: Layout, role: OperandRole, product: Product
  ) -> Array:
    """Returns the float32 operand of the type `like` from what `quantised` returned for it."""
    is_stacked = self.is_stacked(scaled)
    values = scaled.values
    if is_stacked:
      values = dequantised(values, scaled.scale)
    values = jax.lax.convert_element_type(values, FLOAT32)
    for scale in (None if is_stacked else scaled.scale, scaled.of_tensor):
      values = values if scale is None else values * scale
    values = self.restored(values, Operand(self.summed(layout), role, product))
    if not is_stacked:
      return values
    return placed(unstacked(values, layout, like.shape), tuple(like.sharding.spec))

  def restored(self, values: Array, operand: Operand) -> Array:
    """Returns dequantised values as they were before the recipe transformed them."""
    recipe = self.recipe
    return recipe.restored(values, operand) if isinstance(recipe, Transforms) else values

  def summed(self, layout: Layout) -> Sequence[int]:
    """Returns the axes that a matmul sums over, of the array that the recipe quantises."""
    return layout.summed if self.recipe.block is None else (2,)

  def gradient(
    self, side: int, like: ShapedArray, levels: Levels, cotangent: Array, *others: Array
  ) -> Array:
    # Under `vmap` the operand has its type without the mapped axes.
    like = self.operands[side] if levels else like
    reason = self.why_not_gradient(side)
    sums = 0
    other, sizes = self.split(others)
    if not sizes and self.sums_examples(side, other, levels):
      # These axes are the innermost `vmap`s that do not map over the operand.
      sums = len(list(itertools.takewhile(lambda level: not level[0], levels)))
      # Int8 sums of more products could overflow: each example then has a matmul of its own.
      if reason is None and self.why_not_gradient(side, math.prod(cotangent.shape[:sums])):
        sums = 0
    # The other `vmap`s map over the gradient. If the operand is not mapped, the results are summed.
    call = functools.partial(_gradient, self, side, like, sums)
    for mapped, *kept in levels[sums:]:
      each = jax.vmap(call, in_axes=[0, *(0 if axis else None for axis in kept)])
      call = each if mapped else lambda *args, each=each: jnp.sum(each(*args), axis=0)
    with jax.named_scope(self.scope(self.product_of(side))), self.left_out(reason):
      return call(cotangent, *others)

  def sums_examples(self, side: int, other: Scaled, levels: Levels) -> bool:
    """Whether one matmul of the gradient can sum over the `vmap`s that do not map the operand."""
    # There must be no scale, or one for each index of these axes, which `_multiplied` applies to
    # the cotangent before the sum.
    return other.scale is None or other.scale.ndim == sum(level[2] for level in levels)

  def refuse_second_order(self) -> None:
    """Raises the error for a second derivative."""
    raise MpjaxTypeError(
      f"a matmul in {self.recipe.name}",
      expected="first derivatives",
      got="a derivative of its gradient, or of its tangent",
      fix='Differentiate the function twice under "mixed_bfloat16", or put a rule with that policy '
      "for the module before other rules.",
    )


def _layout(axes: DotAxes, side: int, operand: Any) -> Layout:
  """Returns the axes of an operand in a matmul. Each group has a batch index of its own."""
  groups = axes.groups if side == 1 else ()
  batch = (*groups, *axes.batch[side])
  return Layout(batch, tuple(axes.own(side, operand)), tuple(axes.contracted[side]))


def _in_order(axes: DotAxes, side: int) -> DotAxes:
  """Returns the axes of a matmul with its contracted axes in the order of the operand `side`."""
  pairs = sorted(zip(*axes.contracted, strict=True), key=operator.itemgetter(side))
  left, right = zip(*pairs, strict=True)
  return axes._replace(contracted=(left, right))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2, 3))
def _multiplied(
  matmul: RecipeMatmul, side: int, like: ShapedArray, sums: int, cotangent: Array, *others: Array
) -> Array:
  """Returns the gradient of an operand, inside all `vmap`s except the first `sums`."""
  other, sizes = matmul.split(others)
  rows = matmul.axes.of_result(*matmul.operands[:2])[0]
  cotangent = _only_in_groups(cotangent, rows.get(matmul.axes.ragged), sizes)
  if sums and other.scale is not None:
    # The matmul sums over these `vmap`s, and each has a scale. So the scales are applied before.
    scale = jax.lax.expand_dims(other.scale, range(sums, cotangent.ndim))
    cotangent = jax.lax.convert_element_type(cotangent, FLOAT32) * scale
    other = Scaled(other.values, jnp.ones((), FLOAT32))
  out = matmul.gradient_dtypes[side] or matmul.half
  product = matmul.product_of(side)

  def multiply(eqn: JaxprEqn, operands: Sequence[Array], positions: Sequence[int]) -> Array:
    # In the compute dtype, if an option of the recipe says so, or if the sum is too long for it.
    if matmul.why_not_gradient(side) is not None:
      return into(eqn.primitive, operands, {**eqn.params, "preferred_element_type": out})
    types = [*map(aval_of, eqn.invars[:2])]
    layouts = matmul.layouts(eqn.params, types, first=positions[0])
    left, right = (
      other if i in positions else matmul.quantised(x, layouts[i], "gradient", product)
      for i, x in enumerate(operands[:2])
    )
    told = [
      Operand(
        matmul.summed(each), matmul.role_of(1 - side) if i in positions else "gradient", product
      )
      for i, each in enumerate(layouts)
    ]
    call = matmul.multiply(eqn.primitive, eqn.params, layouts, told, types, operands[2:])
    return matmul.product(call, left, right, out)

  # The operand is not mapped in these `vmap`s, and the residual is.
  levels = ((False, True),) * sums
  # The transpose is traced for the operand itself, not for its stack of matrices.
  kept_like = matmul.operands[1 - side] if matmul.is_stacked(other) else jax.typeof(other.values)
  types = (jax.typeof(cotangent), kept_like, *map(jax.typeof, sizes))
  return matmul.transposed(multiply, side, like, levels, types, cotangent, other.values, *sizes)


@_multiplied.defjvp
def _multiplied_jvp(matmul: RecipeMatmul, *args: object) -> Any:
  matmul.refuse_second_order()


_gradient = jax.jit(_multiplied, static_argnums=(0, 1, 2, 3), inline=WRITTEN_OUT)


def _product(
  primitive: Primitive,
  params: Mapping[str, Any],
  sizes: Sequence[Array],
  left: Scaled,
  right: Scaled,
  sums: DType,
) -> Array:
  """Returns the product of two scaled arrays in float32. The matmul sums in `sums`."""
  axes = dot_axes(params)
  if sums.itemsize < 4 and (axes.batch[0] or axes.ragged in axes.contracted[0]):
    sums = FLOAT32  # A CPU sums some batches of matrices in the dtype of the result.
  params = {**params, "precision": None, "preferred_element_type": sums}
  result = primitive.bind(left.values, right.values, *sizes, **params)
  result = jax.lax.convert_element_type(result, FLOAT32)
  of_left, of_right = axes.of_result(left.values, right.values)
  result = _scaled(result, left.scale, of_left)
  if right.scale is None or right.scale.ndim == 0:
    return _scaled(result, right.scale, of_right)
  # A scale for each group becomes a scale for each row of the result.
  scale = right.scale
  for axis in axes.groups:
    scale = _of_rows(scale, axis, sizes[0], result.shape[of_right[axis]])
  return _scaled(result, scale, of_right)


def _product_of_stacks(
  primitive: Primitive,
  params: Mapping[str, Any],
  layouts: Sequence[Layout],
  restore: Sequence[Callable[[Array], Array]],
  operands: Sequence[Any],
  sizes: Sequence[Array],
  left: Scaled,
  right: Scaled,
  sums: DType,
) -> Array:
  """Returns the product of two stacks of matrices with scales in blocks, in float32."""
  pair = (left, right)
  if sizes:
    # No library multiplies groups of rows with scales in blocks. A transform along the sum would
    # mix the rows of groups.
    matrices = [dequantised(*each[:2]) for each in pair]
    wide = [
      unstacked(jax.lax.convert_element_type(back(x), x.dtype), layout, operand.shape)
      for x, back, layout, operand in zip(matrices, restore, layouts, operands, strict=True)
    ]
    params = {**params, "precision": None, "preferred_element_type": FLOAT32}
    with jax.named_scope(EMULATED):
      result = primitive.bind(*wide, *sizes, **params)
  else:
    (left_of, right_of), (batch, rows, _) = operands, layouts[0]
    parts = (left_of, batch), (left_of, rows), (right_of, layouts[1].rows)
    sharding = of_stacks(params["out_sharding"], [len(axes) for _, axes in parts])
    result = block_dot(left, right, sums, sharding)
    # The stack of results becomes the axes of the matmul: batch, rows and columns.
    result = split_axes(result, [[each.shape[axis] for axis in axes] for each, axes in parts])
    result = _as_jax_shards_it(result, primitive, params, operands)
    result = jax.lax.convert_element_type(result, FLOAT32)
  for each in pair:
    if each.of_tensor is not None:
      result = result * each.of_tensor
  return result


def _as_jax_shards_it(
  result: Array, primitive: Primitive, params: Mapping[str, Any], operands: Sequence[Any]
) -> Array:
  """Returns the result of a matmul with the sharding that JAX gives it on explicit axes."""
  if AxisType.Explicit not in jax.typeof(result).sharding.mesh.axis_types:
    return result
  avals = [x if isinstance(x, ShapedArray) else jax.typeof(x) for x in operands]
  types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in avals]
  like = jax.eval_shape(functools.partial(primitive.bind, **params), *types)
  return placed(result, tuple(like.sharding.spec))


def _of_rows(scale: Array, axis: int, sizes: Array, rows: int) -> Array:
  """Returns the scales of groups, one for each row of the result."""
  # The group of a row is the number of groups that end before it. Rows behind all groups have the
  # scale 0.
  row = jax.lax.iota(sizes.dtype, rows)
  group = jnp.sum(row[:, None] >= jax.lax.cumsum(sizes)[None], axis=1)
  return jnp.take(scale, group, axis=axis, mode="fill", fill_value=0)


def _scaled(result: Array, scale: Array | None, result_axes: Mapping[int, int]) -> Array:
  """Returns a result times a scale; `result_axes` are the axes of the result by those of it."""
  if scale is None:
    return result
  if scale.ndim == 0:
    return result * scale
  # The scale has size 1 along contracted axes, which the result lacks. They are first in `order`,
  # and the reshape drops them.
  sized = {new: scale.shape[axis] for axis, new in result_axes.items()}
  order = sorted(range(scale.ndim), key=lambda axis: result_axes.get(axis, -1))
  shape = [sized.get(i, 1) for i in range(result.ndim)]
  scale = jax.lax.reshape(scale, shape, order)
  # On a mesh with explicit axes the result keeps its sharding, and the scale takes it. Symbolic
  # sizes of `jax.export` can be tested for equality, not ordered.
  spec = [name if n != 1 else None for name, n in zip(spec_of(result), shape, strict=True)]
  return result * placed(scale, spec)


def _only_in_groups(x: Array, axis: int | None, sizes: Sequence[Array]) -> Array:
  """Returns an array with zeros in the rows of no group, so that they affect no scale."""
  if axis is None:
    return x
  row = jax.lax.broadcasted_iota(sizes[0].dtype, x.shape, axis)
  return jnp.where(row < jnp.sum(sizes[0]), x, jnp.zeros((), x.dtype))


# The derivative of a matmul by one operand, linear in its tangent.


tangent_p = Primitive("matmul_tangent")
"""The derivative of the `Matmul` in `rule` by the operand `side`, under the `vmap`s in `levels`.

It takes the tangent of that operand, and the residuals of the others.
"""


def _evaluate(*operands: Array, rule: Matmul, side: int, levels: Levels) -> Array:
  return _mapped_over(functools.partial(rule.tangent, side), levels)(*operands)


@remembered_off_mesh
def _abstract(*avals: ShapedArray, **params: Any) -> AbstractValue:
  return jax.make_jaxpr(functools.partial(_evaluate, **params))(*avals).jaxpr.outvars[0].aval


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Any], *, rule: Matmul, side: int, levels: Levels
) -> tuple[Array, Array]:
  # It is linear in each operand, so the derivative has one part for each operand with a tangent.
  # The first operand is the tangent, and `order` has the operands in the order of the matmul.
  result = tangent_p.bind(*primals, rule=rule, side=side, levels=levels)
  t, *others = range(len(primals))
  order = [*others[:side], t, *others[side:]]
  if isinstance(rule, RecipeMatmul) and not all(isinstance(tangents[k], ad.Zero) for k in others):
    rule.refuse_second_order()
  parts = []
  for i, k in enumerate(order):
    if not isinstance(tangents[k], ad.Zero):
      rest = [j for j in order if j != k]
      mapped = tuple((level[k], *(level[j] for j in rest)) for level in levels)
      operands = (tangents[k], *(primals[j] for j in rest))
      parts.append(tangent_p.bind(*operands, rule=rule, side=i, levels=mapped))
  return result, functools.reduce(operator.add, parts)


def _batch(
  operands: Sequence[Array], dims: Sequence[int | None], *, levels: Levels, **params: Any
) -> tuple[Array, int]:
  # Nothing is computed: the `vmap` is added to the levels, and its axis moved to the front.
  pairs = zip(operands, dims, strict=True)
  moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
  level = tuple(axis is not None for axis in dims)
  return tangent_p.bind(*moved, levels=(*levels, level), **params), 0


def _transpose(
  cotangent: Array | ad.Zero, tangent: Any, *others: Any, rule: Matmul, side: int, levels: Levels
) -> list[Array | ad.Zero | None]:
  none = [None] * len(others)
  if isinstance(cotangent, ad.Zero):
    return [ad.Zero(tangent.aval), *none]
  bar = rule.gradient(side, tangent.aval, levels, cotangent, *others)
  # Cast last, after the sums over `vmap`s and mesh axes that the weight lacks. If the weight is
  # stored in bfloat16, an earlier cast would make them bfloat16 sums.
  return [jax.lax.convert_element_type(bar, tangent.aval.dtype), *none]


tangent_p.def_impl(_evaluate)
tangent_p.def_abstract_eval(_abstract)
ad.primitive_jvps[tangent_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
batching.primitive_batchers[tangent_p] = _batch
mlir.register_lowering(tangent_p, mlir.lower_fun(_evaluate, multiple_results=False))

first_order_p = Primitive("first_order")
"""The operand. It refuses a derivative, because the matmul of its `rule` already has one."""


def _refuse(*_: Any, rule: RecipeMatmul) -> Any:
  rule.refuse_second_order()


first_order_p.def_impl(lambda x, **_: x)
first_order_p.def_abstract_eval(lambda aval, **_: aval)
ad.primitive_jvps[first_order_p] = _refuse
batching.defvectorized(first_order_p)
mlir.register_lowering(first_order_p, lambda _, x, **__: [x])

wide_dot_general_p = Primitive(dot_general_p.name)
"""A `dot_general` into a wider dtype, to which a CPU casts operands of bfloat16 first.

XLA for CPUs gives some matmuls of bfloat16 into float32 to a library, and transposes an operand
later. The library does not support the new layout, so the program fails when it runs. With float32
operands, the products are the same. It widens float16 itself, behind the collectives that move an
operand. Other platforms lower this primitive as JAX's own. It has the name of JAX's primitive, so
that code that reads jaxprs finds it.
"""


def _widened(*operands: Array, **params: Any) -> Array:
  out = params["preferred_element_type"]
  widened = (x.astype(out) if x.dtype == jnp.bfloat16 else x for x in operands)
  return dot_general_p.bind(*widened, **params)


# Compiled, since only a lowering knows the platform.
@functools.partial(jax.jit, static_argnames="params")
def _compiled(*operands: Array, params: tuple[tuple[str, Any], ...]) -> Array:
  return wide_dot_general_p.bind(*operands, **dict(params))


@wide_dot_general_p.def_impl
def _run_wide(*operands: Array, **params: Any) -> Array:
  with jax.disable_jit(False):
    return _compiled(*operands, params=tuple(params.items()))


@wide_dot_general_p.def_abstract_eval
@remembered_off_mesh
def _type_of_wide(*avals: ShapedArray, **params: Any) -> AbstractValue:
  return (
    jax.make_jaxpr(functools.partial(dot_general_p.bind, **params))(*avals).jaxpr.outvars[0].aval
  )


def _batch_wide(
  operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
  # JAX's own rule decides the axes. Its matmul is then replaced by this primitive again.
  mapped = jax.vmap(functools.partial(dot_general_p.bind, **params), in_axes=tuple(dims))
  program = jax.make_jaxpr(mapped)(*operands)
  eqns = [
    eqn.replace(primitive=wide_dot_general_p) if eqn.primitive is dot_general_p else eqn
    for eqn in program.eqns
  ]
  return eval_jaxpr(with_equations(program.jaxpr, eqns), program.consts, *operands)[0], 0


def _transpose_wide(side: int, cotangent: Array, *operands: Any, **params: Any) -> Array:
  def linear(x: Array) -> Array:
    return dot_general_p.bind(*(x if i == side else y for i, y in enumerate(operands)), **params)

  return jax.linear_transpose(linear, operands[side].aval)(cotangent)[0]


ad.defbilinear(wide_dot_general_p, *(functools.partial(_transpose_wide, i) for i in (0, 1)))
batching.primitive_batchers[wide_dot_general_p] = _batch_wide
mlir.register_lowering(
  wide_dot_general_p, mlir.lower_fun(dot_general_p.bind, multiple_results=False)
)
_on_cpu = mlir.lower_fun(_widened, multiple_results=False)
mlir.register_lowering(wide_dot_general_p, _on_cpu, platform="cpu")
