"""Injects more than 20,000 faults into training with mpjax, and counts those that left a trace.

make campaign
python -m tests.campaign.run --fault-seed 7  # with other faults
python -m tests.campaign.run --self-check    # without the guards: all must lose

`rig.py` has the runs of complete steps and their control, and `frameworks.py` those of
`mpjax.scaled` in each framework and under each transformation. The exit status is 0 if at least
20,000 faults were injected and none was lost; with --self-check, if some were lost in every class.
"""

import argparse
import concurrent.futures
import os
import sys
import time
import warnings
from collections.abc import Sequence

import jax
import numpy as np

from tests.campaign import frameworks, rig
from tests.campaign.frameworks import Case
from tests.campaign.outcome import BrokenCampaign, Outcome
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

CASES = (*frameworks.generated(np.random.default_rng(0), 48), *frameworks.PICKED)

SIZES = Sizes(24, 44)
ENOUGH = 20_000


def campaign(
  seed: int, setups: Sequence[Setup | Case], sizes: Sizes = SIZES, *, guard: bool = True
) -> list[Outcome]:
  """Returns what became of each class of faults.

  Args:
    seed: of all faults.
    setups: the runs.
    sizes: how many runs of how many steps, for each setup and kind of place.
    guard: whether what should catch the faults is in place.

  Raises:
    BrokenCampaign: a run did not do what it says.
  """

  def attack(number: int) -> list[Outcome]:
    setup, rng = setups[number], np.random.default_rng([seed, number])
    if isinstance(setup, Case):
      return [frameworks.attack(setup, sizes.steps, rng, guard=guard)]
    kind = "by hand" if setup.by_hand else "train step"
    classes = {place: f"{kind}: {name}" for place, name in PLACES.items()}
    return rig.attack(setup, sizes, classes, rng, guard=guard)

  found: dict[str, Outcome] = {}
  with warnings.catch_warnings(), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    # Dynamic scales without float16 are what some setups are about.
    warnings.simplefilter("ignore")
    for outcomes in pool.map(attack, range(len(setups))):
      for outcome in outcomes:
        found.setdefault(outcome.name, Outcome(outcome.name)).add(outcome)
  return list(found.values())


def main(
  arguments: Sequence[str] | None = None,
  setups: Sequence[Setup | Case] = (*SETUPS, *BY_HAND, *CASES),
) -> int:
  """Runs the campaign; returns the exit status."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--fault-seed", type=int, default=0, help="default: 0")
  parser.add_argument("--self-check", action="store_true", help="without the guards")
  chosen = parser.parse_args(arguments)
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")
  begin = time.perf_counter()
  try:
    outcomes = campaign(chosen.fault_seed, setups, guard=not chosen.self_check)
  except BrokenCampaign as error:
    print(f"The campaign is broken, seed {chosen.fault_seed}: {error}")
    return 2
  for one in outcomes:
    print(f"{one.name}: {one.injected:,} injected, {one.lost:,} lost. {one.first}")
  injected = sum(one.injected for one in outcomes)
  seconds = time.perf_counter() - begin
  print(f"{injected:,} faults in {seconds:.0f} s, with the seed {chosen.fault_seed}.")
  if chosen.self_check:
    return int(any(not one.lost for one in outcomes))
  return int(injected < ENOUGH or any(one.lost for one in outcomes))


if __name__ == "__main__":
  jax.config.update("jax_num_cpu_devices", frameworks.DEVICES)
  sys.exit(main())
