"""Gradients of a batch: what is cut, added, averaged, and in which dtype.

All through `make_train_step` with sgd at rate 1 from zero: the new parameters are the negative
gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.errors import refused
from tests.optim.losses import AUTO, over_devices, product, quadratic, returning, rows
from tests.optim.steps import UNIT_SGD, gradients
from tests.programs import bits, equations

F32 = jnp.float32


@pytest.mark.parametrize("k", [1, 3])
def test_accumulation_is_the_exact_mean(k):
  # Against NumPy in float64, to the bit; the numbers of the metrics too.
  batch = rows(24)
  found, _, metrics = gradients(quadratic, batch, micro_batches=k)
  x, y = (batch[key].astype(np.float64) for key in "xy")
  exact = -(x.T @ y) / 24
  np.testing.assert_array_equal(found, exact.astype(np.float32))
  np.testing.assert_array_equal(metrics["loss"], np.float32(np.mean(y**2) / 2))
  worst = np.mean([np.abs(y[i::k]).max() for i in range(k)])
  np.testing.assert_array_equal(metrics["worst"], np.float32(worst))
  np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(np.sum(exact**2)), rtol=2**-22)


@pytest.mark.parametrize("half", [jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__)
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
def test_sums_are_float32(half):
  # Eight times 30000 is inf in float16, and 1 is lost beside 2048 in both halves.
  #
  # In one program: parameters that are stored and computed in low precision, or one of the two.
  stored = {"both": half, "computed": jnp.float32, "stored": half}
  computed = {"both": half, "computed": half, "stored": jnp.float32}

  def loss_fn(params, model_state, batch, rng):
    loss = 0.0
    for name, dtype in computed.items():
      loss += jnp.sum(batch[0].astype(dtype) * params[name].astype(dtype)).astype(F32)
    return loss, (model_state, {})

  tx = mpjax.loss_scaling(optax.sgd(1.0), mpjax.SkipNonfinite())
  big, small = [30000.0] * 8, [2048.0] + [1.0] * 7
  batch = jnp.asarray([big, small]).T
  params = {name: jnp.zeros(2, dtype) for name, dtype in stored.items()}
  step = mpjax.make_train_step(loss_fn, tx, micro_batches=8)
  jaxpr = jax.make_jaxpr(step)(mpjax.TrainState.create(params, tx), batch)
  sums = [eqn.outvars[0].aval for eqn, _ in equations(jaxpr) if eqn.primitive.name == "add"]
  assert {str(aval) for aval in sums if aval.shape == (2,)} == {"float32[2]"}
  found, _, metrics = gradients(loss_fn, batch, params, tx, micro_batches=8)
  assert metrics["finite"]
  squares = 0
  for name, dtype in computed.items():
    # 30000 itself is 29952 in bfloat16; each gradient is rounded to its own dtype, the sum is not.
    first = np.asarray(jnp.asarray(30000.0, dtype).astype(stored[name]), np.float64)
    expected = np.asarray([first, (2048 + 7) / 8])
    squares += np.sum(expected**2)
    np.testing.assert_array_equal(found[name], jnp.asarray(expected, F32).astype(stored[name]))
  np.testing.assert_array_equal(metrics["grad_norm"], np.float32(np.sqrt(squares)))


METRICS = {
  "float": 0.5,
  "half": jnp.asarray(0.5, jnp.bfloat16),
  "vector": jnp.arange(3.0),
  "nested": {"x": np.float32(0.25)},
  "int": 3,
  "narrow": jnp.asarray(100, jnp.int8),
  "bool": jnp.asarray(True),
  "counts": jnp.asarray([1, 0], jnp.uint32),
}


@pytest.mark.parametrize("parts", [1, 8])
def test_metrics(devices, parts):
  # Averages do not depend on how the batch is cut; counts are counted.
  loss_fn = returning(lambda loss, state: (loss, (state, METRICS)))
  step = mpjax.make_train_step(loss_fn, UNIT_SGD)
  if parts == 8:  # Two micro-batches on each of four devices.
    step = mpjax.make_train_step(loss_fn, UNIT_SGD, micro_batches=2, axis_name="data")
    step = over_devices(step, devices)
  _, found = step(mpjax.TrainState.create(jnp.zeros(3), UNIT_SGD), jnp.zeros(8))
  floats = {"float": 0.5, "half": 0.5, "vector": np.arange(3.0), "nested": {"x": 0.25}}
  counts = {"int": 3 * parts, "narrow": 100 * parts, "bool": parts}
  expected = jax.tree.map(np.float32, floats) | jax.tree.map(np.int32, counts)
  expected["counts"] = np.asarray([parts, 0], np.uint32)
  assert bits({key: found[key] for key in expected}) == bits(expected)


def test_model_state_of_any_kind_agrees(devices):
  # Floating leaves are averaged in float32; what is not floating is the same already.
  before = {"mean": jnp.zeros(()), "half": jnp.zeros((), jnp.float16)}
  before |= {"complex": jnp.zeros((), jnp.complex64), "count": jnp.int32(7)}
  before |= {"flag": jnp.asarray(True), "key": jax.random.key(1), "raw": jax.random.PRNGKey(2)}

  def loss_fn(params, old, batch, rng):
    mean = jnp.mean(batch)
    new = {"mean": mean, "half": mean.astype(jnp.float16), "complex": jax.lax.complex(mean, -mean)}
    new |= {"count": old["count"] + 1, "flag": jnp.logical_not(old["flag"])}
    new |= {name: jax.random.fold_in(old[name], 1) for name in ("key", "raw")}
    return jnp.sum(params), (new, {})

  step = mpjax.make_train_step(loss_fn, UNIT_SGD, axis_name="data")
  step = over_devices(step, devices)
  state = mpjax.TrainState.create(jnp.zeros(3), UNIT_SGD, model_state=before)
  # The sum of two of them is inf in float16.
  state, _ = step(state, jnp.asarray([40000.0, 40000.0, 40000.0, 40016.0]))
  expected = {"mean": np.float32(40004), "half": np.float16(40000), "count": np.int32(8)}
  expected |= {"complex": np.complex64(40004 - 40004j), "flag": np.bool_(False)}
  expected["raw"] = jax.random.fold_in(jax.random.PRNGKey(2), 1)
  assert state.model_state.pop("key") == jax.random.fold_in(jax.random.key(1), 1)
  assert bits(state.model_state) == bits(expected)


@pytest.mark.parametrize(("axes", "check_vma"), [(["b", "a"], False), ("a", True)], ids=str)
def test_several_axes(devices, axes, check_vma):
  # Over both axes of a mesh, or over one while the other repeats the work.
  mesh = jax.make_mesh((2, 2), ("a", "b"), (AUTO, AUTO), devices=devices)
  step = mpjax.make_train_step(quadratic, UNIT_SGD, axis_name=axes)
  rows_over = jax.P("a") if axes == "a" else jax.P(("a", "b"))
  specs = {"in_specs": (jax.P(), rows_over), "out_specs": jax.P()}
  step = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))
  state, metrics = step(mpjax.TrainState.create(jnp.zeros(3), UNIT_SGD), rows(24))
  expected, _, alone = gradients(quadratic, rows(24))
  np.testing.assert_array_equal(-state.params, expected)
  assert metrics["grad_norm"] == alone["grad_norm"] > 0


@pytest.mark.slow
def test_the_batch_is_seen_in_the_order_of_devices(devices):
  # The key of each device and micro-batch is its own, and none is that of another step.
  def loss_fn(params, draws, batch, rng):
    bits = jax.random.bits(rng, (), jnp.uint32)
    here = jax.nn.one_hot(batch[0], 8, dtype=jnp.uint32)
    return jnp.sum(params), (draws, {"bits": bits * here})

  step = mpjax.make_train_step(loss_fn, UNIT_SGD, axis_name="data", micro_batches=2)
  step = over_devices(step, devices)
  key = jax.random.key(5)
  state = mpjax.TrainState.create(jnp.zeros(3), UNIT_SGD, rng=key)
  found = []
  for index in range(2):
    state, metrics = jax.block_until_ready(step(state, jnp.arange(8)))
    found.extend(metrics["bits"].tolist())
    keys = [jax.random.fold_in(jax.random.fold_in(key, index), device) for device in range(4)]
    expected = [jax.random.bits(jax.random.fold_in(k, i)) for k in keys for i in range(2)]
    assert metrics["bits"].tolist() == [int(x) for x in expected]
  assert len(set(found)) == 16


def test_an_axis_that_is_not_bound(devices):
  step = mpjax.make_train_step(quadratic, UNIT_SGD, axis_name="batch")
  state = mpjax.TrainState.create(jnp.zeros(3), UNIT_SGD)
  for call, axes in ((step, "()"), (over_devices(step, devices), "('data',)")):
    where, got = "mpjax.make_train_step(axis_name='batch')", f"axes of the mesh here: {axes}"
    with refused(ValueError, where, "an axis that is mapped", got, "leave axis_name out"):
      call(state, rows(16))


def test_sharded_parameters_and_an_axis(devices):
  # Their gradients belong to one device; an average over devices would mix different ones.
  mesh = jax.make_mesh((4,), ("data",), (AUTO,), devices=devices)
  step = mpjax.make_train_step(quadratic, UNIT_SGD, axis_name="data")
  state = mpjax.TrainState.create(jnp.zeros((4, 3)), UNIT_SGD)
  specs = jax.tree.map(lambda x: jax.P("data") if x.ndim else jax.P(), state)
  mapped = jax.shard_map(
    lambda state, batch: step(state._replace(params=state.params[0]), batch),
    mesh=mesh,
    in_specs=(specs, jax.P("data")),
    out_specs=jax.P(),
  )
  where, fix = "mpjax.make_train_step(axis_name=", "use jit over a Mesh, without axis_name"
  with refused(ValueError, where, "the same on all devices", "some that differ", fix):
    mapped(state, rows(16))


DYNAMIC = mpjax.loss_scaling(optax.sgd(0.5))


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("jit", [True, False])
def test_constants_come_out_as_arrays_and_states_strongly_typed(jit):
  # A program returns them as NumPy values, or as literals of JAX. A state of another type would be
  # another trace of the next step; without a scale, no selection of the old one makes it strong.
  def loss_fn(params, model_state, batch, rng):
    new = {"number": 3, "weak": jnp.where(batch > 0, 2.0, 1.0)}
    return jnp.sum(params), (new, {"half": 0.5, "table": np.arange(2), "flag": True})

  tx, old = mpjax.loss_scaling(optax.sgd(0.5), mpjax.NoLossScale()), {"number": 0, "weak": 0.0}
  with jax.disable_jit(not jit):
    step = mpjax.make_train_step(loss_fn, tx)
    state = mpjax.TrainState.create(jnp.ones(2), tx, model_state=old)
    state, metrics = step(state, jnp.ones(()))
  assert all(type(x) is type(jnp.ones(())) for x in jax.tree.leaves((state, metrics)))
  assert not any(x.weak_type for x in jax.tree.leaves(state))
  assert (state.model_state["number"], metrics["half"], metrics["flag"]) == (3, 0.5, 1)
  np.testing.assert_array_equal(metrics["table"], [0, 1])
