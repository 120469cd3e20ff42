"""Running a rewritten program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mpjax._compat import is_in_program
from mpjax._inner_jaxprs import with_inner

_LONG = 64
"""Equations. A shorter program is written out: for the eye, and since a call costs time too."""


def run(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any], name: str) -> list[Any]:
  """Returns the results of a program.

  Where JAX is tracing a program, a long one is put into it as one call of a jitted function, since
  to write all its equations once more takes as long as to trace the function it came from. Else it
  is run as the function would be: operation by operation, or under the transformation in force.

  Args:
    jaxpr: the program.
    consts: the values of its constants.
    operands: its arguments.
    name: that of the function.
  """
  values = [*consts, *operands]
  tracers = [x for x in values if isinstance(x, Tracer)]
  if len(jaxpr.eqns) < _LONG or not tracers or not all(map(is_in_program, tracers)):
    outs = eval_jaxpr(jaxpr, consts, *operands)
    # A literal comes back as a number of Python's or NumPy's.
    return [_array(x, v.aval) for x, v in zip(outs, jaxpr.outvars, strict=True)]
  whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
  return called(ClosedJaxpr(whole, ()), values, name)


def _array(x: Any, aval: Any) -> Any:
  if isinstance(x, jax.Array):
    return x
  return jnp.asarray(np.asarray(x).item()) if aval.weak_type else jnp.asarray(x, aval.dtype)


def called(closed: ClosedJaxpr, operands: Sequence[Any], name: str) -> list[Any]:
  """Puts one call into the program that JAX is tracing, as it writes that of a jitted function.

  The results have the types that `closed` says, and nothing of it is traced again.
  """

  def placeholder(*operands: Any) -> list[Any]:
    del operands
    return [jnp.zeros(()) for _ in closed.jaxpr.outvars]

  placeholder.__name__ = name
  program = jax.make_jaxpr(jax.jit(placeholder))(*operands).jaxpr
  call = program.eqns[-1]
  call = call.replace(params=with_inner(call, [closed]), effects=closed.effects)
  return eval_jaxpr(program.replace(eqns=[call], effects=closed.effects), (), *operands)


def differentiated(
  body: ClosedJaxpr, rule: Callable[..., Any], avals: Sequence[Any], name: str
) -> JaxprEqn:
  """Returns an equation that runs a program, with a derivative of its own.

  The program is not traced: the axes of a `shard_map` are not bound while its jaxpr is rewritten.

  Args:
    body: the program.
    rule: for `jax.custom_jvp`, with symbolic zeros.
    avals: the types of the operands.
    name: what profiles say.
  """

  def call(*operands: Any) -> list[Any]:
    return called(body, operands, name)

  call.__name__ = name
  fun = jax.custom_jvp(call)
  fun.defjvp(rule, symbolic_zeros=True)
  made = jax.make_jaxpr(fun)(*avals).jaxpr.eqns[-1]
  return made.replace(params=with_inner(made, [body]))
