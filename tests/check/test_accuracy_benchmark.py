"""Gradients measured against float64: a true reference, right figures, and what the page says."""

import io
import json
import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from tests.scripts import benchmark

pytestmark = pytest.mark.standard_promotion

FEW = ("Linen MLP", "Linen LSTM", "NNX transformer block")


report = benchmark("accuracy_report", name="report")
bench = benchmark("accuracy", name="bench")


def recorded(report):
  return json.loads(report.RECORDED.read_text(encoding="utf-8"))


@pytest.mark.case("I15")
def test_gradients_are_as_near_to_float64_as_those_by_hand(bench, report, tmp_path):
  console = Console(file=io.StringIO(), width=80)
  found = bench.main(FEW, seeds=6, out=tmp_path / "accuracy.json", console=console)
  each = report.comparisons(found)
  assert set(each) == {(name, dtype) for name in FEW for dtype in report.DTYPES}
  for one in each.values():
    assert 1e-5 < one.policy <= 1.1 * one.by_hand < 0.1
  for dtype in report.DTYPES:
    ratios = [one.ratio for (_, other), one in each.items() if other == dtype]
    assert statistics.geometric_mean(ratios) <= 1.0
  assert report.holds(found)


@pytest.mark.parametrize("name", ["Linen LSTM", "NNX GRU", "NNX transformer block"])
def test_the_reference_is_the_slope_of_the_loss_in_float64(bench, name):
  """Along one direction, by central differences, which float32 would find to two digits."""
  model = bench.MODELS[name]
  draw = model.draw(0)
  (gradient,) = bench.reference(model, [draw])
  rng = np.random.default_rng(0)
  along = jax.tree.map(lambda x: rng.normal(size=x.shape), gradient)
  with jax.enable_x64(True):
    params, rest, inputs = bench.in_float64(draw)
    loss = model.loss("float64", "")
    step = 1e-5
    plus, minus = (
      loss(jax.tree.map(lambda x, d, by=by: x + by * d, params, along), rest, inputs)
      for by in (step, -step)
    )
  inner = jax.tree.map(lambda x, y: np.sum(x * y), gradient, along)
  assert sum(jax.tree.leaves(inner)) == pytest.approx(float(plus - minus) / (2 * step), rel=1e-8)


def test_a_reference_that_is_not_in_float64_throughout_is_refused(bench):
  def rounded(params, rest, inputs):
    return jnp.sum(jnp.sin(params.astype(jnp.float32)))

  draw = (np.ones(3, np.float32), {}, ())
  model = bench.Model(lambda _: draw, lambda way, dtype: rounded, ())
  with pytest.raises(ValueError, match=r"not in float64.*sin float32"):
    bench.reference(model, [draw])


def test_an_error_is_that_of_all_parameters_together(bench):
  want = {"a": np.array([3.0, 0.0]), "b": np.array([[0.0, 4.0]])}
  got = {"a": np.float32([3.0, 0.3]), "b": np.float32([[0.4, 4.0]])}
  assert bench.error(got, want) == pytest.approx(0.5 / 5)
  assert bench.error(want, want) == 0


def test_a_policy_is_compared_with_the_version_that_errs_least(report):
  errors = {"policy": [1e-3, 4e-3], "dtype": [8e-3, 2e-3], "care": [1e-3, 1e-3]}
  errors = {way: report.means(each) for way, each in errors.items()}
  one = report.compare({**errors, "cast": "not supported"})
  assert one.way == "care"
  assert one.ratio == pytest.approx(statistics.geometric_mean([1.0, 4.0]))
  assert errors["policy"]["root_mean_square"] == pytest.approx(math.sqrt(8.5e-6))
  alone = {"policy": errors["policy"], "cast": "23% of its matmuls are in float16"}
  assert report.compare(alone) is None


@pytest.mark.parametrize(
  ("ratios", "holds"),
  [([1.05, 0.9], True), ([1.05, 0.99], False), ([1.11, 0.5], False), ([math.nan, 0.5], False)],
)
def test_what_does_not_hold_is_said(report, ratios, holds):
  """Neither one model above 1.1, nor all together above 1."""
  models = {
    str(i): {"float16": {"policy": report.means([ratio * 1e-3]), "dtype": report.means([1e-3])}}
    for i, ratio in enumerate(ratios)
  }
  assert report.holds({"models": models}) is holds


def test_figures_are_recorded(bench, report):
  found = recorded(report)
  assert found["models"].keys() == bench.MODELS.keys()
  assert found["seeds"] == bench.SEEDS
  assert found["environment"]["versions"].keys() >= {"mpjax", "jax", "flax"}
  compared = report.comparisons(found)
  for name, model in found["models"].items():
    for dtype, errors in model.items():
      assert errors.keys() == {"policy", *bench.MODELS[name].by_hand}
      reasons = [x for way, x in errors.items() if way != "policy" and isinstance(x, str)]
      assert (name, dtype) in compared or len(reasons) == len(errors) - 1 > 0


def test_all_that_is_recorded_holds(report):
  assert report.holds(recorded(report))


def test_the_page_shows_what_is_recorded(report):
  """Else run `python benchmarks/accuracy_report.py`."""
  page = report.PAGE.read_text(encoding="utf-8")
  assert report.updated(page, recorded(report)) == page
  assert report.table(recorded(report)) in page
