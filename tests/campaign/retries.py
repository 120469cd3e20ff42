"""Batches that overflow at one scale and not at a lower one, run again by `max_retries`.

The oracle knows at which scale each batch overflows, and so how often it is run, at which scale its
step is applied, and which are skipped after all: those that overflow at every scale in reach, hold
a NaN, or have no finite loss, which is not scaled, so that a retry would not help.
"""

import copy
import functools
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.campaign import network, train_steps
from tests.campaign.network import GRADIENT, LARGE, LOSS, NOWHERE, Faults
from tests.campaign.outcome import (
  Job,
  Outcome,
  check_clean,
  good_steps,
  judge,
  oracle_numbers,
  require,
  unlike_digests,
  unlike_oracle,
)
from tests.campaign.programs import FIELDS, Setup, run_program, scale_arguments
from tests.campaign.train_steps import Sizes
from tests.loss_scale_oracle import Oracle

MAX_RETRIES = 3

SETUPS = [setup for setup in train_steps.SETUPS if setup.compute == "float16"][1:3]
"""Setups whose control is compiled already."""


class Step(NamedTuple):
  """What the oracle says of a step; later on arrays of it, [runs, steps]."""

  met: Any  # bool: it overflowed at least once
  applied: Any  # bool
  scale: Any  # of the last run of its batch
  numbers: Any  # of the scaler after it


def jobs(small: bool, guard: bool) -> list[Job]:
  sizes = Sizes(16, 64)
  setups = () if small else SETUPS
  return [Job("retries", functools.partial(attack, s, sizes, guard=guard)) for s in setups]


def attack(setup: Setup, sizes: Sizes, rng: np.random.Generator, *, guard: bool) -> list[Outcome]:
  """Lets runs of one setup meet batches of all kinds."""
  # Without retries, what could have been saved is skipped, and the control is ahead.
  max_retries = MAX_RETRIES if guard else 0
  clean, outcome = Outcome(""), Outcome("retries")
  meet(clean, setup, network.no_faults(sizes), max_retries, rng)
  check_clean(clean, outcome, guard)
  begin = time.perf_counter()
  steps = meet(outcome, setup, plan(rng, *sizes), max_retries, rng)
  require(np.any(steps.met & steps.applied), "no batch was saved by a retry")
  require(np.any(~steps.applied), "no batch was beyond every retry")
  outcome.seconds = time.perf_counter() - begin
  times = run_program(setup, True, max_retries).compilations
  outcome.lose(times - 1, f"{setup.name}: compiled {times} times")
  return [outcome]


def meet(
  outcome: Outcome, setup: Setup, faults: Faults, max_retries: int, rng: np.random.Generator
) -> Step:
  """Runs a setup, its oracle and its control, and puts down the differences."""
  data = train_steps.draw(setup, faults.place.shape, rng)
  program = run_program(setup, True, max_retries)
  _, trail = program(data.params, data.keys, data.index, faults, data.batches)
  digests, finite, agree, scale, flags, _ = jax.device_get(trail)
  followed = [step for run in range(len(faults.place)) for step in follow(setup, faults, run)]
  shape = faults.place.shape
  steps = Step(*(np.reshape(x, (*shape, *np.shape(x)[1:])) for x in zip(*followed, strict=True)))

  order, active, seen = good_steps(~steps.applied)
  given = Faults(*(np.take_along_axis(f, order, 1) for f in faults))
  given = given._replace(place=np.where(active, given.place, NOWHERE).astype(np.int32))
  scales = np.take_along_axis(steps.scale, order, 1).astype(np.float32)
  _, expected = train_steps.run_control(setup, data, order, active, scales, faults=given)
  wrong = unlike_digests(digests, expected, seen, FIELDS)
  wrong |= {"not finite": ~finite, "masters": ~agree, "flag": flags != steps.applied}
  wrong["scale"] = unlike_oracle(scale, steps.numbers)
  judge(outcome, steps.met, wrong, f"{setup.name}, {max_retries} retries")
  return steps


def plan(rng: np.random.Generator, runs: int, steps: int) -> Faults:
  """Returns derivatives that overflow from some scale on, a few NaN, and a few infinite losses."""
  bad = rng.random((runs, steps)) < rng.choice([0.2, 0.4, 0.6], (runs, 1))
  kind = rng.random((runs, steps))
  value = LARGE * 2.0 ** -rng.integers(0, 9, (runs, steps)).astype(np.float64)
  value = np.select([kind < 0.1, kind < 0.2], [np.nan, np.inf], value)
  place = np.where((kind >= 0.1) & (kind < 0.2), LOSS, GRADIENT)
  return Faults(
    place=np.where(bad, place, NOWHERE).astype(np.int32),
    row=rng.integers(0, network.ROWS, (runs, steps)).astype(np.int32),
    position=rng.integers(0, network.PARAMETERS, (runs, steps)).astype(np.int32),
    value=np.where(bad, value, 0).astype(np.float32),
  )


def follow(setup: Setup, faults: Faults, run: int) -> list[Step]:
  """Returns what the oracle says of each step of a run.

  The derivative of the planted term times the scale is what has to fit into float16, which ends
  below 2^16; the term is added to the mean, so that it is the same in a micro-batch.
  """
  oracle, steps = Oracle(**scale_arguments(setup)), []
  for place, value in zip(faults.place[run], faults.value[run].astype(np.float64), strict=True):
    slope = value / LARGE * network.LARGEST_SLOPE["float16"] if place == GRADIENT else 0.0
    forward = place != LOSS
    after = []
    for _ in range(1 + MAX_RETRIES):
      scale = oracle.scale
      finite = bool(forward and scale * slope < 2.0**16)  # False for a NaN.
      after.append(copy.copy(oracle.step(finite)))
      if finite or not forward or scale == oracle.limits[0]:
        break
      if oracle.scale == scale:  # Hysteresis withheld it, and the same would overflow again.
        oracle.scale = scale * oracle.factors[1]
    if not finite:  # Nothing helped: the batch was to blame, and costs one step of the scale.
      oracle = after[0]
    steps.append(Step(len(after) > 1 or not finite, finite, scale, oracle_numbers(oracle)))
  return steps
