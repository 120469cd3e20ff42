"""Float32 that a policy, autocast or the function itself asks for is on purpose."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax

pytestmark = pytest.mark.standard_promotion

X = jax.ShapeDtypeStruct((16, 8), "bfloat16")
WIDE = jax.ShapeDtypeStruct((16, 8), "float32")


def test_float32_throughout_is_no_leak():
  wide = jax.ShapeDtypeStruct((8, 8), "float32")
  audit = mpjax.audit(lambda x, w: jax.nn.softmax(x @ w) @ w)(wide, wide)
  assert audit.leaks == ()
  assert audit.half_share == 0
  (kept,) = audit.on_purpose
  assert kept.reason == "no low precision anywhere"
  assert kept.flops == 2 * 2 * 8**3


class Head(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4, name="head")(nn.relu(nn.Dense(8, name="body")(x)))


ON_PURPOSE = {
  "a float32 policy": mpjax.Rule("float32", path="head"),
  "a rule leaves it as it is": mpjax.Rule(None, path="head"),
}


@pytest.mark.parametrize("reason", ON_PURPOSE)
def test_what_a_rule_keeps_in_float32_is_on_purpose(reason):
  variables = jax.eval_shape(Head().init, jax.random.key(0), WIDE)
  model = mpjax.linen.with_policy(Head(), "mixed_bfloat16", rules=[ON_PURPOSE[reason]])
  audit = mpjax.audit(jax.jit(lambda v, x: model.apply(v, x)))(variables, WIDE)
  assert audit.leaks == ()
  assert [(x.path, x.reason, x.flops) for x in audit.on_purpose] == [
    ("Head/head", reason, 2 * 16 * 8 * 4)
  ]
  assert audit.half_share == 2 / 3
  assert audit.rules == {ON_PURPOSE[reason]: (1, 0)}


def test_what_code_keeps_in_float32_is_on_purpose():
  def fn(x, w):
    y = mpjax.full_precision(jnp.matmul)(x, w)
    z = jnp.matmul(x, w, precision="highest") + jnp.matmul(x, w, precision="high")
    return y + z + x[:, :2] @ w[:2] + x @ x.T @ x @ w

  w = jax.ShapeDtypeStruct((8, 8), "float32")
  audit = mpjax.audit(mpjax.autocast(fn, data_argnums=0))(WIDE, w)
  assert audit.leaks == ()
  reasons = [
    "it sums fewer than 8 products of an input",
    "its operands are inputs and constants",
    "mpjax.full_precision",
    'precision="high"',
    'precision="highest"',
  ]
  assert sorted(x.reason for x in audit.on_purpose) == reasons
  # By the number of terms in each sum; that of the last matmul alone is in low precision.
  assert audit.half_share == 8 / (3 * 8 + 2 + 2 * 16 + 8)


def test_an_optimizer_that_multiplies_in_float32_is_on_purpose():
  def step(w, x):
    half = w.astype(jnp.bfloat16)
    grads = jax.grad(lambda w: jnp.sum((x @ w).astype(jnp.float32)))(half)
    wide = grads.astype(jnp.float32)
    return w - 0.1 * wide @ wide.T @ wide

  audit = mpjax.audit(step)(jax.ShapeDtypeStruct((8, 8), "float32"), X)
  assert audit.leaks == ()
  assert [x.reason for x in audit.on_purpose] == ["the optimizer"]


def test_a_linear_solve_is_float32_on_purpose():
  def fn(w, x):
    solved = jax.lax.custom_linear_solve(lambda v: w @ v, x, lambda _, b: w @ (w @ b))
    return solved @ w

  w = jax.ShapeDtypeStruct((8, 8), "float32")
  audit = mpjax.audit(mpjax.autocast(fn))(w, w)
  assert audit.leaks == ()
  assert audit.flops == {("forward", "float32"): 2 * 1024, ("forward", "bfloat16"): 1024}
  (purpose,) = audit.on_purpose
  assert purpose.reason == "custom_linear_solve, which runs as written"
  assert purpose.flops == 2 * 1024
