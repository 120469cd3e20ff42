"""The updater: overflow is retried, a broken batch is lost, and devices stay alike to the bit."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import mpjax

STEPS, FEW = 80, 11


@pytest.fixture
def updater(example) -> Any:
  return example("updater")


def by_hand(updater, example, steps, of):
  """Returns the losses of NNabla's loop in float32: clip, decay, then momentum, on one device.

  Those of the first `steps`, where the schedule ends after `of`.
  """
  digits = example("digits")
  network = updater.Network()
  params = network.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]
  velocity = jax.tree.map(jnp.zeros_like, params)
  rate = optax.cosine_decay_schedule(0.1, of)

  @jax.jit
  def grad_fn(params, images, labels):
    def loss_fn(params):
      logits = network.apply({"params": params}, images)
      chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
      return -chosen.mean()

    return jax.value_and_grad(loss_fn)(params)

  losses = []
  for step, (images, labels) in enumerate(digits.batches(digits.load_data()[0], steps)):
    loss, grads = jax.device_get(grad_fn(params, images, labels))
    norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g, p, n=norm: g / max(n, 1) + 1e-4 * p, grads, params)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v, n=step: p - rate(n) * v, params, velocity)
    losses.append(loss)
  return np.array(losses)


def scales(first, metrics, growth_interval):
  """Returns the loss scales that follow from the retries and losses of a run."""
  found, scale, good = [], first, 0
  for retries, finite in zip(metrics["retries"], metrics["finite"], strict=True):
    scale, good = scale / 2.0**retries, 0 if retries else good
    scale, good = (scale, good + 1) if finite else (scale / 2, 0)
    if good == growth_interval:
      scale, good = scale * 2, 0
    found.append(scale)
  return np.array(found)


@pytest.mark.convergence
def test_updater_with_all_options(updater, example, tmp_path):
  runs = trained(updater, example, STEPS, tmp_path)
  for run in runs.values():
    assert run.losses[-10:].mean() < 0.1 * run.losses[0]
    assert run.state.accuracy > 0.95
  full, half = runs["float32"].state, runs["mixed_float16"].state
  # Seeds 0 to 4 of the float32 run lie between 0.971 and 0.980.
  assert abs(full.accuracy - half.accuracy) < 0.01
  config = updater.UPDATERS["mixed_float16"]["loss_scale"]
  assert half.metrics["loss_scale"][updater.HEAVY.start - 1] > config.init_scale


def test_updater_retries_skips_and_agrees_on_two_devices(updater, example, tmp_path, monkeypatch):
  monkeypatch.setattr(updater, "BROKEN", 3)
  monkeypatch.setattr(updater, "HEAVY", range(6, 8))
  # The scale that overflows with a heavy batch is one that a long run grows to.
  config = mpjax.DynamicLossScale(init_scale=2**10, growth_interval=4)
  options = {"loss_scale": config, "max_retries": 20}
  monkeypatch.setitem(updater.UPDATERS, "mixed_float16", options)
  trained(updater, example, FEW, tmp_path, compared=3)


def trained(updater, example, steps, tmp_path, compared=8):
  """Runs the example, and checks what has nothing to do with how well it has learned.

  The losses of the first `compared` steps are those of a loop by hand.
  """
  text = io.StringIO()
  runs = updater.main(
    steps,
    tmp_path / "plot.png",
    ("float32", "mixed_float16"),
    Console(file=text, width=100),
    devices=2,
    accum_grad=2,
  )
  assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
  full, half = runs["float32"].state, runs["mixed_float16"].state
  for run in runs.values():
    assert f"{run.state.accuracy:.2%}" in text.getvalue()

  # Two devices with two micro-batches each do what NNabla's loop does with all rows at once.
  alone = by_hand(updater, example, compared, steps)
  np.testing.assert_allclose(runs["float32"].losses[:compared], alone, rtol=1e-5)

  # Heavy batches overflow, are run again at a lower scale, and are not lost.
  heavy = list(updater.HEAVY)
  assert half.metrics["retries"][heavy[0]] > 1
  assert half.metrics["finite"][heavy].all()
  # No scale mends the broken one: it is not run again, and it alone is lost, by both devices.
  assert np.flatnonzero(~half.metrics["finite"]).tolist() == [updater.BROKEN]
  assert not np.isfinite(half.metrics["loss"][updater.BROKEN])
  assert half.metrics["retries"][updater.BROKEN] == 0
  assert (int(full.state.step), int(half.state.step)) == (steps, steps - 1)
  assert "1 │" in next(line for line in text.getvalue().splitlines() if "batches lost" in line)
  config = updater.UPDATERS["mixed_float16"]["loss_scale"]
  expected = scales(config.init_scale, half.metrics, config.growth_interval)
  np.testing.assert_array_equal(half.metrics["loss_scale"], expected)

  for run in runs.values():
    for leaf in jax.tree.leaves(run.state.state):
      first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
      assert (first.dtype, first.tobytes()) == (second.dtype, second.tobytes())
  assert {p.dtype for p in jax.tree.leaves(half.state.params)} == {jnp.dtype("float32")}
  return runs


def test_replicas_that_differ_are_seen(updater, devices):
  mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices[:2])
  everywhere = jax.NamedSharding(mesh, jax.P())

  def replicated(*values):
    copies = [jax.device_put(np.float32(x), d) for x, d in zip(values, devices[:2], strict=True)]
    return jax.make_array_from_single_device_arrays((), everywhere, copies)

  assert updater.replicas_agree({"a": replicated(1, 1), "b": replicated(2, 2)})
  assert not updater.replicas_agree({"a": replicated(1, 1), "b": replicated(2, 2.0000002)})
  assert not updater.replicas_agree({"a": replicated(0.0, -0.0)})
