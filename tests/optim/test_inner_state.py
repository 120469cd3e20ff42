"""`mpjax.states.inner_state`: the state that functions of optax take."""

from collections.abc import Mapping

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


def of_nnx(tx):
  """Returns an optimizer of a model that stores parameters in bfloat16."""
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
  return nnx.Optimizer(model, tx, wrt=nnx.Param)


FORMS = {
  "nnx.Optimizer": lambda optimizer: optimizer,
  "its state": lambda optimizer: optimizer.opt_state,
  "nnx.State": nnx.state,
  "nnx.State beside the model's": lambda o: nnx.state((nnx.Linear(2, 1, rngs=nnx.Rngs(0)), o)),
  "pure nnx.State": lambda optimizer: nnx.as_pure(nnx.state(optimizer)),
  "pure dict": lambda optimizer: nnx.to_pure_dict(nnx.state(optimizer)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_states_are_found_in_any_form(form, inner):
  optimizer = of_nnx(mpjax.monitor(mpjax.loss_scaling(mpjax.master_weights(inner))))
  state = FORMS[form](optimizer)
  masters = mpjax.states.master_params(state)
  assert {key: (x.dtype, x.shape) for key, x in masters.items()} == {
    "kernel": (np.float32, (2, 1)),
    "bias": (np.float32, (1,)),
  }
  assert set(mpjax.states.monitor_counts(state)) == {"kernel", "bias"}


@pytest.mark.parametrize("form", [form for form in FORMS if "beside" not in form])
def test_the_inner_state_of_an_optimizer_of_nnx_holds_arrays(form):
  adam = mpjax.states.inner_state(
    FORMS[form](of_nnx(mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1)))))
  )[0]
  mu = adam["mu"] if isinstance(adam, Mapping) else adam.mu
  assert [type(x) for x in mu.values()] == [type(jnp.ones(1))] * 2


def test_the_inner_state_of_a_train_state():
  state = mpjax.TrainState.create(PARAMS, mpjax.loss_scaling(optax.adam(0.1)))
  assert mpjax.states.inner_state(state)[0].mu["w"].shape == (3,)
