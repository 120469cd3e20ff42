"""Mistakes across libraries: each is told the function that takes what was given."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import mpjax
from mpjax._core.frameworks import check_function
from tests.errors import refused
from tests.linen.probes import Probe


def models():
  return {
    "Linen": Probe(),
    "NNX": nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
    "Equinox": eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)),
    "Haiku": hk.transform(lambda x: hk.Linear(2)(x)),
    "Haiku state": hk.transform_with_state(lambda x: hk.Linear(2)(x)),
  }


FIXES = dict.fromkeys(("Linen", "NNX"), "mpjax.with_policy(model")
FIXES |= {"Equinox": "mpjax.with_policy(loss_fn", "Haiku": "mpjax.with_policy(transformed.apply"}
KINDS = {
  "Linen": "a flax.linen.Module (Probe)",
  "NNX": "a flax.nnx.Module (Linear)",
  "Equinox": "an equinox.Module (MLP)",
  "Haiku": "a haiku.Transformed",
  "Haiku state": "a haiku.TransformedWithState",
}


CLASSES = [
  # What is given to the function of which library, what the error calls it, what to do.
  ("linen", nnx.Linear, "the class Linear", "mpjax.with_policy(Linear(...)"),
  ("nnx", Probe, "the class Probe", "mpjax.with_policy(Probe(...)"),
  ("nnx", jnp.tanh, "a PjitFunction", "mpjax.with_policy(fn"),
  ("linen", lambda x: x, "function", "mpjax.with_policy(fn"),
]


def test_a_model_of_another_library_is_told_what_to_write():
  where = "mpjax.with_policy(model)"
  for taken in ("Linen", "NNX"):
    with_policy = getattr(mpjax, taken.lower()).with_policy
    for given, model in models().items():
      name = given.split()[0]
      if name != taken:
        with refused(TypeError, where, f"flax.{taken.lower()}.Module", KINDS[given], FIXES[name]):
          with_policy(model, "bfloat16")
  for taken, given, got, fix in CLASSES:
    with refused(TypeError, where, "a", got, fix):
      getattr(mpjax, taken).with_policy(given, "mixed_bfloat16")


def test_what_is_no_function():
  model = (nn.Dense(2), "a flax.linen.Module (Dense), which is called through apply")
  compiled = (jax.jit(jnp.sin).lower(1.0).compile(), "a compiled one")
  for fn, got in [(3, "3"), ("fn", "'fn'"), ({}, "dict"), model, compiled]:
    with refused(TypeError, "mpjax.audit(fn)", "a function of arrays", got, "Pass"):
      check_function(fn, "mpjax.audit(fn)", "Pass it.")
  with refused(TypeError, "mpjax.full_precision(fn)", "a function", "an array", "jnp.matmul"):
    mpjax.full_precision(jnp.ones(2))
