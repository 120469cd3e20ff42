"""A region that neither a policy nor autocast enters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from tests import programs

X = jnp.ones((2, 4))


def products(fn, *args):
  return [product.dtypes for product in programs.products(jax.make_jaxpr(fn)(*args))]


class Head(nn.Module):
  """A layer in half, and one that is to be float32, whose input comes in a nested container."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(4)(x)
    return mpjax.full_precision(lambda tree: nn.Dense(3, name="head")(tree["a"][0]))({"a": (x, 1)})


@pytest.mark.case("A73")
def test_a_policy_does_not_enter():
  model = mpjax.linen.with_policy(Head(), "mixed_bfloat16")
  variables = model.init(jax.random.key(0), X)
  assert products(model.apply, variables, X) == [("bfloat16",) * 2, ("float32",) * 2]


@pytest.mark.case("A73")
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize(
  "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"]
)
def test_autocast_does_not_enter(half, wrap):
  @mpjax.full_precision
  def inner(tree):
    return jax.jit(lambda w, x: x @ w)(tree["w"], tree["x"])

  def fn(w, x):
    return wrap(inner)({"w": w, "x": x @ w}) @ w

  w = jnp.ones((4, 4))
  found = products(mpjax.autocast(fn, f"mixed_{half}"), w, X)
  assert found == [(half,) * 2, ("float32",) * 2, (half,) * 2]
  grads = products(jax.grad(lambda w: mpjax.autocast(fn, f"mixed_{half}")(w, X).sum()), w)
  assert grads.count(("float32",) * 2) == 3


@pytest.mark.case("A73")
def test_nothing_changes_where_nothing_is_in_force():
  def fn(x, flag, *, name):
    assert flag is True
    assert name == "n"
    return x @ x.T

  x = X.astype(jnp.bfloat16)
  plain = jax.make_jaxpr(lambda x: fn(x, True, name="n"))(x)
  assert str(jax.make_jaxpr(lambda x: mpjax.full_precision(fn)(x, True, name="n"))(x)) == str(plain)


def test_half_arrays_come_in_as_float32_under_a_policy_alone():
  seen = []

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(2)(x)
      mpjax.full_precision(lambda x, n: seen.append((x.dtype, n.dtype)))(x, jnp.arange(2))
      return x

  model = mpjax.linen.with_policy(Model(), "mixed_float16")
  variables = model.init(jax.random.key(0), X)
  seen.clear()
  model.apply(variables, X)
  assert seen == [(jnp.float32, jnp.int32)]


def test_the_policy_is_in_force_again_afterwards():
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      y = mpjax.full_precision(nn.Dense(4, name="inside"))(x)
      return nn.Dense(4, name="after")(y)

  model = mpjax.linen.with_policy(Model(), "mixed_bfloat16")
  variables = model.init(jax.random.key(0), X)
  assert products(model.apply, variables, X) == [("float32",) * 2, ("bfloat16",) * 2]
