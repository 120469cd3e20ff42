import importlib

import pytest

from mpjax._diagnostics.ranges import heat_map
from mpjax._diagnostics.ranges.ranges_report import GroupRanges
from tests.errors import refused


def row(path, exponents):
  return GroupRanges(kind="gradients", path=path, exponents=exponents)


def test_a_picture_is_written_and_not_left_open(tmp_path):
  matplotlib = pytest.importorskip("matplotlib")
  matplotlib.use("Agg")
  rows = [row("a" * 60, {-30: 1, 3: 9}), row("", {})]
  many = [row(f"layer_{i}", {0: 1}) for i in range(90)]
  kinds = [("activations", rows), ("gradients", []), ("updates", many)]
  figure = heat_map.heat_map("step", kinds, str(tmp_path / "ranges.png"))
  assert (tmp_path / "ranges.png").stat().st_size > 10_000
  titles = [axis.get_title(loc="left") for axis in figure.axes]
  assert titles[1:3] == ["activations", "updates"]
  labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
  assert labels == ["…" + "a" * 37, "(no scope)"]
  assert len(figure.axes[2].get_yticklabels()) == 40
  # A notebook would show an open one beside what the cell returns.
  assert not importlib.import_module("matplotlib.pyplot").get_fignums()


def test_no_matplotlib(monkeypatch):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(heat_map.importlib, "import_module", missing)
  with refused(RuntimeError, "plot()", "matplotlib", "without it", "pip install matplotlib"):
    heat_map.heat_map("step", [], None)
