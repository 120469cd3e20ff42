"""with_policy(ops="float32"): what a module's own code does in half though it should not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import linen
from tests import programs
from tests.models import by_hand

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 8)), jnp.float32)
IMAGES = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 6, 3)), jnp.float32)


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


def wrapped(module, half, x=X, **options):
  model = linen.with_policy(module, f"mixed_{half}", **options)
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
  plain, variables = wrapped(module, half)
  model, _ = wrapped(module, half, ops="float32")
  assert half in dtypes_of(traced(plain, variables), FLOAT32_LIST)
  assert dtypes_of(traced(model, variables), FLOAT32_LIST) == {"float32"}


def counts(program):
  """Returns how often each operation occurs, by the dtypes of its operands; casts apart."""
  found, casts = {}, 0
  for eqn, _ in programs.equations(program):
    if eqn.primitive.name == "convert_element_type":
      casts += 1
      continue
    key = (eqn.primitive.name, *(str(v.aval.dtype) for v in eqn.invars))
    found[key] = found.get(key, 0) + 1
  return found, casts


@BOTH
def test_nothing_else_in_the_program_changes(half):
  plain, variables = wrapped(Attention(), half)
  model, _ = wrapped(Attention(), half, ops="float32")
  (before, old_casts), (after, new_casts) = (counts(traced(m, variables)) for m in (plain, model))
  # One softmax: its difference and its exponential. Its sum was float32 already, by jax.numpy.
  gone = {key: n for key, n in before.items() if after.get(key) != n}
  come = {key: n for key, n in after.items() if before.get(key) != n}
  assert gone == {("sub", half, half): 1, ("exp", half): 1}
  assert come == {("sub", "float32", "float32"): 1, ("exp", "float32"): 1}
  # Both operands of the difference; the exponential is rounded, but not widened again for its sum.
  assert new_casts == old_casts + 2


@BOTH
def test_a_model_that_needs_none_of_it_is_left_as_it_is(half):
  plain, variables = wrapped(by_hand.HardCoded(), half, IMAGES)
  model, _ = wrapped(by_hand.HardCoded(), half, IMAGES, ops="float32")
  (before, old_casts), (after, new_casts) = (
    counts(traced(m, variables, IMAGES)) for m in (plain, model)
  )
  assert after == before
  assert new_casts <= old_casts  # One of a value that was cast twice, and of no use, goes.


def test_float16_does_not_overflow_where_the_author_forgot_it():
  """exp(12) is beyond float16; the sum of it is too, and float32 holds both."""

  class Loud(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(8)(x)
      return jnp.log(jnp.sum(jnp.exp(x * 0 + 12)))

  plain, variables = wrapped(Loud(), "float16")
  model, _ = wrapped(Loud(), "float16", ops="float32")
  assert np.isinf(plain.apply(variables, X))
  np.testing.assert_allclose(model.apply(variables, X), 12 + np.log(X.size), rtol=1e-3)


@BOTH
def test_results_and_gradients_keep_their_dtypes(half):
  plain, variables = wrapped(Attention(), half)
  model, ours = wrapped(Attention(), half, ops="float32")
  assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, variables)

  def loss(model):
    return lambda v: jnp.mean(model.apply(v, X) ** 2)

  expected, found = (jax.eval_shape(jax.value_and_grad(loss(m)), variables) for m in (plain, model))
  assert found == expected


def test_edited_lists_count_by_their_float32_part():
  ops = mpjax.OpLists().with_(float32=["tanh"], keep=["exp"])

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      return jnp.tanh(nn.Dense(4)(x)) + jnp.exp(nn.Dense(4)(x))

  model, variables = wrapped(Model(), "bfloat16", ops=ops)
  program = traced(model, variables)
  assert dtypes_of(program, ("tanh",)) == {"float32"}
  assert dtypes_of(program, ("exp", "dot_general")) == {"bfloat16"}


def test_state_rngs_methods_and_bound_models():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train):
      x = nn.BatchNorm(not train)(nn.Dropout(0.5, deterministic=not train)(x))
      return jax.nn.softmax(nn.Dense(4)(x))

    def shout(self, x, *, word):
      assert word == "loud"
      return jnp.exp(x.astype(jnp.bfloat16))

  model = linen.with_policy(Model(), "mixed_bfloat16", ops="float32")
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

  model = linen.with_policy(Model(), "mixed_float16", ops="float32")
  variables = model.init(jax.random.key(0), X)
  step = jax.jit(model.apply)
  step(variables, X)
  calls.clear()
  step(variables, X)
  assert calls == []
