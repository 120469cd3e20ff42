"""Recorded figures of autocast as the tables of docs/autocast_measured.md.

python benchmarks/autocast_report.py           writes the tables anew, from results/autocast/
python benchmarks/autocast_report.py --show    prints every recorded figure
"""

import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

from autocast_programs import PROGRAMS
from autocast_tools import BOUNDS
from measure import ratio, read, taken
from tables import replaced, table

FOLDER = pathlib.Path(__file__).parent
RECORDED = FOLDER / "results" / "autocast" / "cpu.json"
PAGE = FOLDER.parent / "docs" / "autocast_measured.md"

Figures = Mapping[str, Any]


def size(count: float) -> str:
  """Returns a number of bytes with three digits or more."""
  for unit, factor in (("GB", 1e9), ("MB", 1e6)):
    if count >= factor:
      return f"{count / factor:.2f} {unit}"
  return f"{count / 1e3:.1f} kB"


def _half_types(results: Figures, part: str) -> list[str]:
  return results[part]["settings"]["halves"]


def _halves(results: Figures, part: str) -> list[tuple[str, str, Figures]]:
  """Returns (program, half type, figures); one entry for both types where they say the same."""
  per_half = {half: results["memory"][half][part] for half in _half_types(results, "memory")}
  rows = []
  for name in next(iter(per_half.values())):
    seen: dict[str, list[str]] = {}
    for half, found in per_half.items():
      seen.setdefault(json.dumps(found[name]), []).append(half)
    rows += [(name, ", ".join(halves), json.loads(text)) for text, halves in seen.items()]
  return rows


def memory(results: Figures) -> str:
  """Returns the bytes that models of Flax keep for the backward pass, without arguments."""
  rows = [["model", "dtype", "float32", "by hand", "autocast", "autocast / by hand"]]
  for name, half, found in _halves(results, "models"):
    plain, hand, cast = (found[x]["own"] for x in ("float32", "by hand", "autocast"))
    rows.append([name, half, size(plain), size(hand), size(cast), f"{cast / hand:.3f}"])
  return table(rows, 2)


def memory_without_scopes(results: Figures) -> str:
  """Returns the plain programs: bytes without scopes, and with scopes around norms."""
  rows = [["function", "dtype", "float32", "by hand", "autocast", "/ hand"]]
  rows[0] += ["with scopes", "/ hand"]
  for name, half, found in _halves(results, "programs"):
    plain, hand = found["float32"]["own"], found["by hand"]["own"]
    cells = [size(plain), size(hand)]
    for variant in ("autocast", "autocast, scopes"):
      cells += [size(found[variant]["own"]), f"{found[variant]['own'] / hand:.3f}"]
    rows.append([name, half, *cells])
  return table(rows, 2)


def tracing(results: Figures) -> str:
  """Returns how long tracing takes, by kind and number of equations."""
  rows = [["function", "equations", "plain, µs each", "autocast, µs each", "autocast / plain"]]
  for kind, found in results["tracing"]["kinds"].items():
    name = kind
    for one in found:
      count = f"{one['equations']:,}{', empty caches' if one['cold'] else ''}"
      each = (
        1e6 * statistics.median(one[variant]) / one["equations"]
        for variant in ("plain", "autocast")
      )
      cells = [*(f"{x:.0f}" for x in each), str(ratio(one["autocast"], one["plain"]))]
      rows.append([name, count, *cells])
      name = ""
  return table(rows)


def tracing_ratios(results: Figures) -> str:
  """Returns how much longer tracing takes, by kind, for few and many equations."""
  kinds = results["tracing"]["kinds"]
  warm = {kind: [one for one in found if not one["cold"]] for kind, found in kinds.items()}
  picked = {kind: (found[0], found[len(found) // 2], found[-1]) for kind, found in warm.items()}
  rows = [["traced", "100 equations", "1,000", "10,000", "100, empty caches"]]
  for kind, found in kinds.items():
    shown = (*picked[kind], *(one for one in found if one["cold"]))
    rows.append([kind, *(f"{ratio(x['autocast'], x['plain']).median:.2f}" for x in shown)])
  return table(rows)


def tools_ratios(results: Figures) -> str:
  """Returns the matmuls in low precision and the errors of gradients under each tool."""
  first = _half_types(results, "tools")[0]
  *_, (where, tool) = columns(results, first).values()
  here = results["tools"][first]["here"]
  rows = [["function", "matmuls in low precision", "gradient error"]]
  for name, found in here["programs"].items():
    other = where["programs"][name]
    ones = [found["by hand"], found["mpjax"]]
    ones += [other[tool]] if "failed" not in other[tool] else []
    shares = ", ".join(f"{one['gradient_half']:.0%}" for one in ones[1:])
    rows.append([name, shares, ", ".join(f"{one['error']:.1e}" for one in ones)])
  return table(rows)


def columns(results: Figures, half: str) -> dict[str, tuple[Figures, str]]:
  """Returns for each column what was measured where, and the tool."""
  found = results["tools"][half]
  here = found["here"]
  version = here["environment"]["versions"]["jax"]
  made = {"by hand": (here, "by hand"), "mpjax": (here, "mpjax")}
  made[f"jaxamp, JAX {version}"] = (here, "jaxamp")
  if "there" in found:
    older = found["there"]["environment"]["versions"]["jax"]
    made[f"jaxamp, JAX {older}"] = (found["there"], "jaxamp")
  return made


def tools(results: Figures) -> str:
  """Returns for each half type what each tool makes of each program, where it made something."""
  pieces = []
  for half in _half_types(results, "tools"):
    rows = [["function", "", "forward in low precision", "gradient in low precision"]]
    rows[0] += ["gradient error", "trace / float32"]
    rows[0] += ["kept for backward", "converts, HLO", "dots, HLO"]
    made = columns(results, half)
    for name in next(iter(made.values()))[0]["programs"]:
      label = name
      for heading, (where, tool) in made.items():
        figures = where["programs"][name]
        one = figures[tool]
        if "failed" not in one:
          hand = figures["by hand"]["compiled"]
          rows.append([label, heading, *_cells(one, figures["float32"], hand)])
          label = ""
    pieces += [f"**{half}**", table(rows, 2)]
  return "\n\n".join(pieces)


def _cells(one: Figures, plain: Figures, hand: Figures) -> list[str]:
  counts = one["compiled"]
  converts = str(counts["convert"])
  dots = counts["dot"] + counts["convolution"] + counts["custom_call"]
  if counts is not hand:
    converts += f" ({hand['convert']})"
  return [
    f"{one['forward_half']:.0%}",
    f"{one['gradient_half']:.0%}",
    f"{one['error']:.1e}",
    str(ratio(one["trace_seconds"], plain["trace_seconds"])),
    f"{size(one['saved_bytes'])} ({size(plain['saved_bytes'])})",
    converts,
    str(dots),
  ]


def failures(results: Figures) -> str:
  """Returns what each tool failed on: an error, matmuls left in float32, too large an error."""
  pieces = []
  for half in _half_types(results, "tools"):
    made = columns(results, half)
    rows = [["function", *made]]
    for name in next(iter(made.values()))[0]["programs"]:
      cells = [_failure(where["programs"][name][tool], name, half) for where, tool in made.values()]
      rows.append([name, *cells])
    pieces += [f"**{half}**", table(rows, 1 + len(made))]
  return "\n\n".join(pieces)


def _failure(one: Figures, name: str, half: str) -> str:
  if "failed" in one:
    return one["failed"]
  bound = BOUNDS[half] * (2 if PROGRAMS[name].attention else 1)
  wrong = []
  shares = {"forward": 1 - one["forward_half"], "gradient": 1 - one["gradient_half"]}
  if max(shares.values()) > 5e-4:
    wrong.append("in float32: " + ", ".join(f"{x:.0%} {what}" for what, x in shares.items()))
  if not one["error"] <= bound:
    wrong.append(f"error {one['error']:.1e}, bound {bound:.1e}")
  return "; ".join(wrong) or "-"


def conditions(results: Figures) -> str:
  """Returns under what the figures were taken, as sentences."""
  parts = [results[part] for part in ("memory", "tracing", "tools")]
  where, rounds = parts[-1]["environment"], parts[-1]["settings"]["rounds"]
  first = next(iter(_half_types(results, "tools")))
  other = results["tools"][first].get("there")
  there = f"; jaxamp with {_versions(other)} too" if other else ""
  loads = ", ".join(str(part["environment"]["load_average"][0]) for part in parts)
  return (
    f"{taken(where)}{there}; memory of {parts[0]['environment']['date']}; "
    f"{rounds} rounds, alternating (of tracing more than 1,000 equations half as many); medians of "
    f"the ratios of each round. Load average at the start of each part: {loads}."
  )


def _versions(part: Figures) -> str:
  return ", ".join(f"{k} {v}" for k, v in part["environment"]["versions"].items() if k != "numpy")


PARTS: Mapping[str, Callable[[Figures], str]] = {
  "conditions": conditions,
  "memory": memory,
  "tracing": tracing_ratios,
  "tools": tools_ratios,
}
"""What the page has."""
EVERYTHING = (memory, memory_without_scopes, tracing, tools, failures, conditions)


def updated(page: str, results: Figures) -> str:
  """Returns the text of the page with its tables made from the recorded figures."""
  for name, make in PARTS.items():
    page = replaced(page, name, make(results))
  return page


if __name__ == "__main__":
  recorded = read(RECORDED)
  if "--show" in sys.argv:
    print("\n\n".join(make(recorded) for make in EVERYTHING))
  else:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), recorded), encoding="utf-8")
