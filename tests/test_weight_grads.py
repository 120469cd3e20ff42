"""A layer's two steps with weight gradients in a wider dtype, without the layer.

What Flax's layers make of them is in `tests/linen` and `tests/nnx`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._weight_grads import Stored, products, promoted
from tests.programs import equations

X = jnp.asarray(np.arange(-6, 6).reshape(4, 3), jnp.float32)
KERNEL = jnp.asarray(np.arange(-2, 4).reshape(3, 2), jnp.float32)
BIAS = jnp.asarray([1.0, 2.0])
LAST = (((1,), (0,)), ((), ()))


def to_half(args, *, dtype):
  return tuple(None if x is None else jnp.asarray(x, dtype) for x in args)


def test_parameters_stay_as_they_are_stored_and_nothing_is_left_to_add():
  inputs, kernel, bias = promoted(to_half, X, KERNEL, BIAS, dtype=jnp.bfloat16)
  assert inputs.dtype == jnp.bfloat16
  assert kernel == Stored(KERNEL, BIAS)
  assert bias.dtype == jnp.bfloat16
  assert np.signbit(bias.astype(jnp.float32)).all()
  assert not bias.any()
  _, kernel, bias = promoted(to_half, X, KERNEL, None, dtype=jnp.bfloat16)
  assert kernel == Stored(KERNEL, None)
  assert bias is None


@pytest.mark.parametrize("bias", [None, jnp.ones(2, jnp.int8)])
def test_parameters_of_whole_numbers_are_cast_as_ever(bias):
  inputs, kernel, cast = promoted(to_half, X, KERNEL.astype(jnp.int8), bias, dtype=jnp.bfloat16)
  assert {x.dtype for x in (inputs, kernel, cast) if x is not None} == {jnp.dtype("bfloat16")}
  out = products(np.dtype("float32"))["dot_general"](inputs, kernel, LAST)
  np.testing.assert_array_equal(out, (X @ KERNEL).astype(jnp.bfloat16))


def test_a_product_with_its_bias_and_gradients_that_are_wide():
  dot_general = products(np.dtype("float32"))["dot_general"]

  def layer(x, kernel, bias):
    x, kernel, _ = promoted(to_half, x, kernel, bias, dtype=jnp.float16)
    return dot_general(x, kernel, LAST, precision="highest", out_sharding=None)

  y, pull = jax.vjp(layer, X, KERNEL, BIAS)
  np.testing.assert_array_equal(y, (X @ KERNEL + BIAS[None]).astype(jnp.float16))
  # Of half numbers, but more than half holds: 3 * 40000 is beyond float16.
  _, kernel_bar, bias_bar = pull(jnp.full((4, 2), 40000, jnp.float16))
  np.testing.assert_array_equal(kernel_bar, X.T @ jnp.full((4, 2), 40000.0))
  np.testing.assert_array_equal(bias_bar, [160000, 160000])
  found = [
    eqn.params["precision"]
    for eqn, _ in equations(jax.make_jaxpr(pull)(y))
    if eqn.primitive.name == "dot_general"
  ]
  assert {str(p) for both in found for p in both} == {"HIGHEST"}
  assert len(found) == 2
