"""A run that was saved, in whatever phase, and resumed is the run that was never interrupted."""

import itertools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mpjax
from tests.checkpoints import make
from tests.errors import refused
from tests.programs import bits, data_of_keys

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


def batch(k):
  x = np.random.default_rng(100 + k).normal(size=(8, 4))
  return jnp.asarray(x * (1e6 if k in TOO_LARGE else 1), jnp.float32)


def through_msgpack(state, path):
  packed = flax.serialization.to_bytes(data_of_keys(state))
  return flax.serialization.msgpack_restore(packed)


def through_orbax(state, path):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, state)
  return path


@pytest.mark.case("B122", "I5")
@pytest.mark.parametrize(("through", "every"), [(through_orbax, 4), (through_msgpack, 1)])
def test_resumed_in_each_phase(through, every, tmp_path):
  # A step from what was saved is the step of the run, whose later ones are then the same too.
  step, state, seen = mpjax.make_train_step(loss_fn, TX, ema_decay=0.9), begin(), []
  targets = begin(), jax.eval_shape(begin)
  for k in range(STEPS):
    arrays = mpjax.checkpoints.to_arrays(state)
    seen.append({path.rpartition("/")[2]: x.item() for path, x in arrays.items() if x.ndim == 0})
    found = None
    if k % every == 0:
      saved = through(state, tmp_path / str(k))
      restored = mpjax.checkpoints.restore_like(targets[k // every % 2], saved)
      found = bits(step(restored, batch(k)))
    state, metrics = step(state, batch(k))
    assert found in (None, bits((state, metrics))), k
  # The phases: of a window of micro-batches, of the hysteresis, of skips, of growth.
  for name in ("micro_batches", "hysteresis", "consecutive_skips"):
    assert {0, 1, 2} <= {counts[name] for counts in seen}, name
  scales = [counts["scale"] for counts in seen]
  assert any(after > before for before, after in itertools.pairwise(scales))


# Which states restore into which.

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
SCALED = mpjax.loss_scaling(
  optax.adam(0.1), mpjax.DynamicLossScale(init_scale=64, growth_interval=3, hysteresis=2)
)


def after(flags):
  state = SCALED.init(PARAMS)
  for flag in flags:
    grads = jax.tree.map(lambda p, f=flag: jnp.ones_like(p) * (1.0 if f else jnp.nan), PARAMS)
    _, state = SCALED.update(grads, state, PARAMS)
  return state


def by_flax(state, target, tmp_path):
  return flax.serialization.from_bytes(target, flax.serialization.to_bytes(state))


def by_orbax(state, target, tmp_path):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(tmp_path / "state", target)


@pytest.mark.case("A49", "A58", "A39", "A40", "A64")
@pytest.mark.parametrize("through", [by_flax, by_orbax])
def test_only_a_state_of_the_same_configuration_restores(through, tmp_path):
  # Whatever its start; also one without a scale.
  adam = optax.adam(0.1)
  for number, other in enumerate((mpjax.DynamicLossScale(), mpjax.StaticLossScale(64))):
    (tmp_path / str(number)).mkdir()
    target = mpjax.loss_scaling(adam, other).init(PARAMS)
    with pytest.raises((ValueError, KeyError)):
      through(after([1]), target, tmp_path / str(number))
  start = mpjax.DynamicLossScale(init_scale=2, growth_interval=3, hysteresis=2)
  target = mpjax.loss_scaling(adam, start).init(PARAMS)
  (tmp_path / "start").mkdir()
  restored = through(after([0, 0]), target, tmp_path / "start")
  assert mpjax.loss_scaling_metrics(restored)["loss_scale"] == 32
  tx = mpjax.loss_scaling(adam, mpjax.NoLossScale())
  restored = through(tx.init(PARAMS), tx.init(PARAMS), tmp_path)
  assert jax.tree.structure(restored) == jax.tree.structure(tx.init(PARAMS))


# Adam divides by a square root and takes powers for its bias correction, where machines may differ
# in the last bit; all else in these files is exact.
INEXACT = {"0.1.0-loss_scaling": "params/"}


def arrays(name, file):
  with np.load(make.FOLDER / name / f"{file}.npz") as opened:
    return dict(opened)


def assert_holds(tree, wanted, inexact=None):
  found = mpjax.checkpoints.to_arrays(tree)
  assert sorted(found) == sorted(wanted)
  for path, x in found.items():
    assert (x.dtype, x.shape) == (wanted[path].dtype, wanted[path].shape)
    if inexact and path.startswith(inexact):
      np.testing.assert_allclose(x, wanted[path], rtol=1e-6, err_msg=path)
    else:
      np.testing.assert_array_equal(x, wanted[path], err_msg=path)


def test_every_layout_has_its_folder():
  assert sorted(path.parent.name for path in make.FOLDER.glob("*/next.npz")) == sorted(make.LAYOUTS)


@pytest.mark.case("A63", "B123", "I5")
@pytest.mark.parametrize("file", ["orbax", "npz"])
@pytest.mark.parametrize("name", make.LAYOUTS)
def test_a_frozen_checkpoint_loads_and_goes_on(name, file):
  layout = make.LAYOUTS[name]
  saved = make.FOLDER / name / "state" if file == "orbax" else arrays(name, "state")
  state = mpjax.checkpoints.restore_like(layout.begin(), saved)
  assert_holds(state, arrays(name, "state"))
  wanted = arrays(name, "next") | averages(arrays(name, "state"), arrays(name, "next"))
  assert_holds(make.run(layout, state, layout.after), wanted, INEXACT.get(name))


def averages(state, after):
  """Returns the averages that belong to `after`: 0.1.0 moved them with each micro-batch."""
  # They move with updates now, of which the steps after the save make one. What is averaged is the
  # master of a parameter, where it has one.
  new = {}
  for path in state:
    if path.startswith("ema/"):
      leaf = path.removeprefix("ema/")
      masters = [x for name, x in after.items() if name.endswith(f"master/{leaf}")]
      reached = (masters or [after[f"params/{leaf}"]])[0]
      new[path] = state[path] + np.float32(0.5) * (reached - state[path])
  return new


def test_they_were_saved_in_the_middle_of_everything():
  for name in make.LAYOUTS:
    state = mpjax.checkpoints.restore_like(make.LAYOUTS[name].begin(), make.FOLDER / name / "state")
    scaling = mpjax.checkpoints.to_arrays(state)
    counts = {path.rpartition("/")[2]: x.item() for path, x in scaling.items() if x.ndim == 0}
    assert (counts["scale"], counts["hysteresis"], counts["skipped"]) == (128, 1, 1)
    assert counts["good_steps"] in (2, 3)
    assert counts.get("micro_batches", 3) == 3


@pytest.mark.case("B123")
def test_an_old_state_moves_to_another_configuration():
  # As the error says: restored as it was, then carried over.
  name = "0.1.0-loss_scaling"
  saved = make.FOLDER / name / "state"
  start = make.begin_adam()
  tx = mpjax.loss_scaling(optax.adam(0.125, b1=0.5, b2=0.75))
  where = "mpjax.checkpoints.restore_like(target, restored)"
  expected = "a loss scale of the configuration 'dynamic' at opt_state"
  got, fix = "'dynamic(growth_interval=4,hysteresis=2)'", "give its inner_state to the new state"
  with refused(ValueError, where, expected, got, fix):
    mpjax.checkpoints.restore_like({**start, "opt_state": tx.init(start["params"])}, saved)
  old = mpjax.checkpoints.restore_like(start, saved)
  scale = float(mpjax.loss_scaling_metrics(old["opt_state"])["loss_scale"])
  new = tx.init(start["params"])._replace(inner_state=old["opt_state"].inner_state)
  new = mpjax.set_loss_scale(new, scale)
  place = "opt_state/inner_state/"
  of_file = {path.partition(place)[2]: x for path, x in arrays(name, "state").items()}
  of_file.pop("")
  assert_holds(new.inner_state, of_file)
  assert mpjax.loss_scaling_metrics(new)["loss_scale"] == 128
