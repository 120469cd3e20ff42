"""Fixtures that import a script of benchmarks/ as Python finds it when it is run."""

import importlib
import pathlib
from typing import Any

import pytest

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"


def benchmark(script: str, name: str | None = None) -> Any:
  """Returns a fixture that imports a script of benchmarks/.

  Args:
    script: the script, without its suffix.
    name: the fixture's name; by default that of the script.
  """

  @pytest.fixture(name=name or script)
  def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(script)

  return imported
