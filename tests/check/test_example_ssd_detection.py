"""The detector of the examples is one, learns, and learns the same in half."""

import io
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from mpjax._jaxprs import count
from mpjax._jaxprs.walk import walk

FULL = jnp.dtype("float32")


@pytest.fixture
def ssd(example) -> Any:
  return example("ssd_detection")


def new_scenes(ssd, count):
  return ssd.make_scenes(ssd.load_data()[1], count, np.random.default_rng(3))


@pytest.mark.convergence
def test_half_learns_like_float32(ssd, tmp_path):
  runs, interval = trained(ssd, 30, tmp_path), 6
  for run in runs.values():
    assert run.losses[-5:].mean() < 0.5 * run.losses[0]
  losses = [run.losses[-10:].mean() for run in runs.values()]
  # In float32 it ends between 7.1 and 8.0, from four initial weights.
  assert abs(losses[1] / losses[0] - 1) < 0.03
  follows_the_rule(runs["mixed_float16"].state.scales, interval)


def test_products_are_half_and_sensitive_operations_float32(ssd, tmp_path):
  trained(ssd, 2, tmp_path)


def trained(ssd, steps, tmp_path):
  """Runs the example, and checks what has nothing to do with how well it has learned."""
  text, path, policies = io.StringIO(), tmp_path / "plot.png", ("float32", "mixed_float16")
  network, interval, console = ssd.Detector(width=8, depth=1), 6, Console(file=text, width=100)
  runs = ssd.main(steps, path, policies, console, network=network, growth_interval=interval)
  assert path.read_bytes().startswith(b"\x89PNG")
  for run in runs.values():
    assert {p.dtype for p in jax.tree.leaves(run.state.params)} == {FULL}
  plain, mixed = (run.state for run in runs.values())
  assert set(plain.scales) == {1}
  assert f"{mixed.scales[0]:.0f}" in text.getvalue()
  scenes = new_scenes(ssd, 8)
  for state, share in ((plain, 0), (mixed, 1)):
    program = jax.make_jaxpr(state.step)(state.params, state.opt_state, scenes)
    assert count.half_share(count.products(program)) == share
    # Of the softmax, of the offsets of boxes, and of the norms.
    eqns = [visit.eqn for visit in walk(program)]
    sensitive = [eqn for eqn in eqns if eqn.primitive.name in ("exp", "log", "rsqrt")]
    assert {x.aval.dtype for eqn in sensitive for x in eqn.invars} == {FULL}
    assert {eqn.primitive.name for eqn in sensitive} == {"exp", "log", "rsqrt"}
  return runs


def follows_the_rule(scales, interval):
  """Asserts that a scale grew after so many finite steps, and only then, and was halved."""
  finite = growths = skips = 0
  for scale, after in itertools.pairwise(scales):
    finite += 1
    if after < scale:
      assert after == scale / 2
      finite, skips = 0, skips + 1
    elif finite == interval:
      assert after == 2 * scale
      finite, growths = 0, growths + 1
    else:
      assert after == scale
  assert growths >= 2
  assert skips >= 1


def test_overlap_is_that_of_pixels(ssd):
  rng = np.random.default_rng(0)
  corners = np.sort(rng.integers(0, 9, (200, 2, 2, 2)), axis=2)  # [pair, box, corner, axis]
  corners[:, :, 1] += 1  # no empty boxes
  grid = np.indices((10, 10))[None, None]  # [1, 1, axis, y, x]
  low, high = (corners[:, :, i, :, None, None] for i in (0, 1))
  first, second = ((grid >= low) & (grid < high)).all(2).swapaxes(0, 1)
  wanted = (first & second).sum((1, 2)) / (first | second).sum((1, 2))
  a, b = corners.reshape(200, 2, 4).swapaxes(0, 1).astype(np.float32)
  np.testing.assert_allclose(ssd.overlap(a, b), wanted, rtol=1e-6)


class Given:
  """In the place of a model: predicts what it is given."""

  def apply(self, variables, images):
    return variables["params"]


def test_scenes_are_found_when_every_anchor_predicts_what_it_is_to_predict(ssd):
  scenes = new_scenes(ssd, 60)
  classes, offsets = jax.jit(jax.vmap(ssd.match))(scenes.boxes, scenes.classes)
  # More than one anchor matches most boxes: without suppression the rest would be false alarms.
  assert (classes != ssd.BACKGROUND).sum() > 1.3 * (scenes.classes >= 0).sum()
  right = 9 * jax.nn.one_hot(classes, ssd.BACKGROUND + 1), offsets
  given = Given()
  assert ssd.mean_average_precision(given, right, scenes) == pytest.approx(1, abs=0.02)
  wrong = 9 * jax.nn.one_hot((classes + 1) % 10, ssd.BACKGROUND + 1), offsets
  assert ssd.mean_average_precision(given, wrong, scenes) < 0.02
  elsewhere = right[0], offsets.at[..., 1].add(8)
  assert ssd.mean_average_precision(given, elsewhere, scenes) < 0.1


def test_average_precision_by_hand(ssd):
  # Two scenes with a true box each. By score: a hit, its duplicate, one suppressed, a late hit.
  scores = np.array([[0.9, 0.8, 0.0], [0.3, 0.0, 0.0]])
  overlaps = np.array([[[0.7], [0.9], [0.9]], [[0.5], [1.0], [0.0]]])
  present = np.array([[True], [True]])
  assert ssd.average_precision(scores, overlaps, present) == pytest.approx((1 + 2 / 3) / 2)
  # After a false alarm: at the recall of the first hit, the better precision of the second counts.
  alarm = np.array([[0.9, 0.8, 0.0], [0.7, 0.0, 0.0]]), np.array([[[0.1], [0.9], [0]], [[0.5]] * 3])
  assert ssd.average_precision(*alarm, present) == pytest.approx(2 / 3)
  # Nothing counts without a score, or below half.
  assert ssd.average_precision(0 * scores, overlaps, present) == 0
  assert ssd.average_precision(scores, 0.49 * overlaps, present) == 0


def test_the_loss_by_hand(ssd):
  scenes = new_scenes(ssd, 3)
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(3, len(ssd.ANCHORS), ssd.BACKGROUND + 1)).astype(np.float32)
  offsets = rng.normal(size=(3, len(ssd.ANCHORS), 4)).astype(np.float32)

  @jax.jit
  def found(logits, offsets, scenes):
    matches = jax.vmap(ssd.match)(scenes.boxes, scenes.classes)
    return ssd.detection_loss(logits, offsets, scenes), matches

  loss, (classes, wanted) = jax.device_get(found(logits, offsets, scenes))
  total = matches = 0
  for scene in range(3):
    positive, negative = [], []
    for anchor, label in enumerate(classes[scene]):
      row = np.asarray(logits[scene, anchor], np.float64)
      entropy = math.log(np.exp(row).sum()) - row[label]
      (negative if label == ssd.BACKGROUND else positive).append(entropy)
      if label != ssd.BACKGROUND:
        error = np.abs(np.float64(offsets[scene, anchor]) - wanted[scene, anchor])
        total += np.where(error < 1, error**2 / 2, error - 0.5).sum()
    total += sum(positive) + sum(sorted(negative)[-3 * len(positive) :])
    matches += len(positive)
  np.testing.assert_allclose(loss, total / matches, rtol=1e-5)
