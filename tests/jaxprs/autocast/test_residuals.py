"""No more is saved for the backward pass than in low precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from tests.programs import residual_bytes, run


def eye_like(x):
  return jnp.eye(64).astype(x.dtype)


def over_steps(b, x):
  keys = jnp.tanh(x @ eye_like(x))
  return lax.scan(lambda state, row: (state, row @ keys.T), 0.0, b[None, None])[1]


SAVED = {
  # Broadcast beforehand a factor would be as large as what it multiplies.
  "scale": lambda b, x: ((x @ eye_like(x)) * b[None]) @ eye_like(x),
  "divisor": lambda b, x: ((x @ eye_like(x)) / b[None]) @ eye_like(x),
  "maximum": lambda b, x: jnp.maximum(x @ eye_like(x) - 1, b[None]) @ eye_like(x),
  "maximum of an axis": lambda b, x: jnp.max(x @ eye_like(x), -1, keepdims=True) @ b[None],
  "rows that are read": lambda b, x: (
    jnp.tanh((x @ eye_like(x))[jnp.arange(1024) // 2]) @ eye_like(x) + b[None]
  ),
  "what every step reads": over_steps,
}


@pytest.mark.parametrize("name", SAVED)
def test_no_more_is_saved_than_in_low_precision(name):
  b, x = jnp.ones(64), jnp.ones((1024, 64))
  by_hand = residual_bytes(SAVED[name], b.astype("bfloat16"), x.astype("bfloat16"))
  # One more kernel of 64 x 64 in low precision.
  assert residual_bytes(mpjax.autocast(SAVED[name], "bfloat16"), b, x) <= by_hand + 8192


def test_what_is_saved_in_float32_is_not_saved_rounded_too():
  # The derivative of `exp` reads its result, which a softmax written by hand divides.
  def weights(y):
    shares = jnp.exp(y - lax.stop_gradient(y.max(-1, keepdims=True)))
    return shares / shares.sum(-1, keepdims=True)

  def fun(b, x):
    return weights(x @ b) @ b

  b, x = jnp.ones((64, 64)), jnp.ones((1024, 64))
  columns = 2 * 1024 * 4
  ours = residual_bytes(mpjax.autocast(fun, "bfloat16"), b, x)
  assert ours == 2 * (2 * b.size) + (2 + 4 + 2) * x.size + columns


def test_what_reads_a_factor_can_be_differentiated_in_any_mode():
  def fun(b, x):
    return jnp.sum(((x @ jnp.eye(3)) * b[None]) ** 2)

  def modes(b, x):
    cast = mpjax.autocast(fun)
    forward = jax.vmap(jax.jacfwd(cast), (0, None))(b[None], x)
    return jax.hessian(cast)(b, x), forward, jax.vmap(jax.grad(cast), (None, 0))(b, x[:, None])

  found = run(modes, jnp.full(3, 0.5), jnp.ones((4, 3)))
  for one, wanted in zip(found, (8 * np.eye(3), [[4.0] * 3], np.ones((4, 3))), strict=True):
    np.testing.assert_array_equal(one, wanted)
