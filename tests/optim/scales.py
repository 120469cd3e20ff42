"""An optimizer with a loss scale, and one of NNX."""

import jax.numpy as jnp
import optax
from flax import nnx

import mpjax

PARAMS = {"w": jnp.ones(3), "b": jnp.ones(1)}
SCALED = mpjax.loss_scaling(optax.sgd(0.1), mpjax.StaticLossScale(8))


def of_nnx():
  """Returns a model and an optimizer, which share no variable with those of another call."""
  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  tx = mpjax.loss_scaling(optax.adam(0.1), mpjax.DynamicLossScale(growth_interval=5))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)
