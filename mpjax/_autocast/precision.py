"""Parameters of equations that name a dtype or a precision."""

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.extend.core.primitives import dot_general_p
from jax.lax import DotAlgorithmPreset, Precision

from mpjax._core.errors import MpjaxError, MpjaxValueError
from mpjax._core.types import FLOAT32, DType, Function, PyTree
from mpjax._jaxpr.caches import cached_per_jaxpr
from mpjax._jaxpr.compat import with_equations
from mpjax._jaxpr.primitives import facts_of
from mpjax._jaxpr.reader import Program, dtype_of, hides_matmul, opened, walk, with_each
from mpjax._policy.dtypes import MatmulPrecision, takes

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


@contextlib.contextmanager
def refusals_explained(where: str) -> Generator[None]:
  """Replaces the error of a device that refuses a precision by one that also names the remedy."""
  try:
    yield
  except (RuntimeError, ValueError) as error:
    # XLA writes "ALG_DOT_TF32_TF32_F32".
    names = (p.name for p in DotAlgorithmPreset if p is not DotAlgorithmPreset.DEFAULT)
    refused = [name for name in names if re.search(rf"(?<![A-Z0-9]){name}\b", str(error))]
    if not refused or isinstance(error, MpjaxError):
      raise
    raise MpjaxValueError(
      where,
      expected="a precision that the device supports",
      got=f"precision={refused[0]!r} of the policy or the code, and this error: {error}",
      fix="Write precision='highest', which every device supports.",
    ) from error


class Asked(NamedTuple):
  """The precision of matmuls for which the code names none."""

  policy: MatmulPrecision | None = None  # by the policy
  default: Any = None  # by `jax_default_matmul_precision`, as the parameter of a matmul
  exact: bool = False  # whether float32 matmuls without either have the highest precision


def in_precision(
  primitive: Primitive, params: ParamsDict, dtypes: Iterable[DType | None], asked: Asked
) -> ParamsDict:
  """Returns the parameters of an equation, with a precision if it is a matmul without one.

  `dtypes` are those of its operands.
  """
  # Only matmuls and convolutions have the parameter. It is None if the code names no precision.
  if params.get("precision", 0) is not None or asked == Asked():
    return params
  dtypes = list(dtypes)
  # JAX takes one precision for each operand, or one algorithm, which supports few dtypes.
  if isinstance(asked.policy, Precision):
    return {**params, "precision": (asked.policy, asked.policy)}
  is_float32 = all(dtype == FLOAT32 for dtype in dtypes[:2])
  # An algorithm of a low-precision policy is not for the matmuls that it keeps in float32.
  of_policy = primitive is dot_general_p and not (asked.exact and is_float32)
  algorithm = asked.policy if of_policy else None
  if algorithm is not None and all(takes(algorithm, dtype) for dtype in dtypes):
    return {**params, "precision": algorithm}
  # The setting matters only for float32 operands. Low precision and formats of recipes have no more
  # bits to keep.
  if asked.default is not None:
    can_round = all(dtype is not None and dtype.itemsize >= 4 for dtype in dtypes[:2])
    return {**params, "precision": asked.default} if can_round else params
  is_kept = asked.exact and is_float32
  return {**params, "precision": (Precision.HIGHEST,) * 2} if is_kept else params


@cached_per_jaxpr
def with_precision(program: Program, asked: Asked) -> Program | None:
  """Returns a jaxpr whose matmuls have a precision, see `in_precision`; None if nothing changes.

  It is for jaxprs that are not rewritten, such as those of a linear solve.
  """
  # The cache would keep a jaxpr alive that is its own result, so that is None.
  eqns: list[JaxprEqn] = []
  for eqn in opened(program).eqns:
    params = with_each(eqn, lambda each: with_precision(each, asked) or each)
    params = in_precision(eqn.primitive, params, map(dtype_of, eqn.invars), asked)
    eqns.append(eqn if params is eqn.params else eqn.replace(params=params))
  if all(new is eqn for eqn, new in zip(opened(program).eqns, eqns, strict=True)):
    return None
  new = with_equations(opened(program), eqns)
  return ClosedJaxpr(new, program.consts) if isinstance(program, ClosedJaxpr) else new


# `jax_default_matmul_precision`.


def traced(fun: Function) -> Callable[..., ClosedJaxpr]:
  """Returns `jax.make_jaxpr(fun)` without `jax_default_matmul_precision`.

  In the jaxpr, a matmul then has a precision only if the function asks for it. The rewriter gives
  the setting back to matmuls that stay in float32, from `Settings.default_precision`.
  """
  if default_precision() is None:
    return jax.make_jaxpr(fun)

  def trace(*args: PyTree) -> ClosedJaxpr:
    with jax.default_matmul_precision(None):
      program = jax.make_jaxpr(fun)(*args)
    if not any(map(hides_matmul, walk(program))):
      return program
    # The rewriter cannot change a matmul in an object of JAX, which would lose the setting. The
    # trace with the setting is right for it, and makes all other matmuls float32.
    if asked_precision(default_precision()):
      warnings.warn(_OBJECT, UserWarning, stacklevel=2)
    return jax.make_jaxpr(fun)(*args)

  return trace


_OBJECT = (
  "mpjax.autocast: jax_default_matmul_precision is set, and the function holds a "
  "jax.lax.custom_root or the like. In this version of JAX the setting then applies to all matmuls "
  "of the function, and they run in float32. Call custom_root outside the autocast function, or "
  "set precision= at its matmuls instead."
)


def default_precision() -> object:
  """Returns the parameter that `jax_default_matmul_precision` gives a matmul; None if unset."""
  if cast(Any, jax.config).jax_default_matmul_precision is None:
    return None
  # The setting may be a string or an enum, and JAX gives a matmul a precision or a pair of them.
  # Only a trace shows which.
  number = jax.ShapeDtypeStruct((1,), np.float32)
  return jax.make_jaxpr(jnp.dot)(number, number).eqns[-1].params["precision"]
