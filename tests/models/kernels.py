"""Attention by kernels that take nothing but low precision, as cuDNN's does."""

import types
from typing import Any

import jax
import jax.numpy as jnp

from tests.models.parts import Part, dense, module


def half_attention(q: Any, k: Any, v: Any) -> Any:
  """Attention that refuses float32: (batch, length, heads, features) each."""
  for x in (q, k, v):
    if x.dtype not in (jnp.bfloat16, jnp.float16):
      raise NotImplementedError(f"Q, K and V must be fp16/bf16, got {x.dtype}")
  return any_attention(q, k, v)


def any_attention(q: Any, k: Any, v: Any) -> Any:
  weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
  return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def cudnn_attention(q: Any, k: Any, v: Any) -> Any:
  return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def pretend_cudnn(monkeypatch: Any) -> None:
  """Lets JAX believe that cuDNN is installed: it asks for its version before it traces a call."""
  attention = jax.nn.dot_product_attention.__globals__["cudnn_dot_product_attention"]
  found = types.SimpleNamespace(cudnn_get_version=lambda: 91000)
  monkeypatch.setitem(attention.__globals__, "cuda_versions", found)


def attention_block(kernel: Any, hand: Any = None) -> Part:
  """Attention by a kernel, and a layer after it; `hand` is the `dtype` of all layers."""

  def attend(m, x):
    q, k, v = (layer(x).reshape(*x.shape[:2], 2, 8) for layer in (m.q, m.k, m.v))
    return m.out(kernel(q, k, v).reshape(x.shape))

  layers = {name: dense(16, 16, hand) for name in ("q", "k", "v", "out")}
  return module(
    lambda m, x: m.last(x + m.attention(x)),
    attention=module(attend, **layers),
    last=dense(16, 4, hand),
  )
