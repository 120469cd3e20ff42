"""Language models as research code writes them: raw parameters, own attention, tied heads; BERT."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.models.parts import module

NORMAL = nn.initializers.normal(0.2)


class Norm(nn.Module):
  """Root-mean-square normalisation, written by the model's author."""

  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


class CausalAttention(nn.Module):
  """Fused projection in one raw parameter, a -1e9 mask, a cache in a collection of its own name."""

  heads: int = 2

  @nn.compact
  def __call__(self, x, index=None, length=8):
    width = x.shape[-1]
    qkv = self.param("qkv", NORMAL, (width, 3, self.heads, width // self.heads))
    out = self.param("out", NORMAL, (self.heads, width // self.heads, width))
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dnhk->btnhk", x, qkv), 2, 0)
    if index is None:
      seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    else:
      shape = (x.shape[0], length, *k.shape[2:])
      keys = self.variable("cache", "keys", jnp.zeros, shape)
      values = self.variable("cache", "values", jnp.zeros, shape)
      k = keys.value = keys.value.at[:, index].set(k[:, 0])
      v = values.value = values.value.at[:, index].set(v[:, 0])
      seen = (jnp.arange(length) <= index)[None]
    scores = jnp.einsum("bqhk,bshk->bhqs", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return jnp.einsum("bhqs,bshk,hkd->bqd", weights, v, out)


class Gpt(nn.Module):
  """Decoder with learned positions; the head reads the table of the embedding."""

  vocabulary: int = 17
  width: int = 16
  layers: int = 2

  @nn.compact
  def __call__(self, ids, index=None):
    positions = self.param("positions", NORMAL, (8, self.width))
    x = nn.Embed(self.vocabulary, self.width, embedding_init=NORMAL, name="wte")(ids)
    x = x + (positions[: ids.shape[1]] if index is None else positions[index])
    for i in range(self.layers):
      x = x + CausalAttention(name=f"attention_{i}")(Norm()(x), index)
      x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(32)(Norm()(x))))
    table = self.variables["params"]["wte"]["embedding"]
    return jnp.matmul(Norm()(x), table.T)


class TextModel:
  """What hides the module: keys and parameters inside, a call and a loop outside."""

  def __init__(self) -> None:
    self.module = Gpt()

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
