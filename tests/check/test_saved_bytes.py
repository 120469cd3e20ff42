"""The script that compares what the backward pass keeps, its record, and its table on a page."""

import io
import json

import pytest
from rich.console import Console

from tests.scripts import benchmark

pytestmark = pytest.mark.standard_promotion

saved_bytes = benchmark("saved_bytes")


@pytest.fixture
def recorded(saved_bytes):
  return json.loads(saved_bytes.RECORDED.read_text(encoding="utf-8"))


def test_models_are_measured_and_written(saved_bytes, tmp_path):
  out = tmp_path / "figures.json"
  console = Console(file=io.StringIO(), width=80)
  results = saved_bytes.main("tiny", None, ("Gemma", "ResNet"), out, console)
  assert json.loads(out.read_text(encoding="utf-8")) == results
  assert results["models"].keys() == {"Gemma", "ResNet"}
  assert results["models"]["Gemma"].keys() == saved_bytes.WAYS.keys()
  table = saved_bytes.table(results)
  assert len(table.splitlines()) == 2 + len(saved_bytes.WAYS) + 1
  assert table in console.file.getvalue()


def test_differences_are_listed_by_the_operation_that_made_them(saved_bytes):
  console = Console(file=io.StringIO(), width=80)
  saved_bytes.show_differences(saved_bytes.cases("tiny")["GPT", "unrolled"], console)
  assert "MB  bfloat16[2,6,64] " in console.file.getvalue()


def test_the_page_shows_what_is_recorded(saved_bytes, recorded):
  # Else run `python benchmarks/saved_bytes.py --show`.
  page = saved_bytes.PAGE.read_text(encoding="utf-8")
  assert saved_bytes.updated(page, recorded) == page


def test_language_models_keep_at_most_a_twentieth_more_than_by_hand(saved_bytes, recorded):
  for kind in saved_bytes.KINDS:
    for way, one in recorded["models"][kind].items():
      for figure in ("kept", "moved", "temporaries"):
        assert saved_bytes.ratio(one, figure) <= 1.05, (kind, way, figure)
