"""The gradient of a loss, as diagnostics trace it."""

from collections.abc import Callable, Sequence

import jax

from mpjax._core.errors import MpjaxTypeError, kind_of
from mpjax._core.types import Array, Function, Leaf, PyTree, is_inexact
from mpjax._diagnose.call import Call, Traced


def gradient_of(loss_fn: Function, scale: float = 1.0) -> Callable[..., PyTree]:
  """Returns the value and gradient of a loss by the floating arrays in its first argument.

  The gradient is that of the loss times `scale`.
  """

  def gradient(*args: PyTree, **kwargs: PyTree) -> PyTree:
    # JAX differentiates by floating arrays only. The rest of the first argument stays as it is.
    call = Call(args[:1], {}, is_traced=lambda x: isinstance(x, jax.Array) and is_inexact(x))

    def scaled_loss(arrays: Sequence[Leaf]) -> tuple[Leaf, list[Array]]:
      first, _ = call.with_arrays(arrays)
      returned = loss_fn(*first, *args[1:], **kwargs)
      value, *aux = returned if isinstance(returned, tuple) else (returned,)
      # Only `tune` passes a function that may be no loss.
      if not args or getattr(value, "shape", None) != () or not is_inexact(value):
        raise MpjaxTypeError(
          "mpjax.tune(loss_fn)",
          expected="a loss of parameters, by position, that returns a floating scalar",
          got=f"one that returns {kind_of(value)}" if args else "no argument by position",
          fix="Pass (params, x=x), and take the mean: jnp.mean(fn(params, x) ** 2).",
        )
      # A factor of 1 would add a multiplication to the jaxpr, which a report would show.
      scaled = value if scale == 1 else scale * value
      # `value_and_grad` returns aux as it is, and text is no result of a jaxpr.
      return scaled, [x for x in jax.tree.leaves(aux) if isinstance(x, jax.Array)]

    return jax.value_and_grad(scaled_loss, has_aux=True)(call.arrays)

  return gradient


def positions_of_gradients(traced: Traced) -> range:
  """Returns the positions of the gradients among the results of `gradient_of`, as it was traced."""
  # The results are ((loss, aux), gradients).
  return range(sum(path[0] == "0" for path in traced.outputs), len(traced.outputs))
