"""What a training step holds in memory and what is kept for its backward pass, as XLA counts it.

Arguments, results and temporaries are counted apart; a donated argument whose memory a result takes
over is counted as aliased. Compared with the same step in plain optax, written by hand.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.scripts import benchmark

LAYERS, WIDTH, ROWS = 4, 256, 8
TREE = LAYERS * WIDTH * WIDTH * 4
"""The bytes of one float32 tree like the parameters."""

SLACK = 0.01 * TREE
"""For activations, and for buffers that XLA rounds up to 64 bytes."""

CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
BATCH = np.ones((ROWS, WIDTH), np.float32)


def nbytes(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def parameters(dtype):
  return [jnp.ones((WIDTH, WIDTH), dtype) for _ in range(LAYERS)]


def loss_of(params, x, dtype):
  for w in params:
    x = jnp.tanh(x.astype(dtype) @ w.astype(dtype))
  return jnp.mean(x.astype(jnp.float32) ** 2)


def ours(inner, stored, dtype, *, config=None, check=False, **options):
  """Returns the memory of our step, its state and its metrics (as shapes)."""

  def loss_fn(params, model_state, batch, rng):
    del rng
    return loss_of(params, batch, dtype), (model_state, {})

  tx = mpjax.loss_scaling(inner, config or mpjax.DynamicLossScale(), check_updates=check)
  step = mpjax.make_train_step(loss_fn, tx, **options)
  state = mpjax.TrainState.create(parameters(stored), tx)
  lowered = step.lower(state, BATCH)
  return lowered.compile().memory_analysis(), state, lowered.out_info[1]


@functools.cache
def plain(inner, dtype, micro_batches):
  """Returns the temporaries of the same step in plain optax, with float32 parameters."""

  def step(params, opt_state, batch):
    if micro_batches == 1:
      loss, grads = jax.value_and_grad(loss_of)(params, batch, dtype)
    else:

      def body(total, part):
        loss, grads = jax.value_and_grad(loss_of)(params, part, dtype)
        return jax.tree.map(jnp.add, total, grads), loss

      parts = batch.reshape(micro_batches, -1, WIDTH)
      total, loss = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
      grads = jax.tree.map(lambda g: g / micro_batches, total)
    updates, opt_state = inner.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = parameters(jnp.float32)
  lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, inner.init(params), BATCH)
  return lowered.compile().memory_analysis().temp_size_in_bytes


def check_held(found, state, metrics):
  """Nothing is there twice: state, batch, metrics, and a pointer of 8 bytes to each result."""
  held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
  pointers = 8 * (len(jax.tree.leaves(state)) + len(metrics))
  assert held == nbytes(state) + BATCH.nbytes + nbytes(metrics) + pointers


ADAMW = optax.adamw(1e-3)
CASES = {
  "float16, micro-batches": (ADAMW, jnp.float16, {"micro_batches": 4}),
  "float16, retries": (ADAMW, jnp.float16, {"max_retries": 2}),
  "float32, clipped": (CLIPPED, jnp.float32, {}),
  "float32, a scale below one": (
    *(ADAMW, jnp.float32),
    {"config": mpjax.DynamicLossScale(min_scale=0.5)},
  ),
}


@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn .* float16")
@pytest.mark.parametrize("name", CASES)
def test_a_step_holds_its_state_and_one_more_gradient(name):
  inner, dtype, options = CASES[name]
  found, state, metrics = ours(inner, jnp.float32, dtype, **options)
  check_held(found, state, metrics)
  limit = plain(inner, dtype, options.get("micro_batches", 1)) + TREE + SLACK
  assert found.temp_size_in_bytes <= limit


@pytest.mark.slow
def test_check_updates_takes_three_bytes_for_each_number_of_one_layer():
  # One for the update, and one for each moment. The arrays are looked at layer by layer before the
  # decision, and computed again to be applied.
  found, without = (
    ours(CLIPPED, jnp.float32, jnp.float16, check=check)[0].temp_size_in_bytes
    for check in (True, False)
  )
  assert found <= without + 3 * WIDTH * WIDTH + SLACK


@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn .* float16")
@pytest.mark.parametrize(("storage", "of_master"), [("float32", 4), ("split", 2)])
def test_master_weights_hold_the_master_and_the_half_parameters(storage, of_master):
  # 2 bytes for each parameter, some for its master, 4 for each moment, and single numbers.
  stored = jnp.bfloat16
  inner = mpjax.master_weights(ADAMW, storage=storage)
  found, state, metrics = ours(inner, stored, stored)
  check_held(found, state, metrics)
  scalars = [x for x in jax.tree.leaves(state) if x.ndim == 0]
  assert nbytes(state) == (2 + of_master + 4 + 4) * TREE // 4 + nbytes(scalars)
  assert nbytes(scalars) < 64
  if storage == "float32":
    assert found.temp_size_in_bytes <= plain(ADAMW, stored, 1) + TREE + SLACK


MODELS = ("ResNet", "GPT, scan and remat", "BERT", "LSTM")
BOUND = 1.1
GATED = 1.25
"""The bound of an LSTM, whose gates are held in float32 for the sum that its state is."""

# Programs promote ranks as people write them.
pytestmark = pytest.mark.standard_promotion


memory = benchmark("autocast_memory", name="memory")


@pytest.mark.slow
def test_autocast_keeps_no_more_than_dtypes_by_hand(memory):
  found = memory.compare_models("tiny", "bfloat16")
  assert tuple(found) == MODELS
  for name, kept in found.items():
    hand, cast, plain = kept["by hand"], kept["autocast"], kept["float32"]
    # Else float32 would be within the bound, and nothing be shown.
    assert plain.own > BOUND * hand.own, name
    bound = GATED if name == "LSTM" else BOUND
    assert cast.own <= bound * hand.own, name
    assert cast.all <= bound * hand.all, name
