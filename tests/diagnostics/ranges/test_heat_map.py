import importlib
import types

import pytest

from mpjax._diagnostics.ranges import heat_map
from tests.errors import refused


def row(path, exponents, note=""):
  return types.SimpleNamespace(path=path, exponents=exponents, note=note)


def test_a_picture_is_written_and_not_left_open(tmp_path):
  matplotlib = pytest.importorskip("matplotlib")
  matplotlib.use("Agg")
  rows = [row("a" * 60, {-30: 1, 3: 9}), row("", {}, "9 % lost")]
  many = [row(f"layer_{i}", {0: 1}) for i in range(90)]
  kinds = [("activations", rows), ("gradients", []), ("updates", many)]
  figure = heat_map.heat_map("step", kinds, str(tmp_path / "ranges.png"))
  assert (tmp_path / "ranges.png").stat().st_size > 10_000
  titles = [axis.get_title(loc="left") for axis in figure.axes]
  assert titles[1:3] == ["activations", "updates"]
  labels = [label.get_text() for label in figure.axes[1].get_yticklabels()]
  assert labels == ["…" + "a" * 37, "(no scope)"]
  assert len(figure.axes[2].get_yticklabels()) == 40
  figure.draw_without_rendering()
  # The note is beside its panel, where no line crosses it, and not over the bar of colors.
  note = next(text for text in figure.axes[1].texts if text.get_text() == "9 % lost")
  box, bar = note.get_window_extent(), figure.axes[-1].get_window_extent()
  assert figure.axes[1].get_window_extent().x1 < box.x0 < box.x1 < bar.x0
  # A notebook would show an open one beside what the cell returns.
  assert not importlib.import_module("matplotlib.pyplot").get_fignums()


def test_no_matplotlib(monkeypatch):
  def missing(name):
    raise ImportError(name)

  monkeypatch.setattr(heat_map.importlib, "import_module", missing)
  with refused(RuntimeError, "plot()", "matplotlib", "without it", "pip install matplotlib"):
    heat_map.heat_map("step", [], None)
