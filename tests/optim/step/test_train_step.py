"""The all-in-one step: what it computes, donates, warns of and refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.optim.losses import loss_of, quadratic, rows, squares
from tests.optim.steps import SGD, STATIC, begin, chosen, one_step, without_scale
from tests.programs import bits, compilations, stored

SKIPPED = "mpjax.check_skipped_steps"


def test_against_numpy():
  # Loss, norm and momentum of five steps, in float64.
  step, state = begin(quadratic, params=jnp.asarray([1.0, -2.0, 0.5]))
  x, y = (rows(8)[key].astype(np.float64) for key in "xy")
  params, momentum = np.asarray([1, -2, 0.5]), np.zeros(3)
  for count in range(5):
    error = x @ params - y
    grads = x.T @ error / 8
    state, metrics = step(state, rows(8))
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["worst"], np.max(np.abs(error)), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(np.sum(grads**2)), rtol=1e-6)
    momentum = 0.5 * momentum + grads
    params = params - 0.5 * momentum
    np.testing.assert_allclose(state.params, params, rtol=1e-5)
    assert state.step == count + 1
  assert {metrics[name].dtype for name in ("loss", "grad_norm")} == {jnp.dtype(jnp.float32)}
  assert "retries" not in metrics


def test_numbers_of_a_skipped_step_are_reported_as_they_are():
  # Parameters keep their bits: XLA for CPU flushes subnormals when it adds, even -0.0.
  params = jnp.asarray(np.float32([1e-40, 1, -1e-40]))
  step, start = begin(quadratic, params=params, donate=False)
  for bad in (np.nan, np.inf, -np.inf):
    x = rows(8)["x"].copy()
    x[3, 1] = bad
    state, metrics = step(start, rows(8) | {"x": x})
    assert not np.isfinite(chosen(metrics, "loss", "grad_norm")).any()
    assert chosen(metrics, "finite", "skipped", "loss_scale") == [False, 1, 8]
    assert without_scale(state) == without_scale(start)
  assert not any(x.is_deleted() for x in jax.tree.leaves(start)), "it was not donated"


def test_without_scaling_nothing_is_checked():
  # NoLossScale: plain optax in one call; a NaN is applied, as it is there.
  tx = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), mpjax.NoLossScale())
  step, state = begin(quadratic, tx, micro_batches=2)
  scaled_step, scaled = begin(quadratic, micro_batches=2)
  state, metrics = step(state, rows(8))
  assert without_scale(state) == without_scale(scaled_step(scaled, rows(8))[0])
  assert chosen(metrics, "finite", "total", "loss_scale") == [True, 1, 1]
  state, metrics = step(state, rows(8) | {"x": rows(8)["x"] * np.nan})
  assert state.step == 2
  assert np.all(np.isnan(state.params))


@pytest.mark.standard_promotion
def test_masters_may_be_around_the_scale():
  tx = mpjax.master_weights(mpjax.loss_scaling(optax.sgd(0.5), STATIC))
  step, state = begin(quadratic, tx, jnp.ones(3, jnp.bfloat16))
  state, metrics = step(state, rows(8))
  assert metrics["finite"]
  assert bits(state.params) == bits(
    stored(mpjax.states.master_params(state.opt_state), jnp.bfloat16)
  )


def test_parameters_are_set_to_masters_that_no_addition_reaches():
  # -0.0 is not 1 + (-0.0 - 1), and a float32 sum of 2^60 and anything is not 1.
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(0.5)), STATIC)
  loss_fn = loss_of(lambda params, batch: jnp.sum(params.astype(jnp.float32)) * 0)
  step, state = begin(loss_fn, tx, jnp.asarray([1.0, 2.0**60], jnp.bfloat16))
  opt_state = mpjax.states.set_master_params(state.opt_state, jnp.asarray([-0.0, 1.0]))
  state, _ = step(state._replace(opt_state=opt_state), jnp.zeros(1))
  assert bits(state.params) == bits(jnp.asarray([-0.0, 1.0], jnp.bfloat16))


ALIASING = {"adamw": functools.partial(optax.adamw, 1e-2), "prodigy": optax.contrib.prodigy}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ALIASING)
def test_donation(name):
  # The old state is gone and the caller's arrays are not; no buffer is given away twice, and none
  # in vain (JAX warns of that, which is an error here).
  tx = mpjax.loss_scaling(mpjax.master_weights(ALIASING[name]()), STATIC)

  def loss_fn(params, model_state, batch, rng):
    w = sum(p.astype(jnp.float32) for p in params.values())
    loss = jnp.mean((batch @ w) ** 2) + jax.random.uniform(rng)
    return loss, (jax.tree.map(lambda s: s * 0.5, model_state), {})

  rng, stats = jax.random.key(0), jnp.ones(2)
  wide, half = jnp.ones((4, 3)), jnp.ones((4, 3), jnp.bfloat16)
  params = {"w": wide, "tied": wide, "h": half, "tied half": half}
  step, state = begin(loss_fn, tx, params, model_state=(stats, stats), rng=rng)
  old = state
  for factor in (1.0, np.nan, 1.0):
    state, metrics = step(state, jnp.full((8, 4), factor))
  assert metrics["skipped"] == 1
  left = [jax.tree_util.keystr(k) for k, x in jax.tree.leaves_with_path(old) if not x.is_deleted()]
  # JAX does not pass on arguments that nothing reads: what the last step left for the host.
  assert {path.rpartition(".")[2] for path in left} == {"first_bad", "finite"}
  assert not any(x.is_deleted() for x in jax.tree.leaves((params, rng, stats)))
  with pytest.raises((RuntimeError, ValueError), match="deleted"):
    step(old, jnp.ones((8, 4)))


def plain_half(x):
  return jnp.sum(x.astype(jnp.float16)).astype(jnp.float32)


@jax.custom_vjp
def backward_in_float16(x):
  return jnp.sum(x)


backward_in_float16.defvjp(
  lambda x: (jnp.sum(x), x), lambda x, ct: ((ct * x.astype(jnp.float16).astype(jnp.float32)),)
)
INSIDE = {
  "the open": plain_half,
  "scan": lambda x: jax.lax.scan(lambda c, y: (c + plain_half(y[None]), None), 0.0, x)[0],
  "the backward pass of the user": backward_in_float16,
  "no place": jnp.sum,
  "bfloat16": lambda x: jnp.sum(x.astype(jnp.bfloat16)).astype(jnp.float32),
}
"""Losses with float16 somewhere inside, but for the last two."""


@pytest.mark.parametrize("how", INSIDE)
def test_a_dynamic_scale_without_float16(how):
  # One warning, when the step is traced, and no more.
  def of(config):
    loss_fn = loss_of(lambda params, batch: INSIDE[how](params))
    return begin(loss_fn, mpjax.loss_scaling(optax.sgd(0.5), config))

  step, state = of(mpjax.DynamicLossScale())
  if how in ("no place", "bfloat16"):
    with pytest.warns(UserWarning, match=r"nothing in loss_fn .* float16") as found:
      state, _ = step(state, jnp.ones(2))
    (warning,) = found
    for word in ("mpjax.make_train_step", "NoLossScale()", "SkipNonfinite()"):
      assert word in str(warning.message)
  step(state, jnp.ones(2))  # Another warning would be an error.
  for config in (STATIC, mpjax.NoLossScale()):
    jax.eval_shape(*of(config), jnp.ones(2))


@pytest.mark.parametrize(
  ("name", "value", "builtin", "expected", "got", "fix"),
  [
    ("loss_fn", 3, TypeError, "a function", "3", "Pass the function"),
    ("tx", optax.sgd, TypeError, "an optax transformation", "a function", "mpjax.loss_scaling("),
    ("micro_batches", 2.0, TypeError, "an integer", "2.0 of type float", "a Python int"),
    ("max_retries", True, TypeError, "an integer", "True of type bool", "a Python int"),
    ("donate", 1, TypeError, "a bool", "1 of type int", "True or False"),
    ("micro_batches", 0, ValueError, "at least 1", "0", "Pass 1 to keep"),
    ("max_retries", -1, ValueError, "at least 0", "-1", "Pass 0 to disable"),
  ],
)
def test_bad_arguments(name, value, builtin, expected, got, fix):
  with refused(builtin, f"mpjax.make_train_step({name})", expected, got, fix):
    mpjax.make_train_step(**{"loss_fn": quadratic, "tx": SGD, name: value})


@pytest.mark.parametrize("scale", [STATIC, mpjax.NoLossScale()])
def test_the_loss_is_passed_as_value_alone(scale):
  takes = lambda u, _, params=None, *, value, loss=0.0, **rest: (u, value + loss)  # noqa: E731
  inner = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), takes)
  step, state = begin(quadratic, mpjax.loss_scaling(inner, scale))
  state, metrics = step(state, rows(8))
  assert state.opt_state.inner_state == metrics["loss"]


MASK = jnp.asarray([[0.0, -np.inf], [np.nan, 0.0]])


def with_constants(params, old, batch, rng):
  """A mask that is only read, the best loss so far, and a running mean."""
  kept = jnp.where(jnp.isfinite(old["mask"]), batch @ params, 0)
  loss = jnp.mean(kept**2)
  new = old | {"best": jnp.minimum(old["best"], loss), "mean": old["mean"] * 0.5 + jnp.mean(batch)}
  return loss, (new, {})


def constants():
  return {"mask": MASK, "best": jnp.float32(np.inf), "low": jnp.float32(-np.inf), "mean": 0.0}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_was_infinite_before_skips_no_step(micro_batches):
  # Whether it is passed through or computed anew.
  def loss_fn(params, old, batch, rng):
    same, copied = old
    copied = copied | {"mask": copied["mask"] * 1.0, "low": jnp.maximum(copied["low"], -jnp.inf)}
    loss, (same, _) = with_constants(params, same, batch, rng)
    return loss, ((same, with_constants(params, copied, batch, rng)[1][0]), {})

  params, both = jnp.full((2, 2), 0.5), (constants(), constants())
  step, state = begin(loss_fn, params=params, model_state=both, micro_batches=micro_batches)
  for count in range(1, 4):
    state, metrics = step(state, jnp.ones((2 * micro_batches, 2)))
    assert metrics["finite"]
    assert state.step == count
  for kept in state.model_state:
    np.testing.assert_array_equal(kept["mask"], MASK)
    assert np.isfinite(kept["best"])
  mpjax.check_skipped_steps(state, 1)


def test_what_becomes_infinite_skips_the_step_and_is_named():
  # Also where it was infinite in another way.
  def loss_fn(params, old, batch, rng):
    loss, (new, _) = with_constants(params, old, jnp.ones((2, 2)), rng)
    return loss, (new | {"mean": old["mean"] * 0 + batch["mean"], "low": batch["low"]}, {})

  params = jnp.full((2, 2), 0.5)
  step, start = begin(loss_fn, params=params, model_state=constants(), donate=False)
  right = {"mean": jnp.float32(1), "low": jnp.float32(-np.inf)}
  assert step(start, right)[1]["finite"]
  for name, value in (("mean", np.inf), ("low", np.nan), ("low", np.inf)):
    state, metrics = step(start, right | {name: jnp.float32(value)})
    assert not metrics["finite"]
    assert np.isfinite(metrics["loss"])
    assert without_scale(state) == without_scale(start)
    got = f"was in the model state at ['{name}']"
    with refused(RuntimeError, SKIPPED, "fewer than 1", got, "look for an inf or NaN"):
      mpjax.check_skipped_steps(state, 1, params=state.params)


def test_masters_without_a_scale_take_float32_gradients():
  # The mean of 1 and 2^-8 has more digits than bfloat16.
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(1.0)), mpjax.NoLossScale())
  loss_fn = loss_of(
    lambda params, batch: jnp.sum(params.astype(jnp.float32) * batch[0].astype(jnp.float32))
  )
  step, state = begin(loss_fn, tx, jnp.zeros(1, jnp.bfloat16), micro_batches=2)
  state, _ = step(state, jnp.asarray([[1.0], [2.0**-8]]))
  np.testing.assert_array_equal(mpjax.states.master_params(state.opt_state), [-(0.5 + 2.0**-9)])


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_half_moments_without_a_scale_stay_half():
  # The optimizer sees half parameters as they are, and float32 gradients.
  tx = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), mpjax.NoLossScale())
  state = mpjax.TrainState.create(jnp.ones(3, jnp.bfloat16), tx)
  assert state.opt_state.inner_state[0].trace.dtype == jnp.bfloat16
  step = mpjax.make_train_step(squares, tx, donate=False)
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


def test_shardings_of_the_state():
  # Of another structure JAX says so; and one for all of it.
  with pytest.raises(ValueError, match="out_shardings"):
    one_step(SGD, state_shardings={"a": None})
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  state, _ = one_step(SGD, state_shardings=one)
  assert {x.sharding for x in jax.tree.leaves(state)} == {one}
