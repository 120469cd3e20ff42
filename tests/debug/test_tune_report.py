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
    return Evaluation(paths, rules, error, share, policy, headroom, {}, {"float16": share}, {})

  best = choice(("Net/hot",), 0.004, 0.9, 12.3)
  others = [choice((), math.inf, 1.0, 0.0), choice(("Net/a", "Net/b"), 0.02, 0.95, 9.0)]
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
  for part in (*parts, *curve, "95.0 % 0.02 9 Net/a, Net/b", "mpjax.Rule"):
    assert part in " ".join(text.split()), part
  found = json.loads(report.to_json())
  assert found["rules"][0]["path"] == "**/decoder/a_long_name/of_a_module"
  assert found["evaluations"][0]["error"] == "inf"
  assert repr(report).startswith("<TuneReport: 90.0 % of the FLOPs of matmuls run in float16; ")


def test_shares_add_up_and_modules_show_the_formats_that_ran(report):
  shares, formats = {"float16": 0.9, "float32": 0.1}, {"Net/hot": ("float16", "float32")}
  report = dataclasses.replace(report, shares=shares, formats=formats)
  text = " ".join(str(report).split())
  assert "90.0 % of the FLOPs of matmuls run in float16, 10.0 % in float32;" in text
  assert "hot inf 0.01 - 10.0 % float16 float32" in text
  assert "headroom: of its low-precision values, were they in float16." in text


def test_long_choices_are_told_apart_by_how_they_differ_from_the_chosen_one(report):
  float8, bfloat16, float16 = (
    mpjax.Policy.parse(f"mixed_{name}") for name in ("float8", "bfloat16", "float16")
  )
  paths = [f"layers/{i}" for i in range(6)]

  def choice(others, float32=(), error=0.02):
    others = {path: others.get(path, float16) for path in paths if path not in float32}
    others = {path: policy for path, policy in others.items() if policy is not None}
    return report.evaluations[0]._replace(
      float32=float32, policy=float8, others=others, error=error
    )

  best = choice({"layers/4": bfloat16}, error=0.001)
  evaluations = (
    choice({"layers/4": bfloat16, "layers/5": None}),
    choice({}, float32=("layers/3",)),
    best,
    best._replace(others={}, error=0.5),
    best._replace(others={}, policy=float16, error=0.4),
  )
  text = str(
    dataclasses.replace(
      report,
      **best._asdict(),
      policies=(float8, bfloat16, float16),
      evaluations=evaluations,
    )
  )
  table = " ".join(text.partition("Error of the gradient by share")[2].split())
  for part in (
    "chosen float16: layers/0, layers/1, layers/2 and 2 more; bfloat16: layers/4",
    "as chosen, but float8: layers/5",
    "as chosen, but float16: layers/4; float32: layers/3",
    "0.5 0 nothing",
    "0.4 0 float16: all",
  ):
    assert part in table, table
