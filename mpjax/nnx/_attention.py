"""Attention where NNX's own will not do: products in half, softmax in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mpjax._tree import cast_leaf
from mpjax._types import Array


def attention(
  query: Array,
  key: Array,
  value: Array,
  *,
  mask: Array | None,
  dropout_rng: Array | None,
  dropout_rate: float,
  broadcast_dropout: bool,
  deterministic: bool,
  dtype: Any,
  precision: Any,
  module: Any,
  is_causal: bool,
) -> Array:
  """Returns what `nnx.dot_product_attention` does, with a softmax that is always in float32.

  NNX leaves attention to `jax.nn`, which takes the softmax in float32, unless there is dropout or
  the weights are sown. Then it takes it in the dtype of the products. And in float16 `jax.nn` (of
  jax 0.10) asks for a kind of product that a CPU does not have.

  Args:
    query: [..., T, N, H]; N is a multiple of K.
    key: [..., S, K, H].
    value: [..., S, K, D].
    mask: [..., N, T, S], or None; False is left out.
    dropout_rng: a key; None without dropout.
    dropout_rate: the share of weights that is dropped.
    broadcast_dropout: drop the same weights for all batches and heads.
    deterministic: drop nothing.
    dtype: the dtype of the products.
    precision: that of the products.
    module: sows the weights, if it is not None.
    is_causal: position t sees none after t.
  """
  if dropout_rate == 0.0 and module is None and jnp.dtype(dtype) != jnp.float16:
    return nnx.dot_product_attention(
      query, key, value, mask=mask, dtype=dtype, precision=precision, is_causal=is_causal
    )
  query, key, value = (cast_leaf(x, dtype) for x in (query, key, value))
  heads = query.shape[-2] // key.shape[-2]
  key, value = (x if heads == 1 else jnp.repeat(x, heads, axis=-2) for x in (key, value))
  query = query / jnp.sqrt(query.shape[-1]).astype(dtype)
  logits = jnp.einsum("...thd,...shd->...hts", query, key, precision=precision)
  logits = logits.astype(jnp.float32)
  seen = nnx.combine_masks(mask, _causal(logits) if is_causal else None, dtype=jnp.bool_)
  if seen is not None:
    logits = jnp.where(seen, logits, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(logits).astype(dtype)
  if module is not None:
    module.sow(nnx.Intermediate, "attention_weights", weights)
  if dropout_rng is not None and not deterministic and dropout_rate > 0.0:
    batches = (1,) * (weights.ndim - 2) if broadcast_dropout else weights.shape[:-2]
    keep = jax.random.bernoulli(dropout_rng, 1.0 - dropout_rate, (*batches, *weights.shape[-2:]))
    weights = weights * (keep.astype(dtype) / jnp.asarray(1.0 - dropout_rate, dtype))
  return jnp.einsum("...hts,...shd->...thd", weights, value, precision=precision)


def _causal(logits: Array) -> Array:
  return jnp.broadcast_to(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits.shape)
