"""Recorded figures of parity, within one deviation of float32 or not: docs/accuracy.md.

python benchmarks/parity_report.py           writes the table and plot anew, from results/parity/
python benchmarks/parity_report.py --show    prints the spread of the seeds too
"""

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import tables
from matplotlib import pyplot as plt
from measure import read, taken

FOLDER = pathlib.Path(__file__).parent
RECORDED = FOLDER / "results" / "parity" / "cpu.json"
PAGE = FOLDER.parent / "docs" / "accuracy.md"
PLOT = PAGE.with_suffix(".png")
FLOAT8 = "mixed_float8"
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", FLOAT8)
COLORS = ("#000000", "#0072b2", "#e69f00", "#009e73")

FIGURES: Mapping[str, tuple[str, Callable[[Mapping[str, float]], float]]] = {
  "accuracy": ("test accuracy, %", lambda run: 100 * run["accuracy"]),
  "loss": ("test loss", lambda run: run["loss"]),
  "character_loss": ("held-out perplexity", lambda run: float(np.exp(run["character_loss"]))),
}
"""What is compared: its heading, and how it is read from a run that has it."""


class Comparison(NamedTuple):
  """Some seeds in half beside the same seeds in float32."""

  mean: float  # in half
  reference: float  # the mean in float32
  deviation: float  # the standard deviation of the seeds in float32
  range: float  # the largest less the smallest of the seeds in float32
  paired: float  # root mean square of half less float32, each seed by itself
  holds: bool

  @property
  def difference(self) -> float:
    """How far the means are apart."""
    return self.mean - self.reference


def compare(half: Sequence[float], reference: Sequence[float]) -> Comparison:
  """Returns whether the means differ by no more than the standard deviation of `reference`."""
  mean, other = float(np.mean(half)), float(np.mean(reference))
  deviation, spread = float(np.std(reference, ddof=1)), float(np.ptp(reference))
  paired = float(np.sqrt(np.mean(np.subtract(half, reference) ** 2)))
  # A NaN is within nothing.
  return Comparison(mean, other, deviation, spread, paired, bool(abs(mean - other) <= deviation))


def policies(task: Mapping[str, Any]) -> list[str]:
  """Returns under which policies a model was trained."""
  return [policy for policy in POLICIES if policy in task["runs"]]


def values(task: Mapping[str, Any], figure: str, policy: str) -> list[float]:
  """Returns a figure of all seeds, in their order."""
  runs = task["runs"].get(policy, {})
  if set(runs) != set(task["runs"]["float32"]) or len(runs) < 2:
    raise ValueError(f"{policy} has only the seeds {sorted(runs)}: let parity.py run to its end")
  return [FIGURES[figure][1](runs[seed]) for seed in sorted(runs, key=int)]


def comparisons(results: Mapping[str, Any]) -> dict[tuple[str, str, str], Comparison]:
  """Returns (model, figure, policy) -> comparison, for all that was measured."""
  found = {}
  for name, task in results["models"].items():
    first = next(iter(task["runs"]["float32"].values()))
    for figure in (x for x in FIGURES if x in first):
      reference = values(task, figure, "float32")
      for policy in policies(task)[1:]:
        found[name, figure, policy] = compare(values(task, figure, policy), reference)
  return found


def rows(results: Mapping[str, Any]) -> list[list[str]]:
  """Returns the table, the heading first."""
  found = [["model", "figure", "policy", "mean", "float32", "difference"]]
  found[0] += ["deviation", "range", "same seed", "within", "skipped"]
  for (name, figure, policy), one in comparisons(results).items():
    runs = results["models"][name]["runs"][policy]
    skipped = sum(int(run["skipped"]) for run in runs.values()) / len(runs)
    numbers = (one.mean, one.reference, one.difference, one.deviation, one.range, one.paired)
    signs = ("", "", "+", "", "", "")
    texts = [f"{x:{sign}.4f}" for x, sign in zip(numbers, signs, strict=True)]
    verdict = "yes" if one.holds else "**no**"
    found.append([name, FIGURES[figure][0], policy, *texts, verdict, f"{skipped:.1f}"])
  return found


def table(results: Mapping[str, Any]) -> str:
  """Returns the means of each figure, and the standard deviation of float32's seeds."""
  found = comparisons(results)
  lines = [["model", "figure", *POLICIES, "deviation"]]
  for name, figure in dict.fromkeys((name, figure) for name, figure, _ in found):
    ones = {policy: found.get((name, figure, policy)) for policy in POLICIES[1:]}
    some = next(one for one in ones.values() if one)
    means = [some.reference, *(one.mean if one else None for one in ones.values())]
    shown = ("" if x is None else f"{x:.4f}" for x in (*means, some.deviation))
    lines.append([name, FIGURES[figure][0], *shown])
  return tables.table(lines, 2)


def conditions(results: Mapping[str, Any]) -> str:
  """Returns under what the figures were taken, as a sentence."""
  sizes = ", ".join(
    f"{name} {task['steps']} steps from {len(task['runs']['float32'])} seeds"
    for name, task in results["models"].items()
  )
  return f"{taken(results['environment'])}. {sizes}."


def summary(results: Mapping[str, Any]) -> str:
  """Returns how many means are within one standard deviation of float32, as a sentence."""
  found = [one.holds for one in comparisons(results).values()]
  return f"Within one deviation of float32: {sum(found)} of {len(found)} means."


def updated(page: str, results: Mapping[str, Any]) -> str:
  """Returns the text of the page with the part between its marks made from recorded figures."""
  pieces = (table(results), summary(results), conditions(results))
  return tables.replaced(page, "parity", "\n\n".join(pieces))


def plot(results: Mapping[str, Any], path: pathlib.Path) -> None:
  """Draws each seed as a dot, and the mean of each policy as a line."""
  mpl.use("agg")
  shown = dict.fromkeys((name, figure) for name, figure, _ in comparisons(results))
  figure, panels = plt.subplots(
    1, len(shown), figsize=(2.2 * len(shown), 3.2), layout="constrained", squeeze=False
  )
  for axes, (name, what) in zip(panels[0], shown, strict=True):
    shown_here = policies(results["models"][name])
    for place, policy in enumerate(shown_here):
      color = COLORS[POLICIES.index(policy)]
      found = values(results["models"][name], what, policy)
      axes.plot([place] * len(found), found, "o", color=color, alpha=0.5, markersize=4)
      axes.hlines(np.mean(found), place - 0.35, place + 0.35, color=color)
    axes.set_xticks(range(len(shown_here)), shown_here, rotation=30, ha="right", fontsize=7)
    axes.set_xlim(-0.6, len(shown_here) - 0.4)
    axes.set_title(f"{name}\n{FIGURES[what][0]}", fontsize=9)
    axes.tick_params(axis="y", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
  plt.close(figure)


if __name__ == "__main__":
  recorded = read(RECORDED)
  if "--show" in sys.argv:
    print(tables.table(rows(recorded), 3))
  else:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), recorded), encoding="utf-8")
    plot(recorded, PLOT)
