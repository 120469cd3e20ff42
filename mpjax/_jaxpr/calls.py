"""Jaxprs and calls that are written without tracing, and equations with a rule for derivatives."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.core import AbstractValue, ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType, PartitionSpec

from mpjax._core.types import Array, Function
from mpjax._jaxpr.compat import WRITTEN_OUT, varying_axes, with_equations
from mpjax._jaxpr.reader import Atom, call_params, with_inner


def jaxpr_of(eqns: Sequence[JaxprEqn], invars: Sequence[Var], outvars: Sequence[Atom]) -> Jaxpr:
  """Returns a jaxpr of equations, without their effects. Nothing is traced."""
  like = _template(len(invars), len(outvars))
  return with_equations(like, eqns, invars=invars, outvars=outvars)


@functools.cache
def _template(operands: int, results: int) -> Jaxpr:
  """Returns a jaxpr with so many arguments and results, to replace its equations and variables."""
  # The debug info of a jaxpr has a name for each of them, so their numbers must agree.
  return jax.make_jaxpr(lambda *args: [0.0] * results)(*[1.0] * operands).jaxpr


def called(closed: ClosedJaxpr, operands: Sequence[Array], name: str) -> list[Array]:
  """Puts one call into the jaxpr that JAX is tracing; nothing of `closed` is traced again."""
  jaxpr = closed.jaxpr
  invars, outvars = ([Var(v.aval) for v in each] for each in (jaxpr.invars, jaxpr.outvars))
  call = jaxpr_of([call_of(closed, invars, outvars, name)], invars, outvars)
  return eval_jaxpr(call, (), *operands, propagate_source_info=False)  # It is of another call.


# The trace holds one call, whose equation is the template of all others.
_trace_call = jax.jit(jax.jit(lambda x: x)).trace


def call_of(
  closed: ClosedJaxpr, invars: Sequence[Atom], outs: Sequence[Var], name: str, inline: bool = False
) -> JaxprEqn:
  """Returns a call of a jaxpr. With `inline`, JAX writes the equations inside when it traces it."""
  with jax.disable_jit(False):  # Under `jax.disable_jit()` the trace would hold no call.
    call = _trace_call(1.0).jaxpr.eqns[-1]
  params = call_params(call, closed, len(invars), len(outs), name)
  params |= {"inline": WRITTEN_OUT} if inline else {}
  return call.replace(invars=[*invars], outvars=[*outs], params=params, effects=closed.effects)


def jaxpr_for(call: Function, *avals: AbstractValue) -> ClosedJaxpr:
  """Returns the jaxpr of a function, for operands that may vary over the axes of a `shard_map`."""
  arrays = [aval for aval in avals if isinstance(aval, ShapedArray)]
  varying = next((aval for aval in arrays if varying_axes(aval)), None)
  if varying is None:
    return jax.make_jaxpr(call)(*avals)

  # The types vary over axes of a `shard_map` around. These axes are not bound here, because the
  # jaxpr is rewritten after its trace. So the function is traced in a `shard_map` of its own.
  traced: list[ClosedJaxpr] = []

  def on_device() -> None:
    traced.append(jax.make_jaxpr(call)(*avals))

  mesh, spec = varying.sharding.mesh, PartitionSpec()
  # A `shard_map` cannot make an axis manual that is manual already.
  around = mesh.update_axis_types(dict.fromkeys(mesh.manual_axes, AxisType.Auto))
  with jax.sharding.use_abstract_mesh(around):
    here = jax.shard_map(on_device, in_specs=spec, out_specs=spec, axis_names={*mesh.manual_axes})
    jax.eval_shape(here)
  return traced[0]


def placed_like(tangent: Any, primal: Array) -> Array:
  """Returns a tangent that varies over the same axes of the mesh as its primal.

  JAX makes tangents that vary over fewer axes, such as `jnp.ones_like(x)`. The tangent of a result
  must have the type of the result.
  """
  here, there = (cast(ShapedArray, jax.typeof(x)) for x in (tangent, primal))
  missing = tuple(set(varying_axes(there)) - set(varying_axes(here)))
  if missing:
    tangent = jax.lax.pcast(tangent, missing, to="varying")
  # Also if both have the same sharding: JAX may trace a rule with such tangents, and then run it
  # with others.
  if AxisType.Explicit in there.sharding.mesh.axis_types:
    tangent = jax.sharding.reshard(tangent, there.sharding)
  return tangent


def equation_with_rule(
  body: ClosedJaxpr, rule: Function, avals: Sequence[ShapedArray], name: str
) -> JaxprEqn:
  """Returns an equation that runs a jaxpr with a rule for `jax.custom_jvp`, with symbolic zeros."""

  def call(*operands: Array) -> list[Array]:
    return called(body, operands, name)

  call.__name__ = name
  # The trace makes an equation with the rule around the stand-in `call`. The body then takes its
  # place, so that readers of the jaxpr find the operations without one more call.
  fun = jax.custom_jvp(call)
  fun.defjvp(rule, symbolic_zeros=True)
  eqn = jaxpr_for(fun, *avals).jaxpr.eqns[-1]
  return eqn.replace(params=with_inner(eqn, [body]))
