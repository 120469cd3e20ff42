"""What the parameters of equations say of dtypes and precisions."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from mpjax._core.types import FLOAT32, DType, Function, PyTree
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.compat import with_equations
from mpjax._jaxpr.primitives import EqnParams, facts_of
from mpjax._jaxpr.reader import Program, aval_of, hides_matmul, opened, walk, with_each

Params = dict[str, Any]


def retype(eqn: JaxprEqn, dtype: DType) -> Params:
  """Returns the parameters that an equation has when it computes in `dtype`."""
  name, params = facts_of(eqn).dtype_param, eqn.params
  if name is None or params[name] is None:
    return params
  if name != "update_jaxpr":
    return {**params, name: dtype}
  # The operation on two numbers that combines an update with the number in the buffer.
  jaxpr, scalar = params["update_jaxpr"], jax.ShapeDtypeStruct((), dtype)
  combine = functools.partial(eval_jaxpr, jaxpr, params["update_consts"])
  new = jax.make_jaxpr(combine)(*[scalar] * len(jaxpr.invars))
  return {**params, "update_jaxpr": new.jaxpr, "update_consts": tuple(new.consts)}


@functools.cache
def asked_precision(precision: object) -> str:
  """Returns what asks for more than the usual precision, in an equation or a setting; else ""."""
  each = precision if isinstance(precision, tuple) else (precision,)
  names = dict.fromkeys(str(x).rpartition(".")[2].lower() for x in each)
  return ", ".join(x for x in names if x not in ("none", "default", "fastest", "bfloat16"))


def wants_precision(params: EqnParams) -> bool:
  """Whether a matmul was asked for in a precision, or with a result, that is not the usual one."""
  result, asked = params.get("preferred_element_type"), asked_precision(params.get("precision"))
  return asked != "" or (result is not None and result != FLOAT32)


# The default precision of JAX.


def traced(fun: Function) -> Callable[..., ClosedJaxpr]:
  """Returns `jax.make_jaxpr(fun)`, with a precision only where the function itself asks for one.

  `jax_default_matmul_precision` says nothing of one matmul. A matmul that stays in float32 gets it
  back in `in_default`.
  """
  if _default_precision() is None:
    return jax.make_jaxpr(fun)

  def trace(*args: PyTree) -> ClosedJaxpr:
    with jax.default_matmul_precision(None):
      program = jax.make_jaxpr(fun)(*args)
    if not any(map(hides_matmul, walk(program))):
      return program
    if asked_precision(_default_precision()):
      warnings.warn(_OBJECT, UserWarning, stacklevel=2)
    return jax.make_jaxpr(fun)(*args)

  return trace


_OBJECT = (
  "mpjax.autocast: jax_default_matmul_precision is set, and this version of JAX keeps the matmuls "
  "of a jax.lax.custom_root or the like where the setting cannot be given back to them alone. So "
  "it holds for all matmuls of the function, and they run in float32. Call custom_root outside of "
  "the autocast function, or set precision= at its matmuls instead."
)


def _default_precision() -> object:
  """Returns the parameter that `jax_default_matmul_precision` gives a matmul; None if unset."""
  if cast(Any, jax.config).jax_default_matmul_precision is None:
    return None
  number = jax.ShapeDtypeStruct((1,), np.float32)
  return jax.make_jaxpr(jnp.dot)(number, number).eqns[-1].params["precision"]


def in_default(jaxpr: Jaxpr) -> Jaxpr:
  """Returns a rewritten jaxpr with `jax_default_matmul_precision` for what runs in float32."""
  precision = _default_precision()
  return jaxpr if precision is None else cast(Jaxpr, _in_precision(jaxpr, precision) or jaxpr)


@cached_per_jaxpr
def _in_precision(program: Program, precision: object) -> Program | None:
  """Returns a jaxpr with a precision; None, not the jaxpr, which would be kept, if it stays."""
  eqns = opened(program).eqns
  params = [with_each(eqn, lambda each: _in_precision(each, precision) or each) for eqn in eqns]
  for i, eqn in enumerate(eqns):
    # Not where operands were cast: to low precision, or to the format of a recipe.
    if eqn.params.get("precision", 0) is None and aval_of(eqn.invars[0]).dtype.itemsize >= 4:
      params[i] = {**params[i], "precision": precision}
  if all(new is eqn.params for eqn, new in zip(eqns, params, strict=True)):
    return None
  eqns = [eqn.replace(params=new) for eqn, new in zip(eqns, params, strict=True)]
  new = with_equations(opened(program), eqns)
  return ClosedJaxpr(new, program.consts) if isinstance(program, ClosedJaxpr) else new
