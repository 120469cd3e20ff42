"""The moving average of parameters that are trained in windows, and of others."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.optim.losses import loss_of
from tests.optim.steps import STATIC, begin


@pytest.mark.parametrize("windows", [mpjax.accumulate_gradients, optax.MultiSteps])
@pytest.mark.standard_promotion
def test_the_average_moves_with_updates_not_with_micro_batches(windows):
  # As if each window were one batch: NumPy, in float64.
  every = 4
  inner = windows(optax.sgd(0.25), every)
  tx = mpjax.loss_scaling(getattr(inner, "gradient_transformation", lambda: inner)(), STATIC)
  loss_fn = loss_of(lambda params, batch: jnp.sum((params - batch) ** 2))
  step, state = begin(loss_fn, tx, jnp.ones(1), ema=True, ema_decay=0.75)
  params = average = 1.0
  for window in range(5):
    for micro_batch in range(every):
      state, _ = step(state, jnp.full(1, float(window)))
      if micro_batch == every // 2:  # What is skipped is no part of the window.
        state, metrics = step(state, jnp.full(1, np.nan))
        assert not metrics["finite"]
    params = params - 0.5 * (params - window)
    average = 0.75 * average + 0.25 * params
    np.testing.assert_allclose(state.params, [params], rtol=1e-6)
    np.testing.assert_allclose(state.ema, [average], rtol=1e-6)


def test_the_average_of_what_is_not_accumulated_moves_each_time():
  branches = {"a": mpjax.accumulate_gradients(optax.sgd(0.25), 2), "b": optax.sgd(0.25)}
  # Two paths that are one text.
  tx = mpjax.loss_scaling(optax.multi_transform(branches, {"x/y": "a", "x": {"y": "b"}}), STATIC)
  loss_fn = loss_of(lambda params, batch: params["x/y"] + params["x"]["y"])
  params = {"x/y": jnp.ones(()), "x": {"y": jnp.ones(())}}
  step, state = begin(loss_fn, tx, params, ema=True, ema_decay=0.5)
  for average in ((1.0, 0.875), (0.875, 0.6875), (0.875, 0.46875), (0.6875, 0.234375)):
    state, _ = step(state, 0.0)
    assert (state.ema["x/y"], state.ema["x"]["y"]) == average
  # The paths of a window in another tree name none of the parameters.
  flat = optax.flatten(mpjax.accumulate_gradients(optax.sgd(0.25), 2))
  step, state = begin(loss_fn, mpjax.loss_scaling(flat, STATIC), params, ema=True, ema_decay=0.5)
  where, expected = "mpjax.make_train_step(ema_decay)", "in the tree of the parameters"
  with refused(ValueError, where, expected, "optax.flatten", "Put it outside"):
    step(state, 0.0)
