import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax._diagnostics.nonfinite.scales import implied_scale, scale_of
from mpjax._diagnostics.nonfinite.traced import trace


def test_the_state_of_an_optimizer_holds_the_scale():
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.DynamicLossScale(init_scale=2.0**10, min_scale=4))
  state = tx.init(jnp.ones(2))
  args = (jnp.ones(2), state)
  traced = trace(lambda g, s: tx.update(g, s, g), args, {})
  scale = scale_of(traced, args, {})
  assert (scale.value, scale.least, scale.step) == (1024, 4, 0)
  leaves = scale.with_factor(0.25)
  changed = [(float(a), float(b)) for a, b in zip(traced.leaves, leaves, strict=True) if a is not b]
  assert changed == [(1024, 256)]


def test_without_a_state_there_is_none():
  args = (jnp.ones(2),)
  assert scale_of(trace(jnp.sum, args, {}), args, {}) is None


@pytest.mark.parametrize("scale", [1024.0, jnp.asarray(1024.0)])
def test_a_factor_of_the_loss_and_of_its_cotangent_is_a_scale(scale):
  def step(w, scale):
    return jax.value_and_grad(lambda w: jnp.sum(w * w) * scale)(w)

  found = implied_scale(trace(step, (jnp.ones(2), scale), {}))
  assert found.value == 1024
  assert len(found.places) >= 1


def test_a_weight_of_a_loss_is_none():
  def step(w):
    return jax.value_and_grad(lambda w: jnp.sum(w * w) * 0.5)(w)

  assert implied_scale(trace(step, (jnp.ones(2),), {})) is None
