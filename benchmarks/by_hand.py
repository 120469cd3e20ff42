"""Dtypes by hand where Flax's `dtype` field rounds more than a policy does.

Interceptors for `flax.linen.intercept_methods`, around a model whose layers have a `dtype`.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


@jax.custom_vjp
def float32_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """Returns a float32 matmul of low-precision operands, with gradients in low precision."""
  return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _gradients(saved: Any, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
  (x, kernel), half = saved, sums.astype(saved[0].dtype)
  rows = (a.reshape(-1, a.shape[-1]) for a in (x, half))
  return half @ kernel.T, jnp.matmul(next(rows).T, next(rows))


float32_product.defvjp(lambda *args: (float32_product(*args), args), _gradients)


def intercepted(fun: Callable[..., Any], interceptor: Callable[..., Any], head: int) -> Any:
  """Returns `fun`, run with an interceptor of this file.

  Args:
    fun: a function that calls a model.
    interceptor: `float32_logits` or `exact`.
    head: the number of logits.
  """

  @functools.wraps(fun)
  def run(*args: Any, **kwargs: Any) -> Any:
    with nn.intercept_methods(functools.partial(interceptor, head=head)):
      return fun(*args, **kwargs)

  return run


def float32_logits(
  next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any, *, head: int
) -> Any:
  """An interceptor: the dense layer with `head` features returns its float32 sums.

  Its operands have the layer's `dtype`. All other layers run as they are.
  """
  layer = context.module
  if not isinstance(layer, nn.Dense) or layer.features != head:
    return next_fun(*args, **kwargs)
  sums = _sums(layer, args[0])
  if not layer.use_bias:
    return sums
  return sums + jnp.broadcast_to(layer.get_variable("params", "bias"), sums.shape)


def exact(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any, *, head: int) -> Any:
  """An interceptor for dense layers: biases are broadcast in float32, and then cast.

  With Flax's `dtype` they are cast first, and so their gradients add up in half, over the batch.
  The layer with `head` features returns float32.
  """
  layer, get = context.module, context.module.get_variable
  if not isinstance(layer, (nn.Dense, nn.DenseGeneral)):
    return next_fun(*args, **kwargs)
  if layer.features == head:
    out: Any = _sums(layer, args[0])
  elif layer.use_bias:
    product = layer.clone(parent=None, use_bias=False)
    out = product.apply({"params": {"kernel": get("params", "kernel")}}, *args)
  else:
    return next_fun(*args, **kwargs)
  if not layer.use_bias:
    return out
  return out + jnp.broadcast_to(get("params", "bias"), out.shape).astype(out.dtype)


def _sums(layer: Any, x: jax.Array) -> Any:
  kernel = layer.get_variable("params", "kernel")
  return float32_product(x.astype(layer.dtype), kernel.astype(layer.dtype))
