"""Casts that a jaxpr has already."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._core.policy import Policy
from mpjax._jaxprs.autocast import Interface, Settings, leaving, with_settings
from mpjax._jaxprs.op_lists import OpLists
from tests.programs import converts

X = jnp.ones((2, 3))
W = jnp.ones((3, 3))


def cast(fun):
  settings = Settings(policy=Policy(compute_dtype="bfloat16"), ops=OpLists())
  return with_settings(fun, settings, "a test", Interface(results=lambda out: out))


def result(fun):
  return jax.eval_shape(cast(fun), X, W).dtype


def test_casts_of_the_program():
  """One of the user to low precision stays, and one to float32 makes what follows float32."""
  assert result(lambda x, w: (x @ w).astype("float16")) == jnp.float16
  assert result(lambda x, w: x.astype("bfloat16")) == jnp.bfloat16
  assert result(lambda x, w: x @ w + 1) == jnp.bfloat16
  assert result(lambda x, w: (x @ w).astype("bfloat16").astype("float32") + 1) == jnp.float32
  # A count becomes a float32 that decides, and a mask none.
  assert result(lambda x, w: x @ w + jnp.arange(3).astype("float32")[None]) == jnp.float32
  assert result(lambda x, w: x @ w + (x > 0).astype("float32")) == jnp.bfloat16


def test_a_padded_array_keeps_its_dtype():
  # `jnp.pad` passes the number to its jitted body as an integer.
  assert result(lambda x, w: jnp.pad(x @ w, 1)) == jnp.bfloat16
  assert result(lambda x, w: jnp.pad(x @ w, 1, constant_values=-jnp.inf)) == jnp.bfloat16
  assert result(lambda x, w: jnp.pad(jnp.exp(x), 1)) == jnp.float32
  padded = jnp.pad(X @ W, 1, constant_values=2.5)
  assert np.array_equal(cast(lambda x, w: jnp.pad(x @ w, 1, constant_values=2.5))(X, W), padded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_leaves_a_module_has_its_dtype_for_all_who_read_it(dtype):
  def fun(x, w):
    return leaving(x @ w, jnp.dtype(dtype)) + 1

  assert result(fun) == dtype


def test_nothing_is_cast_twice():
  program = jax.make_jaxpr(cast(lambda x, w: leaving(x @ w, jnp.dtype("bfloat16"))))(X, W)
  assert converts(program) == {"float32->bfloat16": 2}


@pytest.mark.parametrize("number", [0.0, 1.5])
def test_an_array_of_one_number_is_made_in_the_dtype_that_it_is_read_in(number):
  def fun(x, w):
    y = x @ w
    return jax.lax.select(y > 0, y, jnp.full_like(y, number))

  program = jax.make_jaxpr(cast(fun))(X, W)
  assert converts(program) == {"float32->bfloat16": 2}  # The operands of the matmul.
  y = np.asarray(cast(jnp.matmul)(X, W), np.float32)
  np.testing.assert_array_equal(cast(fun)(X, W), np.where(y > 0, y, np.float32(number)))
