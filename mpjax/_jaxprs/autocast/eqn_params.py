"""Parameters of equations that name a dtype, or hold a jaxpr that has one."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import dot_general_p

from mpjax._core.precision import MatmulPrecision, takes
from mpjax._core.types import Array, DType, Function, PyTree
from mpjax._jaxprs.autocast.values import cached_per_jaxpr
from mpjax._jaxprs.inner_jaxprs import Program, holds_jaxpr, is_object, opened, with_each
from mpjax._jaxprs.primitive_facts import EqnParams
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.walk import walk

Params = dict[str, Any]


def traced(fun: Function) -> Callable[..., ClosedJaxpr]:
  """Returns `jax.make_jaxpr(fun)`, with a precision only where the function itself asks for one.

  `jax_default_matmul_precision` is a setting for an entire process, such as TensorFloat-32 for what
  is in float32, and says nothing of one matmul. Those that are left as they are get it back.
  """
  if not _is_precision_set():
    return jax.make_jaxpr(fun)

  def trace(*args: PyTree) -> ClosedJaxpr:
    with jax.default_matmul_precision(None):
      program = jax.make_jaxpr(fun)(*args)
    if not any(is_object(visit.eqn) for visit in walk(program)):
      return program
    # What is in the object is left alone, and its precision cannot be set later.
    if wants_precision({"precision": default_precision()}):
      warnings.warn(_OBJECT, UserWarning, stacklevel=2)
    return jax.make_jaxpr(fun)(*args)

  return trace


_OBJECT = (
  "mpjax.autocast: jax_default_matmul_precision is set, and this version of JAX keeps the matmuls "
  "of a jax.lax.custom_root or the like where the setting cannot be given back to them alone. So "
  "it holds for all matmuls of the function, and they run in float32. Call custom_root outside of "
  "what is autocast, or set precision= at its matmuls instead."
)


def _is_precision_set() -> bool:
  config: Any = jax.config  # Its attributes have no types.
  return config.jax_default_matmul_precision is not None


def default_precision() -> object:
  """Returns the parameter that `jax_default_matmul_precision` gives a matmul; None if unset."""
  if not _is_precision_set():
    return None
  number = jax.ShapeDtypeStruct((1,), np.float32)
  return jax.make_jaxpr(jnp.dot)(number, number).eqns[-1].params["precision"]


def in_precision(eqn: JaxprEqn, precision: object) -> Params:
  """Returns the parameters of an equation with a precision for each matmul that has none.

  Jaxprs that it holds are left as they are otherwise. `precision` is not None.
  """
  params = eqn.params
  if holds_jaxpr(params.values()):
    params = with_each(eqn, lambda program: _program_in_precision(program, precision) or program)
  return {**params, "precision": precision} if params.get("precision", 0) is None else params


@cached_per_jaxpr
def _program_in_precision(program: Program, precision: object) -> Program | None:
  jaxpr = opened(program)
  params = [in_precision(eqn, precision) for eqn in jaxpr.eqns]
  if all(new is eqn.params for eqn, new in zip(jaxpr.eqns, params, strict=True)):
    return None  # Not the jaxpr: what is kept would keep its own key.
  eqns = [eqn.replace(params=new) for eqn, new in zip(jaxpr.eqns, params, strict=True)]
  new = jaxpr.replace(eqns=eqns)
  return ClosedJaxpr(new, program.consts) if isinstance(program, ClosedJaxpr) else new


def wants_precision(params: EqnParams) -> bool:
  """Whether a matmul was asked for in a precision, or with a result, that is not the usual one."""
  result = params.get("preferred_element_type")
  if result is not None and result != np.float32:
    return True
  precision = params.get("precision")
  each = precision if isinstance(precision, tuple) else (precision,)
  return any(p is not None and p != jax.lax.Precision.DEFAULT for p in each)


def fits(eqn: JaxprEqn, precision: MatmulPrecision, dtypes: Sequence[DType | None]) -> bool:
  """Whether a matmul or convolution of these dtypes can have a precision: a preset is for few."""
  if isinstance(precision, jax.lax.Precision):
    return True
  return eqn.primitive is dot_general_p and all(takes(precision, dtype) for dtype in dtypes)


def retype(eqn: JaxprEqn, dtype: DType) -> Params:
  """Returns the parameters that an equation has when it computes in `dtype`."""
  name, params = facts_of(eqn).dtype_param, eqn.params
  if name is None or params[name] is None:
    return params
  return _scatter(params, dtype) if name == "update_jaxpr" else {**params, name: dtype}


def _scatter(params: Params, dtype: DType) -> Params:
  """Retypes the operation on two numbers that combines an update with what is there."""
  jaxpr = params["update_jaxpr"]
  closed = ClosedJaxpr(jaxpr, params["update_consts"])

  def combine(*args: Array) -> list[Array]:
    return eval_jaxpr(closed.jaxpr, closed.consts, *args)

  scalar = jax.ShapeDtypeStruct((), dtype)
  new = jax.make_jaxpr(combine)(*[scalar] * len(jaxpr.invars))
  return {**params, "update_jaxpr": new.jaxpr, "update_consts": tuple(new.consts)}
