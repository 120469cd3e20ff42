"""Losses for the tests of `tune`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.values import filled, normal, shapes


class Root(nn.Module):
  """A model whose root has a matmul, of numbers that may be too large for float16."""

  gain: float = 1e3

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(8, name="a")(x)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
    y = (self.gain * x) @ (self.gain * kernel) / self.gain**2
    return x + nn.Dense(8, name="b")(y)


def prepared(model):
  """Returns a loss of a model, or of another one, and its arguments."""
  x = jnp.asarray(np.random.default_rng(0).uniform(1, 4, (4, 8)), jnp.float32)

  def loss_fn(variables, x, wrapped=None):
    return jnp.mean((wrapped or model).apply(variables, x) ** 2)

  return loss_fn, filled(shapes(model, x)), x


X = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (16, 16)), jnp.float32)

KERNELS = {name: normal(16, 16, seed=i) / 4 for i, name in enumerate(("a", "hot", "b"))}

GAIN = 4096.0
"""It brings the values of the module "hot" to a fifth of the largest float16 number.

It is a power of two, since CPUs divide float16 numbers by others inexactly."""


def stack(kernels, x):
  with jax.named_scope("a"):
    x = jax.nn.relu(x @ kernels["a"])
  with jax.named_scope("hot"):
    x = (x * GAIN) @ kernels["hot"] / GAIN
  with jax.named_scope("b"):
    return x @ kernels["b"]
