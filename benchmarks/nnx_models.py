"""Models of NNX whose gradients `accuracy.py` measures, beside those of tests/nnx/zoo.py.

Research code, with raw parameters and attention of its own, that names no dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models import signals, vision
from tests.models.values import integers, normal
from tests.nnx.zoo import Model


def raw(rngs, *shape):
  return nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), shape))


class SelfAttention(nnx.Module):
  def __init__(self, rngs):
    self.to_qkv = nnx.Linear(16, 48, use_bias=False, rngs=rngs)
    self.to_out = nnx.Linear(16, 16, rngs=rngs)

  def __call__(self, x):
    q, k, v = (t.reshape(*t.shape[:2], 2, -1) for t in jnp.split(self.to_qkv(x), 3, axis=-1))
    weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5)
    out = jnp.einsum("bhij,bjhd->bihd", weights, v)
    return self.to_out(out.reshape(x.shape))


class Vit(nnx.Module):
  """A transformer on patches with a class token, its attention under remat."""

  def __init__(self, rngs):
    self.patches = nnx.Conv(3, 16, (4, 4), strides=(4, 4), rngs=rngs)
    self.token, self.positions = raw(rngs, 1, 1, 16), raw(rngs, 1, 5, 16)
    self.attention = nnx.List([SelfAttention(rngs) for _ in range(2)])
    self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(3)])
    self.head = nnx.Linear(16, 10, rngs=rngs)

  def __call__(self, images):
    x = self.patches(images)
    x = x.reshape(x.shape[0], -1, 16)
    x = jnp.concatenate([jnp.tile(self.token[...], (x.shape[0], 1, 1)), x], axis=1)
    x = x + self.positions
    for attention, norm in zip(self.attention, self.norms, strict=False):
      x = x + nnx.remat(lambda m, y: m(y))(attention, norm(x))
    return self.head(self.norms[-1](x)[:, 0])


class ResidualBlock(nnx.Module):
  def __init__(self, into, features, rngs):
    self.norms = nnx.List([nnx.GroupNorm(n, 2, rngs=rngs) for n in (into, features)])
    self.first = nnx.Conv(into, features, (3, 3), rngs=rngs)
    self.second = nnx.Conv(features, features, (3, 3), rngs=rngs)
    self.time = nnx.Linear(16, features, rngs=rngs)
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.short = nnx.Linear(into, features, rngs=rngs) if into != features else None

  def __call__(self, x, t):
    h = self.first(nnx.swish(self.norms[0](x)))
    h = h + self.time(nnx.swish(t))[:, None, None]
    h = self.second(self.drop(nnx.swish(self.norms[1](h))))
    return h + (x if self.short is None else self.short(x))


class UNet(nnx.Module):
  """Predicts the noise in an image, given a time: down, up, and a skip connection."""

  def __init__(self, rngs):
    self.time = nnx.Linear(16, 16, rngs=rngs)
    self.stem, self.out = (nnx.Conv(a, b, (3, 3), rngs=rngs) for a, b in ((3, 8), (8, 3)))
    self.down = ResidualBlock(8, 8, rngs)
    self.pool = nnx.Conv(8, 8, (3, 3), strides=(2, 2), rngs=rngs)
    self.middle, self.up = ResidualBlock(8, 16, rngs), ResidualBlock(24, 8, rngs)
    self.norm = nnx.GroupNorm(8, 2, rngs=rngs)

  def __call__(self, x, t):
    t = self.time(vision.time_embedding(t, 16))
    skip = self.down(self.stem(x), t)
    h = self.middle(self.pool(skip), t)
    h = jnp.repeat(jnp.repeat(h, 2, axis=1), 2, axis=2)
    h = self.up(jnp.concatenate([h, skip], axis=-1), t)
    return self.out(nnx.swish(self.norm(h)))


class WaveNet(nnx.Module):
  """Dilated causal convolutions from raw parameters, gated, with skip connections."""

  def __init__(self, rngs):
    self.first, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
    self.kernels = nnx.data([(raw(rngs, 2, 8, 8), raw(rngs, 2, 8, 8)) for _ in range(3)])
    self.mix = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

  def __call__(self, x):
    x, skips = self.first(x), 0.0
    for i, (gate, value) in enumerate(self.kernels):
      h = signals.gated(x, gate[...], value[...], 2**i)
      skips = skips + h
      x = x + self.mix[i](h)
    return self.out(nnx.relu(skips))


class GraphNetwork(nnx.Module):
  """Messages along edges, added up by segment."""

  def __init__(self, rngs):
    self.encode, self.out = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
    self.message, self.update = nnx.Linear(18, 8, rngs=rngs), nnx.GRUCell(8, 8, rngs=rngs)

  def __call__(self, nodes, edges, senders, receivers):
    h = self.encode(nodes)
    for _ in range(2):
      both = jnp.concatenate([h[senders], h[receivers], edges], axis=-1)
      total = jax.ops.segment_sum(nnx.relu(self.message(both)), receivers, h.shape[0])
      h, _ = self.update(h, total)
    return self.out(h)


class Bert(nnx.Module):
  """Two layers that normalise after adding, a padding mask, and a tied head for masked tokens."""

  def __init__(self, rngs, width=16):
    def linear(into, out):
      return nnx.Linear(into, out, rngs=rngs)

    self.tokens, self.positions, self.segments = (
      nnx.Embed(size, width, rngs=rngs) for size in (17, 8, 2)
    )
    self.attention = nnx.List(
      [nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs) for _ in range(2)]
    )
    self.up = nnx.List([linear(width, 2 * width) for _ in range(2)])
    self.down = nnx.List([linear(2 * width, width) for _ in range(2)])
    self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(6)])
    self.pooler, self.transform, self.next = (
      linear(width, width),
      linear(width, width),
      linear(width, 2),
    )

  def __call__(self, ids, segments, is_token):
    places = self.positions(jnp.arange(ids.shape[1]))
    x = self.norms[0](self.tokens(ids) + places[None] + self.segments(segments))
    mask = nnx.make_attention_mask(is_token, is_token, dtype=jnp.bool_)
    for i in range(2):
      x = self.norms[2 * i + 1](x + self.attention[i](x, mask=mask))
      x = self.norms[2 * i + 2](x + self.down[i](nnx.gelu(self.up[i](x), approximate=False)))
    h = self.norms[5](nnx.gelu(self.transform(x)))
    return self.tokens.attend(h), self.next(jnp.tanh(self.pooler(x[:, 0])))


class LstmLanguageModel(nnx.Module):
  """Two LSTMs over time with dropout between them, the first from a learned state."""

  def __init__(self, rngs):
    self.embed = nnx.Embed(13, 8, rngs=rngs)
    self.start = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), (2, 8)))
    self.layers = nnx.List([nnx.RNN(nnx.OptimizedLSTMCell(8, 8, rngs=rngs)) for _ in range(2)])
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.head = nnx.Linear(8, 13, rngs=rngs)

  def __call__(self, ids):
    x = self.drop(self.embed(ids))
    state = tuple(jnp.tile(row[None], (ids.shape[0], 1)) for row in self.start)
    x = self.layers[0](x, initial_carry=state)
    return self.head(self.drop(self.layers[1](x)))


class Mamba(nnx.Module):
  """Gated state spaces in a residual stream."""

  def __init__(self, rngs):
    self.into, self.out = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
    self.norms = nnx.List([nnx.RMSNorm(8, rngs=rngs) for _ in range(2)])
    self.spaces = nnx.List([signals.STATE_SPACE.nnx(None, rngs) for _ in range(2)])
    self.both = nnx.List([nnx.Linear(8, 16, rngs=rngs) for _ in range(2)])
    self.back = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

  def __call__(self, x):
    x = self.into(x)
    for norm, space, both, back in zip(self.norms, self.spaces, self.both, self.back, strict=True):
      h, gate = jnp.split(both(norm(x)), 2, axis=-1)
      x = x + back(space(nnx.silu(h)) * nnx.silu(gate))
    return self.out(x)


class Speech(nnx.Module):
  """Convolutions over a spectrogram, a GRU in both directions, a score for each letter in time."""

  def __init__(self, rngs):
    self.convs = nnx.List(
      [nnx.Conv(a, 6, (3, 3), strides=(1, 2), use_bias=False, rngs=rngs) for a in (1, 6)]
    )
    self.norms = nnx.List([nnx.BatchNorm(6, rngs=rngs) for _ in range(2)])
    self.rnn = nnx.Bidirectional(
      nnx.RNN(nnx.GRUCell(12, 8, rngs=rngs)), nnx.RNN(nnx.GRUCell(12, 8, rngs=rngs))
    )
    self.head = nnx.Linear(16, 5, rngs=rngs)

  def __call__(self, spectrogram, lengths):
    x = spectrogram[..., None]
    for conv, norm in zip(self.convs, self.norms, strict=True):
      x = nnx.relu(norm(conv(x)))
    x = x.reshape(*x.shape[:2], -1)
    return self.head(self.rnn(x, seq_lengths=lengths))


class Generator(nnx.Module):
  def __init__(self, rngs):
    self.into = nnx.Linear(4, 4 * 4 * 8, rngs=rngs)
    self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(2)])
    self.up = nnx.ConvTranspose(8, 8, (4, 4), strides=(2, 2), rngs=rngs)
    self.out = nnx.Conv(8, 3, (3, 3), rngs=rngs)

  def __call__(self, noise):
    x = nnx.relu(self.norms[0](self.into(noise).reshape(-1, 4, 4, 8)))
    return jnp.tanh(self.out(nnx.relu(self.norms[1](self.up(x)))))


class Judge(nnx.Module):
  def __init__(self, rngs):
    self.convs = nnx.List(
      [nnx.Conv(a, b, (4, 4), strides=(2, 2), rngs=rngs) for a, b in ((3, 6), (6, 6))]
    )
    self.head = nnx.Linear(24, 1, rngs=rngs)

  def __call__(self, images):
    for conv in self.convs:
      images = nnx.leaky_relu(conv(images), 0.2)
    return self.head(images.reshape(images.shape[0], -1))[:, 0]


class Gan(nnx.Module):
  """Two networks with losses against each other, and a penalty on a gradient."""

  def __init__(self, rngs):
    self.generator, self.judge = Generator(rngs), Judge(rngs)


def against_each_other(model: Any, noise: Any, images: Any) -> Any:
  made = model.generator(noise)
  kept = jax.lax.stop_gradient(made)
  graphdef, state = nnx.split(model.judge)
  slope = jax.grad(lambda x: nnx.merge(graphdef, state)(x).sum())(images)
  for_judge = nnx.softplus(model.judge(kept)).mean() + nnx.softplus(-model.judge(images)).mean()
  return nnx.softplus(-model.judge(made)).mean(), for_judge + (slope**2).sum()


_TOKENS = integers(3, 6, below=17)
_LONGER = integers(3, 8, below=17)

MODELS: dict[str, Model] = {
  "vit": Model(Vit, (normal(3, 8, 8, 3),)),
  "unet": Model(UNet, (normal(2, 8, 8, 3), normal(2) * 100)),
  "wavenet": Model(WaveNet, (normal(3, 12, 4),)),
  "graph_network": Model(
    GraphNetwork,
    (normal(7, 5), normal(12, 2), integers(12, below=7), integers(12, below=7, seed=1)),
  ),
  "bert": Model(Bert, (_LONGER, _LONGER % 2, np.arange(8)[None] < np.array([[8], [5], [6]]))),
  "lstm_language_model": Model(LstmLanguageModel, (integers(3, 6, below=13),)),
  "mamba": Model(Mamba, (normal(3, 6, 4),)),
  "speech": Model(Speech, (normal(2, 8, 8), np.array([8, 6], np.int32))),
  "gan": Model(Gan, (normal(3, 4), normal(3, 8, 8, 3)), against_each_other),
}
