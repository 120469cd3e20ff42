"""Programs of plain JAX, in float32, as people write them who use no library of layers.

Each is `(params, batch) -> (loss, outputs)`. None of them names a dtype or knows of mpjax.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.models.values import integers, normal


def dense(rows: int, columns: int, seed: int = 0, *stack: int) -> Any:
  """Returns a matrix (or a stack of them) about as long as it finds its input."""
  return normal(*stack, rows, columns, seed=seed) / np.sqrt(rows, dtype=np.float32)


def cross_entropy(logits: Any, labels: Any) -> Any:
  logp = logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
  return -jnp.take_along_axis(logp, labels[..., None], axis=-1).mean()


# Attention in blocks of keys, with a backward pass of its own: memory linear in the length.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def blockwise_attention(q, k, v, block):
  return _attend_forward(q, k, v, block)[0]


def _attend_forward(q, k, v, block):
  scale = q.shape[-1] ** -0.5

  def step(carry, now):
    out, largest, total = carry
    k, v = now
    scores = jnp.einsum("bqd,bkd->bqk", q, k) * scale
    higher = jnp.maximum(largest, scores.max(-1, keepdims=True))
    weights, shrink = jnp.exp(scores - higher), jnp.exp(largest - higher)
    total = total * shrink + weights.sum(-1, keepdims=True)
    return (out * shrink + jnp.einsum("bqk,bkd->bqd", weights, v), higher, total), None

  rows = (*q.shape[:-1], 1)
  start = (jnp.zeros(q.shape), jnp.full(rows, -jnp.inf), jnp.zeros(rows))
  (out, largest, total), _ = jax.lax.scan(step, start, _blocks(block, k, v))
  out = out / total
  return out, (q, k, v, out, largest + jnp.log(total))


def _blocks(block, *keys):
  def split(x):
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, x.shape[-1]), 1, 0)

  return tuple(split(x) for x in keys)


def _attend_backward(block, kept, out_bar):
  q, k, v, out, log_total = kept
  scale = q.shape[-1] ** -0.5
  inner = jnp.sum(out * out_bar, axis=-1, keepdims=True)

  def step(q_bar, now):
    k, v = now
    weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) * scale - log_total)
    scores_bar = weights * (jnp.einsum("bqd,bkd->bqk", out_bar, v) - inner) * scale
    q_bar = q_bar + jnp.einsum("bqk,bkd->bqd", scores_bar, k)
    k_bar = jnp.einsum("bqk,bqd->bkd", scores_bar, q)
    return q_bar, (k_bar, jnp.einsum("bqk,bqd->bkd", weights, out_bar))

  q_bar, bars = jax.lax.scan(step, jnp.zeros_like(q), _blocks(block, k, v))
  k_bar, v_bar = (jnp.moveaxis(x, 0, 1).reshape(k.shape) for x in bars)
  return q_bar, k_bar, v_bar


blockwise_attention.defvjp(_attend_forward, _attend_backward)


def attend_blockwise(params, batch):
  q, k, v = (batch["x"] @ params[name] for name in ("query", "key", "value"))
  out = blockwise_attention(q, k, v, 4) @ params["out"]
  return jnp.mean((out - batch["y"]) ** 2), out


def attention_values() -> Any:
  params = {name: dense(8, 8, i) for i, name in enumerate(("query", "key", "value", "out"))}
  return params, {"x": normal(2, 12, 8, seed=9), "y": normal(2, 12, 8, seed=10)}


# A decoder: layers stacked under `scan` and `checkpoint`, one table at both ends.


def rms_norm(x, scale):
  return scale * x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@functools.partial(jax.checkpoint, prevent_cse=False)
def decoder_layer(x, layer):
  heads, length = 2, x.shape[1]
  h = rms_norm(x, layer["norm_1"])
  q, k, v = jnp.split(h @ layer["qkv"], 3, axis=-1)
  q, k, v = (t.reshape(*t.shape[:2], heads, -1) for t in (q, k, v))
  scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
  seen = np.tril(np.ones((length, length), bool))
  weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min))
  x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]
  h = rms_norm(x, layer["norm_2"])
  return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"], None


def decoder(params, batch):
  x = jnp.take(params["table"], batch["ids"], axis=0) + params["positions"]
  x, _ = jax.lax.scan(decoder_layer, x, params["layers"])
  logits = rms_norm(x, params["norm"]) @ params["table"].T
  return cross_entropy(logits[:, :-1], batch["ids"][:, 1:]), logits


def decoder_values() -> Any:
  layers = {
    "norm_1": np.ones((3, 16), np.float32),
    "norm_2": np.ones((3, 16), np.float32),
    "qkv": dense(16, 48, 1, 3),
    "out": dense(16, 16, 2, 3),
    "gate": dense(16, 32, 3, 3),
    "up": dense(16, 32, 4, 3),
    "down": dense(32, 16, 5, 3),
  }
  params = {
    "table": normal(17, 16),
    "positions": normal(8, 16, seed=7) / 4,
    "layers": layers,
    "norm": np.ones(16, np.float32),
  }
  return params, {"ids": integers(3, 8, below=17)}


# Experts: tokens are sorted by theirs.


def experts_by_group(params, batch):
  """Tokens sorted by expert, one grouped product for all."""
  x = batch["x"]
  gates = jax.nn.softmax(x @ params["router"])
  chosen = jnp.argmax(gates, axis=-1)
  order = jnp.argsort(chosen)
  sizes = jnp.bincount(chosen, length=3).astype(jnp.int32)
  h = jax.nn.gelu(jax.lax.ragged_dot(x[order], params["up"], sizes))
  h = jax.lax.ragged_dot(h, params["down"], sizes)
  picked = jnp.take_along_axis(gates, chosen[:, None], axis=-1)
  out = x + jnp.zeros_like(x).at[order].add(h) * picked
  balance = 3 * jnp.mean(gates.mean(0) * (sizes / x.shape[0]))
  return jnp.mean((out - batch["y"]) ** 2) + 0.01 * balance, out


def experts_values() -> Any:
  params = {"router": dense(8, 3, 3), "up": dense(8, 16, 0, 3), "down": dense(16, 8, 1, 3)}
  return params, {"x": normal(9, 8, seed=5), "y": normal(9, 8, seed=6)}
