"""The updates of the LoRA example vanish in bfloat16, and not with float32 masters."""

import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.standard_promotion


def test_updates_vanish_without_masters(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "examples"))
  example = importlib.import_module("lora_updates")
  monkeypatch.setattr(example, "STEPS", 3)
  first, last, plain = example.train(masters=False)
  assert plain.lost_updates > 0.7
  assert {g.path for g in plain.of("updates") if g.lost_updates} == {
    f"{layer}/lora_{matrix}" for layer in ("up", "mid", "down") for matrix in "ab"
  }
  _, better, wide = example.train(masters=True)
  assert wide.lost_updates == 0
  assert better < first
  assert last == pytest.approx(first, rel=0.1)
