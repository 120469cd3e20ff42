"""`nnx.value_and_grad` with the loss scaled on the inside."""

import types
from collections.abc import Callable, Sequence

from flax import nnx

from mpjax._core.errors import MpjaxTypeError, check_call
from mpjax._core.types import Function, Grads, OptState, PyTree
from mpjax.transforms import value_and_grad as value_and_grad_of_arrays

_WHERE = "mpjax.nnx.value_and_grad(fun, optimizer)"
_CALL = "Write mpjax.nnx.value_and_grad(loss_fn, optimizer)(model, batch), inside of the step."


@check_call(_WHERE, fix=_CALL)
def value_and_grad(
  fun: Function,
  optimizer: nnx.Optimizer[nnx.Module] | OptState,
  argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
  has_aux: bool = False,
  *,
  name: str | None = None,
) -> Callable[..., tuple[PyTree, Grads]]:
  """Like `nnx.value_and_grad`, for a loss that is scaled before it is differentiated.

  The gradients go to `optimizer.update(model, grads)`, which unscales them and skips a step that
  overflowed; `mpjax.nnx.atomic_step` takes back what its forward pass has written.

  Args:
    fun: a function of a model that returns a floating scalar, or that and anything else if
      `has_aux`. Call the model under a policy inside.
    optimizer: an `nnx.Optimizer` around what `mpjax.loss_scaling` returned, or a state of that.
    argnums: what to differentiate with respect to, as for `nnx.value_and_grad`.
    has_aux: `fun` returns a pair of the loss and something else, which is returned as it is.
    name: which of several loss scales to use.

  Returns:
    A function that returns the loss as `fun` computed it (or `(loss, aux)`) and the *scaled*
    gradients, an `nnx.State`.

  Raises:
    MpjaxTypeError: `fun` is a method of a model, or as for `mpjax.value_and_grad`.

  >>> import jax.numpy as jnp, mpjax, optax
  >>> from flax import nnx
  >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
  >>> optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.adam(0.1)), wrt=nnx.Param)
  >>> def loss_fn(model, x):
  ...   return jnp.mean(mpjax.with_policy(model, "mixed_float16")(x) ** 2)
  >>> loss, grads = mpjax.nnx.value_and_grad(loss_fn, optimizer)(model, jnp.ones((2, 3)))
  >>> updates = optimizer.update(model, grads)
  """
  if isinstance(fun, types.MethodType) and isinstance(fun.__self__, nnx.Module):
    raise MpjaxTypeError(
      _WHERE,
      expected="a function that is given the model as an argument",
      got=f"a method of the model ({fun.__qualname__})",
      fix="Write lambda model, x: model.loss(x), so that the model is differentiated.",
    )
  options = {"name": name, "differentiator": nnx.value_and_grad}
  return value_and_grad_of_arrays(fun, optimizer, argnums, has_aux, **options)
