"""A skipped step of `make_train_step` is a deleted one: whatever it was that was not finite.

Each run is compared with a second one, fed only the good batches at the recorded scales. A key that
a skipped step had used up, a statistic that it had moved, a count or an average would make all the
later steps differ. Both are the same compiled program, so that bits can be compared in all dtypes.
"""

import functools
import pathlib
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.loss_scale_oracle import Oracle

ROOT = pathlib.Path(__file__).parents[2]
ROWS, STEPS = 4, 40
CONFIG = {"init_scale": 2.0**10, "growth_interval": 3, "max_scale": 2.0**14, "hysteresis": 2}
PARTS = ["gradients", "loss", "statistics"]
"""Where a fault strikes. Each leaves the two others finite."""


@jax.custom_vjp
def poisoned(x, fault):
  """Returns `x`, of whose gradient the last element will have `fault` added to it."""
  del fault
  return x


def _poison(fault, ct):
  return ct.at[(-1,) * ct.ndim].add(fault.astype(ct.dtype)), jnp.zeros_like(fault)


poisoned.defvjp(lambda x, fault: (x, fault), _poison)


def loss_fn(dtype, params, stats, batch, rng):
  """Two layers with a norm over the batch, and dropout, on sixteenths."""
  faults = {part: jnp.sum(batch[part]) for part in PARTS}
  w = {key: poisoned(p, faults["gradients"]).astype(dtype) for key, p in params.items()}
  hidden = (batch["x"].astype(dtype) @ w["in"]).astype(jnp.float32)
  mean = jnp.mean(hidden, 0, keepdims=True)
  stats = {
    "mean": stats["mean"] * 0.75 + mean * 0.25 + faults["statistics"],
    "batches": stats["batches"] + 1,
  }
  kept = jax.random.bernoulli(rng, 0.75, hidden.shape)
  hidden = jnp.where(kept, jax.nn.relu(hidden - mean), 0).astype(dtype)
  error = (hidden @ w["out"]).astype(jnp.float32) - batch["y"]
  loss = jnp.mean(error**2) + faults["loss"]
  return loss, (stats, {"worst": jnp.max(jnp.abs(error)), "kept": jnp.sum(kept)})


def batches(seed):
  """Returns `STEPS` batches; about every third has a fault, in one row of one part."""
  rng = np.random.default_rng(seed)
  found = []
  for _ in range(STEPS):
    batch = {
      "x": rng.integers(-16, 17, (ROWS, 6)).astype(np.float32) / 16,
      "y": rng.integers(-16, 17, (ROWS, 3)).astype(np.float32) / 16,
      **{part: np.zeros(ROWS, np.float32) for part in PARTS},
    }
    if rng.random() < 0.35:
      batch[rng.choice(PARTS)][rng.integers(ROWS)] = rng.choice([np.nan, np.inf, -np.inf])
    found.append(batch)
  return found


class Variant(NamedTuple):
  compute: Any
  store: Any = jnp.float32
  options: Mapping[str, Any] = types.MappingProxyType({})
  ema: bool = True
  config: Mapping[str, Any] = types.MappingProxyType(CONFIG)


VARIANTS = {
  "float32": Variant(jnp.float32),
  "bfloat16, not donated, no average": Variant(jnp.bfloat16, options={"donate": False}, ema=False),
  "float16, micro-batches": Variant(jnp.float16, options={"accumulate": 2}),
  "float16 stored, with masters": Variant(jnp.float16, jnp.float16),
  "bfloat16 stored, scale below 1": Variant(
    jnp.bfloat16, jnp.bfloat16, config={**CONFIG, "init_scale": 2.0, "min_scale": 0.5}
  ),
}


@functools.cache
def program(name):
  """Returns a function that makes a state, and the step."""
  variant = VARIANTS[name]
  inner = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.cosine_decay_schedule(2e-2, STEPS), weight_decay=0.1),
  )
  if variant.store != jnp.float32:
    inner = mpjax.master_weights(inner)
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**variant.config))
  draw = np.random.default_rng(7)
  shapes = {"in": (6, 8), "out": (8, 3)}
  params = {k: draw.integers(-16, 17, s).astype(np.float32) / 32 for k, s in shapes.items()}

  def create():
    return mpjax.TrainState.create(
      jax.tree.map(lambda p: jnp.asarray(p, variant.store), params),
      tx,
      model_state={"mean": jnp.zeros((1, 8)), "batches": jnp.asarray(0, jnp.int32)},
      rng=jax.random.key(3),
      ema=variant.ema,
    )

  decay = {"ema_decay": 0.9} if variant.ema else {}
  step = mpjax.make_train_step(
    functools.partial(loss_fn, variant.compute), tx, **variant.options, **decay
  )
  return create, step


def contents(state):
  """The bytes of all that a skipped step must leave alone, by path."""
  kept = state._replace(opt_state=state.opt_state.inner_state, rng=jax.random.key_data(state.rng))
  leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(kept))
  return {jax.tree_util.keystr(path): (x.dtype, x.shape, x.tobytes()) for path, x in leaves}


@pytest.mark.case("I1", "A44", "A67", "I16", "B009", "B010", "B111", "B112", "B116", "B144", "A39")
@pytest.mark.case("B007")
@pytest.mark.filterwarnings("ignore:.*nothing in loss_fn .* float16")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_skipped_step_is_a_deleted_step(name):
  """A fault in any one part skips everything; what is not finite is reported as it was computed."""
  create, step = program(name)
  accumulate = VARIANTS[name].options.get("accumulate", 1)
  state, oracle = create(), Oracle(**VARIANTS[name].config)
  applied, struck = [], set()
  for batch in batches(list(VARIANTS).index(name)):
    before = contents(state)
    scale = float(mpjax.loss_scaling_metrics(state)["loss_scale"])
    state, metrics = jax.block_until_ready(step(state, batch))
    bad = {part for part in PARTS if not np.all(np.isfinite(batch[part]))}
    assert metrics["finite"] == (not bad), "nothing overflows by itself"
    assert np.isfinite(metrics["loss"]) == ("loss" not in bad)
    assert np.isfinite(metrics["grad_norm"]) == ("gradients" not in bad)
    struck |= bad
    if bad:
      assert contents(state) == before
    else:
      applied.append((batch, scale, metrics))
    numbers = oracle.step(not bad).numbers()
    assert metrics["loss_scale"] == numbers.pop("scale")
    numbers.pop("hysteresis")
    assert {key: metrics[key] for key in numbers} == numbers
  assert STEPS / 5 < len(applied) < STEPS - 5
  assert struck == set(PARTS)
  assert state.step == len(applied)
  assert state.model_state["batches"] == len(applied) * accumulate

  control = create()
  for batch, scale, metrics in applied:
    opt_state = mpjax.set_loss_scale(control.opt_state, scale)
    control, found = jax.block_until_ready(step(control._replace(opt_state=opt_state), batch))
    for key in ("loss", "grad_norm", "worst", "kept"):
      assert found[key] == metrics[key]
  assert contents(control) == contents(state)
  if VARIANTS[name].store != jnp.float32:
    masters = mpjax.master_params(state.opt_state)
    for key, p in state.params.items():
      assert masters[key].dtype == jnp.float32
      np.testing.assert_array_equal(p, masters[key].astype(p.dtype))
  assert mpjax.all_finite(state)


@pytest.mark.case("B144")
def test_examples_guard_their_batch_statistics():
  """Each that has some commits them by the flag, or leaves that to the step."""
  sources = {file.name: file.read_text() for file in (ROOT / "examples").glob("*.py")}
  having = {name: text for name, text in sources.items() if 'mutable=["batch_stats"]' in text}
  assert having
  for name, text in having.items():
    assert "mpjax.select_tree(finite" in text or "mpjax.make_train_step(" in text, name
