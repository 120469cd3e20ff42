"""Matmuls in float8 of functions with derivative rules of their own."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.jaxprs.autocast.rig import matmuls, with_jvp, with_vjp
from tests.programs import products

FLOAT8 = mpjax.Policy(compute_dtype="bfloat16", matmul=mpjax.Float8(skip=()))
IN_RULE = "it is in a derivative rule"


def normal(seed, *shape):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32) / 4


W, X = normal(0, 32, 32), normal(1, 16, 32)


by_jvp, by_vjp = with_jvp(lambda w, x: x @ w), with_vjp(lambda w, x: x @ w)


def around(rule):
  """Returns a loss in which a function with a rule is between two other matmuls."""
  return lambda w, x: jnp.sum(jnp.sin(rule(w, jnp.sin(x @ w)) @ w))


def closing_over(w, x):
  @jax.custom_jvp
  def layer(x):
    return x @ w

  layer.defjvp(lambda primals, tangents: (primals[0] @ w, tangents[0] @ w))
  return jnp.sum(jnp.sin(layer(x)))


def reasons(fun, *args):
  return {each.reason for each in mpjax.audit(fun)(*args).float8}


def test_what_is_linear_in_a_tangent_is_not_rounded():
  # JAX transposes it, and cannot transpose an operand divided by its largest element.
  with_float8, without = (mpjax.autocast(by_jvp, policy) for policy in (FLOAT8, "mixed_bfloat16"))
  # Without a gradient the rule does not count.
  assert matmuls(with_float8, W, X) == [("float8_e4m3fn", "float8_e4m3fn")]

  def pulled(fun):
    return jax.jit(lambda w, x: jax.vjp(fun, w, x)[1](X))(W, X)

  for one, other in zip(pulled(with_float8), pulled(without), strict=True):
    np.testing.assert_array_equal(one, other)
  found = reasons(jax.grad(lambda *args: with_float8(*args).sum(), (0, 1)), W, X)
  assert found == {IN_RULE}


def test_matmuls_around_a_rule_are_in_float8():
  fun = jax.grad(mpjax.autocast(around(by_jvp), FLOAT8), (0, 1))
  assert {"", IN_RULE} == reasons(fun, W, X)
  left = [each for each, _ in matmuls(fun, W, X)]
  assert left.count("float8_e4m3fn") == 2
  assert left.count("float8_e5m2") == 4
  assert left.count("bfloat16") == 3
  for mode in (jax.jacfwd, jax.jacrev):
    assert jnp.all(jnp.isfinite(mode(mpjax.autocast(around(by_jvp), FLOAT8))(W, X)))


def test_a_rule_that_closes_over_an_array():
  # Such a function is differentiated at once, and the derivative is rewritten.
  fun = jax.grad(mpjax.autocast(closing_over, FLOAT8), 1)
  without = jax.grad(mpjax.autocast(closing_over), 1)
  np.testing.assert_array_equal(fun(W, X), without(W, X))
  assert reasons(fun, W, X) == {IN_RULE}


def test_a_backward_rule_is_left_in_low_precision():
  fun = jax.grad(lambda *args: jnp.sum(mpjax.autocast(by_vjp, FLOAT8)(*args) ** 2), (0, 1))
  found = {each.reason: each.flops for each in mpjax.audit(fun)(W, X).float8}
  flops = 2 * 16 * 32 * 32
  assert found == {"": flops, IN_RULE: 2 * flops}


def precise(policy):
  return mpjax.Policy(compute_dtype=policy, precision="highest")


POLICIES = {
  "float8": (FLOAT8, ()),
  "float8 by a rule": ("mixed_bfloat16", [mpjax.Rule(FLOAT8, path="part")]),
  "no float8 by a rule": (FLOAT8, [mpjax.Rule("mixed_bfloat16", path="part")]),
  "no policy by a rule": (FLOAT8, [mpjax.Rule(None, path="part")]),
  "precision": (precise("bfloat16"), [mpjax.Rule(precise("float32"), path="part")]),
}


@pytest.mark.parametrize("rule", [by_jvp, by_vjp], ids=["jvp", "vjp"])
@pytest.mark.parametrize(("policy", "rules"), POLICIES.values(), ids=POLICIES)
def test_an_audit_says_what_runs(rule, policy, rules):
  # A rule is traced in the midst of the marks that the audit reads, and heeds none of them.
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
