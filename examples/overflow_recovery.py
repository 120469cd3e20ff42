"""Provoke overflow in float16, and watch training recover from it.

  python examples/overflow_recovery.py

Three things go wrong in this run. It starts at a loss scale of 2^24, far too large; one batch has a
broken pixel, which is inf in float16; and for some batches the loss weighs 256 times as much, so
that gradients overflow at the scale reached by then. Each time the steps that overflowed are
skipped without a trace, and the scale comes down and grows again.

Beside it runs what one writes at first: parameters and images cast to float16, a plain optimizer.
Its first inf is its last finite step. The plot is written to out/overflow_recovery.png.
"""

import pathlib
from typing import Any, NamedTuple

import digits
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

import mpjax

STEPS = 320
OUT = pathlib.Path(__file__).parent.parent / "out" / "overflow_recovery.png"

BROKEN = 100
"""The step whose batch has a broken pixel."""

HEAVY = range(180, 200)
"""The steps whose loss weighs more."""


class History(NamedTuple):
  """What a run recorded, one value for each step."""

  loss: np.ndarray
  loss_scale: np.ndarray  # that the step was made with
  skipped: np.ndarray


def incidents(steps):
  """Yields batches of images, labels and weights in which something is wrong now and then."""
  train, _ = digits.load_data()
  for number, (images, labels) in enumerate(digits.batches(train, steps)):
    if number == BROKEN:
      images = images.copy()
      images[0, 0, 0] = 1e6  # float16 ends at 65504
    yield images, labels, np.float32(256 if number in HEAVY else 1)


def train(apply, tx, steps):
  """Trains `NETWORK` with a way to apply it and an optimizer, and returns the history."""
  variables = digits.NETWORK.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)

  def loss_fn(params, batch_stats, images, labels, weight):
    logits, new_stats = apply({"params": params, "batch_stats": batch_stats}, images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return weight * losses.mean(), new_stats

  @jax.jit
  def step(state, images, labels, weight):
    params, batch_stats, opt_state = state
    grad_fn = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state), has_aux=True)
    (loss, new_stats), grads = grad_fn(params, batch_stats, images, labels, weight)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    batch_stats = mpjax.keep_if_skipped(opt_state, new_stats, batch_stats)
    return digits.State(params, batch_stats, opt_state), loss

  params = variables["params"]
  state = digits.State(params, variables["batch_stats"], tx.init(params))
  rows = []
  for batch in incidents(steps):
    scale = mpjax.loss_scaling_metrics(state.opt_state)["loss_scale"]
    state, loss = step(state, *batch)
    is_applied = mpjax.step_applied(state.opt_state)
    rows.append((float(loss), float(scale), not bool(is_applied)))
  return History(*(np.array(column) for column in zip(*rows, strict=True)))


def optimizer():
  """Returns what both runs use. Clipping reads the size of gradients, which are plain."""
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def protected(steps):
  """Trains under a policy, with a scale that starts too high."""
  model = mpjax.with_policy(digits.NETWORK, "mixed_float16")
  scale = mpjax.DynamicLossScale(init_scale=2**24, growth_interval=20)

  def apply(variables, images):
    logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
    return logits, new["batch_stats"]

  return train(apply, mpjax.loss_scaling(optimizer(), scale), steps)


def unprotected(steps):
  """Trains with everything cast to float16 by hand; `NoLossScale` adds nothing to optax."""

  def half(x: Any) -> Any:
    return x.astype(jnp.float16)

  def apply(variables, images):
    variables = {**variables, "params": jax.tree.map(half, variables["params"])}
    logits, new = digits.NETWORK.apply(variables, half(images), train=True, mutable=["batch_stats"])
    return logits.astype(jnp.float32), new["batch_stats"]

  return train(apply, mpjax.loss_scaling(optimizer(), mpjax.NoLossScale()), steps)


BLUE, ORANGE, RED = "#0072b2", "#e69f00", "#d55e00"  # told apart with any colour vision


def plot(ours: History, plain: History, path: pathlib.Path) -> None:
  """Draws loss and loss scale over the steps, and marks the skipped ones."""
  steps = np.arange(len(ours.loss))
  figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 6), layout="constrained")
  skipped = np.flatnonzero(ours.skipped)
  draw_loss(above, ours, plain, steps)
  below.step(steps, ours.loss_scale, where="mid", color=BLUE, label="loss scale")
  marks = {"color": RED, "marker": "x", "linestyle": "none", "zorder": 3}
  below.plot(skipped, ours.loss_scale[skipped], **marks, label=f"skipped ({len(skipped)} steps)")
  below.set(ylabel="loss scale", xlabel="step")
  below.set_yscale("log", base=2)
  below.text(8, ours.loss_scale[0], "starts far too large", va="center")
  figure.legend(loc="outside lower center", ncols=2)
  for axes in (above, below):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    for first, last in ((BROKEN, BROKEN), (HEAVY.start, HEAVY.stop - 1)):
      axes.axvspan(first - 0.5, last + 0.5, color="0.85", zorder=0)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
  plt.close(figure)


def draw_loss(axes: Axes, ours: History, plain: History, steps: np.ndarray) -> None:
  """Draws the loss of both runs, and where one of them ends."""
  axes.plot(steps, plain.loss, color=ORANGE, linewidth=3, label="cast to float16, plain optimizer")
  axes.plot(steps, ours.loss, color=BLUE, linewidth=1.2, label="mixed_float16 with loss scaling")
  lost = np.flatnonzero(~np.isfinite(plain.loss))
  if len(lost):
    last = (lost[0] - 1, plain.loss[lost[0] - 1])
    axes.plot(*last, "o", color=ORANGE, markeredgecolor="black", zorder=3)
    arrow = {"arrowstyle": "-", "color": "0.3"}
    axes.annotate(
      "NaN from here on", last, xytext=(24, -46), textcoords="offset points", arrowprops=arrow
    )
  axes.set(yscale="log", ylabel="loss of the batch")
  axes.set_title("Training in float16: a step that overflows is skipped, and the run goes on")
  axes.text(BROKEN + 2, axes.get_ylim()[1], "broken pixel", va="top")
  axes.text(HEAVY.stop + 2, axes.get_ylim()[1], "loss times 256", va="top")


def main(steps: int = STEPS, path: pathlib.Path = OUT) -> tuple[History, History]:
  """Runs both, writes the plot, and returns their histories."""
  mpl.use("agg")
  ours, plain = protected(steps), unprotected(steps)
  plot(ours, plain, path)
  finite = int(np.isfinite(plain.loss).sum())
  print(f"with loss scaling: {int(ours.skipped.sum())} of {steps} steps skipped, ", end="")
  print(f"final loss {ours.loss[-1]:.4f}, final loss scale {ours.loss_scale[-1]:.0f}")
  print(f"without: NaN after {finite} of {steps} steps")
  print(f"plot: {path}")
  return ours, plain


if __name__ == "__main__":
  main()
