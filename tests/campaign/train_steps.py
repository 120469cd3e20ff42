"""Values that are not finite, met by `mpjax.make_train_step`: in gradients, loss, statistics, data.

The control is plain optax, which is never shown a batch with a fault.
"""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.campaign import network
from tests.campaign.network import GRADIENT, INPUT, LOSS, STATISTICS, Faults
from tests.campaign.outcome import (
  Job,
  Outcome,
  check_clean,
  differing,
  follow,
  good_steps,
  judge,
  require,
  unlike_digests,
  unlike_oracle,
)
from tests.campaign.programs import (
  FIELDS,
  Setup,
  committed_plain,
  control_program,
  run_program,
  scale_arguments,
  witness_program,
)
from tests.loss_scale_oracle import Oracle

SETUPS = (
  Setup("float16", "float16", "adam", 4, ema=True, hysteresis=2),
  Setup("float32", "float32", "adam", ema=True),
  Setup("float32", "float32", "clip adamw schedule", 2, hysteresis=2),
  Setup("float32", "float32", "lion", lanes=True),
  Setup("bfloat16", "float32", "adam", 4, hysteresis=2),
  Setup("bfloat16", "bfloat16", "sgd momentum", 2, ema=True, lanes=True),
  Setup("float16", "float32", "ema of gradients", ema=True),
  Setup("float16", "float32", "adamax", 2, lanes=True),
  Setup("float16", "float16", "clip adamw schedule"),
)

PLACES = {GRADIENT: "gradients", LOSS: "the loss", STATISTICS: "statistics", INPUT: "input data"}
BATCHES = 64


class Sizes(NamedTuple):
  """How many runs of how many steps, for each setup and kind of place."""

  runs: int
  steps: int


def jobs(small: bool, guard: bool) -> list[Job]:
  setups, sizes = (SETUPS[:1], Sizes(4, 12)) if small else (SETUPS, Sizes(13, 32))
  return [
    Job("train_steps", functools.partial(attack, setup, sizes, guard=guard)) for setup in setups
  ]


def attack(setup: Setup, sizes: Sizes, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  """Lets runs of one setup meet faults, one kind of place after the other."""
  clean, outcomes = Outcome(""), []
  meet(clean, setup, network.no_faults(sizes), rng, guard)
  for place, name in PLACES.items():
    outcome = Outcome(f"train step: {name}")
    begin = time.perf_counter()
    meet(outcome, setup, network.plan(rng, *sizes, place, setup.compute), rng, guard)
    outcome.seconds = time.perf_counter() - begin
    outcomes.append(outcome)
  check_clean(clean, outcomes[0], guard)
  times = run_program(setup, guard).compilations
  outcomes[0].lose(times - 1, f"{setup.name}: compiled {times} times")
  return outcomes


class Data(NamedTuple):
  """What runs are given, but for faults."""

  params: Any  # [runs, ...]
  keys: np.ndarray  # [runs, 2]: the data of keys
  index: np.ndarray  # [runs, steps]: which batch comes at each step
  batches: Any


def draw(setup: Setup, shape: tuple[int, ...], rng: np.random.Generator) -> Data:
  runs, _ = shape
  params = [network.initial_parameters(rng) for _ in range(runs)]
  stored = jnp.dtype(setup.stored)
  return Data(
    params=jax.tree.map(lambda *p: np.stack(p).astype(stored), *params),
    keys=rng.integers(0, 2**32, (runs, 2), dtype=np.uint32),
    index=rng.integers(0, BATCHES, shape),
    batches=network.pool(rng, BATCHES),
  )


def meet(
  outcome: Outcome, setup: Setup, faults: Faults, rng: np.random.Generator, guard: bool
) -> None:
  """Runs a setup with faults, and its control without them, and puts down the differences."""
  planted = faults.place != network.NOWHERE
  data = draw(setup, planted.shape, rng)
  final, trail = run_program(setup, guard)(data.params, data.keys, data.index, faults, data.batches)
  judge_trail(outcome, setup, faults, data, final, trail, guard)


def judge_trail(
  outcome: Outcome,
  setup: Setup,
  faults: Faults,
  data: Data,
  final: Any,
  trail: Any,
  guard: bool,
  devices: int = 1,
) -> None:
  """Lets the control run, and puts down where the trail of a run differs from it."""
  planted = faults.place != network.NOWHERE
  digests, finite, agree, scale, flags, before = jax.device_get(trail)
  order, active, seen = good_steps(planted)
  scales = np.take_along_axis(before[-1], order, 1)
  plain, expected = run_control(setup, data, order, active, scales, devices=devices)
  wrong = {"not finite": ~finite, "masters": ~agree}
  wrong |= unlike_digests(digests, expected, seen, FIELDS)
  wrong["the last state"] = np.zeros_like(planted)
  wrong["the last state"][:, -1] = differing(final, committed_plain(plain))
  if guard:
    expected = [follow(Oracle(**scale_arguments(setup)), ~run) for run in planted]
    wrong |= {"flag": flags == planted, "scale": unlike_oracle(scale, expected)}
  right = judge(outcome, planted, wrong, setup.name)
  if guard:
    witness = witness_program(setup.compute)
    found = ~np.asarray(witness(*before, data.keys, data.index, faults, data.batches))
    require(np.all((found == planted)[right]), f"{setup.name}: other faults than those planned")


def run_control(
  setup: Setup,
  data: Data,
  order: np.ndarray,
  active: np.ndarray,
  scales: np.ndarray,
  *,
  faults: Faults | None = None,
  devices: int = 1,
) -> tuple[Any, Any]:
  """Returns the last state of the control and its digests; only float16 is scaled as the run was.

  Args:
    setup: what to run.
    data: what the run was given.
    order: which of its steps are good, in their order.
    active: which of these are good steps.
    scales: their scales.
    faults: what came with them that was no fault at these scales.
    devices: how many devices shared each batch.
  """
  faults = faults or network.no_faults(order.shape)
  if setup.compute != "float16":
    scales = np.ones_like(scales)
  index = np.take_along_axis(data.index, order, 1)
  program = control_program(setup, devices)
  return program(data.params, data.keys, index, faults, scales, active, data.batches)
