"""What tests of pages and scripts share: scripts as fixtures, what a plot shows, ids of tests."""

import ast
import functools
import importlib
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


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


def assert_colors(path: pathlib.Path, colors: Iterable[str]) -> None:
  """Asserts that a PNG has more than 50 pixels of each color, which is written as `#rrggbb`."""
  from matplotlib import image

  pixels = image.imread(path)
  for color in colors:
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (np.abs(pixels[..., :3] - wanted).max(-1) < 0.02).sum() > 50, color


@functools.cache
def is_test(name: str) -> bool:
  """Whether `name` is the id of a test, as pytest has it, without parameters."""
  path, _, function = name.partition("::")
  file = ROOT / path
  if not (path.startswith("tests/") and function.startswith("test_") and file.exists()):
    return False
  tree = ast.parse(file.read_text(encoding="utf-8"))
  return any(isinstance(x, ast.FunctionDef) and x.name == function for x in tree.body)
