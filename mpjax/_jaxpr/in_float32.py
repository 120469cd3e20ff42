"""Run a jaxpr in float32.

Each equation runs with float32 operands. Jaxprs in parameters are traced again, since only the
primitives themselves know the dtypes of their results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from mpjax._core.errors import REFUSALS
from mpjax._core.trees import low_to_float32
from mpjax._core.types import FLOAT32, Array, Leaf, is_low_precision
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import (
  Atom,
  Program,
  dtype_of,
  inner_jaxprs,
  mapped_with,
  opened,
  retyped,
  shape_of,
  with_each,
)


def is_low(x: object) -> bool:
  """Whether an array or a type is in a floating dtype narrower than float32."""
  dtype = getattr(x, "dtype", None)
  return dtype is not None and is_low_precision(dtype)


def in_float32(program: Program) -> Callable[..., list[Array]]:
  """Returns a function that runs a jaxpr, with float32 for each value of low precision.

  Kernels and operations on bits accept no float32. They run in their own dtypes.
  """
  jaxpr, consts = opened(program), getattr(program, "consts", ())

  def run(*operands: Leaf) -> list[Array]:
    pairs = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True)
    values: dict[Atom, Any] = {v: low_to_float32(x) for v, x in pairs}

    def read(atom: Atom) -> Leaf:
      if not isinstance(atom, Literal):
        return values[atom]
      if not is_low(atom.aval):
        return atom.val
      # The number that the low-precision code used: rounded first, then widened.
      return low_to_float32(jnp.asarray(atom.val, dtype_of(atom)))

    for eqn in jaxpr.eqns:
      values.update(zip(eqn.outvars, results_widened(eqn, [*map(read, eqn.invars)]), strict=True))
    return [jnp.asarray(read(v)) for v in jaxpr.outvars]

  return run


def results_widened(eqn: JaxprEqn, operands: Sequence[Leaf]) -> Sequence[Array]:
  """Returns the results of an equation in float32, or in its own dtypes and then widened."""
  inner, holds = inner_jaxprs(eqn), facts_of(eqn).holds
  # Only inside a `shard_map` its axes are bound, so the body is run there and not retraced.
  if inner and holds is Holds.SHARD_MAP:
    body = in_float32(inner[0].program)
    return jax.shard_map(lambda *xs: tuple(body(*xs)), **mapped_with(eqn))(*operands)
  results = results_in_float32(eqn, operands)
  if results is None:
    pairs = zip(operands, eqn.invars, strict=True)
    narrow = [jnp.asarray(x, dtype_of(v)) if is_low(v.aval) else x for x, v in pairs]
    results = [*map(low_to_float32, bind(eqn, narrow))]
  return results


def results_in_float32(eqn: JaxprEqn, operands: Sequence[Leaf]) -> Sequence[Array] | None:
  """Returns the results of an equation for float32 operands; None if it accepts none."""
  # A kernel was traced for its dtypes, and hides them from the loop below.
  if facts_of(eqn).holds is Holds.KERNEL:
    return None
  try:
    # A dtype among the parameters, such as `preferred_element_type`, would round the result.
    params = {
      name: FLOAT32 if isinstance(value, np.dtype) and is_low_precision(value) else value
      for name, value in with_each(eqn, _retraced).items()
    }
    results = bind(eqn.replace(params=params), operands)
  except REFUSALS:
    return None
  # An operation on bits accepts float32 too, but its results have other shapes or dtypes.
  for x, v in zip(results, eqn.outvars, strict=True):
    dtype = FLOAT32 if is_low(v.aval) else dtype_of(v)
    if dtype is not None and (jnp.shape(x), x.dtype) != (shape_of(v), dtype):
      return None
  return results


def _retraced(program: Program) -> Program:
  """Returns a jaxpr in float32, closed if `program` is."""
  invars = [retyped(v, jnp.float32) if is_low(v.aval) else v for v in opened(program).invars]
  closed = jax.make_jaxpr(in_float32(program))(*[v.aval for v in invars])
  return closed if isinstance(program, ClosedJaxpr) else closed.jaxpr
