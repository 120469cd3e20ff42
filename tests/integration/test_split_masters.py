"""Split masters: 1,000 steps are those of float32 masters, in every composition."""

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
  "sgd": lambda: optax.sgd(0.01, momentum=0.9),
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


def stepper(tx, storage):
  """A step as users write it: with a split master nothing but the updates is applied."""

  def step(carry, x):
    params, state = carry
    grads = mpjax.value_and_grad(loss_fn, state)(params, x)[1]
    updates, state = tx.update(grads, state, params)
    master = mpjax.master_params(state) if storage == "float32" else None
    params = mpjax.apply_updates(params, updates, master=master)
    return (params, state), (params, updates, mpjax.master_params(state, params))

  return step


def trained(tx, storage, params, x):
  step = stepper(tx, storage)
  return jitted(lambda carry, x: jax.lax.scan(step, carry, x))((params, tx.init(params)), x)


COMPOSITIONS = {
  "inside": lambda masters, inner: mpjax.loss_scaling(masters(inner)),
  "around": lambda masters, inner: masters(mpjax.loss_scaling(inner)),
  "window": lambda masters, inner: mpjax.loss_scaling(
    mpjax.accumulate_gradients(masters(inner), 3)
  ),
  "of a window": lambda masters, inner: mpjax.loss_scaling(
    masters(mpjax.accumulate_gradients(inner, 3))
  ),
  "labelled": lambda masters, inner: mpjax.loss_scaling(
    optax.multi_transform(
      {"x": masters(inner), "y": masters(optax.sgd(1e-3))},
      {"w": "x", "b": "y", "half": "x", "norm": "y"},
    ),
    monitor=True,
  ),
  "injected": lambda masters, inner: mpjax.loss_scaling(
    optax.chain(optax.clip(1.0), masters(inner)), check_updates=True
  ),
}


def check_equal(found, expected):
  for name, x in found.items():
    assert x.dtype == expected[name].dtype
    assert bits(x) == bits(expected[name]), name


def compared(make, x):
  """Runs both storages; returns the masters of the split one, after they were compared."""
  outs = []
  for storage in STORAGES:
    tx = make(functools.partial(mpjax.master_weights, storage=storage))
    outs.append(jax.device_get(trained(tx, storage, start(), x)))
  (_, expected_state), expected = outs[0]
  (_, state), found = outs[1]
  for tree, other in zip(found, expected, strict=True):
    check_equal(tree, other)
  metrics = mpjax.loss_scaling_metrics(state)
  assert bits(metrics) == bits(mpjax.loss_scaling_metrics(expected_state))
  return found[2], metrics


@pytest.mark.case("I16", "I19", "A67", "I1")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_1000_steps_are_those_of_float32_masters(name):
  masters, metrics = compared(
    lambda masters: mpjax.loss_scaling(masters(OPTIMIZERS[name]())), batches()
  )
  assert 50 < metrics["skipped"] < 150
  number = masters["w"].view(np.uint32)
  assert np.mean(number & 0xFFFF != 0) > 0.9


def test_ties_of_both_kinds_are_steps_like_others():
  """Of parameter and 16 bits alone one of the two would come back as the other."""
  params = {"up": jnp.ones(2, jnp.bfloat16), "down": -jnp.ones(2, jnp.bfloat16)}
  tx = mpjax.master_weights(optax.sgd(2.0**-9), storage="split")
  state, master = tx.init(params), np.ones(2, np.float32)
  seen = set()
  for _ in range(12):
    grads = {"up": -jnp.ones(2), "down": jnp.ones(2)}
    updates, state = tx.update(grads, state, params)
    params = mpjax.apply_updates(params, updates)
    master = master + np.float32(2.0**-9)
    assert bits(mpjax.master_params(state, params)) == bits({"up": master, "down": -master})
    assert bits(params["up"]) == bits(master.astype(jnp.bfloat16))
    seen.add(int(master.view(np.uint32)[0] & 0x1FFFF))
  assert {0x8000, 0x18000} < seen


@pytest.mark.case("I16", "I19", "A67")
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions(name):
  x = batches()[:100]
  _, metrics = compared(lambda masters: COMPOSITIONS[name](masters, optax.adam(1e-2)), x)
  assert metrics["skipped"] > 5


@pytest.mark.parametrize("storage", STORAGES)
def test_optax_apply_updates_gives_the_rounded_masters_too(storage):
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(1e-2), storage=storage))
  params, state = start(), None
  state = tx.init(params)

  @jitted
  def step(params, state, x):
    grads = mpjax.value_and_grad(loss_fn, state)(params, x)[1]
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for x in batches()[:40]:
    params, state = step(params, state, x)
  masters = mpjax.master_params(state, params)
  for name, p in params.items():
    assert bits(p) == bits(np.asarray(masters[name]).astype(p.dtype))


def state_of(tx, params, **more):
  return mpjax.TrainState.create(params, tx, **more)


def train_loss(params, model_state, batch, rng):
  del rng
  return loss_fn(params, batch), (model_state, {})


@pytest.mark.case("I19")
@pytest.mark.parametrize("retries", [0, 2])
def test_a_train_step_with_micro_batches_average_and_donation(retries):
  outs = []
  for storage in STORAGES:
    tx = mpjax.loss_scaling(mpjax.master_weights(optax.adamw(1e-2), storage=storage))
    step = mpjax.make_train_step(
      train_loss, tx, accumulate=2, ema_decay=0.9, max_retries=retries, donate=True
    )
    state = state_of(tx, start(), ema=True)
    types = jax.tree.map(jax.typeof, state)
    with compilations() as compiled:
      for x in batches()[:30]:
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


def test_a_skipped_step_is_a_deleted_one():
  tx = mpjax.loss_scaling(
    mpjax.master_weights(optax.adamw(1e-2), storage="split"), mpjax.StaticLossScale(8)
  )
  x = batches()[:100]
  good = np.isfinite(x).all((1, 2))
  ends = [trained(tx, "split", start(), rows)[0] for rows in (x, x[good])]
  (params, state), (expected, expected_state) = ends
  check_equal(params, expected)
  assert bits(state.inner_state) == bits(expected_state.inner_state)


def test_two_bytes_and_a_bit_for_each_parameter():
  params = {"w": jnp.ones((64, 32), jnp.bfloat16), "b": jnp.ones(32, jnp.bfloat16)}
  size = 64 * 32 + 32
  found = {}
  for storage in STORAGES:
    tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(1e-3), storage=storage))
    state = tx.init(params)

    def step(params, state, grads, tx=tx):
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    compiled = (
      jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(params, state, params).compile()
    )
    memory = compiled.memory_analysis()
    found[storage] = sum(x.nbytes for x in jax.tree.leaves(state) if x.ndim)
    held = memory.argument_size_in_bytes - sum(x.nbytes for x in jax.tree.leaves(params))
    numbers = sum(x.nbytes for x in jax.tree.leaves(state) if not x.ndim)
    assert held == found[storage] + numbers + 2 * size  # Gradients in bfloat16.
    assert memory.alias_size_in_bytes == held
  assert found["float32"] == (4 + 8) * size
  assert found["split"] == (2 + 8) * size + size / 8


def run_on(place, storage, grads):
  """Returns parameters and masters; `place` has the sharding of each parameter, or is None."""
  tx = mpjax.loss_scaling(mpjax.master_weights(optax.adamw(1e-2), storage=storage))
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
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_over_eight_devices(axis_type):
  mesh = jax.make_mesh((8,), ("data",), (axis_type,), devices=jax.devices()[:8])
  specs = {"w": jax.P("data"), "b": jax.P("data"), "half": jax.P(), "norm": jax.P("data")}
  place = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
  grads = np.random.default_rng(2).normal(size=(30, 8, 16)).astype(np.float32)
  grads[::7, 2, 2] = np.nan
  expected = run_on(None, "float32", grads)
  for found in (run_on(None, "split", grads), run_on(place, "split", grads)):
    for tree, other in zip(found, expected, strict=True):
      check_equal(tree, other)
  assert found[0]["w"].sharding.is_equivalent_to(place["w"], 2)


@pytest.mark.case("I19")
@pytest.mark.parametrize("storage", STORAGES)
def test_inside_of_a_shard_map_with_parts_of_each_parameter(storage):
  """Each device has the masters of its rows, as when parameters are sharded by hand."""
  mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])
  tx = mpjax.loss_scaling(
    mpjax.master_weights(optax.adamw(1e-2), storage=storage), axis_name="data"
  )
  grads = np.random.default_rng(2).normal(size=(20, 16, 3)).astype(np.float32)
  grads[::7, 2, 2] = np.nan
  params = np.ones((16, 3), jnp.bfloat16)

  specs = (jax.P("data"), jax.P(None, "data"))

  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=specs, out_specs=jax.P("data"), check_vma=False
  )
  def run(params, grads):
    carry, _ = jax.lax.scan(
      lambda c, g: (stepped(tx, *c, g), None), (params, tx.init(params)), grads
    )
    params, state = carry
    return mpjax.master_params(state, params)

  # Compiled, too: a single operation at a time rounds where a fused one does not, by one ulp.
  alone = mpjax.loss_scaling(mpjax.master_weights(optax.adamw(1e-2)))
  start = jnp.asarray(params), alone.init(jnp.asarray(params))
  (_, state), _ = jitted(
    lambda start: jax.lax.scan(lambda c, g: (stepped(alone, *c, g), None), start, grads)
  )(start)
  assert mpjax.loss_scaling_metrics(state)["skipped"] == 3
  assert bits(jitted(run)(params, grads)) == bits(mpjax.master_params(state))


class Net(nn.Module):
  """Stored in bfloat16, but for what default rules leave in float32."""

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
    masters = mpjax.master_weights(optax.adamw(1e-2), storage=name)
    tx = mpjax.loss_scaling(masters, mpjax.StaticLossScale(1))
    steps[name] = mpjax.make_train_step(loss_fn, tx, ema_decay=0.9, donate=False)
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
    for x in batches()[:10]:

      def loss(model, x=x):
        return jnp.mean(model(jnp.asarray(x, jnp.bfloat16)).astype(jnp.float32) ** 2)

      _, grads = mpjax.nnx.value_and_grad(loss, optimizer)(model)
      optimizer.update(model, grads)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    masters = mpjax.master_params(nnx.as_pure(optimizer.opt_state), params)
    outs.append(jax.device_get((nnx.to_pure_dict(params), nnx.to_pure_dict(masters))))
  for tree, other in zip(*outs, strict=True):
    check_equal(tree, other)
