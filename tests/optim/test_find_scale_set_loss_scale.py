"""Which scale is written, within which limits, and what else stays."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
from tests.errors import refused
from tests.optim.scales import PARAMS, of_nnx

OFF, SKIP = mpjax.NoLossScale(), mpjax.SkipNonfinite()


def test_set_loss_scale_writes_to_an_optimizer_and_not_to_its_state():
  _, optimizer = of_nnx()
  mpjax.states.set_loss_scale(nnx.state(optimizer), 4)
  assert mpjax.loss_scaling_metrics(optimizer)["loss_scale"] == 2**15
  assert mpjax.states.set_loss_scale(optimizer, 4) is optimizer
  assert mpjax.loss_scaling_metrics(optimizer)["loss_scale"] == 4


def test_set_loss_scale_refuses():
  state = mpjax.loss_scaling(optax.sgd(0.1)).init(PARAMS)
  where = "mpjax.states.set_loss_scale(value)"
  for value, builtin, expected in (
    (0, ValueError, "positive"),
    (math.inf, ValueError, "finite"),
    (2.0**25, ValueError, "[1, 16777216], the limits of this state"),
    (0.5, ValueError, "[1, 16777216], the limits of this state"),
    ("8", TypeError, "a plain number"),
  ):
    with refused(builtin, where, expected, repr(value), ". "):
      mpjax.states.set_loss_scale(state, value)
  for limit in (1, 2.0**24):
    mpjax.states.set_loss_scale(state, limit)
  with refused(ValueError, where, "a scale of shape ()", "shape (2,)", "one for all"):
    jax.eval_shape(mpjax.states.set_loss_scale, state, jnp.ones(2))
  where, fix = "mpjax.states.set_loss_scale(opt_state)", "StaticLossScale or DynamicLossScale"
  for config, name in ((OFF, "NoLossScale()"), (SKIP, "SkipNonfinite()")):
    state = mpjax.loss_scaling(optax.sgd(0.1), config).init(PARAMS)
    with refused(ValueError, where, "a scale that can move", name, fix):
      mpjax.states.set_loss_scale(state, 1)


def test_a_scale_that_is_an_array_or_an_input_of_the_step():
  # As MindSpore's `sens`: each call scales by its own number.
  tx = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(jnp.float32(4)))

  @jax.jit
  def step(params, state, scale):
    state = mpjax.states.set_loss_scale(state, scale)
    _, grads = jax.value_and_grad(mpjax.scaled(lambda p: jnp.sum(p["w"] ** 2), state))(params)
    updates, state = tx.update(grads, state, params)
    scale = mpjax.loss_scaling_metrics(state)["loss_scale"]
    return scale, updates["w"], state

  state = jax.device_get(tx.init(PARAMS))  # A state on the host will do.
  # The limits of a static scale, where a NaN would stay one.
  pairs = ((jnp.float32(8), 8), (1024, 1024), (2.0**127, 2.0**126), (np.nan, 2.0**-126))
  for scale, within in pairs:
    scale = scale if isinstance(scale, jax.Array) else np.float32(scale)
    used, updates, state = step(PARAMS, state, scale)
    np.testing.assert_array_equal(used, np.float32(within))
    np.testing.assert_array_equal(updates, np.float32([-1] * 3))
  host = jax.device_get(mpjax.loss_scaling(optax.sgd(0.1)).init(PARAMS))
  moved = mpjax.states.set_loss_scale(host, jnp.float32(4))
  assert mpjax.loss_scaling_metrics(moved)["loss_scale"] == 4


def test_set_loss_scale_starts_a_new_window_and_keeps_the_rest():
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.DynamicLossScale(growth_interval=3))
  _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
  moved = mpjax.states.set_loss_scale(state, 4)
  (old,), (new,) = state.loss_scale.values(), moved.loss_scale.values()
  assert old.good_steps == 1
  assert new == old._replace(scale=new.scale, good_steps=new.good_steps)
  assert (new.scale, new.good_steps) == (4, 0)


def test_set_loss_scale_under_jit_and_vmap_and_in_host_memory():
  state = jax.vmap(mpjax.loss_scaling(optax.sgd(0.1)).init)(jnp.ones((3, 2)))
  for wrap in (lambda f: f, jax.jit):
    moved = wrap(lambda s: mpjax.states.set_loss_scale(s, 2))(state)
    assert mpjax.loss_scaling_metrics(moved)["loss_scale"].tolist() == [2, 2, 2]
  host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
  moved = mpjax.states.set_loss_scale(jax.device_put(state, host), 2)
  assert {x.sharding for x in jax.tree.leaves(moved)} == {host}
