import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._diagnose.ranges.report import FORMATS, GroupRanges, RangesReport


def group(kind, path, exponents, **values):
  return GroupRanges(kind=kind, path=path, exponents=exponents, **{"largest": 1.0, **values})


def test_loss_scale():
  gradients = group("gradients", "a", {-30: 3, -4: 1}, largest=0.1)
  report = RangesReport("step", [gradients], None)
  # 8 * 0.1 * 2**16 is 52429, and with 2**17 it is above 65504.
  assert report.loss_scale == 2**16
  assert report.lost_gradients(1.0) == 0.75
  assert report.lost_gradients(2.0**5) == 0
  assert report.lost_gradients(2.0**20) == 0.25
  scaled = RangesReport("step", [gradients], 1024.0)
  assert scaled.loss_scale == 2**24
  assert "2^24, where mpjax.DynamicLossScale ends." in str(scaled)
  assert scaled.lost_gradients(1024.0) == 0.75
  assert RangesReport("step", [group("gradients", "a", {}, largest=0.0)], None).loss_scale is None
  assert RangesReport("step", [group("gradients", "a", {20: 1}, largest=1e6)], None).loss_scale == 1


@pytest.fixture
def report():
  rng = np.random.default_rng(0)
  groups = [
    group(
      kind,
      f"Transformer/layers_{i}/attention/a_long_name_of_a_projection" * (1 + (i == 3)),
      {int(e): int(n) for e, n in enumerate(rng.integers(1, 10**9, 12), -30)},
      nan=int(i == 5),
      inf=2 * int(i == 5),
      lost_updates=10 if kind == "updates" else 0,
    )
    for kind in ("activations", "gradients", "parameters", "updates")
    for i in range(25)
  ]
  return RangesReport("train_step", groups, 65536.0)


def test_the_text_has_80_columns_and_no_rows_that_say_nothing(report):
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  assert "Activations" not in text  # Nothing of them is lost.
  for part in ("change nothing", "Loss scale for float16", "Not finite", "… and 13 more"):
    assert part in text, part
  assert "… and" not in str(RangesReport("train_step", report.groups[75:87], None))
  broken = [dataclasses.replace(g, exponents={}, nan=5, lost_updates=0) for g in report.groups]
  assert "change nothing" not in str(RangesReport("train_step", broken, None))


def test_a_healthy_run_loses_no_update():
  report = RangesReport("step", [group("updates", "w", {0: 3})], None)
  assert "No update rounds away." in str(report)
  assert "change nothing" not in str(report)


def test_what_is_not_finite_is_in_the_order_of_execution():
  def step(w, x):
    def loss_fn(w):
      with jax.named_scope("first"):
        y = x @ w
      with jax.named_scope("hot"):
        y = jnp.exp(y * 1e3) @ w
      with jax.named_scope("after"):
        return jnp.mean((y - y) @ w) * jnp.sum(y)

    return jax.grad(loss_fn)(w)

  report = mpjax.ranges(step)(jnp.eye(8), jnp.ones((8, 8)))
  text = " ".join(str(report).split())
  rows = text.partition("Not finite, in the order of execution module numbers inf NaN ")[2]
  assert rows.startswith("hot ")
  assert rows.index(" gradients ") > rows.index(" activations ")
  assert "mpjax.find_nonfinite(step)(*args) says where it begins" in text
  assert "No loss scale for float16 is proposed: every gradient is 0, inf or NaN." in text


def test_json_has_all(report):
  found = json.loads(report.to_json())
  assert len(found["groups"]) == 100
  first = found["groups"][0]
  assert {int(e): n for e, n in first["exponents"].items()} == report.groups[0].exponents
  assert first["lost"].keys() == set(FORMATS)
  assert (found["loss_scale_in_use"], found["loss_scale"]) == (65536, report.loss_scale)


def test_a_gradient_that_no_loss_scale_keeps_from_overflowing():
  report = mpjax.ranges(lambda w, x: jnp.sum(1e6 * (x @ w)))(jnp.ones(8), jnp.ones((1, 8)))
  text = " ".join(str(report).split())
  assert "The largest gradient, 1e+06, overflows: float16 ends at 65504" in text


@pytest.mark.slow
def test_a_picture_is_written_and_not_left_open(tmp_path):
  matplotlib = pytest.importorskip("matplotlib")
  matplotlib.use("Agg")
  rows = [group("activations", "a" * 60, {-30: 1, 3: 9}), group("activations", "", {})]
  rows[1].zero = 1
  rows += [group("updates", f"layer_{i}", {0: 1}) for i in range(90)]
  figure = RangesReport("step", tuple(rows), None).plot(str(tmp_path / "ranges.png"))
  assert (tmp_path / "ranges.png").stat().st_size > 10_000
  labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
  assert labels[:2] == ["activations: " + "a" * 38, "updates: layer_0"]
  assert len(labels) == 46  # Every second one.
  # A notebook would show an open one beside what the cell returns.
  assert not importlib.import_module("matplotlib.pyplot").get_fignums()
