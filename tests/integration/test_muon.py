"""An optimizer that multiplies matrices, with its update under autocast."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from tests.programs import assert_bit_equal, relative_error

pytestmark = pytest.mark.standard_promotion("dtypes")

PARAMS = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.zeros(32)}
GRADS = jax.tree.map(lambda x: 1e-3 * jax.random.normal(jax.random.key(1), x.shape), PARAMS)


def muon_in(policy):
  """Returns Muon with the matmuls of its update in the dtype of a policy."""
  tx = optax.contrib.muon(0.02)
  return optax.GradientTransformationExtraArgs(tx.init, mpjax.autocast(tx.update, policy))


def test_the_matmuls_of_newton_and_schulz_are_in_bfloat16():
  tx = muon_in("mixed_bfloat16")
  audit = mpjax.audit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
  assert audit.half_share == 1
  assert audit.leaks == ()


def test_matrices_are_within_the_rounding_of_bfloat16_and_all_else_is_that_of_float32():
  both = muon_in("mixed_bfloat16"), optax.contrib.muon(0.02)
  (updates, state), (expected, expected_state) = (
    jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS) for tx in both
  )
  assert_bit_equal((updates["b"], state), (expected["b"], expected_state))
  # Five iterations of three matmuls, each of which rounds to 8 bits.
  assert relative_error(updates["w"], expected["w"]) < 15 * 2.0**-8
