"""What runs in float32 and is saved for the backward pass in low precision.

Single operations, and activation functions that hold powers, like GELU.
"""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from mpjax._core.dtypes import FLOAT32
from mpjax._core.types import Array, DType, Leaf
from mpjax._jaxprs.autocast.rewriter import FACTOR, HELD, MATMUL, Rewriter, only_float32
from mpjax._jaxprs.autocast.run import differentiated, jaxpr_of, remembered_off_mesh, unscoped
from mpjax._jaxprs.autocast.values import Kind, Value, cached_per_jaxpr
from mpjax._jaxprs.compat import context_of
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.reader import Atom, aval_of, cast_to, dtype_of, retyped, shape_of


def saving_low(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  values: Sequence[Value],
  saved: Sequence[DType | None],
  dtype: DType,
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
  operands = [rewriter.view(v, FLOAT32, eqn) for v in values] + [values[i].atom for i in places]
  avals = map(aval_of, operands)
  params = tuple(eqn.params.items())
  with context_of(eqn):
    call = _with_rule(eqn.primitive, params, eqn.ctx, tuple(saved), places, dtype, *avals)
  return eqn.replace(primitive=call.primitive, invars=operands, params=call.params)


@remembered_off_mesh
def _with_rule(
  primitive: Primitive,
  params: tuple[tuple[str, Any], ...],
  _: object,
  saved: tuple[DType | None, ...],
  places: tuple[int, ...],
  dtype: DType,
  *avals: ShapedArray,
) -> JaxprEqn:
  """Returns an equation with a derivative rule that all multiplications of a context share."""
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

  return differentiated(lambda *args: product(*args[:count]), tangent, avals, primitive.name)


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
    smooth = [jnp.issubdtype(x.dtype, jnp.inexact) for x in outs]
    zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in outs]
    return outs, [next(changes) if s else zero for s, zero in zip(smooth, zeros, strict=True)]

  return differentiated(ClosedJaxpr(jaxpr, ()), tangent, avals, "saving_rounded")


class Powers(NamedTuple):
  """What is computed of one value, and grows faster than it, or is computed of what does."""

  root: Var
  eqns: tuple[JaxprEqn, ...]  # The operations, with all that they need but the root.
  places: frozenset[int]  # The positions of those whose results nothing else reads.
  outs: tuple[Var, ...]  # What other equations read, and results.
  single: bool  # It is one operation.


@cached_per_jaxpr
def powers(jaxpr: Jaxpr, ops: OpLists) -> Mapping[int, Powers]:
  """Returns what a jaxpr computes with powers of single values, by the position where it begins."""
  # Chains: the operations on one value alone, and how fast the result of each grows.
  roots: dict[Var, Var] = {}
  degrees: dict[Var, float] = {}
  chains: dict[Var, list[int]] = {}
  for place, eqn in enumerate(jaxpr.eqns):
    values = {roots.get(v, v) for v in _variables(eqn.invars)}
    degree = facts_of(eqn).degree
    if len(values) != 1 or degree is None:
      continue
    if ops.part_of(eqn.primitive.name, eqn.params) not in ("promote", "keep", "float32"):
      continue
    (root,), (out,) = values, eqn.outvars
    if all(dtype_of(v) == FLOAT32 and shape_of(v) == shape_of(out) for v in (root, out)):
      grows = [0 if isinstance(v, Literal) else degrees.get(v, 1) for v in eqn.invars]
      roots[out], degrees[out] = root, degree(grows, eqn.params)
      chains.setdefault(root, []).append(place)
  grown = {root for out, root in roots.items() if degrees[out] > 1}
  if not grown:
    return {}
  readers: dict[Var, set[int]] = {}
  for place, atoms in enumerate([*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]):
    for v in _variables(atoms):
      readers.setdefault(v, set()).add(place)

  functions: dict[int, Powers] = {}
  for root in grown:
    out = {place: jaxpr.eqns[place].outvars[0] for place in chains[root]}
    after: set[int] = set()  # A power, and what is computed of it.
    for place in out:
      if degrees[out[place]] > 1 or place in after:
        after |= {place, *(i for i in readers.get(out[place], ()) if i in out)}
    needed = {v for i in after for v in _variables(jaxpr.eqns[i].invars)}
    before: set[int] = set()  # What else that needs.
    mine = set(after)
    for place in reversed(out):
      if place not in after and out[place] in needed:
        before.add(place)
        needed.update(_variables(jaxpr.eqns[place].invars))
        if mine.issuperset(readers[out[place]]):
          mine.add(place)
    eqns = tuple(jaxpr.eqns[i] for i in sorted(after | before))
    outs = tuple(out[i] for i in sorted(after) if not after.issuperset(readers.get(out[i], ())))
    functions[min(mine)] = Powers(root, eqns, frozenset(mine), outs, len(after) == 1)
  return functions


def _variables(atoms: Sequence[Atom]) -> list[Var]:
  return [v for v in atoms if not isinstance(v, Literal)]


def write_powers(rewriter: Rewriter, function: Powers) -> bool:
  """Writes what holds powers of a low-precision value as one equation; False if it stays as it is.

  It stays if float32 operations read all of it, which is then in float32 anyway; and if it is one
  power that operations of the `half` list read: it has to fit into their dtype.
  """
  first = function.eqns[0]
  scope, half = rewriter.place(first)
  value = rewriter.value(function.root)
  apart = any(rewriter.place(eqn)[0] != scope for eqn in function.eqns)
  if apart or half is None or value is None or value.kind.dtype != half:
    return False
  readers = [rewriter.readers.get(v, 0) for v in function.outs]
  if all(only_float32(each) or (function.single and each & MATMUL) for each in readers):
    return False
  # The results are held as the value is; but in float32 if no matmul reads them.
  harmed = HELD | FACTOR if value.kind.held else 0
  kinds = [Kind(half, held=bool(each & harmed) or not each & MATMUL) for each in readers]

  # One equation for all of it, of the root as it is held.
  operand = rewriter.view(value, value.kind.current, first)
  dtypes = [kind.variable for kind in kinds]
  eqns, root, aval = unscoped(function.eqns), function.root, aval_of(operand)
  wide = jaxpr_of(eqns, [root], function.outs)
  invar = root if dtype_of(operand) == FLOAT32 else Var(aval)
  before = [] if invar is root else [cast_to(root, invar, eqns[-1])]
  pairs = list(zip(function.outs, dtypes, strict=True))
  outs = [v if dtype == FLOAT32 else retyped(v, dtype) for v, dtype in pairs]
  after = [cast_to(x, v, eqns[-1]) for x, v in zip(outs, function.outs, strict=True) if x is not v]
  body = jaxpr_of([*before, *eqns, *after], [invar], outs)

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array]
  ) -> tuple[list[Array], list[Array]]:
    x = jax.lax.convert_element_type(primals[0], FLOAT32)
    one = jax.lax.full_like(x, 1)
    values, slopes = jax.jvp(lambda x: eval_jaxpr(wide, (), x), (x,), (one,))
    cast = [
      [jax.lax.convert_element_type(x, d) for x, d in zip(xs, dtypes, strict=True)]
      for xs in (values, slopes, [tangents[0]] * len(values))
    ]
    # Else XLA keeps what is expensive in it, such as a tanh in float32, and finishes it later.
    saved = jax.lax.optimization_barrier(cast[1])
    return cast[0], [slope * t for slope, t in zip(saved, cast[2], strict=True)]

  with context_of(function.eqns[-1]):
    call = differentiated(ClosedJaxpr(body, ()), tangent, [aval], "activation")
  changes = {"primitive": call.primitive, "outvars": list(function.outs), "params": call.params}
  rewriter.write(function.eqns[-1].replace(**changes), [operand], kinds)
  return True
