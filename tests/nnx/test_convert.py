"""Conversion of a view for inference: what is stored in half, and that nothing else changes."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.models.values import integers, normal
from tests.nnx import rig
from tests.programs import bits

Rule, convert, with_policy = mpjax.Rule, mpjax.nnx.convert, mpjax.nnx.with_policy


class Tagger(nnx.Module):
  """A table at both ends, a cell over time, norms, statistics, a parameter that is never used."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(11, 8, rngs=rngs)
    self.rnn = nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs))
    self.layer_norm, self.batch_norm = nnx.LayerNorm(8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
    self.mix, self.unused = nnx.Param(jnp.ones((8, 8))), nnx.Param(jnp.ones(2))
    self.counter = nnx.BatchStat(jnp.zeros((), jnp.int32))

  def __call__(self, ids):
    x = self.layer_norm(self.rnn(self.embed(ids)))
    x = self.batch_norm(x @ self.mix, use_running_average=True)
    return self.head(x)

  def head(self, x):
    return self.embed.attend(x)


def stored(view):
  flat = nnx.to_flat_state(nnx.state(view, nnx.Not(nnx.RngState)))
  return {"/".join(map(str, path)): str(x.dtype) for path, x in flat}


IDS = integers(2, 5, below=11)


@pytest.mark.case("A84", "A81")
def test_what_only_half_is_made_of_is_stored_in_half():
  half = "bfloat16"
  view = with_policy(rig.model(Tagger), f"mixed_{half}")
  before = stored(view)
  inference = convert(view, IDS)
  found = stored(inference)
  assert stored(view) == before
  narrowed = {path for path, dtype in found.items() if dtype != before[path]}
  cell = {f"rnn/cell/{d}/kernel" for d in ("dense_h", "dense_i")} | {"rnn/cell/dense_i/bias"}
  assert narrowed == {"embed/embedding", "mix", *cell}
  assert {found[path] for path in narrowed} == {half}
  assert found["counter"] == "int32"
  assert {found[p] for p in found if "norm" in p or p == "unused"} == {"float32"}
  assert type(inference) is type(view)
  # XLA otherwise leaves out roundings of parameters that are stored in float32.
  as_told = {"xla_allow_excess_precision": False}
  call = jax.jit(lambda m: m(IDS), compiler_options=as_told)
  assert bits(call(inference)) == bits(call(view))
  # Casts that only the sums of gradients need are left out where it is compiled.
  costs: list[Any] = [call.lower(m).compile().cost_analysis() for m in (view, inference)]
  before, after = (cost["bytes accessed"] for cost in costs)
  assert after < before


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
  model = rig.model(Tagger)
  found = convert(with_policy(model, "float32"), IDS)
  assert stored(found) == stored(model)
  assert bits(nnx.state(found, nnx.Param)) == bits(nnx.state(model, nnx.Param))
  where, fix = "mpjax.nnx.convert(view)", "Write convert(with_policy(model, policy), *inputs)"
  with refused(TypeError, where, "a view", "a Tagger", fix):
    convert(model, IDS)
