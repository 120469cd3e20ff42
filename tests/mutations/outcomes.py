"""A pytest plugin: writes how each test ended, and makes sure of which project was tested.

python -m pytest -p tests.mutations.outcomes --outcomes=out.json --copy=/tmp/project ...
"""

import json
import pathlib

import pytest

import mpjax


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--outcomes", type=pathlib.Path)
  parser.addoption("--copy", type=pathlib.Path)


def pytest_configure(config: pytest.Config) -> None:
  wanted = pathlib.Path(config.getoption("--copy"), "mpjax", "__init__.py")
  found = pathlib.Path(str(mpjax.__file__))
  if found.resolve() != wanted.resolve():
    raise pytest.UsageError(f"mpjax was imported from {found}, not from {wanted}")
  # Under xdist the workers' reports arrive at the main process as well.
  if not hasattr(config, "workerinput"):
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")), "outcomes")


class Outcomes:
  """Notes "passed" or "failed" of what a test itself did; "error" if it never came to that."""

  def __init__(self, path: pathlib.Path) -> None:
    self.path = path
    self.outcomes: dict[str, str] = {}

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    if report.when == "call":
      self.outcomes[report.nodeid] = report.outcome
    elif report.outcome != "passed":
      self.outcomes.setdefault(report.nodeid, "error" if report.failed else report.outcome)

  def pytest_sessionfinish(self) -> None:
    self.path.write_text(json.dumps(self.outcomes))
