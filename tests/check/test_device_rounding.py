"""The script that rounds the operands of float32 matmuls as a GPU or a TPU does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.scripts import benchmark

device_rounding = benchmark("device_rounding")

BODIES = {
  "plain": lambda f: f,
  "jit": jax.jit,
  "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, _: (f(w, c), None), x, length=1)[0],
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("bits", [8, 11])
def test_operands_of_float32_matmuls_are_rounded(device_rounding, name, bits):
  fun = BODIES[name](lambda w, x: x @ w)
  # One bit more than the operand keeps.
  w, x = jnp.eye(8), jnp.full((8, 8), 1 + 2.0**-bits)
  np.testing.assert_array_equal(device_rounding.rounded(fun, bits)(w, x), np.ones((8, 8)))
  np.testing.assert_array_equal(device_rounding.rounded(fun, bits + 1)(w, x), x)


def test_matmuls_that_ask_for_a_precision_are_not_rounded(device_rounding):
  w, x = jnp.eye(8), jnp.full((8, 8), 1 + 2.0**-12)
  exact = mpjax.autocast(lambda w, x: x @ x, data_argnums=1)
  found = device_rounding.rounded(exact, 8)(w, x)
  np.testing.assert_array_equal(found, exact(w, x))
  assert not np.array_equal(device_rounding.rounded(lambda w, x: x @ x, 8)(w, x), found)
