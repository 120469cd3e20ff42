"""Flax's float8 layers: what comes as the gradient of their statistics is their next value."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import mpjax
from tests.errors import refused
from tests.programs import bits

OWG = "_overwrite_with_gradient"
MODEL = nn.Dense(4, dot_general_cls=nn.Fp8DirectDotGeneralOp, dtype=jnp.float16)
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float16)
WRAPPERS = {
  "loss_scaling": mpjax.loss_scaling,
  "master_weights": mpjax.master_weights,
  "accumulate": lambda inner: mpjax.accumulate_gradients(inner, 2),
}


def loss(variables, batch):
  return jnp.mean(jnp.square(MODEL.apply(variables, batch).astype(jnp.float32)))


def variables():
  return MODEL.init(jax.random.key(0), BATCH)


@pytest.mark.parametrize("name", WRAPPERS)
def test_float8_statistics_are_not_given_to_the_optimizer(name):
  # Adam moved them by a learning rate, in place of taking them over.
  expected, fix = "parameters that follow their gradients", "mpjax.select_tree(finite, grads"
  with refused(ValueError, ".init(params)", expected, f"at ['{OWG}']", fix):
    WRAPPERS[name](optax.adam(0.1)).init(variables())


@pytest.mark.case("A61", "B098")
def test_the_way_out_takes_them_over_and_a_skipped_step_does_not():
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(init_scale=2.0**10))
  start = variables()
  opt_state = tx.init(start["params"])

  @jax.jit
  def step(old, opt_state, batch):
    grads = mpjax.value_and_grad(loss, opt_state)(old, batch)[1]
    updates, opt_state = tx.update(grads["params"], opt_state, old["params"])
    finite = mpjax.loss_scaling_metrics(opt_state)["finite"]
    taken = mpjax.select_tree(finite, grads[OWG], old[OWG])
    return {"params": optax.apply_updates(old["params"], updates), OWG: taken}, opt_state, grads

  new, opt_state, grads = step(start, opt_state, BATCH)
  assert bits(new[OWG]) == bits(grads[OWG])
  assert bits(new[OWG]) != bits(start[OWG])
  again, opt_state, grads = step(new, opt_state, BATCH * jnp.float16(np.inf))
  assert not mpjax.loss_scaling_metrics(opt_state)["finite"]
  assert bits(again) == bits(new)


def test_the_train_state_of_flax_keeps_them_apart_by_itself():
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.StaticLossScale(2.0**10))
  state = TrainState.create(apply_fn=MODEL.apply, params=variables(), tx=tx)
  grads = mpjax.value_and_grad(loss, state.opt_state)(state.params, BATCH)[1]
  new = state.apply_gradients(grads=grads)
  assert bits(new.params[OWG]) == bits(grads[OWG])
  assert bits(new.params["params"]) != bits(state.params["params"])
