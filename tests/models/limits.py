"""Models that cannot be brought wholly into half, or through float16, by casts of their arguments.

Each makes a float32 array in its own body, or a constant that float16 cannot hold.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

NORMAL = nn.initializers.normal(0.3)


class NumpyScalar(nn.Module):
  """Divides by a NumPy float64, which promotes to float32 where a Python number would not."""

  @nn.compact
  def __call__(self, x):
    q, k, v = jnp.split(nn.Dense(24)(x), 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) / np.sqrt(8)
    return jnp.einsum("bts,bsd->btd", nn.softmax(scores), v)


class OneHot(nn.Module):
  """Routes by `jax.nn.one_hot`, which is float32 unless told otherwise."""

  @nn.compact
  def __call__(self, x):
    routed = jax.nn.one_hot(jnp.argmax(nn.Dense(4)(x), axis=-1), 4)
    return jnp.einsum("bte,btd,edf->btf", routed, x, self.param("experts", NORMAL, (4, 8, 8)))


class OwnState(nn.Module):
  """Multiplies a state that it started itself, in float32."""

  @nn.compact
  def __call__(self, x):
    readout = self.param("readout", NORMAL, (8, 8))
    x = nn.Dense(8)(x)

    def step(state, now):
      state = 0.9 * state + now
      return state, state @ readout

    return jax.lax.scan(step, jnp.zeros(x[:, 0].shape), jnp.moveaxis(x, 1, 0))[1]


class MaskByProduct(nn.Module):
  """Masks by `(1 - mask) * -1e9` with a mask of floats: 0 times -inf in float16."""

  @nn.compact
  def __call__(self, x, mask):
    q, k, v = jnp.split(nn.Dense(24)(x), 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) / 8**0.5 + (1.0 - mask[:, None]) * -1e9
    return nn.Dense(8)(jnp.einsum("bts,bsd->btd", nn.softmax(scores), v))


class SoftmaxByHand(nn.Module):
  """Attention whose author took the softmax by hand, in the dtype of the products."""

  @nn.compact
  def __call__(self, x):
    q, k, v = (nn.Dense(8, name=name)(x) for name in "qkv")
    scores = q @ k.mT
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    return nn.Dense(8)(weights / weights.sum(-1, keepdims=True) @ v)


class Gate(nn.Module):
  """Logarithm, exponential and a sum, in an order of the author's own."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(8)(x)
    return nn.Dense(4)(jnp.log1p(jnp.exp(x)) * jnp.cumsum(x, -1))
