"""A jaxpr run in float32 instead of float16 and bfloat16, so that nothing is lost on the way."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from mpjax._core.trees import half_to_float32, is_half
from mpjax._core.types import Array, Leaf
from mpjax._jaxprs.atoms import Atom, dtype_of, retyped, shape_of
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.inner_jaxprs import Program, inner_jaxprs, mapped_with, opened, with_each
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of

_CALLS = {Holds.CALL, Holds.COMPOSITE, Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP}


def in_float32(program: Program) -> Callable[..., list[Array]]:
  """Returns a function that runs a jaxpr, with float32 for each value of 16 bits.

  What takes no float32, a kernel or an operation on bits, runs as it was written.
  """
  jaxpr, consts = opened(program), getattr(program, "consts", ())

  def run(*operands: Leaf) -> list[Array]:
    pairs = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True)
    values: dict[Atom, Any] = {v: half_to_float32(x) for v, x in pairs}

    def read(atom: Atom) -> Leaf:
      if not isinstance(atom, Literal):
        return values[atom]
      return (
        half_to_float32(jnp.asarray(atom.val, dtype_of(atom))) if is_half(atom.aval) else atom.val
      )

    for eqn in jaxpr.eqns:
      values.update(zip(eqn.outvars, _results(eqn, [*map(read, eqn.invars)]), strict=True))
    return [jnp.asarray(read(v)) for v in jaxpr.outvars]

  return run


def _results(eqn: JaxprEqn, operands: Sequence[Leaf]) -> Sequence[Array]:
  inner, holds = inner_jaxprs(eqn), facts_of(eqn).holds
  if inner and holds in _CALLS:
    return in_float32(inner[0].program)(*operands)
  if inner and holds is Holds.SHARD_MAP:
    body = in_float32(inner[0].program)
    return jax.shard_map(lambda *xs: tuple(body(*xs)), **mapped_with(eqn))(*operands)
  try:
    params = {name: _wide(value) for name, value in with_each(eqn, _retraced).items()}
    results = bind(eqn.replace(params=params), operands)
    if all(_fits(x, v) for x, v in zip(results, eqn.outvars, strict=True)):
      return results
  except (TypeError, ValueError, NotImplementedError):
    pass
  pairs = zip(operands, eqn.invars, strict=True)
  narrow = [jnp.asarray(x, dtype_of(v)) if is_half(v.aval) else x for x, v in pairs]
  return [*map(half_to_float32, bind(eqn, narrow))]


def _retraced(program: Program) -> Program:
  invars = [retyped(v, jnp.float32) if is_half(v.aval) else v for v in opened(program).invars]
  closed = jax.make_jaxpr(in_float32(program))(*[v.aval for v in invars])
  return closed if isinstance(program, ClosedJaxpr) else closed.jaxpr


def _wide(value: object) -> object:
  half = isinstance(value, np.dtype) and value in (jnp.float16, jnp.bfloat16)
  return np.dtype(np.float32) if half else value


def _fits(x: Array, like: Atom) -> bool:
  wide = jnp.float32 if is_half(like.aval) else dtype_of(like)
  return wide is None or (jnp.shape(x), x.dtype) == (shape_of(like), wide)
