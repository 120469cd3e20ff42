"""Every level, passed on to the functions that take its fields, trains a model with norms."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.programs import stored

X = jax.random.normal(jax.random.key(1), (16, 4))
Y = jnp.sum(X, axis=1, keepdims=True)


class Model(nn.Module):
  """Two layers with a norm between them."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))))


@pytest.mark.filterwarnings("ignore:.*stored in low precision")  # That is what O3 is.
@pytest.mark.parametrize(
  ("name", "dtype"), [("O0", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16"), ("O3", "bfloat16")]
)
def test_a_level_trains(name, dtype):
  level = mpjax.opt_level(name, dtype)
  model = mpjax.linen.with_policy(Model(), level.policy, level.rules, unmatched="ignore")
  tx = mpjax.master_weights(optax.sgd(0.05)) if level.master_weights else optax.sgd(0.05)
  tx = mpjax.loss_scaling(tx, level.loss_scale)
  variables = model.init(jax.random.key(0), X)
  params, stats = variables["params"], variables["batch_stats"]
  opt_state = tx.init(params)

  def loss_fn(params):
    out, _ = model.apply({"params": params, "batch_stats": stats}, X, mutable=["batch_stats"])
    assert out.dtype == jnp.float32
    return jnp.mean((out - Y) ** 2)

  @jax.jit
  def step(params, opt_state):
    loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    master = mpjax.master_params(opt_state) if level.master_weights else None
    return mpjax.apply_updates(params, updates, master=master), opt_state, loss

  losses = []
  for _ in range(20):
    params, opt_state, loss = step(params, opt_state)
    losses.append(float(loss))
  assert losses[-1] < 0.5 * losses[0]
  half = jnp.dtype("float32" if name == "O0" else dtype)
  of_norms = half if name == "O3" else jnp.dtype("float32")
  norms = params.pop("BatchNorm_0")
  assert {p.dtype for p in jax.tree.leaves(norms)} == {of_norms}
  assert {p.dtype for p in jax.tree.leaves(params)} == {half}
  if level.master_weights:
    master = mpjax.master_params(opt_state)
    assert jax.tree.leaves(master.pop("BatchNorm_0")) == []  # In float32: its own master.
    assert {m.dtype for m in jax.tree.leaves(master)} == {jnp.dtype("float32")}
    jax.tree.map(lambda p, m: np.testing.assert_array_equal(p, stored(m, half)), params, master)


@pytest.mark.case("A110")
def test_a_level_scales_once():
  tx = mpjax.loss_scaling(optax.sgd(0.1), mpjax.opt_level("O1", "float16").loss_scale)
  assert mpjax.loss_scaling_metrics(tx.init({"w": jnp.ones(2)}))["loss_scale"] == 2**15
  with pytest.raises(mpjax.MpjaxError, match="loss_scaling"):
    mpjax.loss_scaling(tx, mpjax.opt_level("O2", "float16").loss_scale).init({"w": jnp.ones(2)})
