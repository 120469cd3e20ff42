"""Parameters read in `setup()` and modules that are bound: what only Linen has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax import linen
from tests import programs
from tests.models import stumbles
from tests.models.stumbles import ALMOST_ONE
from tests.models.stumbles_linen import Multiply, Owner, Precisely, Shared
from tests.models.values import shapes

X = np.ones((2, 16), np.float32)
IN_HALF, IN_FULL = np.float32(16), 16 * ALMOST_ONE  # What X makes of weights that are almost one.


@pytest.fixture(params=["mixed_bfloat16", "mixed_float16"])
def policy(request):
  return request.param


def owned(model=None):
  return stumbles.valued(shapes(model or Owner(), X), w=ALMOST_ONE)


@pytest.mark.parametrize("first", ["plain", "scope"])
def test_a_bound_module_keeps_nothing_of_a_scope(first, policy):
  variables = owned()
  bound, plain = Owner().bind(variables), Owner().apply(variables, X)
  np.testing.assert_array_equal(plain, IN_FULL)
  if first == "plain":
    assert programs.bits(bound(X)) == programs.bits(plain)
  for _ in range(2):
    with linen.policy_scope(policy):
      np.testing.assert_array_equal(bound(X), IN_HALF)
    assert programs.bits(bound(X)) == programs.bits(plain)
    assert programs.bits(bound.w) == programs.bits(variables["params"]["w"])


def test_a_model_bound_with_a_policy_runs_under_it(policy):
  model = linen.with_policy(Owner(), policy)
  bound = model.bind(owned())
  for found in (bound(X), bound(X), model.apply(owned(), X)):
    np.testing.assert_array_equal(found, IN_HALF)
  assert bound(X).dtype == jnp.float32


def test_a_submodule_of_a_bound_model_runs_under_the_policy(policy):
  model = Precisely("half full read")
  bound = linen.with_policy(model, policy).bind(owned(model))
  np.testing.assert_array_equal(bound.owner(X), IN_HALF)
  np.testing.assert_array_equal(bound(X)[1], IN_FULL)


def test_a_scope_reaches_a_submodule_of_a_bound_model(policy):
  model = Precisely("half full read")
  bound = model.bind(owned(model))
  with linen.policy_scope(policy):
    np.testing.assert_array_equal(bound.owner(X), IN_HALF)
  np.testing.assert_array_equal(bound.owner(X), IN_FULL)


class Summed(Shared):
  """The example of the documentation: one scale, read in `setup()`, for 400 rows."""

  def setup(self):
    self.layer = Multiply()

  def __call__(self, x):
    return sum(jnp.sum(self.layer(row)) for row in x)


def test_four_hundred_uses_are_a_gradient_of_four_hundred(policy):
  model = linen.with_policy(Summed(), policy)
  x = np.ones((400, 1), np.float32)
  grad = jax.grad(lambda w: model.apply({"params": {"layer": {"w": w}}}, x))
  assert programs.run(grad, jnp.float32(1)) == 400
