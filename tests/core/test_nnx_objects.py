"""What is a variable of NNX, what an object, and what is of NNX at all."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from mpjax._core.nnx_objects import is_nnx_object, is_nnx_variable, is_of_nnx


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
