"""Micro-batches are one big batch, bit for bit, whatever the scale does and whatever is skipped.

All data are whole numbers times powers of two, and three times as much where they are divided by
three: every sum and every mean is exact. Programs are compiled without optimisations, since a mean
that is contracted with what follows is not rounded by itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._optim import optimizer_trees
from tests.programs import assert_bit_equal, bits, compiled, run

ROWS = 24
F32 = np.float32


def optimizer():
  return optax.sgd(2.0**-3, momentum=0.5)


def data():
  rng = np.random.default_rng(0)
  x = 3.0 * rng.integers(-1, 2, (ROWS, 4))
  y = 3.0 * rng.integers(-1, 2, ROWS)
  return x.astype(F32), y.astype(F32), jnp.asarray([1.0, -1.0, 0.0, 2.0])


def loss(w, x, y, dtype):
  error = (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32) - y
  return jnp.mean(error**2) / 2


@functools.cache
def big_steps(windows):
  """Parameters and state of optax after steps on all rows, computed in float32."""
  x, y, w = data()
  inner = optimizer()

  def step(carry, _):
    w, state = carry
    updates, state = inner.update(jax.grad(loss)(w, x, y, jnp.float32), state, w)
    return (optax.apply_updates(w, updates), state), None

  start = w, inner.init(w)
  return run(lambda start: jax.lax.scan(step, start, None, length=windows)[0], start)


def micro_step(k, dtype):
  """The compiled step of one micro-batch, and the state before the first."""
  config = mpjax.DynamicLossScale(init_scale=2.0**4, max_scale=2.0**6)
  tx = mpjax.loss_scaling(mpjax.accumulate_gradients(optimizer(), k), config)
  x, y, w = data()

  def step(w, state, x, y, poison):
    grads = jax.value_and_grad(mpjax.scaled(loss, state))(w, x, y, dtype)[1] + poison
    updates, state = tx.update(grads, state, w)
    return optax.apply_updates(w, updates), state

  rows = ROWS // k
  return compiled(jax.jit(step).lower(w, tx.init(w), x[:rows], y[:rows], w)), tx.init(w)


@pytest.mark.parametrize(
  ("k", "dtype", "windows", "how"),
  [
    (2, jnp.float32, 2, "by a branch"),
    (3, jnp.float32, 2, "by a selection"),
    (8, jnp.float16, 1, "by a branch"),
  ],
)
def test_micro_steps_are_one_big_step(k, dtype, windows, how, monkeypatch):
  # With a bad micro-batch in each place, and a scale that somebody moves before every one. A branch
  # is for CPU and a selection for all others; both are to be seen everywhere.
  monkeypatch.setattr(
    optimizer_trees, "compiled_for_cpu", lambda: jnp.asarray(how == "by a branch")
  )
  step, start = micro_step(k, dtype)
  x, y, first = data()
  expected, expected_state = big_steps(windows)
  rows = ROWS // k
  clean = jnp.zeros(4)
  for place in [None, *range(k * windows + 1)]:
    w, state = first, start
    order = list(range(k * windows))
    if place is not None:
      order.insert(place, -1)
    scales = set()
    for turn, micro_batch in enumerate(order):
      scale = float(mpjax.loss_scaling_metrics(state)["loss_scale"])
      up = scale < 4 or (turn % 3 and scale < 64)
      state = mpjax.states.set_loss_scale(state, scale * (2 if up else 0.5))
      scales.add(scale)
      part = slice(micro_batch % k * rows, (micro_batch % k + 1) * rows)
      poison = clean if micro_batch >= 0 else clean.at[turn % 4].set([np.inf, np.nan][turn % 2])
      before = w, state.inner_state
      w, state = step(w, state, x[part], y[part], poison)
      if micro_batch < 0:
        assert bits((w, state.inner_state)) == bits(before)
      elif (micro_batch + 1) % k:
        assert bits((w, state.inner_state.inner_state)) == bits((before[0], before[1].inner_state))
    assert bits(w) == bits(expected)
    assert bits(state.inner_state.inner_state) == bits(expected_state)
    assert state.inner_state.updates_done == windows
    assert state.inner_state.micro_batches == 0
    assert len(scales) > 1 or k * windows < 2
  assert bits(w) != bits(first)


def test_members_of_an_ensemble_have_windows_of_their_own():
  grads = 12.0 * np.random.default_rng(1).integers(-4, 5, (3, 12, 4))
  grads[0, ::4], grads[2, [5, 6]] = np.nan, np.inf
  config = mpjax.DynamicLossScale(init_scale=2.0**4, growth_interval=3, max_scale=2.0**6)
  tx = mpjax.loss_scaling(mpjax.accumulate_gradients(optimizer(), 3), config)

  def step(carry, g):
    w, state = carry
    updates, state = tx.update(g * mpjax.loss_scaling_metrics(state)["loss_scale"], state, w)
    return (optax.apply_updates(w, updates), state), None

  def end(grads):
    return jax.lax.scan(step, (data()[2], tx.init(data()[2])), grads)[0]

  members = grads.astype(F32)
  found = run(jax.vmap(end), members)
  for i, alone in enumerate(members):
    assert_bit_equal(jax.tree.map(lambda x, i=i: x[i], found), run(end, alone))
  assert found[1].inner_state.updates_done.tolist() == [3, 4, 3]


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_the_sum_is_float32_whatever_the_dtypes():
  # 4 x 20000 is an inf in float16, and 256 + 1 is 256 in bfloat16.
  tx = mpjax.accumulate_gradients(optax.sgd(2.0**-4), 4)
  dtypes = ("float32", "float16", "bfloat16")
  pairs = {f"{own} {other}": (own, other) for own in dtypes for other in dtypes}
  params = {name: jnp.ones(2, own) for name, (own, _) in pairs.items()}
  values = np.asarray([[20000.0, 256.0]] + [[20000.0, 1.0]] * 3)
  grads = {name: jnp.asarray(values, other) for name, (_, other) in pairs.items()}

  def step(state, now):
    updates, state = tx.update(now, state, params)
    return state, updates

  _, updates = run(lambda grads: jax.lax.scan(step, tx.init(params), grads), grads)
  for name, (_, other) in pairs.items():
    assert updates[name].dtype == F32
    total = values.astype(other).astype(F32).sum(0)
    np.testing.assert_array_equal(updates[name][3], -total / 64)
