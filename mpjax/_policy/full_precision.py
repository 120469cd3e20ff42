"""`full_precision`: a function that no policy and no autocast enters."""

from collections.abc import Callable
from typing import TypeVar

import jax

from mpjax._core.frameworks import check_function
from mpjax._core.trees import low_to_float32, map_arrays
from mpjax._core.types import P
from mpjax._core.wrappers import wraps
from mpjax._policy.active import ACTIVE, FULL_PRECISION, Active

R = TypeVar("R")


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
  """Keep autocast and policies out of a function.

  Operations inside run in the dtypes in which they are written. A policy or an autocast inside has
  no effect. Under a policy, float16 and bfloat16 arguments are cast to float32. The results are
  float32, and their consumers choose their own dtypes.

  Args:
    fn: any function of trees of arrays. NNX modules and variables are passed as they are, and so
      are containers without 16-bit arrays. So `fn` can write to them.

  Returns:
    A function with the signature of `fn`.

  Raises:
    MpjaxTypeError: `fn` is not a function, or is a Linen model without variables.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> @mpjax.full_precision
  ... def precise(x, w):
  ...   return x @ w
  >>> jaxpr = jax.make_jaxpr(mpjax.autocast(precise))(jnp.ones((2, 2)), jnp.ones((2, 2)))
  >>> [eqn.primitive.name for eqn in jaxpr.eqns]
  ['dot_general']
  """
  check_function(fn, "mpjax.full_precision(fn)", "Pass it: mpjax.full_precision(jnp.matmul)(x, w).")

  @wraps(fn)
  def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
    around = ACTIVE.value or Active(outside_policies=True)
    # Without a policy, or inside another `full_precision`, arguments stay in their dtypes.
    if around.in_low_precision or not around.outside_policies:
      args, kwargs = map_arrays(low_to_float32, (args, kwargs))
      # The class of the state is that of Linen in a call of a Linen model.
      around = type(around)(outside_policies=True)
    with jax.named_scope(FULL_PRECISION), ACTIVE(around):
      return fn(*args, **kwargs)

  return wrapped
