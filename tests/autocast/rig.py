"""What tests of the rewriter share."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

import mpjax
from mpjax._autocast.autocast import with_settings
from mpjax._autocast.scopes import Settings
from mpjax._jaxpr.reader import walk
from mpjax._policy.active import Region
from tests import programs

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])


def matmuls(fun: Any, *args: Any) -> list[tuple[str, str]]:
  """Returns the dtypes of the operands of each matmul of a function."""
  return [product.dtypes for product in programs.products(jax.make_jaxpr(fun)(*args))]


def jaxpr_under(fun: Any, *args: Any, **options: Any) -> Any:
  """Returns the jaxpr of a function under autocast in bfloat16."""
  return jax.make_jaxpr(mpjax.autocast(fun, "bfloat16", **options))(*args)


def under(
  fun: Any, compute: Any = "bfloat16", *, data: Any = 1, rules: Any = (), **fields: Any
) -> Any:
  """Returns a function under autocast and a policy with some fields.

  By default it is a function of (w, x): `w` is a parameter, and `x` is data.
  """
  policy = mpjax.Policy(compute_dtype=compute, **fields)
  return mpjax.autocast(fun, policy, rules=rules, data_argnums=data)


def find(program: Any, name: str) -> list[Any]:
  """Returns the equations of a primitive, those inside of others too."""
  return [eqn for eqn in walk(program) if eqn.primitive.name == name]


def dtypes(variables: Any) -> list[str]:
  return [str(v.aval.dtype) for v in variables]


def rewritten(
  fun: Any, compute: Any = "bfloat16", modules: bool = False, data: Any = None, results: Any = None
) -> Any:
  """Returns a function under a compute dtype, as a framework's adapter asks for it."""
  policy = mpjax.Policy(compute_dtype=compute)
  settings = Settings(region=Region(policy), ops=mpjax.OpLists(), modules=modules)
  return with_settings(fun, settings, "a test", data=data, results=results)


def with_jvp(fun: Any) -> Any:
  ruled = jax.custom_jvp(fun)
  ruled.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
  return ruled


def with_vjp(fun: Any) -> Any:
  ruled = jax.custom_vjp(fun)
  ruled.defvjp(lambda *args: jax.vjp(fun, *args), lambda pull, cotangent: pull(cotangent))
  return ruled


BODIES: dict[str, Callable[[Any], Any]] = {
  # name: a function of a matrix inside of another jaxpr
  "jit": jax.jit,
  "remat": jax.checkpoint,
  "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
  "while": lambda f: lambda x: jax.lax.while_loop(lambda c: c[0, 0] > 9, f, x),
  "cond": lambda f: lambda x: jax.lax.cond(x[0, 0] < 1, f, lambda c: c, x),
  "custom_jvp": with_jvp,
  "custom_vjp": with_vjp,
}

repeat_p = Primitive("repeat_times")
"""A loop of another library: it computes `x` from `w` and `x`, some times."""

repeat_p.multiple_results = True
repeat_p.def_abstract_eval(lambda *avals, jaxpr, **_: jaxpr.out_avals)


@repeat_p.def_impl
def _repeat(w: Any, x: Any, *, jaxpr: Any, times: int) -> list[Any]:
  for _ in range(times):
    (x,) = jaxpr_as_fun(jaxpr)(w, x)
  return [x]


mlir.register_lowering(repeat_p, mlir.lower_fun(_repeat))
