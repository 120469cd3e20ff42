"""Parameters of equations that name a dtype or a precision."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, cast

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

ParamsDict: TypeAlias = dict[str, Any]
"""The parameters of an equation, as `JaxprEqn.replace` takes them."""


def retype(eqn: JaxprEqn, dtype: DType) -> ParamsDict:
  """Returns the parameters of an equation for computing in `dtype`."""
  name, params = facts_of(eqn).dtype_param, eqn.params
  if name is None or params[name] is None:
    return params
  if name != "update_jaxpr":
    return {**params, name: dtype}
  # The jaxpr that combines an update with a number in the buffer names the dtype too.
  jaxpr, scalar = params["update_jaxpr"], jax.ShapeDtypeStruct((), dtype)
  combine = functools.partial(eval_jaxpr, jaxpr, params["update_consts"])
  new = jax.make_jaxpr(combine)(*[scalar] * len(jaxpr.invars))
  return {**params, "update_jaxpr": new.jaxpr, "update_consts": tuple(new.consts)}


@functools.cache
def asked_precision(precision: object) -> str:
  """Returns the names in a precision that ask for more than the default; "" if there are none."""
  each = precision if isinstance(precision, tuple) else (precision,)
  # "Precision.HIGHEST" and "DotAlgorithmPreset.TF32_TF32_F32" become "highest" and "tf32_tf32_f32".
  names = dict.fromkeys(str(x).rpartition(".")[2].lower() for x in each)
  return ", ".join(x for x in names if x not in ("none", "default", "fastest", "bfloat16"))


def wants_precision(params: EqnParams) -> bool:
  """Whether the user chose the precision or the result dtype of a matmul."""
  result, asked = params.get("preferred_element_type"), asked_precision(params.get("precision"))
  return asked != "" or (result is not None and result != FLOAT32)


# `jax_default_matmul_precision`.


def traced(fun: Function) -> Callable[..., ClosedJaxpr]:
  """Returns `jax.make_jaxpr(fun)` without `jax_default_matmul_precision`.

  In the jaxpr, a matmul then has a precision only if the function asks for it. `in_default` gives
  the setting back to matmuls that stay in float32.
  """
  if _default_precision() is None:
    return jax.make_jaxpr(fun)

  def trace(*args: PyTree) -> ClosedJaxpr:
    with jax.default_matmul_precision(None):
      program = jax.make_jaxpr(fun)(*args)
    if not any(map(hides_matmul, walk(program))):
      return program
    # `in_default` cannot change a matmul in an object of JAX, which would lose the setting. The
    # trace with the setting is right for it, and makes all other matmuls float32.
    if asked_precision(_default_precision()):
      warnings.warn(_OBJECT, UserWarning, stacklevel=2)
    return jax.make_jaxpr(fun)(*args)

  return trace


_OBJECT = (
  "mpjax.autocast: jax_default_matmul_precision is set, and the function holds a "
  "jax.lax.custom_root or the like. In this version of JAX the setting then applies to all matmuls "
  "of the function, and they run in float32. Call custom_root outside the autocast function, or "
  "set precision= at its matmuls instead."
)


def _default_precision() -> object:
  """Returns the parameter that `jax_default_matmul_precision` gives a matmul; None if unset."""
  if cast(Any, jax.config).jax_default_matmul_precision is None:
    return None
  # The setting may be a string or an enum, and JAX gives a matmul a precision or a pair of them.
  # Only a trace shows which.
  number = jax.ShapeDtypeStruct((1,), np.float32)
  return jax.make_jaxpr(jnp.dot)(number, number).eqns[-1].params["precision"]


def in_default(jaxpr: Jaxpr) -> Jaxpr:
  """Returns a rewritten jaxpr with `jax_default_matmul_precision` at its float32 matmuls."""
  precision = _default_precision()
  return jaxpr if precision is None else cast(Jaxpr, _in_precision(jaxpr, precision) or jaxpr)


@cached_per_jaxpr
def _in_precision(program: Program, precision: object) -> Program | None:
  """Returns a jaxpr with a precision; None if nothing changes."""
  # The cache would keep a jaxpr alive that is its own result, so that is None.
  eqns = opened(program).eqns
  params = [with_each(eqn, lambda each: _in_precision(each, precision) or each) for eqn in eqns]
  for i, eqn in enumerate(eqns):
    # Operands in low precision, or in the format of a recipe, are left out.
    if eqn.params.get("precision", 0) is None and aval_of(eqn.invars[0]).dtype.itemsize >= 4:
      params[i] = {**params[i], "precision": precision}
  if all(new is eqn.params for eqn, new in zip(eqns, params, strict=True)):
    return None
  eqns = [eqn.replace(params=new) for eqn, new in zip(eqns, params, strict=True)]
  new = with_equations(opened(program), eqns)
  return ClosedJaxpr(new, program.consts) if isinstance(program, ClosedJaxpr) else new
