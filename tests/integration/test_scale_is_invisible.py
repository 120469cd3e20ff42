"""A scale that is a power of two moves exponents only: nobody can tell it from scale 1."""

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


PARAMS = {
  name: np.random.default_rng(2).normal(size=shape).astype(np.float32) / 4
  for name, shape in {"w": (16, 32), "scale": (1, 32), "bias": (1, 32), "v": (32, 8)}.items()
}


def batches():
  """Batches of sixteenths, whose float32 sums are exact."""
  # The dropout key belongs to the batch, not to the step.
  xy = np.random.default_rng(0).integers(-16, 17, (STEPS, 8, 24)).astype(np.float32) / 16
  return xy[..., :16], xy[..., 16:], jax.random.split(jax.random.key(1), STEPS)


def loss_fn(params, batch, dtype):
  """Two layers with a batch norm and dropout in between, computed in `dtype`."""
  x, y, key = batch
  hidden = (x.astype(dtype) @ params["w"].astype(dtype)).astype(jnp.float32)
  hidden = jax.nn.standardize(hidden, axis=0) * params["scale"] + params["bias"]
  kept = jax.random.bernoulli(key, 0.75, hidden.shape)
  hidden = jnp.where(kept, jax.nn.relu(hidden), 0).astype(dtype)
  return jnp.mean(((hidden @ params["v"].astype(dtype)).astype(jnp.float32) - y) ** 2)


def train(tx, dtype, exponents):
  """Trains at every scale 2^k; returns parameters, state, losses and updates, skips for each."""

  @jax.jit
  def run(scale):
    def step(carry, batch):
      params, state = carry
      loss, grads = mpjax.value_and_grad(loss_fn, state)(params, batch, dtype)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), (loss, updates)

    start = PARAMS, mpjax.states.set_loss_scale(tx.init(PARAMS), scale)
    (params, state), seen = jax.lax.scan(step, start, batches())
    return params, state.inner_state, seen, mpjax.loss_scaling_metrics(state)["skipped"]

  # One at a time: lanes of a vmap may be vectorised differently.
  return [jax.device_get(run(jnp.float32(2.0**k))) for k in exponents]


def differing(one, other):
  """Returns how many bytes differ."""
  return sum(
    int(np.sum(np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8)))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  )


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
