"""Work that an audit does not enter: it is listed, counted where it says its cost, and a leak."""

import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas

import mpjax
from mpjax._diagnose.audit.not_entered import UNKNOWN

pytestmark = pytest.mark.standard_promotion


def s(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


def _copy(x, out):
  out[...] = x[...]


def kernel(x, cost=None):
  estimate = None
  if cost is not None:
    estimate = pallas.CostEstimate(flops=cost, transcendentals=0, bytes_accessed=0)
  call = pallas.pallas_call(_copy, jax.typeof(x), interpret=True, cost_estimate=estimate)
  return call(x)


def layer(w, x, cost=None, cast=lambda f: f):
  with jax.named_scope("attention"):
    return cast(lambda x: kernel(x, cost))(x @ w)


def test_a_kernel_without_an_estimate_is_not_counted():
  audit = mpjax.audit(mpjax.autocast(layer))(s(8, 8), s(4, 8))
  (found,) = audit.kernels
  assert (found.path, found.operation, found.dtype) == ("attention", "pallas_call", "float32")
  assert found.reason == UNKNOWN
  assert math.isnan(audit.half_share)
  assert "100.0 % of the matmuls' FLOPs in low precision, 1 kernel not counted" in str(audit)
  (leak,) = audit.leaks
  assert (leak.kind, leak.cause, leak.path) == ("kernel", "pallas_call", "attention")
  assert "mpjax.low_precision(kernel)" in leak.fix
  with pytest.raises(mpjax.errors.MpjaxAssertionError, match="low_precision"):
    audit.assert_no_leaks()


def test_a_kernel_counts_by_its_estimate():
  audit = mpjax.audit(mpjax.autocast(lambda w, x: layer(w, x, 1536)))(s(8, 8), s(4, 8))
  assert audit.flops == {("forward", "bfloat16"): 512, ("forward", "float32"): 1536}
  assert audit.half_share == 0.25
  assert "not counted" not in str(audit)


def test_the_cure_of_the_leak_works():
  low = mpjax.autocast(lambda w, x: layer(w, x, cast=mpjax.low_precision))
  audit = mpjax.audit(low)(s(8, 8), s(4, 8))
  assert [x.dtype for x in audit.kernels] == ["bfloat16"]
  audit.assert_no_leaks()
  # However much it computes, the share is at least this one.
  assert audit.half_share == 1


class Kernel(nn.Module):
  @nn.compact
  def __call__(self, x):
    return kernel(nn.Dense(8)(x))


class Residual(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(8)(x)
    x = x + Kernel(name="attention")(x)
    return nn.Dense(8)(x)


def test_the_rule_that_a_leak_advises_leaves_no_leak():
  model, x = Residual(), s(4, 8)
  variables = jax.eval_shape(model.init, jax.random.key(0), x)
  (leak,) = mpjax.audit(mpjax.with_policy(model, "mixed_bfloat16").apply)(variables, x).leaks
  (printed,) = re.findall(r"mpjax\.Rule\(.*\)", leak.fix)
  rule = eval(printed, {"mpjax": mpjax})
  low = mpjax.with_policy(model, "mixed_bfloat16", [rule])
  audit = mpjax.audit(low.apply)(variables, x)
  assert [each.dtype for each in audit.kernels] == ["bfloat16"]
  assert audit.leaks == ()


def test_without_a_policy_no_kernel_is_a_leak():
  audit = mpjax.audit(layer)(s(8, 8), s(4, 8))
  assert len(audit.kernels) == 1
  audit.assert_no_leaks()


def test_a_kernel_in_a_loop_counts_once_for_each_run():
  def fn(w, x):
    return lax.scan(lambda c, _: (layer(w, c, 100), None), x, length=3)[0]

  (found,) = mpjax.audit(mpjax.autocast(fn))(s(8, 8), s(4, 8)).kernels
  assert (found.flops, found.times) == (300, 3)


# A float32 operand beside one in bfloat16, and the dtype that counts for the kernel.
BESIDE = {
  "small statistics": (lambda x: jnp.ones((4, 1)), "bfloat16"),
  "broadcast statistics": (
    lambda x: jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), (4, 128)),
    "bfloat16",
  ),
  "as many elements": (jnp.sin, "float32"),
}


@pytest.mark.parametrize(("other", "dtype"), BESIDE.values(), ids=BESIDE)
def test_the_operand_with_the_most_elements_before_broadcasts_decides(other, dtype):
  def scaled(y, rows, out):
    out[...] = y[...] * rows[:, :1].astype(y.dtype)

  def fn(w, x):
    y = (x @ w).astype(jnp.bfloat16)
    return pallas.pallas_call(scaled, jax.typeof(y), interpret=True)(y, other(x))

  audit = mpjax.audit(mpjax.autocast(fn))(s(8, 8), s(4, 8))
  assert [x.dtype for x in audit.kernels] == [dtype]
  assert [x.kind for x in audit.leaks] == (["kernel"] if dtype == "float32" else [])
