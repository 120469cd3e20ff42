"""Language models at any size: without a dtype, and with it by hand, as in tests/models/by_hand.py.

By hand the softmax is taken in float32, and tables are gathered before they are cast.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tests.models.by_hand import CarefulEmbed, careful_cell, cast


class Attention(nn.Module):
  """Attention over all positions, or over those before."""

  heads: int
  causal: bool
  half: Any = None

  @nn.compact
  def __call__(self, x):
    shape = (self.heads, x.shape[-1] // self.heads)
    query, key, value = (
      nn.DenseGeneral(shape, dtype=self.half, name=name)(x) for name in ("query", "key", "value")
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query / float(np.sqrt(shape[1])), key)
    if self.causal:
      seen = np.tril(np.ones(scores.shape[-2:], bool))
      scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    wide = jnp.promote_types(scores.dtype, jnp.float32)
    weights = jax.nn.softmax(scores.astype(wide)).astype(value.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.half, name="out")(mixed)


class GptBlock(nn.Module):
  """A layer that normalises first; `(x, nothing) -> (x, nothing)` for `nn.scan`."""

  heads: int
  half: Any = None

  @nn.compact
  def __call__(self, x, _):
    y = nn.LayerNorm(dtype=self.half)(x)
    x = x + Attention(self.heads, causal=True, half=self.half)(y)
    y = nn.Dense(4 * x.shape[-1], dtype=self.half)(nn.LayerNorm(dtype=self.half)(x))
    return x + nn.Dense(x.shape[-1], dtype=self.half)(nn.gelu(y)), None


def _embed(vocabulary, width, half, name="tokens"):
  if half is None:
    return nn.Embed(vocabulary, width, name=name)
  return CarefulEmbed(vocabulary, width, half, name=name)


class Gpt(nn.Module):
  """A causal language model under `nn.scan` over `nn.remat`, with one table at both ends."""

  layers: int = 2
  width: int = 16
  heads: int = 2
  vocabulary: int = 17
  half: Any = None

  @nn.compact
  def __call__(self, ids):
    embed = _embed(self.vocabulary, self.width, self.half)
    places = self.param("places", nn.initializers.normal(0.02), (ids.shape[1], self.width))
    x = embed(ids) + cast(places, self.half)
    block = nn.remat(GptBlock, prevent_cse=False)
    stack = nn.scan(
      block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers
    )
    x, _ = stack(self.heads, half=self.half)(x, None)
    return embed.attend(nn.LayerNorm(dtype=self.half)(x))


class Bert(nn.Module):
  """An encoder that normalises after adding, each of its layers kept for the backward pass."""

  layers: int = 2
  width: int = 16
  heads: int = 2
  vocabulary: int = 17
  half: Any = None

  @nn.compact
  def __call__(self, ids):
    places = _embed(ids.shape[1], self.width, self.half, "places")
    x = _embed(self.vocabulary, self.width, self.half)(ids) + places(jnp.arange(ids.shape[1])[None])
    x = nn.LayerNorm(dtype=self.half)(x)
    for _ in range(self.layers):
      y = Attention(self.heads, causal=False, half=self.half)(x)
      x = nn.LayerNorm(dtype=self.half)(x + y)
      y = nn.gelu(nn.Dense(4 * self.width, dtype=self.half)(x))
      x = nn.LayerNorm(dtype=self.half)(x + nn.Dense(self.width, dtype=self.half)(y))
    return nn.Dense(self.vocabulary, dtype=self.half)(x)


class Lstm(nn.Module):
  """An embedding, an LSTM over time with a float32 state, and a product."""

  width: int = 16
  vocabulary: int = 17
  half: Any = None

  @nn.compact
  def __call__(self, ids):
    cell = nn.OptimizedLSTMCell
    cell = cell if self.half is None else careful_cell(cell)
    x = _embed(self.vocabulary, self.width, self.half)(ids)
    x = nn.RNN(cell(self.width, dtype=self.half, name="cell"))(x)
    return nn.Dense(self.vocabulary, dtype=self.half)(x)
