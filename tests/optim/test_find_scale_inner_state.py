"""`mpjax.states.inner_state`: the state that functions of optax take."""

from collections.abc import Mapping

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax._optim import states
from tests.optim.wrapped import WRAPPERS

SCHEDULE_FREE = optax.contrib.schedule_free_sgd(0.5)
PARAMS = {"w": jnp.asarray([1.0, -2.0, 0.25])}


def train(tx, params):
  """Returns parameters and state after three steps."""
  opt_state = tx.init(params)
  for _ in range(3):
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 4))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = mpjax.apply_updates(params, updates, opt_state)
  return params, opt_state


@pytest.mark.slow
@pytest.mark.parametrize(
  "tx",
  {
    "no wrapper": SCHEDULE_FREE,
    "no scale": mpjax.loss_scaling(SCHEDULE_FREE, mpjax.NoLossScale()),
    "all": mpjax.monitor(
      mpjax.loss_scaling(
        mpjax.master_weights(mpjax.accumulate_gradients(SCHEDULE_FREE, 1)), mpjax.SkipNonfinite()
      )
    ),
  }.values(),
)
def test_schedule_free_evaluates_with_the_inner_state(tx):
  params, opt_state = train(tx, PARAMS)
  inner = mpjax.states.inner_state(opt_state)
  found = optax.contrib.schedule_free_eval_params(inner, params)
  params, opt_state = train(SCHEDULE_FREE, PARAMS)
  expected = optax.contrib.schedule_free_eval_params(opt_state, params)
  np.testing.assert_array_equal(found["w"], expected["w"])


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_inner_state_of_each_wrapper_is_that_of_the_optimizer(wrap):
  adam = optax.adam(0.1)
  found = mpjax.states.inner_state(wrap(adam).init(PARAMS))
  assert jax.tree.structure(found) == jax.tree.structure(adam.init(PARAMS))


def test_masters_are_the_parameters_of_a_16_bit_model():
  half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  tx = mpjax.loss_scaling(mpjax.master_weights(SCHEDULE_FREE), mpjax.SkipNonfinite())
  _, opt_state = train(tx, half)
  inner, masters = mpjax.states.inner_state(opt_state), mpjax.states.master_params(opt_state)
  found = optax.contrib.schedule_free_eval_params(inner, masters)["w"]
  assert found.dtype == jnp.float32
  # The trained parameters are y = (1 - b1) z + b1 x, so that x = (y - (1 - b1) z) / b1.
  z, y, b1 = np.float64(inner.z["w"]), np.float64(masters["w"]), float(inner.b1)
  np.testing.assert_allclose(found, (y - (1 - b1) * z) / b1, rtol=1e-5)


def of_nnx(tx, dtype=jnp.bfloat16):
  """Returns an optimizer of a model that stores parameters in a dtype."""
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0), param_dtype=dtype)
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
def test_states_are_found_in_any_form(form):
  optimizer = of_nnx(mpjax.monitor(mpjax.loss_scaling(mpjax.master_weights(optax.sgd(0.1)))))
  state = FORMS[form](optimizer)
  masters = mpjax.states.master_params(state)
  assert {key: (x.dtype, x.shape) for key, x in masters.items()} == {
    "kernel": (np.float32, (2, 1)),
    "bias": (np.float32, (1,)),
  }
  assert set(mpjax.states.monitor_counts(state)) == {"kernel", "bias"}


def test_states_are_found_in_the_parts_of_a_multi_transform():
  masters = mpjax.master_weights(optax.sgd(0.1))

  def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: str("kernel" in str(path)), params)

  tx = optax.multi_transform({"True": masters, "False": masters}, labels)
  state = nnx.state(of_nnx(mpjax.loss_scaling(tx)))
  assert mpjax.states.master_params(state)["kernel"].shape == (2, 1)


def test_states_are_found_in_the_state_dict_of_a_chain():
  chain = optax.chain(optax.clip(1.0), mpjax.master_weights(optax.sgd(0.1)))
  params = {"w": jnp.ones(2, jnp.bfloat16)}
  state = flax.serialization.to_state_dict(mpjax.loss_scaling(chain).init(params))
  assert mpjax.states.master_params(state)["w"].dtype == jnp.float32


def test_parameters_with_the_names_of_fields_are_no_states():
  params = {"master": {"counts": jnp.ones(2, jnp.bfloat16)}}
  state = flax.serialization.to_state_dict(optax.adam(0.1).init(params))
  for call in (mpjax.states.master_params, mpjax.states.monitor_counts):
    with pytest.raises(TypeError, match="got a dict without"):
      call(state)


def test_the_inner_state_ends_at_a_wrapper_of_optax():
  tx = mpjax.loss_scaling(optax.inject_hyperparams(optax.adam)(learning_rate=0.25))
  for form in ("nnx.Optimizer", "pure dict"):
    inner = mpjax.states.inner_state(FORMS[form](of_nnx(tx, jnp.float32)))
    hyperparams = inner["hyperparams"] if isinstance(inner, Mapping) else inner.hyperparams
    assert hyperparams["learning_rate"] == 0.25


def test_the_inner_state_inside_of_masters_may_hold_nothing():
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(0.1)))
  assert jax.tree.leaves(mpjax.states.inner_state(nnx.state(of_nnx(tx)))) == []


@pytest.mark.parametrize("form", [form for form in FORMS if "beside" not in form])
def test_the_inner_state_of_an_optimizer_of_nnx_holds_arrays(form):
  adam = mpjax.states.inner_state(
    FORMS[form](of_nnx(mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1)))))
  )[0]
  mu = adam["mu"] if isinstance(adam, Mapping) else adam.mu
  assert [type(x) for x in mu.values()] == [type(jnp.ones(1))] * 2


def test_the_inner_state_of_a_train_state_whose_moments_are_rounded_stochastically():
  inner = mpjax.state_dtype(optax.adam(0.1), mu="bfloat16", rounding="stochastic")
  state = mpjax.TrainState.create(PARAMS, mpjax.loss_scaling(inner))
  assert mpjax.states.inner_state(state)[0].mu["w"].dtype == jnp.bfloat16


WRAPPED = [x for x in vars(states).values() if "inner_state" in getattr(x, "_fields", ())]


@pytest.mark.parametrize("kind", WRAPPED)
def test_the_state_of_every_wrapper_is_passed_through(kind):
  moment = jnp.ones(2)
  others = dict.fromkeys(kind._fields, jnp.zeros(2))
  state = kind(**{**others, "inner_state": {"moment": moment}})
  assert mpjax.states.inner_state(state)["moment"] is moment
