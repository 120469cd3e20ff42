"""`convert`: a view for inference, with its parameters stored in what they are used in."""

from typing import Any, TypeVar

from flax import nnx

from mpjax._core.errors import MpjaxTypeError, kind_of
from mpjax._core.types import Params, PyTree
from mpjax._jaxprs.used_dtypes import store_as_used
from mpjax.nnx._spec import is_view

M = TypeVar("M", bound=nnx.Module)


def convert(view: M, *args: Any, method: str = "__call__", **kwargs: Any) -> M:
  """Returns a copy of a view that stores in low precision what it only ever uses so.

  The jaxpr of `view(*args, **kwargs)` says so: a parameter that it does nothing with but round it
  to one 16-bit dtype is stored in that dtype, and the jaxpr computes the same. One that any
  operation uses in float32 (a norm's scale; a table that two modules share, one of them under a
  float32 rule) stays as it is, and so does one that the call does not use.

  Under `jit` XLA may leave a rounding out where it pleases (`xla_allow_excess_precision`, on CPUs):
  of parameters stored in float32, not of those that are rounded already. With that option off the
  results are the same to the bit.

  MXNet converts its symbols for inference by the same rule.

  Args:
    view: what `mpjax.with_policy` returned; it is not changed.
    args: what it is called with, arrays or `jax.ShapeDtypeStruct`.
    method: the name of the method that is called with them. What one method rounds is
      rounded for all others too.
    kwargs: further arguments.

  Returns:
    A view of the same class with variables of its own: for inference, since training needs the
    parameters as they were stored.

  Raises:
    MpjaxTypeError: `view` is no view.
    MpjaxValueError: a finite value that the 16-bit dtype cannot hold.

  >>> import jax.numpy as jnp, mpjax
  >>> from flax import nnx
  >>> rngs = nnx.Rngs(0)
  >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.LayerNorm(4, rngs=rngs))
  >>> view = mpjax.nnx.convert(mpjax.with_policy(model, "mixed_bfloat16"), jnp.ones((1, 3)))
  >>> view.layers[0].kernel.dtype, view.layers[1].scale.dtype
  (dtype(bfloat16), dtype('float32'))
  """
  if not is_view(view):
    raise MpjaxTypeError(
      "mpjax.nnx.convert(view)",
      expected="a view that mpjax.with_policy returned",
      got=kind_of(view),
      fix="Write convert(with_policy(model, policy), *inputs): the policy says what is cast.",
    )
  graphdef, params, rest = nnx.split(view, nnx.Param, ...)

  def call(params: Params, *args: Any, **kwargs: Any) -> PyTree:
    return getattr(nnx.merge(graphdef, params, rest, copy=True), method)(*args, **kwargs)

  new = store_as_used(call, params, args, kwargs, "mpjax.nnx.convert(view)")
  return nnx.merge(graphdef, new, rest, copy=True)
