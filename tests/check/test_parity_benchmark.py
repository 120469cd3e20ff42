"""The comparison of half and float32 over seeds: fair, right, and what the page says."""

import functools
import importlib
import inspect
import io
import json
import pathlib
import statistics
from typing import Any

import jax
import numpy as np
import pytest
from matplotlib import image
from rich.console import Console

import mpjax
from tests.scripts import benchmark

ROOT = pathlib.Path(__file__).parent.parent.parent


report = benchmark("parity_report", name="report")


@pytest.fixture
def bench(report, monkeypatch) -> Any:
  monkeypatch.syspath_prepend(str(ROOT / "examples"))
  return importlib.import_module("parity")


def recorded(report):
  return json.loads(report.RECORDED.read_text(encoding="utf-8"))


def quiet():
  return Console(file=io.StringIO(), width=80)


@pytest.mark.parametrize("seeds", [2, 5, 10])
def test_the_verdict_is_that_of_the_statistics_module(report, seeds):
  rng = np.random.default_rng(seeds)
  verdicts = []
  for _ in range(200):
    reference, half = (rng.normal(size=seeds).tolist() for _ in range(2))
    found = report.compare(half, reference)
    apart = statistics.fmean(half) - statistics.fmean(reference)
    deviation = statistics.stdev(reference)
    assert found.difference == pytest.approx(apart, abs=1e-12)
    assert found.deviation == pytest.approx(deviation)
    assert found.range == max(reference) - min(reference)
    pairs = zip(half, reference, strict=True)
    assert found.paired**2 == pytest.approx(statistics.fmean((a - b) ** 2 for a, b in pairs))
    assert found.holds == (abs(apart) <= deviation)
    verdicts.append(found.holds)
  # What is drawn from one distribution breaks it now and then, the more often the fewer the seeds.
  assert 0 < sum(verdicts) < 200


def test_the_verdict_at_its_limits(report):
  reference = [1.0, 2.0, 3.0]  # a deviation of 1, a range of 2
  assert report.compare([3.0, 3.0, 3.0], reference).holds
  assert report.compare([1.0, 1.0, 1.0], reference).holds
  assert not report.compare([3.01, 3.0, 3.0], reference).holds
  assert not report.compare([0.99, 1.0, 1.0], reference).holds
  assert not report.compare([np.nan, 2.0, 2.0], reference).holds
  assert report.compare([1.5, 1.5], [1.5, 1.5]).holds
  assert not report.compare([1.5, 1.6], [1.5, 1.5]).holds


def results(report, shift=0.0):
  """Figures of two models, three seeds each, where half is off by `shift`."""

  def runs(policy, name):
    off = shift if policy == "mixed_float16" else 0.0
    return {
      str(seed): {name: 0.5 + 0.1 * seed + off, "skipped": 2 * seed, "loss_scale": 1.0}
      for seed in range(3)
    }

  models = {
    model: {"steps": 7, "runs": {policy: runs(policy, name) for policy in report.POLICIES}}
    for model, name in {"net": "accuracy", "writer": "character_loss"}.items()
  }
  return {"environment": recorded(report)["environment"], "models": models}


def test_a_row_says_what_was_measured(report):
  heading, *rows = report.rows(results(report, shift=0.05))
  found = {(row[0], row[2]): dict(zip(heading, row, strict=True)) for row in rows}
  row = found["net", "mixed_float16"]
  assert (row["figure"], row["mean"], row["float32"]) == ("test accuracy, %", "65.0000", "60.0000")
  assert (row["difference"], row["deviation"], row["range"]) == ("+5.0000", "10.0000", "20.0000")
  assert (row["same seed"], row["within"], row["skipped"]) == ("5.0000", "yes", "2.0")
  writer = found["writer", "mixed_bfloat16"]
  assert writer["figure"] == "held-out perplexity"
  assert float(writer["mean"]) == pytest.approx(np.mean(np.exp([0.5, 0.6, 0.7])), abs=1e-4)
  off = report.rows(results(report, shift=0.2))
  assert [row[heading.index("within")] for row in off[1:]] == ["yes", "**no**", "yes"] * 2
  assert report.summary(results(report, shift=0.2)) == "Within the spread: 4 of 6 rows."


def test_seeds_that_are_missing_are_an_error(report):
  one = results(report)
  del one["models"]["net"]["runs"]["mixed_bfloat16"]["1"]
  with pytest.raises(ValueError, match=r"mixed_bfloat16 has only the seeds \['0', '2'\]"):
    report.comparisons(one)


def test_the_plot_shows_every_policy(report, tmp_path):
  report.plot(results(report), tmp_path / "new" / "plot.png")
  pixels = image.imread(tmp_path / "new" / "plot.png")
  for color in report.COLORS[1:]:
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (np.abs(pixels[..., :3] - wanted).max(-1) < 0.02).sum() > 50


def test_runs_are_made_once_and_kept(bench, monkeypatch, tmp_path):
  """A run that was interrupted goes on; another number of steps is not mixed with what is there."""
  made = []

  def run(policy, steps, seed, on_step):
    if len(made) == 4:
      made.append("interrupted")
      raise KeyboardInterrupt
    for _ in range(steps):
      on_step()
    made.append((policy, seed))
    return {"loss": float(seed), "skipped": 0, "loss_scale": 1.0}

  monkeypatch.setattr(bench, "TASKS", {"net": bench.Task(run, steps=3, seeds=2)})
  out = tmp_path / "new" / "parity.json"
  with pytest.raises(KeyboardInterrupt):
    bench.main(["net"], out=out, console=quiet())
  found = bench.main(["net"], out=out, console=quiet())
  made.remove("interrupted")
  policies = list(map(bench.spelled, bench.parity_report.POLICIES))
  assert made == [(policy, seed) for policy in policies for seed in range(2)]
  assert json.loads(out.read_text(encoding="utf-8")) == found
  bench.main(["net"], seeds=3, out=out, console=quiet())
  assert made[8:] == [(policy, 2) for policy in policies]
  with pytest.raises(ValueError, match=r"other steps of net \(3\) than these \(5\)"):
    bench.main(["net"], steps=5, out=out, console=quiet())


@pytest.fixture
def tiny(bench) -> Any:
  return bench.lstm.LanguageModel(features=8, layers=1)


def test_a_seed_is_the_same_start_under_every_policy(bench, tiny):
  """Parameters, and the key that dropout keys are folded from. (Batches know of no policy.)"""
  small = bench.gpt.Gpt(layers=1, width=8, heads=1, context=8)

  def start(policy, seed):
    key = jax.random.key(seed)
    states = (
      bench.lstm.prepare(policy, tiny, 2).start(key, 4),
      bench.gpt.prepare(policy, small, 2).start(key),
    )
    return [(bits(x.params), bits(jax.random.key_data(x.rng))) for x in states]

  reference = start("float32", 1)
  for policy in bench.parity_report.POLICIES[1:]:
    assert start(bench.spelled(policy), 1) == reference
  for one, other in zip(start("float32", 2), reference, strict=True):
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_seed_is_an_order_of_batches(bench):
  digits, lenet = bench.digits, bench.lenet
  data = digits.load_data()[0]
  by_seed = [
    [bits(next(digits.batches(data, 1, seed=seed))), bits(next(lenet.batches(data, 1, seed)))]
    for seed in (1, 1, 2)
  ]
  assert by_seed[0] == by_seed[1]
  assert all(a != b for a, b in zip(by_seed[0], by_seed[2], strict=True))


@pytest.mark.parametrize(("example", "task"), [("digits", "digits CNN"), ("lenet", "LeNet-5")])
def test_a_run_hands_its_seed_on(bench, monkeypatch, example, task):
  """To what makes the first parameters, and to what chooses the batches."""
  module, asked = getattr(bench, example), {"prepare": [], "batches": []}
  run = bench.TASKS[task].run

  def spy(name):
    plain = getattr(module, name)

    def call(*args, **kwargs):
      given = inspect.signature(plain).bind(*args, **kwargs)
      given.apply_defaults()
      asked[name].append(given.arguments["seed"])
      if name == "batches":
        raise KeyboardInterrupt  # It is known by now.
      return plain(*args, **kwargs)

    return call

  for name in asked:
    monkeypatch.setattr(module, name, spy(name))
  with pytest.raises(KeyboardInterrupt):
    run("float32", 1, 7, lambda: None)
  assert 7 in asked["prepare"]  # The step, which all seeds share, is another's.
  assert asked["batches"] == [7]


def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_a_real_run(bench, tiny, monkeypatch, tmp_path):
  """A small model: policies differ, but less than seeds do, and it learns."""
  run = functools.partial(bench.language_model, bench.lstm, tiny)
  monkeypatch.setattr(bench, "TASKS", {"LSTM": bench.Task(run, steps=40, seeds=2)})
  monkeypatch.setattr(bench.parity_report, "POLICIES", ("float32", "mixed_float16"))
  found = bench.main(["LSTM"], out=tmp_path / "parity.json", console=quiet())
  for runs in found["models"]["LSTM"]["runs"].values():
    assert list(runs) == ["0", "1"]
    for one in runs.values():
      assert 1 < one["character_loss"] < 0.9 * np.log(96)  # 96 characters, all alike at first
      assert one["skipped"] == 0
  (one,) = bench.parity_report.comparisons(found).values()
  assert one.holds
  assert 0 < abs(one.difference) < one.deviation


def test_float8_is_trained_where_a_model_has_it(bench):
  """All matmuls of its hidden layers are in float8, and a model without rows for it has none."""
  images = jax.ShapeDtypeStruct((64, 8, 8, 1), "float32")

  def in_float8(network):
    model = mpjax.linen.with_policy(network, bench.spelled("mixed_float8"))
    apply = functools.partial(model.apply, train=False)
    variables = jax.eval_shape(
      functools.partial(model.init, train=False), jax.random.key(0), images
    )
    return sum(not each.reason for each in mpjax.audit(apply)(variables, images).float8)

  assert in_float8(bench.digits.Network(hidden=(128, 128))) == 2
  assert in_float8(bench.digits.NETWORK) == 0
  assert "mixed_float8" in bench.TASKS["dense CNN"].policies
  assert "mixed_float8" not in bench.TASKS["digits CNN"].policies


def test_right_answers_are_counted(bench):
  logits = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32))
  found = bench.classified(logits, np.array([0, 2]))
  assert found["accuracy"] == 0.5
  assert found["loss"] == pytest.approx((np.log(2) + np.log(4)) / 2, rel=1e-6)


def test_figures_are_recorded(bench, report):
  found = recorded(report)
  assert found["models"].keys() == bench.TASKS.keys()
  assert found["environment"]["versions"].keys() >= {"mpjax", "jax", "flax", "optax"}
  for name, task in found["models"].items():
    assert task["runs"].keys() == set(bench.TASKS[name].policies)
    assert len(task["runs"]["float32"]) == bench.TASKS[name].seeds >= 5
    assert task["steps"] == bench.TASKS[name].steps


def test_all_that_is_recorded_holds(report):
  assert all(one.holds for one in report.comparisons(recorded(report)).values())


def test_the_page_shows_what_is_recorded(report):
  """Else run `python benchmarks/parity_report.py`."""
  page = report.PAGE.read_text(encoding="utf-8")
  assert report.updated(page, recorded(report)) == page
  assert report.table(recorded(report)) in page
  assert report.PLOT.read_bytes().startswith(b"\x89PNG")
