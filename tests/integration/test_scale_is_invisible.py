"""A scale that is a power of two moves exponents only: nobody can tell it from scale 1."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.integration.rig import OPTIMIZERS, batches, loss_fn, variables

CONFIG = mpjax.DynamicLossScale(init_scale=1, max_scale=2.0**40, growth_interval=2**30)
STEPS = 4


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
  ("name", "dtype"), [("adamw schedule clip", jnp.float32), ("lamb", jnp.bfloat16)]
)
def test_every_power_of_two_from_0_to_24(name, dtype):
  tx = mpjax.loss_scaling(OPTIMIZERS[name](), CONFIG)
  first, *others = train(tx, dtype, range(25))
  assert first[-1] == 0
  assert [differing(other, first) for other in others] == [0] * 24


@pytest.mark.case("I2", "B015", "B016")
def test_float16_inside_and_outside_the_safe_band():
  """Below the band gradients round among the subnormals; above it they overflow."""
  tx = mpjax.loss_scaling(OPTIMIZERS["sgd momentum"](), CONFIG)
  band = train(tx, jnp.float16, [9, 10, 11])
  low, high = train(tx, jnp.float16, [0, 28])
  near = [differing(other, band[1]) for other in (band[0], band[2])]
  assert differing(low, band[1]) > 10 * max(*near, 1)
  assert low[-1] == 0
  assert high[-1] == STEPS, "every step overflowed, and was skipped"
  assert [run[-1] for run in band] == [0, 0, 0]


def test_the_last_steps_in_float32_go_on_from_the_same_state():
  """A precision schedule: two steps on one state, whose scale then changes no bit."""
  params = {"w": jnp.linspace(-1.0, 1.0, 24).reshape(6, 4)}
  tx = mpjax.loss_scaling(optax.adamw(1e-2), mpjax.DynamicLossScale(growth_interval=2))

  def squares(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

  def step_with(loss_fn):
    def step(state, x):
      params, opt_state = state
      loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, x)
      updates, opt_state = tx.update(grads, opt_state, params)
      return (optax.apply_updates(params, updates), opt_state), loss

    return jax.jit(step)

  low, full = step_with(mpjax.with_policy(squares, "mixed_float16")), step_with(squares)
  data = jax.random.normal(jax.random.key(0), (12, 8, 6))
  state = params, tx.init(params)
  for x in data[:6]:
    state, _ = low(state, x)
  assert mpjax.loss_scaling_metrics(state[1])["loss_scale"] == 2.0**18

  other = state[0], mpjax.set_loss_scale(state[1], 1)
  for x in data[6:]:
    state, _ = full(state, x)
    other, _ = full(other, x)
  assert differing((state[0], state[1].inner_state), (other[0], other[1].inner_state)) == 0
