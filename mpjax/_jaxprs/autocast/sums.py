"""Sums of derivatives in float32: where one number is read several times.

The transpose of a broadcast is a sum in the dtype of what is broadcast, that of a gather adds up in
the dtype of what is gathered, and the derivative of a maximum counts the positions that have it. So
these run in float32, and their result is rounded, which loses nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import (
  ClosedJaxpr,
  Jaxpr,
  JaxprEqn,
  Literal,
  Primitive,
  Var,
  new_jaxpr_eqn,
  no_effects,
)
from jax.extend.core.primitives import broadcast_in_dim_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._core.dtypes import FLOAT32
from mpjax._core.types import Array, DType, Leaf
from mpjax._jaxprs.atoms import Atom, aval_of, cast_to, retyped, shape_of
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


def saving_low(
  eqn: JaxprEqn,
  operands: Sequence[Atom],
  saved: Sequence[DType | None],
  atoms: Sequence[Atom],
  at_rest: Sequence[bool],
  dtype: DType,
) -> JaxprEqn:
  """Returns a float32 multiplication whose derivative saves factors in low precision.

  Gradients flow to the float32 operands, one for each value, in which those of all its readers
  meet. A factor that is at rest is given once more as it rests, to be saved. Another one is rounded
  for the derivative with respect to the other factor, which is a sum as that of a weight is; the
  derivative with respect to itself, which may be one step of many, reads the float32 one.

  Args:
    eqn: a multiplication, quotient or square.
    operands: one or two, in float32.
    saved: for each the dtype in which it is saved; None for float32.
    atoms: the values of the operands as they are held.
    at_rest: which of these are in low precision.
    dtype: that of the result.
  """
  given = [a for a, kept, rests in zip(atoms, saved, at_rest, strict=True) if kept and rests]
  places = [i for i, (kept, rests) in enumerate(zip(saved, at_rest, strict=True)) if kept and rests]
  avals = [*map(aval_of, operands), *map(aval_of, given), aval_of(eqn.outvars[0])]
  params = tuple(eqn.params.items())
  made = _with_rule(
    eqn.primitive, params, *avals, saved=tuple(saved), places=tuple(places), dtype=dtype
  )
  body = _product(eqn, avals, len(operands), dtype)
  invars = [*operands, *given]
  return eqn.replace(primitive=made.primitive, invars=invars, params=with_inner(made, [body]))


def _product(
  eqn: JaxprEqn, avals: Sequence[ShapedArray], factors: int, dtype: DType
) -> ClosedJaxpr:
  """Returns the jaxpr of a multiplication in float32, of operands and a result of these types."""
  given, wide = list(map(Var, avals[:-1])), retyped(Var(avals[-1]), FLOAT32)
  eqns = [eqn.replace(invars=[*given[:factors]], outvars=[wide])]
  if dtype != FLOAT32:
    eqns.append(cast_to(retyped(wide, dtype), wide, eqn))
  return ClosedJaxpr(jaxpr_of(eqns, given, eqns[-1].outvars), ())


@remembered_off_mesh
def _with_rule(
  primitive: Primitive,
  params: tuple[tuple[str, Any], ...],
  *avals: ShapedArray,
  saved: tuple[DType | None, ...],
  places: tuple[int, ...],
  dtype: DType,
) -> JaxprEqn:
  """Returns an equation with a derivative rule that all multiplications of these types share."""
  count = len(saved)

  def product(*factors: Array) -> Array:
    return jax.lax.convert_element_type(primitive.bind(*factors, **dict(params)), dtype)

  def along(place: int, factors: Sequence[Array], change: Array) -> Array:
    wide = [jax.lax.convert_element_type(x, FLOAT32) for x in factors]

    def of_one(x: Array) -> Array:
      return product(*wide[:place], x, *wide[place + 1 :])

    return jax.jvp(of_one, (wide[place],), (change,))[1]

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Array]]:
    kept, resting = list(primals[:count]), dict(zip(places, primals[count:], strict=True))
    parts: list[Array] = []
    for place, change in enumerate(tangents[:count]):
      if isinstance(change, SymbolicZero):
        continue
      for i, half in enumerate(saved):
        if i in resting:
          kept[i] = resting[i]
        elif half is not None:
          x = primals[i]
          kept[i] = x if i == place else jax.lax.convert_element_type(x, half)
      saving = jax.checkpoint(functools.partial(along, place), prevent_cse=False)
      parts.append(saving(kept, change))
    out = product(*primals[:count])
    zero = [jnp.zeros_like(out)] if not parts else []
    return [out], [functools.reduce(jax.lax.add, [*parts, *zero])]

  given, result = list(map(Var, avals[:count])), retyped(Var(avals[-1]), FLOAT32)
  eqn = new_jaxpr_eqn(given, [result], primitive, dict(params), no_effects)
  return differentiated(_product(eqn, avals, count, dtype), tangent, avals[:-1], primitive.name)


def saving_rounded(
  eqn: JaxprEqn, jaxpr: Jaxpr, avals: Sequence[ShapedArray], saved: Sequence[DType | None]
) -> JaxprEqn:
  """Returns a `jax.checkpoint` that saves some of its operands in low precision.

  Forward they are read as they are held. The backward pass, which computes the jaxpr again, starts
  from rounded ones: an error for each call, and none that a loop would add up.

  Args:
    eqn: the equation.
    jaxpr: its jaxpr.
    avals: the types of the operands.
    saved: for each operand the dtype in which it is saved; None for its own.
  """

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Leaf]]:
    moving = [i for i, change in enumerate(tangents) if not isinstance(change, SymbolicZero)]
    outs: list[Array] = eval_jaxpr(jaxpr, (), *primals)

    def along(kept: Sequence[Array], changes: Sequence[Array]) -> list[Array]:
      wide = [x.astype(p.dtype) if h else x for x, p, h in zip(kept, primals, saved, strict=True)]

      def of_moving(*some: Array) -> list[Array]:
        given = dict(zip(moving, some, strict=True))
        return eval_jaxpr(jaxpr, (), *(given.get(i, x) for i, x in enumerate(wide)))

      found = jax.jvp(of_moving, [wide[i] for i in moving], changes)[1]
      return [x for x in found if x.dtype != jax.dtypes.float0]

    kept = [x if half is None else x.astype(half) for x, half in zip(primals, saved, strict=True)]
    saving = jax.checkpoint(along, prevent_cse=eqn.params["prevent_cse"])
    changes = iter(saving(kept, [tangents[i] for i in moving]))
    return outs, [
      next(changes)
      if jnp.issubdtype(x.dtype, jnp.inexact)
      else np.zeros(x.shape, jax.dtypes.float0)
      for x in outs
    ]

  return differentiated(ClosedJaxpr(jaxpr, ()), tangent, avals, "saving_rounded")
