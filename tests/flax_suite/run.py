"""Runs Flax's own Linen tests under policies, and compares with how they end without one.

    python tests/flax_suite/run.py

The tests come from the source distribution of the Flax that is installed, which pip fetches. Each
scope runs in a process of its own, two at a time (about 10 minutes on 2 cores), where this file is
a plugin of pytest. The exit status is 0 if

- under a scope that casts nothing, each test ends as it does without a scope; and
- under `mixed_bfloat16`, each test that passes without a scope passes too, or fails on an assertion
  (of a dtype, a tolerance, an exact value, a table, a count), or is listed below with the reason.
"""

import concurrent.futures
import contextlib
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import tarfile
from collections import Counter

import flax.linen as nn
import pytest
from rich.console import Console
from rich.table import Table

import mpjax

ROOT = pathlib.Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "flax_suite"

_NAME_SCOPES = (
  "a scope calls the root once more, inside of itself, and Flax makes what `compact_name_scope` "
  "needs only where no module is around (docs/limits.md)"
)
LISTED: dict[str, str] = {
  "LeakTests::test_tracer_leaks": "leaks under `nn.jit` alone as well, where `gc.collect` is off",
  "AttentionTest::test_autoregressive_decode_with_x64": "the cache is stored in bfloat16, and read "
  "as float32 where the float64 input is written into it, of which a policy leaves the dtype",
  "ModuleTest::test_compact_name_scope": _NAME_SCOPES,
  "ModuleTest::test_compact_name_scope_outside_compact": _NAME_SCOPES,
  "ModuleTest::test_intercept_methods_compact": "assertEqual on arrays: an argument that is traced "
  "is not the same object, and equality of arrays has no truth value",
  "TransformTest::test_nowrap": "counts the modules being called in Flax's internals, where the "
  "root is there twice",
}
"""Test (without its file's folders): why it may end in another exception under a half policy."""

Outcomes = dict[str, dict[str, str]]


class Unused(nn.Module):
  """A class of which no test has a module."""


SCOPES = {
  "none": contextlib.nullcontext,
  # Casts nothing, and yet goes through everything. The rule is by class: a predicate may tell two
  # equal modules apart, for which `nn.jit` traces each of them, and these tests count traces.
  "nothing": lambda: mpjax.linen.policy_scope(
    None, [mpjax.Rule("float32", module=Unused)], unmatched="ignore"
  ),
  # Some tests call no module.
  "mixed_bfloat16": lambda: mpjax.linen.policy_scope("mixed_bfloat16", unmatched="ignore"),
}


def pytest_addoption(parser):
  parser.addoption("--scope", choices=SCOPES)
  parser.addoption("--outcomes", type=pathlib.Path)


def pytest_configure(config):
  config.outcomes = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
  with SCOPES[item.config.getoption("--scope")]():
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
  """Notes how a test ended: passed, skipped, or in which exception."""
  report = yield
  if report.when == "call" or report.outcome != "passed":
    error = call.excinfo if report.failed else None
    item.config.outcomes[item.nodeid] = {
      "outcome": report.outcome,
      "error": "" if error is None else error.type.__name__,
      "text": "" if error is None else str(error.value)[-2000:],
    }
  return report


def pytest_sessionfinish(session):
  session.config.getoption("--outcomes").write_text(json.dumps(session.config.outcomes, indent=1))


def sources() -> pathlib.Path:
  """Returns the folder of Flax's source distribution, fetched on first use."""
  version = importlib.metadata.version("flax")
  folder = CACHE / f"flax-{version}"
  if not folder.exists():
    CACHE.mkdir(parents=True, exist_ok=True)
    options = f"download --quiet --no-deps --no-binary flax flax=={version} --dest".split()
    subprocess.run([sys.executable, "-m", "pip", *options, str(CACHE)], check=True)
    with tarfile.open(CACHE / f"flax-{version}.tar.gz") as archive:
      archive.extractall(CACHE, filter="data")
  return folder


def run(scope: str, folder: pathlib.Path) -> Outcomes:
  """Returns how each of Flax's Linen tests ends inside `scope`."""
  out = CACHE / f"{scope}.json"
  out.unlink(missing_ok=True)
  command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.flax_suite.run"]
  command += [f"--scope={scope}", f"--outcomes={out}", f"--rootdir={folder}", "-c", "/dev/null"]
  # The path by name: Flax's own tests import each other's helpers from `tests`.
  command += ["-p", "no:cacheprovider", "-W", "ignore", "-o", "python_files=*_test.py"]
  command += ["--import-mode=importlib", str(folder / "tests" / "linen")]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if not out.exists():
    sys.exit(f"pytest inside {scope!r} wrote no outcomes:\n{done.stdout[-3000:]}\n{done.stderr}")
  return json.loads(out.read_text())


def main() -> int:
  """Runs the three scopes, prints a table and what is wrong; returns the exit status."""
  console = Console()
  folder = sources()
  progress = console.status(f"Running the Linen tests of {folder.name} three times …")
  with progress, concurrent.futures.ThreadPoolExecutor(2) as pool:
    results = dict(zip(SCOPES, pool.map(lambda scope: run(scope, folder), SCOPES), strict=True))

  columns = ("passed", "skipped", "assertion", "listed", "other")
  table = Table("scope", *columns)
  plain, nothing, half = results.values()
  for scope, outcomes in results.items():
    kinds = Counter(kind(test, outcome) for test, outcome in outcomes.items())
    table.add_row(scope, *(str(kinds[column]) for column in columns))
  console.print(table)

  differing = [t for t in plain if plain[t]["outcome"] != nothing.get(t, {}).get("outcome")]
  other = [t for t in half if plain[t]["outcome"] == "passed" and kind(t, half[t]) == "other"]
  stale = [name for name in LISTED if not any(t.endswith(name) for t in half)]
  for title, tests, outcomes in (
    ("Not as without a scope, though nothing is cast", differing, nothing),
    ("Under mixed_bfloat16, an exception that is no assertion", other, half),
  ):
    for test in tests:
      console.print(
        f"[red]{title}:[/] {test}\n  {outcomes.get(test, {}).get('error')}: "
        f"{outcomes.get(test, {}).get('text', '')[:300]}",
        highlight=False,
      )
  for name in stale:
    console.print(f"[red]Listed, but no such test:[/] {name}")
  return int(bool(differing or other or stale))


def kind(test: str, outcome: dict[str, str]) -> str:
  """Returns "passed", "skipped", "assertion", "listed" or "other"."""
  if outcome["outcome"] != "failed":
    return outcome["outcome"]
  if outcome["error"] == "AssertionError":
    return "assertion"
  return "listed" if any(test.endswith(name) for name in LISTED) else "other"


if __name__ == "__main__":
  sys.exit(main())
