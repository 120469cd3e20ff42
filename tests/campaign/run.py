"""Injects more than 20,000 faults into training with mpjax, and counts those that left a trace.

make campaign
python -m tests.campaign.run --fault-seed 7 --only retries  # one part, with other faults
python -m tests.campaign.run --self-check                   # without the guards: all must lose

`JOBS` says which runs meet which faults; `rig.py` has the runs and their control. The exit status
is 0 if at least 20,000 faults were injected and none was lost; with --self-check, if some were lost
in every class.
"""

import argparse
import concurrent.futures
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tests.campaign import network, rig
from tests.campaign.network import GRADIENT, LOSS, STATISTICS, Faults
from tests.campaign.outcome import BrokenCampaign, Outcome
from tests.campaign.rig import PLACES, Setup, Sizes


class Job(NamedTuple):
  """A piece of the campaign: one setup, and the faults that it meets."""

  part: str
  setup: Setup
  sizes: Sizes
  classes: dict[int, str]  # the name of the class of faults by the kind of place
  plan: Callable[..., Faults] = network.plan

  def run(self, rng: np.random.Generator, guard: bool) -> list[Outcome]:
    """Returns the outcome of each class; its time, compilation included, is shared out."""
    begin = time.perf_counter()
    outcomes = rig.attack(self.setup, self.sizes, self.classes, rng, guard=guard, plan=self.plan)
    for outcome in outcomes:
      outcome.seconds += (time.perf_counter() - begin) / len(outcomes)
    return outcomes


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

# A bad micro-batch of `mpjax.accumulate_gradients` does not count: the window waits. One of
# `make_train_step(micro_batches=...)` drops the window.
WAITING = (
  Setup("float16", "float16", "adam", hysteresis=2, window="4"),
  Setup("float32", "float32", "clip adamw schedule", window="2"),
  Setup("bfloat16", "bfloat16", "sgd momentum", lanes=True, window="2, then 4"),
)
DROPPED = Setup("float16", "float16", "lion", 8, ema=True, hysteresis=2)

STEPS, STEPS_BY_HAND = (
  {place: f"{kind}: {name}" for place, name in PLACES.items()} for kind in ("train step", "by hand")
)
WAITS = dict.fromkeys((GRADIENT, LOSS, STATISTICS), "accumulation: the window waits")
DROPS = dict.fromkeys(PLACES, "accumulation: the window is dropped")

JOBS = (
  *(Job("train_steps", setup, Sizes(18, 44), STEPS) for setup in SETUPS),
  *(Job("by_hand", setup, Sizes(18, 44), STEPS_BY_HAND) for setup in BY_HAND),
  *(Job("accumulation", setup, Sizes(9, 48), WAITS) for setup in WAITING),
  Job("accumulation", DROPPED, Sizes(9, 32), DROPS),
  # Batches that overflow at one scale and not at a lower one. Skipped after all are those that
  # overflow at every scale in reach, hold a NaN, or have no finite loss, which is not scaled, so
  # that a retry would not help. Without the guard none is run again: what could have been saved is
  # skipped, and the control is ahead. Of these setups the control is compiled already.
  *(
    Job(
      *("retries", setup._replace(retries=3), Sizes(16, 64), {GRADIENT: "retries"}),
      plan=network.plan_overflows,
    )
    for setup in SETUPS[6:8]
  ),
)

PARTS = tuple(dict.fromkeys(job.part for job in JOBS))
ENOUGH = 20_000


def campaign(
  seed: int,
  jobs: Sequence[Job] = JOBS,
  parts: Sequence[str] = PARTS,
  *,
  guard: bool = True,
  workers: int = 1,
  advance: Callable[[Job], None] = lambda job: None,
) -> list[Outcome]:
  """Returns what became of each class of faults.

  Args:
    seed: of all faults; those of a job do not depend on which other jobs run.
    jobs: all that there are.
    parts: which of them to run.
    guard: whether what should catch the faults is in place.
    workers: how many jobs to run at a time; most of the time goes into compiling.
    advance: called after each job.

  Raises:
    BrokenCampaign: a part did not do what it says.
  """
  found: dict[str, Outcome] = {}
  pool = concurrent.futures.ThreadPoolExecutor(workers)
  with warnings.catch_warnings(), pool:
    # Dynamic scales without float16 are what some parts are about.
    warnings.simplefilter("ignore")
    futures = {
      pool.submit(job.run, np.random.default_rng([seed, number]), guard): job
      for number, job in enumerate(jobs)
      if job.part in parts
    }
    try:
      for future in concurrent.futures.as_completed(futures):
        future.result()
        advance(futures[future])
    finally:
      pool.shutdown(cancel_futures=True)
  for future, job in futures.items():
    for outcome in future.result():
      found.setdefault(outcome.name, Outcome(outcome.name, part=job.part)).add(outcome)
  return list(found.values())


def report(console: Console, outcomes: list[Outcome], seed: int, seconds: float) -> None:
  """Prints the table, and how each class lost its first fault."""
  table = Table("faults")
  for title in ("injected", "caught", "lost", "s"):
    table.add_column(title, justify="right")
  for one in outcomes:
    caught = max(one.injected - one.lost, 0)
    lost = f"[bold red]{one.lost}[/]" if one.lost else "0"
    table.add_row(one.name, f"{one.injected:,}", f"{caught:,}", lost, f"{one.seconds:.1f}")
  console.print(table, highlight=False)
  for one in outcomes:
    if one.lost:
      text = f"{one.name}: {one.first} (--fault-seed {seed} --only {one.part})"
      console.print(text, markup=False, highlight=False)
  injected, lost = sum(one.injected for one in outcomes), sum(one.lost for one in outcomes)
  console.print(
    f"{injected:,} faults injected, {lost:,} lost, in {seconds:.0f} s, most of which compile. "
    f"Seed {seed}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}.",
    highlight=False,
  )


def main(arguments: Sequence[str] | None = None, jobs: Sequence[Job] = JOBS) -> int:
  """Runs the campaign; returns the exit status."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--fault-seed", type=int, default=0, help="default: 0")
  parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
  parser.add_argument("--self-check", action="store_true", help="without the guards")
  chosen = parser.parse_args(arguments)
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")

  console, guard, seed = Console(), not chosen.self_check, chosen.fault_seed
  begin = time.perf_counter()
  with Progress(TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn()) as progress:
    task = progress.add_task("compiling", total=sum(job.part in chosen.only for job in jobs))

    def advance(job):
      progress.update(task, advance=1, description=job.part)

    try:
      workers = min(4, os.cpu_count() or 1)
      outcomes = campaign(seed, jobs, chosen.only, guard=guard, workers=workers, advance=advance)
    except BrokenCampaign as error:
      console.print(f"[bold red]The campaign is broken[/], seed {seed}: {error}", highlight=False)
      return 2
  report(console, outcomes, seed, time.perf_counter() - begin)
  if not guard:
    blind = [one.name for one in outcomes if not one.lost]
    console.print(f"Blind without the guards: {', '.join(blind) or 'no class'}.", highlight=False)
    return int(bool(blind))
  enough = len(chosen.only) < len(PARTS) or sum(o.injected for o in outcomes) >= ENOUGH
  if not enough:
    console.print(f"Fewer than {ENOUGH:,} faults.", highlight=False)
  return int(not enough or any(one.lost for one in outcomes))


if __name__ == "__main__":
  sys.exit(main())
