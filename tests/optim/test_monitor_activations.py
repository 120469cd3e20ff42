import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused

pytestmark = pytest.mark.standard_promotion("dtypes")

PARAMS = {"w": jnp.ones(3)}


def test_it_changes_no_update():
  plain = mpjax.loss_scaling(optax.adam(0.1))
  tx = mpjax.monitor_activations(plain, "layer")
  grads = {"w": jnp.asarray([1.0, -2.0, 3.0])}
  updates, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
  wanted, inner = jax.jit(plain.update)(grads, plain.init(PARAMS), PARAMS)
  jax.tree.map(np.testing.assert_array_equal, (updates, state.inner_state), (wanted, inner))


def test_there_are_no_statistics_before_the_first_sample():
  state = mpjax.monitor_activations(optax.sgd(0.1), ["a", "b/*"]).init(PARAMS)
  statistics = mpjax.states.activation_statistics(state)
  assert list(statistics) == ["a", "b/*"]
  assert tuple(map(float, statistics["a"])) == (0, 0, 0, 0, np.inf)


def test_states_are_found_inside_and_around():
  inside = mpjax.loss_scaling(mpjax.monitor_activations(optax.sgd(0.1), "a"))
  around = mpjax.monitor_activations(mpjax.loss_scaling(optax.trace(0.9)), "a")
  for tx in (inside, around, optax.chain(optax.clip(1.0), around)):
    assert list(mpjax.states.activation_statistics(tx.init(PARAMS))) == ["a"]
  assert isinstance(mpjax.states.inner_state(around.init(PARAMS)), optax.TraceState)


def test_a_train_step_takes_it():
  scaled = mpjax.loss_scaling(optax.sgd(0.5), mpjax.SkipNonfinite())
  tx = mpjax.monitor_activations(scaled, "layer")

  def loss_fn(params, model_state, batch, rng):
    with jax.named_scope("layer"):
      x = params["w"] * batch
    return jnp.sum(x), (model_state, {})

  step = mpjax.make_train_step(loss_fn, tx, donate=False)

  @jax.jit
  def sampled(state, batch):
    sample = mpjax.sample_activations(loss_fn, state.opt_state)
    opt_state = sample(state.params, state.model_state, batch, None)
    return step(state._replace(opt_state=opt_state), batch)

  state, _ = sampled(mpjax.TrainState.create(PARAMS, tx), jnp.full(3, 7.0))
  assert mpjax.states.activation_statistics(state)["layer"].largest == 7
  assert state.params["w"].tolist() == [-2.5, -2.5, -2.5]


def test_errors():
  sgd = optax.sgd(0.1)
  where = "mpjax.monitor_activations(modules)"
  for modules, kind, got in (([], ValueError, "none"), ([3], TypeError, "3")):
    with refused(kind, where, "glob", got, "modules="):
      mpjax.monitor_activations(sgd, modules)
  with refused(ValueError, where, "glob", "'a//b'", "double slash"):
    mpjax.monitor_activations(sgd, "a//b")
  with refused(ValueError, "mpjax.monitor_activations(every)", "at least 1", "0", "each step"):
    mpjax.monitor_activations(sgd, "a", every=0)
  tx = mpjax.monitor_activations(sgd, "a")
  where = "mpjax.monitor_activations(inner).update(state)"
  with refused(TypeError, where, "the state that init created", "tuple", "init"):
    tx.update(PARAMS, sgd.init(PARAMS), PARAMS)
