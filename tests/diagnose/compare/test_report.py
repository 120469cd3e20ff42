import json

import numpy as np
import pytest

from mpjax._diagnose.compare.rows import compared
from tests.diagnose.compare.recorded import DEEP, run_of, values


def test_the_text_has_80_columns_and_the_first_module():
  report = compared(run_of(values(40)), run_of(values(40, at=99)))
  assert report.first.path == f"{DEEP}/layers_7/attention/query"
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  assert "They part at" in text
  assert "40 rows more are in `.rows`." in text
  assert text.count("a_module_with_a_long_name") == 2  # In the sentence, and once in the table.
  (marked,) = (line for line in text.splitlines() if line.endswith("first"))
  assert "0.001" in marked


def test_rows_that_are_equal_are_omitted_first():
  report = compared(run_of(values(30, at=15)), run_of(values(30, at=99)))
  text = str(report)
  # 30 of the 60 rows have an error.
  assert "20 rows more are in `.rows`. Equal to the bit: 20." in text
  assert sum(line.split()[1:2] == ["0.001"] for line in text.splitlines()) == 30


def test_what_modules_share_is_printed_once():
  names = ("Net", "Net/block", "Net/block/up", "Net/block/down", "Net/head")
  x = dict.fromkeys(names, np.ones(3))
  lines = str(compared(run_of(x), run_of(x))).splitlines()
  labels = [line[:10].rstrip() for line in lines if line.startswith(("Net", " "))]
  assert labels == ["Net", "  block", "    up", "    down", "  head"]


@pytest.mark.slow
def test_the_legend_of_a_picture_covers_no_point():
  pytest.importorskip("matplotlib")
  figure = compared(run_of(values(60)), run_of(values(60, at=99))).plot()
  figure.draw_without_rendering()
  (legend,), (axis,) = figure.legends, figure.axes
  assert axis.get_legend() is None
  assert not legend.get_window_extent().overlaps(axis.get_window_extent())


@pytest.mark.slow
def test_json_and_picture(tmp_path):
  pytest.importorskip("matplotlib")
  report = compared(run_of(values(60)), run_of(values(60, at=99)))
  found = json.loads(report.to_json())
  assert found["first"]["path"] == report.first.path
  assert "run" not in found
  report.plot(tmp_path / "compare.png")
  assert (tmp_path / "compare.png").stat().st_size > 10_000
  same = compared(run_of(values()), run_of(values())).plot()
  assert len(same.axes) == 1
  assert "No module has an error" in repr(compared(run_of(values()), run_of(values())))
