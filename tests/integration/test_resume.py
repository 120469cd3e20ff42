"""A run that was saved, in whatever phase, and resumed is the run that was never interrupted."""

import functools
import os
import pathlib
import subprocess
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mpjax

ROOT = pathlib.Path(__file__).parent.parent.parent
STEPS = 40
WINDOW = 3
SCALE = mpjax.DynamicLossScale(init_scale=2**12, growth_interval=4, hysteresis=2)
TX = mpjax.loss_scaling(
  mpjax.accumulate_gradients(mpjax.master_weights(optax.adam(0.01)), WINDOW), SCALE
)
TOO_LARGE = (7, 8, 21, 33)
"""Steps whose batch overflows in float16, whatever the loss scale is."""


def begin():
  """The state before the first step: half and float32 parameters, statistics, an average, a key."""
  rng = np.random.default_rng(0)
  params = {
    "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float16),
    "norm": jnp.ones((1, 3)),
    "v": jnp.asarray(rng.normal(size=(3, 1)), jnp.float16),
  }
  return mpjax.TrainState.create(
    params, TX, model_state={"mean": jnp.zeros((1, 3))}, rng=jax.random.key(1), ema=True
  )


def loss_fn(params, model_state, batch, rng):
  h = batch.astype(jnp.float16) @ params["w"]
  mean = jnp.mean(h.astype(jnp.float32), axis=0, keepdims=True)
  h = ((h - mean) * params["norm"]).astype(jnp.float16)
  h = jnp.where(jax.random.bernoulli(rng, 0.8, h.shape), h, 0)
  loss = jnp.mean((h @ params["v"]).astype(jnp.float32) ** 2)
  return loss, ({"mean": 0.9 * model_state["mean"] + 0.1 * mean}, {})


@functools.cache
def train_step():
  return mpjax.make_train_step(loss_fn, TX, ema_decay=0.9)


def batch(k):
  x = np.random.default_rng(100 + k).normal(size=(8, 4))
  return jnp.asarray(x * (1e6 if k in TOO_LARGE else 1), jnp.float32)


def advance(state, start, stop):
  """Returns the state at step `stop`, and the metrics on the way."""
  trail = []
  for k in range(start, stop):
    state, metrics = train_step()(state, batch(k))
    trail.append(metrics)
  return state, jax.device_get(trail)


@functools.cache
def straight():
  """The run without an interruption: what the state was before each step, and the metrics."""
  state, states, metrics = begin(), [], []
  for k in range(STEPS):
    states.append(mpjax.checkpoints.to_arrays(state))
    state, trail = advance(state, k, k + 1)
    metrics += trail
  return [*states, mpjax.checkpoints.to_arrays(state)], metrics


def bits(x):
  x = np.asarray(x)
  return x.dtype.name, x.shape, x.tobytes()


def assert_straight(state, trail, start):
  """Asserts that what follows from `start` is what followed without an interruption."""
  states, metrics = straight()
  found = mpjax.checkpoints.to_arrays(state)
  assert list(found) == list(states[-1])
  assert [path for path in found if bits(found[path]) != bits(states[-1][path])] == []
  assert jax.tree.map(bits, trail) == jax.tree.map(bits, metrics[start:])


def counters(k):
  """The scalars of the loss scale and of the accumulation before step `k`."""
  return {path.rpartition("/")[2]: x.item() for path, x in straight()[0][k].items() if x.ndim == 0}


def data_of_keys(tree):
  """Keys as plain data, which is all that msgpack can hold."""

  def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

  return jax.tree.map(data, tree)


def through_msgpack(state, folder):
  packed = flax.serialization.to_bytes(data_of_keys(state))
  return flax.serialization.msgpack_restore(packed)


def through_orbax(state, folder):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / "state", state)
  return folder / "state"


def phase(k):
  """Names what is half done before step `k`."""
  now, before = counters(k), counters(k - 1) if k else None
  scales = [counters(i)["scale"] for i in range(k + 1)]
  return {
    "before the first growth": k > 0 and scales == sorted(scales, reverse=True),
    "inside a growth window": 0 < now["good_steps"] < SCALE.growth_interval,
    "inside an accumulation": now["micro_batches"] > 0,
    "right after a skip": now["consecutive_skips"] == 1,
    "right after two skips": now["consecutive_skips"] == 2,
    "half the hysteresis used": now["hysteresis"] == 1,
    "all the hysteresis used": now["hysteresis"] == 0,
    "right after a growth": before is not None and now["scale"] > before["scale"],
    "right after an update": before is not None and now["updates_done"] > before["updates_done"],
  }


PHASES = (0, 6, 8, 9, 11, 13, 26, 31, 34, STEPS)


def test_the_chosen_steps_are_in_every_phase():
  for name in phase(0):
    assert any(phase(k)[name] for k in PHASES), name


@pytest.mark.case("B122", "I5")
@pytest.mark.parametrize("through", [through_orbax, through_msgpack])
@pytest.mark.parametrize("k", PHASES)
def test_resumed_in_each_phase(through, k, tmp_path):
  state, _ = advance(begin(), 0, k)
  target = jax.eval_shape(begin) if k % 2 else begin()
  restored = mpjax.checkpoints.restore_like(target, through(state, tmp_path))
  assert_straight(*advance(restored, k, STEPS), k)


@pytest.mark.case("I5")
def test_resumed_in_a_new_process(tmp_path):
  k = 11  # in the middle of a growth window and of an accumulation
  state, _ = advance(begin(), 0, k)
  program = (
    "import sys, numpy, mpjax\n"
    "from tests.integration import test_resume as run\n"
    "saved, k, out = sys.argv[1:]\n"
    "restored = mpjax.checkpoints.restore_like(run.begin(), saved)\n"
    "numpy.savez(out, **mpjax.checkpoints.to_arrays(run.advance(restored, int(k), run.STEPS)[0]))"
  )
  out = tmp_path / "out.npz"
  done = subprocess.run(
    [sys.executable, "-c", program, str(through_orbax(state, tmp_path)), str(k), str(out)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  wanted = straight()[0][-1]
  with np.load(out) as found:
    assert {path: bits(found[path]) for path in found} == {p: bits(x) for p, x in wanted.items()}
