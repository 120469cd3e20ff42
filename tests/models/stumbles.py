"""Code whose numbers are spoilt where a module's arguments and results are rounded: pure functions.

Each is what a user writes inside of a module. Ranks are spelt out; nothing here knows of a policy.
"""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place: the relative error of one rounding."""

ALMOST_ONE = np.float32(1 + 2**-12)
"""1 in both half types."""


# Positions, times, coordinates.


def angles(positions: Any, width: int) -> Any:
  """Returns the angles of rotary embeddings, up to the positions themselves."""
  return positions[:, None] * 10000.0 ** (-jnp.arange(width // 2) / (width // 2))[None]


def rope(q: Any, angle: Any) -> Any:
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  a, b = jnp.split(q, 2, -1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def sinusoid(t: Any, width: int = 32) -> Any:
  """Returns the sines and cosines of timesteps, float or integer."""
  rates = jnp.exp(-np.log(10000.0) * jnp.arange(width // 2) / (width // 2))
  angle = t[:, None] * rates[None]
  return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)


def rays(origins: Any, directions: Any, t: Any) -> Any:
  return origins + directions * t[:, None]


def encode(points: Any, octaves: int = 8) -> Any:
  """Returns the positional encoding of a coordinate network, the coordinates themselves first."""
  waves = [g(points * 2.0**k) for k in range(octaves) for g in (jnp.sin, jnp.cos)]
  return jnp.concatenate([points, *waves], -1)


# Softmax.


def softmax(x: Any) -> Any:
  e = jnp.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


# Kernels that take nothing but half.


def half_attention(q: Any, k: Any, v: Any) -> Any:
  """Attention that refuses float32, as cuDNN's does: (batch, length, heads, features) each."""
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
