"""Training through a view: optimizer, loss scaling, state that is committed or not, checkpoints."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.models.values import integers, normal
from tests.nnx import rig
from tests.programs import bits

with_policy = mpjax.nnx.with_policy


class Net(nnx.Module):
  """A layer, statistics, dropout, a raw parameter, a table."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(7, 4, rngs=rngs)
    self.first = nnx.Linear(4, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.drop = nnx.Dropout(0.2, rngs=rngs)
    self.head = nnx.Param(rngs.params.normal((8, 3)))

  def __call__(self, ids, x):
    x = self.first(self.embed(ids) + x)
    return self.drop(nnx.relu(self.norm(x))) @ self.head


INPUTS = (integers(8, below=7), normal(8, 4))


def test_an_optimizer_of_a_view_is_one_of_the_model():
  model = rig.model(Net)
  view = with_policy(model, "mixed_bfloat16")
  of_view, of_model = (
    nnx.Optimizer(m, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param) for m in (view, model)
  )
  ours, plain = (nnx.to_pure_dict(nnx.state(o)) for o in (of_view, of_model))
  assert jax.tree.structure(ours) == jax.tree.structure(plain)
  before = np.asarray(model.head[...])
  grads = jax.tree.map(jnp.ones_like, nnx.state(view, nnx.Param))
  of_view.update(view, grads)
  np.testing.assert_allclose(model.head[...], before - 0.5, rtol=1e-6)
  np.testing.assert_array_equal(view.head[...], model.head[...])


@pytest.mark.case("I10", "B063")
def test_keys_and_counters_are_those_of_the_model_through_split_and_merge():
  def counted(policy, calls):
    model = rig.model(Net)
    before = bits(jax.tree.map(raw, nnx.state(model, nnx.RngState)))
    view = rig.under(model, policy)
    graphdef, state = nnx.split(view)
    merged = nnx.merge(graphdef, jax.tree.map(lambda x: x, state))
    assert bits(jax.tree.map(raw, nnx.state(merged, nnx.RngState))) == before
    for _ in range(calls):
      nnx.jit(lambda m: m(*INPUTS))(merged)
    nnx.update(model, nnx.state(merged))
    return nnx.state(model, nnx.RngState)

  for calls in (0, 2):
    ours, plain = (counted(policy, calls) for policy in ("mixed_float16", None))
    assert bits(jax.tree.map(raw, ours)) == bits(jax.tree.map(raw, plain))
    counts = jax.tree.leaves(nnx.filter_state(ours, nnx.RngCount))
    assert {(x.dtype, int(x)) for x in counts} == {(np.dtype("uint32"), calls)}


def raw(x: Any) -> Any:
  """Returns the bits of a key, and what is no key as it is."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return jax.random.key_data(x) if is_key else x
