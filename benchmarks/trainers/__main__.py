"""Run trainers of other projects in float32, in their own bfloat16, and under policies.

  make trainers ARGS="--only tunix brax --variants own_bfloat16 mpjax_bfloat16"
  make trainers ARGS=--page  # writes the tables of docs/trainers.md

Each folder here is a trainer, with a pinned environment of its own. `requirements.txt` lists all of
its packages. Examples are not in the wheels of their projects, so `source.txt` names an sdist that
has them. `run.py` puts the policy in from outside, except in Flax's Gemma, whose users edit the
example. If a trainer cannot be installed or run, the reason is recorded. Trainers that `--only`
leaves out keep their recorded results.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import measure
import tables
from rich.console import Console

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parent.parent
BUILD = ROOT / "build" / "trainers"
RECORDED = FOLDER.parent / "results" / "trainers" / "cpu.json"
PAGE = ROOT / "docs" / "trainers.md"

VARIANTS = ("float32", "own_bfloat16", "mpjax_bfloat16", "mpjax_float16")
SHARDED = ("own_bfloat16", "mpjax_bfloat16")
"""The variants that also run on two devices, for trainers that shard."""

SECONDS = 1200


class Failed(Exception):
  """A process failed. The text is the end of what it wrote."""


def trainers() -> dict[str, pathlib.Path]:
  """Returns the folders by the names of the trainers."""
  return {path.parent.name: path.parent for path in sorted(FOLDER.glob("*/run.py"))}


def environment(name: str, python: str) -> pathlib.Path:
  """Returns the interpreter of a trainer's environment, which is made unless it is up to date.

  Raises:
    Failed: a package cannot be installed.
  """
  place = BUILD / name
  wanted = [
    p for p in (FOLDER / name / f for f in ("requirements.txt", "source.txt")) if p.exists()
  ]
  stamp = hashlib.sha256(b"".join(p.read_bytes() for p in wanted)).hexdigest()
  installed = place / "installed"
  interpreter = place / "venv" / "bin" / "python"
  if installed.exists() and installed.read_text(encoding="utf-8") == stamp:
    return interpreter
  shutil.rmtree(place, ignore_errors=True)
  place.mkdir(parents=True)
  _run([python, "-m", "venv", str(place / "venv")])
  pip = [str(interpreter), "-m", "pip", "--quiet", "--disable-pip-version-check"]
  _run([*pip, "install", "--no-deps", "--requirement", str(FOLDER / name / "requirements.txt")])
  source = FOLDER / name / "source.txt"
  if source.exists():
    package = source.read_text(encoding="utf-8").partition("==")[0]
    archives = ["--no-deps", "--no-binary", package, "--dest", str(place), "--requirement"]
    _run([*pip, "download", *archives, str(source)])
    (archive,) = place.glob("*.tar.gz")
    with tarfile.open(archive) as files:
      files.extractall(place, filter="data")
    archive.unlink()
    (unpacked,) = (p for p in place.iterdir() if p.is_dir() and p.name != "venv")
    unpacked.rename(place / "source")
  installed.write_text(stamp, encoding="utf-8")
  return interpreter


def figures(name: str, python: pathlib.Path, variant: str, devices: int = 1) -> dict[str, Any]:
  """Returns what one variant of a trainer did, in a process of its own."""
  out = BUILD / name / f"{variant}_{devices}.json"
  out.unlink(missing_ok=True)
  paths = [ROOT, FOLDER, FOLDER.parent]
  here = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, paths))}
  script = [str(python), str(FOLDER / name / "run.py")]
  arguments = ["--variant", variant, "--fsdp", str(devices), "--out", str(out)]
  try:
    # Trainers write logs and checkpoints where they run.
    _run([*script, *arguments], here, BUILD / name)
    return json.loads(out.read_text(encoding="utf-8"))
  except Failed as error:
    return {"not_run": str(error)}


def _run(
  command: Sequence[str], more: Mapping[str, str] | None = None, folder: pathlib.Path = ROOT
) -> None:
  try:
    done = subprocess.run(
      command,
      cwd=folder,
      env={**os.environ, **(more or {})},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=SECONDS,
      check=False,
    )
  except subprocess.TimeoutExpired:
    raise Failed(f"took more than {SECONDS} seconds") from None
  if done.returncode:
    lines = done.stdout.strip().splitlines()
    # Paths of this machine are not for a record.
    raise Failed("\n".join(lines[-3:]).replace(f"{ROOT}/", ""))


def pins(name: str) -> dict[str, str]:
  """Returns the pinned versions of a trainer's packages."""
  text = (FOLDER / name / "requirements.txt").read_text(encoding="utf-8")
  lines = (line.partition("#")[0].strip() for line in text.splitlines())
  return dict(line.split("==") for line in lines if line)


def ratio(results: Mapping[str, Any], figure: str) -> float | None:
  """Returns a figure in bfloat16 under a policy, divided by that of the trainer's own bfloat16."""
  ours, own = results["mpjax_bfloat16"].get(figure), results["own_bfloat16"].get(figure)
  return ours / own if ours is not None and own else None


def table_of_losses(recorded: Mapping[str, Any]) -> str:
  """Returns a row for each trainer in Markdown: the last loss of each variant."""
  rows = [["trainer", "float32", "own bfloat16", "mpjax bfloat16", "mpjax float16"]]
  for name, one in recorded.items():
    if "not_run" in one:
      rows.append(_not_run(name, one, rows[0]))
      continue
    losses = [_variant(one, v).get("losses", [None])[-1] for v in VARIANTS]
    rows.append([name, *map(_cell, losses)])
  return tables.table(rows)


def table_of_programs(recorded: Mapping[str, Any]) -> str:
  """Returns a row for each trainer in Markdown: low shares, bytes and counts."""
  heading = "trainer, low share (own -> mpjax), leaks, saved bytes, temporaries, same counts"
  rows = [[*heading.split(", "), "skipped"]]
  for name, one in recorded.items():
    if "not_run" in one:
      rows.append(_not_run(name, one, rows[0]))
      continue
    exact, own, ours, half = (_variant(one, v) for v in VARIANTS)
    shares = f"{_cell(own.get('low_share'), 2)} -> {_cell(ours.get('low_share'), 2)}"
    results = {"own_bfloat16": own, "mpjax_bfloat16": ours}
    ratios = [_cell(ratio(results, figure), 2) for figure in ("saved_bytes", "temporary_bytes")]
    base = own if "counts" in own else exact
    same = "yes" if base.get("counts") == ours.get("counts") else "no"
    same = same if ours else "-"
    leaks = str(len(ours.get("leaks", ())))
    rows.append([name, shares, leaks, *ratios, same, str(half.get("skipped"))])
  return tables.table(rows)


def write_page(page: pathlib.Path = PAGE) -> None:
  """Writes the tables of the page from the record."""
  recorded = measure.read(RECORDED)["trainers"]
  text = page.read_text(encoding="utf-8")
  text = tables.replaced(text, "losses", table_of_losses(recorded))
  text = tables.replaced(text, "programs", table_of_programs(recorded))
  page.write_text(text, encoding="utf-8")


def _variant(one: Mapping[str, Any], variant: str) -> Mapping[str, Any]:
  # `--variants` may have left some out.
  return one["variants"].get(variant, {})


def _not_run(name: str, one: Mapping[str, Any], heading: Sequence[str]) -> list[str]:
  return [name, one["not_run"].splitlines()[-1], *[""] * (len(heading) - 2)]


def _cell(x: float | None, digits: int = 4) -> str:
  return "-" if x is None else f"{x:.{digits}f}"


def main(
  names: Sequence[str],
  variants: Sequence[str] = VARIANTS,
  python: str = sys.executable,
  out: pathlib.Path = RECORDED,
  console: Console | None = None,
) -> dict[str, Any]:
  """Runs the trainers, writes JSON, prints the tables, and returns the results."""
  console = console or Console()
  results = measure.read(out) if out.exists() else {"trainers": {}}
  results["environment"] = measure.environment()
  with tables.progress_bar(console) as bar:
    task = bar.add_task("trainers", total=len(names) * (1 + len(variants) + len(SHARDED)))
    for name in names:
      one = results["trainers"].setdefault(name, {"variants": {}, "two_devices": {}})
      one.pop("not_run", None)
      one["versions"] = pins(name)
      bar.update(task, description=f"{name}, install")
      try:
        interpreter = environment(name, python)
      except Failed as error:
        results["trainers"][name] = {"versions": pins(name), "not_run": str(error)}
        bar.advance(task, 1 + len(variants) + len(SHARDED))
        continue
      bar.advance(task)
      for variant in variants:
        bar.update(task, description=f"{name}, {variant}")
        one["variants"][variant] = figures(name, interpreter, variant)
        bar.advance(task)
      for variant in SHARDED:
        if variant in variants:
          bar.update(task, description=f"{name}, {variant}, two devices")
          one["two_devices"][variant] = figures(name, interpreter, variant, devices=2)
        bar.advance(task)
      measure.write(out, results)
  results["trainers"] = dict(sorted(results["trainers"].items()))
  measure.write(out, results)
  for table in (table_of_losses, table_of_programs):
    console.print(table(results["trainers"]), soft_wrap=True, highlight=False)
  return results


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--only", nargs="+", default=list(trainers()), choices=list(trainers()))
  parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
  parser.add_argument("--python", default=sys.executable, help="Python 3.12 for the environments")
  parser.add_argument("--out", type=pathlib.Path, default=RECORDED)
  parser.add_argument("--page", action="store_true", help="write the tables of docs/trainers.md")
  given = parser.parse_args()
  if given.page:
    write_page()
    sys.exit()
  main(given.only, given.variants, given.python, given.out)
