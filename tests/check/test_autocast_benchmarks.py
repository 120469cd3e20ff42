"""The benchmarks of autocast run, compare like with like, and say what was recorded."""

import importlib
import io
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from tests import programs
from tests.scripts import benchmark

HALVES = ("bfloat16", "float16")

# Programs promote ranks as people write them.
pytestmark = pytest.mark.standard_promotion


bench = benchmark("autocast", name="bench")
report = benchmark("autocast_report", name="report")
texts = benchmark("autocast_programs", name="texts")


def test_a_program_is_measured_by_every_tool_and_written(bench, report, tmp_path, monkeypatch):
  tiny = bench.autocast_memory.SIZES["tiny"]
  monkeypatch.setitem(bench.autocast_memory.SIZES, "tiny", {"LSTM": tiny["LSTM"]})
  out = tmp_path / "new" / "figures.json"
  console = Console(file=io.StringIO(), width=80)
  name, kind = "classifier, jit", "jax.lax"
  # The other interpreter is this one, so that nothing has to be installed.
  python = pathlib.Path(sys.executable)
  results = bench.main(
    *(2, 8, [name], [kind], (20,), "tiny", ["float16"]),
    jaxamp_python=python,
    out=out,
    console=console,
  )
  assert json.loads(out.read_text(encoding="utf-8")) == results
  for where in ("here", "there"):
    found = results["tools"]["float16"][where]["programs"][name]
    hand = found["by hand"]
    assert hand["forward_half"] == hand["gradient_half"] == 1
    assert 0 < hand["error"] < 4e-3
    assert len(hand["trace_seconds"]) == len(found["float32"]["trace_seconds"]) == 2
    assert hand["compiled"]["dot"] + hand["compiled"]["custom_call"] > 0
  ours = results["tools"]["float16"]["here"]["programs"][name]["mpjax"]
  assert ours["forward_half"] == ours["gradient_half"] == 1
  warm, cold = results["tracing"]["kinds"][kind]
  assert warm["equations"] == pytest.approx(20, abs=3)
  assert (warm["cold"], cold["cold"]) == (False, True)
  assert min(*warm["plain"], *warm["autocast"]) > 0
  assert results["memory"]["float16"]["models"].keys() == {"LSTM"}
  page = report.updated(report.PAGE.read_text(encoding="utf-8"), results)
  assert f"| {name} | by hand | 100% | 100% |" in page


def test_a_tool_that_raises_is_recorded_with_its_error(bench, monkeypatch):
  tools = bench.autocast_tools

  def broken(program, half):
    raise TypeError("no such\nthing")

  monkeypatch.setattr(tools, "TOOLS", {"mine": broken})
  settings = tools.Settings(size=8, rounds=1)
  found = tools.main(["mine"], settings, ["classifier, jit"])["programs"]["classifier, jit"]
  assert found["mine"] == {"failed": "TypeError: no such"}


def test_failures_are_told_from_successes(report):
  good = {"forward_half": 1.0, "gradient_half": 1.0, "error": 3e-3}
  say = report._failure
  assert say(good, "transformer, loop", "float16") == "-"
  assert say(good, "mlp", "float16") == "error 3.0e-03, bound 2.0e-03"
  assert say({**good, "error": float("nan")}, "mlp", "bfloat16") == "error nan, bound 1.6e-02"
  half = {**good, "gradient_half": 0.25}
  assert say(half, "mlp", "bfloat16") == "in float32: 0% forward, 75% gradient"


def test_plain_and_by_hand_are_one_program_in_two_precisions(texts):
  """By hand every product is in half; without a dtype there is no cast at all."""
  for name, program in texts.PROGRAMS.items():
    params, batch = program.make(8)
    plain = jax.make_jaxpr(program.loss)(params, batch)
    hand = jax.make_jaxpr(lambda p, b, f=program.loss: f(p, b, texts.Style(jnp.float16)))
    assert programs.half_share(hand(params, batch)) == 1, name
    assert programs.converts(plain) == {}, name
    assert programs.half_share(plain) == 0, name
    assert [p.flops for p in programs.products(plain)] == [
      p.flops for p in programs.products(hand(params, batch))
    ], name


def test_programs_are_of_the_size_that_was_asked_for(bench):
  tracing = bench.autocast_tracing
  for kind in ("jax.lax", "value_and_grad(autocast), jax.numpy"):
    assert tracing.sized(kind, 300)[2] == pytest.approx(300, rel=0.25), kind


def test_figures_are_recorded(bench, report):
  results = json.loads(report.RECORDED.read_text(encoding="utf-8"))
  texts = importlib.import_module("autocast_programs")
  for part in bench.PARTS:
    assert results[part]["environment"]["versions"].keys() >= {"mpjax", "jax", "flax"}
    assert results[part]["settings"]["rounds"] >= 10
  assert results["tracing"]["kinds"].keys() == bench.autocast_tracing.KINDS.keys()
  for half in HALVES:
    assert len(results["memory"][half]["models"]) == 4
    for where in ("here", "there"):
      found = results["tools"][half][where]
      assert found["programs"].keys() == texts.PROGRAMS.keys()
      assert "jaxamp" in found["environment"]["versions"]


def test_recorded_figures_are_within_the_bounds(report):
  """Those of issue and design: 1.1 times the memory by hand, 2.5 times the time of tracing."""
  results = json.loads(report.RECORDED.read_text(encoding="utf-8"))
  for half in HALVES:
    for kept in results["memory"][half]["models"].values():
      for key in ("own", "all"):
        assert kept["autocast"][key] <= 1.1 * kept["by hand"][key]
  for found in results["tracing"]["kinds"].values():
    for one in found:
      assert report.ratio(one["autocast"], one["plain"]).median <= 2.5
  for half in HALVES:
    for name, found in results["tools"][half]["here"]["programs"].items():
      assert report._failure(found["mpjax"], name, half) == "-"


def test_the_page_shows_what_is_recorded(report):
  """Else run `python benchmarks/autocast_report.py`."""
  page = report.PAGE.read_text(encoding="utf-8")
  results = json.loads(report.RECORDED.read_text(encoding="utf-8"))
  assert report.updated(page, results) == page
  assert report.memory(results) in page
