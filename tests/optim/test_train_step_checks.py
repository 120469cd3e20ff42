"""States and batches that a training step refuses."""

import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from mpjax._core.errors import kind_of
from tests.errors import refused
from tests.optim.losses import quadratic, rows
from tests.optim.steps import SGD, STATIC, create


def test_states_that_do_not_belong_to_the_step():
  state, batch, step = create(SGD), rows(8), mpjax.make_train_step(quadratic, SGD)
  for given in ({"params": jnp.zeros(3)}, (jnp.zeros(3), ())):
    fix = "mpjax.TrainState.create(params, tx)"
    with refused(TypeError, "step(state)", "a mpjax.TrainState", kind_of(given), fix):
      step(given, batch)
  with refused(
    TypeError, "step(state)", "a mpjax.TrainState", "a dict", "Swap the two: step(state"
  ):
    step(batch, state)
  two = mpjax.loss_scaling(optax.sgd(0.5), {"a": STATIC, "b": STATIC})
  for tx, expected, got, fix in (
    (optax.sgd(0.5), "created by mpjax.loss_scaling", "without a loss scale", "Wrap"),
    (two, "for one loss", "2 loss scale(s) inside of a LossScalingState", "value_and_grad"),
  ):
    with refused(TypeError, "mpjax.make_train_step(...): step(state)", expected, got, fix):
      mpjax.make_train_step(quadratic, tx)(state._replace(opt_state=tx.init(jnp.zeros(3))), batch)
  for kept, got in (
    (True, "ema_decay=None and an average"),
    (False, "ema_decay=0.5 and no average"),
  ):
    expected = "an average in the state exactly if ema_decay is given"
    fix = "TrainState.create(..., ema=True) together with make_train_step(ema_decay=0.999)"
    step = mpjax.make_train_step(quadratic, SGD, ema_decay=None if kept else 0.5)
    with refused(ValueError, "step(state): ema", expected, got, fix):
      step(create(SGD, ema=kept), batch)
  expected, got = "0 with a constant loss scale", "2 with 'static(scale=8)'"
  with refused(ValueError, "(max_retries)", expected, got, "Use DynamicLossScale"):
    mpjax.make_train_step(quadratic, SGD, max_retries=2)(state, batch)
  where = "mpjax.make_train_step(rounding='stochastic'): step(state)"
  fix = "TrainState.create(..., rng=jax.random.key(0))"
  with refused(ValueError, where, "a PRNG key in the state", "None for rng", fix):
    mpjax.make_train_step(quadratic, SGD, rounding="stochastic")(state, batch)


def test_a_batch_that_cannot_be_cut():
  # Class weights lost their last classes, and a causal mask its last rows, with a finite loss.
  zeros, where = np.zeros, "mpjax.make_train_step(micro_batches=4): step(batch)"
  cut, drop = "which can be cut into 4 micro-batches", "drop or pad the last batch"
  one_axis = "leaves with one first axis, that of the examples"
  for batch, expected, got, fix in (
    (zeros(6), cut, "shape [6] at the root", drop),
    ({"x": zeros((8, 3)), "n": 3}, cut, "shape [] at ['n']", drop),
    ({"x": zeros((16, 3)), "y": zeros((8, 8))}, one_axis, "shape [8, 8] at ['y']", "close over"),
  ):
    with refused(ValueError, where, expected, got, fix):
      mpjax.make_train_step(quadratic, SGD, micro_batches=4)(create(SGD), batch)
