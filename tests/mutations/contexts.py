"""A pytest plugin: records which lines of mpjax each test runs.

python -m pytest -p tests.mutations.contexts --contexts=FOLDER ...

`FOLDER/lines.*` are files of coverage, one for each process, with the ids of tests as contexts.
"""

import pathlib
from collections.abc import Iterator

import coverage
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption("--contexts", type=pathlib.Path)


def pytest_configure(config: pytest.Config) -> None:
  # Under xdist the workers run the tests.
  if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
    folder = pathlib.Path(str(config.getoption("--contexts")))
    config.pluginmanager.register(Contexts(folder), "contexts")


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
