"""Language models as research code writes them: raw parameters, own attention, tied heads; BERT."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.models.parts import Part, dense, module

NORMAL = nn.initializers.normal(0.2)


NORM = module(
  lambda m, x: m.scale[...] * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6),
  {"scale": (nn.initializers.ones, (1, 1, 16))},
)
"""Root-mean-square normalisation, written by the model's author."""

LENGTH = 8


class Cache(nn.Module):
  """What was computed at each position so far, in a collection of its own name."""

  @nn.compact
  def __call__(self, new, index):
    shape = (new.shape[0], LENGTH, *new.shape[2:])
    kept = self.variable("cache", "kept", jnp.zeros, shape)
    kept.value = kept.value.at[:, index].set(new[:, 0])
    return kept.value


class NnxCache(nnx.Module):
  """The same, in a variable that is made before the first call."""

  def start(self, batch):
    self.kept = nnx.Cache(jnp.zeros((batch, LENGTH, 2, 8)))

  def __call__(self, new, index):
    self.kept[...] = kept = self.kept.at[:, index].set(new[:, 0])
    return kept


def _attend(m, x, index=None):
  q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhk->btnhk", x, m.qkv[...]), 2, 0)
  if index is None:
    seen = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
  else:
    k, v = m.keys(k, index), m.values(v, index)
    seen = (jnp.arange(LENGTH) <= index)[None, None, None]
  scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
  weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
  return jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, m.out[...])


def _block(m, x, index=None):
  x = x + m.attention(m.norm_1(x), index)
  return x + m.down(nn.gelu(m.up(m.norm_2(x))))


def _gpt(m, ids, index=None):
  """Decoder with learned positions; the head reads the table of the embedding."""
  positions = m.positions[: ids.shape[1]] if index is None else m.positions[index][None]
  x = m.wte(ids) + positions[None]
  for block in (m.block_0, m.block_1):
    x = block(x, index)
  return m.norm(x) @ m.wte.embedding.T


_CACHE = Part(lambda around: Cache(), lambda around, rngs: NnxCache())
_ATTENTION = module(
  _attend, {"qkv": (NORMAL, (16, 3, 2, 8)), "out": (NORMAL, (2, 8, 16))}, keys=_CACHE, values=_CACHE
)
"""Fused projection in one raw parameter, a -1e9 mask, a cache."""

_LAYER = module(
  _block,
  norm_1=NORM,
  norm_2=NORM,
  attention=_ATTENTION,
  up=dense(16, 32, bias=True),
  down=dense(32, 16, bias=True),
)
GPT = module(
  _gpt,
  {"positions": (NORMAL, (LENGTH, 16))},
  wte=Part(
    lambda around: nn.Embed(17, 16, embedding_init=NORMAL),
    lambda around, rngs: nnx.Embed(17, 16, embedding_init=NORMAL, rngs=rngs),
  ),
  block_0=_LAYER,
  block_1=_LAYER,
  norm=NORM,
)


class TextModel:
  """What hides the module: keys and parameters inside, a call and a loop outside."""

  def __init__(self) -> None:
    self.module = GPT.linen(None)

  def __call__(self, ids: Any, params: Any) -> Any:
    return self.module.apply({"params": params}, ids)

  def generate(self, params: Any, ids: Any, steps: int = 4) -> Any:
    """Returns tokens chosen greedily and the logits they were chosen by, through the cache."""
    cache = jax.eval_shape(lambda: self.module.init(jax.random.key(0), ids[:, :1], 0))["cache"]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), cache)

    def step(carry, index):
      cache, token = carry
      variables = {"params": params, "cache": cache}
      logits, new = self.module.apply(variables, token, index, mutable=["cache"])
      token = jnp.argmax(logits[:, -1:], axis=-1).astype(token.dtype)
      return (new["cache"], token), (token, logits)

    _, found = jax.lax.scan(step, (zeros, ids[:, :1]), jnp.arange(steps))
    return found


EXPERTS, CAPACITY = 4, 3


def _routed(m, x):
  """A feed-forward layer of experts: top-1 routing, dispatch by einsum, a balancing loss sown.

  Its activation is smooth: the slope of a relu depends on the last bit of what is nearly 0.
  """
  gates = jax.nn.softmax(x @ m.router[...])
  chosen = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
  place = (jnp.cumsum(chosen, axis=1) * chosen).sum(-1).astype(int) - 1
  dispatch = chosen[..., None] * jax.nn.one_hot(place, CAPACITY)[:, :, None]
  dispatch = dispatch.astype(x.dtype)
  inside = jnp.einsum("btec,btd->becd", dispatch, x)
  inside = nn.gelu(jnp.einsum("becd,edf->becf", inside, m.up[...]))
  inside = jnp.einsum("becf,efd->becd", inside, m.down[...])
  balance = EXPERTS * jnp.mean(gates.mean(1) * chosen.mean(1))
  if isinstance(m, nn.Module):
    m.sow("losses", "balance", balance)
  else:
    m.balance = nnx.Intermediate(balance)
  return jnp.einsum("btec,becd->btd", dispatch * gates[..., None], inside)


EXPERT = module(
  _routed,
  {
    "router": (NORMAL, (16, EXPERTS)),
    "up": (NORMAL, (EXPERTS, 16, 32)),
    "down": (NORMAL, (EXPERTS, 32, 16)),
  },
)


class Switch(nn.Module):
  """Sequence model of experts, stacked by `nn.scan`."""

  @nn.compact
  def __call__(self, ids):
    def layer(expert, x, _):
      return x + expert(nn.standardize(x)), None

    x = nn.Embed(17, 16)(ids)
    axes = {"params": 0, "losses": 0}
    stack = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=2)
    x, _ = stack(EXPERT.linen(None), x, None)
    return nn.Dense(17)(x)


class Bert(nn.Module):
  """Two layers that normalise after adding, a padding mask, and a tied head for masked tokens."""

  vocabulary: int = 17
  width: int = 16

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
