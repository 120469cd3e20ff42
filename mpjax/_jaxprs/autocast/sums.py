"""Sums of derivatives in float32: where one number is read several times.

The transpose of a broadcast is a sum in the dtype of what is broadcast, that of a gather adds up in
the dtype of what is gathered, and the derivative of a maximum counts the positions that have it. So
these run in float32, and their result is rounded, which loses nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import (
  ClosedJaxpr,
  JaxprEqn,
  Literal,
  Primitive,
  Var,
  new_jaxpr_eqn,
  no_effects,
)
from jax.extend.core.primitives import broadcast_in_dim_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.types import Array, DType
from mpjax._jaxprs.atoms import Atom, aval_of, cast_to, dtype_of, retyped, shape_of
from mpjax._jaxprs.autocast.eqn_params import retype
from mpjax._jaxprs.autocast.evaluate import differentiated, jaxpr_of, remembered_off_mesh
from mpjax._jaxprs.autocast.values import Value
from mpjax._jaxprs.inner_jaxprs import with_inner
from mpjax._jaxprs.primitives import facts_of


def repeats(eqn: JaxprEqn) -> bool:
  """Whether an operation does nothing but move numbers, each perhaps to several positions."""
  return (
    facts_of(eqn).gradient == "repeated"
    and type(eqn.invars[0]) is not Literal
    and not eqn.params.get("unique_indices")
  )


def is_summed(eqn: JaxprEqn, value: Value, dtype: DType) -> bool:
  """Whether an operation in low precision adds up the derivative with respect to an operand.

  Args:
    eqn: an operation, but none that only moves numbers.
    value: the operand.
    dtype: that of the operation.
  """
  if dtype == FLOAT32 or type(value.atom) is Literal or (value.once and value.neutral):
    return False
  gradient = facts_of(eqn).gradient
  if gradient in ("added", "multiplied"):  # They may broadcast axes of size 1.
    return shape_of(value.atom) != shape_of(eqn.outvars[0])
  return gradient == "chosen"


def broadcast(atom: Atom, eqn: JaxprEqn) -> JaxprEqn:
  """Returns an equation that repeats a value to the shape of the result of `eqn`."""
  aval = aval_of(atom)
  shape, sharding = shape_of(eqn.outvars[0]), _sharding(aval, eqn)
  axes = tuple(range(aval.ndim))
  params = {"shape": shape, "broadcast_dimensions": axes, "sharding": sharding}
  new = aval.update(shape=shape, weak_type=False)
  var = Var(new if sharding is None else new.update(sharding=sharding))
  place = (eqn.source_info, eqn.ctx)
  return new_jaxpr_eqn([atom], [var], broadcast_in_dim_p, params, no_effects, *place)


def _sharding(aval: ShapedArray, eqn: JaxprEqn) -> NamedSharding | None:
  """Returns the explicit sharding of a value that is repeated to the shape of the result."""
  out = aval_of(eqn.outvars[0])
  if AxisType.Explicit not in out.sharding.mesh.axis_types:
    return None
  spec = list(out.sharding.spec)
  for axis, size in enumerate(aval.shape):
    if size == out.shape[axis]:
      spec[axis] = aval.sharding.spec[axis]
  return NamedSharding(out.sharding.mesh, PartitionSpec(*spec))


def saving_operands(eqn: JaxprEqn, operands: Sequence[Atom], dtype: DType) -> JaxprEqn:
  """Returns an operation in float32 whose derivative saves nothing but `operands`, as they are.

  It is inside of `jax.checkpoint`: the casts between the operands and the operation are computed
  again in the backward pass, where a compiler fuses them, and it adds up in float32.

  Args:
    eqn: the operation.
    operands: in any floating dtypes.
    dtype: that of the result.
  """
  given = [Var(aval_of(atom)) for atom in operands]
  wide = [retyped(v, FLOAT32) if dtype_of(v) in HALVES else v for v in given]
  casts = [cast_to(new, v, eqn) for new, v in zip(wide, given, strict=True) if new is not v]
  (out,) = eqn.outvars
  result = retyped(out, FLOAT32)
  body = [*casts, eqn.replace(invars=[*wide], outvars=[result], params=retype(eqn, FLOAT32))]
  if dtype != FLOAT32:
    body.append(cast_to(retyped(out, dtype), result, eqn))
  call = _checkpoint()
  jaxpr = jaxpr_of(body, given, body[-1].outvars)
  return eqn.replace(primitive=call.primitive, params=with_inner(call, [jaxpr]))


def with_low_residual(
  eqn: JaxprEqn, operands: Sequence[Atom], big: int, half: DType, dtype: DType
) -> JaxprEqn:
  """Returns a float32 multiplication of two factors, of which one is saved in low precision.

  Forward both are read in float32. So is the other one by the derivative with respect to this one,
  which may be one step of many; the derivative with respect to the other is a sum, as that of a
  weight is, and the low factor is rounded for it.

  Args:
    eqn: a multiplication or quotient.
    operands: two, in float32.
    big: which of them is saved in low precision.
    half: that dtype.
    dtype: that of the result.
  """
  params = tuple(eqn.params.items())
  avals = [*map(aval_of, operands), aval_of(eqn.outvars[0])]
  made = _with_rule(eqn.primitive, params, *avals, big=big, half=half, dtype=dtype)
  body = _product(eqn, avals, dtype)
  return eqn.replace(primitive=made.primitive, params=with_inner(made, [body]))


def _product(eqn: JaxprEqn, avals: Sequence[ShapedArray], dtype: DType) -> ClosedJaxpr:
  """Returns the jaxpr of a multiplication in float32, of operands and a result of these types."""
  given, wide = list(map(Var, avals[:-1])), retyped(Var(avals[-1]), FLOAT32)
  eqns = [eqn.replace(invars=[*given], outvars=[wide])]
  if dtype != FLOAT32:
    eqns.append(cast_to(retyped(wide, dtype), wide, eqn))
  return ClosedJaxpr(jaxpr_of(eqns, given, eqns[-1].outvars), ())


@remembered_off_mesh
def _with_rule(
  primitive: Primitive,
  params: tuple[tuple[str, Any], ...],
  *avals: ShapedArray,
  big: int,
  half: DType,
  dtype: DType,
) -> JaxprEqn:
  """Returns an equation with a derivative rule that all multiplications of these types share."""

  def product(*factors: Array) -> Array:
    return jax.lax.convert_element_type(primitive.bind(*factors, **dict(params)), dtype)

  def by_other(low: Array, other: Array, tangent: Array) -> Array:
    wide = jax.lax.convert_element_type(low, FLOAT32)
    return jax.jvp(lambda x: product(*_ordered(wide, x, big)), (other,), (tangent,))[1]

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    x, other = primals[big], primals[1 - big]
    parts: list[Array] = []
    if not isinstance(tangents[big], SymbolicZero):
      change = (lambda x: product(*_ordered(x, other, big)), (x,), (tangents[big],))
      parts.append(jax.jvp(*change)[1])
    if not isinstance(tangents[1 - big], SymbolicZero):
      low = jax.lax.convert_element_type(x, half)
      saved = jax.checkpoint(by_other, prevent_cse=False)
      parts.append(saved(low, other, tangents[1 - big]))
    return [product(*primals)], [functools.reduce(jax.lax.add, parts)]

  *factors, out = avals
  given, result = list(map(Var, factors)), retyped(Var(out), FLOAT32)
  eqn = new_jaxpr_eqn(given, [result], primitive, dict(params), no_effects)
  return differentiated(_product(eqn, avals, dtype), tangent, factors, primitive.name)


def _ordered(x: Array, other: Array, place: int) -> tuple[Array, Array]:
  return (x, other) if place == 0 else (other, x)


@functools.cache
def _checkpoint() -> JaxprEqn:
  """Returns an equation of `jax.checkpoint` that lets a compiler merge what is computed twice."""
  return jax.make_jaxpr(jax.checkpoint(lambda x: x, prevent_cse=False))(1.0).jaxpr.eqns[-1]
