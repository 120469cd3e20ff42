"""A scale that is a power of two moves exponents only: nobody can tell it from scale 1."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

CLIPPED = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.adamw(optax.cosine_decay_schedule(1e-2, 50), weight_decay=0.1),
)
CONFIG = mpjax.DynamicLossScale(init_scale=1, max_scale=2.0**40, growth_interval=2**30)
STEPS = 4


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
  """`n` batches of sixteenths, whose float32 sums are exact."""
  # The dropout key belongs to the batch, not to the step.
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


def train(tx, dtype, exponents):
  """Trains at every scale 2^k side by side; returns updates, gradients and states per scale."""
  init = variables()
  data = batches(STEPS)

  def run(scale):
    params, stats = init["params"], init["batch_stats"]
    state = tx.init(params)
    (label,) = state.loss_scale
    scale = state.loss_scale[label]._replace(scale=scale)
    state = state._replace(loss_scale={label: scale})

    def step(carry, batch):
      params, stats, state = carry
      (loss, stats), grads = mpjax.value_and_grad(loss_fn, state, has_aux=True)(
        params, stats, batch, dtype
      )
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), stats, state), (loss, updates)

    (params, stats, state), seen = jax.lax.scan(step, (params, stats, state), data)
    return params, stats, state.inner_state, seen, mpjax.loss_scaling_metrics(state)["skipped"]

  # One at a time: lanes of a vmap may be vectorised differently.
  compiled = jax.jit(run)
  return [jax.device_get(compiled(jnp.float32(2.0**k))) for k in exponents]


def differing(one, other):
  """Returns how many bytes differ."""
  return sum(
    int(np.sum(np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8)))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


@pytest.mark.case("I2", "A13", "A53")
@pytest.mark.parametrize(
  ("inner", "dtype"),
  [(CLIPPED, jnp.float32), (optax.lamb(1e-2, weight_decay=0.01), jnp.bfloat16)],
  ids=["adamw", "lamb"],
)
def test_every_power_of_two_from_0_to_24(inner, dtype):
  tx = mpjax.loss_scaling(inner, CONFIG)
  first, *others = train(tx, dtype, range(25))
  assert first[-1] == 0
  assert [differing(other, first) for other in others] == [0] * 24


@pytest.mark.case("I2", "B015", "B016")
def test_float16_inside_and_outside_the_safe_band():
  # Below the band gradients round among the subnormals; above it they overflow.
  tx = mpjax.loss_scaling(optax.sgd(0.05, momentum=0.9), CONFIG)
  band = train(tx, jnp.float16, [9, 10, 11])
  low, high = train(tx, jnp.float16, [0, 28])
  near = [differing(other, band[1]) for other in (band[0], band[2])]
  assert differing(low, band[1]) > 10 * max(*near, 1)
  assert low[-1] == 0
  assert high[-1] == STEPS, "every step overflowed, and was skipped"
  assert [run[-1] for run in band] == [0, 0, 0]
