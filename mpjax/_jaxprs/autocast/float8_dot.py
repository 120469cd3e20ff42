"""A matmul in float8 with its derivatives: operands are scaled, clipped, cast and multiplied.

The forward pass multiplies e4m3 by e4m3. In the backward pass the gradient that comes in is e5m2,
and the operand that it meets is one that the forward pass cast: nothing wider is kept. All scales
are computed from the operands at hand, and applied to the result. So the operands of `dot_general`
itself are float8: XLA finds no float8 where they are multiplied by a scale on their way to it, if
Triton takes the matmul.

As for weight gradients, the derivative is a primitive of our own, linear in the tangent, of which
the transpose is what is wanted: a `jax.custom_vjp` would refuse forward mode.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import AbstractValue, ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core.primitives import dot_general_p
from jax.interpreters import ad, batching, mlir

from mpjax._core.dtypes import FLOAT32
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.float8 import Float8
from mpjax._core.types import Array, DType
from mpjax._jaxprs.atoms import Atom
from mpjax._jaxprs.autocast.float8_scaling import E4M3, E5M2, Scaled, quantise, scaled_dot
from mpjax._jaxprs.autocast.run import remembered_off_mesh
from mpjax._jaxprs.autocast.scopes import FLOAT8
from mpjax._jaxprs.autocast.wide_sums import into
from mpjax._jaxprs.compat import WRITTEN_OUT, bind

NAME = "float8"
"""That of the operands kept for the backward pass, for policies of `jax.checkpoint`."""

Levels: TypeAlias = tuple[tuple[bool, ...], ...]
"""For each `vmap` around, the innermost first, which operands have a first axis for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
  """A matmul in float8.

  Fields:
    params: the parameters of its `dot_general` that are no dtypes.
    operands: the types of its operands in low precision.
    recipe: how to scale.
    wide: the dtype of the gradient of an operand that keeps its own, as weights do; None: `half`.
    weight: which operand is the weight, by its index.
  """

  params: tuple[tuple[str, Any], ...]
  operands: tuple[ShapedArray, ...]
  recipe: Float8
  wide: tuple[DType | None, ...]
  weight: int

  @property
  def half(self) -> DType:
    """The dtype of the result."""
    return self.operands[0].dtype

  def __call__(self, *operands: Array) -> Array:
    """Returns the matmul of operands in float32 or low precision."""
    with jax.named_scope(FLOAT8):
      return self._product(self._cast(operands))

  def tangent(
    self, primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    """Returns the result and its derivative: a rule for `jax.custom_jvp` with symbolic zeros."""
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
    with jax.named_scope(FLOAT8):
      result, kept = _with_kept(self, moving, *primals)
      parts = [
        _tangent_p.bind(tangents[side], *each, matmul=self, side=side, levels=())
        for side, each in zip(moving, kept, strict=True)
      ]
      return [result], [functools.reduce(operator.add, parts)]

  def with_kept(self, moving: Sequence[int], *operands: Array) -> tuple[Array, list[list[Array]]]:
    """Returns the matmul, and what is kept for the gradients of these operands."""
    cast = self._cast(operands)
    kept = [[checkpoint_name(x, NAME) for x in self._kept(side, operands, cast)] for side in moving]
    return self._product(cast), kept

  def quantise(self, x: Array, dtype: DType, summed: Sequence[int]) -> Scaled:
    """Returns an operand of a matmul in float8, of which the axes `summed` are summed over."""
    axes = summed if self.recipe.scaling == "row" else None
    return quantise(x, dtype, axes, self.recipe.power_of_two)

  def _cast(self, operands: Sequence[Array]) -> list[Scaled]:
    contracted = dict(self.params)["dimension_numbers"][0]
    return [self.quantise(x, E4M3, axes) for x, axes in zip(operands, contracted, strict=True)]

  def _product(self, cast: Sequence[Scaled]) -> Array:
    return scaled_dot(dict(self.params), cast, self.half)

  def is_float8(self, side: int) -> bool:
    """Whether the gradient of an operand is multiplied in float8."""
    return side != self.weight or self.recipe.weight_grad == "float8"

  def _kept(self, side: int, primals: Sequence[Array], cast: Sequence[Scaled]) -> Sequence[Array]:
    """Returns what the gradient of an operand is computed from: the other one."""
    other = 1 - side
    if not self.is_float8(side):
      return [jax.lax.convert_element_type(primals[other], self.half)]
    if self.recipe.scaling == "tensor":
      return [x for x in cast[other] if x is not None]
    # The gradient adds up over other axes of it than the result: it has other rows.
    contracted, batch = dict(self.params)["dimension_numbers"]
    shared = {*contracted[other], *batch[other]}
    free = [axis for axis in range(primals[other].ndim) if axis not in shared]
    return [x for x in self.quantise(primals[other], E4M3, free) if x is not None]

  def derivative(self, side: int, t: Array, *kept: Array) -> Array:
    """Returns the matmul of a tangent and what is kept of the other operand, in low precision."""
    other = Scaled(*kept)
    values = jax.lax.convert_element_type(other.values, FLOAT32)
    values = values if other.scale is None else values * other.scale
    pair = [jax.lax.convert_element_type(x, self.half) for x in (t, values)]
    return self.in_half(*(pair if side == 0 else pair[::-1]))

  def gradient(
    self, side: int, like: ShapedArray, sums: int, cotangent: Array, *kept: Array
  ) -> Array:
    """Returns the gradient of an operand.

    `sums` counts the `vmap`s around that map over the rest and not over it: their axes come first.
    """
    other = Scaled(*kept)
    if sums and other.scale is not None:
      # One matmul that adds up over these axes too: their scales go to the gradient before it.
      scale = jax.lax.expand_dims(other.scale, range(sums, cotangent.ndim))
      cotangent = jax.lax.convert_element_type(cotangent, FLOAT32) * scale
      other = Scaled(other.values, jnp.ones((), FLOAT32))

    # Which matmul of which axes it is, JAX knows best: its own jaxpr is run with other operands.
    types = [jax.typeof(x).update(dtype=self.half) for x in (cotangent, other.values)]
    return self._run(_transposed(self, side, like, sums, *types), side, cotangent, other)

  def in_half(self, lhs: Array, rhs: Array) -> Array:
    dtypes = {"precision": None, "preferred_element_type": self.half}
    return dot_general_p.bind(lhs, rhs, **{**dict(self.params), **dtypes})

  def _run(self, program: ClosedJaxpr, side: int, cotangent: Array, other: Scaled) -> Array:
    found: dict[Atom, Array] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    found |= zip(program.jaxpr.invars, (cotangent, other.values), strict=True)
    others: set[Atom] = {program.jaxpr.invars[1]}

    def read(atom: Atom) -> Array:
      return atom.val if isinstance(atom, Literal) else found[atom]

    for eqn in program.jaxpr.eqns:
      operands = list(map(read, eqn.invars))
      places = [i for i, v in enumerate(eqn.invars) if v in others]
      if eqn.primitive is dot_general_p:
        made = [self._multiplied(eqn, operands, places[0], side, other.scale)]
      else:
        made = bind(eqn, operands)
        others.update(eqn.outvars if places else ())
      found.update(zip(eqn.outvars, made, strict=True))
    return read(program.jaxpr.outvars[0])

  def _multiplied(
    self, eqn: JaxprEqn, operands: list[Array], place: int, side: int, scale: Array | None
  ) -> Array:
    """Returns the matmul of a gradient with what is kept, which is the operand at `place`."""
    out = self.wide[side] or self.half
    if scale is None:
      return into(eqn, operands, {**eqn.params, "preferred_element_type": out})
    axes = eqn.params["dimension_numbers"][0]
    pair = [
      Scaled(x, scale) if i == place else self.quantise(x, E5M2, axes[i])
      for i, x in enumerate(operands)
    ]
    return scaled_dot(eqn.params, pair, out)


# A model has many layers of few kinds, and JAX traces what is jitted once for each: the matmuls of
# 60 layers are traced in a third of the time. They are written out in the jaxpr around.


@functools.partial(jax.jit, static_argnums=(0, 1), inline=WRITTEN_OUT)
def _with_kept(
  matmul: Matmul, moving: tuple[int, ...], *operands: Array
) -> tuple[Array, list[list[Array]]]:
  return matmul.with_kept(moving, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=WRITTEN_OUT)
def _gradient(
  matmul: Matmul, side: int, like: ShapedArray, sums: int, cotangent: Array, *kept: Array
) -> Array:
  """Returns `Matmul.gradient`, of which a derivative raises."""

  @jax.custom_jvp
  def gradient(cotangent: Array, *kept: Array) -> Array:
    return matmul.gradient(side, like, sums, cotangent, *kept)

  @gradient.defjvp
  def rule(primals: object, tangents: object) -> Any:
    raise _second_order()

  return gradient(cotangent, *kept)


@remembered_off_mesh
def _transposed(
  matmul: Matmul,
  side: int,
  like: ShapedArray,
  sums: int,
  cotangent: ShapedArray,
  other: ShapedArray,
) -> ClosedJaxpr:
  """Returns the jaxpr of the gradient of an operand, in low precision: see `Matmul.gradient`."""

  def pull(cotangent: Array, other: Array) -> Array:
    def linear(x: Array) -> Array:
      def call(other: Array) -> Array:
        return matmul.in_half(*((x, other) if side == 0 else (other, x)))

      for _ in range(sums):
        call = jax.vmap(call)
      return call(other)

    return jax.linear_transpose(linear, like.update(dtype=matmul.half))(cotangent)[0]

  return jax.make_jaxpr(pull)(cotangent, other)


# The primitive.

_tangent_p = Primitive("float8_matmul")
"""The derivative of a matmul in float8 by one operand, linear in its tangent.

Its operands are the tangent, and what is kept of the other operand: an array, and its scale if it
is float8. Parameters:
  matmul: the `Matmul`.
  side: 0 for a tangent of the left operand.
  levels: see `Levels`.
"""


def _evaluate(*operands: Array, matmul: Matmul, side: int, levels: Levels) -> Array:
  call = functools.partial(matmul.derivative, side)
  for level in levels:
    call = jax.vmap(call, in_axes=[0 if each else None for each in level])
  return call(*operands)


@remembered_off_mesh
def _abstract(*avals: ShapedArray, **params: Any) -> AbstractValue:
  return jax.make_jaxpr(functools.partial(_evaluate, **params))(*avals).jaxpr.outvars[0].aval


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], **params: Any
) -> tuple[Array, Array | ad.Zero]:
  tangent, *others = tangents
  if not all(isinstance(t, ad.Zero) for t in others):
    raise _second_order()
  result = _tangent_p.bind(*primals, **params)
  if isinstance(tangent, ad.Zero):
    return result, ad.Zero(jax.typeof(result))
  return result, _tangent_p.bind(tangent, *primals[1:], **params)


def _batch(
  operands: Sequence[Array], dims: Sequence[int | None], *, levels: Levels, **params: Any
) -> tuple[Array, int]:
  pairs = zip(operands, dims, strict=True)
  moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
  level = tuple(axis is not None for axis in dims)
  return _tangent_p.bind(*moved, levels=(*levels, level), **params), 0


def _transpose(
  cotangent: Array | ad.Zero,
  *operands: Any,  # One `ad.UndefinedPrimal`, and arrays.
  matmul: Matmul,
  side: int,
  levels: Levels,
) -> list[Array | ad.Zero | None]:
  tangent, *kept = operands
  none = [None] * len(kept)
  if isinstance(cotangent, ad.Zero):
    return [ad.Zero(tangent.aval), *none]
  sums = 0
  if matmul.recipe.scaling == "tensor" or not matmul.is_float8(side):
    sums = len(list(itertools.takewhile(lambda level: not level[0], levels)))
  like = matmul.operands[side] if levels else tangent.aval
  call = functools.partial(_gradient, matmul, side, like, sums)
  for mapped, *others in levels[sums:]:
    call = _each(call, others, mapped)
  bar = call(cotangent, *kept)
  return [jax.lax.convert_element_type(bar, tangent.aval.dtype), *none]


def _second_order() -> MpjaxTypeError:
  return MpjaxTypeError(
    "a matmul in float8",
    expected="first derivatives",
    got="a derivative of its gradient, or of its tangent",
    fix="Second derivatives are for low precision or float32: take them of the function under "
    '"mixed_bfloat16", or put a rule for the module before others.',
  )


def _each(call: Any, kept: Sequence[bool], mapped: bool) -> Any:
  """Returns `call` of each cotangent; the sum of its results if they are gradients of one array."""
  each = jax.vmap(call, in_axes=[0, *(0 if axis else None for axis in kept)])
  return each if mapped else lambda *args: jnp.sum(each(*args), axis=0)


_tangent_p.def_impl(_evaluate)
_tangent_p.def_abstract_eval(_abstract)
ad.primitive_jvps[_tangent_p] = _jvp
ad.primitive_transposes[_tangent_p] = _transpose
batching.primitive_batchers[_tangent_p] = _batch
mlir.register_lowering(_tangent_p, mlir.lower_fun(_evaluate, multiple_results=False))
