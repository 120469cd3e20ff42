"""An optimizer that multiplies matrices, with its update under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

PARAMS = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.zeros(32)}
GRADS = jax.tree.map(lambda x: 1e-3 * jax.random.normal(jax.random.key(1), x.shape), PARAMS)


def muon_in(policy):
  """Returns Muon with the matmuls of its update in the dtype of a policy."""
  tx = optax.contrib.muon(0.02)
  return optax.GradientTransformationExtraArgs(tx.init, mpjax.autocast(tx.update, policy))


def update(tx):
  state = tx.init(PARAMS)
  return jax.jit(tx.update)(GRADS, state, PARAMS)


def test_the_matmuls_of_newton_and_schulz_are_in_bfloat16():
  tx = muon_in("mixed_bfloat16")
  audit = mpjax.audit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
  assert audit.half_share == 1
  assert audit.leaks == ()


def test_moments_and_the_updates_of_adam_are_those_of_float32():
  updates, state = update(muon_in("mixed_bfloat16"))
  expected, expected_state = update(optax.contrib.muon(0.02))
  np.testing.assert_array_equal(updates["b"], expected["b"])
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
    np.testing.assert_array_equal(a, b)


def test_updates_of_matrices_are_within_the_rounding_of_bfloat16():
  updates, _ = update(muon_in("mixed_bfloat16"))
  expected, _ = update(optax.contrib.muon(0.02))
  distance = np.linalg.norm(updates["w"] - expected["w"]) / np.linalg.norm(expected["w"])
  # Five iterations of three matmuls, each of which rounds to 8 bits.
  assert distance < 15 * 2.0**-8
