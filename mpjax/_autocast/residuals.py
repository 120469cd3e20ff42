"""What runs in float32 and is saved for the backward pass in low precision.

Single operations, what a `remat` recomputes, and activation functions that hold powers, like GELU.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from mpjax._autocast.rewriter import By, Rewriter, in_default, only_float32
from mpjax._autocast.run import variables, with_key
from mpjax._autocast.values import Kind, Value
from mpjax._core.trees import is_inexact
from mpjax._core.types import FLOAT32, Array, DType, Leaf
from mpjax._jaxpr.caches import cached_per_jaxpr, remembered_off_mesh
from mpjax._jaxpr.calls import differentiated, jaxpr_for
from mpjax._jaxpr.compat import context_of
from mpjax._jaxpr.op_lists import OpLists
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of, shape_of


def saving_low(
  rewriter: Rewriter,
  eqn: JaxprEqn,
  values: Sequence[Value],
  saved: Sequence[DType | None],
  dtype: DType,
) -> JaxprEqn:
  """Returns a float32 multiplication with a result in `dtype`, whose derivative saves factors low.

  Gradients flow to the float32 operands, in which those of all readers meet. A factor at rest is
  an operand once more, to be saved. Another one is rounded for the derivative by the other factor,
  a sum; the derivative by itself, which may be one step of many, reads the float32 one.
  """
  resting = {i: x for i, v in enumerate(values) if saved[i] and (x := v.at_rest) is not None}
  operands = [*(rewriter.view(v, FLOAT32, eqn) for v in values), *resting.values()]
  key = eqn.primitive, tuple(eqn.params.items()), eqn.ctx, tuple(saved), tuple(resting), dtype
  with context_of(eqn):
    call = _product(*key, *map(aval_of, operands))
  return eqn.replace(primitive=call.primitive, invars=operands, params=call.params)


@remembered_off_mesh
def _product(
  primitive: Primitive,
  params: tuple[tuple[str, Any], ...],
  _: object,
  saved: tuple[DType | None, ...],
  places: tuple[int, ...],
  dtype: DType,
  *avals: ShapedArray,
) -> JaxprEqn:
  # Returns an equation with a derivative rule that all multiplications of a context share.

  def product(*factors: Array) -> list[Array]:
    result = primitive.bind(*factors[: len(saved)], **dict(params))
    return [jax.lax.convert_element_type(result, dtype)]

  body = jaxpr_for(product, *avals)
  return _saving(product, body, avals, saved, primitive.name, places=places, apart=True)


def saving_rounded(
  eqn: JaxprEqn, jaxpr: Jaxpr, avals: Sequence[ShapedArray], saved: Sequence[DType | None]
) -> JaxprEqn:
  """Returns a `jax.checkpoint` that reads operands as they are held, and saves some of them low."""
  # Its backward pass starts from rounded ones: an error for each call, and none that a loop adds
  # up.

  def fun(*operands: Array) -> list[Array]:
    return eval_jaxpr(in_default(jaxpr), (), *operands)

  cse = eqn.params["prevent_cse"]
  return _saving(fun, ClosedJaxpr(jaxpr, ()), avals, saved, "saving_rounded", prevent_cse=cse)


def _saving(
  fun: Callable[..., list[Array]],
  body: ClosedJaxpr,
  avals: Sequence[ShapedArray],
  saved: Sequence[DType | None],
  name: str,
  *,
  places: Sequence[int] = (),
  apart: bool = False,
  prevent_cse: bool = False,
) -> JaxprEqn:
  """Returns an equation whose derivative is computed from operands as they are `saved`."""
  # Operands at `places` come once more after them, in that dtype. If those that move are
  # differentiated `apart`, each is read as it is for itself.
  count = len(saved)

  def tangent(
    primals: Sequence[Array], tangents: Sequence[Array | SymbolicZero]
  ) -> tuple[list[Array], list[Leaf]]:
    resting = dict(zip(places, primals[count:], strict=True))
    moving = [i for i, t in enumerate(tangents[:count]) if not isinstance(t, SymbolicZero)]

    def along(group: list[int], factors: Sequence[Array], changes: Sequence[Any]) -> list[Array]:
      pairs = zip(factors, primals, strict=False)
      wide = [x if x.dtype == p.dtype else x.astype(p.dtype) for x, p in pairs]

      def of_group(*some: Array) -> list[Array]:
        by_place = dict(zip(group, some, strict=True))
        return fun(*(by_place.get(i, x) for i, x in enumerate(wide)))

      out = jax.jvp(of_group, [wide[i] for i in group], list(changes))[1]
      return [x for x in out if x.dtype != jax.dtypes.float0]

    parts: list[list[Array]] = []
    for group in [[i] for i in moving] if apart else [moving]:
      own = group if apart else ()
      factors = [
        resting[i] if i in resting else x if half is None or i in own else x.astype(half)
        for i, (x, half) in enumerate(zip(primals, saved, strict=False))
      ]
      change = functools.partial(along, group)
      if any(x.dtype != p.dtype for x, p in zip(factors, primals, strict=False)):
        change = jax.checkpoint(change, prevent_cse=prevent_cse)
      parts.append(change(factors, [tangents[i] for i in group]))
    outs = fun(*primals[:count])
    changes = (functools.reduce(operator.add, each) for each in zip(*parts, strict=True))
    zeros = [None if is_inexact(x) else np.zeros(x.shape, jax.dtypes.float0) for x in outs]
    return outs, [next(changes) if zero is None else zero for zero in zeros]

  return differentiated(body, tangent, avals, name)


# Activation functions.


class Powers(NamedTuple):
  """What is computed of one value, and grows faster than it, or is computed of what does."""

  root: Var
  eqns: tuple[JaxprEqn, ...]  # the operations, with all that they need but the root
  places: frozenset[int]  # the positions of those whose results nothing else reads
  outs: tuple[Var, ...]  # what other equations read, and results
  single: bool  # it is one operation


@cached_per_jaxpr
def powers(jaxpr: Jaxpr, ops: OpLists) -> Mapping[int, Powers]:
  """Returns what a jaxpr computes with powers of single values, by the position where it begins."""
  # Chains: the operations on one value alone, and how fast the result of each grows.
  roots: dict[Var, Var] = {}
  degrees: dict[Var, float] = {}
  chain: list[int] = []
  after: set[Var] = set()  # Powers, and what is computed of them.
  readers: dict[Var, set[int]] = {v: {len(jaxpr.eqns)} for v in variables(jaxpr.outvars)}
  for place, eqn in enumerate(jaxpr.eqns):
    operands, degree = variables(eqn.invars), facts_of(eqn).degree
    for v in operands:
      readers.setdefault(v, set()).add(place)
    part = degree and ops.part_of(eqn.primitive.name, eqn.params)
    values = {roots.get(v, v) for v in operands} if part in ("promote", "keep", "float32") else ()
    if degree is None or len(values) != 1:
      continue
    (root,), (out,) = values, eqn.outvars
    if all(dtype_of(v) == FLOAT32 and shape_of(v) == shape_of(out) for v in (root, out)):
      grows = [0 if isinstance(v, Literal) else degrees.get(v, 1) for v in eqn.invars]
      roots[out], degrees[out] = root, degree(grows, eqn.params)
      chain.append(place)
      if degrees[out] > 1 or not after.isdisjoint(operands):
        after.add(out)

  # Backwards: what else they need, and what of it nothing else reads.
  needed: set[Var] = set()
  members: dict[Var, list[int]] = {}
  mine: dict[Var, set[int]] = {}
  for place in reversed(chain):
    (out,) = jaxpr.eqns[place].outvars
    if out in after or out in needed:
      members.setdefault(roots[out], []).insert(0, place)
      needed |= variables(jaxpr.eqns[place].invars)
      own = mine.setdefault(roots[out], set())
      if out in after or readers[out] <= own:
        own.add(place)
  functions: dict[int, Powers] = {}
  for root, places in members.items():
    out = {i: jaxpr.eqns[i].outvars[0] for i in places}
    grown = {i for i in places if out[i] in after}
    outs = tuple(out[i] for i in places if i in grown and not readers.get(out[i], set()) <= grown)
    eqns = tuple(jaxpr.eqns[i] for i in places)
    functions[min(mine[root])] = Powers(root, eqns, frozenset(mine[root]), outs, len(grown) == 1)
  return functions


def write_powers(rewriter: Rewriter, function: Powers) -> bool:
  """Writes what holds powers of a low-precision value as one equation; False if it stays as it is.

  It stays if float32 operations read all of it, which is then in float32 anyway; and if it is one
  power that operations of the `half` list read: it has to fit into their dtype.
  """
  root, outs, last = function.root, function.outs, function.eqns[-1]
  place, value = rewriter.place(last), rewriter.value(root)
  apart = any(rewriter.place(eqn).scope != place.scope for eqn in function.eqns)
  if apart or place.half is None or value is None or value.kind.dtype != place.half:
    return False
  readers = [rewriter.readers.get(v, 0) for v in outs]
  if all(only_float32(each) or (function.single and each & By.MATMUL) for each in readers):
    return False
  # The results are held as the value is; but in float32 if no matmul reads them.
  harmed = By.HELD | (By.FACTOR if value.kind.held else 0)
  kinds = [Kind(place.half, held=bool(r & harmed) or not r & By.MATMUL) for r in readers]

  # One equation for all of it, of the root as it is held; or in float32, where gradients are added.
  taken = FLOAT32 if any(k.held for k in kinds) else value.kind.current
  operand = rewriter.view(value, taken, function.eqns[0])
  wide, same = with_key(function.eqns, root, outs)
  key = same, tuple(kinds), aval_of(operand)
  if key not in rewriter.activations:  # Layers alike share one.
    with context_of(last):
      rewriter.activations[key] = _activation(wide, kinds, aval_of(operand))
  call = rewriter.activations[key]
  eqn = last.replace(primitive=call.primitive, outvars=list(outs), params=call.params)
  rewriter.write(eqn, [operand], kinds)
  return True


def _activation(wide: Jaxpr, kinds: Sequence[Kind], aval: ShapedArray) -> JaxprEqn:
  exact = functools.partial(eval_jaxpr, wide, ())

  def held(values: Sequence[Array]) -> list[Array]:
    pairs = zip(values, kinds, strict=True)
    return [jax.lax.convert_element_type(x, kind.current) for x, kind in pairs]

  def activation(x: Array) -> list[Array]:
    return held(exact(jax.lax.convert_element_type(x, FLOAT32)))

  def tangent(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Array], Any]:
    x = jax.lax.convert_element_type(primals[0], FLOAT32)
    values, slopes = jax.jvp(exact, (x,), (jax.lax.full_like(x, 1),))
    # Else XLA keeps what is expensive in it, such as a tanh in float32, and finishes it later.
    slopes = jax.lax.optimization_barrier(held(slopes))
    steps = held([*tangents] * len(kinds))
    return held(values), [a * b for a, b in zip(slopes, steps, strict=True)]

  return differentiated(jaxpr_for(activation, aval), tangent, [aval], "activation")
