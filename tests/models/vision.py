"""Image models as research code writes them: a transformer on patches, a denoising U-Net."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.parts import conv, dense, dropout, module

NORMAL = nn.initializers.normal(0.2)


class SelfAttention(nn.Module):
  def setup(self):
    self.to_qkv = nn.Dense(48, use_bias=False)
    self.to_out = nn.Dense(16)

  def __call__(self, x):
    q, k, v = (t.reshape(*t.shape[:2], 2, -1) for t in jnp.split(self.to_qkv(x), 3, axis=-1))
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5)
    out = jnp.einsum("bhij,bjhd->bihd", weights, v)
    return self.to_out(out.reshape(x.shape))


class Vit(nn.Module):
  """A transformer on patches with a class token, its layers under remat."""

  @nn.compact
  def __call__(self, images):
    x = nn.Conv(16, (4, 4), strides=(4, 4), name="patches")(images)
    x = x.reshape(x.shape[0], -1, 16)
    token = self.param("token", NORMAL, (1, 1, 16))
    x = jnp.concatenate([jnp.tile(token, (x.shape[0], 1, 1)), x], axis=1)
    x = x + self.param("positions", NORMAL, (1, x.shape[1], 16))
    for _ in range(2):
      x = x + nn.remat(SelfAttention)()(nn.LayerNorm()(x))
      x = x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
    return nn.Dense(10)(nn.LayerNorm()(x)[:, 0])


def time_embedding(t, width):
  """Sines and cosines of the time, at frequencies made by NumPy in float32."""
  frequencies = np.exp(-np.log(10000.0) * np.arange(width // 2, dtype=np.float32) / (width // 2))
  angles = t[:, None] * frequencies[None]
  return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResidualBlock(nn.Module):
  features: int

  @nn.compact
  def __call__(self, x, t):
    h = nn.Conv(self.features, (3, 3))(nn.swish(nn.GroupNorm(2)(x)))
    h = h + nn.Dense(self.features)(nn.swish(t))[:, None, None]
    h = nn.Dropout(0.1, deterministic=False)(nn.swish(nn.GroupNorm(2)(h)))
    h = nn.Conv(self.features, (3, 3))(h)
    return h + (x if x.shape == h.shape else nn.Dense(self.features)(x))


class UNet(nn.Module):
  """Predicts the noise in an image: down, up, and a skip connection at each size."""

  @nn.compact
  def __call__(self, x, t):
    t = nn.Dense(16)(nn.swish(nn.Dense(16)(time_embedding(t, 16))))
    skips = []
    h = nn.Conv(8, (3, 3))(x)
    for features in (8, 16):
      h = ResidualBlock(features)(h, t)
      skips.append(h)
      h = nn.Conv(features, (3, 3), strides=(2, 2))(h)
    h = ResidualBlock(16)(h, t)
    for features in (16, 8):
      h = jnp.repeat(jnp.repeat(h, 2, axis=1), 2, axis=2)
      h = ResidualBlock(features)(jnp.concatenate([h, skips.pop()], axis=-1), t)
    return nn.Conv(x.shape[-1], (3, 3))(nn.swish(nn.GroupNorm(2)(h)))


def _vae(m, x):
  h = nn.relu(m.encoder(x))
  mean, log_variance = jnp.split(m.statistics(h.reshape(h.shape[0], -1)), 2, axis=-1)
  z = mean + jnp.exp(log_variance / 2) * m.noise(jnp.ones_like(mean))
  return jax.nn.sigmoid(m.last(nn.relu(m.first(z)))).reshape(x.shape), mean, log_variance


VAE = module(
  _vae,
  encoder=conv(3, 4, 3, 2),
  statistics=dense(64, 16, bias=True),
  noise=dropout(0.5),
  first=dense(8, 64, bias=True),
  last=dense(64, 192, bias=True),
)
"""A variational autoencoder."""
