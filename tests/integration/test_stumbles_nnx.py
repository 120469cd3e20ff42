"""Views of NNX models as objects: what only NNX has."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests import programs
from tests.models import stumbles
from tests.models.stumbles import ALMOST_ONE, EPS
from tests.models.stumbles_nnx import Embedded, Layer, Looking, Multiply, Owner, Precisely, Stacked
from tests.models.values import normal
from tests.nnx import rig

X = np.ones((2, 16), np.float32)
IN_HALF, IN_FULL = np.float32(16), 16 * ALMOST_ONE  # What X makes of weights that are almost one.


@pytest.fixture(params=["bfloat16", "float16"])
def half(request):
  return request.param


def view_of(model, half):
  return mpjax.nnx.with_policy(model, f"mixed_{half}")


def owner():
  model = Owner(rngs=nnx.Rngs(0))
  model.w[...] = jnp.full((16, 4), ALMOST_ONE)
  return model


def test_a_model_keeps_nothing_of_its_view(half):
  model = owner()
  view, before = view_of(model, half), programs.bits(model.w[...])
  for _ in range(2):
    np.testing.assert_array_equal(view(X), IN_HALF)
    np.testing.assert_array_equal(model(X), IN_FULL)
  assert view.w is model.w
  assert programs.bits(model.w[...]) == before


def test_a_view_sees_what_is_written_to_its_model(half):
  model = owner()
  view = view_of(model, half)
  np.testing.assert_array_equal(view(X), IN_HALF)
  model.w[...] = 2 * model.w[...]
  np.testing.assert_array_equal(view(X), 2 * IN_HALF)


def test_a_module_of_a_view_runs_under_the_policy(half):
  model = Precisely("half full read", rngs=nnx.Rngs(0))
  model.owner.w[...] = jnp.full((16, 4), ALMOST_ONE)
  view = view_of(model, half)
  np.testing.assert_array_equal(view.owner(X), IN_HALF)
  np.testing.assert_array_equal(view.reader(X), IN_HALF)
  np.testing.assert_array_equal(view(X)[1], IN_FULL)


class Summed(nnx.Module):
  """One scale for 400 rows."""

  def __init__(self):
    self.layer = Multiply()

  def __call__(self, x):
    return sum(jnp.sum(self.layer(row)) for row in x)


def test_four_hundred_uses_are_a_gradient_of_four_hundred(half):
  graphdef, state = nnx.split(Summed())
  x = np.ones((400, 1), np.float32)
  grad = jax.grad(lambda state: view_of(nnx.merge(graphdef, state), half)(x))
  (found,) = jax.tree.leaves(programs.run(grad, state))
  assert found == 400


def test_nnx_grad_of_a_view_counts_the_rows_of_a_table(half):
  model = rig.model(lambda rngs: Embedded(rngs=rngs))
  model.last.kernel[...] = jnp.eye(4)
  grads = nnx.grad(lambda view: jnp.sum(view(stumbles.TOKENS)))(view_of(model, half))
  expected = np.repeat([[10], [3590], [0], [0]], 4, 1)
  np.testing.assert_array_equal(grads["embed"]["table"][...], expected)


class Listed(nnx.Module):
  """The layers of `Stacked`, one by one."""

  def __init__(self, stacked):
    graphdef, state = nnx.split(stacked.layers)
    layers = [nnx.merge(graphdef, jax.tree.map(lambda x, i=i: x[i], state)) for i in range(2)]
    self.layers = nnx.List(layers)

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    return x


def test_stacked_layers_are_what_they_are_one_by_one(half):
  stacked = rig.model(lambda rngs: Stacked(rngs=rngs))
  listed, x = Listed(stacked), normal(8, 16) * 300
  assert all(isinstance(layer, Layer) for layer in listed.layers)
  one, two, want = (model(x) for model in (view_of(stacked, half), view_of(listed, half), listed))
  assert stumbles.error(one, want) < 4 * EPS[half]
  assert stumbles.error(two, want) < 4 * EPS[half]


def test_a_view_whose_python_looks_at_values_still_writes_to_its_model(half):
  class Counting(Looking):
    def __init__(self, *, rngs):
      super().__init__(rngs=rngs)
      self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
      found = super().__call__(x)
      self.count[...] += 1
      return found

  model = Counting(rngs=nnx.Rngs(0))
  view = view_of(model, half)
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    view(np.ones((2, 4), np.float32))
    view(np.ones((2, 4), np.float32))
  assert model.count[...] == 2
