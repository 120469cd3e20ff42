"""What does not change from step to step: types, placement, the compiled program, its memory."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax

pytestmark = pytest.mark.standard_promotion("dtypes")

CONFIG = mpjax.DynamicLossScale(init_scale=2.0**10, growth_interval=3, max_scale=2.0**12)
ADAMW = optax.adamw(optax.cosine_decay_schedule(1e-2, 100))
INJECTED = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)


def types(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type, x.committed), tree)


@pytest.mark.parametrize(
  ("inner", "dtype"), [(ADAMW, "float32"), (INJECTED, "float32"), (ADAMW, "float64")]
)
def test_one_trace_for_all_steps(set_flag, inner, dtype):
  # Every seventh is bad; then the scale is set by hand, and the state comes back from the host.
  set_flag("jax_enable_x64", dtype == "float64")
  params = grads = {"w": jnp.ones((3, 2), dtype), "b": jnp.ones(2, "float32")}
  tx, traces = mpjax.loss_scaling(inner, CONFIG), []

  @jax.jit
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  bad = jax.tree.map(lambda g: g * jnp.nan, grads)
  params, state = step(params, tx.init(params), grads)
  before = types((params, state))
  for i in range(1, 30):
    params, state = step(params, state, bad if i % 7 == 6 else grads)
    assert types((params, state)) == before
  metrics = mpjax.loss_scaling_metrics(state)
  assert (metrics["total"], metrics["skipped"]) == (30, 30 // 7)
  for other in (mpjax.states.set_loss_scale(state, 2), jax.device_get(state)):
    step(params, other, grads)
  step(params, jax.tree.map(jnp.asarray, jax.device_get(state)), grads)
  assert len(traces) == 1
  (scale,) = state.loss_scale.values()
  assert {x.dtype.name for x in scale} == {"float32", "int32", "bool"}
  if inner is ADAMW:
    mu = state.inner_state[0].mu
    assert (mu["w"].dtype, mu["b"].dtype) == (dtype, "float32")


DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]
NAMES = ("adafactor", "adam", "lion", "novograd", "rmsprop", "sm3")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*stored in low precision")
@pytest.mark.parametrize("name", NAMES)
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
      shapes = jax.eval_shape(lambda state: state, state)
      assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, shapes)
      # Updates are as wide as what inner works in, never half.
      assert all(u.dtype in (jnp.float32, jnp.float64) for u in jax.tree.leaves(updates))
      applied = jax.eval_shape(optax.apply_updates, params, updates)
      assert {p.dtype for p in jax.tree.leaves(applied)} == {jnp.dtype(stored)}
