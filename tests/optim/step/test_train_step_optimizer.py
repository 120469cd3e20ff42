"""Optimizers that a training step cannot call, and states of other optimizers."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.optim.losses import squares
from tests.optim.steps import one_step


def test_moments_that_would_change_their_dtype():
  inner = optax.GradientTransformation(
    lambda params: jnp.zeros_like(params, jnp.bfloat16), lambda g, state, params=None: (g, g)
  )
  tx = mpjax.loss_scaling(inner, mpjax.NoLossScale())
  where = "mpjax.make_train_step(tx): the state of the optimizer"
  expected, got = "dtypes that it had before the step", "float32[3] for bfloat16[3]"
  with refused(ValueError, where, expected, got, "mpjax.master_weights"):
    one_step(tx)


SCALED_SGD, SCALED_ADAM = (mpjax.loss_scaling(tx) for tx in (optax.sgd(0.1), optax.adam(0.1)))
OTHERS = {
  "plain sgd": (optax.sgd(0.1), SCALED_SGD),
  "plain momentum": (optax.sgd(0.1, momentum=0.9), SCALED_SGD),
  "plain adam": (optax.adam(0.1), SCALED_SGD),
  # A scaled sgd has an empty inner state, and passes on any other.
  "scaled sgd": (SCALED_SGD, SCALED_ADAM),
}


@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn .* float16")
@pytest.mark.parametrize("other", OTHERS)
def test_an_optimizer_that_did_not_make_the_state(other):
  # A plain sgd accepts the state of a scaled one, and would never unscale.
  tx, own = OTHERS[other]
  where, got = "mpjax.make_train_step(tx): step(state)", "or of other parameters: "
  expected = "the state that init of this very transformation created"
  with refused(TypeError, where, expected, got, "wrapped by mpjax.loss_scaling and configured"):
    mpjax.make_train_step(squares, tx)(mpjax.TrainState.create(jnp.ones(3), own), jnp.ones((2, 3)))


EVALUATING = {
  "lbfgs": (optax.lbfgs, "missing 2 required keyword-only arguments"),
  "line search": (
    lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    "missing",
  ),
  "opaque sam": (
    lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
    "grad_fn must be provided",
  ),
  "dpsgd": (
    lambda: optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)),
    "updates with shape [] for",
  ),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", EVALUATING)
def test_optimizers_that_evaluate_the_loss_themselves(kind):
  make, got = EVALUATING[kind]
  where, fix = (
    "mpjax.make_train_step(tx): tx.update",
    "in a loop of your own: jax.value_and_grad(mpjax.scaled(",
  )
  expected = "an optimizer that needs the parameters, the gradients of the mean loss and value="
  with refused(TypeError, where, expected, got, fix):
    one_step(mpjax.loss_scaling(make(), mpjax.StaticLossScale(8)))
