"""`make_train_step` on eight devices: data parallel, sharded parameters, shard_map, pmap.

Every engine trains the model of `sharded_rig`, and must agree to the bit with its oracle in NumPy.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.integration import sharded_rig as rig
from tests.optim.losses import AUTO, loss_of, over_devices
from tests.partitioned import Collective, collectives
from tests.programs import compilations, data_of_keys, equations, mesh_of

DEVICES = 8
XLA = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

ENGINES = {
  "automatic": rig.Engine(AUTO),
  "sharded parameters": rig.Engine(AUTO, params=jax.P("data"), stored=jnp.float16),
  "sharded parameters, explicit axes": rig.Engine(rig.EXPLICIT, params=jax.P("data", None)),
  "shard_map": rig.Engine(mapped="shard_map", stored=jnp.float16),
  "shard_map, unchecked": rig.Engine(mapped="shard_map unchecked"),
  "pmap": rig.Engine(mapped="pmap"),
}


def check_replicas(tree, sharded=()):
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    if x.shape not in sharded:
      assert len(set(rig.replicas(x))) == 1, jax.tree_util.keystr(path)


# --- all engines agree ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_steps_with_faults_on_single_devices(name, eight_devices):
  engine, traces = ENGINES[name], []

  def counting(*args):
    traces.append(0)
    return rig.loss_fn(*args)

  state, step, put = rig.prepare(engine, eight_devices, counting)
  (w, momentum, mean, steps), history = rig.expected(DEVICES if engine.mapped else 0)
  placed = jax.tree.map(lambda x: (x.sharding, x.committed, x.aval.weak_type), state)
  found = []
  with compilations() as compiled:
    for i in range(rig.STEPS):
      batch = put({key: x[i] for key, x in rig.data().items()})
      state, metrics = jax.block_until_ready(step(state, batch))
      found.append(metrics)
      if i == (name == "pmap"):  # To whose devices nobody has moved the state before.
        first = len(traces)
        compiled.clear()
    assert len(traces) == first > 0
    assert not compiled, "the state came back as another kind of argument"
  if name != "pmap":
    after = jax.tree.map(lambda x: (x.sharding, x.committed, x.aval.weak_type), state)
    same = jax.tree.map(
      lambda x, a, b: a[0].is_equivalent_to(b[0], x.ndim) and a[1:] == b[1:], state, after, placed
    )
    assert jax.tree.all(same)

  cut = {w.shape} if engine.params != jax.P() else set()
  if name == "pmap":
    for x in jax.tree.leaves((data_of_keys(state), found)):
      assert len({row.tobytes() for row in np.asarray(x)}) == 1
    state, found = jax.tree.map(lambda x: x[0], (state, found))
  else:
    check_replicas((state, found), cut)
    assert {len(rig.replicas(x)) for x in jax.tree.leaves(state)} == {DEVICES}

  masters = state.params["w"]
  if engine.stored != jnp.float32:
    masters = mpjax.states.master_params(state.opt_state)["w"]
    np.testing.assert_array_equal(state.params["w"], w.astype(np.float16))
  np.testing.assert_array_equal(masters, w)
  sums = [x for x in jax.tree.leaves(state.opt_state) if x.shape == w.shape]
  np.testing.assert_array_equal(sums[-1], momentum)
  np.testing.assert_array_equal(state.model_state["mean"], mean)
  assert (state.step, state.model_state["steps"]) == (steps, steps)
  for i, (metrics, numbers) in enumerate(zip(jax.device_get(found), history, strict=True)):
    assert metrics["loss_scale"] == numbers["scale"]
    counters = ("finite", "good_steps", "total", "skipped", "consecutive_skips", "floor_hits")
    assert [metrics[key] for key in counters] == [numbers[key] for key in counters]
    faults = {part: np.any(~np.isfinite(rig.data()[part][i])) for part in rig.PARTS}
    # What is not finite is reported as it was computed.
    assert np.isfinite(metrics["loss"]) == (not faults["loss"])
    assert np.isfinite(metrics["grad_norm"]) == (not faults["gradients"])
    if not faults["loss"]:
      assert metrics["loss"] == np.float32(numbers["loss"])
    if not faults["gradients"]:
      np.testing.assert_allclose(metrics["grad_norm"], numbers["grad_norm"], rtol=2**-20)
    assert metrics["kept"] == numbers["kept"]
    assert metrics["mean"] == np.float32(numbers["mean"])


# --- what travels, and in which dtype ------------------------------------------------------------


def product(compute):
  """A loss function with one product in `compute`, whose gradient is a sum over rows."""
  cast = lambda params, batch: batch.astype(compute) @ params["w"].astype(compute)  # noqa: E731
  return loss_of(lambda params, batch: jnp.sum(cast(params, batch).astype(jnp.float32)))


def mapped_step(devices, stored, compute, check_vma, **options):
  """Returns a step under `shard_map` at scale 1, its state, and a function that places batches."""
  tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.SkipNonfinite())
  mesh = mesh_of(devices)
  state = mpjax.TrainState.create(rig.place(mesh, {"w": jnp.zeros((3, 2), stored)}, jax.P()), tx)
  step = mpjax.make_train_step(product(compute), tx, axis_name="data", **options)
  step = over_devices(step, devices, check_vma=check_vma)
  return step, state, lambda batch: rig.place(mesh, batch, jax.P("data"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_averages_are_float32_whatever_is_stored_and_computed(eight_devices):
  violations = []
  for number, (stored, compute) in enumerate(itertools.product(XLA, XLA)):
    # Every other time in micro-batches, which are added up before.
    check_vma = number % 2 == 0
    step, state, put = mapped_step(
      eight_devices, stored, compute, check_vma, micro_batches=1 if check_vma else 2
    )
    program = jax.make_jaxpr(step)(state, put(jnp.ones((16, 3))))
    found = sorted(
      str(var.aval).partition("{")[0]
      for eqn, _ in equations(program)
      if eqn.primitive.name in ("psum", "psum_invariant", "all_reduce")
      for var in eqn.outvars
    )
    if found != ["float32[3,2]", "float32[]"]:  # The gradient and the loss, once each.
      violations.append(f"{stored}, {compute}, checked {check_vma}: {found}")
  assert violations == []


@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_float16_gradients_of_eight_devices_do_not_overflow(eight_devices):
  # 40000 on each: the sum of two of them is inf already. The program that XLA makes is read too:
  # nothing in it moved the sum back to half.
  step, state, put = mapped_step(eight_devices, jnp.float16, jnp.float16, check_vma=True)
  batch = put(jnp.full((8, 3), 40000.0))
  found = collectives(step, state, batch)
  assert Collective("all-reduce", "f32", (3, 2)) in found
  assert {dtype for _, dtype, _ in found} <= {"f32", "s32"}
  after, metrics = step(state, batch)
  assert metrics["finite"]
  np.testing.assert_array_equal(after.params["w"], np.full((3, 2), -40000, np.float16))
  assert metrics["grad_norm"] == np.float32(np.sqrt(6 * 40000.0**2))


def test_an_overflow_in_an_automatic_reduction_is_seen(eight_devices):
  # Under automatic sharding the partitioner sums half gradients in half. The inf is one step that
  # is skipped, and a smaller scale for the next.
  mesh = mesh_of(eight_devices)
  tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.DynamicLossScale(init_scale=16.0))
  state = mpjax.TrainState.create(rig.place(mesh, {"w": jnp.zeros((3, 2))}, jax.P()), tx)
  step = mpjax.make_train_step(product(jnp.float16), tx)
  batch = rig.place(mesh, jnp.full((8, 3), 1000.0), jax.P("data"))
  reduced = [c for c in collectives(step, state, batch) if len(c.shape) == 2]
  assert [(op, dtype) for op, dtype, _ in reduced] == [("all-reduce", "f16")]
  # 16 times 1000 is fine on each device, 16 times 8000 is not; 8 times 8000 is.
  state, metrics = jax.block_until_ready(step(state, batch))
  assert (metrics["finite"], metrics["loss_scale"], state.step) == (False, 8, 0)
  assert not np.any(state.params["w"])
  state, metrics = step(state, batch)
  assert (metrics["finite"], metrics["loss_scale"], state.step) == (True, 8, 1)
  np.testing.assert_array_equal(state.params["w"], np.full((3, 2), -8000, np.float32))


# --- the other options of a step -----------------------------------------------------------------


def test_all_devices_run_a_batch_again(eight_devices):
  # A gradient overflows on one device only, at the first two scales.
  mesh = mesh_of(eight_devices)
  tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.DynamicLossScale(init_scale=16.0))
  step = mpjax.make_train_step(product(jnp.float16), tx, axis_name="data", max_retries=3)
  step = over_devices(step, eight_devices)
  state = mpjax.TrainState.create(rig.place(mesh, {"w": jnp.zeros((3, 2))}, jax.P()), tx)
  batch = jnp.zeros((8, 3)).at[5].set(8192.0)  # times 16 and 8 is inf in float16, times 4 is not
  state, metrics = step(state, rig.place(mesh, batch, jax.P("data")))
  check_replicas((state, metrics))
  numbers = [int(metrics[key]) for key in ("retries", "loss_scale", "skipped", "finite")]
  assert numbers == [2, 4, 2, 1]
  np.testing.assert_array_equal(state.params["w"], np.full((3, 2), -1024, np.float32))


@pytest.mark.slow
def test_where_the_new_state_is_can_be_said(eight_devices):
  # Adafactor keeps means of rows, made replicated; XLA would leave them where the rows are.
  mesh = mesh_of(eight_devices)
  tx = mpjax.loss_scaling(optax.adafactor(1e-2, min_dim_size_to_factor=8), mpjax.StaticLossScale(8))
  batch = rig.place(mesh, jnp.ones((8, 16)), jax.P("data"))

  def start():
    return mpjax.TrainState.create(rig.place(mesh, {"w": jnp.ones((16, 8))}, jax.P("data")), tx)

  def moved(step):
    before = jax.tree.map(lambda x: x.sharding, start())
    after, _ = step(start(), batch)
    with compilations() as compiled:
      jax.block_until_ready(step(after, batch))
    same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), after, before)
    return not jax.tree.all(same), compiled.total()

  assert moved(mpjax.make_train_step(product(jnp.float16), tx)) == (True, 1)
  shardings = jax.tree.map(lambda x: x.sharding, start())
  step = mpjax.make_train_step(product(jnp.float16), tx, state_shardings=shardings)
  assert moved(step) == (False, 0)


@pytest.mark.parametrize("how", ["automatic", "shard_map"])
def test_sharded_parameters_a_nan_on_one_device_skips_everywhere(devices, how):
  # No averaging here: each device owns a part, and only the flag has to travel.
  mesh = jax.make_mesh((4,), ("data",), (AUTO,), devices=devices)
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  params, axis = jax.device_put(jnp.ones(8), sharding), "data" if how == "shard_map" else None
  scale = mpjax.DynamicLossScale(init_scale=16.0)
  tx = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), scale, axis_name=axis)
  state, update = tx.init(params), lambda grads, state, params: tx.update(grads, state, params)
  if axis:
    own = jax.P("data"), jax.tree.map(lambda x: jax.P("data") if x.shape else jax.P(), state)
    specs = {"in_specs": (*own, jax.P("data")), "out_specs": own}
    update = jax.shard_map(update, mesh=mesh, **specs)
  update = jax.jit(update)
  for position in (0, 5, 7):
    grads = jax.device_put(jnp.ones(8).at[position].set(jnp.nan), sharding)
    updates, after = update(grads, state, params)
    assert not np.any(updates)
    assert mpjax.loss_scaling_metrics(after)["loss_scale"] == 8
    assert jax.tree.leaves(after.inner_state)[0].tolist() == [0] * 8
  updates, after = update(jax.device_put(jnp.ones(8), sharding), state, params)
  assert np.all(np.asarray(updates) < 0)


def test_two_axes_and_check_updates(devices):
  mesh = jax.make_mesh((2, 2), ("x", "y"), (AUTO, AUTO), devices=devices)
  tx = mpjax.loss_scaling(
    optax.scale(3e38), mpjax.SkipNonfinite(), axis_name=("x", "y"), check_updates=True
  )

  def update(state, grads):
    updates, state = tx.update(grads, state)
    return updates, mpjax.loss_scaling_metrics(state)

  specs = {"in_specs": (jax.P(), jax.P("x", "y")), "out_specs": (jax.P("x", "y"), jax.P())}
  update = jax.jit(jax.shard_map(update, mesh=mesh, **specs))
  for value, bad_updates in ((2.0, 1), (np.nan, 0)):
    grads = jnp.zeros((2, 2)).at[1, 0].set(value)
    updates, metrics = update(tx.init(jnp.zeros(())), grads)
    assert not np.any(updates)
    assert (metrics["skipped"], metrics["bad_updates"]) == (1, bad_updates)
