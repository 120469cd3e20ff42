"""Calls of jaxprs, as equations: none is traced again."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mpjax._core.types import Array, Function
from mpjax._jaxprs.atoms import Atom
from mpjax._jaxprs.compat import WRITTEN_OUT
from mpjax._jaxprs.inner_jaxprs import call_params, with_inner

R = TypeVar("R")


def remembered_off_mesh(fun: Callable[..., R]) -> Callable[..., R]:
  """Returns a function of types, and of more, that remembers its results.

  Not so where a type is that of an array on a mesh: then the context counts too, and is no part of
  the key.
  """
  remembering = functools.lru_cache(maxsize=1024)(fun)

  @functools.wraps(fun)
  def call(*args: Any, **kwargs: Any) -> R:
    on_mesh = any(isinstance(x, ShapedArray) and not x.sharding.mesh.empty for x in args)
    return (fun if on_mesh else remembering)(*args, **kwargs)

  return call


def jaxpr_of(eqns: Sequence[JaxprEqn], invars: Sequence[Var], outvars: Sequence[Atom]) -> Jaxpr:
  """Returns a jaxpr of equations without effects. Nothing is traced."""
  like = _template(len(invars), len(outvars))
  return like.replace(invars=[*invars], outvars=[*outvars], eqns=[*eqns])


@functools.cache
def _template(operands: int, results: int) -> Jaxpr:
  return jax.make_jaxpr(lambda *args: args[:1] * results)(*[1.0] * operands).jaxpr


def called(closed: ClosedJaxpr, operands: Sequence[Array], name: str) -> list[Array]:
  """Puts one call into the jaxpr that JAX is tracing, as it writes that of a jitted function.

  The results have the types that `closed` says, and nothing of it is traced again.
  """
  jaxpr = closed.jaxpr
  invars, outvars = ([Var(v.aval) for v in each] for each in (jaxpr.invars, jaxpr.outvars))
  call = call_of(closed, invars, outvars, name)
  program = jaxpr.replace(invars=invars, outvars=outvars, eqns=[call], effects=closed.effects)
  return eval_jaxpr(program, (), *operands)


_trace_call = jax.make_jaxpr(jax.jit(lambda x: x))


def call_of(
  closed: ClosedJaxpr,
  invars: Sequence[Atom],
  outvars: Sequence[Var],
  name: str,
  *,
  inline: bool = False,
) -> JaxprEqn:
  """Returns an equation that calls a jaxpr.

  With `inline` JAX writes the equations inside instead where it traces the call.
  """
  with jax.disable_jit(False):  # Where it is disabled, no call is written.
    call = _trace_call(1.0).eqns[-1]
  params = call_params(call, closed, len(invars), len(outvars), name)
  if inline:
    params["inline"] = WRITTEN_OUT
  return call.replace(
    invars=list(invars), outvars=list(outvars), params=params, effects=closed.effects
  )


def typed(closed: ClosedJaxpr, operands: Sequence[Array], name: str) -> list[Array]:
  """Returns values of the types of what a jaxpr returns: operands if they have them.

  The jaxpr that JAX is tracing will get another body, and a call takes time to write.
  """
  same = {jax.typeof(x): x for x in operands}
  if all(v.aval in same for v in closed.jaxpr.outvars) and not closed.effects:
    return [same[v.aval] for v in closed.jaxpr.outvars]
  return called(closed, operands, name)


def differentiated(
  body: ClosedJaxpr, rule: Function, avals: Sequence[ShapedArray], name: str
) -> JaxprEqn:
  """Returns an equation that runs a jaxpr, with a derivative of its own.

  The jaxpr is not traced: the axes of a `shard_map` are not bound while its jaxpr is rewritten.

  `rule` is for `jax.custom_jvp`, with symbolic zeros.
  """

  def call(*operands: Array) -> list[Array]:
    return typed(body, operands, name)

  call.__name__ = name
  fun = jax.custom_jvp(call)
  fun.defjvp(rule, symbolic_zeros=True)
  made = jax.make_jaxpr(fun)(*avals).jaxpr.eqns[-1]
  return made.replace(params=with_inner(made, [body]))
