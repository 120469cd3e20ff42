"""Attention, state spaces, adapters, codes and routers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hard.program import (
  PLAIN,
  Program,
  Style,
  cross_entropy,
  mean_squared_error,
  normal,
  squared_distances,
)

HEADS = 4


def heads(style: Style, x: Any, width: int = 32) -> Any:
  """Return query, key and value by head."""
  qkv = style.layer(3 * width, use_bias=False)(x)
  return (t.reshape(*t.shape[:2], HEADS, -1) for t in jnp.split(qkv, 3, axis=-1))


class RopeAttention(nn.Module):
  """Causal attention with rotary positions that begin at 1000."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    x, style = inputs["x"], self.style
    q, k, v = heads(style, x)
    angles = (1000 + jnp.arange(x.shape[1]))[:, None] * 100.0 ** (-jnp.arange(4) / 4.0)
    sines, cosines = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]

    def rotated(t: Any) -> Any:
      left, right = jnp.split(style.wide(t), 2, axis=-1)
      return jnp.concatenate(
        [left * cosines - right * sines, left * sines + right * cosines], axis=-1
      )

    scores = style.einsum_wide("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / np.sqrt(8)
    seen = np.tril(np.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    mixed = style.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    return style.layer(16, wide=True)(x + style.layer(32)(mixed))


class LinearAttention(nn.Module):
  """Causal attention by running sums of keys times values, over a running normaliser."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    x, style = inputs["x"], self.style
    q, k, v = heads(style, x)
    q, k = (nn.elu(style.wide(t)) + 1.0 for t in (q, k))
    states = jnp.cumsum(k[..., :, None] * style.wide(v)[..., None, :], axis=1)
    total = style.einsum_wide("bthd,bthde->bthe", q, states)
    normaliser = jnp.sum(q * jnp.cumsum(k, axis=1), axis=-1, keepdims=True)
    mixed = (total / (normaliser + 1e-6)).reshape(x.shape)
    return style.layer(16, wide=True)(x + style.layer(32)(mixed))


class SelectiveScan(nn.Module):
  """A gated state space whose step sizes depend on the input. By hand the state is float32."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    x, style = inputs["x"], self.style
    width, size = x.shape[-1], 8
    u, gate = jnp.split(style.layer(2 * width)(x), 2, axis=-1)
    u = style.wide(nn.silu(u))
    step = nn.softplus(style.layer(width, wide=True)(u) - 2.0)
    enter, leave = jnp.split(style.layer(2 * size, wide=True)(u), 2, axis=-1)
    rates = self.param(
      "rates", lambda key, shape: jnp.broadcast_to(jnp.log(jnp.arange(1.0, size + 1)), shape),
      (width, size),
    )  # fmt: skip
    decay = jnp.exp(-step[..., None] * jnp.exp(rates))
    moved = (step * u)[..., None] * enter[..., None, :]

    def advance(state: Any, given: Any) -> Any:
      kept, new, read = given
      state = kept * state + new
      return state, jnp.sum(state * read[:, None], axis=-1)

    by_time = jax.tree.map(lambda t: jnp.moveaxis(t, 1, 0), (decay, moved, leave))
    _, y = jax.lax.scan(advance, jnp.zeros((x.shape[0], width, size)), by_time)
    skip = self.param("skip", nn.initializers.ones, (width,))
    y = (jnp.moveaxis(y, 0, 1) + u * skip) * nn.silu(style.wide(gate))
    return style.layer(16, wide=True)(y)


class Lora(nn.Module):
  """Small low-rank updates of frozen layers; only the factors have a gradient."""

  style: Style = PLAIN
  rank: int = 4

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    h = inputs["x"]
    for i, width in enumerate((64, 64, 10)):
      shape = (h.shape[-1], width)
      frozen = self.param(f"frozen_{i}", nn.initializers.lecun_normal(), shape)
      down = self.param(f"down_{i}", nn.initializers.lecun_normal(), (shape[0], self.rank))
      up = self.param(f"up_{i}", nn.initializers.normal(1e-2), (self.rank, width))
      dot = self.style.dot if width > 10 else self.style.dot_wide
      update = dot(self.style.dot(h, down), up) * 0.25
      h = dot(h, jax.lax.stop_gradient(frozen)) + update
      h = nn.gelu(h) if width > 10 else h
    return h


class VectorQuantizer(nn.Module):
  """Nearest codes of an encoder's outputs, passed straight through to a decoder."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    z = self.style.wide(self.style.mlp(inputs["x"], 64, 8))
    codes = self.param("codes", nn.initializers.normal(1.0), (32, 8))
    nearest = codes[jnp.argmin(squared_distances(z, codes), axis=-1)]
    code_loss = jnp.mean(jnp.square(jax.lax.stop_gradient(z) - nearest))
    commitment = jnp.mean(jnp.square(z - jax.lax.stop_gradient(nearest)))
    passed = z + jax.lax.stop_gradient(nearest - z)
    return {"y": self.style.mlp(passed, 64, 16), "loss": code_loss + 0.25 * commitment}


class Experts(nn.Module):
  """The two best of eight experts by a router. By hand the router is float32."""

  style: Style = PLAIN

  @nn.compact
  def __call__(self, inputs: Any) -> Any:
    style, count = self.style, 8
    x = style.layer(32)(inputs["x"])
    router = self.param("router", nn.initializers.lecun_normal(), (32, count))
    probabilities = jax.nn.softmax(style.wide(x) @ router)
    best, which = jax.lax.top_k(probabilities, 2)
    best = best / jnp.sum(best, axis=-1, keepdims=True)
    gates = jnp.sum(best[..., None] * jax.nn.one_hot(which, count), axis=1)
    init = nn.initializers.lecun_normal(batch_axis=0)
    up = self.param("up", init, (count, 32, 64))
    down = self.param("down", init, (count, 64, 32))
    h = nn.gelu(style.einsum("nd,edh->neh", x, up))
    h = style.einsum("neh,ehd->ned", h, down)
    y = style.layer(10, wide=True)(x + style.einsum("ned,ne->nd", h, gates))
    used = jnp.mean(jnp.where(gates > 0, 1.0, 0.0), axis=0)
    return {"logits": y, "balance": count * jnp.sum(used * jnp.mean(probabilities, axis=0))}


def _tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
  return {"x": normal(rng, 4, 24, 32), "y": normal(rng, 4, 24, 16)}


def _labelled(rng: np.random.Generator) -> dict[str, np.ndarray]:
  return {"x": normal(rng, 128, 16), "labels": rng.integers(0, 10, 128, np.int32)}


def _quantized(outputs: Any, inputs: Any) -> Any:
  return jnp.mean(jnp.square(outputs["y"] - inputs["x"])) + outputs["loss"]


def _routed(outputs: Any, inputs: Any) -> Any:
  return cross_entropy(outputs["logits"], inputs["labels"]) + 0.01 * outputs["balance"]


PROGRAMS = {
  "attention with RoPE": Program(RopeAttention, _tokens, mean_squared_error),
  "linear attention": Program(LinearAttention, _tokens, mean_squared_error),
  "selective scan": Program(SelectiveScan, _tokens, mean_squared_error),
  "LoRA": Program(Lora, _labelled, lambda out, x: cross_entropy(out, x["labels"])),
  "vector quantisation": Program(
    VectorQuantizer, lambda rng: {"x": normal(rng, 128, 16)}, _quantized
  ),
  "mixture of experts": Program(Experts, _labelled, _routed),
}
