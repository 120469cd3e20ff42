"""What a step refuses before it is traced. The arguments' own errors are in test_train_step.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.programs import compilations


def loss_fn(params, model_state, batch, rng):
  return jnp.mean((batch @ params.astype(batch.dtype)) ** 2), (model_state, {})


def one_step(tx, **options):
  state = mpjax.TrainState.create(jnp.ones(3), tx)
  return mpjax.make_train_step(loss_fn, tx, donate=False, **options)(state, jnp.ones((2, 3)))


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_half_moments_without_a_scale_stay_half():
  # The optimizer sees half parameters as they are, and float32 gradients.
  tx = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), mpjax.NoLossScale())
  state = mpjax.TrainState.create(jnp.ones(3, jnp.bfloat16), tx)
  assert state.opt_state.inner_state[0].trace.dtype == jnp.bfloat16
  step = mpjax.make_train_step(loss_fn, tx, donate=False)
  with compilations() as compiled:
    for _ in range(2):
      before, (state, _) = state, step(state, jnp.ones((2, 3)))
      old, trace = (s.opt_state.inner_state[0].trace for s in (before, state))
      gradient = 2 * jnp.sum(before.params.astype(jnp.float32))
      expected = gradient + 0.5 * old.astype(jnp.float32)
      assert jnp.array_equal(trace, expected.astype(jnp.bfloat16))
      moved = before.params.astype(jnp.float32) - 0.5 * expected
      assert jnp.array_equal(state.params, moved.astype(jnp.bfloat16))
  assert compiled["train_step"] == 1


def test_moments_that_would_change_their_dtype():
  inner = optax.GradientTransformation(
    lambda params: jnp.zeros_like(params, jnp.bfloat16), lambda g, state, params=None: (g, g)
  )
  tx = mpjax.loss_scaling(inner, mpjax.NoLossScale())
  where = "mpjax.make_train_step(tx): the state of the optimizer"
  expected, got = "dtypes that it had before the step", "float32[3] for bfloat16[3]"
  with refused(ValueError, where, expected, got, "mpjax.master_weights"):
    one_step(tx)


@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn .* float16")
def test_an_optimizer_that_did_not_make_the_state():
  # Of an unwrapped sgd both accept the other: it would never unscale.
  state = mpjax.TrainState.create(jnp.ones(3), mpjax.loss_scaling(optax.sgd(0.1)))
  for tx in (optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1)):
    where, got = "mpjax.make_train_step(tx): step(state)", "one of another optimizer: "
    expected = "the state that init of this very transformation created"
    with refused(TypeError, where, expected, got, "wrapped by mpjax.loss_scaling and configured"):
      mpjax.make_train_step(loss_fn, tx)(state, jnp.ones((2, 3)))


SGD = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(8))
CUT = "mpjax.make_train_step(accumulate=4): step(batch)"
LINE_SEARCH = optax.scale_by_backtracking_linesearch(5)


@pytest.mark.standard_promotion
def test_optimizers_that_evaluate_the_loss_themselves():
  where, fix = "mpjax.make_train_step(tx): tx.update", "in a loop of your own: mpjax.value_and_grad"
  expected = "an optimizer that needs the parameters, the gradients of the mean loss and value="
  for inner, got in (
    (optax.lbfgs(), "missing 2 required keyword-only arguments"),
    (optax.chain(optax.sgd(1.0), LINE_SEARCH), "missing"),
    (
      optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), opaque_mode=True),
      "grad_fn must be provided",
    ),
    (
      optax.contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0)),
      "updates with shape [] for",
    ),
  ):
    with refused(TypeError, where, expected, got, fix):
      one_step(mpjax.loss_scaling(inner, mpjax.StaticLossScale(8)))


def test_shardings_of_the_state():
  # Of another structure JAX says so; and one for all of it.
  with pytest.raises(ValueError, match="out_shardings"):
    one_step(SGD, state_shardings={"a": None})
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  state, _ = one_step(SGD, state_shardings=one)
  assert {x.sharding for x in jax.tree.leaves(state)} == {one}


def test_what_has_another_first_axis_is_not_cut_into_micro_batches():
  # Class weights lost their last classes, and a causal mask its last rows, with a finite loss.
  loss = lambda params, state, batch, rng: (jnp.sum(params), (state, {}))  # noqa: E731
  whole, cut = (mpjax.make_train_step(loss, SGD, accumulate=n) for n in (1, 4))
  state = mpjax.TrainState.create(jnp.ones(3), SGD)
  for name, rows in (("weights", 4), ("mask", 8), ("labels", 32)):
    batch = {"x": np.ones((16, 3), np.float32), name: np.ones((rows, 8), np.float32)}
    jax.eval_shape(whole, state, batch)
    expected = "leaves with one first axis, that of the examples"
    got = f"shape [{rows}, 8] at ['{name}']"
    with refused(ValueError, CUT, expected, got, "Let loss_fn close over what belongs to all"):
      jax.eval_shape(cut, state, batch)


def test_the_state_comes_first():
  state = mpjax.TrainState.create(jnp.ones(3), SGD)
  where, expected = "mpjax.make_train_step(...): step(state)", "a mpjax.TrainState"
  with refused(TypeError, where, expected, "a dict", "Swap the two: step(state, batch)"):
    mpjax.make_train_step(loss_fn, SGD)({"x": jnp.ones(3)}, state)
