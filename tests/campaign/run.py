"""Injects more than 20,000 faults into training with mpjax, and counts those that left a trace.

make campaign
python -m tests.campaign.run --fault-seed 7 --only scale   # one part, with other faults
python -m tests.campaign.run --self-check                  # without the guards: all parts must lose

Each part is a module of this folder and says what its faults are, and which independent control or
oracle it compares with. The exit status is 0 if at least 20,000 faults were injected and none was
lost; with --self-check, if some were lost in every class.
"""

import argparse
import concurrent.futures
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from tests.campaign import scale, training
from tests.campaign.outcome import BrokenCampaign, Job, Outcome

PARTS: dict[str, Callable[[bool, bool], list[Job]]] = {
  "train_steps": training.train_steps,
  "by_hand": training.by_hand,
  "accumulation": training.accumulation,
  "retries": training.retries,
  "scale": scale.jobs,
}
"""The jobs of some classes of faults, by whether they are small, and guarded."""

ENOUGH = 20_000


def campaign(
  seed: int,
  parts: Sequence[str] = tuple(PARTS),
  *,
  small: bool = False,
  guard: bool = True,
  workers: int = 1,
  advance: Callable[[Job], None] = lambda job: None,
) -> list[Outcome]:
  """Returns what became of each class of faults.

  Args:
    seed: of all faults; those of a part do not depend on which other parts run.
    parts: which parts to run.
    small: a small piece of each part, for the tests.
    guard: whether what should catch the faults is in place.
    workers: how many jobs to run at a time; most of the time goes into compiling.
    advance: called after each job.

  Raises:
    BrokenCampaign: a part did not do what it says.
  """
  found: dict[str, Outcome] = {}
  pool = concurrent.futures.ThreadPoolExecutor(workers)
  with warnings.catch_warnings(), pool:
    # Dynamic scales without float16, and odd factors, are what some parts are about.
    warnings.simplefilter("ignore")
    futures = {
      pool.submit(timed, job, [seed, *number]): job for job, number in planned(parts, small, guard)
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


def timed(job: Job, seed: list[int]) -> list[Outcome]:
  """Runs a job; its time, compilation included, is shared out among its classes."""
  begin = time.perf_counter()
  outcomes = job.run(np.random.default_rng(seed))
  for outcome in outcomes:
    outcome.seconds += (time.perf_counter() - begin) / len(outcomes)
  return outcomes


def planned(parts: Sequence[str], small: bool, guard: bool) -> list[tuple[Job, tuple[int, int]]]:
  """Returns the jobs of some parts, and the numbers that go into the seed of each."""
  return [
    (job, (part, number))
    for part, (name, jobs) in enumerate(PARTS.items())
    for number, job in enumerate(jobs(small, guard))
    if name in parts
  ]


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


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs the campaign; returns the exit status."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--fault-seed", type=int, default=0, help="default: 0")
  parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
  parser.add_argument("--self-check", action="store_true", help="without the guards")
  chosen = parser.parse_args(arguments)
  if "JAX_PLATFORMS" not in os.environ:
    jax.config.update("jax_platforms", "cpu")

  console, guard, seed = Console(), not chosen.self_check, chosen.fault_seed
  begin = time.perf_counter()
  with Progress(TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn()) as progress:
    task = progress.add_task("compiling", total=len(planned(chosen.only, False, guard)))

    def advance(job):
      progress.update(task, advance=1, description=job.part)

    try:
      workers = min(4, os.cpu_count() or 1)
      outcomes = campaign(seed, chosen.only, guard=guard, workers=workers, advance=advance)
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
