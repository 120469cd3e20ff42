import math

import pytest

from mpjax._diagnose.sensitivity.report import DecisionRow, RoundingRow, SensitivityReport
from mpjax._jaxpr.locations import Source

LINE = Source("model.py", 7, "loss")


def rounding(path, contribution, **fields):
  return RoundingRow(path, LINE, "dot_general", "forward", "bfloat16", contribution, **fields)


def report(*roundings, **fields):
  values = {
    "name": "loss",
    "of": "gradient",
    "predicted": 0.02,
    "measured": 0.03,
    "by_decisions": 0.0,
    "roundings": roundings,
    "decisions": (),
    "cures": (),
    "predicted_with_cures": 0.001,
    "measured_with_cures": 0.002,
    "cured_share": 0.25,
    "not_followed": (),
    "exact": (),
  }
  return SensitivityReport(**values | fields)


def test_layers_share_a_row_whose_contributions_add_as_squares():
  rows = report(*(rounding(f"layers/{i}/up", 0.003) for i in range(4))).sections()[0].rows
  assert rows == (("layers/*/up (4)", "matmul", "bfloat16", "0.006", "0", "model.py:7"),)


def test_a_value_that_overflows_is_the_first_row():
  rows = report(rounding("a", 0.1), rounding("b", 0.0, overflows=True)).sections()[0].rows
  assert [(row[0], row[3]) for row in rows] == [("b", "inf"), ("a", "0.1")]
  assert "Values overflow" in str(report(rounding("b", 0.0, overflows=True)))


def test_a_result_that_is_not_finite_is_not_healthy():
  text = str(report(rounding("a", 0.003), measured=math.inf))
  assert "nothing to do" not in text
  assert "mpjax.find_nonfinite(fn)(*args)" in text


def test_cures_have_their_line_and_what_is_left_with_them():
  code = "y = mpjax.full_precision(lambda: x @ w)()"
  text = " ".join(str(report(rounding("a", 0.1, cure=code), cures=(code,))).split())
  assert f"1. model.py:7: {code}" in text
  assert "the predicted error is 0.001, and the measured one 0.002." in text
  assert "They move 25.0 % of the matmuls' FLOPs to float32." in " ".join(text.split())
  assert "nothing to do" not in text


def test_decisions_and_what_is_not_followed_are_said_only_if_there_are_any():
  assert "Decisions" not in str(report())
  decision, kernel = DecisionRow("a", LINE, "argmax", 0.25), DecisionRow("b", LINE, "pallas_call")
  found = report(decisions=(decision,), by_decisions=0.015, not_followed=(kernel,))
  text = " ".join(str(found).split())
  assert "a argmax 25.0 % model.py:7" in text
  assert "Decisions that differ, see below, cause an error of 0.015 alone." in text
  assert "b pallas_call model.py:7" in text
  assert "a lower bound" in text
  # No rounding is to blame, but a decision is.
  assert "No rounding is amplified more than 8 times. Decisions" in text
  assert math.isnan(kernel.share)


def test_a_prediction_that_differs_from_the_measurement_says_which_holds():
  abrupt = str(report(predicted=0.1, measured=0.02))
  assert "changes abruptly" in abrupt
  assert "nothing to do" not in abrupt
  assert "changes abruptly" not in str(report(predicted=0.04, measured=0.02))


@pytest.mark.parametrize("of", ["result", "update"])
def test_only_an_update_may_be_the_first_of_adam(of):
  text = str(report(of=of, predicted=0.1, measured=0.02))
  assert ("first update of Adam" in text) == (of == "update")
