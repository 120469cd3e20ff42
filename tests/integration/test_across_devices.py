"""What devices have in common: gradients of a loss in any form, and the state after a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.optim.losses import AUTO, loss_of, over_devices

DEVICES = 4
SGD = mpjax.loss_scaling(optax.sgd(1.0), mpjax.StaticLossScale(8))
WEIGHTS = np.asarray([1.0, -2.0])
X = np.arange(16.0).reshape(8, 2) / 16
MASK = np.asarray([1, 1, 1, 0, 1, 0, 0, 1.0])  # of two rows each device keeps 2, 1, 1 and 1


def on_devices(step, mode, devices):
  """Returns a function of one state and the rows of all devices, in one of the modes."""
  if mode == "vmap":
    mapped = jax.vmap(step, in_axes=(None, 0), axis_name="data")
  elif mode == "pmap":
    mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), devices=devices)
  else:
    return over_devices(step, devices, check_vma=mode == "shard_map")

  def run(state, batch):
    batch = jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
    return jax.tree.map(lambda x: x[0], mapped(state, batch))

  return run


MODES = ["shard_map", "shard_map without check_vma", "pmap", "vmap"]
START = mpjax.TrainState.create(jnp.float32(WEIGHTS), SGD)
ROWS = jnp.float32(X), jnp.float32(MASK)


def local_mean(params, batch, sum_over=lambda x: x):
  x, mask = batch
  return sum_over(jnp.sum(mask * (x @ params) ** 2)) / sum_over(jnp.sum(mask))


def global_mean(params, batch):
  return local_mean(params, batch, lambda x: jax.lax.psum(x, "data"))


def mixture(params, batch):
  return 0.5 * local_mean(params, batch) + 0.5 * global_mean(params, batch)


def by_numpy(parts):
  """The gradient of the mean of masked means, each over some rows, and that mean; in float64."""
  grads, losses = [], []
  for rows in parts:
    x, mask = X[rows], MASK[rows]
    error = x @ WEIGHTS
    grads.append(2 * x.T @ (mask * error) / mask.sum())
    losses.append(np.sum(mask * error**2) / mask.sum())
  return np.mean(grads, 0), np.mean(losses)


WHOLE = by_numpy([slice(0, 8)])
BY_DEVICE = by_numpy([slice(2 * i, 2 * i + 2) for i in range(DEVICES)])
LOSSES = {
  "local mean": (local_mean, BY_DEVICE),
  "pmean": (lambda params, batch: jax.lax.pmean(local_mean(params, batch), "data"), BY_DEVICE),
  "psum of sums / psum of counts": (global_mean, WHOLE),
  "half of each": (mixture, tuple((a + b) / 2 for a, b in zip(WHOLE, BY_DEVICE, strict=True))),
}


def step_of(loss, **options):
  return mpjax.make_train_step(loss_of(loss), SGD, donate=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_loss_fn_has_reduced_has_its_own_gradient(mode, devices):
  # Not one that is smaller by the number of devices, beside the right loss.
  steps = {form: step_of(fun, axis_name="data") for form, (fun, _) in LOSSES.items()}

  def all_of_them(state, batch):
    return {form: step(state, batch) for form, step in steps.items()}

  found = on_devices(all_of_them, mode, devices)(START, ROWS)
  for form, (_, (gradient, loss)) in LOSSES.items():
    state, metrics = found[form]
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6, err_msg=form)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient), rtol=1e-6)
    np.testing.assert_allclose(state.params, WEIGHTS - gradient, rtol=1e-6)


def test_a_reduced_loss_in_micro_batches(devices):
  # Row 0 of each device and then row 1, each a masked mean over all devices.
  step = step_of(global_mean, axis_name="data", micro_batches=2)
  state, metrics = on_devices(step, "shard_map", devices)(START, ROWS)
  gradient, loss = by_numpy([slice(0, 8, 2), slice(1, 8, 2)])
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
  np.testing.assert_allclose(state.params, WEIGHTS - gradient, rtol=1e-6)


def counting(count):
  """Counts positive numbers by `count`, and steps; a table, a mask and a key are only read."""

  def loss_fn(params, old, batch, rng):
    tokens = count(jnp.sum(batch > 0, dtype=jnp.int32))
    new = old | {
      "counts": {"tokens": old["counts"]["tokens"] + tokens},
      "steps": old["steps"] + jnp.asarray(1, jnp.uint32),
      "started": jnp.asarray(True),
    }
    scale = jnp.where(old["mask"], 1.0, 0.0) * old["table"][0].astype(jnp.float32)
    return jnp.mean((batch @ (params * scale)) ** 2), (new, {})

  return loss_fn


def same(count):
  return count


def summed(count):
  return jax.lax.psum(count, "data")


def before():
  return {
    "counts": {"tokens": jnp.asarray(100, jnp.int32)},
    "steps": jnp.asarray(7, jnp.uint32),
    "started": jnp.asarray(False),
    "table": jnp.asarray([1, 2], jnp.int32),
    "mask": jnp.asarray([True, False]),
    "key": jax.random.key(3),
  }


TOKENS = np.float32([[1, 1], [1, 0], [0, 0], [1, 1], [0, 0], [0, 1], [1, 1], [1, 1]])


def after(loss_fn, devices, mode="shard_map", **options):
  step = mpjax.make_train_step(loss_fn, SGD, axis_name="data", donate=False, **options)
  state = mpjax.TrainState.create(jnp.ones(2), SGD, model_state=before())
  return on_devices(step, mode, devices)(state, TOKENS)[0].model_state


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_token_counter_beside_a_step_counter(micro_batches, devices):
  # As on one device, where all rows are counted; the loss adds up what each has counted.
  state = mpjax.TrainState.create(jnp.ones(2), SGD, model_state=before())
  options = {"micro_batches": micro_batches}
  alone = mpjax.make_train_step(counting(same), SGD, **options)(state, TOKENS)[0].model_state
  found = after(counting(summed), devices, **options)
  assert (found["counts"]["tokens"], found["steps"]) == (110, 7 + micro_batches)
  assert found["started"]
  assert jax.tree.all(jax.tree.map(lambda a, b: jnp.all(a == b), found, alone))
  assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, found, before()))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_step_counter_is_the_same_on_all_devices(mode, devices):
  found = after(counting(lambda count: jnp.int32(2)), devices, mode)
  assert (found["counts"]["tokens"], found["steps"], found["started"]) == (102, 8, True)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("mode", "count"), [*((m, same) for m in MODES), ("pmap", summed)])
def test_integers_that_may_differ_between_devices(mode, count, micro_batches, devices):
  # Without types, JAX does not see that a sum over devices is the same on all of them.
  where, expected = "(axis_name=('data',)): model_state", "the same on all devices"
  got, fix = "int32[] at ['counts']['tokens']", "count + jax.lax.psum(rows, 'data')"
  with refused(ValueError, where, expected, got, fix):
    after(counting(count), devices, mode, micro_batches=micro_batches)


@pytest.mark.parametrize("call", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_callback_that_reads_rows_changes_no_counter(call, devices):
  count = counting(lambda count: jnp.int32(2))

  def loss_fn(params, old, batch, rng):
    call(lambda x: jax.debug.callback(lambda _: None, x))(batch)
    return count(params, old, batch, rng)

  assert after(loss_fn, devices, "pmap")["counts"]["tokens"] == 102


def through(params, old, batch, rng):
  """Passes a part of the state through each kind of call."""
  loss, new = 0.0, {}
  same = lambda p, s, b: (jnp.mean((b @ p) ** 2), dict(s))  # noqa: E731
  for name, wrap in (("plain", lambda f: f), ("jit", jax.jit), ("remat", jax.checkpoint)):
    own, new[name] = wrap(same)(params, old[name], batch)
    loss = loss + own
  return loss, (new, {})


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_integers_that_pass_through_need_no_word(micro_batches, devices):
  old = {name: before() for name in ("plain", "jit", "remat")}
  step = mpjax.make_train_step(through, SGD, axis_name="data", micro_batches=micro_batches)
  state = mpjax.TrainState.create(jnp.ones(2), SGD, model_state=old)
  found = on_devices(step, "shard_map", devices)(state, TOKENS)[0].model_state
  assert jax.tree.all(jax.tree.map(lambda a, b: jnp.all(a == b), found, old))


def test_a_constant_of_three_devices_keeps_its_bits():
  # A mean of three times 0.1 is not 0.1 in float32.
  tenths = jnp.asarray([0.1, jnp.inf, -jnp.inf, jnp.nan])
  loss_fn = loss_of(lambda params, batch: jnp.mean(params * batch))
  step = mpjax.make_train_step(loss_fn, SGD, axis_name="data")
  state = mpjax.TrainState.create(jnp.ones(2), SGD, model_state=tenths)
  state, metrics = jax.vmap(step, in_axes=(None, 0), axis_name="data")(state, jnp.ones((3, 2)))
  assert np.all(metrics["finite"])
  assert state.model_state.tobytes() == np.stack([tenths] * 3).tobytes()


def test_devices_that_would_decide_each_for_itself(devices):
  # JAX's own error names out_specs, and no argument of ours.
  run = on_devices(step_of(local_mean), "shard_map", devices)
  expected = "the name of the axis that the batch is divided over, one of ['data']"
  where, got = "mpjax.make_train_step(axis_name=None)", "None inside of a shard_map"
  with refused(ValueError, where, expected, got, "Pass axis_name='data'"):
    run(START, ROWS)


def test_devices_that_train_models_of_their_own_need_no_axis(devices):
  # An ensemble: each device has its own state.
  step = step_of(local_mean)
  one = functools.partial(jax.tree.map, lambda x: x[0])
  several = functools.partial(jax.tree.map, lambda x: x[None])
  states = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), START)
  mesh, data = jax.make_mesh((4,), ("data",), (AUTO,), devices=devices), jax.P("data")
  own = lambda state, batch: several(step(one(state), batch))  # noqa: E731
  mapped = jax.shard_map(own, mesh=mesh, in_specs=data, out_specs=data)
  states, _ = jax.jit(mapped)(states, ROWS)
  for i, params in enumerate(states.params):
    gradient, _ = by_numpy([slice(2 * i, 2 * i + 2)])
    np.testing.assert_allclose(params, WEIGHTS - gradient, rtol=1e-6)


def test_a_loop_by_hand_takes_the_same_gradient(devices):
  # The loss varies over devices before it is differentiated, as docs/distribution.md has it.
  tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.StaticLossScale(8), axis_name="data")

  def by_hand(fun, state, batch):
    params, opt_state = state
    local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    zero = jax.lax.pcast(0.0, "data", to="varying")
    value, grads = jax.value_and_grad(mpjax.scaled(lambda p: fun(p, batch) + zero, opt_state))(
      local
    )
    grads = jax.tree.map(lambda g: jax.lax.pmean(g.astype(jnp.float32), "data"), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), jax.lax.pmean(value, "data")

  def all_of_them(state, batch):
    return {form: by_hand(fun, state, batch) for form, (fun, _) in LOSSES.items()}

  params = jnp.float32(WEIGHTS)
  found = on_devices(all_of_them, "shard_map", devices)((params, tx.init(params)), ROWS)
  for form, (_, (gradient, loss)) in LOSSES.items():
    new, value = found[form]
    np.testing.assert_allclose(value, loss, rtol=1e-6, err_msg=form)
    np.testing.assert_allclose(new, WEIGHTS - gradient, rtol=1e-6)
