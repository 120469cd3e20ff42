"""Matmuls in float8 of functions with derivative rules of their own."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.programs import products

FLOAT8 = mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(skip=()))


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32) / 4


W, X = normal(0, 32, 32), normal(1, 16, 32)


@jax.custom_vjp
def by_vjp(w, x):
  return x @ w


by_vjp.defvjp(
  lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, jax.jit(jnp.matmul)(g, kept[0].T))
)


def around(rule):
  """Returns a loss in which a function with a rule is between two other matmuls."""
  return lambda w, x: jnp.sum(jnp.sin(rule(w, jnp.sin(x @ w)) @ w))


def precise(policy):
  return mpjax.Policy(compute_dtype=policy, precision="highest")


POLICIES = {
  "float8": (FLOAT8, ()),
  "float8 by a rule": ("mixed_bfloat16", [mpjax.Rule(FLOAT8, path="part")]),
  "no float8 by a rule": (FLOAT8, [mpjax.Rule("mixed_bfloat16", path="part")]),
  "no policy by a rule": (FLOAT8, [mpjax.Rule(None, path="part")]),
  "precision": (precise("bfloat16"), [mpjax.Rule(precise("float32"), path="part")]),
}


@pytest.mark.parametrize("rule", [by_vjp], ids=["vjp"])
@pytest.mark.parametrize(("policy", "rules"), POLICIES.values(), ids=POLICIES)
def test_an_audit_says_what_runs(rule, policy, rules):
  """A rule is traced in the midst of the marks that the audit reads, and heeds none of them."""

  def loss(w, x):
    with jax.named_scope("part"):
      return around(rule)(w, x)

  fun = jax.value_and_grad(mpjax.autocast(loss, policy, rules=rules), (0, 1))
  counts = collections.Counter()
  for each in products(jax.make_jaxpr(fun)(W, X)):
    counts[each.dtypes[0]] += each.flops
  audited = collections.Counter()
  for (_, dtype), flops in mpjax.audit(fun)(W, X).flops.items():
    audited[dtype] += flops
  assert audited == counts
