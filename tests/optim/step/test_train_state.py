"""What a `TrainState` holds, and with whom it shares memory: with nobody."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import mpjax
from tests.errors import refused
from tests.nnx.rig import Metric
from tests.programs import bits

AXES = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]
ADAM = mpjax.loss_scaling(optax.adam(1e-3))


def test_fields():
  params, stats, rng = {"w": jnp.ones((2, 3))}, {"mean": jnp.full(3, 0.5)}, jax.random.key(7)
  state = mpjax.TrainState.create(params, ADAM, model_state=stats, rng=rng)
  assert state._fields == ("step", "params", "opt_state", "model_state", "rng")
  assert (state.step.dtype, state.step.shape, int(state.step)) == (jnp.int32, (), 0)
  assert jax.tree.structure(state.opt_state) == jax.tree.structure(ADAM.init(params))
  assert bits((state.params, state.model_state)) == bits((params, stats))
  assert state.rng == rng
  assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(state))
  bare = mpjax.TrainState.create(params, ADAM)
  assert (bare.model_state, bare.rng) == ((), None)
  assert bare.replace(step=3) == bare._replace(step=3)


def test_numbers_become_strong_arrays():
  # A NumPy leaf or a Python number would be another type after the first step.
  params = {"np": np.ones(2, np.float32), "number": 2.0, "weak": jnp.asarray(1.0) * 1}
  given = {"count": 3, "flag": True, "np": np.zeros((), np.int32)}
  state = mpjax.TrainState.create(params, ADAM, model_state=given, rng=np.zeros(2, np.uint32))
  leaves = jax.tree.leaves(state)
  assert all(isinstance(x, jax.Array) and not jax.typeof(x).weak_type for x in leaves)
  assert {key: x.dtype for key, x in state.params.items()} == dict.fromkeys(params, jnp.float32)
  dtypes = {"count": jnp.int32, "flag": jnp.bool_, "np": jnp.int32}
  assert {key: x.dtype for key, x in state.model_state.items()} == dtypes
  assert state.rng.dtype == jnp.uint32


@pytest.mark.parametrize("axis_type", AXES, ids=lambda a: a.name)
def test_on_a_mesh(devices, axis_type):
  # What is made from a sharded parameter is sharded like it; what is new is on all devices.
  mesh = jax.make_mesh((4,), ("data",), (axis_type,), devices=devices)
  cut = jax.NamedSharding(mesh, jax.P("data"))
  params = {"w": jax.device_put(jnp.ones((8, 2), jnp.bfloat16), cut)}
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(1e-3)))
  state = mpjax.TrainState.create(params, tx, rng=jax.random.key(0), model_state=0.5)
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    expected = cut if x.shape == (8, 2) else jax.NamedSharding(mesh, jax.P())
    assert x.sharding.is_equivalent_to(expected, x.ndim), path
    assert x.committed
  # The parameter, its master, two moments.
  assert sum(x.shape == (8, 2) for x in jax.tree.leaves(state)) == 4


def test_a_state_for_one_device_is_there_altogether():
  device = jax.devices()[1]
  state = mpjax.TrainState.create(jax.device_put(jnp.ones(2), device), ADAM)
  assert {(x.committed, *x.devices()) for x in jax.tree.leaves(state)} == {(True, device)}


def normed():
  return nnx.Sequential(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)))


def test_variables_that_are_trained_may_be_parameters():
  _, params, _ = nnx.split(normed(), nnx.Param, ...)
  for given in (params, nnx.as_pure(params)):
    assert len(jax.tree.leaves(mpjax.TrainState.create(given, ADAM).params)) == 4
  assert mpjax.TrainState.create({"own": Metric(jnp.ones(2))}, ADAM).step == 0


def test_arguments_that_are_taken_for_others():
  with refused(TypeError, "TrainState.create", "arrays", "a PjitFunction at params/f", "Equinox"):
    mpjax.TrainState.create({"f": jax.jit(jnp.tanh), "w": jnp.ones(2)}, ADAM)
  # Among them: weight decay would act on a running mean; a step has one loss.
  create, params, call = mpjax.TrainState.create, {"w": jnp.ones(2)}, "mpjax.TrainState.create"
  split = "graphdef, params, rest = nnx.split(model, nnx.Param, ...)"
  model, alone, plain = normed(), "the parameters alone", nnx.Linear(3, 2, rngs=nnx.Rngs(0))
  variables = params | {"params": jnp.ones(2), "batch_stats": jnp.ones(2)}
  for given, expected, got, fix in (
    (params | {"n": jnp.arange(2)}, "floating parameters", "int32 at ['n']", "model_state"),
    (variables, alone, "['batch_stats', 'params', 'w']", 'variables["params"]'),
    (nn.Dense(2), alone, "a Dense", 'variables["params"]'),
    (None, alone, "None", 'variables["params"]'),
    (model, alone, "objects of NNX with Sequential at the root", split),
    (nnx.state(model), alone, "BatchStat at layers/1/mean", split),
    ({"m": plain, **params}, alone, "Linear at m", split),
  ):
    with refused(TypeError, f"{call}(params)", expected, got, fix):
      create(given, ADAM)
  two = jax.ShapeDtypeStruct((2, 2), jnp.uint32)
  for rng, got in ((42, "42"), (two, "[2")):
    with refused(TypeError, f"{call}(rng)", "one PRNG key", got, "jax.random.key(0)"):
      create(params, ADAM, rng=rng)
  unscaled, made = "a tuple without a loss scale", f"{call}(params, tx)"
  optimizer = "the optimizer, an optax transformation"
  for given, tx, expected, got, fix in (
    (params, optax.adam(1e-3), "mpjax.loss_scaling", unscaled, "tx = mpjax.loss_scaling(tx)"),
    (params, ADAM.init(params), optimizer, "a LossScalingState", made),
    (ADAM, params, optimizer, "a dict", made),
  ):
    with refused(TypeError, f"{call}(tx)", expected, got, fix):
      create(given, tx)
  expected, got = "arguments params, tx, model_state, rng", "an unexpected keyword argument"
  with refused(TypeError, call, expected, f"{got} 'apply_fn'. Write", made):
    create(apply_fn=print, params=params, tx=ADAM)


def test_the_scale_has_to_cover_the_entire_optimizer_of_one_loss():
  # What is outside of it would move on a skipped step.
  sgd, static, labels = optax.sgd(0.5), mpjax.StaticLossScale(2), {"w": "a", "v": "b"}
  scaled = {name: mpjax.loss_scaling(sgd, static, name=name) for name in "ab"}
  two_losses = mpjax.loss_scaling(sgd, {"a": static, "b": static})
  inside, outermost = "loss scale(s) inside of a", "Write mpjax.loss_scaling(optax.chain(...))"
  for tx, got, fix in (
    (two_losses, "2 loss scale(s)", "mpjax.scaled(..., name=...)"),
    (optax.chain(scaled["a"], optax.add_decayed_weights(-0.1)), inside, outermost),
    (optax.multi_transform({"a": scaled["a"], "b": sgd}, labels), inside, outermost),
    (optax.multi_transform(scaled, labels), inside, outermost),
  ):
    expected = "mpjax.loss_scaling around the entire optimizer, for one loss"
    with refused(TypeError, "mpjax.TrainState.create(tx)", expected, got, fix):
      mpjax.TrainState.create({"w": jnp.ones(2), "v": jnp.ones(2)}, tx)
