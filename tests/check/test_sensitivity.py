"""The script that measures how well errors are predicted, its record, and its page."""

import io
import json

import pytest
from rich.console import Console

from tests.scripts import benchmark

pytestmark = pytest.mark.standard_promotion

sensitivity = benchmark("sensitivity")


@pytest.fixture
def recorded(sensitivity):
  return json.loads(sensitivity.OUT.read_text(encoding="utf-8"))


def test_programs_are_measured_and_written(sensitivity, tmp_path):
  out, console = tmp_path / "figures.json", Console(file=io.StringIO(), width=110)
  results = sensitivity.main(("camera projection",), ("bfloat16",), out, console)
  assert json.loads(out.read_text(encoding="utf-8")) == results
  assert results["cases"].keys() == {"camera projection"}
  assert 0 < results["cases"]["camera projection"]["bfloat16"]["predicted"] < 0.01
  assert "1 of 1 predictions" in console.file.getvalue()


def test_the_page_shows_what_is_recorded(sensitivity, recorded, tmp_path):
  # Else run `python benchmarks/sensitivity.py --page`.
  page = tmp_path / "sensitivity.md"
  page.write_bytes(sensitivity.PAGE.read_bytes())
  sensitivity.write_page(recorded, page)
  assert page.read_bytes() == sensitivity.PAGE.read_bytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_programs_are_recorded_and_nine_of_ten_are_predicted(sensitivity, recorded, dtype):
  names = {name for _, name, *_ in sensitivity.cases(dtype)}
  assert {name for name, case in recorded["cases"].items() if dtype in case} == names
  good, count = sensitivity.agreeing(recorded, dtype)
  assert good >= 0.9 * count


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_healthy_models_need_no_cure(recorded, dtype):
  found = {name for name, case in recorded["cases"].items() if "cures" in case[dtype]}
  assert found
  assert {recorded["cases"][name]["kind"] for name in found} == {"delicate"}
