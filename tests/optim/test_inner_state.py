"""`mpjax.states.inner_state`: the state that functions of optax take."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax

SCHEDULE_FREE = optax.contrib.schedule_free_sgd(0.5)
PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.25])}


def wrapped_in(name):
  """Returns an optimizer in a wrapper of mpjax, or in several."""
  wrap = {
    "nothing": lambda tx: tx,
    "loss_scaling": lambda tx: mpjax.loss_scaling(tx, mpjax.SkipNonfinite()),
    "NoLossScale": lambda tx: mpjax.loss_scaling(tx, mpjax.NoLossScale()),
    "master_weights": mpjax.master_weights,
    "monitor": mpjax.monitor,
    "accumulate_gradients": lambda tx: mpjax.accumulate_gradients(tx, 1),
    "all": lambda tx: mpjax.monitor(
      mpjax.loss_scaling(
        mpjax.master_weights(mpjax.accumulate_gradients(tx, 1)), mpjax.SkipNonfinite()
      )
    ),
  }[name]
  return wrap(SCHEDULE_FREE)


def train(tx, params):
  """Returns parameters and state after three steps."""
  opt_state = tx.init(params)
  for _ in range(3):
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 4))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = mpjax.apply_updates(params, updates, opt_state)
  return params, opt_state


WRAPPERS = (
  *("nothing", "loss_scaling", "NoLossScale", "master_weights", "monitor"),
  *("accumulate_gradients", "all"),
)


@pytest.mark.parametrize("name", WRAPPERS)
def test_schedule_free_evaluates_with_the_inner_state(name):
  params, opt_state = train(wrapped_in(name), PARAMS)
  inner = mpjax.states.inner_state(opt_state)
  found = optax.contrib.schedule_free_eval_params(inner, params)
  params, opt_state = train(SCHEDULE_FREE, PARAMS)
  expected = optax.contrib.schedule_free_eval_params(opt_state, params)
  np.testing.assert_array_equal(found["w"], expected["w"])


def test_masters_are_the_parameters_of_a_16_bit_model():
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  tx = mpjax.loss_scaling(mpjax.master_weights(SCHEDULE_FREE), mpjax.SkipNonfinite())
  _, opt_state = train(tx, half)
  inner, masters = mpjax.states.inner_state(opt_state), mpjax.states.master_params(opt_state)
  found = optax.contrib.schedule_free_eval_params(inner, masters)["w"]
  assert found.dtype == jnp.float32
  # y = (1 - b1) z + b1 x is what is trained, so x = (y - (1 - b1) z) / b1.
  z, y, b1 = np.float64(inner.z["w"]), np.float64(masters["w"]), float(inner.b1)
  np.testing.assert_allclose(found, (y - (1 - b1) * z) / b1, rtol=1e-5)


def test_the_state_of_an_optimizer_of_nnx_and_of_a_train_state():
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  tx = mpjax.loss_scaling(optax.adam(0.1))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  for given in (optimizer, nnx.state(optimizer), optimizer.opt_state):
    adam = mpjax.states.inner_state(given)[0]
    mu = adam["mu"] if isinstance(adam, dict) or hasattr(adam, "raw_mapping") else adam.mu
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(mu))
  state = mpjax.TrainState.create(PARAMS, tx)
  assert mpjax.states.inner_state(state)[0].mu["w"].shape == (3,)
