"""`full_precision`: a function that runs as it was written, whatever policy is active around it."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from mpjax._core.active import ACTIVE, Active
from mpjax._core.frameworks import check_no_linen_model
from mpjax._core.trees import half_to_float32, map_arrays

P = ParamSpec("P")
R = TypeVar("R")

SCOPE = "mpjax.full_precision"
"""The named scope by which autocast knows the region."""


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Returns `fn` as a region that neither autocast nor a policy enters.

  Under `mpjax.autocast` everything inside runs in the dtypes in which it is written. Under a policy
  the modules called inside run without it, and float16 and bfloat16 arguments come in as float32.
  A policy or an autocast that is given inside does not begin either: `full_precision(view)(x)` and
  `full_precision(autocast(f))(x)` run as the model and `f` do. As a decorator it marks a loss, a
  numerically delicate layer, a physical simulation. The results are float32, and their consumers
  choose their own dtypes.

  NNX modules and variables among the arguments are passed as they are, and so are containers that
  hold nothing in 16 bits: what `fn` writes to them stays.

  It does what PyTorch's `custom_fwd(cast_inputs=torch.float32)` is for.

  Args:
    fn: any function of trees of arrays.

  Returns:
    A function with the signature of `fn`.

  Raises:
    MpjaxTypeError: `fn` is a Linen model without variables.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> @mpjax.full_precision
  ... def precise(x, w):
  ...   return x @ w
  >>> fn = mpjax.autocast(lambda x, w: precise(jnp.tanh(x @ w), w))
  >>> jaxpr = jax.make_jaxpr(fn)(jnp.ones((2, 2)), jnp.ones((2, 2)))
  >>> [str(e.outvars[0].aval.dtype) for e in jaxpr.eqns if e.primitive.name == "dot_general"]
  ['bfloat16', 'float32']
  """
  check_no_linen_model(fn, "mpjax.full_precision(fn)")
  call: Callable[..., R] = fn

  @functools.wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    around = ACTIVE.value
    given, named = (args, kwargs)
    if around is not None and around.on:
      given = tuple(map_arrays(half_to_float32, x) for x in args)
      named = {name: map_arrays(half_to_float32, x) for name, x in kwargs.items()}
    with jax.named_scope(SCOPE), ACTIVE((around or Active()).outside()):
      return call(*given, **named)

  return wrapped
