"""Linen models that everybody knows, without a dtype: a residual network and BERT."""

import flax.linen as nn
import jax.numpy as jnp


class ResNet(nn.Module):
  """Two residual blocks with batch normalisation, one of which halves the image.

  Its activation is smooth: beside a kink, rounding may choose another slope altogether, and the
  error of a gradient would say more of the inputs than of the arithmetic.
  """

  @nn.compact
  def __call__(self, x):
    def convolved(x, features, stride=1, size=3):
      x = nn.Conv(features, (size, size), (stride, stride), use_bias=False)(x)
      return nn.BatchNorm(use_running_average=False)(x)

    x = nn.silu(convolved(x, 4))
    for features, stride in ((4, 1), (8, 2)):
      y = nn.silu(convolved(x, features, stride))
      y = convolved(y, features)
      if y.shape != x.shape:
        x = convolved(x, features, stride, size=1)
      x = nn.silu(x + y)
    return nn.Dense(4)(x.mean((1, 2)))


class Bert(nn.Module):
  """Two layers that normalise after adding, a padding mask, and a tied head for masked tokens."""

  vocabulary: int = 17
  width: int = 8

  @nn.compact
  def __call__(self, ids, segments, is_token):
    table = nn.Embed(self.vocabulary, self.width, name="tokens")
    places = nn.Embed(ids.shape[1], self.width, name="positions")(jnp.arange(ids.shape[1]))
    x = table(ids) + places[None] + nn.Embed(2, self.width, name="segments")(segments)
    x = nn.LayerNorm()(x)
    mask = nn.make_attention_mask(is_token, is_token, dtype=bool)
    for i in range(2):
      attention = nn.MultiHeadDotProductAttention(2, name=f"attention_{i}")
      x = nn.LayerNorm()(x + attention(x, mask=mask))
      h = nn.gelu(nn.Dense(2 * self.width)(x), approximate=False)
      x = nn.LayerNorm()(x + nn.Dense(self.width)(h))
    pooled = nn.tanh(nn.Dense(self.width, name="pooler")(x[:, 0]))
    h = nn.LayerNorm()(nn.gelu(nn.Dense(self.width)(x)))
    return table.attend(h), nn.Dense(2)(pooled)
