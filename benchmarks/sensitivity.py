"""How well `mpjax.sensitivity` predicts errors, for the programs and models of other benchmarks.

  PYTHONPATH=. python benchmarks/sensitivity.py
  PYTHONPATH=. python benchmarks/sensitivity.py --only "Linen MLP" SIREN --dtypes bfloat16
  PYTHONPATH=. python benchmarks/sensitivity.py --page  # the table of docs/sensitivity_measured.md

The programs are those of `hard/`, in which low precision is delicate, and the models those of
`accuracy_models.py`, which are healthy. Each is the gradient of a loss under a policy. *Measured*
is the relative error with all roundings made, one operation after the other, as on a device whose
matmuls accumulate in float32. *Compiled* is the error of the jitted gradient on this machine: CPUs
accumulate some matmuls in bfloat16, which adds to it. *Cured* are programs with a rounding above
the threshold, with all changes that the report advises.
"""

import argparse
import contextlib
import io
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import hard_programs
import jax
import measure
import tables
from accuracy_models import MODELS
from hard import PROGRAMS
from rich.console import Console
from rich.table import Table

import mpjax
from mpjax._diagnose.sensitivity.report import THRESHOLD

OUT = pathlib.Path(__file__).parent / "results" / "sensitivity" / "cpu.json"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "sensitivity_measured.md"
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
DTYPES = ("bfloat16", "float16")


def cases(dtype: str) -> Iterator[tuple[str, str, Callable[..., Any], Callable[[], Any]]]:
  """Yields the kind and the name of each case, its gradient, and a function that draws inputs."""
  for name, program in PROGRAMS.items():
    gradient = hard_programs.gradient_of(program, "policy", dtype)
    yield "delicate", name, gradient, lambda program=program: hard_programs.drawn(program, 1)[0]
  for name, model in MODELS.items():
    yield "healthy", name, jax.grad(model.loss("policy", dtype)), lambda model=model: model.draw(0)


def measured(gradient: Callable[..., Any], draw: Any) -> dict[str, float]:
  """Returns what the report says of a gradient, and the error of the compiled gradient."""
  with contextlib.redirect_stderr(io.StringIO()):
    report = mpjax.sensitivity(gradient)(*draw)
  compiled = jax.tree.leaves(jax.device_get(jax.jit(gradient)(*draw)))
  exact = report.exact
  found = {
    "predicted": report.predicted,
    "measured": report.measured,
    "compiled": hard_programs.error(compiled, exact),
    "decisions": report.by_decisions,
    "amplification": max((row.amplification for row in report.roundings), default=0.0),
    "roundings": len(report.roundings),
  }
  if report.cures:
    found["predicted_with_cures"] = report.predicted_with_cures
    found["measured_with_cures"] = report.measured_with_cures
    found["cures"] = len(report.cures)
  return found


def main(
  only: Sequence[str] = (),
  dtypes: Sequence[str] = DTYPES,
  out: pathlib.Path = OUT,
  console: Console | None = None,
) -> dict[str, Any]:
  """Measures all cases, writes after each, and prints a table. Cases in the file are kept."""
  console = console or Console(width=110)
  results = measure.read(out) if out.exists() else {"cases": {}}
  results["environment"] = measure.environment({"mpjax": mpjax.__version__}, PACKAGES)
  results["threshold"] = THRESHOLD
  with tables.progress_bar(console, 26) as progress:
    for dtype in dtypes:
      chosen = [each for each in cases(dtype) if not only or each[1] in only]
      bar = progress.add_task(dtype, total=len(chosen))
      for kind, name, gradient, draw in chosen:
        progress.update(bar, description=f"{name}, {dtype}")
        case = results["cases"].setdefault(name, {"kind": kind})
        case[dtype] = measured(gradient, draw())
        measure.write(out, results)
        progress.advance(bar)
  for dtype in dtypes:
    show(results, dtype, console)
  return results


def ratio(case: Mapping[str, Any]) -> float:
  """Returns the predicted error over the measured one."""
  return case["predicted"] / case["measured"] if case["measured"] else math.nan


def agreeing(results: Mapping[str, Any], dtype: str) -> tuple[int, int]:
  """Returns how many predictions are within a factor of 2 of the measured error, of how many."""
  ratios = [ratio(each[dtype]) for each in results["cases"].values() if dtype in each]
  return sum(0.5 <= each <= 2 for each in ratios), len(ratios)


def rows(results: Mapping[str, Any], dtype: str) -> list[list[str]]:
  """Returns the table of one dtype, the first row of which has the names of the columns."""
  found = [["program", "predicted", "measured", "compiled", "amplified", "with cures"]]
  for name, case in results["cases"].items():
    if dtype not in case:
      continue
    one = case[dtype]
    cured = one.get("measured_with_cures")
    found.append(
      [
        name,
        *(f"{one[key]:.1e}" for key in ("predicted", "measured", "compiled")),
        f"{one['amplification']:.1f}",
        "" if cured is None else f"{cured:.1e} ({one['predicted_with_cures']:.1e} predicted)",
      ]
    )
  return found


def show(results: Mapping[str, Any], dtype: str, console: Console) -> None:
  """Prints the table of one dtype."""
  heading, *others = rows(results, dtype)
  table = Table(*heading, title=f"Errors of gradients in {dtype}")
  for row in others:
    table.add_row(*row)
  console.print(table)
  good, count = agreeing(results, dtype)
  console.print(f"{good} of {count} predictions are within a factor of 2 of the measured error.")


def write_page(results: Mapping[str, Any], page: pathlib.Path = PAGE) -> None:
  """Writes the tables of the page from the record."""
  text = page.read_text()
  for dtype in DTYPES:
    good, count = agreeing(results, dtype)
    sentence = f"In {dtype}, {good} of {count} predictions are within a factor of 2."
    text = tables.replaced(text, dtype, f"{sentence}\n\n{tables.table(rows(results, dtype))}")
  page.write_text(text)


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--only", nargs="+", default=(), help="names of programs and models")
  parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
  parser.add_argument("--out", type=pathlib.Path, default=OUT, help="where the figures go")
  parser.add_argument("--page", action="store_true", help="writes the page from the record")
  given = vars(parser.parse_args())
  if given.pop("page"):
    write_page(measure.read(given["out"]))
  else:
    main(**given)
