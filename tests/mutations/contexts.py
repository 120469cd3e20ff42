"""A pytest plugin: records which lines of mpjax each test runs, and how long each takes.

python -m pytest -p tests.mutations.contexts --contexts=FOLDER ...

`FOLDER/lines.*` are files of coverage, one for each process, with the ids of tests as contexts;
`FOLDER/seconds.json` has the seconds of each test that passed.
"""

import collections
import json
import pathlib
from collections.abc import Iterator

import coverage
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--contexts", type=pathlib.Path)


def pytest_configure(config: pytest.Config) -> None:
  folder = pathlib.Path(str(config.getoption("--contexts")))
  # Under xdist the workers run the tests, and their reports arrive at the main process.
  is_worker = hasattr(config, "workerinput")
  if is_worker or not config.getoption("numprocesses", None):
    config.pluginmanager.register(Contexts(folder), "contexts")
  if not is_worker:
    config.pluginmanager.register(Seconds(folder / "seconds.json"), "seconds")


class Contexts:
  """Measures a process from before mpjax is imported."""

  def __init__(self, folder: pathlib.Path) -> None:
    self.coverage = coverage.Coverage(
      data_file=str(folder / "lines"), data_suffix=True, source=["mpjax"], config_file=False
    )
    self.coverage.set_option("run:relative_files", True)
    self.coverage.start()

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
    self.coverage.switch_context(item.nodeid)
    return (yield)

  def pytest_sessionfinish(self) -> None:
    self.coverage.stop()
    self.coverage.save()


class Seconds:
  """Adds up the phases of each test; leaves out what did not pass."""

  def __init__(self, path: pathlib.Path) -> None:
    self.path = path
    self.seconds: collections.Counter[str] = collections.Counter()
    self.wrong: set[str] = set()

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    self.seconds[report.nodeid] += report.duration
    if report.outcome != "passed":
      self.wrong.add(report.nodeid)

  def pytest_sessionfinish(self) -> None:
    passed = {name: s for name, s in self.seconds.items() if name not in self.wrong}
    self.path.write_text(json.dumps(passed))
