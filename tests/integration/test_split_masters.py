"""Split masters: steps are those of float32 masters, also on devices and in loops of Flax.

`test_masters.py` has the compositions, and the memory, of both storages.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.programs import bits, compilations, jitted

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
  # Of three optimizers in one program: parameters, updates and masters after each step.
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


def stepped(tx, params, state, grads):
  updates, state = tx.update(grads, state, params)
  return mpjax.apply_updates(params, updates), state


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
BY_ROWS, BY_COLUMNS = jax.P("data"), jax.P(None, "data")


@pytest.mark.case("I19")
@pytest.mark.parametrize(
  ("kind", "spec", "mapped"),
  [
    (AUTO, BY_ROWS, {}),
    (EXPLICIT, BY_COLUMNS, {}),
    (AUTO, BY_ROWS, {"check_vma": True}),
    (AUTO, BY_COLUMNS, {"check_vma": False}),
  ],
  ids=str,
)
def test_n9_eight_devices_have_parts_of_each_parameter(kind, spec, mapped):
  # By the sharding of the arguments, or in a shard_map; on the host all masters are right.
  mesh = jax.make_mesh((8,), ("data",), (kind,), devices=jax.devices()[:8])
  grads = np.random.default_rng(2).normal(size=(20, 16, 24)).astype(np.float32)
  grads[::7, 2, 2] = np.nan

  def in_shard_map(step, state):
    specs = spec, jax.tree.map(lambda x: spec if x.ndim else jax.P(), state)
    return jax.shard_map(step, mesh=mesh, in_specs=(*specs, spec), out_specs=specs, **mapped)

  def train(storage, place, wrap=lambda step, state: step, **options):
    inner = mpjax.master_weights(optax.adamw(1e-2), storage=storage)
    tx = mpjax.loss_scaling(inner, **options)
    params = jax.device_put(jnp.ones((16, 24), jnp.bfloat16), place)
    state = tx.init(params)
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    types = jax.tree.map(jax.typeof, (params, state))
    step = jitted(wrap(functools.partial(stepped, tx), state))
    for g in grads:
      # Steps of eight devices in the queue of two busy cores, and XLA ends the process: a device
      # has waited 40 s for the others.
      params, state = jax.block_until_ready(step(params, state, jax.device_put(g, place)))
    assert jax.tree.map(jax.typeof, (params, state)) == types
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), (params, state), where)
    assert jax.tree.all(same)
    params, state = jax.device_get((params, state))
    return mpjax.master_params(state, params), mpjax.loss_scaling_metrics(state)["skipped"]

  expected = train("float32", jax.devices()[0])
  assert expected[1] == 3
  options = {"wrap": in_shard_map, "axis_name": "data"} if mapped else {}
  assert bits(train("split", jax.NamedSharding(mesh, spec), **options)) == bits(expected)


@pytest.mark.case("I19")
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_n11_partitioned_parameters_of_flax(axis_type):
  # Both frameworks give the metadata of a parameter to its remainder, whose shape is the same.
  mesh = jax.make_mesh((2, 4), ("d", "m"), (axis_type,) * 2, devices=jax.devices()[:8])
  init, names, dtype = nn.initializers.lecun_normal(), ("d", "m"), jnp.bfloat16
  layer = nn.Dense(16, param_dtype=dtype, kernel_init=nn.with_partitioning(init, names))
  variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
  where = jax.NamedSharding(mesh, jax.P(*names))
  for storage in STORAGES:
    tx = mpjax.loss_scaling(mpjax.master_weights(optax.adam(0.1), storage=storage))
    shardings = nn.get_sharding(jax.eval_shape(tx.init, variables), mesh)
    state = jax.jit(tx.init, out_shardings=shardings)(variables)
    assert state.inner_state.master["kernel"].value.sharding == where
    with jax.set_mesh(mesh):
      kernel = nnx.with_partitioning(init, names)
      model = nnx.Linear(8, 16, param_dtype=dtype, kernel_init=kernel, rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert optimizer.opt_state.inner_state.master["kernel"].sharding == where


def test_a_step_is_as_large_as_with_float32_masters():
  params = {f"layer_{i}": jnp.ones((4, 16), jnp.bfloat16) for i in range(50)}
  lines = {}
  for storage in STORAGES:
    tx = mpjax.loss_scaling(mpjax.master_weights(optax.adamw(1e-3), storage=storage))
    state = tx.init(params)
    jaxpr = jax.make_jaxpr(tx.update)(params, state, params)
    lines[storage] = len(str(jaxpr).splitlines())
  assert lines["split"] < 1.1 * lines["float32"]


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
