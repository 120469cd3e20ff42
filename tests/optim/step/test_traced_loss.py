"""The single call of a loss function in a training step, and results that raise an error."""

import functools
import inspect
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax._optim.step.traced_loss import OUR_METRICS
from tests.errors import refused
from tests.linen.probes import Does
from tests.optim.losses import loss_of, over_devices, product, returning
from tests.optim.steps import gradients

DYNAMIC = mpjax.loss_scaling(optax.sgd(0.5))


def test_what_a_loss_function_may_not_return():
  for out, got in (
    (lambda loss, state: loss, "float32[]"),
    (lambda loss, state: (loss, {}), "(ShapedArray(float32[]), {})"),
    (lambda loss, state: (loss, (state, loss)), "((), ShapedArray(float32[]))"),
  ):
    where, fix = "mpjax.make_train_step(loss_fn)", "Return (loss, ((), {}))"
    with refused(TypeError, where, "(loss, (model_state, metrics))", got, fix):
      gradients(returning(out), jnp.zeros(2))
  where, got = "mpjax.make_train_step(loss_fn): the loss", "an array of shape (2,)"
  with refused(ValueError, where, "a floating scalar", got, "jnp.mean(losses)"):
    gradients(loss_of(lambda params, batch: batch), jnp.zeros(2))
  # What JAX does not take, or takes as no result, in front of the state's.
  for loss, got in ((None, "None"), ((), "a tuple"), ("x", "'x'"), (jnp.int32(1), "int32[]")):
    with refused(TypeError, where, "a floating scalar", got, "jnp.mean(losses)"):
      gradients(returning(lambda _, state, loss=loss: (loss, (state, {}))), jnp.zeros(2))


def test_names_of_metrics_that_are_taken_or_no_strings():
  where, expected = "mpjax.make_train_step(loss_fn): metrics", "strings that are not names"
  for name in sorted(OUR_METRICS):
    of_name = returning(lambda loss, state, name=name: (loss, (state, {name: 1, "mine": 2})))
    with refused(ValueError, where, expected, f"[{name!r}]", "Rename them"):
      gradients(of_name, jnp.zeros(2))
  of_number = returning(lambda loss, state: (loss, (state, {0: jnp.ones(()), "a": 1.0})))
  with refused(ValueError, where, "strings", "[0]", "Rename them"):
    gradients(of_number, jnp.zeros(2))


def test_every_metric_of_the_step_is_reserved():
  tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.DynamicLossScale())
  loss_fn = loss_of(lambda params, batch: jnp.sum(params.astype(jnp.float16)))
  _, _, metrics = gradients(loss_fn, jnp.zeros(2), tx=tx, max_retries=1)
  assert set(metrics) == OUR_METRICS


@pytest.mark.parametrize("k", [1, 2])
def test_a_model_state_that_changes_its_type(k):
  # A state that changes its dtype would compile the step again, or fail in a `scan`.
  old = {"m": jnp.zeros(2), "n": jnp.zeros((), jnp.int32)}
  for new, got in (
    (lambda old: old | {"m": old["m"].astype(jnp.bfloat16)}, "bfloat16[2] for float32[2]"),
    (lambda old: {"m": old["m"]}, "nothing at ['n']"),
  ):
    loss_fn = returning(lambda loss, state, new=new: (loss, (new(state), {})))
    where = "mpjax.make_train_step(loss_fn): model_state"
    expected = "the structure, shapes and dtypes that it was given"
    with refused(ValueError, where, expected, got, "cast to the dtypes of the old one"):
      gradients(loss_fn, jnp.zeros(2), model_state=old, micro_batches=k)


def test_a_collection_that_sow_fills_is_no_model_state():
  def body(module, x):
    module.sow("losses", "balance", jnp.mean(x))
    return nn.BatchNorm(use_running_average=False)(x)

  model, x = Does(body), jnp.ones((4, 2))
  variables = model.init(jax.random.key(0), x)
  params = variables.pop("params")

  def step_with(model_state, returned):
    def loss_fn(params, model_state, batch, rng):
      variables = {"params": params, **model_state}
      out, new = model.apply(variables, batch, mutable=["batch_stats", "losses"])
      return jnp.mean(out) + sum(new["losses"]["balance"]), ({x: new[x] for x in returned}, {})

    state = mpjax.TrainState.create(params, DYNAMIC, model_state=model_state)
    with warnings.catch_warnings():
      warnings.filterwarnings("ignore", ".*dynamic")  # The model is in float32.
      return mpjax.make_train_step(loss_fn, DYNAMIC)(state, x)

  where, expected = "mpjax.make_train_step(loss_fn): model_state", "the structure"
  fix = "A collection that `sow` fills"
  for returned, got in (
    (["batch_stats"], "nothing at ['losses']"),
    (["batch_stats", "losses"], "an extra leaf at ['losses']['balance'][1]"),
  ):
    with refused(ValueError, where, expected, got, fix):
      step_with(variables, returned)
  # What the error says.
  statistics = {"batch_stats": variables["batch_stats"]}
  step_with(statistics, ["batch_stats"])


OPTIONS = {"plain": {}, "all": {"max_retries": 2, "micro_batches": 2}}


@pytest.mark.parametrize("how", ["jit", "shard_map", "vmap"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_with_a_dynamic_scale_calls_loss_fn_once(name, how, devices):
  calls = []

  def loss_fn(*args):
    calls.append(1)
    return product(*args)

  axis = None if how == "jit" else "data"
  step = mpjax.make_train_step(loss_fn, DYNAMIC, axis_name=axis, donate=False, **OPTIONS[name])
  batch = jnp.ones((8, 3))
  if how == "vmap":
    step = jax.vmap(step, in_axes=(None, 0), axis_name="data")
    batch = batch.reshape(4, 2, 3)
  elif how != "jit":
    step = over_devices(step, devices)
  state = mpjax.TrainState.create(jnp.ones(3), DYNAMIC)
  jax.jit(step).lower(state, batch)
  assert len(calls) == 1


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
      gradients(loss_fn, jnp.ones(2), jnp.ones(2), DYNAMIC, **options)
    line = inspect.getsourcelines(in_bfloat16)[1]
    assert [(w.filename, w.lineno) for w in found] == [(__file__, line)]
  for without_a_line in (Loss(), functools.partial(in_bfloat16)):
    with pytest.warns(UserWarning, match="nothing in loss_fn"):
      gradients(without_a_line, jnp.ones(2), jnp.ones(2), DYNAMIC)


def test_functions_that_take_four():
  for loss_fn in (
    lambda *args: product(*args),
    lambda params, model_state, batch, rng=None, extra=3: product(params, model_state, batch, rng),
    functools.partial(lambda k, *args: product(*args), 2),
    jax.jit(product),
  ):
    assert gradients(loss_fn, jnp.ones((2, 3)), jnp.ones(3))[2]["loss"] == 9


def dropout_by_hand(params, model_state, batch, rng):
  kept = jax.random.bernoulli(rng, 0.5, batch.shape)
  return jnp.mean(jnp.where(kept, batch * params, 0)), (model_state, {})


def dropout_of_flax(params, model_state, batch, rng):
  out = nn.Dropout(0.5, deterministic=False).apply({}, batch * params, rngs={"dropout": rng})
  return jnp.mean(out), (model_state, {})


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_key_that_is_wanted_and_not_there(micro_batches):
  # The error is that of JAX, of Flax or of Python, and a note has the signature and what is absent.
  two, missing = lambda params, batch: 0, lambda *args: args[1]["mean"]
  for loss_fn in (dropout_by_hand, dropout_of_flax, two, missing):
    with pytest.raises(Exception, match=r".") as failed:
      gradients(loss_fn, jnp.ones(4), jnp.ones(()), micro_batches=micro_batches)
    (note,) = [note for note in failed.value.__notes__ if note.startswith("mpjax")]
    assert "loss_fn(params, model_state, batch, rng); TrainState.create made this state" in note
    assert note.endswith("without model_state= and rng=.")


@pytest.mark.slow
def test_values_can_be_looked_at_where_jit_is_off():
  seen = []

  def loss_fn(params, model_state, batch, rng):
    loss = jnp.mean(params * batch)
    if not isinstance(batch, jax.core.Tracer):
      seen.append(float(batch))
    return loss, (model_state, {})

  with jax.disable_jit():
    gradients(loss_fn, jnp.asarray(3.0), jnp.ones(()))
  assert seen == [3.0]
