"""The all-in-one step: what it computes, retries, averages, donates, warns of and refuses."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._core.errors import kind_of
from tests.errors import refused
from tests.loss_scale_oracle import Oracle
from tests.optim.losses import loss_of, quadratic, rows
from tests.programs import bits, compilations, stored

STATIC = mpjax.StaticLossScale(8)
SKIPPED = "mpjax.check_skipped_steps"
SGD = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), STATIC)


def in_float16(params, model_state, batch, rng):
  """The gradient of `params` overflows if the scale times the largest of the batch is too large."""
  half = batch.astype(jnp.float16) @ params.astype(jnp.float16)
  loss = jnp.sum(half.astype(jnp.float32))
  if rng is not None:
    model_state = model_state * 0.5 + jax.random.bits(rng, (), jnp.uint8).astype(jnp.float32)
  return loss, (model_state, {})


def create(tx, params=None, **options):
  return mpjax.TrainState.create(jnp.zeros(3) if params is None else params, tx, **options)


def begin(loss_fn, tx=SGD, params=None, ema=False, model_state=(), rng=None, **options):
  state = create(tx, params, ema=ema, model_state=model_state, rng=rng)
  return mpjax.make_train_step(loss_fn, tx, **options), state


def without_scale(state):
  """What a step commits or not: all but the loss scale and its counters."""
  return bits(state._replace(opt_state=state.opt_state.inner_state))


def chosen(metrics, *names):
  return [metrics[name].item() for name in names]


def test_against_numpy():
  # Loss, norm, momentum and average of five steps, in float64.
  step, state = begin(quadratic, params=jnp.asarray([1.0, -2.0, 0.5]), ema=True, ema_decay=0.75)
  x, y = (rows(8)[key].astype(np.float64) for key in "xy")
  params, momentum = np.asarray([1, -2, 0.5]), np.zeros(3)
  average = params
  for count in range(5):
    error = x @ params - y
    grads = x.T @ error / 8
    state, metrics = step(state, rows(8))
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2) / 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["worst"], np.max(np.abs(error)), rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(np.sum(grads**2)), rtol=1e-6)
    momentum = 0.5 * momentum + grads
    params = params - 0.5 * momentum
    average = 0.75 * average + 0.25 * params
    np.testing.assert_allclose(state.params, params, rtol=1e-5)
    np.testing.assert_allclose(state.ema, average, rtol=1e-5)
    assert state.step == count + 1
  assert {metrics[name].dtype for name in ("loss", "grad_norm")} == {jnp.dtype(jnp.float32)}
  assert "retries" not in metrics


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_the_random_bits_of_rounding_are_its_own_in_each_step():
  tx = mpjax.loss_scaling(optax.sgd(2.0**-10), mpjax.SkipNonfinite())
  loss_fn = loss_of(lambda params, batch: jnp.sum(params.astype(jnp.float32)))
  params, rng, options = jnp.ones(64, jnp.bfloat16), jax.random.key(3), {"rounding": "stochastic"}
  step, state = begin(loss_fn, tx, params, rng=rng, donate=False, **options)
  found = [step(state._replace(step=jnp.int32(k)), jnp.zeros(2))[0].params for k in range(2)]
  # Nor those of the keys of the state, of the first step, of its micro-batches.
  key = jax.random.fold_in(rng, 0)
  for other in (rng, key, *(jax.random.fold_in(key, index) for index in range(2))):
    found.append(mpjax.apply_updates(params, jnp.full(64, -(2.0**-10)), key=other, **options))
  assert len({x.tobytes() for x in map(np.asarray, found)}) == len(found)


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
  step, state = begin(quadratic, tx, ema=True, ema_decay=0.5, micro_batches=2)
  scaled_step, scaled = begin(quadratic, ema=True, ema_decay=0.5, micro_batches=2)
  state, metrics = step(state, rows(8))
  assert without_scale(state) == without_scale(scaled_step(scaled, rows(8))[0])
  assert chosen(metrics, "finite", "total", "loss_scale") == [True, 0, 1]
  state, metrics = step(state, rows(8) | {"x": rows(8)["x"] * np.nan})
  assert state.step == 2
  assert np.all(np.isnan([state.params, state.ema]))


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


def retry_oracle(config, largest, max_retries):
  """NNabla's updater in plain Python: back off and run again, as often as may help."""
  # Returns (applied, retries, scale) for each batch; the gradient is the scale times its largest
  # value. Where NNabla raises after 100 runs in vain, the step counts as one that was skipped. Each
  # run again is at a lower scale, whatever the hysteresis: at the same one the same overflows.
  oracle, history = Oracle(**config), []
  for value in largest:
    retries, applied, futile, once = -1, False, False, None
    while not applied and not futile and retries < max_retries:
      retries += 1
      scale = oracle.scale
      applied = bool(scale * value < 65520)  # From here on float16 rounds to inf.
      oracle.step(applied)
      once = once or copy.copy(oracle)
      # No scale repairs an inf or NaN in the data, and none is below the smallest.
      futile = not np.isfinite(value) or scale == config["min_scale"]
      if not applied and oracle.scale == scale:
        oracle.scale = max(scale / 2, config["min_scale"])
    oracle = oracle if applied else once
    history.append((applied, retries, oracle.numbers()))
  return history


@pytest.mark.parametrize(("max_retries", "hysteresis"), [(0, 1), (1, 2), (3, 1), (3, 3)])
def test_retries_equal_the_oracle(max_retries, hysteresis):
  config = {"init_scale": 2.0**12, "growth_interval": 3, "min_scale": 4.0, "hysteresis": hysteresis}
  tx = mpjax.loss_scaling(optax.sgd(2.0**-30), mpjax.DynamicLossScale(**config))
  step, state = begin(in_float16, tx, max_retries=max_retries)
  exponents = np.random.default_rng(max_retries).integers(-2, 16, 120)
  largest = [{14: np.nan, 15: np.inf}.get(e, 2.0**e) for e in exponents]
  history = retry_oracle(config, largest, max_retries)
  params, steps = np.zeros(3), 0
  for value, (applied, retries, numbers) in zip(largest, history, strict=True):
    state, metrics = jax.device_get(step(state, jnp.asarray([[0.0, value, 1.0]])))
    state = jax.tree.map(jnp.asarray, state)
    if applied:
      params, steps = params - 2.0**-30 * np.asarray([0, value, 1]), steps + 1
    assert metrics["finite"] == applied
    assert metrics.get("retries", 0) == retries
    assert metrics["loss_scale"] == numbers.pop("scale")
    numbers.pop("hysteresis")
    assert {key: metrics[key] for key in numbers} == numbers
    np.testing.assert_array_equal(state.params, np.float32(params))
    assert state.step == steps
  assert ("retries" in metrics) == (max_retries > 0)
  seen = {(applied, retries) for applied, retries, _ in history}
  assert {(True, 0), (False, 0), (False, max_retries)} <= seen
  assert any(applied and retries for applied, retries in seen) == (max_retries > 0)


def test_a_retried_step_is_the_step_at_the_lower_scale():
  # With the same dropout key, model state and all; the attempts before it leave no trace.
  tx = mpjax.loss_scaling(optax.sgd(0.3, momentum=0.7), mpjax.DynamicLossScale(init_scale=2.0**12))
  begins = {"model_state": jnp.ones(()), "rng": jax.random.key(1), "ema": True}
  options = {"max_retries": 4, "ema_decay": 0.9, "donate": False}
  step, state = begin(in_float16, tx, jnp.asarray([0.1, 0.2, 0.3]), **begins, **options)
  state, metrics = step(state, jnp.asarray([[0.1, 0.2, 0.3]]))
  assert metrics["retries"] == 0
  hard = jnp.asarray([[0.3, 100.0, 0.2]])  # 65520 / 100 lies between 2^9 and 2^10
  retried, metrics = step(state, hard)
  assert chosen(metrics, "retries", "finite", "skipped", "loss_scale") == [3, True, 3, 2**9]
  lower = state._replace(opt_state=mpjax.states.set_loss_scale(state.opt_state, 2.0**9))
  direct, plain = step(lower, hard)
  assert chosen(plain, "retries", "finite", "skipped", "loss_scale") == [0, True, 0, 2**9]
  assert without_scale(retried) == without_scale(direct)
  assert chosen(metrics, "loss", "grad_norm") == chosen(plain, "loss", "grad_norm")


def test_a_retry_comes_down_from_any_scale_to_the_largest():
  # What follows an overflow of the scale itself would else be inf again.
  tx = mpjax.loss_scaling(
    optax.sgd(0.3), mpjax.DynamicLossScale(init_scale=2.0**10, max_scale=2.0**10)
  )
  step, state = begin(in_float16, tx, jnp.zeros(3), max_retries=2, donate=False)
  ((label, scale),) = state.opt_state.loss_scale.items()
  beyond = {label: scale._replace(scale=jnp.full_like(scale.scale, jnp.inf))}
  state = state._replace(opt_state=state.opt_state._replace(loss_scale=beyond))
  metrics = step(state, jnp.full((1, 3), 2.0**-10))[1]
  assert chosen(metrics, "retries", "finite", "loss_scale") == [1, True, 2**10]


ALIASING = {
  "adamw": functools.partial(optax.adamw, 1e-2),
  "schedule_free": functools.partial(optax.contrib.schedule_free_adamw, 1e-2),
  "prodigy": optax.contrib.prodigy,
}


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
  begins = {"model_state": (stats, stats), "rng": rng, "ema": True}
  step, state = begin(loss_fn, tx, params, **begins, ema_decay=0.5)
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
  "jit": jax.jit(plain_half),
  "scan": lambda x: jax.lax.scan(lambda c, y: (c + plain_half(y[None]), None), 0.0, x)[0],
  "cond": lambda x: jax.lax.cond(jnp.sum(x) > 0, plain_half, lambda x: jnp.sum(x), x),
  "remat": jax.checkpoint(plain_half),
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


def test_bad_arguments():
  for name, value, builtin, expected, got, fix in (
    ("loss_fn", 3, TypeError, "a function", "3", "Pass the function"),
    ("tx", optax.sgd, TypeError, "an optax transformation", "a function", "mpjax.loss_scaling("),
    ("micro_batches", 2.0, TypeError, "an integer", "2.0 of type float", "a Python int"),
    ("max_retries", True, TypeError, "an integer", "True of type bool", "a Python int"),
    ("ema_decay", "0.9", ValueError, "a float in [0, 1), or None", "'0.9'", "0.999 averages"),
    ("donate", 1, TypeError, "a bool", "1 of type int", "True or False"),
    ("micro_batches", 0, ValueError, "at least 1", "0", "1 does not cut the batch"),
    ("max_retries", -1, ValueError, "at least 0", "-1", "0 never retries"),
    ("ema_decay", 1.0, ValueError, "a float in [0, 1)", "1.0", "0.999 averages"),
    ("ema_decay", float("nan"), ValueError, "a float in [0, 1)", "nan", "0.999 averages"),
    ("rounding", "random", ValueError, "'nearest' or 'stochastic'", "'random'", "Did you mean"),
  ):
    with refused(builtin, f"mpjax.make_train_step({name})", expected, got, fix):
      mpjax.make_train_step(**{"loss_fn": quadratic, "tx": SGD, name: value})


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
  for kept, got in ((True, "ema_decay=None and one"), (False, "ema_decay=0.5 and none")):
    expected = "an average in the state exactly if ema_decay is given"
    fix = "TrainState.create(..., ema=True) together with make_train_step(ema_decay=0.999)"
    step = mpjax.make_train_step(quadratic, SGD, ema_decay=None if kept else 0.5)
    with refused(ValueError, "step(state): ema", expected, got, fix):
      step(create(SGD, ema=kept), batch)
  expected, got = "0 with a loss scale that does not move", "2 with 'static(scale=8)'"
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
    ({"x": zeros((7, 3)), "y": zeros(8)}, cut, "shape [7, 3] at ['x']", drop),
    ({"x": zeros((8, 3)), "n": 3}, cut, "shape [] at ['n']", drop),
    ({"x": zeros((9, 3)), "y": zeros(10)}, cut, "shape [9, 3] at ['x']; shape [10] at", drop),
    (zeros(6), cut, "shape [6] at the root", drop),
    *(
      (
        {"x": zeros((16, 3)), "y": zeros((n, 8))},
        one_axis,
        f"shape [{n}, 8] at ['y']",
        "close over",
      )
      for n in (4, 8, 32)
    ),
  ):
    with refused(ValueError, where, expected, got, fix):
      mpjax.make_train_step(quadratic, SGD, micro_batches=4)(create(SGD), batch)


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


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("windows", [mpjax.accumulate_gradients, optax.MultiSteps])
@pytest.mark.standard_promotion
def test_the_average_moves_with_updates_not_with_micro_batches(every, windows):
  # As if each window were one batch: NumPy, in float64.
  inner = windows(optax.sgd(0.25), every)
  tx = mpjax.loss_scaling(getattr(inner, "gradient_transformation", lambda: inner)(), STATIC)
  loss_fn = loss_of(lambda params, batch: jnp.sum((params - batch) ** 2))
  step, state = begin(loss_fn, tx, jnp.ones(1), ema=True, ema_decay=0.75)
  params = average = 1.0
  for window in range(5):
    for micro_batch in range(every):
      state, _ = step(state, jnp.full(1, float(window)))
      if micro_batch == every // 2:  # What is skipped is no part of the window.
        state, metrics = step(state, jnp.full(1, np.nan))
        assert not metrics["finite"]
    params = params - 0.5 * (params - window)
    average = 0.75 * average + 0.25 * params
    np.testing.assert_allclose(state.params, [params], rtol=1e-6)
    np.testing.assert_allclose(state.ema, [average], rtol=1e-6)


def test_the_average_of_what_is_not_accumulated_moves_each_time():
  branches = {"a": mpjax.accumulate_gradients(optax.sgd(0.25), 2), "b": optax.sgd(0.25)}
  # Two paths that are one text.
  tx = mpjax.loss_scaling(optax.multi_transform(branches, {"x/y": "a", "x": {"y": "b"}}), STATIC)
  loss_fn = loss_of(lambda params, batch: params["x/y"] + params["x"]["y"])
  params = {"x/y": jnp.ones(()), "x": {"y": jnp.ones(())}}
  step, state = begin(loss_fn, tx, params, ema=True, ema_decay=0.5)
  for average in ((1.0, 0.875), (0.875, 0.6875), (0.875, 0.46875), (0.6875, 0.234375)):
    state, _ = step(state, 0.0)
    assert (state.ema["x/y"], state.ema["x"]["y"]) == average
  # A window in another tree does not say which of the parameters it moves.
  flat = optax.flatten(mpjax.accumulate_gradients(optax.sgd(0.25), 2))
  step, state = begin(loss_fn, mpjax.loss_scaling(flat, STATIC), params, ema=True, ema_decay=0.5)
  where, expected = "mpjax.make_train_step(ema_decay)", "in the tree of the parameters"
  with refused(ValueError, where, expected, "optax.flatten", "Put it outside"):
    step(state, 0.0)


def test_masters_without_a_scale_take_float32_gradients():
  # The mean of 1 and 2^-8 has more digits than bfloat16.
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(1.0)), mpjax.NoLossScale())
  loss_fn = loss_of(
    lambda params, batch: jnp.sum(params.astype(jnp.float32) * batch[0].astype(jnp.float32))
  )
  step, state = begin(loss_fn, tx, jnp.zeros(1, jnp.bfloat16), micro_batches=2)
  state, _ = step(state, jnp.asarray([[1.0], [2.0**-8]]))
  np.testing.assert_array_equal(mpjax.states.master_params(state.opt_state), [-(0.5 + 2.0**-9)])


# What a step refuses before it runs.


def squares(params, model_state, batch, rng):
  return jnp.mean((batch @ params.astype(batch.dtype)) ** 2), (model_state, {})


def one_step(tx, **options):
  step, state = begin(squares, tx, jnp.ones(3), donate=False, **options)
  return step(state, jnp.ones((2, 3)))


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
  sgd, adam = (mpjax.loss_scaling(tx) for tx in (optax.sgd(0.1), optax.adam(0.1)))
  txs = (optax.sgd(0.1), optax.sgd(0.1, momentum=0.9), optax.adam(0.1))
  # And a scaled one, which has no state, passes on any.
  for tx, own in (*((tx, sgd) for tx in txs), (sgd, adam)):
    where, got = "mpjax.make_train_step(tx): step(state)", "or of other parameters: "
    expected = "the state that init of this very transformation created"
    with refused(TypeError, where, expected, got, "wrapped by mpjax.loss_scaling and configured"):
      mpjax.make_train_step(squares, tx)(
        mpjax.TrainState.create(jnp.ones(3), own), jnp.ones((2, 3))
      )


@pytest.mark.standard_promotion
def test_optimizers_that_evaluate_the_loss_themselves():
  where, fix = "mpjax.make_train_step(tx): tx.update", "in a loop of your own: mpjax.value_and_grad"
  expected = "an optimizer that needs the parameters, the gradients of the mean loss and value="
  for inner, got in (
    (optax.lbfgs(), "missing 2 required keyword-only arguments"),
    (optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)), "missing"),
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
