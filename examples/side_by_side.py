"""Train the same thing under several policies: with progress, a table and a plot of the losses.

There is nothing about mixed precision in here.
"""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

OUT = pathlib.Path(__file__).parent.parent / "out"

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")

COLORS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
"""Told apart with any colour vision; the first for the reference."""


class Run(NamedTuple):
  """What one training left."""

  losses: np.ndarray  # [steps], of the batch of each step
  figures: Mapping[str, str]  # lines of the table: what was measured, as text
  state: Any = None  # whatever the example wants to hand on


def progress_bar(console: Console | None = None) -> Progress:
  """Returns a bar with the number of steps done and the time that they took."""
  columns = (
    TextColumn("{task.description:<24}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
  )
  return Progress(*columns, console=console)


def compare(
  title: str,
  train: Callable[[str, int, Callable[[], Any]], Run],
  steps: int,
  path: pathlib.Path,
  policies: Sequence[str] = POLICIES,
  console: Console | None = None,
) -> dict[str, Run]:
  """Calls `train(policy, steps, on_step)` for each policy, prints a table and draws the losses.

  Args:
    title: of the table and the plot.
    train: trains for `steps` steps, calls `on_step()` after each, and returns what came of it.
    steps: for each policy.
    path: where the plot goes.
    policies: names to train under; the first is what the others are compared with.
    console: where to print; the terminal by default.
  """
  console = console or Console()
  runs: dict[str, Run] = {}
  with progress_bar(console) as progress:
    for policy in policies:
      task = progress.add_task(policy, total=steps)
      runs[policy] = train(policy, steps, lambda task=task: progress.advance(task))
  console.print(table(title, runs))
  plot(title, {policy: run.losses for policy, run in runs.items()}, path)
  console.print(f"plot: {path}", soft_wrap=True)
  return runs


def table(title: str, runs: Mapping[str, Run]) -> Table:
  """Returns the figures of all runs, one column each."""
  found = Table(title=title)
  found.add_column()
  for policy in runs:
    found.add_column(policy, justify="right")
  for heading in dict.fromkeys(name for run in runs.values() for name in run.figures):
    found.add_row(Text(heading), *(run.figures.get(heading, "") for run in runs.values()))
  return found


def plot(title: str, losses: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
  """Draws the losses of all runs over their steps, each as it is and as its running mean."""
  mpl.use("agg")
  figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
  for color, (policy, values) in zip(COLORS, losses.items(), strict=False):
    width = max(1, len(values) // 20)
    mean = np.convolve(values, np.full(width, 1 / width), mode="valid")
    steps = np.arange(len(values))
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps[width - 1 :], mean, color=color, linewidth=1.5, label=policy)
  axes.set(xlabel="step", ylabel="loss", title=title)
  axes.grid(alpha=0.3)
  axes.spines[["top", "right"]].set_visible(False)
  figure.legend(loc="outside lower center", ncols=len(losses))
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
  plt.close(figure)
