"""A batch that is run again, and at which scale. Those of an oracle are in test_train_step.py."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax


def in_float16(params, model_state, batch, rng):
  """The gradient is the scale times `batch`, in float16: inf from 65520 on."""
  del rng
  loss = jnp.sum(params.astype(jnp.float16) * batch.astype(jnp.float16))
  return loss.astype(jnp.float32), (model_state, {})


def run(batch, config, max_retries):
  tx = mpjax.loss_scaling(optax.sgd(2.0**-30), mpjax.DynamicLossScale(**config))
  step = mpjax.make_train_step(in_float16, tx, max_retries=max_retries)
  state, metrics = step(mpjax.TrainState.create(jnp.zeros(1), tx), jnp.asarray([batch]))
  return state, metrics


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_each_run_is_at_a_lower_scale_whatever_the_hysteresis(hysteresis):
  """At 2^15 and 2^14 the gradient 4 overflows, at 2^13 it does not."""
  state, metrics = run(4.0, {"hysteresis": hysteresis}, 3)
  found = [int(metrics[name]) for name in ("finite", "retries", "loss_scale", "skipped")]
  assert found == [1, 2, 2**13, 2]
  assert state.step == 1
  np.testing.assert_array_equal(state.params, np.float32([-4 * 2.0**-30]))
