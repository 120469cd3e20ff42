"""Attention whose weights are dropped out or sown, against a NumPy version in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.nnx._attention import attention
from tests.models.values import normal
from tests.programs import dtypes_of, products, run

MASK = np.random.default_rng(0).random((2, 1, 5, 5)) < 0.6
MASK[..., 0] = True


class Sown:
  """Stands for the module that the weights are sown in."""

  def sow(self, kind, name, value):
    self.weights = value


def call(q, k, v, **options):
  given = {"mask": None, "dropout_rng": None, "dropout_rate": 0.0, "broadcast_dropout": True}
  given |= {"deterministic": True, "dtype": q.dtype, "precision": None, "module": None}
  return attention(q, k, v, **{**given, "is_causal": False, **options})


def by_numpy(q, k, v, seen, keep=1.0):
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  groups = q.shape[-2] // k.shape[-2]
  k, v = (np.repeat(x, groups, axis=-2) for x in (k, v))
  logits = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
  weights = np.where(seen, np.exp(logits), 0)
  weights /= weights.sum(-1, keepdims=True)
  return weights, np.einsum("bhts,bshd->bthd", weights * keep, v)


CASES = {
  "plain": ({}, 2),
  "masked": ({"mask": MASK}, 2),
  "causal": ({"is_causal": True}, 2),
  "masked and causal": ({"mask": MASK, "is_causal": True}, 2),
  "grouped": ({"mask": MASK}, 1),
}


@pytest.mark.case("B088")
@pytest.mark.parametrize("name", CASES)
def test_against_numpy(name):
  options, heads = CASES[name]
  q, k, v = (
    normal(2, 5, 4, 8),
    normal(2, 5, 4 // heads, 8, seed=1),
    normal(2, 5, 4 // heads, 8, seed=2),
  )

  def forward(q, k, v):
    sown = Sown()
    return call(q, k, v, module=sown, **options), sown.weights, call(q, k, v, **options)

  out, sown, plain = run(forward, q, k, v)
  seen = options.get("mask", True) & (
    np.tril(np.ones((5, 5), bool)) | (not options.get("is_causal"))
  )
  weights, wanted = by_numpy(q, k, v, seen)
  np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(sown, weights, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(plain, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_is_that_of_flax(broadcast):
  q, k, v = (jnp.asarray(normal(2, 5, 2, 8, seed=i)) for i in range(3))
  options = {"dropout_rng": jax.random.key(3), "dropout_rate": 0.4, "deterministic": False}
  options["broadcast_dropout"] = broadcast

  def forward(q, k, v):
    flax = nnx.dot_product_attention(q, k, v, **options)
    kept = {**options, "deterministic": True}
    return call(q, k, v, **options), flax, call(q, k, v, **kept), call(q, k, v)

  ours, flax, kept, plain = run(forward, q, k, v)
  np.testing.assert_allclose(ours, flax, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(kept, plain, rtol=1e-5, atol=1e-6)
  assert not np.allclose(ours, plain)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all seen", "masked"])
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_products_are_in_half_and_the_softmax_in_float32(half, mask):
  q, k, v = (jnp.asarray(normal(2, 5, 2, 8, seed=i), half) for i in range(3))

  def loss(q, k, v):
    out = call(q, k, v, mask=mask, module=Sown())
    assert out.dtype == half
    return out.astype(jnp.float32).sum()

  program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v)
  assert {p.dtypes for p in products(program)} == {(half, half)}
  assert dtypes_of(program, "exp") == {"float32"}


def test_a_row_that_sees_nothing_is_finite():
  q, k, v = (jnp.asarray(normal(2, 5, 2, 8, seed=i), "float16") for i in range(3))
  assert np.isfinite(call(q, k, v, mask=np.zeros((1, 1, 5, 5), bool), module=Sown())).all()
