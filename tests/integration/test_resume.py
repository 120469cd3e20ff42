"""A run that was saved, in whatever phase, and resumed is the run that was never interrupted."""

import functools
import itertools

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import mpjax
from mpjax._optim.states import LossScaleState
from tests.checkpoints import make
from tests.errors import refused
from tests.programs import bits, compilations, data_of_keys

pytestmark = pytest.mark.standard_promotion("dtypes")

STEPS = 40
WINDOW = 3
SCALE = mpjax.DynamicLossScale(init_scale=2**12, growth_interval=4, hysteresis=2)
TX = mpjax.loss_scaling(
  mpjax.accumulate_gradients(mpjax.master_weights(optax.adam(0.01)), WINDOW), SCALE
)
TOO_LARGE = (7, 8, 21, 33)
"""Steps whose batch overflows in float16, whatever the loss scale is."""


def begin():
  """The state before the first step: half and float32 parameters, statistics, a key."""
  rng = np.random.default_rng(0)
  params = {
    "w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float16),
    "norm": jnp.ones((1, 3)),
    "v": jnp.asarray(rng.normal(size=(3, 1)), jnp.float16),
  }
  return mpjax.TrainState.create(
    params, TX, model_state={"mean": jnp.zeros((1, 3))}, rng=jax.random.key(1)
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


@pytest.mark.slow
@pytest.mark.parametrize(("through", "every"), [(through_orbax, 4), (through_msgpack, 1)])
def test_resumed_in_each_phase(through, every, tmp_path):
  # A step from what was saved is the step of the run, whose later ones are then the same too.
  step, state, seen = mpjax.make_train_step(loss_fn, TX), begin(), []
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


@pytest.mark.slow
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
  # Fields that were added to a state since then have a default.
  added = {path.rpartition("/")[2] for path in found.keys() - wanted.keys()}
  assert wanted.keys() <= found.keys()
  assert added <= LossScaleState._field_defaults.keys()
  for path in wanted:
    x = found[path]
    assert (x.dtype, x.shape) == (wanted[path].dtype, wanted[path].shape)
    if inexact and path.startswith(inexact):
      np.testing.assert_allclose(x, wanted[path], rtol=1e-6, err_msg=path)
    else:
      np.testing.assert_array_equal(x, wanted[path], err_msg=path)


@pytest.mark.parametrize("file", ["orbax", "npz"])
@pytest.mark.parametrize("name", make.LAYOUTS)
def test_a_frozen_checkpoint_loads_and_goes_on(name, file):
  layout = make.LAYOUTS[name]
  saved = make.FOLDER / name / "state" if file == "orbax" else arrays(name, "state")
  state = mpjax.checkpoints.restore_like(layout.begin(), saved)
  assert_holds(state, arrays(name, "state"))
  assert_holds(make.run(layout, state, layout.after), arrays(name, "next"), INEXACT.get(name))


def test_an_old_state_moves_to_another_configuration():
  # As the error says: restored as it was, then carried over.
  name = "0.1.0-loss_scaling"
  saved = make.FOLDER / name / "state"
  start = make.begin_adam()
  tx = mpjax.loss_scaling(optax.adam(0.125, b1=0.5, b2=0.75))
  where = "mpjax.checkpoints.restore_like(target, restored)"
  expected = "a loss scale of the configuration 'dynamic' at opt_state"
  got, fix = "'dynamic(growth_interval=4,hysteresis=2)'", "pass its inner_state to the new state"
  with refused(ValueError, where, expected, got, fix):
    mpjax.checkpoints.restore_like({**start, "opt_state": tx.init(start["params"])}, saved)
  old = mpjax.checkpoints.restore_like(start, saved)
  scale = float(mpjax.loss_scaling_metrics(old["opt_state"])["loss_scale"])
  new = tx.init(start["params"])._replace(inner_state=old["opt_state"].inner_state)
  new = mpjax.states.set_loss_scale(new, scale)
  place = "opt_state/inner_state/"
  of_file = {path.partition(place)[2]: x for path, x in arrays(name, "state").items()}
  of_file.pop("")
  assert_holds(new.inner_state, of_file)
  assert mpjax.loss_scaling_metrics(new)["loss_scale"] == 128


# Saved under one policy, restored under another: explicitly, with nothing of float32 lost.

NONE = mpjax.NoLossScale()
ADAM = optax.adam(0.05)
OPTIMIZERS = {
  "float32": mpjax.loss_scaling(ADAM, NONE),
  "mixed_bfloat16": mpjax.loss_scaling(ADAM, NONE),
  "mixed_float16": mpjax.loss_scaling(ADAM),
  "bfloat16": mpjax.loss_scaling(mpjax.master_weights(ADAM), NONE),
}
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


class Network(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(nn.tanh(nn.LayerNorm()(nn.Dense(5)(x))))


@functools.cache
def training(policy):
  """Returns the first state and the step."""
  model = mpjax.linen.with_policy(Network(), policy)

  def loss_fn(params, model_state, batch, rng):
    loss = jnp.mean((model.apply({"params": params}, batch).astype(jnp.float32) - 1) ** 2)
    return loss, (model_state, {})

  params = model.init(jax.random.key(0), X)["params"]
  state = mpjax.TrainState.create(params, OPTIMIZERS[policy])
  return state, mpjax.make_train_step(loss_fn, OPTIMIZERS[policy], donate=False)


def advance(policy, state, steps):
  outputs = []
  for _ in range(steps):
    state, metrics = training(policy)[1](state, X)
    outputs.append(np.asarray(metrics["loss"]).tobytes())
  return state, outputs


@functools.cache
def trained(policy):
  return advance(policy, training(policy)[0], 3)[0]


@pytest.fixture
def checkpoints(tmp_path_factory):
  """The folder of all checkpoints: made once, but in a test, where the flags of tests are set."""
  folder = tmp_path_factory.getbasetemp() / "policies"
  if folder.exists():
    return folder
  with ocp.StandardCheckpointer() as checkpointer:
    for policy in OPTIMIZERS:
      checkpointer.save(folder / policy, trained(policy))
  return folder


def weights(state):
  """The float32 weights of a state: the masters, where there are any."""
  if state.params["Dense_0"]["kernel"].dtype == jnp.float32:
    return state.params
  return mpjax.states.master_params(state.opt_state, state.params)


def moments(state):
  (found,) = [
    x
    for x in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "mu"))
    if hasattr(x, "mu")
  ]
  return found


def begin_from(policy, old):
  """What docs/checkpoints.md says: weights and moments go over, the loss scale starts anew."""
  params = mpjax.Policy.parse(policy).cast_to_param(weights(old))
  opt_state = OPTIMIZERS[policy].init(params)
  if policy == "bfloat16":
    opt_state = mpjax.states.set_master_params(opt_state, weights(old))

  def put(x):
    return moments(old) if hasattr(x, "mu") else x

  opt_state = jax.tree.map(put, opt_state, is_leaf=lambda x: hasattr(x, "mu"))
  return old._replace(params=params, opt_state=opt_state)


@pytest.mark.slow
def test_masters_are_what_is_saved_in_float32(checkpoints):
  with ocp.StandardCheckpointer() as checkpointer:
    raw = checkpointer.restore(checkpoints / "bfloat16")
  target = jax.eval_shape(lambda: training("float32")[0].params)
  found = mpjax.checkpoints.restore_like(target, raw["opt_state"]["inner_state"]["master"])
  assert bits(found) == bits(weights(trained("bfloat16")))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("old", "new"),
  [
    ("float32", "bfloat16"),
    ("bfloat16", "mixed_float16"),
    ("mixed_float16", "float32"),
    ("float32", "mixed_bfloat16"),
  ],
)
def test_any_policy_goes_on_from_any_other(old, new, checkpoints):
  same_layout = new == "mixed_bfloat16"
  if not same_layout:
    with pytest.raises(
      mpjax.errors.MpjaxValueError, match=r"expected (a loss scale|the leaves) of"
    ):
      mpjax.checkpoints.restore_like(training(new)[0], checkpoints / old, cast=True)
  restored = mpjax.checkpoints.restore_like(training(old)[0], checkpoints / old)
  state = begin_from(new, restored)
  assert bits(weights(state)) == bits(weights(trained(old)))
  assert bits(moments(state)) == bits(moments(trained(old)))
  param_dtype = mpjax.Policy.parse(new).param_dtype
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {param_dtype}
  if same_layout:
    # All but the count of steps, which starts anew in the new state.
    direct = mpjax.checkpoints.restore_like(training(new)[0], checkpoints / old)
    both = (x._replace(opt_state=x.opt_state.inner_state) for x in (direct, state))
    assert len({tuple(bits(x)) for x in both}) == 1
  # Its own step takes it, without a new trace, and goes on learning.
  before = advance(old, trained(old), 1)[1]
  trained(new)
  with compilations() as compiled:
    after, outputs = advance(new, state, 3)
  assert np.frombuffer(outputs[-1], np.float32) < np.frombuffer(before[0], np.float32)
  assert compiled["train_step"] == 0
  # And back: nothing was lost on the way.
  assert bits(weights(begin_from(old, after))) == bits(weights(after))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_float32_weights_train_on_in_half_with_exact_masters(half, checkpoints):
  full = training("float32")[0].params
  target = mpjax.Policy.parse(half).cast_to_param(full)
  with ocp.StandardCheckpointer() as checkpointer:
    raw = checkpointer.restore(checkpoints / "float32")["params"]
  with pytest.raises(
    mpjax.errors.MpjaxValueError, match=rf"float32\[4, 5\] for {half}\[4, 5\] at Dense_1"
  ):
    mpjax.checkpoints.restore_like(target, raw)
  params = mpjax.checkpoints.restore_like(target, raw, cast=True)
  opt_state = mpjax.master_weights(ADAM).init(params)
  opt_state = mpjax.states.set_master_params(opt_state, mpjax.checkpoints.restore_like(full, raw))
  saved = trained("float32").params
  assert bits(mpjax.states.master_params(opt_state)) == bits(saved)
  assert bits(params) == bits(jax.tree.map(lambda x: np.asarray(x).astype(half), saved))
