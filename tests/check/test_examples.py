"""The examples run, and show what they say they show."""

import io
import os
import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import mpjax

ROOT = pathlib.Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def digits(example) -> Any:
  return example("digits")


@pytest.fixture
def demo(example) -> Any:
  return example("demo")


@pytest.fixture
def overflow_recovery(example) -> Any:
  return example("overflow_recovery")


def assert_equal(new, old):
  assert jax.tree.structure(new) == jax.tree.structure(old)
  for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
    assert (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())


@pytest.mark.convergence
def test_demo_keeps_its_promises(demo):
  rows = rows_of_demo(demo)
  for row in rows.values():
    assert row["accuracy"] >= 0.97
    assert abs(row["accuracy"] - rows["float32"]["accuracy"]) <= 0.005
    assert 0 < row["loss"] < 0.05
  # It grew from 2^15 each time 50 steps were finite, and met its limit.
  assert rows["mixed_float16"]["loss_scale"] > 2**18
  assert 0 < rows["mixed_float16"]["skipped"] < 10


def test_demo_shows_what_is_half_and_what_that_saves(demo):
  rows = rows_of_demo(demo, steps=2)
  row = rows["mixed_float16"]
  assert (row["loss_scale"], row["skipped"]) == (2**15, 0)


def rows_of_demo(demo, **options):
  """Runs the demo, and checks what has nothing to do with how well it has learned."""
  text = io.StringIO()
  rows = demo.main(console=Console(file=text, width=80), **options)
  assert list(rows) == ["float32", "mixed_bfloat16", "mixed_float16"]
  reference = rows["float32"]
  for policy, row in rows.items():
    assert row["half_share"] == (0 if policy == "float32" else 1)
    assert row["parameter_bytes"] == reference["parameter_bytes"]
    if policy != "float32":
      # Two bytes less for each number that is kept, but for the norms: three activations and the
      # three poolings of them. And copies of the images and of the last two kernels are kept too.
      kept = 64 * (64 * 16 + 16 * 32 + 4 * 64) + 64 * (16 * 16 + 4 * 32 + 64)
      copies = 64 * 64 + 9 * (16 * 32 + 32 * 64) + 64 * 10
      saved = reference["activation_bytes"] - row["activation_bytes"]
      assert saved == 2 * kept - 2 * copies
      assert f"{row['accuracy']:.2%}" in text.getvalue()
  for policy in ("float32", "mixed_bfloat16"):
    assert (rows[policy]["loss_scale"], rows[policy]["skipped"]) == (1, 0)
  return rows


def test_parameters_are_counted_right(demo, digits):
  sizes = [9 * 16, 9 * 16 * 32, 9 * 32 * 64, 2 * (16 + 32 + 64), 64 * 10 + 10]
  params = digits.prepare("float32", mpjax.NoLossScale()).state.params
  assert demo.nbytes(params) == 4 * sum(sizes)


def test_demo_starts_from_anywhere(tmp_path):
  done = subprocess.run(
    [sys.executable, str(EXAMPLES / "demo.py"), "--help"],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert "--steps" in done.stdout
  assert done.stderr == ""


def test_skipped_step_leaves_no_trace(digits):
  training = digits.prepare("mixed_float16", mpjax.DynamicLossScale())
  images, labels = next(digits.batches(digits.load_data()[0], 1))
  before, _ = training.step(training.state, images, labels)
  broken = images.copy()
  broken[0, 0, 0] = 1e6
  after, loss = training.step(before, broken, labels)
  assert not np.isfinite(loss)
  assert_equal(after.params, before.params)
  assert_equal(after.batch_stats, before.batch_stats)
  assert_equal(after.opt_state.inner_state, before.opt_state.inner_state)
  assert int(mpjax.loss_scaling_metrics(after.opt_state)["skipped"]) == 1
  further, loss = training.step(after, images, labels)
  assert np.isfinite(loss)
  assert not np.array_equal(*(x.params["Dense_0"]["kernel"] for x in (further, after)))


def test_float32_run_differentiates_the_unmodified_program(digits):
  """Equation for equation what one has without mpjax."""
  training = digits.prepare("float32", mpjax.NoLossScale())
  params, batch_stats, opt_state = training.state
  batch = next(digits.batches(digits.load_data()[0], 1))

  def loss_fn(params, batch_stats, images, labels):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = digits.NETWORK.apply(variables, images, train=True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), new["batch_stats"]

  plain = jax.make_jaxpr(jax.value_and_grad(loss_fn, has_aux=True))
  ours = jax.make_jaxpr(mpjax.value_and_grad(training.loss_fn, opt_state, has_aux=True))
  assert str(ours(params, batch_stats, *batch)) == str(plain(params, batch_stats, *batch))
  variables = digits.NETWORK.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)
  assert_equal({"params": params, "batch_stats": batch_stats}, variables)


def differences(a, b):
  """The largest difference in each leaf, by the largest number in it."""
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  return [float(np.max(np.abs(x - y)) / np.max(np.abs(x))) for x, y in pairs]


@pytest.mark.parametrize("options", [{"devices": 4}, {"accumulate": 4}], ids=str)
def test_devices_and_micro_batches_change_the_order_of_sums_only(digits, options):
  alone = digits.main("float32", 3, norm="group")
  found = digits.main("float32", 3, norm="group", **options)
  params = jax.device_get((found.state.params, alone.state.params))
  # Adam divides by the size of a gradient, so that rounding shows at once where it is near 0.
  assert max(differences(*params)) < 2e-4
  np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-5)
  placed = {len(x.sharding.device_set) for x in jax.tree.leaves(found.state.params)}
  assert placed == {options.get("devices", 1)}


def test_a_batch_that_cannot_be_cut(digits):
  with pytest.raises(ValueError, match="64 images cannot be cut for 3 devices x 1 parts"):
    digits.main(devices=3)


@pytest.mark.convergence
def test_overflow_is_recovered_from(overflow_recovery, tmp_path, capsys):
  ours = recovered(overflow_recovery, tmp_path, capsys)
  assert ours.loss[-20:].mean() < 0.05


def test_overflow_is_skipped_and_the_scale_follows(
  overflow_recovery, tmp_path, capsys, monkeypatch
):
  monkeypatch.setattr(overflow_recovery, "BROKEN", 12)
  monkeypatch.setattr(overflow_recovery, "HEAVY", range(20, 23))
  recovered(overflow_recovery, tmp_path, capsys)


def recovered(overflow_recovery, tmp_path, capsys):
  """Runs the example, and checks what has nothing to do with how well it has learned."""
  path = tmp_path / "new" / "plot.png"
  steps = overflow_recovery.HEAVY.stop + 25
  ours, plain = overflow_recovery.main(steps, path)
  assert path.read_bytes().startswith(b"\x89PNG")
  assert str(path) in capsys.readouterr().out

  broken, heavy = overflow_recovery.BROKEN, overflow_recovery.HEAVY
  assert ours.loss_scale[0] == 2**24
  assert ours.skipped[0]
  assert ours.skipped[broken]
  assert ours.skipped[heavy.start]
  assert not ours.skipped[-20:].any()
  # Half after each skip; in between it only grows, by doubling.
  factors = ours.loss_scale[1:] / ours.loss_scale[:-1]
  assert set(factors[ours.skipped[:-1]]) == {0.5}
  assert set(factors[~ours.skipped[:-1]]) == {1.0, 2.0}
  # Overflow alone is no reason to skip: the loss itself was finite but for the broken batch.
  assert np.isfinite(np.delete(ours.loss, broken)).all()
  assert np.isfinite(plain.loss[:broken]).all()
  assert np.isnan(plain.loss[broken:]).all()
  return ours


def test_plot_is_not_empty(overflow_recovery, tmp_path):
  from matplotlib import image

  count = overflow_recovery.HEAVY.stop + 5
  history = overflow_recovery.History(
    loss=np.geomspace(2, 0.1, count),
    loss_scale=np.full(count, 2.0**15),
    skipped=np.arange(count) == 3,
  )
  plain = history._replace(loss=np.where(np.arange(count) < 9, history.loss, np.nan))
  overflow_recovery.plot(history, plain, tmp_path / "plot.png")
  pixels = image.imread(tmp_path / "plot.png")
  assert pixels.shape == (900, 1350, 4)
  for color in (overflow_recovery.BLUE, overflow_recovery.ORANGE, overflow_recovery.RED):
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    assert (np.abs(pixels[..., :3] - wanted).max(-1) < 0.02).sum() > 50
