"""Recorded figures as tables: for the terminal, and as the part of README.md that is made of them.

python benchmarks/report.py    writes the tables of README.md anew, from results/
"""

import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from measure import ratio, read, taken
from rich import box
from rich.console import Console
from rich.table import Table
from tables import replaced
from tables import table as in_markdown

FOLDER = pathlib.Path(__file__).parent

Line = tuple[str, Callable[[dict[str, Any], dict[str, Any]], str]]
"""A heading, and what it says about one variant, given that one and all of them."""


def _against(base: str, key: str) -> Callable[[dict[str, Any], dict[str, Any]], str]:
  def text(one: dict[str, Any], every: dict[str, Any]) -> str:
    return "1" if one is every[base] else str(ratio(one[key], every[base][key]))

  return text


def _compiled(key: str) -> Line:
  return f"{key} in HLO", lambda one, _: str(one["compiled"][key.replace("-", "_")])


PRECISION: Sequence[Line] = (
  ("step / float32", _against("float32", "seconds")),
  ("step / hand", _against("by hand", "seconds")),
  ("cold trace / hand", _against("by hand", "cold_trace_seconds")),
  ("warm trace / hand", _against("by hand", "warm_trace_seconds")),
  ("products in half", lambda one, _: f"{one['traced']['half_share']:.0%}"),
  ("equations traced", lambda one, _: str(one["traced"]["equations"])),
  ("converts traced", lambda one, _: str(one["traced"]["converts"])),
  ("saved for backward", lambda one, _: f"{one['residual_bytes'] / 1e6:.1f} MB"),
  _compiled("convert"),
  _compiled("dot"),
  _compiled("convolution"),
  _compiled("custom-call"),
  _compiled("fusion"),
  ("temporaries", lambda one, _: f"{one['compiled']['temp_bytes'] / 1e6:.1f} MB"),
  ("arguments", lambda one, _: f"{one['compiled']['argument_bytes'] / 1e6:.1f} MB"),
)

SCALING: Sequence[Line] = (
  ("step / none", _against("none", "seconds")),
  _compiled("fusion"),
  ("temporaries", lambda one, _: f"{one['compiled']['temp_bytes'] / 1e6:.1f} MB"),
)


def tables(results: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
  """Returns each table as a title and its rows, the first of which is the heading."""
  found = []
  for title, part, lines in (
    ("precision", "precision", PRECISION),
    ("loss scaling", "scaling", SCALING),
  ):
    for model, figures in results[part].items():
      base = next(iter(figures))
      milliseconds = 1e3 * statistics.median(figures[base]["seconds"])
      rows = [["", *figures]]
      rows += [
        [heading, *(text(one, figures) for one in figures.values())] for heading, text in lines
      ]
      found.append((f"{model}, {title} ({base}: {milliseconds:.1f} ms a step)", rows))
  return found


def conditions(results: dict[str, Any]) -> str:
  """Returns under what the figures were taken, as a sentence."""
  where, how = results["environment"], results["settings"]
  return (
    f"{taken(where)}; half is {how['half']}, sizes {how['size']!r}, {how['rounds']} rounds: "
    "median (quartiles) of the ratios of each round. Load average at the start: "
    f"{where['load_average'][0]}."
  )


def show(results: dict[str, Any], console: Console) -> None:
  """Prints all tables."""
  for title, (heading, *rows) in tables(results):
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for name in heading:
      table.add_column(name, justify="right" if name else "left")
    for row in rows:
      table.add_row(*row)
    console.print(table)
  console.print(conditions(results), highlight=False)


def markdown(results: dict[str, Any]) -> str:
  """Returns what README.md has: a policy against dtypes by hand, and loss scaling against none."""
  precision, scaling = results["precision"], results["scaling"]
  costs = [["model", "step / by hand", "cold trace / by hand", "MB of temporaries"]]
  for model, figures in precision.items():
    policy, hand = figures["policy"], figures["by hand"]
    ratios = (ratio(policy[key], hand[key]) for key in ("seconds", "cold_trace_seconds"))
    megabytes = f"{policy['compiled']['temp_bytes'] / 1e6:.1f}"
    megabytes += f" ({hand['compiled']['temp_bytes'] / 1e6:.1f} by hand)"
    costs.append([model, *map(str, ratios), megabytes])
  scales = [["model", "static / none", "dynamic / none", "flax / none"]]
  for model, figures in scaling.items():
    none = figures["none"]["seconds"]
    names = ("static", "dynamic", "flax")
    scales.append([model, *(str(ratio(figures[name]["seconds"], none)) for name in names)])
  return "\n\n".join([in_markdown(costs), in_markdown(scales), conditions(results)])


def updated(readme: str) -> str:
  """Returns the text of README.md with its tables made from the recorded figures."""
  recorded = sorted((FOLDER / "results").glob("*.json"))
  figures = (markdown(read(file)) for file in recorded)
  return replaced(readme, "figures", "\n\n".join(figures))


if __name__ == "__main__":
  path = FOLDER / "README.md"
  path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
