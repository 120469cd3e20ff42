"""The loss function is called once, and its program says what a warning needs to know."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.programs import bits
from tests.transforms.losses import AUTO, over_devices

DYNAMIC = mpjax.loss_scaling(optax.sgd(0.5))
STATIC = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(8))


def first_step(loss_fn, params, batch, tx=STATIC, ema=False, model_state=(), **options):
  """Makes a state, and returns what its first step returns."""
  state = mpjax.TrainState.create(params, tx, ema=ema, model_state=model_state)
  return mpjax.make_train_step(loss_fn, tx, **options)(state, batch)


def counted(loss_fn):
  calls = []

  @functools.wraps(loss_fn)
  def counting(*args):
    calls.append(1)
    return loss_fn(*args)

  return counting, calls


def product(params, model_state, batch, rng):
  out = batch.astype(jnp.float16) @ params.astype(jnp.float16)
  return jnp.mean(out.astype(jnp.float32) ** 2), (model_state, {"largest": jnp.max(out)})


OPTIONS = {"plain": {}, "all": {"max_retries": 2, "accumulate": 2, "ema_decay": 0.9}}


@pytest.mark.case("I4")
@pytest.mark.parametrize("how", ["jit", "shard_map", "shard_map without check_vma", "vmap"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_a_dynamic_scale_calls_loss_fn_once(name, how, devices):
  loss_fn, calls = counted(product)
  axis = None if how == "jit" else "data"
  step = mpjax.make_train_step(loss_fn, DYNAMIC, axis_name=axis, donate=False, **OPTIONS[name])
  batch = jnp.ones((8, 3))
  if how == "vmap":
    step = jax.vmap(step, in_axes=(None, 0), axis_name="data")
    batch = batch.reshape(4, 2, 3)
  elif how != "jit":
    step = over_devices(step, devices, check_vma=how == "shard_map")
  state = mpjax.TrainState.create(jnp.ones(3), DYNAMIC, ema="ema_decay" in OPTIONS[name])
  jax.jit(step).lower(state, batch)
  assert len(calls) == 1


def first_state(params, model_state, batch, rng):
  """An RNN whose first state is learned."""
  h0 = jnp.broadcast_to(params["h0"], batch.shape[1:]).astype(jnp.float16)
  w = params["w"].astype(jnp.float16)
  last, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x.astype(jnp.float16) @ w + h), None), h0, batch)
  return jnp.mean(last.astype(jnp.float32) ** 2), (model_state, {})


def carried_state(params, model_state, batch, rng):
  """Statistics that a scan carries."""
  w = params["w"].astype(jnp.float16)

  def body(mean, x):
    out = x.astype(jnp.float16) @ w
    return mean * 0.5 + jnp.mean(out.astype(jnp.float32)), out

  mean, out = jax.lax.scan(body, model_state, batch)
  return jnp.mean(out.astype(jnp.float32) ** 2), (mean, {})


@pytest.mark.parametrize("loss_fn", [first_state, carried_state])
def test_what_runs_with_a_static_scale_in_a_shard_map_runs_with_a_dynamic_one(loss_fn, devices):
  mesh = jax.make_mesh((4,), ("data",), (AUTO,), devices=devices)
  found = []
  for config in (mpjax.StaticLossScale(2**15), mpjax.DynamicLossScale()):
    tx = mpjax.loss_scaling(optax.sgd(0.1), config)
    step = mpjax.make_train_step(loss_fn, tx, axis_name="data")
    specs = {"in_specs": (jax.P(), jax.P(None, "data")), "out_specs": jax.P()}
    step = jax.shard_map(step, mesh=mesh, **specs)
    params = {"w": jnp.eye(4), "h0": jnp.zeros(4)}
    state = mpjax.TrainState.create(params, tx, model_state=jnp.zeros(()))
    state, metrics = jax.jit(step)(state, jnp.ones((5, 8, 4)))
    assert metrics["finite"]
    found.append(bits((state.params, state.model_state)))
  assert found[0] == found[1]


def test_a_mesh_that_is_partly_manual(devices):
  mesh = jax.make_mesh((2, 2), ("rows", "columns"), (AUTO, AUTO), devices=devices)
  step = mpjax.make_train_step(product, DYNAMIC, axis_name="rows")
  specs = {"in_specs": (jax.P(), jax.P("rows")), "out_specs": jax.P(), "axis_names": {"rows"}}
  step = jax.shard_map(step, mesh=mesh, **specs)
  columns = jax.NamedSharding(mesh, jax.P(None, "columns"))
  state = mpjax.TrainState.create(jax.device_put(jnp.eye(4), columns), DYNAMIC)
  _, metrics = jax.jit(step)(state, jnp.ones((8, 4)))
  assert (metrics["finite"], metrics["loss"]) == (True, 1)


def in_bfloat16(params, model_state, batch, rng):
  return jnp.sum(params.astype(jnp.bfloat16)).astype(jnp.float32), (model_state, {})


class Loss:
  def __call__(self, *args):
    return in_bfloat16(*args)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_warning_names_the_line_of_the_loss_function(options):
  # Not one of ours, which the reader has not written.
  for loss_fn in (in_bfloat16, jax.jit(in_bfloat16)):
    with pytest.warns(UserWarning, match="nothing in loss_fn") as found:
      first_step(loss_fn, jnp.ones(2), jnp.ones(2), DYNAMIC, ema="ema_decay" in options, **options)
    line = inspect.getsourcelines(in_bfloat16)[1]
    assert [(w.filename, w.lineno) for w in found] == [(__file__, line)]
  for without_a_line in (Loss(), functools.partial(in_bfloat16)):
    with pytest.warns(UserWarning, match="nothing in loss_fn"):
      first_step(without_a_line, jnp.ones(2), jnp.ones(2), DYNAMIC)


def test_a_loss_function_of_other_arguments():
  for loss_fn, got in (
    (lambda params, batch: jnp.sum(params * batch), "one of (params, batch) (too many"),
    (lambda params, model_state, batch, rng, extra: 0, "(missing a required argument: 'extra')"),
    (lambda params, model_state, batch, *, rng: 0, "(too many positional arguments)"),
  ):
    expected = "a function of four arguments, loss_fn(params, model_state, batch, rng)"
    with refused(TypeError, "mpjax.make_train_step(loss_fn)", expected, got, "Take all four"):
      mpjax.make_train_step(loss_fn, mpjax.loss_scaling(optax.sgd(0.5)))


def test_functions_that_take_four():
  for loss_fn in (
    lambda *args: product(*args),
    lambda params, model_state, batch, rng=None, extra=3: product(params, model_state, batch, rng),
    functools.partial(lambda k, *args: product(*args), 2),
    jax.jit(product),
  ):
    assert first_step(loss_fn, jnp.ones(3), jnp.ones((2, 3)))[1]["loss"] == 9


def dropout_by_hand(params, model_state, batch, rng):
  kept = jax.random.bernoulli(rng, 0.5, batch.shape)
  return jnp.mean(jnp.where(kept, batch * params, 0)), (model_state, {})


def dropout_of_flax(params, model_state, batch, rng):
  out = nn.Dropout(0.5, deterministic=False).apply({}, batch * params, rngs={"dropout": rng})
  return jnp.mean(out), (model_state, {})


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_key_that_is_wanted_and_not_there(accumulate):
  where, expected = "mpjax.make_train_step(loss_fn): rng", "a PRNG key in the state"
  fix = "TrainState.create(..., rng=jax.random.key(0))"
  for loss_fn in (dropout_by_hand, dropout_of_flax):
    with refused(TypeError, where, expected, "None (", fix):
      first_step(loss_fn, jnp.ones(()), jnp.ones(4), accumulate=accumulate)


def test_other_errors_of_a_loss_function_are_its_own():
  def loss_fn(params, model_state, batch, rng):
    raise KeyError("labels")

  with pytest.raises(KeyError, match="labels"):
    first_step(loss_fn, jnp.ones(()), jnp.ones(4))


def test_metrics_whose_names_are_no_strings():
  def loss_fn(params, model_state, batch, rng):
    return jnp.mean(params * batch), (model_state, {0: jnp.ones(()), "a": 1.0})

  where = "mpjax.make_train_step(loss_fn): metrics"
  with refused(TypeError, where, "strings for names", "[0]", "Name each number"):
    first_step(loss_fn, jnp.ones(()), jnp.ones(()))


@pytest.mark.parametrize("jit", [True, False])
def test_constants_come_out_as_arrays(jit):
  # A program returns them as NumPy values, or as literals of JAX.
  def loss_fn(params, model_state, batch, rng):
    return jnp.sum(params), (3, {"half": 0.5, "table": np.arange(2), "flag": True})

  with jax.disable_jit(not jit):
    state, metrics = first_step(loss_fn, jnp.ones(2), jnp.ones(()), model_state=0)
  assert all(type(x) is type(jnp.ones(())) for x in jax.tree.leaves((state, metrics)))
  assert (state.model_state, metrics["half"], metrics["flag"]) == (3, 0.5, 1)
  np.testing.assert_array_equal(metrics["table"], [0, 1])


def test_values_can_be_looked_at_where_jit_is_off():
  seen = []

  def loss_fn(params, model_state, batch, rng):
    loss = jnp.mean(params * batch)
    if not isinstance(batch, jax.core.Tracer):
      seen.append(float(batch))
    return loss, (model_state, {})

  with jax.disable_jit():
    first_step(loss_fn, jnp.ones(()), jnp.asarray(3.0))
  assert seen == [3.0]
