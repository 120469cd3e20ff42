"""Bad micro-batches in every phase of a window.

With `mpjax.accumulate_gradients` a bad one does not count: the window waits. The control is plain
optax, fed with the means of every so many good ones. With `make_train_step(accumulate=...)` a bad
one drops the window; the control is never shown its batch.
"""

import functools

import numpy as np

from tests.campaign import train_steps
from tests.campaign.outcome import Job, Outcome
from tests.campaign.programs import Setup
from tests.campaign.train_steps import Sizes

WAITING = (
  Setup("float16", "float16", "adam", hysteresis=2, window="4"),
  Setup("float32", "float32", "clip adamw schedule", lanes=True, window="2"),
  Setup("bfloat16", "bfloat16", "sgd momentum", window="2, then 4"),
)

DROPPED = Setup("float16", "float16", "lion", 8, ema=True, hysteresis=2)


def jobs(small: bool, guard: bool) -> list[Job]:
  if small:
    return []
  runs = [functools.partial(attack, "waits", setup, Sizes(7, 48), guard=guard) for setup in WAITING]
  runs.append(functools.partial(attack, "is dropped", DROPPED, Sizes(9, 32), guard=guard))
  return [Job("accumulation", run) for run in runs]


def attack(
  what: str, setup: Setup, sizes: Sizes, rng: np.random.Generator, *, guard: bool
) -> list[Outcome]:
  outcome = Outcome(f"accumulation: the window {what}")
  for found in train_steps.attack(setup, sizes, rng, guard=guard):
    outcome.add(found)
  return [outcome]
