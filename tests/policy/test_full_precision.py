"""Functions that no policy and no autocast enters."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.autocast.rig import matmuls
from tests.linen.probes import Does

X = jnp.ones((2, 8))
LOW, FULL = ("bfloat16",) * 2, ("float32",) * 2


def test_a_policy_does_not_enter():
  # Half arrays come in as float32, and the policy is active again afterwards.
  seen = []

  def body(module, x):
    x = nn.Dense(8, name="before")(x)
    half = x.astype("bfloat16")
    mpjax.full_precision(lambda *xs, y: seen.extend((*xs, y)))(half, jnp.arange(2), y=half)
    log = []  # A list that the function appends to is the caller's own.
    mpjax.full_precision(lambda log, x: log.append(x.dtype))(log, x)
    assert log == [jnp.float32]
    x = mpjax.full_precision(lambda tree: nn.Dense(8, name="inside")(tree["a"][0]))({"a": (x, 1)})
    return nn.Dense(8, name="after")(x)

  model = mpjax.linen.with_policy(Does(body), "mixed_bfloat16")
  variables = model.init(jax.random.key(0), X)
  seen.clear()
  assert matmuls(model.apply, variables, X) == [LOW, FULL, LOW]
  assert [x.dtype for x in seen] == [jnp.float32, jnp.int32, jnp.float32]


def test_nothing_changes_where_nothing_is_in_force():
  def fn(x, flag, *, y):
    assert flag is True
    return x @ y.T

  x = X.astype(jnp.bfloat16)
  plain = jax.make_jaxpr(lambda x: fn(x, True, y=x))(x)
  assert str(jax.make_jaxpr(lambda x: mpjax.full_precision(fn)(x, True, y=x))(x)) == str(plain)


def test_autocast_does_not_enter():
  @mpjax.full_precision
  def inner(tree):
    return jax.jit(lambda w, x: x @ w)(tree["w"], tree["x"])

  def calling(inner):
    return mpjax.autocast(lambda w, x: inner({"w": w, "x": x @ w}) @ w)

  w = jnp.ones((8, 8))
  for wrap in (lambda f: f, jax.jit, jax.checkpoint):
    fn = calling(wrap(inner))
    assert matmuls(fn, w, X) == [LOW, FULL, LOW]
    grads = matmuls(jax.grad(lambda w, fn=fn: fn(w, X).sum()), w)
    assert grads.count(FULL) == 3


class Normed(nnx.Module):
  """A batch norm and a dropout behind a method that is a region."""

  def __init__(self):
    self.norm = nnx.BatchNorm(8, momentum=0.5, rngs=nnx.Rngs(0))
    self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

  @mpjax.full_precision
  def head(self, x):
    return self.drop(self.norm(x))

  def __call__(self, x):
    return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("as_argument", [False, True])
def test_what_nnx_modules_among_the_arguments_write_stays(as_argument):
  class Given(Normed):
    def __call__(self, x):
      call = mpjax.full_precision(lambda norm, drop, x: drop(norm(x)))
      return call(self.norm, self.drop, x)

  model = Given() if as_argument else Normed()
  view = mpjax.nnx.with_policy(model, "mixed_bfloat16")
  masks = [view(X.at[0].set(5.0)) == 0 for _ in range(4)]
  # Half of the distance to the mean, four times: what NumPy says of a float32 mean of 5 and 1.
  np.testing.assert_allclose(model.norm.mean[...], np.full(8, 3 * (1 - 0.5**4)), rtol=1e-6)
  assert model.norm.mean.dtype == jnp.float32
  assert len({np.asarray(mask).tobytes() for mask in masks}) > 1


def dense():
  model = nn.Dense(8)
  return mpjax.linen.with_policy(model, "bfloat16"), model.init(jax.random.key(0), X)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("inside", [False, True], ids=["outermost", "in autocast"])
def test_nothing_that_is_given_inside_a_region_begins(wrap, inside):
  model, variables = dense()

  def scoped(x):
    with mpjax.linen.policy_scope("bfloat16"):
      return nn.Dense(8).apply(variables, x)

  calls = {
    "apply": lambda x: model.apply(variables, x),
    "bound": lambda x: model.bind(variables)(x),
    "scope": scoped,
    "view": mpjax.nnx.with_policy(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "bfloat16"),
    "autocast": mpjax.autocast(lambda x: x @ x.T, "bfloat16"),
  }
  for name, call in calls.items():
    assert LOW in matmuls(call, X), name
    region = mpjax.full_precision(wrap(call))
    fn = mpjax.autocast(lambda x, region=region: region(x)) if inside else region
    assert set(matmuls(fn, X)) == {FULL}, name
    assert LOW in matmuls(call, X), name


def test_init_computes_in_float32_inside_a_region_and_outside_and_stores_what_the_policy_says():
  model, _ = dense()
  for init in (model.init_with_output, mpjax.full_precision(model.init_with_output)):
    assert matmuls(lambda x, init=init: init(jax.random.key(0), x)[0], X) == [FULL]
  variables = mpjax.full_precision(model.init)(jax.random.key(0), X)
  assert variables["params"]["kernel"].dtype == jnp.bfloat16
  outputs, variables = mpjax.full_precision(model.init_with_output)(jax.random.key(0), X)
  assert (outputs.dtype, variables["params"]["kernel"].dtype) == (jnp.float32, jnp.bfloat16)
