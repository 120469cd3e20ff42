"""What does not change from step to step: types, placement, the compiled program, its memory."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax

CONFIG = mpjax.DynamicLossScale(init_scale=2.0**10, growth_interval=3, max_scale=2.0**12)


def avals(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type, x.committed), tree)


def thousand_steps(tx, params, grads, steps=1000):
  """Runs them, every seventh bad, and returns the number of traces and the last state."""
  traces = []

  @jax.jit
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  bad = jax.tree.map(lambda g: g * jnp.nan, grads)
  params, state = jax.block_until_ready(step(params, state, grads))
  before = avals((params, state))
  structure = jax.tree.structure(state)
  for i in range(1, steps):
    # Waiting: devices that share a few cores must not get programs ahead of each other.
    params, state = jax.block_until_ready(step(params, state, bad if i % 7 == 6 else grads))
    if i % 100 < 10:
      assert avals((params, state)) == before
      assert jax.tree.structure(state) == structure
  metrics = mpjax.loss_scaling_metrics(state)
  assert (metrics["total"], metrics["skipped"]) == (steps, steps // 7)
  return len(traces), state


ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-2, 100))
INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)


@pytest.mark.case("I4", "B027", "A117", "B042")
@pytest.mark.parametrize(
  ("inner", "dtype"), [(ADAMW, "float32"), (INJECTED, "float32"), (ADAMW, "float64")]
)
def test_one_trace_for_a_thousand_steps(set_flag, inner, dtype):
  set_flag("jax_enable_x64", dtype == "float64")
  params = {"w": jnp.ones((3, 2), dtype), "b": jnp.ones(2, "float32")}
  traces, state = thousand_steps(mpjax.loss_scaling(inner, CONFIG), params, params)
  assert traces == 1
  (scale,) = state.loss_scale.values()
  assert {x.dtype.name for x in scale} == {"float32", "int32", "bool"}
  if inner is ADAMW:
    mu = state.inner_state[0].mu
    assert (mu["w"].dtype, mu["b"].dtype) == (dtype, "float32")


@pytest.mark.case("I4", "B151", "B065")
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_one_trace_on_a_mesh(devices, axis_type):
  mesh = jax.make_mesh((4,), ("data",), (axis_type,), devices=devices)
  params = {
    "w": jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(mesh, jax.P("data"))),
    "b": jax.device_put(jnp.ones(2), jax.NamedSharding(mesh, jax.P())),
  }
  tx = mpjax.loss_scaling(ADAMW, CONFIG)
  traces, state = thousand_steps(tx, params, params, 15)
  assert traces == 1
  mu = state.inner_state[0].mu["w"]
  assert mu.sharding.is_equivalent_to(params["w"].sharding, mu.ndim)


@pytest.mark.case("I4", "A11")
def test_setting_and_restoring_the_scale_do_not_trace_again():
  params = jnp.ones(3)
  tx = mpjax.loss_scaling(optax.adam(1e-2), CONFIG)
  traces = []

  @jax.jit
  def step(state):
    traces.append(1)
    return tx.update(params, state, params)[1]

  state = step(tx.init(params))
  state = step(mpjax.set_loss_scale(state, 2))
  state = step(jax.tree.map(jnp.asarray, jax.device_get(state)))
  state = step(jax.device_get(state))
  assert len(traces) == 1


DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]
NAMES = """
adabelief adadelta adagrad adafactor adam adamw adamax adan amsgrad fromage lamb lars lion nadam
nadamw novograd optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd sm3 yogi
"""


@pytest.mark.case("A117", "I4", "B102")
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("name", NAMES.split())
def test_no_optimizer_changes_a_dtype(set_flag, name):
  # Abstractly: every mix of the dtypes of parameters and gradients, twice over.
  set_flag("jax_enable_x64", True)
  tx = mpjax.loss_scaling(getattr(optax, name)(learning_rate=1e-2))
  for stored in DTYPES:
    params = {"w": jnp.ones((4, 3), stored), "b": jnp.ones(3, stored)}
    state = tx.init(params)
    for given in {stored, jnp.float32} if stored != jnp.float32 else DTYPES[:3]:
      grads = jax.tree.map(lambda p, d=given: p.astype(d), params)
      updates, new = jax.eval_shape(tx.update, grads, state, params)
      assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
      )
      # Updates are as wide as what inner works in, never half.
      assert all(u.dtype in (jnp.float32, jnp.float64) for u in jax.tree.leaves(updates))
      applied = jax.eval_shape(optax.apply_updates, params, updates)
      assert {p.dtype for p in jax.tree.leaves(applied)} == {jnp.dtype(stored)}
