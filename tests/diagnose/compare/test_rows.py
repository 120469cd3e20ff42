import numpy as np
import pytest

from mpjax._diagnose.compare.rows import compared
from tests.diagnose.compare.recorded import DEEP, run_of, values


def test_rounding_is_no_fault_on_another_machine_or_in_another_dtype():
  small, exact = run_of(values(at=7, error=1e-7)), run_of(values(at=99))
  assert compared(small, exact).first.path == f"{DEEP}/layers_7/attention/query"
  assert compared(small._replace(machine="another"), exact).first is None
  assert compared(small._replace(spacing=2.0**-10), exact).first is None
  assert compared(small, exact, 2.0**-10).first is None
  # An error that is no rounding comes first.
  found = {path: x + 0.1 * ("layers_9" in path) for path, x in values(at=7, error=1e-7).items()}
  assert compared(run_of(found), exact).first.path == f"{DEEP}/layers_9/attention/query"


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
