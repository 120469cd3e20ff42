"""`jax.value_and_grad` with the loss scaled on the inside."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._errors import MpjaxTypeError, message
from mpjax._types import PyTree
from mpjax.transforms._loss_scale_access import check_loss, find_scale, scale_loss


def value_and_grad(
  fun: Callable[..., Any],
  opt_state: PyTree,
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  allow_int: bool = False,
  *,
  name: str | None = None,
) -> Callable[..., tuple[Any, Any]]:
  """Like `jax.value_and_grad`, for a loss that is scaled before it is differentiated.

  Args:
    fun: returns a floating scalar, or that and anything else if `has_aux`.
    opt_state: the state of an optimizer wrapped by `mpjax.loss_scaling`; its `update` takes the
      gradients.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: `fun` returns a pair of the loss and something that is handed on.
    allow_int: integer arguments may be differentiated (their gradients are `float0`).
    name: which of several loss scales to use.

  Returns:
    A function of the arguments of `fun` that returns the loss as `fun` made it (unscaled, in its
    own dtype; or `(loss, aux)`) and the *scaled* gradients, in the dtypes of the arguments.

  Raises:
    MpjaxTypeError: the state has no scale, or has two; when called: the loss is not a floating
      number, or `fun` returns no pair under `has_aux`.
    MpjaxValueError: no scale is called `name`; when called: the loss is not a scalar.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> tx = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(8))
  >>> params = jnp.asarray([1.0, 2.0])
  >>> opt_state = tx.init(params)
  >>> loss, grads = mpjax.value_and_grad(lambda p: jnp.sum(p**2), opt_state)(params)
  >>> print(loss, grads)
  5.0 [16. 32.]
  >>> updates, opt_state = tx.update(grads, opt_state, params)
  >>> print(updates)
  [-1. -2.]
  """
  find_scale(opt_state, "mpjax.value_and_grad(opt_state)", name)

  def scaled(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
    out = fun(*args, **kwargs)
    if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
      raise MpjaxTypeError(
        message(
          "mpjax.value_and_grad(fun, has_aux=True)",
          expected="fun to return a pair (loss, aux)",
          got=f"a {type(out).__name__}",
          fix="Return both, or leave has_aux out.",
        )
      )
    loss: Any
    loss, aux = out if has_aux else (out, None)
    check_loss(loss, "mpjax.value_and_grad(fun): the loss")
    # The plain loss leaves as aux: dividing the scaled one again would round or overflow.
    return scale_loss(loss, opt_state, name=name), (loss, aux)

  differentiate = jax.value_and_grad(scaled, argnums, has_aux=True, allow_int=allow_int)

  @functools.wraps(fun, updated=())
  def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    (_, (loss, aux)), grads = differentiate(*args, **kwargs)
    return ((loss, aux) if has_aux else loss), grads

  return wrapper
