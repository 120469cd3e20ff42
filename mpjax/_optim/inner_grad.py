"""`jax.grad` inside a float16 loss, with a scale of its own."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._core.errors import check_call, check_callable
from mpjax._core.frameworks import copied_objects, library_of_grad
from mpjax._core.trees import all_finite
from mpjax._core.types import Args, Array, Function, Grads, Kwargs, P, PyTree, is_inexact
from mpjax._jaxpr.locations import INNER_GRAD
from mpjax._optim.loss_scale import positive_scale, unscale_tree
from mpjax._optim.optimizer_trees import at_least_float32
from mpjax._optim.value_and_grad import loss_and_aux
from mpjax._policy.active import full_precision

_CALL = "mpjax.inner_grad(fun)"
_FIX = "Write mpjax.inner_grad(energy)(x): the arguments come in a second call."

_FIRST = 2.0**15
"""The scale at which gradients are measured. It fits into float16."""

_FLOAT16_LIMIT = 2.0**15
"""The largest power of two in float16, and so the largest scale of a float16 result."""

_TARGET = 4
"""The exponent of the largest scaled gradient: far from 2^16, where float16 ends."""

_LIMITS = (2.0**-24, 2.0**60)
"""The smallest and largest scale that measuring may choose."""


@check_call(_CALL, fix=_FIX)
def inner_grad(
  fun: Callable[P, PyTree],
  argnums: int | Sequence[int] = 0,
  has_aux: bool = False,
  *,
  scale: float | None = None,
  differentiator: Callable[..., Function] | None = None,
) -> Callable[P, Any]:
  """Scale and differentiate a function inside of a float16 loss, like `jax.grad`.

  A gradient penalty, forces from an energy and MAML differentiate inside of the loss. The loss
  scale of the optimizer does not reach these gradients, and small ones become 0 in float16. This
  function scales them by a power of two while they are computed, and divides in float32.

  Args:
    fun: a function that returns a floating scalar, or `(scalar, aux)` with `has_aux`.
    argnums: which positional arguments to differentiate with respect to.
    has_aux: whether `fun` returns a pair.
    scale: a positive number, best a power of two, or None to measure it with one or two more
      gradients. Pass `scale=2.0**15` if a gradient under `jit` is 0: XLA may have joined literal
      factors of `fun` to one that underflows.
    differentiator: the function that differentiates, in place of `jax.grad`, or of `nnx.grad` if
      modules or variables are among the arguments. Those that `fun` writes to must be arguments.

  Returns:
    A function of the arguments of `fun` that returns the unscaled gradients, at least in float32.
    With `has_aux` it returns a pair of the gradients and the second result of `fun`.

  Raises:
    MpjaxTypeError: `fun` is no function; when called: it returns no floating number.
    MpjaxValueError: the scale is not a positive number; when called: `fun` returns no scalar.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def energy(x, w):  # Its gradient is 2^-26, and float16 ends at 2^-24.
  ...   return jnp.sum(x.astype(jnp.float16) * w * w)
  >>> x, w = jnp.ones(2), jnp.full(2, 2.0**-13, jnp.float16)
  >>> print(jax.grad(energy)(x, w), mpjax.inner_grad(energy)(x, w) * 2**26)
  [0. 0.] [1. 1.]
  """
  check_callable(fun, _CALL, expected="a function that returns a scalar", fix=_FIX)
  stated = None if scale is None else positive_scale(scale, "mpjax.inner_grad(scale)")

  def scaled_grad(
    differentiate: Function, factor: Array | float, args: Args, kwargs: Kwargs
  ) -> tuple[Grads, PyTree]:
    """Returns the gradients, computed at a scale, and the rest of what `fun` returned."""

    # `updated=()`: a callable object has a `__dict__` of fields, which are not the wrapper's.
    @functools.wraps(fun, updated=())
    def scaled(*args: P.args, **kwargs: P.kwargs) -> tuple[Array, PyTree]:
      value, aux = loss_and_aux(fun(*args, **kwargs), has_aux, _CALL)
      # The product is in float32, so that a large value does not overflow. Its cotangent is cast
      # back to the dtype of `value`.
      wide = at_least_float32(value)
      return wide * _within(factor, value).astype(wide.dtype), (aux, value)

    gradient = differentiate(scaled, argnums=argnums, has_aux=True)
    grads, (aux, value) = gradient(*args, **kwargs)
    # Under a policy, the division must not be done in the compute dtype. There, the quotient would
    # underflow again.
    return full_precision(unscale_tree)(grads, _within(factor, value)), aux

  @functools.wraps(fun, updated=())
  def gradient(*args: P.args, **kwargs: P.kwargs) -> Any:
    # `nnx.grad` alone sees what a function writes to modules.
    differentiate = differentiator or library_of_grad((args, kwargs)).grad

    def plain_grads(factor: Array | float) -> Grads:
      # The function runs several times. Writes to modules, such as counts of dropout, must happen
      # once.
      copies = copied_objects((args, kwargs))
      # The scale cancels out of the gradients, so it is a constant to the outer derivative.
      return jax.lax.stop_gradient(scaled_grad(differentiate, factor, *copies)[0])

    # `check_loss_scaling` tells scaled inner gradients by this scope.
    with jax.named_scope(INNER_GRAD):
      factor = _measured(plain_grads) if stated is None else stated
      grads, aux = scaled_grad(differentiate, factor, args, kwargs)
    return (grads, aux) if has_aux else grads

  return gradient


def _within(factor: Array | float, value: Array) -> Array:
  """Returns the scale, limited to 2^15 if the result is float16: its cotangent has that dtype."""
  factor = jnp.asarray(factor, jnp.float32)
  # 2^16 is inf in float16, the dtype in which the backward pass starts.
  if jnp.result_type(value) == jnp.float16:
    return jnp.minimum(factor, jnp.float32(_FLOAT16_LIMIT))
  return factor


def _measured(grads_at: Callable[[Array | float], Grads]) -> Array:
  """Returns a power of two that brings the largest gradient to about 2^4.

  `grads_at` returns the plain gradients, computed at a scale. The result is 1 if a gradient
  overflows at the first scale, and the first scale if one overflows at a larger scale.
  """
  scale = _scale_for(grads_at(_FIRST))

  def tried() -> Array:
    # Intermediate values of the backward pass may exceed the gradients, and overflow. So try the
    # scale.
    return jnp.where(all_finite(grads_at(scale)), scale, jnp.float32(_FIRST))

  # Scales up to 2^15 need no trial: gradients shrink, compared with the first run.
  return jax.lax.cond(scale > _FIRST, tried, lambda: scale)


@full_precision
def _scale_for(grads: Grads) -> Array:
  """Returns the scale that brings the largest of some gradients to about 2^4."""
  # `initial` is for arrays without elements, which have no maximum.
  sizes = [jnp.max(jnp.abs(x), initial=0) for x in jax.tree.leaves(grads) if is_inexact(x)]
  largest = functools.reduce(jnp.maximum, [x.astype(jnp.float32) for x in sizes], jnp.float32(0))
  # largest = m * 2^exponent with m in [0.5, 1). The exponent alone keeps the scale a power of two.
  _, exponent = jnp.frexp(largest)
  scale = jnp.clip(jnp.ldexp(jnp.float32(1), _TARGET - exponent), *_LIMITS)
  # Gradients that are all 0 give no exponent, and an inf or NaN gives none that can be used.
  scale = jnp.where(largest > 0, scale, jnp.float32(_FIRST))
  return jnp.where(jnp.isfinite(largest), scale, jnp.float32(1))
