"""What a module's own code computes under a policy: each operation by the list that it is on."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import linen
from tests import programs

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 8)), jnp.float32)


class Attention(nn.Module):
  """Attention whose author took the softmax by hand, in the dtype of the products."""

  scale: float = 1.0

  @nn.compact
  def __call__(self, x):
    q, k, v = (nn.Dense(8, name=name)(x) for name in "qkv")
    scores = q @ k.mT * self.scale
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return nn.Dense(8)(weights / weights.sum(-1, keepdims=True) @ v)


class Gate(nn.Module):
  """Logarithm, exponential and a sum, in an order of the author's own."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(8)(x)
    return nn.Dense(4)(jnp.log1p(jnp.exp(x)) * jnp.cumsum(x, -1))


def traced(model, variables, x=X):
  return jax.make_jaxpr(model.apply)(variables, x)


def wrapped(module, half, x=X):
  model = linen.with_policy(module, f"mixed_{half}")
  return model, model.init(jax.random.key(0), x)


def dtypes_of(program, names):
  """Returns the dtypes of the operands of these primitives."""
  return {
    str(v.aval.dtype)
    for eqn, _ in programs.equations(program)
    if eqn.primitive.name in names
    for v in eqn.invars
  }


FLOAT32_LIST = ("exp", "log", "log1p", "cumsum", "reduce_sum")


@BOTH
@pytest.mark.parametrize("module", [Attention(), Gate()], ids=["attention", "gate"])
def test_exponentials_logarithms_and_sums_are_float32(module, half):
  model, variables = wrapped(module, half)
  assert dtypes_of(traced(model, variables), FLOAT32_LIST) == {"float32"}


@BOTH
def test_what_is_on_no_float32_list_stays_in_half_for_a_matmul(half):
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.relu(nn.Dense(8)(x)) * 0.5
      return nn.Dense(4)(x), jnp.sum(x)

  model, variables = wrapped(Model(), half)
  program = traced(model, variables)
  assert dtypes_of(program, ("dot_general", "max", "mul")) == {half}
  assert dtypes_of(program, ("reduce_sum",)) == {"float32"}


@BOTH
def test_what_only_an_exponential_reads_is_computed_in_float32(half):
  model, variables = wrapped(Attention(), half)
  program = traced(model, variables)
  assert dtypes_of(program, ("dot_general",)) == {half}
  assert dtypes_of(program, ("sub",)) == {"float32"}


def test_float16_does_not_overflow_where_the_author_forgot_it():
  """exp(12) is beyond float16; the sum of it is too, and float32 holds both."""

  class Loud(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(8)(x)
      return jnp.log(jnp.sum(jnp.exp(x * 0 + 12)))

  model, variables = wrapped(Loud(), "float16")
  np.testing.assert_allclose(model.apply(variables, X), 12 + np.log(X.size), rtol=1e-3)


@BOTH
def test_results_and_gradients_keep_their_dtypes(half):
  model, ours = wrapped(Attention(), half)
  plain = Attention()
  variables = plain.init(jax.random.key(0), X)
  assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, variables)

  def loss(model):
    return lambda v: jnp.mean(model.apply(v, X) ** 2)

  expected, found = (jax.eval_shape(jax.value_and_grad(loss(m)), variables) for m in (plain, model))
  assert found == expected


def test_state_rngs_methods_and_bound_models():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
      x = nn.BatchNorm(not train)(nn.Dropout(0.5, deterministic=not train)(x))
      return jax.nn.softmax(nn.Dense(4)(x))

    def shout(self, x, *, word):
      assert word == "loud"
      return jnp.exp(x.astype(jnp.bfloat16))

  model = linen.with_policy(Model(), "mixed_bfloat16")
  variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, True)
  rngs = {"dropout": jax.random.key(2)}
  out, new = model.apply(variables, X, True, rngs=rngs, mutable=["batch_stats"])
  assert out.dtype == jnp.float32
  assert jax.tree.structure(new["batch_stats"]) == jax.tree.structure(variables["batch_stats"])
  assert model.apply(variables, X, word="loud", method="shout").dtype == jnp.float32
  np.testing.assert_array_equal(model.bind(variables)(X, False), model.apply(variables, X, False))
  first, _ = model.init_with_output(
    {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, True
  )
  assert first.dtype == jnp.float32


def test_a_second_call_traces_nothing():
  calls = []

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      calls.append(1)
      return jnp.exp(nn.Dense(4)(x))

  model = linen.with_policy(Model(), "mixed_float16")
  variables = model.init(jax.random.key(0), X)
  step = jax.jit(model.apply)
  step(variables, X)
  calls.clear()
  step(variables, X)
  assert calls == []
