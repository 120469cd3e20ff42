"""A skipped step leaves no trace: the run equals the one from which its bad steps were deleted.

The control is plain optax at the recorded scales, without mpjax. In float32 and bfloat16 it runs at
scale 1: only in float16 does a scale round differently, among subnormals.

All runs of one optimizer go side by side, as lanes of a vmap. The model is compiled once per dtype
and shared by run and control, and so is the addition of the updates: another program may add in
another order, or contract a product and a sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.integration.rig import OPTIMIZERS, average, batches, inject, loss_fn, variables
from tests.loss_scale_oracle import Oracle
from tests.programs import options_of_users

CONFIG = {"init_scale": 2.0**12, "growth_interval": 3, "max_scale": 2.0**16, "hysteresis": 2}
RUNS, STEPS = 30, 40
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


@functools.partial(jax.jit, static_argnums=0)
def gradients(dtype, params, stats, batch, scale):
  """Gradients of the loss times `scale`, and the new batch statistics, for each lane."""

  def scaled(params, stats, batch, scale):
    loss, stats = loss_fn(params, stats, batch, dtype)
    return loss * scale, stats

  return jax.vmap(jax.grad(scaled, has_aux=True))(params, stats, batch, scale)


def lanes(tree):
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (RUNS, *x.shape)), tree)


apply = jax.jit(jax.vmap(optax.apply_updates))


@jax.jit
@jax.vmap
def commit(finite, params, new_stats, rest):
  """What no optimizer holds: batch statistics, an average of the parameters, the step."""
  return mpjax.select_tree(finite, (new_stats, average(rest[1], params), rest[2] + 1), rest)


@jax.jit
@jax.vmap
def plain_rest(active, params, new_stats, rest):
  new = new_stats, average(rest[1], params), rest[2] + 1
  return jax.tree.map(lambda a, b: jnp.where(active, a, b), new, rest)


def plain(inner):
  """The update of the control. Lanes that have had their last good batch rest.

  The selection also makes it the same kind of program: where a sum is stored and where it is
  selected first decides whether XLA contracts it with a product.
  """

  def update(active, scale, params, opt_state, grads):
    grads = jax.tree.map(lambda g: g / scale, grads)
    updates, new = inner.update(grads, opt_state, params)
    updates = jax.tree.map(lambda u: jnp.where(active, u, -0.0), updates)
    return updates, jax.tree.map(lambda a, b: jnp.where(active, a, b), new, opt_state)

  return jax.jit(jax.vmap(update), compiler_options=options_of_users())


@functools.cache
def programs(name):
  inner = OPTIMIZERS[name]()
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**CONFIG))
  options = options_of_users()
  return inner, tx, jax.jit(jax.vmap(tx.update), compiler_options=options), plain(inner)


def start(tx):
  init = variables()
  params, stats = init["params"], init["batch_stats"]
  rest = stats, params, jnp.asarray(0, jnp.int32)
  return lanes(params), lanes(tx.init(params)), lanes(rest)


def differences(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(found))
  pairs = zip(leaves, jax.tree.leaves(jax.device_get(expected)), strict=True)
  return [jax.tree_util.keystr(path) for (path, a), b in pairs if a.tobytes() != b.tobytes()]


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, 0, 0))
def poison(grads, fault, leaf):
  return inject(grads, fault, leaf)


@pytest.mark.case("I1", "I3", "B005", "B009", "B010", "B111", "B112", "B116", "A39", "A54")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_is_a_deleted_step(name, dtype):
  rng = np.random.default_rng([DTYPES.index(dtype), list(OPTIMIZERS).index(name)])
  inner, tx, update, control = programs(name)
  data = batches(STEPS)
  params, opt_state, rest = start(tx)

  share = rng.choice([0.02, 0.2, 0.6], (RUNS, 1))
  planned = rng.random((RUNS, STEPS)) < share
  faults = np.where(planned, rng.choice([np.nan, np.inf, -np.inf], (RUNS, STEPS)), 0)
  where = rng.integers(0, len(jax.tree.leaves(params)), (RUNS, STEPS))
  scales, history = [], []
  for i in range(STEPS):
    scale = mpjax.loss_scaling_metrics(opt_state)["loss_scale"]
    batch = lanes(jax.tree.map(lambda x, i=i: x[i], data))
    grads, stats = gradients(dtype, params, rest[0], batch, scale)
    grads = poison(grads, faults[:, i].astype(np.float32), where[:, i])
    updates, opt_state = update(grads, opt_state, params)
    params = apply(params, updates)
    metrics = mpjax.loss_scaling_metrics(opt_state)
    rest = commit(metrics["finite"], params, stats, rest)
    scales.append(scale)
    history.append(metrics)
  scales, history = jax.device_get((jnp.stack(scales, 1), history))
  finite = np.stack([metrics["finite"] for metrics in history], 1)
  assert not np.any(finite & planned)
  if dtype != jnp.float16:
    assert np.array_equal(finite, ~planned), "nothing else overflows"
    scales = np.ones_like(scales)

  # The good batches of each lane, in their order; then whatever fills the lane up.
  order = np.argsort(~finite, axis=1, kind="stable")
  counts = finite.sum(1)
  old = start(inner)
  for i in range(counts.max()):
    index = order[:, i]
    scale = scales[np.arange(RUNS), index]
    batch = jax.tree.map(lambda x, index=index: x[index], data)
    grads, stats = gradients(dtype, old[0], old[2][0], batch, scale)
    grads = poison(grads, np.zeros(RUNS, np.float32), where[:, i])
    active = i < counts
    updates, plain_state = control(active, scale, old[0], old[1], grads)
    plain_params = apply(old[0], updates)
    old = plain_params, plain_state, plain_rest(active, plain_params, stats, old[2])
  assert differences((params, opt_state.inner_state, rest), old) == []
  assert np.count_nonzero(counts < STEPS) > RUNS / 2

  for lane in range(RUNS):
    oracle = Oracle(**CONFIG)
    for i, metrics in enumerate(history):
      numbers = oracle.step(bool(finite[lane, i])).numbers()
      assert metrics["loss_scale"][lane] == numbers.pop("scale")
      numbers.pop("hysteresis")
      assert {key: metrics[key][lane] for key in numbers} == numbers
    assert rest[2][lane] == counts[lane] == oracle.total - oracle.skipped


@pytest.mark.case("I1")
def test_more_than_500_runs_in_all():
  assert RUNS * len(DTYPES) * len(OPTIMIZERS) >= 500


@pytest.mark.case("I1", "B010")
def test_the_rig_would_notice():
  """Statistics that have seen a NaN keep it."""
  init = variables()
  stats = jax.tree.map(lambda s: s + jnp.nan, init["batch_stats"])
  batch = jax.tree.map(lambda b: b[0], batches(1))
  _, after = loss_fn(init["params"], stats, batch, jnp.float32)
  assert not mpjax.all_finite(after)
