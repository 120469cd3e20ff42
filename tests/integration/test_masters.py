"""Masters of both storages under faults, composed, on devices, in memory: equal to a float32 run.

The control is optax on float32 parameters, fed with the good gradients alone.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.loss_scale_oracle import Oracle
from tests.programs import assert_bit_equal, bits, compilations, jitted, mesh_of, run

pytestmark = pytest.mark.standard_promotion("dtypes")

LEAVES = ("bfloat16", "float16", "float32")
STEPS = 60
CONFIG = {"init_scale": 2.0**5, "growth_interval": 4, "max_scale": 2.0**8}
F32 = np.float32


def optimizer():
  """Decay, momentum and a schedule by powers of two."""
  # A product that is exact is the same whether or not a compiler contracts it with a sum.
  rate = optax.scale_by_schedule(lambda count: -(2.0 ** -(8 + count % 3)))
  return optax.chain(optax.add_decayed_weights(2.0**-4), optax.trace(0.5), rate)


def params():
  """A leaf in each dtype, named by it; the float32 one is its own master."""
  values = np.random.default_rng(0).normal(size=(3, 8)).astype(F32)
  return {name: np.asarray(x, name) for name, x in zip(LEAVES, values, strict=True)}


@functools.cache
def stream():
  """Gradients in the dtypes of the parameters, and a fault for one leaf at each step, or 0."""
  rng = np.random.default_rng(1)
  grads = {name: rng.normal(size=(STEPS, 8)).astype(name) for name in LEAVES}
  bad = rng.random(STEPS) < 0.3
  faults = np.where(bad, rng.choice([np.inf, -np.inf, np.nan], STEPS), 0).astype(F32)
  return grads, faults, rng.integers(0, 3, STEPS)


def injected(grads, fault, leaf):
  """Gradients with a fault in one of the leaves."""
  return {
    name: g.at[3].add(jnp.where(leaf == i, fault, 0).astype(g.dtype))
    for i, (name, g) in enumerate(grads.items())
  }


STORAGES = ("float32", "split")


def masters(storage="float32"):
  return functools.partial(mpjax.master_weights, storage=storage)


def scaling(inner, **options):
  return mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**CONFIG), **options)


def clipped(inner):
  return optax.chain(optax.clip(0.75), inner)


class Composition(NamedTuple):
  make: Any  # takes what puts masters around an optimizer
  control: Any = optimizer
  window: int = 1
  frozen: tuple[str, ...] = ()


def freezing(masters):
  """Only some leaves have a master, and are trained."""
  trained = {name: name != "bfloat16" for name in LEAVES}
  frozen = {name: not of for name, of in trained.items()}
  return scaling(
    optax.chain(
      optax.masked(optax.set_to_zero(), frozen), optax.masked(masters(optimizer()), trained)
    )
  )


def labelled(masters):
  """A master for each half type, of an optimizer of its own."""
  branches = {"x": masters(optimizer()), "y": masters(optimizer())}
  return optax.multi_transform(branches, {"bfloat16": "x", "float16": "y", "float32": "y"})


COMPOSITIONS = {
  "inside": Composition(lambda masters: scaling(masters(optimizer()))),
  "around": Composition(lambda masters: masters(scaling(optimizer()))),
  "after a clip": Composition(
    lambda masters: scaling(clipped(masters(optimizer())), check_updates=True),
    control=lambda: clipped(optimizer()),
  ),
  "masked": Composition(freezing, frozen=("bfloat16",)),
  "labelled inside": Composition(lambda masters: mpjax.monitor(scaling(labelled(masters)))),
  "window inside": Composition(
    lambda masters: scaling(masters(mpjax.accumulate_gradients(optimizer(), 2))), window=2
  ),
  "window around": Composition(
    lambda masters: scaling(mpjax.accumulate_gradients(masters(optimizer()), 2)), window=2
  ),
}


def trained(tx, start, stream):
  """Runs all steps; returns parameters, updates, masters and metrics of each."""

  def step(carry, now):
    params, state = carry
    grads, fault, leaf = now
    updates, state = tx.update(injected(grads, fault, leaf), state, params)
    params = mpjax.apply_updates(params, updates, state)
    master, metrics = mpjax.states.master_params(state, params), mpjax.loss_scaling_metrics(state)
    return (params, state), (params, updates, master, metrics)

  return jax.lax.scan(step, (start, tx.init(start)), stream)[1]


@functools.cache
def control(make, window):
  """Float32 parameters after each update of optax, from the means of the good gradients."""
  grads, faults, _ = stream()
  good = np.isfinite(faults)
  start = {name: x.astype(F32) for name, x in params().items()}
  updates = np.sum(good) // window
  means = {}
  for name, g in grads.items():
    windows = g[good][: updates * window].astype(F32).reshape(updates, window, -1)
    means[name] = functools.reduce(np.add, windows.swapaxes(0, 1)) / F32(window)
  inner = make()

  def step(carry, g):
    params, state = carry
    changes, state = inner.update(g, state, params)
    params = optax.apply_updates(params, changes)
    return (params, state), params

  after = run(lambda g: jax.lax.scan(step, (start, inner.init(start)), g)[1], means)
  return {name: np.concatenate([start[name][None], x]) for name, x in after.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*1 parameters are stored in low precision")
@pytest.mark.parametrize("storage", STORAGES)
def test_parameters_are_the_rounded_masters_of_a_float32_run(storage):
  # All compositions are in one compiled program.
  good, start = np.isfinite(stream()[1]), params()

  def train_all(start, stream):
    makers = {name: this.make for name, this in COMPOSITIONS.items()}
    return {name: trained(make(masters(storage)), start, stream) for name, make in makers.items()}

  all_found = jax.device_get(run(train_all, start, stream()))
  violations = []
  for name, this in COMPOSITIONS.items():
    found, updates, master, metrics = all_found[name]
    updates_done = np.cumsum(good) // this.window
    assert updates_done[-1] >= 8
    expected = {leaf: x[updates_done] for leaf, x in control(this.control, this.window).items()}
    for leaf in LEAVES:
      if leaf in this.frozen:
        right = {"frozen": (found[leaf], np.stack([start[leaf]] * STEPS))}
      else:
        before = np.concatenate([start[leaf][None], found[leaf][:-1]]).astype(F32)
        right = {
          "master": (master[leaf], expected[leaf]),
          "parameter": (found[leaf], expected[leaf].astype(leaf)),
          # Already in float32, so that nothing depends on how a sum is rounded.
          "sum with the update": (before + updates[leaf], found[leaf].astype(F32)),
        }
        assert bits(found[leaf][-1]) != bits(start[leaf])
      violations += [
        f"{name}, {leaf}: {what}" for what, (a, b) in right.items() if bits(a) != bits(b)
      ]
    numbers = Oracle(**CONFIG).run(good)
    for key, other in (("loss_scale", "scale"), ("skipped", "skipped")):
      if metrics[key].tolist() != [n[other] for n in numbers]:
        violations.append(f"{name}: {key}")
  assert violations == []


def train_loss(params, model_state, batch, rng):
  out = sum(batch.astype(jnp.float16) @ p.astype(jnp.float16) for p in params.values())
  return jnp.mean(jnp.square(out.astype(jnp.float32) - 1)), (model_state, {})


@pytest.mark.slow
def test_a_train_step_with_micro_batches_average_retries_and_donation():
  batches, outs = np.random.default_rng(2).normal(size=(15, 16, 8)), []
  batches[[3, 8, 9], 3, 3] = np.inf
  for storage in STORAGES:
    tx = mpjax.loss_scaling(masters(storage)(optax.adamw(1e-2)))
    step = mpjax.make_train_step(train_loss, tx, micro_batches=2, max_retries=2)
    state = mpjax.TrainState.create(jax.tree.map(jnp.asarray, params()), tx)
    types = jax.tree.map(jax.typeof, state)
    with compilations() as compiled:
      for batch in batches.astype(F32):
        old = state
        state, metrics = step(state, batch)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.opt_state.inner_state))
    assert jax.tree.map(jax.typeof, state) == types
    assert compiled["train_step"] == 1
    all_masters = mpjax.states.master_params(state.opt_state, state.params)
    outs.append((state.params, all_masters, metrics))
  assert metrics["skipped"] >= 3
  assert_bit_equal(*outs)


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
BY_ROWS, BY_COLUMNS = jax.P("data"), jax.P(None, "data")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("kind", "spec", "mapped"),
  [(EXPLICIT, BY_COLUMNS, {}), (AUTO, BY_ROWS, {"check_vma": True})],
  ids=str,
)
def test_eight_devices_have_parts_of_each_parameter(kind, spec, mapped, eight_devices):
  # By the sharding of the arguments, or in a shard_map; on the host all masters are right.
  mesh = mesh_of(eight_devices, kind)
  grads = np.random.default_rng(2).normal(size=(15, 16, 24)).astype(np.float32)
  grads[::7, 2, 2] = np.nan

  def in_shard_map(step, state):
    specs = spec, jax.tree.map(lambda x: spec if x.ndim else jax.P(), state)
    return jax.shard_map(step, mesh=mesh, in_specs=(*specs, spec), out_specs=specs, **mapped)

  def train(storage, place, wrap=lambda step, state: step, **options):
    tx = mpjax.loss_scaling(masters(storage)(optax.adamw(1e-2)), **options)
    params = jax.device_put(jnp.ones((16, 24), jnp.bfloat16), place)
    state = tx.init(params)
    where = jax.tree.map(lambda x: x.sharding, (params, state))
    types = jax.tree.map(jax.typeof, (params, state))

    def step(params, state, grads):
      updates, state = tx.update(grads, state, params)
      return mpjax.apply_updates(params, updates), state

    step = jitted(wrap(step, state))
    for g in grads:
      # Steps of eight devices in the queue of two busy cores, and XLA ends the process: a device
      # has waited 40 s for the others.
      params, state = jax.block_until_ready(step(params, state, jax.device_put(g, place)))
    assert jax.tree.map(jax.typeof, (params, state)) == types
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), (params, state), where)
    assert jax.tree.all(same)
    params, state = jax.device_get((params, state))
    return mpjax.states.master_params(state, params), mpjax.loss_scaling_metrics(state)["skipped"]

  expected = train("float32", jax.devices()[0])
  assert expected[1] == 3
  options = {"wrap": in_shard_map, "axis_name": "data"} if mapped else {}
  assert bits(train("split", jax.NamedSharding(mesh, spec), **options)) == bits(expected)


@pytest.mark.slow
def test_partitioned_parameters_of_flax(eight_devices):
  # Both frameworks give the metadata of a parameter to its remainder, whose shape is the same.
  mesh = jax.make_mesh((2, 4), ("d", "m"), (EXPLICIT,) * 2, devices=eight_devices)
  init, names, dtype = nn.initializers.lecun_normal(), ("d", "m"), jnp.bfloat16
  layer = nn.Dense(16, param_dtype=dtype, kernel_init=nn.with_partitioning(init, names))
  variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))["params"]
  where = jax.NamedSharding(mesh, jax.P(*names))
  for storage in STORAGES:
    tx = mpjax.loss_scaling(masters(storage)(optax.adam(0.1)))
    shardings = nn.get_sharding(jax.eval_shape(tx.init, variables), mesh)
    state = jax.jit(tx.init, out_shardings=shardings)(variables)
    assert state.inner_state.master["kernel"].value.sharding == where
    with jax.set_mesh(mesh):
      kernel = nnx.with_partitioning(init, names)
      model = nnx.Linear(8, 16, param_dtype=dtype, kernel_init=kernel, rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    assert optimizer.opt_state.inner_state.master["kernel"].sharding == where


@pytest.mark.slow
def test_an_optimizer_of_nnx():
  outs = []
  for storage in STORAGES:
    model = nnx.Linear(8, 16, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    tx = mpjax.loss_scaling(masters(storage)(optax.adam(1e-2)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for factor in range(3):
      x = jnp.full((1, 8), factor, jnp.bfloat16)
      loss = lambda model, x=x: jnp.mean(model(x).astype(jnp.float32) ** 2)  # noqa: E731
      _, grads = nnx.value_and_grad(mpjax.scaled(loss, optimizer))(model)
      optimizer.update(model, grads)
    all_params = nnx.as_pure(nnx.state(model, nnx.Param))
    all_masters = mpjax.states.master_params(nnx.as_pure(optimizer.opt_state), all_params)
    outs.append((nnx.to_pure_dict(all_params), nnx.to_pure_dict(all_masters)))
  assert_bit_equal(*outs)
