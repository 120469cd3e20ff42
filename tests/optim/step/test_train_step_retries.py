"""Retries of a batch that overflowed: their number, their scales and the state after them."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.loss_scale_oracle import Oracle
from tests.optim.steps import begin, chosen, without_scale


def in_float16(params, model_state, batch, rng):
  """The gradient of `params` overflows if the scale times the largest of the batch is too large."""
  half = batch.astype(jnp.float16) @ params.astype(jnp.float16)
  loss = jnp.sum(half.astype(jnp.float32))
  if rng is not None:
    model_state = model_state * 0.5 + jax.random.bits(rng, (), jnp.uint8).astype(jnp.float32)
  return loss, (model_state, {})


def retry_oracle(config, largest, max_retries):
  """NNabla's updater in plain Python: back off and run again while a lower scale may help."""
  # Returns (applied, retries, scale) for each batch. The gradient is the scale times its largest
  # value. NNabla raises after 100 failed runs. Here such a step counts as skipped. Each retry
  # lowers the scale and ignores the hysteresis, because the same scale overflows again.
  oracle, history = Oracle(**config), []
  for value in largest:
    retries, applied, futile, once = -1, False, False, None
    while not applied and not futile and retries < max_retries:
      retries += 1
      scale = oracle.scale
      applied = bool(scale * value < 65520)  # From here on float16 rounds to inf.
      oracle.step(applied)
      once = once or copy.copy(oracle)
      # A lower scale does not repair an inf or NaN in the data, and the minimum is the lowest.
      futile = not np.isfinite(value) or scale == config["min_scale"]
      if not applied and oracle.scale == scale:
        oracle.scale = max(scale / 2, config["min_scale"])
    oracle = oracle if applied else once
    history.append((applied, retries, oracle.numbers()))
  return history


@pytest.mark.parametrize(("max_retries", "hysteresis"), [(0, 1), (1, 2), (3, 1), (3, 3)])
def test_retries_equal_the_oracle(max_retries, hysteresis):
  config = {"init_scale": 2.0**12, "growth_interval": 3, "min_scale": 4.0, "hysteresis": hysteresis}
  tx = mpjax.loss_scaling(optax.sgd(2.0**-30), mpjax.DynamicLossScale(**config))
  step, state = begin(in_float16, tx, max_retries=max_retries)
  exponents = np.random.default_rng(max_retries).integers(-2, 16, 120)
  largest = [{14: np.nan, 15: np.inf}.get(e, 2.0**e) for e in exponents]
  history = retry_oracle(config, largest, max_retries)
  params, steps = np.zeros(3), 0
  for value, (applied, retries, numbers) in zip(largest, history, strict=True):
    state, metrics = jax.device_get(step(state, jnp.asarray([[0.0, value, 1.0]])))
    state = jax.tree.map(jnp.asarray, state)
    if applied:
      params, steps = params - 2.0**-30 * np.asarray([0, value, 1]), steps + 1
    assert metrics["finite"] == applied
    assert metrics.get("retries", 0) == retries
    assert metrics["loss_scale"] == numbers.pop("scale")
    numbers.pop("hysteresis")
    assert {key: metrics[key] for key in numbers} == numbers
    np.testing.assert_array_equal(state.params, np.float32(params))
    assert state.step == steps
  assert ("retries" in metrics) == (max_retries > 0)
  seen = {(applied, retries) for applied, retries, _ in history}
  assert {(True, 0), (False, 0), (False, max_retries)} <= seen
  assert any(applied and retries for applied, retries in seen) == (max_retries > 0)


def test_a_retried_step_is_the_step_at_the_lower_scale():
  # The attempts before it change neither the dropout key nor the model state.
  tx = mpjax.loss_scaling(optax.sgd(0.3, momentum=0.7), mpjax.DynamicLossScale(init_scale=2.0**12))
  begins = {"model_state": jnp.ones(()), "rng": jax.random.key(1)}
  options = {"max_retries": 4, "donate": False}
  step, state = begin(in_float16, tx, jnp.asarray([0.1, 0.2, 0.3]), **begins, **options)
  state, metrics = step(state, jnp.asarray([[0.1, 0.2, 0.3]]))
  assert metrics["retries"] == 0
  hard = jnp.asarray([[0.3, 100.0, 0.2]])  # 65520 / 100 lies between 2^9 and 2^10
  retried, metrics = step(state, hard)
  assert chosen(metrics, "retries", "finite", "skipped", "loss_scale") == [3, True, 3, 2**9]
  lower = state._replace(opt_state=mpjax.states.set_loss_scale(state.opt_state, 2.0**9))
  direct, plain = step(lower, hard)
  assert chosen(plain, "retries", "finite", "skipped", "loss_scale") == [0, True, 0, 2**9]
  assert without_scale(retried) == without_scale(direct)
  assert chosen(metrics, "loss", "grad_norm") == chosen(plain, "loss", "grad_norm")


def test_a_retry_comes_down_from_any_scale_to_the_largest():
  # What follows an overflow of the scale itself would else be inf again.
  tx = mpjax.loss_scaling(
    optax.sgd(0.3), mpjax.DynamicLossScale(init_scale=2.0**10, max_scale=2.0**10)
  )
  step, state = begin(in_float16, tx, jnp.zeros(3), max_retries=2, donate=False)
  ((label, scale),) = state.opt_state.loss_scale.items()
  beyond = {label: scale._replace(scale=jnp.full_like(scale.scale, jnp.inf))}
  state = state._replace(opt_state=state.opt_state._replace(loss_scale=beyond))
  metrics = step(state, jnp.full((1, 3), 2.0**-10))[1]
  assert chosen(metrics, "retries", "finite", "loss_scale") == [1, True, 2**10]
