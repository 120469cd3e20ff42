"""What is saved for the backward pass in low precision, of operations that run in float32."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive, Var, new_jaxpr_eqn, no_effects

from mpjax._core.dtypes import FLOAT32
from mpjax._core.types import Array, DType, Leaf
from mpjax._jaxprs.atoms import Atom, aval_of, cast_to, dtype_of, retyped
from mpjax._jaxprs.autocast.run import differentiated, jaxpr_of, remembered_off_mesh
from mpjax._jaxprs.autocast.values import Value
from mpjax._jaxprs.inner_jaxprs import with_inner


def saving_low(
  eqn: JaxprEqn,
  values: Sequence[Value],
  saved: Sequence[DType | None],
  dtype: DType,
  view: Callable[[Value, DType, JaxprEqn], Atom],
) -> JaxprEqn:
  """Returns a float32 multiplication whose derivative saves factors in low precision.

  Gradients flow to the float32 operands, one for each value, in which those of all its readers
  meet. A factor that is at rest is an operand once more as it rests, to be saved. Another one is
  rounded for the derivative with respect to the other factor, which is a sum as that of a weight
  is; the derivative with respect to itself, which may be one step of many, reads the float32 one.

  `saved` has the dtype in which each of one or two operands is saved, None for float32; `dtype` is
  that of the result.
  """
  places = tuple(i for i, v in enumerate(values) if saved[i] and dtype_of(v.atom) == saved[i])
  # In float32, where the gradients of all readers of a value are added.
  operands = [view(v, FLOAT32, eqn) for v in values] + [values[i].atom for i in places]
  avals = [*map(aval_of, operands), aval_of(eqn.outvars[0])]
  params = tuple(eqn.params.items())
  call = _with_rule(eqn.primitive, params, *avals, saved=tuple(saved), places=places, dtype=dtype)
  body = _product(eqn, avals, len(values), dtype)
  return eqn.replace(primitive=call.primitive, invars=operands, params=with_inner(call, [body]))


def _product(
  eqn: JaxprEqn, avals: Sequence[ShapedArray], factors: int, dtype: DType
) -> ClosedJaxpr:
  """Returns the jaxpr of a multiplication in float32, of operands and a result of these types."""
  invars, wide = list(map(Var, avals[:-1])), retyped(Var(avals[-1]), FLOAT32)
  eqns = [eqn.replace(invars=[*invars[:factors]], outvars=[wide])]
  if dtype != FLOAT32:
    eqns.append(cast_to(retyped(wide, dtype), wide, eqn))
  return ClosedJaxpr(jaxpr_of(eqns, invars, eqns[-1].outvars), ())


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
    resting = dict(zip(places, primals[count:], strict=True))
    parts: list[Array] = []
    for place, change in enumerate(tangents[:count]):
      if isinstance(change, SymbolicZero):
        continue
      factors = [
        resting[i] if i in resting else x if half is None or i == place else x.astype(half)
        for i, (x, half) in enumerate(zip(primals[:count], saved, strict=True))
      ]
      saving = jax.checkpoint(functools.partial(along, place), prevent_cse=False)
      parts.append(saving(factors, change))
    return [product(*primals[:count])], [functools.reduce(operator.add, parts)]

  invars, result = list(map(Var, avals[:count])), retyped(Var(avals[-1]), FLOAT32)
  eqn = new_jaxpr_eqn(invars, [result], primitive, dict(params), no_effects)
  return differentiated(_product(eqn, avals, count, dtype), tangent, avals[:-1], primitive.name)


def saving_rounded(
  eqn: JaxprEqn, jaxpr: Jaxpr, avals: Sequence[ShapedArray], saved: Sequence[DType | None]
) -> JaxprEqn:
  """Returns a `jax.checkpoint` that saves some of its operands in low precision.

  Forward they are read as they are held. The backward pass, which computes the jaxpr again, starts
  from rounded ones: an error for each call, and none that a loop would add up.

  `saved` has the dtype in which each operand is saved, None for its own.
  """

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Leaf]]:
    moving = [i for i, change in enumerate(tangents) if not isinstance(change, SymbolicZero)]
    outs: list[Array] = eval_jaxpr(jaxpr, (), *primals)

    def along(low: Sequence[Array], changes: Sequence[Array]) -> list[Array]:
      wide = [x.astype(p.dtype) if h else x for x, p, h in zip(low, primals, saved, strict=True)]

      def of_moving(*some: Array) -> list[Array]:
        by_place = dict(zip(moving, some, strict=True))
        return eval_jaxpr(jaxpr, (), *(by_place.get(i, x) for i, x in enumerate(wide)))

      out = jax.jvp(of_moving, [wide[i] for i in moving], changes)[1]
      return [x for x in out if x.dtype != jax.dtypes.float0]

    low = [x if half is None else x.astype(half) for x, half in zip(primals, saved, strict=True)]
    saving = jax.checkpoint(along, prevent_cse=eqn.params["prevent_cse"])
    changes = iter(saving(low, [tangents[i] for i in moving]))
    return outs, [
      next(changes)
      if jnp.issubdtype(x.dtype, jnp.inexact)
      else np.zeros(x.shape, jax.dtypes.float0)
      for x in outs
    ]

  return differentiated(ClosedJaxpr(jaxpr, ()), tangent, avals, "saving_rounded")
