"""The order of attributes and containers, and methods in attributes, in a view and in its calls."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.core import freeze

import mpjax
from tests.models.values import normal
from tests.nnx.rig import HALF, X
from tests.programs import products

Rule, with_policy = mpjax.Rule, mpjax.nnx.with_policy

X8 = jnp.asarray(normal(2, 8))


class Ordered(nnx.Module):
  """Containers of Python, which NNX sorts; calls rely on their order, and one may change them."""

  def __init__(self, kind, counts):
    self.kept = nnx.data({"scale": jnp.full(8, 5.0), "bias": jnp.ones(8), "deep": {"z": 0, "a": 1}})
    self.held = nnx.data([kind({"z": nnx.Linear(8, 8, rngs=nnx.Rngs(0)), "a": 1})])
    self.again = nnx.data(self.held)
    self.counts = counts

  def __call__(self, x):
    if self.counts:
      self.kept["deep"]["z"] += 1
      self.kept["added"] = self.kept.pop("added", x)
    scale, bias, *_ = self.kept.values()
    return x * scale + bias, [*self.held[0], *self.again[0]]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", [dict, freeze])
@pytest.mark.parametrize("counts", [False, True])
def test_containers_keep_their_order_in_the_view_and_in_the_model(counts, kind):
  model = Ordered(kind, counts)
  view = with_policy(model, "c=bf16")
  for call in (view, view, model):
    out, keys = call(0 * X8)
    assert (out[0].tolist(), keys) == ([1] * 8, ["z", "a"] * 2)
  assert list(model.kept) == ["scale", "bias", "deep"] + ["added"] * counts
  assert model.kept["deep"] == {"z": 3 * counts, "a": 1}
  assert list(model.kept["deep"]) == ["z", "a"]


class Escaping(nnx.Module):
  """Keeps methods of its layers, bare and in a partial function; and has a method of another."""

  def __init__(self):
    self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    self.bare = self.layer.__call__
    self.held = (functools.partial(lambda fun, x: fun(x), self.layer.__call__),)

  def __call__(self, x):
    return self.held[0](self.bare(x)) @ jnp.eye(8)

  again = functools.partialmethod(__call__)


def test_methods_kept_as_attributes_run_under_the_policy():
  view = with_policy(Escaping(), HALF, [Rule("float16", path="layer")])
  for call in (view, view.again):
    found = products(jax.make_jaxpr(call)(X))
    assert [p.dtypes[0] for p in found] == ["float16", "float16", "bfloat16"]
