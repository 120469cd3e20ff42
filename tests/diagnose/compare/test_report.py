import json

import numpy as np
import pytest

from mpjax._diagnose.compare.report import compared
from mpjax._diagnose.compare.run import Gradient, Kept, RanCall, RecordedRun

DEEP = "Transformer/encoder/a_module_with_a_long_name"


def run_of(values, name="f", spacing=2.0**-23):
  """Returns a run of modules that return these arrays, each of what the one before returned."""
  arrays, calls = {}, []
  for i, (path, x) in enumerate(values.items()):
    arrays[f"value/{i}"] = arrays[f"cotangent/{i}"] = arrays[f"gradient/{i}"] = np.asarray(x)
    own = (Kept(f"value/{i}", f"cotangent/{i}", np.shape(x), path),)
    calls.append(RanCall(path, "forward", 0, (), i, i, own, calls[-1].outputs if calls else ()))
  gradients = tuple(Gradient(f"gradient/{i}", path, path, 0) for i, path in enumerate(values))
  return RecordedRun(name, tuple(calls), gradients, {}, {}, spacing, "", arrays)


def values(layers=12, at=7, error=1e-3):
  return {
    f"{DEEP}/layers_{i}/{part}": np.ones(4) + error * (i >= at)
    for i in range(layers)
    for part in ("attention/query", "mlp/up_projection_with_a_long_name")
  }


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


def test_rounding_is_no_fault_on_another_machine_or_in_another_dtype():
  small, exact = run_of(values(at=7, error=1e-7)), run_of(values(at=99))
  assert compared(small, exact).first.path == f"{DEEP}/layers_7/attention/query"
  assert compared(small._replace(machine="another"), exact).first is None
  assert compared(small._replace(spacing=2.0**-10), exact).first is None
  assert compared(small, exact, 2.0**-10).first is None
  # An error that is no rounding comes first.
  found = {path: x + 0.1 * ("layers_9" in path) for path, x in values(at=7, error=1e-7).items()}
  assert compared(run_of(found), exact).first.path == f"{DEEP}/layers_9/attention/query"


def test_what_modules_share_is_printed_once():
  names = ("Net", "Net/block", "Net/block/up", "Net/block/down", "Net/head")
  x = dict.fromkeys(names, np.ones(3))
  lines = str(compared(run_of(x), run_of(x))).splitlines()
  labels = [line[:10].rstrip() for line in lines if line.startswith(("Net", " "))]
  assert labels == ["Net", "  block", "    up", "    down", "  head"]


def test_all_errors_of_a_row_are_relative():
  report = compared(run_of({"m": np.asarray([3.0, 4.5])}), run_of({"m": np.asarray([3.0, 4.0])}))
  (row,) = report.rows
  assert row.output == row.cotangent == row.gradient == pytest.approx(0.1)


def test_they_part_where_the_error_is_ten_times_that_of_the_inputs():
  errors = {"a": 1e-4, "b": 9e-4, "c": 8e-3, "d": 1.0}
  exact = run_of(dict.fromkeys(errors, np.ones(4)), spacing=1e-3)
  found = {path: np.ones(4) + error for path, error in errors.items()}
  first = compared(run_of(found, spacing=2.0**-23), exact).first
  assert first.path == "d"  # 8e-3 is no more than ten times the spacing.
  small = exact._replace(spacing=2.0**-23)
  assert compared(run_of(found), small).first.path == "a"
  found["a"] = np.ones(4)
  assert compared(run_of(found), small).first.path == "b"


def test_they_part_before_a_module_that_takes_another_input():
  exact = dict.fromkeys(("a", "between", "b", "c"), np.ones(4))
  found = {**exact, "between": np.ones(4) + 1e-3, "b": np.ones(4) + 1e-3}
  runs = [run_of(found), run_of(exact)]
  # No row is of code that only one run has.
  runs[1] = runs[1]._replace(calls=tuple(c for c in runs[1].calls if c.path != "between"))
  report = compared(*runs)
  assert report.first.path == "b"
  assert "They part before b: the error of its inputs is 0.001" in str(report)
  assert report.unmatched == ("between is only in f.",)


def test_the_legend_of_a_picture_covers_no_point():
  pytest.importorskip("matplotlib")
  figure = compared(run_of(values(60)), run_of(values(60, at=99))).plot()
  figure.draw_without_rendering()
  (legend,), (axis,) = figure.legends, figure.axes
  assert axis.get_legend() is None
  assert not legend.get_window_extent().overlaps(axis.get_window_extent())


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
