import dataclasses
import json
import math

import pytest

import mpjax
from mpjax._diagnose.tune.report import Evaluation, ModuleReport, TuneReport

RULE = mpjax.Rule("float32", path="**/decoder/a_long_name/of_a_module")
FLOAT16, WIDE = map(mpjax.Policy.parse, ("mixed_float16", "float32_highest"))


def choice(paths, error, share, headroom):
  return Evaluation(
    policy=FLOAT16,
    rules=(RULE,) if paths else (),
    error=error,
    predicted=0.003,
    by_decisions=0.0,
    headroom=headroom,
    half_share=share,
    shares={"float16": share},
    formats={},
    upgrades=dict.fromkeys(paths, WIDE),
    contributions={},
    headrooms={},
    noise=1e-7,
  )


@pytest.fixture
def report():
  best, plain = choice(("hot",), 0.004, 0.9, 12.3), choice((), math.inf, 1.0, 0.0)
  names = ("policy", "rules", "error", "headroom", "half_share", "shares", "formats", "upgrades")
  return TuneReport(
    policies=(FLOAT16,),
    tolerance=0.01,
    required_headroom=8.0,
    **{name: getattr(best, name) for name in names},
    plain=plain,
    evaluations=(
      plain,
      choice(("a", "b"), 0.02, 0.95, 9.0),
      choice(("",), 0.01, 0.5, 4096.0),
      best,
    ),
    bound=17,
    loss_scale=4096.0,
    modules=(ModuleReport("hot", 0.01, 0.1, 0.5), ModuleReport("long" * 30, 0.002, 0.9)),
  )


def test_text_and_json(report):
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  assert text.startswith("Error that each module causes in float16")
  parts = ("90.0 %", "0.004", "4 of at most 17", "autocast, at loss", "Float32 has 1e-07.")
  curve = ("50.0 % 0.003 0.01 4.1 k good float32: (root)", "0.004 12 chosen float32: hot")
  for part in (*parts, *curve, "95.0 % 0.003 0.02 9 float32: a, b", "mpjax.Rule"):
    assert part in " ".join(text.split()), part
  found = json.loads(report.to_json())
  assert found["rules"][0]["path"] == "**/decoder/a_long_name/of_a_module"
  assert found["evaluations"][0]["error"] == "inf"
  assert repr(report).startswith("<TuneReport: 90.0 % of the FLOPs of matmuls run in float16; ")


def test_policies_of_one_format_are_told_apart(report):
  half = mpjax.Policy.parse("float16")
  others = [each._replace(upgrades={"a": FLOAT16}) for each in report.evaluations]
  text = str(dataclasses.replace(report, policies=(half, FLOAT16), evaluations=tuple(others)))
  assert text.startswith("Error that each module causes in float16")
  assert "mixed_float16: a" in " ".join(text.split())


def test_shares_add_up_and_modules_show_the_formats_that_ran(report):
  shares, formats = {"float16": 0.9, "float32": 0.1}, {"hot": ("float16", "float32")}
  text = " ".join(str(dataclasses.replace(report, shares=shares, formats=formats)).split())
  assert "90.0 % of the FLOPs of matmuls run in float16, 10.0 % in float32;" in text
  assert "hot 0.01 0.5 10.0 % float16 float32" in text


def test_a_useful_tolerance_is_advised_in_two_digits_and_not_below_the_error(report):
  plain = report.plain._replace(error=0.01234, headroom=9.0)
  text = " ".join(str(dataclasses.replace(report, plain=plain)).split())
  assert "The rules take the error from 0.012 to 0.004, and move 10.0 % of the FLOPs" in text
  assert "With tolerance=0.013 or more there would be no rules." in text
