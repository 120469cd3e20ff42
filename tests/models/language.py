"""Language models as research code writes them: raw parameters, own attention, tied heads."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

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


class Expert(nn.Module):
  """A feed-forward layer of experts: top-1 routing, dispatch by einsum, a balancing loss sown.

  Its activation is smooth: the slope of a relu depends on the last bit of what is nearly 0.
  """

  experts: int = 4
  capacity: int = 3

  @nn.compact
  def __call__(self, x):
    width = x.shape[-1]
    router = self.param("router", NORMAL, (width, self.experts))
    up = self.param("up", NORMAL, (self.experts, width, 32))
    down = self.param("down", NORMAL, (self.experts, 32, width))
    gates = jax.nn.softmax(x @ router)
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), self.experts)
    place = (jnp.cumsum(chosen, axis=1) * chosen).sum(-1).astype(int) - 1
    dispatch = chosen[..., None] * jax.nn.one_hot(place, self.capacity)[:, :, None]
    dispatch = dispatch.astype(x.dtype)
    inside = jnp.einsum("btec,btd->becd", dispatch, x)
    inside = jnp.einsum("becf,efd->becd", nn.gelu(jnp.einsum("becd,edf->becf", inside, up)), down)
    combine = dispatch * gates[..., None]
    self.sow("losses", "balance", self.experts * jnp.mean(gates.mean(1) * chosen.mean(1)))
    return jnp.einsum("btec,becd->btd", combine, inside)


class Switch(nn.Module):
  """Sequence model of experts, stacked by `nn.scan`."""

  @nn.compact
  def __call__(self, ids):
    def layer(expert, x, _):
      return x + expert(nn.standardize(x)), None

    x = nn.Embed(17, 16)(ids)
    axes = {"params": 0, "losses": 0}
    stack = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=2)
    x, _ = stack(Expert(), x, None)
    return nn.Dense(17)(x)
