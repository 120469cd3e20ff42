"""The benchmarks run, compare like with like, and the pages show what was recorded.

Those of step times and dtypes, of autocast, of gradients against float64, and of training from many
seeds. What is measured for a GPU is in the files of its scripts.
"""

import functools
import io
import json
import math
import pathlib
import platform
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import mpjax
from tests import programs
from tests.scripts import BENCHMARKS, assert_colors, benchmark

pytestmark = pytest.mark.standard_promotion("dtypes")

RECORDED = sorted((BENCHMARKS / "results").glob("*.json"))
MODELS = ("mlp", "resnet", "gpt")
HALVES = ("bfloat16", "float16")

bench, measure, report = benchmark("run", name="bench"), benchmark("measure"), benchmark("report")
autocast, autocast_report = benchmark("autocast"), benchmark("autocast_report")
autocast_programs = benchmark("autocast_programs")
accuracy, accuracy_report = benchmark("accuracy"), benchmark("accuracy_report")
parity_report, imported_parity = benchmark("parity_report"), benchmark("parity", "imported_parity")
imported_formats = benchmark("formats", "imported_formats")


def quiet():
  return Console(file=io.StringIO(), width=80)


def recorded(report):
  return json.loads(report.RECORDED.read_text(encoding="utf-8"))


def test_the_pages_show_what_is_recorded(report, autocast_report, accuracy_report, parity_report):
  # Else run `python benchmarks/report.py`, or that of the page.
  readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
  assert report.updated(readme) == readme
  assert report.markdown(json.loads(RECORDED[0].read_text(encoding="utf-8"))) in readme
  for each, table in (
    (autocast_report, autocast_report.memory),
    (accuracy_report, accuracy_report.table),
    (parity_report, parity_report.table),
  ):
    page, results = each.PAGE.read_text(encoding="utf-8"), recorded(each)
    assert each.updated(page, results) == page
    assert table(results) in page
  assert parity_report.PLOT.read_bytes().startswith(b"\x89PNG")
  for file in RECORDED:
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results["environment"]["versions"].keys() > {"mpjax", "jax", "flax", "optax"}
    assert results["precision"].keys() == results["scaling"].keys() == set(MODELS)
    assert results["settings"]["rounds"] >= 10


# Steps


def test_flax_step_skips_like_ours(bench):
  # The rival is used right: it skips the step that overflows, and its scale comes down.
  case = bench.SIZES["tiny"]["mlp"]
  apply = bench.variants(case, "float16")["policy"]
  tx = bench.mpjax.loss_scaling(bench.optimizer(), mpjax.DynamicLossScale())
  scale = bench.dynamic_scale.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(2**15))
  plain, ours = bench.first_state(case, bench.optimizer()), bench.first_state(case, tx)
  inputs, labels = case.data()
  steps = {
    "flax": (jax.jit(functools.partial(bench.flax_step, apply)), (plain, scale)),
    "mpjax": (jax.jit(functools.partial(bench.mpjax_step, tx, apply)), ours),
  }
  for name, (step, state) in steps.items():
    new, _ = step(state, jnp.full_like(inputs, 1e6), labels)
    before, after = (s[0] if name == "flax" else s for s in (state, new))
    assert jax.tree.all(jax.tree.map(np.array_equal, after[0], before[0]))
    found = new[1].scale if name == "flax" else mpjax.loss_scaling_metrics(new[2])["loss_scale"]
    assert found == 2**14
    further, _ = step(new, inputs, labels)
    assert not jax.tree.all(jax.tree.map(np.array_equal, further[0], new[0]))


def test_everything_is_measured_and_written(bench, measure, tmp_path):
  text = io.StringIO()
  out = tmp_path / "new" / "figures.json"
  results = bench.main("tiny", "float16", 2, ["mlp"], out, Console(file=text, width=80))
  assert json.loads(out.read_text()) == results
  assert platform.node() not in out.read_text()
  assert "CPU" in measure.hardware()
  figures = results["precision"]["mlp"]
  assert list(figures) == ["float32", "by hand", "policy"]
  for one in figures.values():
    for key in ("seconds", "cold_trace_seconds", "warm_trace_seconds"):
      assert len(one[key]) == 2
      assert min(one[key]) > 0
    assert one["compiled"]["dot"] + one["compiled"]["custom_call"] > 0
    assert one["compiled"]["argument_bytes"] > one["compiled"]["temp_bytes"] / 1000 > 0
  # A layer of 16 and one of 3; a batch of 4 of 8 features; no gradient for the first input.
  assert figures["float32"]["traced"]["flops"] == 2 * 4 * (2 * 8 * 16 + 3 * 16 * 3)
  for of, exact in (("traced", ("products", "half_share", "flops")), ("compiled", ("dot",))):
    ours, theirs = figures["policy"][of], figures["by hand"][of]
    assert {key: ours[key] for key in exact} == {key: theirs[key] for key in exact}
    assert all(ours[key] <= 1.02 * theirs[key] for key in theirs)
  assert list(results["scaling"]["mlp"]) == ["none", "static", "dynamic", "flax"]
  for ratio in ("step / hand", "step / none"):
    assert ratio in text.getvalue()


def test_turns_are_taken_in_turn_and_a_ratio_round_by_round(measure):
  order = []

  def run(name):
    order.append(name)
    return np.zeros(())

  runs = {name: functools.partial(run, name) for name in "abc"}
  times = measure.take_turns(runs, rounds=4, seconds=0)
  assert "".join(order[-12:]) == "abc" + "bca" + "cab" + "abc"
  assert {name: len(x) for name, x in times.items()} == dict.fromkeys("abc", 4)
  # The machine was ten times slower in the second round: that is no difference of the two.
  found = measure.ratio([2.0, 20.0, 2.2, 3.0, 2.0], [1.0, 10.0, 1.0, 1.0, 1.0])
  assert (found.low, found.median, found.high) == (2.0, 2.0, 2.2)
  assert str(found) == "2.00 (2.00-2.20)"


# Autocast, whose programs promote ranks as people write them


@pytest.mark.standard_promotion
def test_a_program_is_measured_by_every_tool_and_written(
  autocast, autocast_report, tmp_path, monkeypatch
):
  tiny = autocast.autocast_memory.SIZES["tiny"]
  monkeypatch.setitem(autocast.autocast_memory.SIZES, "tiny", {"LSTM": tiny["LSTM"]})
  out, name, kind = tmp_path / "new" / "figures.json", "classifier, jit", "jax.lax"
  # The other interpreter is this one, so that nothing has to be installed.
  python = pathlib.Path(sys.executable)
  results = autocast.main(
    *(2, 8, [name], [kind], (20,), "tiny", ["float16"]),
    jaxamp_python=python,
    out=out,
    console=quiet(),
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
  page = autocast_report.updated(autocast_report.PAGE.read_text(encoding="utf-8"), results)
  assert f"| {name} | 100%" in page
  shown = "\n".join(make(results) for make in autocast_report.EVERYTHING)
  assert f"| {name} | by hand | 100% | 100% |" in shown


@pytest.mark.standard_promotion
def test_plain_and_by_hand_are_one_program_in_two_precisions(autocast, autocast_programs):
  # By hand every product is in half; without a dtype there is no cast at all.
  for name, program in autocast_programs.PROGRAMS.items():
    params, batch = program.make(8)
    style = autocast_programs.Style(jnp.float16)
    plain = jax.make_jaxpr(program.loss)(params, batch)
    hand = jax.make_jaxpr(lambda p, b, f=program.loss, s=style: f(p, b, s))(params, batch)
    assert programs.half_share(hand) == 1, name
    assert programs.converts(plain) == {}, name
    assert programs.half_share(plain) == 0, name
    flops = ([product.flops for product in programs.products(each)] for each in (plain, hand))
    assert next(flops) == next(flops), name
  for kind in ("jax.lax", "value_and_grad(autocast), jax.numpy"):
    # As many equations as were asked for.
    assert autocast.autocast_tracing.sized(kind, 300)[2] == pytest.approx(300, rel=0.25), kind


def test_recorded_figures_of_autocast_are_within_the_bounds(
  autocast, autocast_report, autocast_programs
):
  # 1.1 times the memory by hand, but for gates in float32, and 2.5 times the time of tracing.
  results = recorded(autocast_report)
  for part in autocast.PARTS:
    assert results[part]["environment"]["versions"].keys() >= {"mpjax", "jax", "flax"}
    assert results[part]["settings"]["rounds"] >= 10
  for half in HALVES:
    models = results["memory"][half]["models"]
    assert len(models) == 4
    for name, kept in models.items():
      # The gates of an LSTM are computed, and so kept, in float32: one near 1 would be 1.
      bound = 1.15 if name == "LSTM" else 1.1
      for key in ("own", "all"):
        assert kept["autocast"][key] <= bound * kept["by hand"][key], name
    for where in ("here", "there"):
      found = results["tools"][half][where]
      assert found["programs"].keys() == autocast_programs.PROGRAMS.keys()
      assert "jaxamp" in found["environment"]["versions"]
    bound = autocast.autocast_tools.BOUNDS[half]
    for name, found in results["tools"][half]["here"]["programs"].items():
      ours = found["mpjax"]
      assert ours["forward_half"] == ours["gradient_half"] == 1
      assert ours["error"] <= bound * (1 + autocast_programs.PROGRAMS[name].attention)
  assert results["tracing"]["kinds"].keys() == autocast.autocast_tracing.KINDS.keys()
  for found in results["tracing"]["kinds"].values():
    for one in found:
      assert autocast_report.ratio(one["autocast"], one["plain"]).median <= 2.5


# Gradients, against float64

FEW = ("Linen MLP", "Linen LSTM", "NNX transformer block")


@pytest.mark.standard_promotion
def test_gradients_are_as_near_to_float64_as_those_by_hand(accuracy, accuracy_report, tmp_path):
  found = accuracy.main(FEW, seeds=6, out=tmp_path / "accuracy.json", console=quiet())
  each = accuracy_report.comparisons(found)
  assert set(each) == {(name, dtype) for name in FEW for dtype in accuracy_report.DTYPES}
  for one in each.values():
    assert 1e-5 < one.policy <= 1.1 * one.by_hand < 0.1
  for dtype in accuracy_report.DTYPES:
    ratios = [one.ratio for (_, other), one in each.items() if other == dtype]
    assert statistics.geometric_mean(ratios) <= 1.0
  assert accuracy_report.holds(found)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ["Linen LSTM", "NNX GRU", "NNX transformer block"])
def test_the_reference_is_the_slope_of_the_loss_and_in_float64_throughout(accuracy, name):
  # Along one direction, by central differences, which float32 would find to two digits.
  model = accuracy.MODELS[name]
  draw = model.draw(0)
  (gradient,) = accuracy.reference(model, [draw])
  rng = np.random.default_rng(0)
  along = jax.tree.map(lambda x: rng.normal(size=x.shape), gradient)
  with jax.enable_x64(True):
    params, rest, inputs = accuracy.in_float64(draw)
    loss = model.loss("float64", "")
    step = 1e-5
    plus, minus = (
      loss(jax.tree.map(lambda x, d, by=by: x + by * d, params, along), rest, inputs)
      for by in (step, -step)
    )
  inner = jax.tree.map(lambda x, y: np.sum(x * y), gradient, along)
  assert sum(jax.tree.leaves(inner)) == pytest.approx(float(plus - minus) / (2 * step), rel=1e-8)

  def rounded(params, rest, inputs):
    return jnp.sum(jnp.sin(params.astype(jnp.float32)))

  draw = (np.ones(3, np.float32), {}, ())
  model = accuracy.Model(lambda _: draw, lambda way, dtype: rounded, ())
  with pytest.raises(ValueError, match=r"not in float64.*sin float32"):
    accuracy.reference(model, [draw])


def test_an_error_is_that_of_all_parameters_and_of_the_version_that_errs_least(
  accuracy, accuracy_report
):
  want = {"a": np.array([3.0, 0.0]), "b": np.array([[0.0, 4.0]])}
  got = {"a": np.float32([3.0, 0.3]), "b": np.float32([[0.4, 4.0]])}
  assert accuracy.error(got, want) == pytest.approx(0.5 / 5)
  assert accuracy.error(want, want) == 0
  means = accuracy_report.means
  errors = {"policy": [1e-3, 4e-3], "dtype": [8e-3, 2e-3], "care": [1e-3, 1e-3]}
  one = accuracy_report.compare({**{k: means(v) for k, v in errors.items()}, "cast": "no"})
  assert one.way == "care"
  assert one.ratio == pytest.approx(statistics.geometric_mean([1.0, 4.0]))
  # Neither one model above 1.1, nor all together above 1.
  for ratios, holds in (
    ([1.05, 0.9], True),
    ([1.05, 0.99], False),
    ([1.11, 0.5], False),
    ([math.nan, 0.5], False),
  ):
    models = {
      str(i): {"float16": {"policy": means([ratio * 1e-3]), "dtype": means([1e-3])}}
      for i, ratio in enumerate(ratios)
    }
    assert accuracy_report.holds({"models": models}) is holds


def test_recorded_errors_hold(accuracy, accuracy_report):
  found = recorded(accuracy_report)
  assert found["models"].keys() == accuracy.MODELS.keys()
  assert found["seeds"] == accuracy.SEEDS
  assert found["environment"]["versions"].keys() >= {"mpjax", "jax", "flax"}
  compared = accuracy_report.comparisons(found)
  for name, model in found["models"].items():
    for dtype, errors in model.items():
      assert errors.keys() == {"policy", *accuracy.MODELS[name].by_hand}
      reasons = [x for way, x in errors.items() if way != "policy" and isinstance(x, str)]
      assert (name, dtype) in compared or len(reasons) == len(errors) - 1 > 0
  assert accuracy_report.holds(found)


# Training from many seeds


@pytest.fixture
def parity(example, imported_parity):
  """The script, with the examples that it trains on its path."""
  return imported_parity


def test_the_verdict_is_that_of_the_statistics_module(parity_report):
  reference, half = (np.random.default_rng(seed).normal(size=5).tolist() for seed in range(2))
  found = parity_report.compare(half, reference)
  apart, deviation = (
    statistics.fmean(half) - statistics.fmean(reference),
    statistics.stdev(reference),
  )
  assert found.difference == pytest.approx(apart, abs=1e-12)
  assert found.deviation == pytest.approx(deviation)
  assert found.range == max(reference) - min(reference)
  pairs = zip(half, reference, strict=True)
  assert found.paired**2 == pytest.approx(statistics.fmean((a - b) ** 2 for a, b in pairs))
  # At its limits; [1, 2, 3] has a deviation of 1.
  for half, reference, holds in (
    ([3.0, 3.0, 3.0], [1.0, 2.0, 3.0], True),
    ([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], True),
    ([3.01, 3.0, 3.0], [1.0, 2.0, 3.0], False),
    ([0.99, 1.0, 1.0], [1.0, 2.0, 3.0], False),
    ([np.nan, 2.0, 2.0], [1.0, 2.0, 3.0], False),
    ([1.5, 1.5], [1.5, 1.5], True),
    ([1.5, 1.6], [1.5, 1.5], False),
  ):
    assert parity_report.compare(half, reference).holds == holds


def test_runs_are_made_once_and_kept(parity, monkeypatch, tmp_path):
  # A run that was interrupted goes on; another number of steps is not mixed with what is there.
  made = []

  def run(policy, steps, seed, on_step):
    if len(made) == 4:
      made.append("interrupted")
      raise KeyboardInterrupt
    for _ in range(steps):
      on_step()
    made.append((policy, seed))
    return {"loss": float(seed), "skipped": 0, "loss_scale": 1.0}

  monkeypatch.setattr(parity, "TASKS", {"net": parity.Task(run, steps=3, seeds=2)})
  out = tmp_path / "new" / "parity.json"
  with pytest.raises(KeyboardInterrupt):
    parity.main(["net"], out=out, console=quiet())
  found = parity.main(["net"], out=out, console=quiet())
  made.remove("interrupted")
  policies = list(map(parity.spelled, parity.parity_report.POLICIES))
  assert made == [(policy, seed) for policy in policies for seed in range(2)]
  assert json.loads(out.read_text(encoding="utf-8")) == found
  parity.main(["net"], seeds=3, out=out, console=quiet())
  assert made[8:] == [(policy, 2) for policy in policies]
  with pytest.raises(ValueError, match=r"other steps of net \(3\) than these \(5\)"):
    parity.main(["net"], steps=5, out=out, console=quiet())


def test_a_seed_is_a_start_and_an_order_of_batches_under_every_policy(parity):
  # Parameters, and the key that dropout keys are folded from. (Batches know of no policy.)
  lstm = parity.lstm.LanguageModel(features=8, layers=1)
  gpt = parity.gpt.Gpt(layers=1, width=8, heads=1, context=8)

  def start(policy, seed):
    key = jax.random.key(seed)
    states = (
      parity.lstm.prepare(policy, lstm, 2).start(key, 4),
      parity.gpt.prepare(policy, gpt, 2).start(key),
    )
    return [(programs.bits(x.params), programs.bits(jax.random.key_data(x.rng))) for x in states]

  reference = start("float32", 1)
  for policy in parity.parity_report.POLICIES[1:]:
    assert start(parity.spelled(policy), 1) == reference
  for one, other in zip(start("float32", 2), reference, strict=True):
    assert all(a != b for a, b in zip(one, other, strict=True))
  digits, lenet = parity.digits, parity.lenet
  data = digits.load_data()[0]
  for batches in (functools.partial(digits.batches, data), functools.partial(lenet.batches, data)):
    first, again, other = (programs.bits(next(batches(1, seed=seed))) for seed in (1, 1, 2))
    assert first == again != other


def test_a_real_run(parity, monkeypatch, tmp_path):
  # A small model: policies differ, but less than seeds do, and it learns.
  tiny = parity.lstm.LanguageModel(features=8, layers=1)
  run = functools.partial(parity.language_model, parity.lstm, tiny)
  monkeypatch.setattr(parity, "TASKS", {"LSTM": parity.Task(run, steps=40, seeds=2)})
  monkeypatch.setattr(parity.parity_report, "POLICIES", ("float32", "mixed_float16"))
  found = parity.main(["LSTM"], out=tmp_path / "parity.json", console=quiet())
  for runs in found["models"]["LSTM"]["runs"].values():
    assert list(runs) == ["0", "1"]
    for one in runs.values():
      assert 1 < one["character_loss"] < 0.9 * np.log(96)  # 96 characters, all alike at first
      assert one["skipped"] == 0
  (one,) = parity.parity_report.comparisons(found).values()
  assert one.holds
  assert 0 < abs(one.difference) < one.deviation


def test_recorded_trainings_hold(parity, parity_report, tmp_path):
  found = recorded(parity_report)
  assert found["models"].keys() == parity.TASKS.keys()
  assert found["environment"]["versions"].keys() >= {"mpjax", "jax", "flax", "optax"}
  for name, task in found["models"].items():
    assert task["runs"].keys() == set(parity.TASKS[name].policies)
    assert len(task["runs"]["float32"]) == parity.TASKS[name].seeds >= 5
    assert task["steps"] == parity.TASKS[name].steps
    for runs in task["runs"].values():  # A seed that reached nothing would change nothing.
      assert len({json.dumps(run) for run in runs.values()}) == len(runs)
  assert all(one.holds for one in parity_report.comparisons(found).values())
  parity_report.plot(found, tmp_path / "plot.png")
  assert_colors(tmp_path / "plot.png", parity_report.COLORS[1:])
  # What was counted are the right answers.
  logits = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32))
  answers = parity.classified(logits, np.array([0, 2]))
  assert answers["accuracy"] == 0.5
  assert answers["loss"] == pytest.approx((np.log(2) + np.log(4)) / 2, rel=1e-6)


# Training in each format


@pytest.fixture
def formats(example, imported_formats):
  """The script, with the examples that it trains on its path."""
  return imported_formats


def test_recorded_formats_are_in_the_page_and_train_as_bfloat16_does(formats):
  # Else run `python benchmarks/formats.py --write`.
  page, results = formats.PAGE.read_text(encoding="utf-8"), recorded(formats)
  assert formats.updated(page, results) == page
  for name, runs in results["models"].items():
    assert runs.keys() == formats.FORMATS.keys()
    base = np.array(runs["bfloat16"]["figures"])
    for format, run in runs.items():
      # Seeds of the GPT differ by 1 %, those of the experts by 12 %.
      bound = 0.02 if format.startswith("nvfp4") else 0.005
      bound = bound * np.mean(base) if name == "GPT" else np.std(base, ddof=1)
      assert abs(np.mean(run["figures"] - base)) <= bound, (name, format)
