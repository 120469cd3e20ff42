"""What belongs to which library; a mistake is told the function that takes what was given."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import mpjax
from mpjax._core.frameworks import check_function, is_nnx_object, is_nnx_variable, is_of_nnx
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


@pytest.mark.parametrize(
  ("taken", "given"),
  [(taken, given) for taken in ("Linen", "NNX") for given in KINDS if given != taken],
)
def test_a_model_of_another_library_is_told_what_to_write(taken, given):
  name = given.split()[0]
  expected = f"flax.{taken.lower()}.Module"
  with refused(TypeError, "mpjax.with_policy(model)", expected, KINDS[given], FIXES[name]):
    getattr(mpjax, taken.lower()).with_policy(models()[given], "bfloat16")


@pytest.mark.parametrize(("taken", "given", "got", "fix"), CLASSES)
def test_a_class_or_a_function_is_told_what_to_write(taken, given, got, fix):
  with refused(TypeError, "mpjax.with_policy(model)", "a", got, fix):
    getattr(mpjax, taken).with_policy(given, "mixed_bfloat16")


def test_what_is_no_function():
  model = (nn.Dense(2), "a flax.linen.Module (Dense), which is called through apply")
  compiled = (jax.jit(jnp.sin).lower(1.0).compile(), "a compiled one")
  for fn, got in [(3, "3"), ("fn", "'fn'"), ({}, "dict"), model, compiled]:
    with refused(TypeError, "mpjax.audit(fn)", "a function of arrays", got, "Pass"):
      check_function(fn, "mpjax.audit(fn)", "Pass it.")
  with refused(TypeError, "mpjax.full_precision(fn)", "a function", "an array", "jnp.matmul"):
    mpjax.full_precision(jnp.ones(2))


class Own(nnx.Module):
  """A module of a user, whose class is not in a module of NNX."""


class OwnParam(nnx.Param):
  """A variable of a user."""


def linear():
  return nnx.Linear(1, 1, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  ("value", "is_variable", "is_object", "is_any"),
  [
    (OwnParam(jnp.ones(1)), True, True, True),
    (linear().kernel, True, True, True),
    (Own(), False, True, True),
    (nnx.Rngs(0), False, True, True),
    (nnx.List([linear()]), False, True, True),
    (nnx.Optimizer(linear(), optax.sgd(0.1), wrt=nnx.Param), False, True, True),
    (nnx.graphdef(linear()), False, False, True),
    (nnx.state(linear()), False, False, True),
    (nnx.to_flat_state(nnx.state(linear())), False, False, True),
    (nnx.to_pure_dict(nnx.state(linear())), False, False, False),
    (nn.Dense(1), False, False, False),
    (np.ones(1), False, False, False),
    (Own, False, False, True),  # Its class is a metaclass of NNX.
  ],
  ids=lambda x: None if isinstance(x, bool) else type(x).__name__,
)
def test_values_of_nnx(value, is_variable, is_object, is_any):
  found = is_nnx_variable(value), is_nnx_object(value), is_of_nnx(value)
  assert found == (is_variable, is_object, is_any)
