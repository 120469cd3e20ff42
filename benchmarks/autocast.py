"""Measure autocast: bytes for the backward pass, time of tracing, and other ways to the same.

  make bench SCRIPT=autocast

Writes all figures as JSON; `autocast_report.py` makes the tables of docs/autocast_measured.md of
what is recorded. jaxamp is measured twice: in this environment, and by an interpreter that has the
newest JAX it runs with, if one is named.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import autocast_memory
import autocast_tools
import autocast_tracing
import measure
import tables
from autocast_programs import PROGRAMS
from rich.console import Console

import mpjax

ROOT = pathlib.Path(__file__).parent.parent
OUT = ROOT / "out" / "autocast.json"
HALVES = ("bfloat16", "float16")
PARTS = ("memory", "tracing", "tools")
LONG = 1000
"""Equations. What has more takes long to trace, and varies less: half the rounds are enough."""


def elsewhere(python: pathlib.Path, settings: autocast_tools.Settings, name: str) -> dict[str, Any]:
  """Returns what jaxamp and casts by hand make of one program under another interpreter."""
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "figures.json"
    script = pathlib.Path(autocast_tools.__file__)
    options = {"--half": settings.half, "--size": str(settings.size), "--names": name}
    options |= {"--rounds": str(settings.rounds), "--out": str(out)}
    pairs = [text for pair in options.items() for text in pair]
    command = [str(python), str(script), "--tools", "by hand", "jaxamp", *pairs]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return measure.read(out)


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns the figures of several programs as one, with the environment of the first."""
  return {
    "environment": parts[0]["environment"],
    "programs": {k: v for part in parts for k, v in part["programs"].items()},
  }


Step = tuple[str, Callable[[], Any]]


def _tools(
  names: Sequence[str], settings: autocast_tools.Settings, python: pathlib.Path | None
) -> list[Step]:
  here = functools.partial(autocast_tools.main, tuple(autocast_tools.TOOLS), settings)
  steps: list[Step] = [(name, functools.partial(here, [name])) for name in names]
  if python is not None:
    there = functools.partial(elsewhere, python, settings)
    steps += [(f"{name}, other JAX", functools.partial(there, name)) for name in names]
  return steps


def main(
  rounds: int = 11,
  size: int = 64,
  names: Sequence[str] = tuple(PROGRAMS),
  kinds: Sequence[str] = tuple(autocast_tracing.KINDS),
  counts: Sequence[int] = autocast_tracing.COUNTS,
  models: str = "full",
  halves: Sequence[str] = HALVES,
  parts: Sequence[str] = PARTS,
  jaxamp_python: pathlib.Path | None = None,
  out: pathlib.Path = OUT,
  console: Console | None = None,
) -> dict[str, Any]:
  """Measures, writes JSON, and returns what it wrote; parts left out stay as they are there."""
  settings = {"rounds": rounds, "size": size, "models": models, "halves": list(halves)}
  results: dict[str, Any] = measure.read(out) if out.exists() else {}
  console = console or Console()
  with tables.progress_bar(console) as bar:

    def run(title: str, steps: Sequence[Step]) -> list[Any]:
      task = bar.add_task(title, total=len(steps))
      found = []
      for name, step in steps:
        bar.update(task, description=f"{title}: {name}")
        found.append(step())
        bar.advance(task)
      bar.update(task, description=title)
      return found

    for part in parts:
      own, packages = {"mpjax": mpjax.__version__}, ("jax", "jaxlib", "flax", "numpy")
      results[part] = {"environment": measure.environment(own, packages), "settings": settings}
    if "memory" in parts:
      for half in halves:
        models_, plain = run(f"memory, {half}", _memory(models, size, half, names))
        results["memory"][half] = {"models": models_, "programs": plain}
    if "tracing" in parts:
      results["tracing"]["kinds"] = {
        kind: run(f"tracing, {kind}", _tracing(kind, counts, rounds)) for kind in kinds
      }
    if "tools" in parts:
      for half in halves:
        given = autocast_tools.Settings(half=half, size=size, rounds=rounds)
        found = run(f"tools, {half}", _tools(names, given, jaxamp_python))
        here, there = found[: len(names)], found[len(names) :]
        results["tools"][half] = {"here": merged(here)}
        if there:
          results["tools"][half]["there"] = merged(there)
  measure.write(out, results)
  console.print(f"All figures: {out}")
  return measure.read(out)


def _memory(models: str, size: int, half: str, names: Sequence[str]) -> list[Step]:
  def as_dicts(found: Mapping[str, Mapping[str, Any]]) -> Any:
    return {name: {k: v._asdict() for k, v in each.items()} for name, each in found.items()}

  return [
    ("models", lambda: as_dicts(autocast_memory.compare_models(models, half))),
    ("programs", lambda: as_dicts(autocast_memory.compare_programs(size, half, names))),
  ]


def _tracing(kind: str, counts: Sequence[int], rounds: int) -> list[Step]:
  compare = functools.partial(autocast_tracing.compare, kind)
  times = {count: rounds if count <= LONG else (rounds + 1) // 2 for count in counts}
  warm = [(f"{c}", functools.partial(compare, c, r)) for c, r in times.items()]
  return [*warm, ("cold", functools.partial(compare, counts[0], rounds, cold=True))]


def arguments() -> dict[str, Any]:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--rounds", type=int, default=11)
  parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
  parser.add_argument("--size", type=int, default=64, help="width of the plain programs")
  parser.add_argument("--names", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
  parser.add_argument(
    "--jaxamp-python", type=pathlib.Path, help="an interpreter that has jaxamp and an older JAX"
  )
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  return vars(parser.parse_args())


if __name__ == "__main__":
  main(**arguments())
