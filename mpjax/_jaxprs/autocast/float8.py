"""Matmuls in float8: which they are, how operands are scaled and cast, and their derivatives.

`Policy(matmul=mpjax.Float8())`. The forward pass multiplies e4m3 by e4m3. In the backward pass the
gradient that comes in is e5m2, and the operand that it meets is one that the forward pass cast:
nothing wider is kept. e4m3 has a range of 2^-9 to 448, e5m2 of 2^-16 to 57344, both with less than
two digits. So an array is divided by a scale that brings its largest element to the end of the
range. A cast alone would not do: e4m3 has no inf, and JAX casts what is above 464 to NaN.

All scales are computed from the operands at hand, and applied to the result. So the operands of
`dot_general` itself are float8: XLA finds no float8 where they are multiplied by a scale on their
way to it, if Triton takes the matmul. The derivative is that of any matmul with a rule
(`wide_sums.py`).
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import dot_general_p

from mpjax._core.dtypes import FLOAT32
from mpjax._core.errors import MpjaxTypeError
from mpjax._core.float8 import MULTIPLE, Float8
from mpjax._core.types import Array, DType
from mpjax._jaxprs.autocast.rewriter import wants_precision
from mpjax._jaxprs.autocast.run import differentiated, remembered_off_mesh
from mpjax._jaxprs.autocast.scopes import FLOAT8, TABLE
from mpjax._jaxprs.autocast.values import Scope, Settings, Value
from mpjax._jaxprs.autocast.wide_sums import Levels, into, mapped_over, tangent_p, with_matmuls_by
from mpjax._jaxprs.compat import WRITTEN_OUT, context_of, scopes_of, varying_as, varying_axes
from mpjax._jaxprs.primitives import EqnParams
from mpjax._jaxprs.reader import Atom, aval_of, dtype_of, inner_jaxprs

NAME = "float8"
"""That of the operands kept for the backward pass, for policies of `jax.checkpoint`."""

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)

_TINY = float(np.finfo(np.float32).tiny)

_BACKWARD = "transpose()"  # As JAX prints it, to tell it from the operation.


# Which matmuls are in float8.


def why_not(
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  recipe: Float8,
  scope: Scope,
  settings: Settings,
) -> str | None:
  """Returns why a matmul is left in the compute dtype; None if it is to be in float8."""
  if TABLE in scope:
    return "it is an embedding"
  if eqn.primitive is not dot_general_p:
    return "it is no dot_general"
  dtypes, params = {dtype_of(v) for v in eqn.invars}, eqn.params
  plain = (None, FLOAT32 if FLOAT32 in dtypes else min(dtypes, key=str))
  asked = wants_precision({"precision": params["precision"]})
  if asked or params["preferred_element_type"] not in plain:
    return "the code asks for its precision"
  if settings.in_derivative:
    # JAX transposes what is linear in a tangent, and an operand that is rounded is not linear.
    return "it is in a derivative rule"
  stack = scopes_of(eqn.source_info.name_stack)
  if any(f"{name}()" == _BACKWARD for name, is_transform in stack if is_transform):
    return "its gradient is taken inside"
  weight = _weight_of(values)
  if weight < 0:
    return "no operand is a parameter"
  depth, columns, rows = _sizes(eqn, weight)
  if min(depth, columns, rows) < 2:
    return "it has one row or column"
  for name, size in (("K", depth), ("N", columns)):
    if size % MULTIPLE:
      return f"{name}={size} is no multiple of {MULTIPLE}"
  for most in recipe.too_small:
    if all(n is None or size <= n for size, n in zip((depth, columns), most, strict=True)):
      return f"too small to gain: K={depth}, N={columns}"
  return None


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


def _sizes(eqn: JaxprEqn, weight: int) -> tuple[int, int, int]:
  """Returns K, N and M: the length of the sums, columns of the weight, and rows."""
  contracted, batch = eqn.params["dimension_numbers"]

  def free(side: int) -> int:
    shared = {*contracted[side], *batch[side]}
    shape = aval_of(eqn.invars[side]).shape
    return math.prod(n for axis, n in enumerate(shape) if axis not in shared)

  depth = math.prod(aval_of(eqn.invars[weight]).shape[axis] for axis in contracted[weight])
  return depth, free(weight), free(1 - weight)


# Scaled arrays, and matmuls of two of them.


class Scaled(NamedTuple):
  """An array of float8 and what it was divided by.

  Fields:
    values: the array; in low precision if there is no scale.
    scale: float32, a number or an array with the axes of `values`, of size 1 where they share one.
  """

  values: Array
  scale: Array | None = None


def quantise(x: Array, dtype: DType, axes: Sequence[int] | None, power_of_two: bool) -> Scaled:
  """Returns an array scaled so that its largest element is the largest number of a float8 dtype.

  An inf makes the scale inf and a NaN NaN, and with it all that is multiplied by the scale. An
  array of zeros has a small scale, of which nothing but zeros comes. `axes` are those whose
  elements share a scale, None for one scale, which may be rounded up to a power of two.
  """
  largest = jax.lax.reduce_max(jax.lax.abs(x), tuple(range(x.ndim) if axes is None else axes))
  if x.dtype != FLOAT32:
    # What is computed in float32 and rounded is read twice here. Without the barrier XLA for a GPU
    # drops the rounding and keeps the float32 array between: a third more memory in a large MLP.
    # The largest element is taken before it, so that XLA can do so where `x` is computed: if of the
    # numbers before they are rounded, it is the same once it is rounded itself.
    x, largest = jax.lax.optimization_barrier((x, largest))
  most, wide = float(jnp.finfo(dtype).max), jax.lax.convert_element_type(x, FLOAT32)
  largest = jax.lax.convert_element_type(largest, FLOAT32)
  largest = largest if axes is None else jax.lax.expand_dims(largest, axes)
  # Multiplied by reciprocals: XLA makes that of some divisions, and the last digit another.
  if power_of_two:
    exponent = 2.0 ** math.floor(math.log2(most))
    scale = _rounded_up(largest * (1 / exponent), most / exponent)
  else:
    scale = largest * (1 / most)
  # The reciprocal of a smaller one is none that float32 has.
  scale = jnp.maximum(scale, _TINY)
  # Clipped first: a cast to e4m3 makes NaN of what is above its range.
  # Bounds of one dtype with what they bound: of Python numbers JAX makes float64 where it has that.
  values = jax.lax.clamp(np.float32(-most), wide * (1 / scale), np.float32(most))
  return Scaled(jax.lax.convert_element_type(values, dtype), scale)


def _rounded_up(x: Array, mantissa: float) -> Array:
  """Returns the least powers of two that are no less than `x / mantissa`, for 1 <= mantissa < 2.

  By the bits of the number: a logarithm is not exact on every device.
  """
  bits = jax.lax.bitcast_convert_type(x, np.int32)
  carry = np.int32((1 << 23) - 1 - int((mantissa - 1) * (1 << 23)))
  up = jax.lax.bitcast_convert_type((bits + carry) & np.int32(0xFF << 23), FLOAT32)
  return jax.lax.select(x < math.inf, up, x)


def scaled_dot(params: EqnParams, operands: Sequence[Scaled], dtype: DType) -> Array:
  """Returns the matmul of two scaled arrays; its precision and result in `params` do not count."""
  # Before it is scaled the result may be 448 * 448 times the length of the sum. And a CPU adds up
  # some batches of matrices in the dtype of the result.
  batch = any(params["dimension_numbers"][1])
  holds = dtype if float(jnp.finfo(dtype).max) > 1e38 and not batch else FLOAT32
  result = dot_general_p.bind(
    *(x.values for x in operands), **{**params, "precision": None, "preferred_element_type": holds}
  )
  result = jax.lax.convert_element_type(result, FLOAT32)
  for side, operand in enumerate(operands):
    if operand.scale is not None:
      result = result * _along(result, operand.scale, side, params["dimension_numbers"])
  return jax.lax.convert_element_type(result, dtype)


def _along(result: Array, scale: Array, side: int, numbers: Any) -> Array:
  """Returns the scale of an operand with the axes of the result."""
  if scale.ndim == 0:
    return scale
  contracted, batch = numbers[0][side], numbers[1][side]
  left = [axis for axis in range(scale.ndim) if axis not in contracted]
  free = [axis for axis in left if axis not in batch]
  ordered = jax.lax.squeeze(scale, contracted)
  ordered = jax.lax.transpose(ordered, [left.index(axis) for axis in (*batch, *free)])
  start = len(batch) if side else ordered.ndim
  return jax.lax.expand_dims(ordered, range(start, start + result.ndim - ordered.ndim))


# A matmul with its derivatives.


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
      return scaled_dot(dict(self.params), self.cast(operands), self.half)

  def with_tangent(
    self, primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    """Returns the result and its derivative: a rule for `jax.custom_jvp` with symbolic zeros."""
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero))
    with jax.named_scope(FLOAT8):
      result, kept = _with_kept(self, moving, *primals)
      parts = [
        tangent_p.bind(tangents[side], *each, rule=self, side=side, levels=())
        for side, each in zip(moving, kept, strict=True)
      ]
      return [result], [functools.reduce(operator.add, parts)]

  def quantise(self, x: Array, dtype: DType, summed: Sequence[int]) -> Scaled:
    """Returns an operand of a matmul in float8, of which the axes `summed` are summed over."""
    axes = summed if self.recipe.scaling == "row" else None
    return quantise(x, dtype, axes, self.recipe.power_of_two)

  def cast(self, operands: Sequence[Array]) -> list[Scaled]:
    contracted = dict(self.params)["dimension_numbers"][0]
    return [self.quantise(x, E4M3, axes) for x, axes in zip(operands, contracted, strict=True)]

  def _is_float8(self, side: int) -> bool:
    """Whether the gradient of an operand is multiplied in float8."""
    return side != self.weight or self.recipe.weight_grad == "float8"

  def kept(self, side: int, primals: Sequence[Array], cast: Sequence[Scaled]) -> list[Array]:
    """Returns what the gradient of an operand is computed from: the other one."""
    other = 1 - side
    if not self._is_float8(side):
      scaled = Scaled(jax.lax.convert_element_type(primals[other], self.half))
    elif self.recipe.scaling == "tensor":
      scaled = cast[other]
    else:
      # The gradient adds up over other axes of it than the result: it has other rows.
      contracted, batch = dict(self.params)["dimension_numbers"]
      shared = {*contracted[other], *batch[other]}
      free = [axis for axis in range(primals[other].ndim) if axis not in shared]
      scaled = self.quantise(primals[other], E4M3, free)
    return [checkpoint_name(x, NAME) for x in scaled if x is not None]

  def tangent(self, side: int, t: Array, *others: Array) -> Array:
    """Returns the matmul of a tangent and what is kept of the other operand, in low precision."""
    other = Scaled(*others)
    values = jax.lax.convert_element_type(other.values, FLOAT32)
    values = values if other.scale is None else values * other.scale
    return self.in_half(side, *(jax.lax.convert_element_type(x, self.half) for x in (t, values)))

  def gradient(
    self, side: int, like: ShapedArray, levels: Levels, cotangent: Array, *others: Array
  ) -> Array:
    """Returns the gradient of an operand."""
    like, sums = self.operands[side] if levels else like, 0
    if self.recipe.scaling == "tensor" or not self._is_float8(side):
      # The innermost `vmap`s that do not map over the operand: one matmul adds up over them too.
      sums = len(list(itertools.takewhile(lambda level: not level[0], levels)))
    call = functools.partial(_gradient, self, side, like, sums)
    for mapped, *kept in levels[sums:]:
      call = _each(call, kept, mapped)
    return call(cotangent, *others)

  def multiplied(
    self, side: int, like: ShapedArray, sums: int, cotangent: Array, *others: Array
  ) -> Array:
    """Returns the gradient of an operand, inside of all `vmap`s but for the first `sums`."""
    other = Scaled(*others)
    if sums and other.scale is not None:
      # The scales of what is added up go to the gradient before it.
      scale = jax.lax.expand_dims(other.scale, range(sums, cotangent.ndim))
      cotangent = jax.lax.convert_element_type(cotangent, FLOAT32) * scale
      other = Scaled(other.values, jnp.ones((), FLOAT32))
    out = self.wide[side] or self.half

    def multiply(eqn: JaxprEqn, operands: Sequence[Array], places: Sequence[int]) -> Array:
      if other.scale is None:
        return into(eqn.primitive, operands, {**eqn.params, "preferred_element_type": out})
      axes = eqn.params["dimension_numbers"][0]
      pair = [
        Scaled(x, other.scale) if i in places else self.quantise(x, E5M2, axes[i])
        for i, x in enumerate(operands)
      ]
      return scaled_dot(eqn.params, pair, out)

    types = [jax.typeof(x).update(dtype=self.half) for x in (cotangent, other.values)]
    program = _transposed(self, side, like, sums, *types)
    return with_matmuls_by(multiply, program, cotangent, other.values)

  def check_second_order(self) -> None:
    raise MpjaxTypeError(
      "a matmul in float8",
      expected="first derivatives",
      got="a derivative of its gradient, or of its tangent",
      fix="Second derivatives are for low precision or float32: take them of the function under "
      '"mixed_bfloat16", or put a rule for the module before others.',
    )

  def in_half(self, side: int, x: Array, other: Array) -> Array:
    dtypes = {"precision": None, "preferred_element_type": self.half}
    pair = (other, x) if side else (x, other)
    return dot_general_p.bind(*pair, **{**dict(self.params), **dtypes})


# A model has many layers of few kinds, and JAX traces what is jitted once for each: the matmuls of
# 60 layers are traced in a third of the time. They are written out in the jaxpr around.


@functools.partial(jax.jit, static_argnums=(0, 1), inline=WRITTEN_OUT)
def _with_kept(
  matmul: Matmul, moving: tuple[int, ...], *operands: Array
) -> tuple[Array, list[list[Array]]]:
  """Returns a matmul, and what is kept for the gradients of some operands."""
  cast = matmul.cast(operands)
  kept = [matmul.kept(side, operands, cast) for side in moving]
  return scaled_dot(dict(matmul.params), cast, matmul.half), kept


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), inline=WRITTEN_OUT)
def _gradient(
  matmul: Matmul, side: int, like: ShapedArray, sums: int, cotangent: Array, *others: Array
) -> Array:
  """Returns `Matmul.multiplied`, of which a derivative raises."""

  @jax.custom_jvp
  def gradient(cotangent: Array, *others: Array) -> Array:
    return matmul.multiplied(side, like, sums, cotangent, *others)

  @gradient.defjvp
  def rule(primals: object, tangents: object) -> Any:
    matmul.check_second_order()

  return gradient(cotangent, *others)


@remembered_off_mesh
def _transposed(
  matmul: Matmul,
  side: int,
  like: ShapedArray,
  sums: int,
  cotangent: ShapedArray,
  other: ShapedArray,
) -> ClosedJaxpr:
  """Returns the jaxpr of the gradient of an operand, in low precision."""

  def pull(cotangent: Array, other: Array) -> Array:
    def linear(x: Array) -> Array:
      call = functools.partial(matmul.in_half, side, x)
      return mapped_over(call, ((True,),) * sums)(other)

    return jax.linear_transpose(linear, like.update(dtype=matmul.half))(cotangent)[0]

  return jax.make_jaxpr(pull)(cotangent, other)


def _each(call: Any, kept: Sequence[bool], mapped: bool) -> Any:
  """Returns `call` of each cotangent; the sum of its results if they are gradients of one array."""
  each = jax.vmap(call, in_axes=[0, *(0 if axis else None for axis in kept)])
  return each if mapped else lambda *args: jnp.sum(each(*args), axis=0)


# The equation.


def with_float8(
  eqn: JaxprEqn,
  values: Sequence[Value | None],
  half: DType,
  recipe: Float8,
  view: Callable[[Value, DType, JaxprEqn], Atom],
) -> JaxprEqn:
  """Returns a matmul in float8, for one that `why_not` has nothing against.

  A weight is cast from the dtype that it is stored in, and gets its gradient in float32. What the
  model computes comes in low precision, as by hand.
  """
  weight = _weight_of(values)
  operands: list[Atom] = []
  wide: list[DType | None] = []
  for i, (atom, value) in enumerate(zip(eqn.invars, values, strict=True)):
    is_parameter = value is not None and value.is_parameter
    wide.append(FLOAT32 if i == weight or is_parameter else None)
    if value is None:
      operands.append(atom)
    elif i == weight and value.stored is not None:
      operands.append(value.stored)
    else:
      operands.append(value.atom if is_parameter else view(value, half, eqn))
  avals = list(map(aval_of, operands))
  dtypes = ("precision", "preferred_element_type")
  matmul = Matmul(
    params=tuple((name, x) for name, x in eqn.params.items() if name not in dtypes),
    operands=tuple(aval.update(dtype=half, weak_type=False) for aval in avals),
    recipe=recipe,
    wide=tuple(wide),
    weight=weight,
  )
  with context_of(eqn):
    product = _equation(matmul, *avals)
  return eqn.replace(primitive=product.primitive, invars=operands, params=product.params)


@remembered_off_mesh
def _equation(matmul: Matmul, *avals: ShapedArray) -> JaxprEqn:
  """Returns an equation for operands of these types, which layers of one kind share."""
  body = _varying_as(avals[0], jax.make_jaxpr(matmul)(*avals))
  return differentiated(body, matmul.with_tangent, avals, "matmul")


def _varying_as(like: ShapedArray, body: ClosedJaxpr) -> ClosedJaxpr:
  """Returns a jaxpr for operands that vary over the axes of a `shard_map`.

  These are not bound while the jaxpr around is rewritten, so that a trace knows nothing of them.
  """
  axes, jaxpr = varying_axes(like), body.jaxpr
  if not axes:
    return body
  varying: dict[Atom, Var] = {}
  eqns: list[JaxprEqn] = []

  def of(v: Atom) -> Var:
    new = Var(varying_as(aval_of(v), like))
    if not isinstance(v, Literal):
      return varying.setdefault(v, new)
    pcast = _pcast().primitive
    eqns.append(
      jaxpr.eqns[0].replace(primitive=pcast, invars=[v], outvars=[new], params={"axes": axes})
    )
    return new

  for eqn in jaxpr.eqns:
    operands = list(map(of, eqn.invars))
    eqns.append(eqn.replace(invars=operands, outvars=list(map(of, eqn.outvars))))
  invars, outvars = list(map(of, jaxpr.invars)), list(map(of, jaxpr.outvars))
  return ClosedJaxpr(jaxpr.replace(invars=invars, eqns=eqns, outvars=outvars), body.consts)


@functools.cache
def _pcast() -> JaxprEqn:
  """Returns an equation of `jax.lax.pcast`."""
  mesh, spec = jax.sharding.AbstractMesh((1,), ("axis",)), jax.sharding.PartitionSpec

  def cast(x: Array) -> Array:
    return jax.lax.pcast(x, "axis", to="varying")

  mapped = jax.shard_map(cast, mesh=mesh, in_specs=spec(), out_specs=spec("axis"))
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # Whatever is around.
    program = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((1,), FLOAT32))
  return next(iter(inner_jaxprs(program.eqns[-1]) or ())).jaxpr.eqns[-1]
