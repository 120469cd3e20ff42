"""What runs in low precision and would be safer in float32."""

import jax
import jax.numpy as jnp
import pytest

import mpjax

HALF = jax.ShapeDtypeStruct((256, 8), "float16")


def risks(fn, *args):
  return [(x.operation, x.dtype, x.reason) for x in mpjax.audit(fn)(*(args or (HALF,))).risks]


def test_exponentials_and_logarithms():
  assert risks(jnp.exp) == [("exp", "float16", "less exact than in float32")]
  assert risks(lambda x: jnp.exp(x.astype("float32"))) == []


def test_long_sums_and_no_short_ones():
  half = jnp.float16

  def sums(x, axis):
    return jax.lax.reduce_sum_p.bind(x, axes=(axis,), out_sharding=None)

  assert risks(lambda x: sums(x, 0)) == [
    ("reduce_sum", "float16", "256 terms are added in low precision")
  ]
  assert risks(lambda x: sums(x, 1)) == []
  assert risks(lambda x: jnp.sum(x, axis=0, dtype="float32").astype(half)) == []


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2048), ("bfloat16", 256)])
def test_integers_that_become_low_precision(dtype, most):
  ids = jax.ShapeDtypeStruct((4,), "int32")
  found = risks(lambda x: x.astype(dtype), ids)
  assert found == [("convert_element_type", dtype, f"integers above {most} are rounded")]
  assert risks(lambda x: x.astype(dtype), jax.ShapeDtypeStruct((4,), "bool")) == []


def test_numbers_that_low_precision_does_not_hold():
  assert risks(lambda x: x / (x + jnp.float16(1e-8))) == [
    ("add", "float16", "a number may have become 0 in low precision")
  ]
  masked = risks(lambda x, keep: x + keep.astype("float16") * jnp.float16(-jnp.inf), HALF, HALF)
  assert masked == [("mul", "float16", "a number became inf in low precision")]
  assert risks(lambda x: jnp.where(x > 0, x, -jnp.inf)) == []


def test_a_policy_leaves_none():
  def loss(w, x):
    logits = x @ w
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

  wide = jax.ShapeDtypeStruct((8, 8), "float32"), jax.ShapeDtypeStruct((256, 8), "float32")
  assert risks(jax.grad(mpjax.autocast(loss, "mixed_float16")), *wide) == []


def test_where_they_are_and_how_often():
  def fn(x):
    def step(x, _):
      with jax.named_scope("cell"):
        return jnp.exp(x), None

    return jax.lax.scan(step, x, length=5)[0]

  (risk,) = mpjax.audit(fn)(HALF).risks
  assert (risk.path, risk.direction, risk.operations) == ("cell", "forward", 5)
  assert risk.source is not None
  assert risk.source.file.endswith("test_risks.py")
