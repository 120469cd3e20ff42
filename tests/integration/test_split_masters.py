"""Split masters: steps are those of float32 masters, also on devices and in loops of Flax.

`test_masters.py` has the compositions, and the memory, of both storages.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import mpjax
from tests.compilations import compilations
from tests.programs import bits, jitted

STEPS = 1000
ROWS = 16
OPTIMIZERS = {
  "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS)),
  "lion": lambda: optax.lion(1e-4),
  "adafactor": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-2)),
}
STORAGES = ("float32", "split")


def start():
  rng = np.random.default_rng(0)
  return {
    "w": jnp.asarray(rng.normal(size=(8, 16)), jnp.bfloat16),
    "b": jnp.zeros(16, jnp.bfloat16),
    "half": jnp.ones(16, jnp.float16),
    "norm": jnp.ones(16),
  }


@functools.cache
def batches():
  """Rows, a tenth of the batches with an inf."""
  rng = np.random.default_rng(1)
  x = rng.normal(size=(STEPS, ROWS, 8)).astype(np.float32)
  x[rng.random(STEPS) < 0.1, 3, 3] = np.inf
  return x


def loss_fn(params, x):
  y = jnp.tanh(x.astype(jnp.bfloat16) @ params["w"] + params["b"][None])
  y = y.astype(jnp.float32) * (params["half"].astype(jnp.float32) * params["norm"])[None]
  return jnp.mean((y - x.sum(1, keepdims=True)) ** 2)


def trained(tx, storage, params, x):
  """A step as users write it: with a split master nothing but the updates is applied."""

  def step(carry, x):
    params, state = carry
    grads = mpjax.value_and_grad(loss_fn, state)(params, x)[1]
    updates, state = tx.update(grads, state, params)
    master = mpjax.master_params(state) if storage == "float32" else None
    params = mpjax.apply_updates(params, updates, master=master)
    return (params, state), (params, updates, mpjax.master_params(state, params))

  return jax.lax.scan(step, (params, tx.init(params)), x)


def check_equal(found, expected):
  for name, x in found.items():
    assert x.dtype == expected[name].dtype
    assert bits(x) == bits(expected[name]), name


@pytest.mark.case("I16", "I19", "A67", "I1")
def test_1000_steps_are_those_of_float32_masters():
  """Of three optimizers in one program: parameters, updates and masters after each step."""

  @jitted
  def train_all(params, x):
    found = {}
    for name, inner in OPTIMIZERS.items():
      for storage in STORAGES:
        tx = mpjax.loss_scaling(mpjax.master_weights(inner(), storage=storage))
        found[name, storage] = trained(tx, storage, params, x)
    return [found[name, storage] for name in OPTIMIZERS for storage in STORAGES]

  outs = jax.device_get(train_all(start(), batches()))
  for wide, narrow in zip(outs[::2], outs[1::2], strict=True):
    for tree, other in zip(narrow[1], wide[1], strict=True):
      check_equal(tree, other)
    metrics, expected = (mpjax.loss_scaling_metrics(out[0][1]) for out in (narrow, wide))
    assert bits(metrics) == bits(expected)
    assert 50 < metrics["skipped"] < 150
    assert np.mean(narrow[1][2]["w"].view(np.uint32) & 0xFFFF != 0) > 0.9


def train_loss(params, model_state, batch, rng):
  """Its model state is weakly typed, and becomes strong."""
  del rng
  return loss_fn(params, batch), (jnp.where(True, 1.0, 2.0), {})


@pytest.mark.case("I19", "I4")
def test_a_train_step_with_micro_batches_average_retries_and_donation():
  outs = []
  for storage in STORAGES:
    tx = mpjax.loss_scaling(mpjax.master_weights(optax.adamw(1e-2), storage=storage))
    step = mpjax.make_train_step(
      train_loss, tx, accumulate=2, ema_decay=0.9, max_retries=2, donate=True
    )
    state = mpjax.TrainState.create(start(), tx, model_state=jnp.float32(0), ema=True)
    types = jax.tree.map(jax.typeof, state)
    with compilations() as compiled:
      for x in batches()[15:30]:
        old = state
        state, metrics = step(state, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.opt_state.inner_state))
    assert jax.tree.map(jax.typeof, state) == types
    masters = mpjax.master_params(state.opt_state, state.params)
    outs.append((state.params, masters, state.ema, metrics))
    assert compiled["train_step"] == 1
  assert metrics["skipped"] > 0
  for tree, other in zip(*outs, strict=True):
    check_equal(tree, other)


def run_on(place, storage, grads):
  """Returns parameters and masters; `place` has the sharding of each parameter, or is None."""
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.sgd(1e-2, momentum=0.9), storage=storage))
  params = jax.device_put(start(), place) if place else start()
  state = tx.init(params)
  where = jax.tree.map(lambda x: x.sharding, (params, state))
  types = jax.tree.map(jax.typeof, (params, state))
  step = jax.jit(
    lambda params, state, g: stepped(tx, params, state, g),
    out_shardings=where,
    donate_argnums=(0, 1),
  )
  for g in grads:
    given = {"w": g, "b": g[0], "half": g[1], "norm": g[2]}
    given = jax.device_put(given, place) if place else given
    # Thirty steps of eight devices in the queue of two busy cores, and XLA ends the process: a
    # device has waited 40 s for the others.
    params, state = jax.block_until_ready(step(params, state, given))
  assert jax.tree.map(jax.typeof, (params, state)) == types
  return params, mpjax.master_params(state, params)


def stepped(tx, params, state, grads):
  updates, state = tx.update(grads, state, params)
  return mpjax.apply_updates(params, updates), state


@pytest.mark.case("I19")
def test_sharded_over_eight_devices():
  grads = np.random.default_rng(2).normal(size=(10, 8, 16)).astype(np.float32)
  grads[::7, 2, 2] = np.nan
  expected = run_on(None, "float32", grads)
  for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("data",), (kind,), devices=jax.devices()[:8])
    specs = {"w": jax.P("data"), "b": jax.P("data"), "half": jax.P(), "norm": jax.P("data")}
    place = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    found = run_on(place, "split", grads)
    for tree, other in zip(found, expected, strict=True):
      check_equal(tree, other)
    assert found[0]["w"].sharding.is_equivalent_to(place["w"], 2)


@pytest.mark.case("I19")
def test_inside_of_a_shard_map_with_parts_of_each_parameter():
  """Each device has the masters of its rows, as when parameters are sharded by hand."""
  mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])
  grads = np.random.default_rng(2).normal(size=(20, 16, 3)).astype(np.float32)
  grads[::7, 2, 2] = np.nan
  start = jnp.ones((16, 3), jnp.bfloat16)

  def trained_by(storage, **options):
    inner = mpjax.master_weights(optax.adamw(1e-2), storage=storage)
    tx = mpjax.loss_scaling(inner, **options)

    def run(params, grads):
      (params, state), _ = jax.lax.scan(
        lambda carry, g: (stepped(tx, *carry, g), None), (params, tx.init(params)), grads
      )
      skipped = mpjax.loss_scaling_metrics(state)["skipped"]
      return mpjax.master_params(state, params), skipped

    return run

  specs = jax.P("data"), jax.P(None, "data")
  mapped = jax.shard_map(
    trained_by("split", axis_name="data"),
    mesh=mesh,
    in_specs=specs,
    out_specs=(jax.P("data"), jax.P()),
    check_vma=False,
  )
  # Compiled, too: a single operation at a time rounds where a fused one does not, by one ulp.
  expected = jitted(trained_by("float32"))(start, grads)
  assert expected[1] == 3
  assert bits(jitted(mapped)(start, grads)) == bits(expected)


class Net(nn.Module):
  """Stored in bfloat16."""

  @nn.compact
  def __call__(self, x):
    x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(16)(x))
    return nn.Dense(1)(nn.relu(x))


@pytest.mark.case("I19", "I1")
@pytest.mark.parametrize("storage", STORAGES)
def test_a_linen_model_goes_on_in_the_other_storage_from_disk(storage, tmp_path):
  """Batch statistics, average, a skipped step before and after the checkpoint."""
  model = mpjax.linen.with_policy(Net(), "bfloat16")
  rows = np.random.default_rng(3).normal(size=(8, ROWS, 8)).astype(np.float32)
  rows[[2, 6], 1, 1] = np.inf
  variables = model.init(jax.random.key(0), rows[0])

  def loss_fn(params, model_state, batch, rng):
    del rng
    y, moved = model.apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
    return jnp.mean(jnp.square(y.astype(jnp.float32) - batch.sum(1, keepdims=True))), (moved, {})

  steps, states = {}, {}
  for name in STORAGES:
    # Of factors that are powers of two, whose products are exact: a compiler may contract one with
    # a sum in one program and not in the other.
    masters = mpjax.master_weights(optax.sgd(2**-6, momentum=0.5), storage=name)
    tx = mpjax.loss_scaling(masters, mpjax.StaticLossScale(1))
    steps[name] = mpjax.make_train_step(loss_fn, tx, ema_decay=0.5, donate=False)
    rest = {"batch_stats": variables["batch_stats"]}
    states[name] = mpjax.TrainState.create(variables["params"], tx, model_state=rest, ema=True)

  def trained(state, name, batches):
    for x in batches:
      state, metrics = steps[name](state, x)
    assert metrics["skipped"] > 0
    return state

  other = STORAGES[1 - STORAGES.index(storage)]
  half_way = trained(states[storage], storage, rows[:4])
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", half_way)
  target = jax.eval_shape(lambda: states[other])
  found = mpjax.checkpoints.restore_like(target, tmp_path / "state")
  assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, states[other])
  ends = [trained(half_way, storage, rows[4:]), trained(found, other, rows[4:])]
  ends.append(trained(states[other], other, rows))
  assert ends[0].params["Dense_0"]["kernel"].dtype == jnp.bfloat16
  seen = [
    (s.params, s.model_state, s.ema, mpjax.master_params(s.opt_state, s.params)) for s in ends
  ]
  assert bits(seen[0]) == bits(seen[1]) == bits(seen[2])
  assert bits(seen[0][1]) != bits(states[other].model_state)


@pytest.mark.case("I19")
def test_nnx_optimizer():
  outs = []
  for storage in STORAGES:
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(1e-2), storage=storage))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for x in batches()[:3]:

      def loss(model, x=x):
        return jnp.mean(model(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32) ** 2)

      _, grads = mpjax.nnx.value_and_grad(loss, optimizer)(model)
      optimizer.update(model, grads)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    masters = mpjax.master_params(nnx.as_pure(optimizer.opt_state), params)
    outs.append(jax.device_get((nnx.to_pure_dict(params), nnx.to_pure_dict(masters))))
  for tree, other in zip(*outs, strict=True):
    check_equal(tree, other)
