"""Moments stored in half: which ones, with what numbers, and what is refused."""

import warnings
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.programs import bits, jitted

pytestmark = pytest.mark.standard_promotion("dtypes")

F32, BF16 = np.float32, jnp.bfloat16
PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}


def grads(step, dtype=F32):
  rng = np.random.default_rng(step)
  return {name: jnp.asarray(rng.normal(size=x.shape), dtype) for name, x in PARAMS.items()}


def names(tree):
  return {x.dtype.name for x in jax.tree.leaves(tree)}


def arrays(state):
  """Returns the floating arrays of a state."""
  leaves = jax.tree.leaves(state)
  return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim]


FIRST, MOMENTUM = ["mu", "trace"], optax.sgd(0.1, momentum=0.9)
OF_MU = (optax.adam, optax.amsgrad, optax.lion, optax.lamb, optax.novograd, optax.adabelief)


def test_first_moments_are_found_and_nothing_else():
  # The fields whose arrays are in bfloat16.
  for tx, fields in (
    *((make(0.1), ["mu"]) for make in (*OF_MU, optax.yogi, optax.contrib.muon)),
    (MOMENTUM, ["trace"]),
    (optax.rmsprop(0.1, momentum=0.9), ["trace"]),
    (optax.rmsprop(0.1, momentum=0.9, centered=True), ["trace"]),
    (optax.sm3(0.1), ["nu"]),
    (optax.adan(0.1), ["m", "v"]),
    (optax.contrib.ademamix(0.1), ["m1"]),
    (optax.contrib.prodigy(0.1), ["exp_avg"]),
    (optax.contrib.dadapt_adamw(0.1), ["exp_avg"]),
    (optax.chain(optax.clip(1.0), optax.trace(0.9), optax.adam(0.1)), FIRST),
    (optax.inject_hyperparams(optax.adam)(0.1), ["mu"]),
    (optax.masked(optax.adam(0.1), {"w": True, "b": False}), ["mu"]),
    (optax.multi_transform({"w": optax.adam(0.1), "b": MOMENTUM}, {"w": "w", "b": "b"}), FIRST),
    (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), ["mu"]),
    (mpjax.accumulate_gradients(optax.adam(0.1), 2), ["mu"]),
    (mpjax.loss_scaling(optax.adam(0.1)), ["mu"]),
  ):
    state = jax.eval_shape(mpjax.state_dtype(tx, mu="bfloat16").init, PARAMS)
    found = {
      [entry.name for entry in path if hasattr(entry, "name")][-1]
      for path, x in jax.tree_util.tree_leaves_with_path(state)
      if x.dtype == BF16
    }
    assert sorted(found) == fields, type(state)
  state = mpjax.state_dtype(optax.adam(0.1), mu="bfloat16").init(jnp.ones(1000))
  assert sum(x.nbytes for x in arrays(state)) == (2 + 4) * 1000


class Posterior(NamedTuple):
  mu: object
  nu: object


@chex.dataclass
class Chex:
  mu: object
  count: object


@flax.struct.dataclass
class Flax:
  nu: object
  exp_avg: object
  name: str = flax.struct.field(pytree_node=False, default="static")


def test_params_may_have_fields_of_the_same_names():
  params = Flax(jnp.ones(2), Posterior(jnp.ones(2, BF16), jnp.ones(2, BF16)))
  tx = mpjax.state_dtype(mpjax.master_weights(optax.adam(0.1)), mu="float16")
  state = tx.init(params)
  assert names((state.master, state.inner_state[0].nu)) == {"float32"}
  assert names(state.inner_state[0].mu) == {"float16"}
  _, new = tx.update(params, state, params)
  assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)


def test_states_of_others_are_found_too():
  def update(updates, state, params=None):
    first, second = state
    assert names(state) == {"float32"}
    return updates, (first.replace(mu=updates), second.replace(exp_avg=updates))

  init = lambda params: (Chex(mu=params, count=jnp.zeros(())), Flax(params, params))  # noqa: E731
  tx = mpjax.state_dtype(optax.GradientTransformation(init, update), mu="bfloat16")
  state: Any = tx.init(PARAMS)
  for _ in range(2):
    first, second = state
    assert names((first.mu, second.exp_avg)) == {"bfloat16"}
    assert names((first.count, second.nu)) == {"float32"}
    assert second.name == "static"
    _, state = tx.update(grads(0), state, PARAMS)


def test_momentum_is_numpys_to_the_bit():
  # Outside of jit, where each operation rounds.
  tx = mpjax.state_dtype(optax.sgd(0.5, momentum=0.9), mu="bfloat16")
  state, trace = tx.init(PARAMS), np.zeros(4, BF16)
  for t in range(30):
    g = grads(t)
    updates, state = tx.update(g, state)
    wide = np.asarray(g["b"]) + F32(0.9) * trace.astype(F32)
    trace = wide.astype(BF16)
    assert bits(updates["b"]) == bits(F32(-0.5) * wide), "of the moment before it is rounded"
    assert bits(state[0].trace["b"]) == bits(trace)


def after(tx, gradient, length, start):

  def run(state):
    return jax.lax.scan(lambda s, _: (tx.update(gradient, s)[1], None), state, length=length)[0]

  return jitted(run)(tx.init(start))


@pytest.mark.slow
def test_a_decay_of_second_moments_that_is_out_of_reach_is_named():
  # With where they settle at a true 1, measured here; whatever the optimizer is called.
  for decay, text in ((0.9, None), (0.95, "0.96"), (0.99, "0.80"), (0.999, "0.25")):
    for make in (lambda b2: optax.scale_by_adam(b2=b2), lambda b2: optax.scale_by_rms(decay=b2)):
      with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tx = mpjax.state_dtype(make(decay), nu="bfloat16", allow_second_moments=True)
        state = after(tx, jnp.ones(1), 3000, jnp.zeros(1))
      reached = f"{float(state.nu[0]):.2f}"
      said = {str(one.message) for one in caught}
      if text is None:
        assert not said
        continue
      assert reached == text
      (said,) = said
      assert f"decay by {decay} settle in bfloat16 at {reached} of their value" in said
      assert "rounding='stochastic'" in said


@pytest.mark.slow
def test_what_has_no_decay_is_not_named():
  # A maximum follows at once; an optimizer that wants more arguments is not measured.
  for inner in (optax.sm3(0.1), optax.chain(optax.yogi(0.1), optax.scale_by_polyak())):
    mpjax.state_dtype(inner, nu="bfloat16", allow_second_moments=True).init(PARAMS)


@pytest.mark.slow
def test_moments_rounded_stochastically_are_right_on_average():
  # Of a mean with decay 0.999, which rounded to nearest stops at 0.25.
  options = {"nu": "bfloat16", "allow_second_moments": True, "rounding": "stochastic"}
  tx = mpjax.state_dtype(optax.scale_by_adam(), mu="float16", **options)
  start = jnp.zeros(1000)
  end = after(tx, jnp.ones(1000), 1000, start)
  assert end.steps == 1000
  assert names((end.inner_state.mu, end.inner_state.nu)) == {"float16", "bfloat16"}
  exact = 1 - 0.999**1000
  nu = np.asarray(end.inner_state.nu, np.float64)
  # 6 standard errors: a step adds at most half an ulp, 2^-9, and 0.999^2k of it is left after k.
  assert abs(nu.mean() - exact) < 6 * 2.0**-9 * np.sqrt(500 / 1000)
  assert nu.std() > 2.0**-9
  assert bits(after(tx, jnp.ones(1000), 1000, start)) == bits(end)
  # A skipped step leaves the number of steps, and with it the random bits.
  scaling = mpjax.loss_scaling(tx, mpjax.StaticLossScale(8))
  state = scaling.init(start)
  good = scaling.update(jnp.full(1000, 0.3), state)[1]
  skipped = scaling.update(jnp.full(1000, jnp.inf), state)[1]
  assert bits(scaling.update(jnp.full(1000, 0.3), skipped)[1].inner_state) == bits(good.inner_state)
  where = "mpjax.state_dtype(inner)"
  with refused(TypeError, f"{where}.update(state)", "init", "ScaleBy", "tx.init"):
    tx.update(start, optax.scale_by_adam().init(start))
  # A number outside of the scale goes on.
  outside = mpjax.state_dtype(scaling, mu="bfloat16", rounding="stochastic")
  with refused(
    TypeError, where, "without a loss scale", "holds mpjax.loss_scaling", "Swap the two"
  ):
    outside.init(start)


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("mu", ["bfloat16", "float32"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_moments_keep_their_dtype_whatever_that_of_the_parameters_is(mu, rounding):
  inner = mpjax.state_dtype(optax.sgd(0.1, 0.9), mu=mu, rounding=rounding)
  for tx in (inner, mpjax.loss_scaling(inner, mpjax.NoLossScale()), mpjax.loss_scaling(inner)):
    for dtype in (F32, BF16, jnp.float16):
      params = jnp.ones(3, dtype)
      state = tx.init(params)
      _, new = tx.update(params, state, params)
      assert names(arrays(state)) == {mu}
      assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)


@pytest.mark.parametrize("check_updates", [False, True])
def test_a_large_finite_gradient_saturates_a_float16_moment(check_updates):
  # As an inf it would be in all parameters for ever, or all later steps would be skipped.
  inner = mpjax.state_dtype(optax.adam(0.01), mu="float16")
  tx = mpjax.loss_scaling(inner, mpjax.StaticLossScale(64), check_updates=check_updates)
  params = jnp.ones(2)
  state = tx.init(params)
  for g in (1.0, 1e6, 1.0, 1.0):
    updates, state = tx.update(jnp.full(2, 64 * g), state, params)
    params = optax.apply_updates(params, updates)
    if g == 1e6:
      assert state.inner_state[0].mu.tolist() == [65504, 65504]
  assert np.all(np.isfinite(params))
  assert mpjax.loss_scaling_metrics(state)["skipped"] == 0


def test_arguments():
  seconds = ("bfloat16", "float16", "int8", jnp.float32)
  refusal = ValueError, "nu", "second moments in float32"
  stored, flag = "'bfloat16' or 'float16' or", {"mu": "bfloat16", "allow_second_moments": 1}
  for kwargs, builtin, name, expected, got, fix in (
    ({}, ValueError, "mu", "a dtype for first moments", "None", "leave the wrapper out"),
    ({"mu": "bf61"}, ValueError, "mu", "a floating dtype", "'bf61'", "bf16"),
    ({"mu": "int8"}, TypeError, "mu", "a floating dtype", "int8", "are never cast"),
    ({"mu": "float8_e4m3fn"}, ValueError, "mu", stored, "float8_e4m3fn", "Did you mean"),
    ({"mu": "bf16", "rounding": "up"}, ValueError, "rounding", "'nearest' or", "'up'", "'nearest'"),
    (flag, TypeError, "allow_second_moments", "a bool", "1 of type int", "True or False"),
    *(({"mu": "bfloat16", "nu": nu}, *refusal, repr(nu), "inf or NaN") for nu in seconds),
  ):
    with refused(builtin, f"mpjax.state_dtype({name})", expected, got, fix):
      mpjax.state_dtype(optax.adam(0.1), **kwargs)
  for inner, got in ((optax.sgd(0.1), "none"), (optax.rmsprop(0.1), "one with nu")):
    where, expected = "mpjax.state_dtype(mu)", "an optimizer with such moments"
    with refused(ValueError, where, expected, got, "Drop this argument"):
      mpjax.state_dtype(inner, mu="bfloat16").init(PARAMS)


def test_moments_of_float64_and_complex_parameters_stay():
  with jax.enable_x64(True):
    params = {"d": jnp.ones(2, jnp.float64), "c": jnp.ones(2, jnp.complex64), "f": jnp.ones(2, F32)}
    tx = mpjax.state_dtype(optax.sgd(0.1, momentum=0.9), mu="bfloat16")
    state = tx.init(params)
    for _ in range(2):
      found = {name: x.dtype.name for name, x in state[0].trace.items()}
      assert found == {"d": "float64", "c": "complex64", "f": "bfloat16"}
      _, state = tx.update(params, state, params)


@pytest.mark.parametrize("half", ["float16", "float8_e5m2"])
def test_second_moments_of_parameters_in_low_precision_are_in_float32(half):
  params = {"w": jnp.ones(3, half)}
  tx = mpjax.state_dtype(optax.adam(1e-3), mu="bfloat16")
  state = tx.init(params)
  assert (state[0].mu["w"].dtype, state[0].nu["w"].dtype) == (BF16, F32)
  updates, new = tx.update({"w": jnp.full(3, 0.01, half)}, state, params)
  assert (new[0].mu["w"].dtype, new[0].nu["w"].dtype) == (BF16, F32)
  assert updates["w"].dtype == F32


def test_a_zero_gradient_of_a_float16_parameter_moves_nothing():
  # In float16 adam divides 0 by its eps of 1e-8, which is 0 there.
  params = jnp.ones(3, jnp.float16)
  tx = mpjax.state_dtype(optax.adam(1e-3), mu="float16")
  updates, _ = tx.update(jnp.zeros(3, jnp.float16), tx.init(params), params)
  np.testing.assert_array_equal(updates, np.zeros(3))


def test_integers_among_the_parameters_stay_as_they_are():
  params = {"w": jnp.ones(3, BF16), "n": jnp.ones(2, jnp.int32)}
  tx = mpjax.state_dtype(optax.adam(1e-3), mu="bfloat16")
  grads = {"w": jnp.ones(3, BF16), "n": np.zeros(2, jax.dtypes.float0)}
  updates, _ = tx.update(grads, tx.init(params), params)
  assert updates["n"].dtype == jnp.int32
  assert updates["n"].tolist() == [0, 0]
