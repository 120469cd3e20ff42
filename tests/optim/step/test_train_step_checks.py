"""States and batches that a training step refuses."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._core.errors import kind_of
from tests.errors import refused
from tests.optim.losses import quadratic, rows
from tests.optim.steps import SGD, STATIC, create

CREATE = "mpjax.TrainState.create(params, tx)"
STEP = "mpjax.make_train_step(...): step(state)"
IS_STATE, ONE_LOSS = "a mpjax.TrainState", "for one loss"
SCALED = "created by mpjax.loss_scaling"
TWO = mpjax.loss_scaling(optax.sgd(0.5), {"a": STATIC, "b": STATIC})
BATCH = rows(8)


def step_with(**options):
  """Returns a step with these options."""
  return mpjax.make_train_step(quadratic, SGD, **options)


def of_optimizer(tx):
  """Takes a step of an optimizer, from a state that cannot be created with it."""
  state = create(SGD)._replace(opt_state=tx.init(jnp.zeros(3)))
  return mpjax.make_train_step(quadratic, tx)(state, BATCH)


CONSTANT = "0 with a constant loss scale"

REFUSED = {
  "a dict": (
    lambda: step_with()({"params": jnp.zeros(3)}, BATCH),
    (TypeError, "step(state)", IS_STATE, kind_of({}), CREATE),
  ),
  "a tuple": (
    lambda: step_with()((jnp.zeros(3), ()), BATCH),
    (TypeError, "step(state)", IS_STATE, kind_of(()), CREATE),
  ),
  "batch and state swapped": (
    lambda: step_with()(BATCH, create(SGD)),
    (TypeError, "step(state)", IS_STATE, "a dict", "Swap the two: step(state"),
  ),
  "no loss scale": (
    lambda: of_optimizer(optax.sgd(0.5)),
    (TypeError, STEP, SCALED, "without a loss scale", "Wrap"),
  ),
  "two loss scales": (
    lambda: of_optimizer(TWO),
    (TypeError, STEP, ONE_LOSS, "2 loss scale(s) inside of a LossScalingState", "mpjax.scaled"),
  ),
  "retries at a constant scale": (
    lambda: step_with(max_retries=2)(create(SGD), BATCH),
    (ValueError, "(max_retries)", CONSTANT, "2 with 'static(scale=8)'", "Use DynamicLossScale"),
  ),
}
"""Steps that are refused, and their errors."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_belong_to_the_step(case):
  take_step, error = REFUSED[case]
  with refused(*error):
    take_step()


CUT, DROP = "which can be cut into 4 micro-batches", "drop or pad the last batch"
ONE_AXIS = "leaves with one first axis, that of the examples"
ZEROS = np.zeros
UNEVEN = {
  "too few rows": (ZEROS(6), CUT, "shape [6] at the root", DROP),
  "a number": ({"x": ZEROS((8, 3)), "n": 3}, CUT, "shape [] at ['n']", DROP),
  "class weights": (
    {"x": ZEROS((16, 3)), "y": ZEROS((8, 8))},
    *(ONE_AXIS, "shape [8, 8] at ['y']", "close over"),
  ),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_a_batch_that_cannot_be_cut(case):
  # Class weights lost their last classes, and a causal mask its last rows, with a finite loss.
  batch, *error = UNEVEN[case]
  with refused(ValueError, "mpjax.make_train_step(micro_batches=4): step(batch)", *error):
    mpjax.make_train_step(quadratic, SGD, micro_batches=4)(create(SGD), batch)
