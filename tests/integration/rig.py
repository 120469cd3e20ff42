"""A small model with everything that a skipped step could leave a trace in."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

OPTIMIZERS = {
  "sgd momentum": lambda: optax.sgd(0.05, momentum=0.9),
  "adam": lambda: optax.adam(1e-2),
  "adamw schedule clip": lambda: optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.cosine_decay_schedule(1e-2, 50), weight_decay=0.1),
  ),
  "lamb": lambda: optax.lamb(1e-2, weight_decay=0.01),
  "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
  "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.05)),
}


class Model(nn.Module):
  """16 features and a token in, 8 out; half where `dtype` says so."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x, token, train=True):
    x = jnp.concatenate([x.astype(self.dtype), nn.Embed(5, 4, dtype=self.dtype)(token)], -1)
    x = nn.Dense(32, dtype=self.dtype)(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.75, dtype=self.dtype)(x)
    x = nn.Dropout(0.25, deterministic=not train)(nn.relu(x))
    return nn.Dense(8, dtype=self.dtype)(x)


@functools.cache
def batches(n):
  """`n` batches of sixteenths, whose float32 sums are exact.

  The dropout key belongs to the batch, not to the step.
  """
  draw, pick = jax.random.split(jax.random.key(0))
  x = jax.random.randint(draw, (n, 8, 24), -16, 17).astype(jnp.float32) / 16
  token = jax.random.randint(pick, (n, 8), 0, 5)
  keys = jax.random.split(jax.random.key(1), n)
  return x[..., :16], token, x[..., 16:], keys


@functools.cache
def variables():
  x, token, _, _ = jax.tree.map(lambda b: b[0], batches(1))
  init = jax.jit(Model().init, static_argnames="train")
  return init(jax.random.key(2), x, token, train=False)


def loss_fn(params, stats, batch, dtype):
  """Returns the loss in float32, and the new batch statistics."""
  x, token, y, key = batch
  out, new = Model(dtype).apply(
    {"params": params, "batch_stats": stats},
    x,
    token,
    mutable=["batch_stats"],
    rngs={"dropout": key},
  )
  return jnp.mean((out.astype(jnp.float32) - y) ** 2), new["batch_stats"]


def average(ema, params):
  """A moving average of parameters, in numbers that add exactly under any compilation."""
  return jax.tree.map(lambda e, p: (e + p) * 0.5, ema, params)
