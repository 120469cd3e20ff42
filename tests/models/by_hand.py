"""Models written twice in one text: without any dtype (`half=None`), and with it threaded by hand.

`half` is the dtype that the careful author of a mixed-precision model writes into every layer and
onto every input and raw parameter. Its name is not `dtype`, so that a policy cannot set it: under a
policy `half` is None. `careful=True` is that author's version of three layers whose own `dtype`
rounds in places where mpjax does not.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


def cast(x: Any, dtype: Any) -> Any:
  return x if dtype is None else x.astype(dtype)


class Mlp(nn.Module):
  half: Any = None

  @nn.compact
  def __call__(self, x, train=True):
    x = cast(x, self.half)
    for _ in range(2):
      x = nn.gelu(nn.Dense(16, dtype=self.half)(x))
      x = nn.LayerNorm(dtype=self.half)(x)
      x = nn.Dropout(0.1, deterministic=not train)(x)
    return nn.Dense(4, dtype=self.half)(x)


class HardCoded(nn.Module):
  """Every layer insists on float32, as the defaults of many published models do."""

  half: Any = None

  @nn.compact
  def __call__(self, x, train=True):
    dtype = self.half or jnp.float32
    x = cast(x, self.half)
    x = nn.relu(nn.Conv(8, (3, 3), dtype=dtype)(x))
    x = nn.GroupNorm(2, dtype=dtype)(x)
    x = nn.relu(nn.Dense(8, dtype=dtype)(x.mean((1, 2))))
    return nn.Dense(4, dtype=dtype)(x)


class ResNet(nn.Module):
  half: Any = None

  @nn.compact
  def __call__(self, x, train=True):
    def norm(x):
      return nn.BatchNorm(not train, dtype=self.half)(x)

    def conv(x, features, stride=1, size=3):
      stride = (stride, stride)
      return nn.Conv(features, (size, size), stride, use_bias=False, dtype=self.half)(x)

    x = nn.relu(norm(conv(cast(x, self.half), 4)))
    for features, stride in ((4, 1), (8, 2)):
      y = nn.relu(norm(conv(x, features, stride)))
      y = norm(conv(y, features))
      if y.shape != x.shape:
        x = norm(conv(x, features, stride, size=1))
      x = nn.relu(x + y)
    return nn.Dense(4, dtype=self.half)(x.mean((1, 2)))


class CarefulAttention(nn.Module):
  """Attention as written by hand: every product in half, the softmax in float32."""

  num_heads: int
  dtype: Any

  @nn.compact
  def __call__(self, x, mask):
    def project(name):
      shape = (self.num_heads, x.shape[-1] // self.num_heads)
      return nn.DenseGeneral(shape, dtype=self.dtype, name=name)(x)

    query, key, value = project("query"), project("key"), project("value")
    query = query / jnp.sqrt(query.shape[-1]).astype(self.dtype)
    logits = jnp.einsum("...qhd,...khd->...hqk", query, key)
    logits = jnp.where(mask, logits, jnp.finfo(self.dtype).min)
    weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(self.dtype)
    mixed = jnp.einsum("...hqk,...khd->...qhd", weights, value)
    return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=self.dtype, name="out")(mixed)


class TransformerBlock(nn.Module):
  half: Any = None
  careful: bool = False

  @nn.compact
  def __call__(self, x, train=True):
    x = cast(x, self.half)
    y = nn.LayerNorm(dtype=self.half)(x)
    if self.careful:
      y = CarefulAttention(2, self.half, name="attention")(y, _causal(x))
    else:
      attention = nn.MultiHeadDotProductAttention(2, dtype=self.half, name="attention")
      y = attention(y, mask=_causal(x))
    x = x + y
    y = nn.gelu(nn.Dense(16, dtype=self.half)(nn.LayerNorm(dtype=self.half)(x)))
    return x + nn.Dense(8, dtype=self.half)(y)


def _causal(x):
  return nn.make_causal_mask(jnp.ones(x.shape[:-1]), dtype=bool)


class CarefulLstm(nn.OptimizedLSTMCell):
  """A cell that hands its output on in half; Flax's own hands on the float32 of the carry."""

  def __call__(self, carry, inputs):
    carry, out = super().__call__(carry, inputs)
    return carry, out.astype(self.dtype)


class CarefulGru(nn.GRUCell):
  """A cell that keeps a float32 carry and hands its output on in half."""

  def __call__(self, carry, inputs):
    new, out = super().__call__(carry, inputs)
    return new, out.astype(self.dtype)


class Recurrent(nn.Module):
  gru: bool = False
  half: Any = None
  careful: bool = False

  @nn.compact
  def __call__(self, x, train=True):
    flax, careful = (nn.GRUCell, CarefulGru) if self.gru else (nn.OptimizedLSTMCell, CarefulLstm)
    cell = (careful if self.careful else flax)(8, dtype=self.half, name="cell")
    x = nn.RNN(cell, name="rnn")(cast(x, self.half))
    return nn.Dense(4, dtype=self.half)(x)


class CarefulEmbed(nn.Module):
  """A table that is gathered first and cast afterwards."""

  num_embeddings: int
  features: int
  dtype: Any

  def setup(self):
    initial = nn.initializers.normal(1.0)
    self.embedding = self.param("embedding", initial, (self.num_embeddings, self.features))

  def __call__(self, ids):
    return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)

  def attend(self, x):
    return jnp.dot(x, self.embedding.astype(self.dtype).T)


class GatedBlock(nn.Module):
  """Mixes each position with those before it by one learned kernel, then an MLP."""

  half: Any = None

  @nn.compact
  def __call__(self, x, _):
    y = nn.RMSNorm(dtype=self.half)(x)
    length = x.shape[1]
    kernel = self.param("mix", nn.initializers.normal(0.3), (length, length))
    y = jnp.einsum("ts,bsd->btd", jnp.tril(cast(kernel, self.half)), y)
    x = x + nn.Dense(8, dtype=self.half)(nn.silu(nn.Dense(16, dtype=self.half)(y)))
    return x, None


class TiedLanguageModel(nn.Module):
  """A stack under `nn.scan` over `nn.remat`, with one table at both ends."""

  half: Any = None
  careful: bool = False
  remat: bool = True

  @nn.compact
  def __call__(self, ids, train=True):
    embed = (CarefulEmbed if self.careful else nn.Embed)(11, 8, dtype=self.half, name="embed")
    block = nn.remat(GatedBlock, prevent_cse=False) if self.remat else GatedBlock
    stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    x, _ = stack(half=self.half, name="stack")(embed(ids), None)
    return embed.attend(nn.RMSNorm(dtype=self.half)(x))


class Mixer(nn.Module):
  """MLP-Mixer from raw parameters, a token mixer and a channel mixer."""

  half: Any = None

  def setup(self):
    initial = nn.initializers.normal(0.3)
    self.patch = self.param("patch", initial, (12, 8))
    self.tokens = self.param("tokens", initial, (2, 4, 4))
    self.channels = self.param("channels", initial, (2, 8, 8))
    self.norm = nn.LayerNorm(dtype=self.half)
    self.head = nn.Dense(3, dtype=self.half)

  def __call__(self, x, train=True):
    x = cast(x, self.half) @ cast(self.patch, self.half)
    tokens, channels = cast(self.tokens, self.half), cast(self.channels, self.half)
    x = x + jnp.swapaxes(nn.gelu(jnp.swapaxes(x, 1, 2) @ tokens[0]) @ tokens[1], 1, 2)
    x = x + nn.gelu(self.norm(x) @ channels[0]) @ channels[1]
    return self.head(x.mean(1))
