"""Weight gradients in a wider dtype than the products': `Policy(weight_grad_dtype=...)`.

A layer casts its kernel to half and multiplies. JAX makes the kernel's gradient as a product in
half as well, the partitioner adds up in half what the devices found, and only the sum is cast to
the stored dtype. Here the product takes the kernel as it is stored: its gradient is one product of
the same half operands into the wide dtype, and what is added up afterwards is wide. The bias goes
the same way, since its gradient is a sum of the same half cotangents.

Flax's layers let two steps be replaced by public fields: the cast of inputs, kernel and bias, and
the product. The addition of the bias that follows is the layer's own.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mpjax._tree import cast_leaf, is_floating
from mpjax._types import Array

_Multiply: TypeAlias = Callable[[Array, Array], Array]
"""A product of two arrays of one dtype, linear in each of them."""

_WeightGrad: TypeAlias = Callable[[Array, Array, Array], Array]
"""(inputs, half kernel, cotangent of the product) -> cotangent of the kernel, in a wide dtype."""


class Stored(NamedTuple):
  """Kernel and bias as they are stored: what a layer's product is given for its kernel."""

  kernel: Array
  bias: Array | None


def promoted(
  promote: Callable[..., Any], inputs: Any, kernel: Any, bias: Any, **options: Any
) -> tuple[Any, Any, Any]:
  """Returns inputs, kernel and bias for a layer whose product is one of `products`.

  The product adds the bias itself, so that derivatives of every order see it. What is left for the
  layer to add is -0.0, the one number that leaves all bits of the sum alone.

  Args:
    promote: the layer's own cast: a tuple of arrays, and options, to a tuple of arrays.
    inputs: the layer's inputs.
    kernel: as stored.
    bias: as stored, or None.
    **options: those of `promote`, among them `dtype`.
  """
  if not all(x is None or is_floating(x) for x in (kernel, bias)):
    return promote((inputs, kernel, bias), **options)
  (inputs,) = promote((inputs,), **options)
  if bias is None:
    return inputs, Stored(jnp.asarray(kernel), None), None
  bias = jnp.asarray(bias)
  nothing = jnp.full_like(bias, -0.0, dtype=inputs.dtype)
  return inputs, Stored(jnp.asarray(kernel), bias), nothing


def products(wide: np.dtype[Any]) -> dict[str, Callable[..., Array]]:
  """Returns products for the fields of a layer, `dot_general` and `conv_general_dilated`.

  They take what `promoted` returns, and give what the layer computes, bias included, the same to
  the bit.

  Args:
    wide: the dtype of the gradients of kernel and bias; each is cast to the parameter's own last.
  """

  def dot_general(
    inputs: Array, kernel: Any, dimension_numbers: Any, precision: Any = None, **options: Any
  ) -> Array:
    def multiply(x: Array, k: Array) -> Array:
      return jax.lax.dot_general(x, k, dimension_numbers, precision=precision, **options)

    def weight_grad(x: Array, half: Array, ct: Array) -> Array:
      return _dot_weight_grad(x, half, ct, dimension_numbers, precision, wide)

    batch_dims = len(dimension_numbers[1][0])
    return _product(multiply, weight_grad, batch_dims, wide, inputs, kernel)

  def conv_general_dilated(inputs: Array, kernel: Any, *args: Any, **options: Any) -> Array:
    def multiply(x: Array, k: Array) -> Array:
      return jax.lax.conv_general_dilated(x, k, *args, **options)

    def weight_grad(x: Array, half: Array, ct: Array) -> Array:
      return _transposed_into(wide, lambda k: multiply(x, k), half, ct)

    return _product(multiply, weight_grad, 0, wide, inputs, kernel)

  return {"dot_general": dot_general, "conv_general_dilated": conv_general_dilated}


def _product(
  multiply: _Multiply,
  weight_grad: _WeightGrad,
  batch_dims: int,
  wide: np.dtype[Any],
  inputs: Array,
  params: Any,
) -> Array:
  """Returns `multiply(inputs, kernel) + bias`, computed in the dtype of the inputs.

  Args:
    multiply: the product.
    weight_grad: its transpose with respect to the kernel.
    batch_dims: how many leading axes of the bias are the result's leading axes; the others are its
      last ones.
    wide: the dtype of the gradients of kernel and bias.
    inputs: in half.
    params: `Stored`; or a kernel that is no matter of gradients, and is only multiplied with.
  """
  if not isinstance(params, Stored):
    return multiply(inputs, params)

  def spread(bias: Array, ndim: int) -> Array:
    ones = (1,) * (ndim - bias.ndim)
    return jnp.reshape(bias, bias.shape[:batch_dims] + ones + bias.shape[batch_dims:])

  def value(x: Array, kernel: Array, bias: Array | None) -> Array:
    y = multiply(x, cast_leaf(kernel, x.dtype))
    return y if bias is None else y + spread(cast_leaf(bias, x.dtype), y.ndim)

  def forward(x: Array, kernel: Array, bias: Array | None) -> tuple[Array, Any]:
    # What is stored exists anyway: the half copy of the kernel is made again, not kept.
    return value(x, kernel, bias), (x, kernel, bias)

  def backward(kept: Any, ct: Array) -> tuple[Array, Array, Array | None]:
    x, kernel, bias = kept
    half = cast_leaf(kernel, x.dtype)
    (x_bar,) = jax.linear_transpose(lambda x: multiply(x, half), x)(ct)
    k_bar = _as_cotangent(lambda k: k, kernel, weight_grad(x, half, ct))
    if bias is None:
      return x_bar, k_bar, None
    return x_bar, k_bar, _as_cotangent(lambda b: spread(b, ct.ndim), bias, cast_leaf(ct, wide))

  product = jax.custom_vjp(value)
  product.defvjp(forward, backward)
  return product(inputs, params.kernel, params.bias)


def _as_cotangent(spread: Callable[[Array], Array], param: Array, sums: Array) -> Array:
  """Returns the cotangent of a parameter, given that of a sum that `spread(param)` is a part of.

  Transposing that addition, JAX adds up over the axes that the parameter lacks: of the array, and
  of the mesh inside `shard_map`. Only then is the result cast to what the parameter is stored in.
  """
  (bar,) = jax.linear_transpose(lambda p: sums + spread(p), cast_leaf(param, sums.dtype))(sums)
  return cast_leaf(bar, param.dtype)


def _dot_weight_grad(
  x: Array, half: Array, ct: Array, dimension_numbers: Any, precision: Any, wide: np.dtype[Any]
) -> Array:
  """Returns the cotangent of the kernel of a `dot_general`, in the layout that the kernel has.

  That is the one of Flax: batch axes, contracted axes in the order of the inputs' axes, features.
  """
  ((contracted, _), (batch, _)) = dimension_numbers
  free = tuple(axis for axis in range(x.ndim) if axis not in (*contracted, *batch))
  free_of_ct = tuple(range(len(batch), len(batch) + len(free)))
  batch_of_ct = tuple(range(len(batch)))
  placed = any(any(jax.typeof(array).sharding.spec) for array in (x, half, ct))
  if jax.default_backend() == "cpu" and not placed:
    # XLA's CPU backend (of jax 0.10) leaves some products of bfloat16 into float32 to a library,
    # goes on to turn an operand round, and fails because the library does not take that. It never
    # does so with a batch of matrices, not even under `vmap`.
    x = _as_matrices(jax.lax.transpose(x, (*batch, *free, *contracted)), len(batch), len(free))
    ct = _as_matrices(ct, len(batch), len(free))
    batch = batch_of_ct = (0,)
    free = free_of_ct = (1,)
  product = jax.lax.dot_general(
    x,
    ct,
    ((free, free_of_ct), (batch, batch_of_ct)),
    precision=precision,
    preferred_element_type=wide,
    # Explicit mesh axes want to be told where the result goes: where the kernel is.
    out_sharding=jax.typeof(half).sharding if placed else None,
  )
  return jnp.reshape(product, half.shape)


def _as_matrices(x: Array, batch: int, rows: int) -> Array:
  """Returns `x` as matrices: its first `batch` axes as one, the next `rows` axes, the others."""
  groups = x.shape[:batch], x.shape[batch : batch + rows], x.shape[batch + rows :]
  return jnp.reshape(x, tuple(math.prod(group) for group in groups))


def _transposed_into(
  wide: np.dtype[Any], multiply: Callable[[Array], Array], kernel: Array, ct: Array
) -> Array:
  """Returns `ct` pulled back through `multiply`, a convolution with `kernel`, in a wide dtype.

  Which convolution of which axes, strides, dilations and groups that is, JAX knows best: its own
  program is run with another type of result. The other equations in it move elements, or add up
  over mesh axes, and take any type.
  """
  closed = jax.make_jaxpr(jax.linear_transpose(multiply, kernel))(ct)
  found = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  found.update(zip(closed.jaxpr.invars, [ct], strict=True))

  def read(variable: Any) -> Any:
    return variable.val if isinstance(variable, Literal) else found[variable]

  for eqn in closed.jaxpr.eqns:
    params = dict(eqn.params)
    if eqn.primitive.name == "conv_general_dilated":
      params["preferred_element_type"] = wide
    made = eqn.primitive.bind(*map(read, eqn.invars), **params)
    found.update(zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True))
  return read(closed.jaxpr.outvars[0])
