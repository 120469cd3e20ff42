"""Conversion of a view for inference: what is stored in half, and that nothing else changes."""

import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.models.values import normal
from tests.nnx import rig
from tests.programs import bits

Rule, convert, with_policy = mpjax.Rule, mpjax.nnx.convert, mpjax.nnx.with_policy


def stored(view):
  flat = nnx.to_flat_state(nnx.state(view, nnx.Not(nnx.RngState)))
  return {"/".join(map(str, path)): str(x.dtype) for path, x in flat}


class Normed(nnx.Module):
  """A norm between two layers, a parameter that is never used, and a counter."""

  def __init__(self, rngs):
    self.first, self.last = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))
    self.norm, self.unused = nnx.LayerNorm(4, rngs=rngs), nnx.Param(jnp.ones(2))
    self.counter = nnx.BatchStat(jnp.zeros((), jnp.int32))

  def __call__(self, x):
    return self.last(self.norm(self.first(x)))


@pytest.mark.case("A84", "A81")
def test_a_view_of_other_variables_that_stores_in_half_what_it_only_uses_so():
  # What is rounded, and that nothing else changes, is a matter of the jaxpr: `store_as_used`.
  view, x = with_policy(rig.model(Normed), "c=bf16"), normal(3, 4)
  before = stored(view)
  inference = convert(view, x)
  assert stored(view) == before
  layers = {f"{name}/{each}" for name in ("first", "last") for each in ("kernel", "bias")}
  narrowed = {path: dtype for path, dtype in stored(inference).items() if dtype != before[path]}
  assert narrowed == dict.fromkeys(layers, "bfloat16")
  assert type(inference) is type(view)


@pytest.mark.case("A84")
def test_what_a_float32_operation_uses_too_stays_also_when_it_is_shared():
  class Shared(nnx.Module):
    def __init__(self, rngs):
      self.a = nnx.Linear(4, 4, rngs=rngs)
      self.b = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
      self.b.kernel = self.a.kernel

    def __call__(self, x):
      return self.b(self.a(x))

  model = rig.model(Shared)
  half, mixed = (
    convert(with_policy(model, "mixed_bfloat16", rules), normal(3, 4))
    for rules in ([], [Rule("float32", path="b")])
  )
  assert stored(half) == {"a/kernel": "bfloat16", "a/bias": "bfloat16"}
  assert stored(mixed) == {"a/kernel": "float32", "a/bias": "bfloat16"}
  assert half.a.kernel is half.b.kernel
  assert half.a.kernel is not model.a.kernel


def test_a_method_and_what_is_no_array():
  class Coder(nnx.Module):
    def __init__(self, rngs):
      self.encoder, self.decoder = nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 3, rngs=rngs)

    def encode(self, x):
      return self.encoder(x), {"name": "coder"}

  found = stored(convert(with_policy(rig.model(Coder), "c=bf16"), normal(1, 3), method="encode"))
  assert {path.split("/")[0] for path, dtype in found.items() if dtype == "bfloat16"} == {"encoder"}


def test_under_float32_nothing_is_narrowed_and_only_a_view_is_converted():
  model = rig.model(Normed)
  found = convert(with_policy(model, "float32"), normal(3, 4))
  assert stored(found) == stored(model)
  assert bits(nnx.state(found, nnx.Param)) == bits(nnx.state(model, nnx.Param))
  where, fix = "mpjax.nnx.convert(view)", "Write convert(with_policy(model, policy), *inputs)"
  with refused(TypeError, where, "a view", "a Normed", fix):
    convert(model, normal(3, 4))
