"""Training: single steps, by hand too, windows of micro-batches, batches that are run again.

`rig.py` has runs and control; here is which of them meet which faults.
"""

import functools
from collections.abc import Sequence

import numpy as np

from tests.campaign import network, rig
from tests.campaign.network import GRADIENT, LARGE, LOSS, NOWHERE, STATISTICS, Faults
from tests.campaign.outcome import Job
from tests.campaign.rig import PLACES, Setup, Sizes

# Lanes are for optimizers that do not debias: those that do differ there from their control in a
# bit, without faults and without guards.
SETUPS = (
  Setup("float16", "float16", "adam", 4, ema=True, hysteresis=2),
  Setup("float32", "float32", "adam", ema=True),
  Setup("float32", "float32", "clip adamw schedule", 2, hysteresis=2),
  Setup("float32", "float32", "lion", lanes=True),
  Setup("bfloat16", "float32", "adam", 4, hysteresis=2),
  Setup("bfloat16", "bfloat16", "sgd momentum", 2, ema=True, lanes=True),
  Setup("float16", "float32", "ema of gradients", ema=True, lanes=True),
  Setup("float16", "float32", "adamax", 2),
  Setup("float16", "float16", "clip adamw schedule"),
)

BY_HAND = (
  Setup("float16", "float16", "adam", ema=True, hysteresis=2, by_hand=True),
  Setup("float32", "float32", "clip adamw schedule", ema=True, by_hand=True),
  Setup("bfloat16", "float32", "lion", ema=True, lanes=True, by_hand=True),
  Setup("float16", "float32", "ema of gradients", ema=True, lanes=True, by_hand=True),
)


def train_steps(small: bool, guard: bool) -> list[Job]:
  """Values that are not finite: in gradients, loss, statistics, data."""
  setups, sizes = (SETUPS[:1], Sizes(4, 12)) if small else (SETUPS, Sizes(18, 32))
  return steps("train_steps", "train step", setups, sizes, guard)


def by_hand(small: bool, guard: bool) -> list[Job]:
  """The same in a loop by hand; without the guard, what no optimizer holds is not selected."""
  setups, sizes = (BY_HAND[3:], Sizes(4, 12)) if small else (BY_HAND, Sizes(18, 32))
  return steps("by_hand", "by hand", setups, sizes, guard)


def steps(part: str, kind: str, setups: Sequence[Setup], sizes: Sizes, guard: bool) -> list[Job]:
  classes = {place: f"{kind}: {name}" for place, name in PLACES.items()}
  attack = functools.partial(rig.attack, sizes=sizes, classes=classes, guard=guard)
  return [Job(part, lambda rng, setup=setup: attack(setup, rng=rng)) for setup in setups]


def accumulation(small: bool, guard: bool) -> list[Job]:
  """Bad micro-batches in every phase of a window."""
  # With `mpjax.accumulate_gradients` a bad one does not count: the window waits. With
  # `make_train_step(accumulate=...)` it drops the window.
  if small:
    return []
  waits, is_dropped = "accumulation: the window waits", "accumulation: the window is dropped"
  found = []
  for setup in (
    Setup("float16", "float16", "adam", hysteresis=2, window="4"),
    Setup("float32", "float32", "clip adamw schedule", window="2"),
    Setup("bfloat16", "bfloat16", "sgd momentum", lanes=True, window="2, then 4"),
  ):
    classes = dict.fromkeys((GRADIENT, LOSS, STATISTICS), waits)
    found.append(functools.partial(rig.attack, setup, Sizes(9, 48), classes, guard=guard))
  setup, classes = (
    Setup("float16", "float16", "lion", 8, True, 2),
    dict.fromkeys(PLACES, is_dropped),
  )
  found.append(functools.partial(rig.attack, setup, Sizes(9, 32), classes, guard=guard))
  return [Job("accumulation", run) for run in found]


def retries(small: bool, guard: bool) -> list[Job]:
  """Batches that overflow at one scale and not at a lower one, run again by `max_retries`."""
  # Skipped after all are those that overflow at every scale in reach, hold a NaN, or have no finite
  # loss, which is not scaled, so that a retry would not help. Without the guard none is run again:
  # what could have been saved is skipped, and the control is ahead.
  # Of these the control is compiled already.
  setups = [] if small else [setup._replace(retries=3) for setup in SETUPS[6:8]]
  arguments = {"guard": guard, "plan": plan_overflows}
  return [
    Job(
      "retries", functools.partial(rig.attack, s, Sizes(16, 64), {GRADIENT: "retries"}, **arguments)
    )
    for s in setups
  ]


def plan_overflows(rng: np.random.Generator, runs: int, steps: int, *_: object) -> Faults:
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
