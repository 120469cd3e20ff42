"""Breaks our own code in many ways, one at a time, and sees whether the test named for each fails.

make mutations                                 # all, two at a time
python -m tests.mutations.run --only 7 17a     # some of them
python -m tests.mutations.run --jobs 1

The project is copied to a temporary directory, and each mutation of `table.py` is applied to a
copy; nothing here is changed. A mutation names a function, and an expression or
statements to replace in it; they are looked for in the syntax tree, not in the text. First the
named tests run on an unchanged copy, where all must pass. Then a mutation is caught if its test
fails there, in a process of its own, within a minute; that another test fails does not count, nor
does a program that no longer imports. The exit status is 0 if every mutation was caught.
"""

import argparse
import ast
import concurrent.futures
import contextlib
import enum
import functools
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutations.table import MUTATIONS, Mutation

ROOT = pathlib.Path(__file__).parents[2]

DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

LIMIT = 60
"""Seconds for one test, start of Python and compilation included."""


class Verdict(enum.Enum):
  """How the test of a mutation ended."""

  CAUGHT = "caught"
  MISSED = "MISSED"
  BROKEN = "DOES NOT RUN"  # not even the import works, or a fixture fails: shows nothing
  SLOW = "TOO SLOW"


class Result(NamedTuple):
  """What came of one mutation."""

  verdict: Verdict
  seconds: float
  output: str  # of pytest


def project_files(root: pathlib.Path = ROOT) -> list[str]:
  """Returns the files that git tracks or would track, as they are now."""
  command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
  if done.returncode:
    sys.exit(f"the mutations need a git checkout, to know which files to copy:\n{done.stderr}")
  return [name for name in done.stdout.split("\0") if (root / name).is_file()]


def copy_project(target: pathlib.Path) -> None:
  """Copies the project to `target`."""
  for name in project_files():
    file = target / name
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / name, file)


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
  """Yields the nodes in `scope`, without the content of functions and classes defined there."""
  for node in ast.iter_child_nodes(scope):
    yield node
    if not isinstance(node, DEFINITIONS):
      yield from own_nodes(node)


def nodes_to_search(tree: ast.Module, path: str) -> list[ast.AST]:
  """Returns the nodes of the function that `path` names ("Class.method"), nested ones included.

  If it is empty, those at module level. A ValueError if no function has that name, or several have.
  """
  if not path:
    return [tree, *(node for node in own_nodes(tree) if not isinstance(node, DEFINITIONS))]
  scope: ast.AST = tree
  for name in path.split("."):
    definitions = (node for node in own_nodes(scope) if isinstance(node, DEFINITIONS))
    found = [node for node in definitions if node.name == name]
    if len(found) != 1:
      raise ValueError(f"{name} is defined {len(found)} times")
    scope = found[0]
  return list(ast.walk(scope))


def same(ours: list, old: list) -> bool:
  """Returns whether two lists of nodes are the same code."""
  return len(ours) == len(old) and all(
    isinstance(node, ast.AST) and ast.dump(node) == ast.dump(other)
    for node, other in zip(ours, old, strict=True)
  )


def mutated(source: str, mutation: Mutation) -> str:
  """Returns `source`, the code of `mutation.file`, with the mutation applied and no comments.

  A ValueError if the function or the code to replace is not there, or is there more than once.
  """
  tree = ast.parse(source)
  old: list[ast.AST] = [*ast.parse(mutation.old).body]
  new: list[ast.AST] = [*ast.parse(mutation.new).body]
  if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
    old, new = [old[0].value], [new[0].value]
  try:
    nodes = nodes_to_search(tree, mutation.function.partition("::")[2])
  except ValueError as error:
    raise ValueError(f"mutation {mutation.name}: in {mutation.file}, {error}") from None
  replacements: list[Callable[[], None]] = []
  for node in nodes:
    for field, value in ast.iter_fields(node):
      if isinstance(value, list):  # Statements, arguments, elements.
        for start in range(len(value)):
          place = slice(start, start + len(old))
          if same(value[place], old):
            replacements.append(functools.partial(value.__setitem__, place, new))
      elif same([value], old):
        replacements.append(functools.partial(setattr, node, field, new[0]))
  if len(replacements) != 1:
    raise ValueError(
      f"mutation {mutation.name}: its code is in {mutation.function} {len(replacements)} times"
    )
  replacements[0]()
  return ast.unparse(tree) + "\n"


@contextlib.contextmanager
def applied(file: pathlib.Path, changed: str) -> Generator[None]:
  """Replaces a module of a copy of the project, until the block ends."""
  source = file.read_text(encoding="utf-8")
  try:
    _write(file, changed)
    yield
  finally:
    _write(file, source)


def _write(file: pathlib.Path, source: str) -> None:
  """Writes a module so that Python compiles it again, whatever its size and the clock."""
  before = int(file.stat().st_mtime)
  file.write_text(source, encoding="utf-8")
  os.utime(file, (before + 2, before + 2))


def run_tests(
  root: pathlib.Path, tests: list[str], limit: float | None, *options: str
) -> tuple[dict[str, str], str]:
  """Runs tests of the copy in `root`; returns how each ended, and what pytest printed.

  It is subprocess.TimeoutExpired after `limit` seconds.
  """
  report = root / "report.xml"
  report.unlink(missing_ok=True)  # that of the unmutated project
  command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
  command += reported_to(report)
  # Ahead of an editable installation of the project itself.
  environment = {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": str(root)}
  done = subprocess.run(
    [*command, *tests],
    cwd=root,
    env=environment,
    capture_output=True,
    text=True,
    timeout=limit,
    check=False,
  )
  outcomes = {test: outcome for test, (outcome, _) in read_report(report).items()}
  return outcomes, done.stdout + done.stderr


def reported_to(path: pathlib.Path) -> list[str]:
  """Returns the options with which pytest writes what `read_report` reads."""
  return [f"--junitxml={path}", "-o", "junit_family=xunit1"]


def read_report(path: pathlib.Path) -> dict[str, tuple[str, float]]:
  """Returns how each test ended, and after how many seconds; nothing of a run that did not end.

  That is "passed", "failure", "skipped", or "error" if it never came to the test itself.
  """
  found: dict[str, tuple[str, float]] = {}
  for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():
    ends = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
    test = f"{case.get('file')}::{case.get('name')}"
    # What fails after a test that failed comes later.
    found.setdefault(test, ((*ends, "passed")[0], float(case.get("time", 0))))
  return found


def judge(test: str, outcomes: dict[str, str]) -> Verdict:
  """Returns the verdict on a mutation whose `test` ended as `outcomes` says."""
  own = [outcome for id_, outcome in outcomes.items() if id_.partition("[")[0] == test]
  if "failure" in own:
    return Verdict.CAUGHT
  return Verdict.MISSED if own and set(own) == {"passed"} else Verdict.BROKEN


def try_mutation(root: pathlib.Path, mutation: Mutation) -> Result:
  """Runs the test of a mutation on the copy in `root`, which is as before afterwards."""
  start = time.perf_counter()
  file = root / mutation.file
  with applied(file, mutated(file.read_text(encoding="utf-8"), mutation)):
    try:
      outcomes, output = run_tests(root, [mutation.test], LIMIT, "-x")
    except subprocess.TimeoutExpired:
      return Result(Verdict.SLOW, time.perf_counter() - start, "")
  return Result(judge(mutation.test, outcomes), time.perf_counter() - start, output)


def in_copies(
  console: Console,
  folder: pathlib.Path,
  jobs: int,
  mutants: Sequence[Any],
  attempt: Callable[[pathlib.Path, Any], Any],
) -> Iterator[tuple[Any, Any]]:
  """Yields each mutant and what `attempt(root, mutant)` returned, as soon as it is there.

  Each of the `jobs` that run at the same time has a copy of the project in `folder`.
  """
  copies: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
  for job in range(jobs):
    copy_project(folder / f"copy{job}")
    copies.put(folder / f"copy{job}")

  def in_one(mutant: Any) -> Any:
    root = copies.get()
    try:
      return attempt(root, mutant)
    finally:
      copies.put(root)

  columns = TextColumn("mutants"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
  with (
    Progress(*columns, console=console) as progress,
    concurrent.futures.ThreadPoolExecutor(jobs) as pool,
  ):
    task = progress.add_task("", total=len(mutants))
    futures = {pool.submit(in_one, mutant): mutant for mutant in mutants}
    for future in concurrent.futures.as_completed(futures):
      progress.advance(task)
      yield futures[future], future.result()


def check_unmutated(base: pathlib.Path, mutations: list[Mutation], jobs: int) -> None:
  """Ends the program unless the tests of `mutations` pass on the unchanged copy in `base`."""
  tests = sorted({mutation.test for mutation in mutations})
  outcomes, output = run_tests(base, tests, None, "-n", str(jobs), "--dist", "worksteal")
  wrong = [test for test in tests if judge(test, outcomes) is not Verdict.MISSED]
  if wrong:
    sys.exit(f"{output[-6000:]}\nnot passed without any mutation: {', '.join(wrong)}")


def report(console: Console, results: dict[Mutation, Result]) -> bool:
  """Prints the table and the count; returns whether every mutation was caught."""
  lost = {m: result for m, result in results.items() if result.verdict is not Verdict.CAUGHT}
  table = Table("no.", "mutation", "test", "", "s")
  for mutation, result in results.items():
    style = "bold red" if mutation in lost else "green"
    verdict = f"[{style}]{result.verdict.value}[/]"
    test = mutation.test.removeprefix("tests/").replace("::", "\n")
    table.add_row(mutation.name, mutation.breaks, test, verdict, f"{result.seconds:.0f}")
  console.print(table, highlight=False)
  for mutation, result in lost.items():
    console.rule(f"{mutation.name}: {result.verdict.value}")
    console.print(result.output[-3000:], markup=False, highlight=False)
  console.print(f"{len(results) - len(lost)}/{len(results)} caught")
  return not lost


def main() -> int:
  """Runs the mutations; returns the exit status."""
  names = [mutation.name for mutation in MUTATIONS]
  parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
  parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="N")
  parser.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="at the same time")
  arguments = parser.parse_args()
  mutations = [mutation for mutation in MUTATIONS if mutation.name in arguments.only]
  console = Console()
  with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
    base = pathlib.Path(folder).resolve()
    copy_project(base / "project")
    check_unmutated(base / "project", mutations, arguments.jobs)
    found = dict(in_copies(console, base, arguments.jobs, mutations, try_mutation))
  return int(not report(console, {mutation: found[mutation] for mutation in mutations}))


if __name__ == "__main__":
  sys.exit(main())
