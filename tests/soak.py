"""Trains for a million steps with faults in one step of a hundred, and checks every invariant.

make campaign                            # after the campaign of faults
python -m tests.soak --updates 20000

A small network with batch statistics and dropout runs under
`mixed_bfloat16`, and again under `mixed_float16`, in blocks of steps that one compiled `lax.scan`
works off with its state donated. Gradients of single leaves, the loss or the inputs become inf or
NaN: in one step of a hundred, in bursts of 50, and in a tenth of the whole run without one good
step. At half time the run goes on from a checkpoint on disk. The exit status is 0 if all checks
hold.
"""

import argparse
import functools
import pathlib
import resource
import sys
import tempfile
import time
import warnings
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import mpjax
from mpjax._core.trees import all_finite
from tests.campaign.network import poison
from tests.loss_scale_oracle import LIMIT, Oracle
from tests.programs import bits

HALF = ("bfloat16", "float16")
UPDATES, BLOCK = 1_000_000, 1000
BATCHES, SEED = 64, 0
# A short interval: the scale goes from floor to ceiling and back between two bursts.
SCALING = {"growth_interval": 50, "hysteresis": 2}
SHARE, BURST, BURST_EVERY = 0.01, 50, 5000
STRETCH = (0.7, 0.8)  # Between these parts of the run, no step is good.
COMPARED = 50  # Blocks for which the run goes on from memory as well as from disk.
WARM_UP = 3  # Blocks, and one checkpoint, before the memory of the process is noted.
MEMORY = 50 * 2**20  # Bytes that the process may grow by after that.
# The mean of the last block: the loss begins at 1.3, and a run without faults ends at 0.12.
LARGEST_LOSS = 0.15
# No gradient overflows up to this scale here: what is skipped had a fault.
SAFE_SCALE = {"bfloat16": 2.0**24, "float16": 2.0**15}


class Network(nn.Module):
  """8 features in, 4 out."""

  @nn.compact
  def __call__(self, x, *, train):
    x = nn.Dense(16)(x)
    x = nn.BatchNorm(use_running_average=not train)(x)
    x = nn.Dropout(0.05, deterministic=not train)(nn.relu(x))
    return nn.Dense(4)(x)


class Faults(NamedTuple):
  """What is wrong with each step."""

  value: Any  # float32[steps]: 0, or inf, -inf or NaN
  place: Any  # int32[steps]: the leaf whose gradient it is added to; then come loss and inputs


class Record(NamedTuple):
  """What each step of a block left."""

  loss_scale: Any  # float32[steps], after the step
  finite: Any  # bool[steps]
  loss: Any  # float32[steps]


class Check(NamedTuple):
  """An invariant, whether it holds, and the figures."""

  name: str
  holds: bool
  found: str


def draw_faults(updates, places):
  """Returns the faults of a run: single ones, bursts, and a long stretch."""
  rng = np.random.default_rng(SEED)
  bad = rng.random(updates) < SHARE
  for start in range(0, updates - BURST, BURST_EVERY):
    begin = start + int(rng.integers(min(BURST_EVERY, updates - start) - BURST))
    bad[begin : begin + BURST] = True
  begin, end = (round(part * updates) for part in STRETCH)
  bad[begin:end] = True
  value = np.where(bad, rng.choice([np.inf, -np.inf, np.nan], updates), 0).astype(np.float32)
  return Faults(value, rng.integers(0, places, updates).astype(np.int32))


def make_loss_fn(model):
  """Returns the loss, with a fault where the batch says so."""

  def loss_fn(params, stats, batch, rng):
    flat, treedef = jax.tree.flatten(params)
    *at_leaves, at_loss, at_inputs = (
      jnp.where(batch["place"] == i, batch["fault"], 0) for i in range(len(flat) + 2)
    )
    params = jax.tree.unflatten(treedef, map(poison, flat, at_leaves))
    variables = {"params": params, "batch_stats": stats}
    x, rngs = batch["x"] + at_inputs, {"dropout": rng}
    out, new = model.apply(variables, x, train=True, mutable=["batch_stats"], rngs=rngs)
    loss = jnp.mean((out - batch["y"]) ** 2) + at_loss
    return loss, (new["batch_stats"], {})

  return loss_fn


def prepare(half, updates, make_step):
  """Returns the first state, and a function that runs a block of steps and donates its state."""
  draw_inputs, draw_map = jax.random.split(jax.random.key(SEED))
  inputs = jax.random.normal(draw_inputs, (BATCHES, 16, 8))
  targets = inputs @ jax.random.normal(draw_map, (8, 4)) / 3
  model = mpjax.linen.with_policy(Network(), f"mixed_{half}")
  variables = model.init(jax.random.key(SEED + 1), inputs[0], train=False)
  schedule = optax.cosine_decay_schedule(1e-2, updates, 0.01)
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
  tx = mpjax.loss_scaling(inner, mpjax.DynamicLossScale(**SCALING))
  rest = {"model_state": variables["batch_stats"], "rng": jax.random.key(SEED + 2)}
  state = mpjax.TrainState.create(variables["params"], tx, **rest)
  step = make_step(make_loss_fn(model), tx, donate=False)

  def one(carry, fault):
    state, number = carry
    row = number % BATCHES
    batch = {"x": inputs[row], "y": targets[row], "fault": fault.value, "place": fault.place}
    state, metrics = step(state, batch)
    record = Record(metrics["loss_scale"], metrics["finite"], metrics["loss"])
    return (state, number + 1), record

  @functools.partial(jax.jit, donate_argnums=0)
  def block(state, faults, first):
    (state, _), record = jax.lax.scan(one, (state, first), faults)
    return state, record

  return state, block


def untouched(state):
  """Returns the bytes of what a skipped step leaves alone: all but the scale and its counters."""
  return bits(state._replace(opt_state=state.opt_state.inner_state))


def numbers(state):
  """Returns the scale and the counters, by the names that the oracle gives them."""
  (scale,) = state.opt_state.loss_scale.values()
  return {key: getattr(scale, key).item() for key in Oracle().numbers()}


def through_disk(state):
  """Returns what a checkpoint of `state` on disk gives back."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "state"
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, state)
    return mpjax.checkpoints.restore_like(state, path)


def peak_memory():
  """Returns the most memory that the process has ever had, in bytes."""
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Outcome(NamedTuple):
  """What a run left behind for the checks."""

  faults: Faults
  record: Record  # of all steps
  ends: list[dict[str, float]]  # the scale and its counters after each block
  state: Any  # at the end
  worn: Any  # the same, after another block that began with all its counts near the largest
  programs: int  # compiled
  resumed: tuple[list[bytes], list[bytes]]  # the state from disk and from memory, some blocks later
  stretch: tuple[list[bytes], list[bytes]]  # before and after the steps of which none is good
  growth: int  # of memory, in bytes


def soak(half, updates=UPDATES, size=BLOCK, make_step=mpjax.make_train_step, advance=None):
  """Runs `updates` steps under a half type, in at least 10 blocks of `size`."""
  # `make_step` makes the step that is tried; `advance` is called after each block.
  state, block = prepare(half, updates, make_step)
  faults = draw_faults(updates, len(jax.tree.leaves(state.params)) + 2)
  blocks = updates // size
  half_time = blocks // 2
  begin, end = (round(part * blocks) for part in STRETCH)
  compared = min(half_time + COMPARED, begin)
  records, ends, around = [], [], []

  def run(state, number):
    part = slice(number * size, (number + 1) * size)
    with warnings.catch_warnings():
      # bfloat16 could do without a scale that moves; this is about what the scale does.
      warnings.filterwarnings("ignore", "mpjax.make_train_step: the loss scale is dynamic")
      return block(state, jax.tree.map(lambda x: x[part], faults), np.int32(part.start))

  for number in range(blocks):
    if number == WARM_UP:
      through_disk(state)
      memory = peak_memory()
    if number == half_time:
      restored = through_disk(state)
    if number in (begin, end):
      around.append(untouched(state))
    state, record = run(state, number)
    records.append(jax.device_get(record))
    ends.append(numbers(state))
    if number + 1 == compared:
      for again in range(half_time, compared):
        restored, _ = run(restored, again)
      resumed, state = (bits(restored), bits(state)), restored
    if advance is not None:
      advance()
  growth = peak_memory() - memory
  near = jax.tree.map(lambda x: jnp.full_like(x, LIMIT - 5) if x.dtype == jnp.int32 else x, state)
  # What is donated is gone, and the state is still to be looked at.
  state = jax.tree.map(jnp.copy, state)
  worn, _ = run(near, 0)
  record = jax.tree.map(lambda *parts: np.concatenate(parts), *records)
  programs = block._cache_size()
  return Outcome(faults, record, ends, state, worn, programs, resumed, tuple(around), growth)


def check(half, outcome):
  """Returns the checks of a run, each with what was found."""
  record, state = outcome.record, outcome.state
  steps = len(record.finite)
  total, skipped = (int(outcome.ends[-1][key]) for key in ("total", "skipped"))
  applied = state.step.item()
  low, high = float(record.loss_scale.min()), float(record.loss_scale.max())
  limits = mpjax.DynamicLossScale()
  fault = outcome.faults.value != 0
  # The scale that a step was made with is the one after the step before.
  scale = np.concatenate([[limits.init_scale], record.loss_scale[:-1]])
  overflows = ~record.finite & ~fault
  loss = record.loss[-steps // len(outcome.ends) :]
  last = float(np.mean(loss[np.isfinite(loss)]))
  counts = [int(x) for x in jax.tree.leaves(outcome.worn) if x.dtype == jnp.int32]
  found = f"{int(overflows.sum()):,} overflows"
  found += f", from a scale of {scale[overflows].min():,.0f} on" if overflows.any() else ""
  before, after = outcome.stretch
  on_disk, in_memory = outcome.resumed
  bad = round((STRETCH[1] - STRETCH[0]) * steps)
  sums = f"{applied:,} + {skipped:,} = {total:,}"
  safe = np.all(scale[overflows] > SAFE_SCALE[half])
  within = limits.min_scale <= low <= high <= limits.max_scale
  size = f"{sum(map(len, on_disk)):,} bytes"
  no_bit = f"{bad:,} bad steps in a row change no bit"
  checks = {
    "one program": (outcome.programs == 1, outcome.programs),
    "steps + skipped = total": (applied + skipped == total == steps, sums),
    "every fault is skipped": (not np.any(record.finite & fault), f"{int(fault.sum()):,} faults"),
    "nothing else is, but for overflow at a high scale": (safe, found),
    "the scale stays within its limits": (within, f"{low:,.0f} to {high:,.0f}"),
    "scale and counters are those of the oracle": compare_with_oracle(outcome),
    no_bit: (before == after, f"{sum(map(len, before)):,} bytes"),
    "resumed from disk it goes on bit for bit": (on_disk == in_memory, size),
    "all numbers are finite": (all_finite(state), "parameters, moments, statistics"),
    "it has learned": (last <= LARGEST_LOSS, f"loss {last:.3f}"),
    "counters stop and do not wrap": (0 <= min(counts) <= max(counts) == LIMIT, f"{LIMIT:,}"),
    "memory does not grow": (outcome.growth < MEMORY, f"{outcome.growth / 2**20:.1f} MiB"),
  }
  return [Check(name, bool(holds), str(found)) for name, (holds, found) in checks.items()]


def compare_with_oracle(outcome):
  """Returns whether each scale, and all counters after each block, are those of the oracle."""
  oracle, scales, ends = Oracle(**SCALING), [], []
  for block in np.split(outcome.record.finite, len(outcome.ends)):
    scales += [oracle.step(good).scale for good in block.tolist()]
    ends.append(oracle.numbers())
  wrong = np.flatnonzero(outcome.record.loss_scale != np.asarray(scales, np.float32))
  if len(wrong):
    return False, f"the scale differs first at step {wrong[0]:,}"
  return ends == outcome.ends, f"{len(scales):,} scales, {len(ends):,} times 8 counters"


def main():
  """Runs the soak for both half types, prints the checks and returns the exit status."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--updates", type=int, default=UPDATES, help="steps, a multiple of 10,000")
  updates = parser.parse_args().updates
  if updates < 10 * BLOCK or updates % (10 * BLOCK):
    parser.error(f"--updates {updates}: expected a positive multiple of {10 * BLOCK}")
  console = Console()
  holds = True
  for half in HALF:
    start = time.perf_counter()
    with Progress(console=console) as progress:
      task = progress.add_task(f"{half}, blocks of {BLOCK} steps", total=updates // BLOCK)
      outcome = soak(half, updates, advance=lambda task=task: progress.advance(task))
    checks = check(half, outcome)
    table = Table("check", "", "found", title=f"{half}: {time.perf_counter() - start:.0f} s")
    for one in checks:
      table.add_row(one.name, "[green]holds[/]" if one.holds else "[bold red]FAILS[/]", one.found)
    console.print(table, highlight=False)
    holds = holds and all(one.holds for one in checks)
  console.print("all checks hold" if holds else "[bold red]some checks fail[/]")
  return int(not holds)


if __name__ == "__main__":
  sys.exit(main())
