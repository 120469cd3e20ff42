"""Recorded errors of gradients against float64: a table of docs/accuracy.md.

python benchmarks/accuracy_report.py           writes the table anew, from results/accuracy/
python benchmarks/accuracy_report.py --show    prints the errors of each model
"""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tables
from measure import read, taken

FOLDER = pathlib.Path(__file__).parent
RECORDED = FOLDER / "results" / "accuracy" / "cpu.json"
PAGE = FOLDER.parent / "docs" / "accuracy.md"
DTYPES = ("bfloat16", "float16")
EACH, TOGETHER = 1.1, 1.0
"""How much a policy may err beside by hand: for each model, and all together."""

WAYS = {"dtype": "`dtype=`", "care": "with care", "cast": "cast outside"}


class Comparison(NamedTuple):
  """The errors of one model in one dtype.

  Fields:
    way: which of the versions by hand errs least.
    policy: the geometric mean over the seeds.
    by_hand: the same, of that version.
  """

  way: str
  policy: float
  by_hand: float

  @property
  def ratio(self) -> float:
    """How much more a policy errs than by hand; the geometric mean of the seeds' ratios."""
    return self.policy / self.by_hand


def geometric_mean(numbers: Any) -> float:
  """Returns the geometric mean."""
  return float(np.exp(np.mean(np.log(numbers))))


def means(errors: Sequence[float]) -> dict[str, float]:
  """Returns what is recorded of the errors of all seeds."""
  return {
    "geometric_mean": geometric_mean(errors),
    "root_mean_square": float(np.sqrt(np.mean(np.square(errors)))),
  }


def compare(errors: Mapping[str, Any]) -> Comparison | None:
  """Returns how a policy compares with the best version by hand; None if there is none."""
  found = {way: one["geometric_mean"] for way, one in errors.items() if not isinstance(one, str)}
  policy = found.pop("policy")
  if not found:
    return None
  best = min(found, key=lambda way: found[way])
  return Comparison(best, policy, found[best])


def comparisons(results: Mapping[str, Any]) -> dict[tuple[str, str], Comparison]:
  """Returns (model, dtype) -> comparison, where there is a version by hand."""
  found = {
    (name, dtype): compare(errors)
    for name, model in results["models"].items()
    for dtype, errors in model.items()
  }
  return {key: one for key, one in found.items() if one is not None}


def together(results: Mapping[str, Any]) -> dict[str, float]:
  """Returns the geometric mean of the ratios of all models, by dtype."""
  ratios: dict[str, list[float]] = {}
  for (_, dtype), one in comparisons(results).items():
    ratios.setdefault(dtype, []).append(one.ratio)
  return {dtype: geometric_mean(each) for dtype, each in ratios.items()}


def holds(results: Mapping[str, Any]) -> bool:
  """Whether no model errs too much under a policy, nor all together. A NaN is too much."""
  each = all(one.ratio <= EACH for one in comparisons(results).values())
  return each and all(mean <= TOGETHER for mean in together(results).values())


def rows(results: Mapping[str, Any]) -> list[list[str]]:
  """Returns the table, the heading first."""
  found, known = comparisons(results), {}
  for name, dtype in found:
    known.setdefault(name, []).append(dtype)
  table = [["model", "by hand"]]
  dtypes = [x for x in DTYPES if any(x in each for each in known.values())]
  for dtype in dtypes:
    table[0] += [f"{dtype}: policy", "by hand", "ratio"]
  for name in known:
    ones = [found.get((name, dtype)) for dtype in dtypes]
    ways = dict.fromkeys(WAYS[one.way] for one in ones if one)
    table.append([name, ", ".join(ways)])
    for one in ones:
      table[-1] += _cells(one)
  return table


def _cells(one: Comparison | None) -> list[str]:
  if one is None:
    return ["", "", ""]
  ratio = f"{one.ratio:.2f}"
  return [f"{one.policy:.1e}", f"{one.by_hand:.1e}", ratio if one.ratio <= EACH else f"**{ratio}**"]


GROUPS = {
  "dtype": "`dtype=` in every layer",
  "care": "`dtype=`, and float32 sums",
  "cast": "parameters and inputs cast",
}


def table(results: Mapping[str, Any]) -> str:
  """Returns the ratios of all models together, by the way that they are written by hand."""
  heading = ["best version by hand", "models", *(f"{d}: mean (largest)" for d in DTYPES)]
  found, lines = comparisons(results), [heading]
  for ways, title in (*(((way,), words) for way, words in GROUPS.items()), (tuple(WAYS), "all")):
    ratios = [
      [one.ratio for (_, other), one in found.items() if other == dtype and one.way in ways]
      for dtype in DTYPES
    ]
    shown = (f"{geometric_mean(each):.2f} ({max(each):.2f})" if each else "" for each in ratios)
    lines.append([title, str(max(map(len, ratios))), *shown])
  return tables.table(lines)


def conditions(results: Mapping[str, Any]) -> str:
  """Returns under what the figures were taken, as a sentence."""
  return f"{taken(results['environment'])}. {results['seeds']} seeds."


def summary(results: Mapping[str, Any]) -> str:
  """Returns what all models say together, a line for each dtype."""
  found, lines = comparisons(results), []
  for dtype, mean in together(results).items():
    ones = {name: one for (name, other), one in found.items() if other == dtype}
    worst = max(ones, key=lambda name: ones[name].ratio)
    own = [one.ratio for one in ones.values() if one.way != "cast"]
    lines.append(
      f"- {dtype}: {mean:.2f} times the error by hand (geometric mean of {len(ones)} models), "
      f"at most {ones[worst].ratio:.2f} times ({worst})."
    )
    if own:
      lines[-1] += f" Of the {len(own)} written with dtypes: {geometric_mean(own):.2f} times."
  return "\n".join(lines)


def updated(page: str, results: Mapping[str, Any]) -> str:
  """Returns the text of the page with the part between its marks made from recorded figures."""
  pieces = (table(results), conditions(results))
  return tables.replaced(page, "float64", "\n\n".join(pieces))


if __name__ == "__main__":
  recorded = read(RECORDED)
  if "--show" in sys.argv:
    print(tables.table(rows(recorded), 2), summary(recorded), sep="\n\n")
  else:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), recorded), encoding="utf-8")
