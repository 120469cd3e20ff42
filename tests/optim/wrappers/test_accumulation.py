"""Windows of micro-batches: when they end, what the mean is, that nothing moves inside of one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import mpjax
from tests.errors import refused
from tests.programs import bits, equations

pytestmark = pytest.mark.standard_promotion("dtypes")

PARAMS = {"w": jnp.asarray([1.0, -0.0, 3.0]), "b": jnp.asarray(-0.0)}


WINDOWS = [2, 3, 1, 4, 1, 2]
SCHEDULES = {
  "an array": lambda done: jnp.asarray(WINDOWS)[done],
  "a float": lambda done: jnp.where(done < 2, 2.0, 3.0),
  "a constant": lambda done: 3,
}


@pytest.mark.parametrize("every", SCHEDULES.values(), ids=SCHEDULES)
def test_the_length_of_a_window_may_depend_on_the_updates_done(every):
  tx = mpjax.accumulate_gradients(optax.identity(), every)
  update, rng = jax.jit(tx.update), np.random.default_rng(2)
  state, inside, done = tx.init(jnp.zeros(())), [], 0
  for _ in range(13):
    inside.append(float(rng.integers(-8, 8)) * 12)
    found, state = update(jnp.asarray(inside[-1]), state)
    full = len(inside) >= float(every(done))
    assert found == (sum(inside) / len(inside) if full else 0)
    if full:
      inside, done = [], done + 1
    assert (state.micro_batches, state.updates_done) == (len(inside), done)
  assert done >= 4


def test_the_inner_optimizer_runs_only_when_the_window_is_full():
  tx = mpjax.accumulate_gradients(optax.stateless_with_tree_map(lambda u, p: jnp.sin(u)), 3)
  program = jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
  (choice,) = [eqn for eqn in program.eqns if eqn.primitive.name == "cond"]
  skip, step = [
    [eqn.primitive.name for eqn, _ in equations(branch)] for branch in choice.params["branches"]
  ]
  assert (step.count("sin"), skip.count("sin")) == (2, 0)
  assert not any(eqn.primitive.name == "sin" for eqn in program.eqns)


def test_a_state_restored_into_a_shorter_window_ends_it():
  long, short = (mpjax.accumulate_gradients(optax.sgd(1.0), every) for every in (5, 2))
  state = long.init(jnp.zeros(2))
  for _ in range(3):
    _, state = long.update(jnp.asarray([1.0, 2.0]), state)
  updates, state = short.update(jnp.asarray([5.0, 6.0]), state)
  assert updates.tolist() == [-2, -3], "the mean of all four that are in the sum"
  assert (state.micro_batches, state.updates_done) == (0, 1)


@pytest.mark.slow
def test_parameters_that_are_half_complex_wide_or_missing(set_flag):
  set_flag("jax_enable_x64", True)
  params = {"h": jnp.ones(2, jnp.bfloat16), "z": jnp.ones(1, jnp.complex64), "none": None}
  params |= {"d": jnp.full(1, 1 + 2.0**-40, jnp.float64), "m": jnp.full(1, -0.0, jnp.float32)}
  tx = mpjax.accumulate_gradients(optax.sgd(1.0), 2)
  state = tx.init(params)
  dtypes = {"h": "float32", "z": "complex64", "none": None, "d": "float64", "m": "float32"}
  assert jax.tree.map(lambda x: x.dtype.name, state.total) == dtypes
  grads = params | {"z": params["z"] * 2j}
  updates, state = tx.update(grads, state, params)
  assert bits(optax.apply_updates(params, updates)) == bits(params)
  # Of a complex number both parts are -0.0.
  assert np.signbit([updates["z"].real, updates["z"].imag]).all()
  updates, state = tx.update(grads, state, params)
  assert jax.tree.map(lambda x: x.dtype.name, updates) == dtypes
  assert (updates["h"].tolist(), updates["z"].tolist()) == ([-1, -1], [-2j])
  assert updates["d"] == -(1 + 2.0**-40)
  assert {x.dtype.name for x in (state.micro_batches, state.updates_done)} == {"int32"}


PLATEAU = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
READ_VALUE = {"polyak": optax.polyak_sgd(), "momo": optax.contrib.momo(), "plateau": PLATEAU}


@pytest.mark.parametrize("inner", READ_VALUE.values(), ids=READ_VALUE)
def test_the_loss_that_an_optimizer_reads_is_the_mean_over_the_window(inner):
  # It was that of the last micro-batch: polyak stepped by a third of what one batch steps.
  tx = mpjax.loss_scaling(mpjax.accumulate_gradients(inner, 2), mpjax.StaticLossScale(8))
  params = jnp.ones(2)
  state, plain = tx.init(params), inner.init(params)
  update, control = jax.jit(tx.update), jax.jit(inner.update)
  for losses in ((10.0, np.nan, 2.0), (1.0, 5.0), (8.0, 6.0)):
    for value in losses:
      loss = jnp.asarray(value, jnp.float16)  # A bad micro-batch leaves no trace in the sum either.
      updates, state = update(jnp.full(2, 10.0), state, params, value=loss, loss=loss)
    mean = jnp.float32(np.nanmean(losses))
    expected, plain = control(jnp.full(2, 10.0), plain, params, value=mean)
    np.testing.assert_array_equal(updates, expected)
  assert state.inner_state.value == 0
  assert bits(state.inner_state.inner_state) == bits(plain)


WHERE = "mpjax.accumulate_gradients(inner)"
EVERY = "mpjax.accumulate_gradients(every)"


def test_extra_arguments_of_one_micro_batch_are_refused():
  tx = mpjax.accumulate_gradients(optax.lbfgs(), 2)
  for name in ("grad", "value_fn", "grad_fn"):
    where, expected = f"{WHERE}.update({name}=)", "value= and arguments that do not"
    with refused(TypeError, where, expected, "of one micro-batch", "add up the gradients"):
      tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=1.0, **{name: PARAMS})
  tx = mpjax.accumulate_gradients(optax.polyak_sgd(), 2)
  with refused(ValueError, f"{WHERE}.update(value)", "a scalar", "shape (3,)", "Pass its mean"):
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=jnp.ones(3))


def test_windows_of_no_number():
  for every, got in ((lambda n: n - 1, "-1"), (lambda n: 2.5, "2.5"), (lambda n: n > 1, "False")):
    tx = mpjax.accumulate_gradients(optax.sgd(0.1), every)
    expected = "a function that returns an integer, at least 1"
    with refused(ValueError, EVERY, expected, got, "Round its result"):
      tx.update(PARAMS, tx.init(PARAMS), PARAMS)
  for builtin, every, got in (
    (ValueError, 0, "0"),
    (TypeError, True, "True of type bool"),
    (TypeError, 2.0, "2.0 of type float"),
  ):
    with refused(builtin, EVERY, "an integer, at least 1", got, "how many micro-batches"):
      mpjax.accumulate_gradients(optax.sgd(0.1), every)


def test_extra_arguments_reach_the_inner_optimizer():
  # Also a loss that it names but does not read.
  reads = lambda u, state, params=None, *, value, **extra_args: (u * value, state)  # noqa: E731
  names = lambda updates, state, params=None, *, value: (updates, state)  # noqa: E731
  for update, expected in ((reads, [0, 1.5, 0, 3.5]), (names, [0, 1, 0, 1])):
    inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
    tx = mpjax.accumulate_gradients(inner, 2)
    step, state, moved = jax.jit(tx.update), tx.init(jnp.zeros(())), []
    assert (state.value is None) == (update is names)
    for value in (1.0, 2.0, 3.0, 4.0):
      updates, state = step(jnp.ones(()), state, value=value)
      moved.append(float(updates))
    assert moved == expected, "the mean over the window"


def test_counts_do_not_wrap():
  tx = mpjax.accumulate_gradients(optax.sgd(0.1), 2)
  end = tx.init(PARAMS)._replace(updates_done=jnp.int32(2**31 - 1), micro_batches=jnp.int32(1))
  _, new = tx.update(PARAMS, end, PARAMS)
  assert (new.updates_done, new.micro_batches) == (2**31 - 1, 0)


def test_the_count_of_a_window_stops_at_its_limit():
  tx = mpjax.accumulate_gradients(optax.sgd(0.1), 2)
  state = tx.init(PARAMS)._replace(micro_batches=jnp.int32(2**31 - 1))
  _, state = tx.update(PARAMS, state, PARAMS)
  assert (state.micro_batches, state.updates_done) == (0, 1), "the window was full"


def test_a_loss_scale_inside_is_refused():
  scaled, off = mpjax.loss_scaling(optax.sgd(0.1)), mpjax.NoLossScale()
  nested = optax.chain(optax.clip(1.0), scaled), mpjax.master_weights(scaled)
  for inner in (scaled, *nested, mpjax.loss_scaling(optax.sgd(0.1), off)):
    expected, got = "an optimizer without a loss scale", "one that holds mpjax.loss_scaling"
    fix = "loss_scaling(accumulate_gradients(inner, every))"
    with refused(TypeError, WHERE, expected, got, fix):
      mpjax.accumulate_gradients(inner, 2).init(PARAMS)
