"""Draws generated mutants, and runs the tests that execute their lines until one of them fails.

python -m tests.mutations.generated                               # the recorded draw
python -m tests.mutations.generated --draw 50 mpjax/_diagnose  # 50 of another folder
python -m tests.mutations.generated --draw 0 --only adjust        # all with this text in their name

One run of `make test` with coverage says which tests execute which lines. Each mutant is applied
to a copy of the project. Of the tests that execute the mutated lines, those of the module's own
test file run first, then the others, fast ones first, until one fails: the mutant is killed. A
change at module level runs on import: then the tests that run anything of the module are tried.
A program that does not import, or does not end, is killed too. The exit status is 0 if no mutant
survived.

Results are kept in `.cache/mutations`: a run that was interrupted goes on where it was, and a run
after a change tries again what the change may have decided.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import coverage
from rich.console import Console
from rich.table import Table

from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.generate import Mutant, mutants, mutated
from tests.mutations.run import (
  ROOT,
  applied,
  copy_project,
  in_copies,
  project_files,
  read_report,
  reported_to,
  run_tests,
)
from tests.mutations.table import own_tests

CACHE = ROOT / ".cache" / "mutations"

RECORDED = (
  *("mpjax/_optim", "mpjax/_core", "mpjax/_policy", "mpjax/_io"),
  *("mpjax/_jaxpr/primitives.py", "mpjax/_jaxpr/reader.py", "mpjax/_jaxpr/locations.py"),
  "mpjax/_autocast/control_flow.py",
)
"""The code that a draw without arguments mutates."""

FIRST = 40
"""Tests of the first attempt. Most mutants are killed by these, and collecting more takes time."""

LIMIT = 90
"""Seconds for an attempt, in addition to 20 times those of its tests."""


class Result(NamedTuple):
  """How it ended for one mutant."""

  killed_by: str | None  # the id of a test, or "import" or "time"; None of one that survived
  tests: int  # how many execute the mutated lines
  digest: str  # of the files on which the result depends


def digest(files: Iterable[str]) -> str:
  """Returns a hash of the names and the content of files of the project."""
  content = hashlib.sha256()
  for name in sorted(files):
    content.update(f"{name}\0".encode() + (ROOT / name).read_bytes())
  return content.hexdigest()[:16]


class Suite:
  """The tests of `make test`, and which of them execute which lines."""

  def __init__(self, base: pathlib.Path, jobs: int) -> None:
    python = [name for name in project_files() if name.endswith(".py")]
    self.test_files = {n for n in python if pathlib.Path(n).name.startswith("test_")}
    support = [name for name in python if name.startswith("tests/")]
    self.rest = digest(n for n in support if n not in self.test_files)
    self.library = digest(name for name in python if name.startswith("mpjax/"))
    folder = CACHE / f"contexts-{self.library}-{self.rest}"
    if not (folder / "digests.json").exists():
      self._record(base, folder, jobs)
    self.lines = coverage.CoverageData(str(folder / "lines"))
    self.lines.read()
    report = read_report(folder / "report.xml")
    recorded = json.loads((folder / "digests.json").read_text())
    same = {name for name in self.test_files if recorded.get(name) == digest([name])}
    self.seconds = {
      test: seconds
      for test, (outcome, seconds) in report.items()
      if outcome == "passed" and test.partition("::")[0] in same
    }
    outside = ("tests/check/", "tests/lint/")
    self.changed = sorted(n for n in self.test_files - same if not n.startswith(outside))

  def _record(self, base: pathlib.Path, folder: pathlib.Path, jobs: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.mutations.contexts", f"--contexts={folder}"]
    command += ["-n", str(jobs), "--dist", "worksteal", *reported_to(folder / "report.xml")]
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(base)}
    # The other cores of coverage cannot change the context while they run.
    environment["COVERAGE_CORE"] = "ctrace"
    if subprocess.run(command, cwd=base, env=environment, check=False).returncode:
      sys.exit("the tests do not pass without any mutation")
    combined = coverage.Coverage(data_file=str(folder / "lines"), config_file=False)
    combined.combine([str(folder)])
    digests = {name: digest([name]) for name in self.test_files}
    (folder / "digests.json").write_text(json.dumps(digests))

  def tests_of(self, mutant: Mutant, source: str) -> list[str]:
    """Returns the ids of the tests that can notice a mutant, the most promising first."""
    by_line = {
      line: set(contexts) & self.seconds.keys()
      for line, contexts in self.lines.contexts_by_lineno(mutant.file).items()
    }
    first, last = mutant.lines
    tests = set().union(*(by_line.get(line, set()) for line in range(first, last + 1)))
    if mutant.runs_on_import:
      tests = set().union(*by_line.values()) if "def " in source else set(self.seconds)
    own = f"{own_tests(mutant.file)}::"
    return sorted(tests, key=lambda test: (not test.startswith(own), self.seconds[test], test))

  def digest_of(self, killed_by: str | None) -> str:
    """Returns the digest of what decided a result: of a survivor, all tests."""
    files = self.test_files if killed_by is None else {killed_by.partition("::")[0]}
    return f"{self.library}-{self.rest}-{digest(files & self.test_files)}"


def try_mutant(suite: Suite, root: pathlib.Path, mutant: Mutant) -> Result:
  """Runs tests on the copy in `root`, which is as before afterwards."""
  file = root / mutant.file
  source = file.read_text(encoding="utf-8")
  tests = suite.tests_of(mutant, source)
  killed_by = None
  with applied(file, mutated(mutant, source)):
    for attempt in filter(None, (tests[:FIRST], suite.changed, tests[FIRST:])):
      killed_by = killed_by or _killed_by(root, suite, attempt)
  return Result(killed_by, len(tests), suite.digest_of(killed_by))


def _killed_by(root: pathlib.Path, suite: Suite, tests: list[str]) -> str | None:
  arguments = root / "tests.txt"
  arguments.write_text("\n".join(tests))
  limit = LIMIT + 20 * sum(suite.seconds.get(test, 10) for test in tests)
  try:
    outcomes, _ = run_tests(root, [f"@{arguments}"], limit, "-x")
  except subprocess.TimeoutExpired:
    return "time"
  if not outcomes:
    return "import"
  wrong = [test for test, outcome in outcomes.items() if outcome in ("failure", "error")]
  return wrong[0] if wrong else None


def all_mutants(paths: Iterable[str]) -> list[Mutant]:
  """Returns the mutants of files and folders of the project, in the order of their names."""
  files = {
    file.relative_to(ROOT).as_posix()
    for path in paths
    for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
  }
  return [m for f in sorted(files) for m in mutants(f, (ROOT / f).read_text(encoding="utf-8"))]


def draw(paths: Iterable[str], count: int, seed: int, only: str) -> list[Mutant]:
  """Returns `count` mutants of files and folders (0: all) whose names contain the text `only`.

  A hash of the name and the seed decides: a change of the code hardly changes the draw.
  """
  found = [mutant for mutant in all_mutants(paths) if only in mutant.name]
  found.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())
  return found[: count or None]


def try_all(
  console: Console, base: pathlib.Path, suite: Suite, drawn: list[Mutant], jobs: int
) -> dict[Mutant, Result]:
  """Returns the result of each mutant that is not equivalent; those of before where they last."""
  path = CACHE / "results.json"
  known = {n: Result(*r) for n, r in json.loads(path.read_text()).items()} if path.exists() else {}
  results = {
    mutant: known[mutant.name]
    for mutant in drawn
    if mutant.name in known
    and known[mutant.name].digest == suite.digest_of(known[mutant.name].killed_by)
  }
  left = [m for m in drawn if m not in results and m.name not in EQUIVALENT]
  attempt = functools.partial(try_mutant, suite)
  for mutant, result in in_copies(console, base, jobs, left, attempt):
    results[mutant] = known[mutant.name] = result
    path.write_text(json.dumps(known, indent=1))
  return results


def report(console: Console, drawn: list[Mutant], results: Mapping[Mutant, Result]) -> bool:
  """Prints the survivors and the count; returns whether there are none."""
  survivors = {m: r for m, r in results.items() if r.killed_by is None}
  table = Table("survivor", "line", "tests that execute it")
  for mutant, result in sorted(survivors.items()):
    table.add_row(mutant.name, str(mutant.lines[0]), str(result.tests))
  if survivors:
    console.print(table, markup=False, highlight=False)
  equivalent = [mutant.name for mutant in drawn if mutant.name in EQUIVALENT]
  for name in equivalent:
    console.print(f"equivalent: {name}: {EQUIVALENT[name]}", markup=False, highlight=False)
  console.print(
    f"{len(drawn)} drawn: {len(results) - len(survivors)} killed, {len(survivors)} survived, "
    f"{len(equivalent)} equivalent"
  )
  return not survivors


def main() -> int:
  """Tries the mutants; returns the exit status."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("paths", nargs="*", help="files and folders (default: the recorded ones)")
  parser.add_argument("--draw", type=int, default=75, help="how many (default: 75; 0: all)")
  parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
  parser.add_argument("--only", default="", help="only mutants with this text in their name")
  parser.add_argument("--jobs", type=int, default=2, help="processes at the same time (default: 2)")
  arguments = parser.parse_args()
  paths = arguments.paths or RECORDED
  drawn = draw(paths, arguments.draw, arguments.seed, arguments.only)
  console = Console()
  with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
    base = pathlib.Path(folder).resolve() / "project"
    copy_project(base)
    suite = Suite(base, arguments.jobs)
    results = try_all(console, base.parent, suite, drawn, arguments.jobs)
  return int(not report(console, drawn, results))


if __name__ == "__main__":
  sys.exit(main())
