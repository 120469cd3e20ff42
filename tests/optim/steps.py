"""First training steps, and the parts of states and metrics that tests compare."""

import functools

import jax
import jax.numpy as jnp
import optax

import mpjax
from tests.optim.losses import squares
from tests.programs import bits

STATIC = mpjax.StaticLossScale(8)
SGD = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), STATIC)
UNIT_SGD = mpjax.loss_scaling(optax.sgd(1.0), STATIC)

PARAMS = {"w": jnp.ones(3), "x": jnp.ones(2)}
GOOD, BAD = PARAMS, {"w": jnp.ones(3), "x": jnp.asarray([0.0, jnp.nan])}
ADAM = mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(init_scale=4, growth_interval=2))


@jax.jit
def update(grads, state):
  return ADAM.update(grads, state, PARAMS)[1]


def after(*grads, state=None):
  """Returns the state of `ADAM` after these gradients, from the first one if none is given."""
  return functools.reduce(lambda s, g: update(g, s), grads, state or ADAM.init(PARAMS))


def create(tx, params=None, **options):
  return mpjax.TrainState.create(jnp.zeros(3) if params is None else params, tx, **options)


def begin(loss_fn, tx=SGD, params=None, model_state=(), rng=None, **options):
  state = create(tx, params, model_state=model_state, rng=rng)
  return mpjax.make_train_step(loss_fn, tx, **options), state


def without_scale(state):
  """Returns the parts of a state that a step commits: all but the loss scale and its counters."""
  return bits(state._replace(opt_state=state.opt_state.inner_state))


def chosen(metrics, *names):
  return [metrics[name].item() for name in names]


def one_step(tx, **options):
  step, state = begin(squares, tx, jnp.ones(3), donate=False, **options)
  return step(state, jnp.ones((2, 3)))


def gradients(loss_fn, batch, params=None, tx=UNIT_SGD, model_state=(), **options):
  """Returns the gradients, if it is from zero, the new state and the metrics of one step."""
  params = jnp.zeros(3) if params is None else params
  state = mpjax.TrainState.create(params, tx, model_state=model_state)
  state, metrics = mpjax.make_train_step(loss_fn, tx, **options)(state, batch)
  return jax.tree.map(lambda p: -p, state.params), state, jax.device_get(metrics)
