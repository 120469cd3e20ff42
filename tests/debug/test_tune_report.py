import dataclasses
import json
import math

import pytest

import mpjax
from mpjax._debug.tune_report import Evaluation, ModuleReport, TuneReport


@pytest.fixture
def report():
  rule = mpjax.Rule("float32", path="**/decoder/a_long_name/of_a_module")
  policy = mpjax.Policy.parse("mixed_float16")

  def choice(paths, error, share, headroom):
    rules = (rule,) if paths else ()
    return Evaluation(paths, rules, error, share, policy, headroom, {}, {"float16": share})

  best = choice(("Net/hot",), 0.004, 0.9, 12.3)
  others = [choice((), math.inf, 1.0, 0.0), choice(("Net/a",) * 9, 0.02, 0.95, 9.0)]
  others.append(choice(("",), 0.01, 0.5, 4096.0))
  modules = [
    ModuleReport("Net/hot", math.inf, 0.01, 0.1),
    ModuleReport("Net/" + "long" * 30, 0.002, math.nan, 0.9, is_stream=True),
    ModuleReport("Net/exact", 0.0, math.nan, 0.0),
  ]
  return TuneReport(
    policies=(policy,),
    tolerance=0.01,
    required_headroom=8.0,
    **best._asdict(),
    evaluations=[*others, best],
    bound=17,
    loss_scale=4096.0,
    modules=modules,
  )


def test_policies_of_one_format_are_told_apart(report):
  half, mixed = mpjax.Policy.parse("float16"), mpjax.Policy.parse("mixed_float16")
  choices = [each._replace(policy=mixed) for each in report.evaluations]
  text = str(dataclasses.replace(report, policies=(half, mixed), evaluations=tuple(choices)))
  assert text.startswith("Error of each module in float16 against float32")
  (columns,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["float16"]]
  assert columns == ["float16", "error", "headroom", "upgraded"]
  assert "mixed_float16: all others" in " ".join(text.split())


def test_text_and_json(report):
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  assert text.startswith("Error of each module in float16 against float32")
  assert "Net/exact" not in text
  parts = ("(residual stream)", "90.0 %", "0.004", "4 of at most 17", "autocast, at loss")
  curve = "50.0 % 0.01 4.1 k good (no scope)", "0.004 12 chosen Net/hot", "not finite 0 nothing"
  for part in (*parts, *curve, "95.0 % 0.02 9 Net/a, Net/a, Net/a and 6 more", "mpjax.Rule"):
    assert part in " ".join(text.split()), part
  found = json.loads(report.to_json())
  assert found["rules"][0]["path"] == "**/decoder/a_long_name/of_a_module"
  assert found["evaluations"][0]["error"] == "inf"
  assert repr(report).startswith("<TuneReport: 90.0 % of the FLOPs of matmuls run in float16; ")
