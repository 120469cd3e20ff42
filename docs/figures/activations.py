"""The headroom of layers while the learning rate of a float16 model grows.

`mpjax.sample_activations` measured the data, which is in activations.json.
"""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import mpjax
from docs.figures import style
from docs.figures.style import FOLDER, SMALL, Theme, text

MEASURED = FOLDER / "activations.json"

LAYERS, STEPS, EVERY = 8, 250, 5

RATE_PER_STEP = 2.5e-4

SHOWN = {"block_0": "float8", "block_3": "bfloat16", "block_7": "float32"}
"""The layers that are drawn, each in the color of a dtype."""


class Block(nn.Module):
  """A layer whose sum is not normalized."""

  @nn.compact
  def __call__(self, x):
    return x + nn.Dense(64, name="down")(nn.relu(nn.Dense(256, name="up")(x)))


class Net(nn.Module):
  """A stack of layers that classifies digits."""

  @nn.compact
  def __call__(self, x):
    for i in range(LAYERS):
      x = Block(name=f"block_{i}")(x)
    return nn.Dense(10, name="head")(x)


def measure() -> dict[str, Any]:
  """Trains in float16, and returns what the samples of each layer were."""
  data, target = load_digits(return_X_y=True)
  images, labels = jnp.asarray(data / 16, jnp.float32), jnp.asarray(target)
  model = mpjax.with_policy(Net(), "mixed_float16")
  params = model.init(jax.random.key(0), images[:1])
  tx = mpjax.loss_scaling(optax.adam(lambda count: RATE_PER_STEP * count))
  tx = mpjax.monitor_activations(tx, [f"{layer}/down" for layer in SHOWN], every=EVERY)

  def loss_fn(params, images, labels):
    logits = model.apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

  @jax.jit
  def step(params, opt_state, images, labels):
    opt_state = mpjax.sample_activations(loss_fn, opt_state)(params, images, labels)
    loss, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(params, images, labels)
    updates, opt_state = tx.update(grads, opt_state, params)
    return mpjax.apply_updates(params, updates, opt_state), opt_state, loss

  opt_state = tx.init(params)
  headroom: dict[str, list[float]] = {layer: [] for layer in SHOWN}
  skipped: list[int] = []
  for i in range(STEPS):
    rows = jax.random.randint(jax.random.key(i), (256,), 0, len(labels))
    params, opt_state, _ = step(params, opt_state, images[rows], labels[rows])
    if i % EVERY == 0:
      for glob, row in mpjax.states.activation_statistics(opt_state).items():
        headroom[glob.removesuffix("/down")].append(round(float(row.headroom), 2))
    if not mpjax.step_applied(opt_state):
      skipped.append(i)
  return {"headroom": headroom, "skipped": skipped}


@functools.cache
def facts() -> Mapping[str, Any]:
  """What was measured."""
  return json.loads(MEASURED.read_text(encoding="utf-8"))


LEFT, RIGHT, TOP, BOTTOM = 66, 430, 66, 266

HIGH = 17
"""The exponent of two of the largest headroom that is drawn."""


def draw(theme: Theme) -> Figure:
  measured = facts()
  figure, axes = style.page(340)
  text(axes, 14, 20, "Headroom of activations in float16", theme.text, bold=True)
  text(axes, 14, 42, "65504 / the largest magnitude", theme.faint, size=SMALL)
  for exponent in range(0, HIGH + 1, 4):
    height = _height(2.0**exponent)
    axes.plot([LEFT, RIGHT], [height, height], color=theme.rule, lw=0.5, zorder=0)
    text(axes, LEFT - 8, height, f"2^{exponent}", theme.faint, size=SMALL, ha="right")
  for layer, color in SHOWN.items():
    headroom = measured["headroom"][layer]
    places = [_at(i * EVERY) for i in range(len(headroom))]
    axes.plot(places, [*map(_height, headroom)], color=theme.lines[color], lw=1.4, zorder=1)
    text(axes, RIGHT + 8, _height(headroom[-1]), layer, theme.lines[color], size=SMALL, bold=True)
  for step in measured["skipped"]:
    axes.plot([_at(step)] * 2, [BOTTOM + 10, BOTTOM + 20], color=theme.lines["lost"], lw=1.2)
  text(axes, RIGHT + 8, BOTTOM + 15, "skipped", theme.lines["lost"], size=SMALL, bold=True)
  for step in range(0, STEPS + 1, 50):
    text(axes, _at(step), BOTTOM + 36, str(step), theme.faint, size=SMALL, ha="center")
  text(axes, (LEFT + RIGHT) / 2, BOTTOM + 58, "step", theme.faint, size=SMALL, ha="center")
  return figure


def _at(step: float) -> float:
  return LEFT + step / STEPS * (RIGHT - LEFT)


def _height(headroom: float) -> float:
  # It is 0 after an overflow, which a logarithm does not show.
  return BOTTOM - math.log2(max(headroom, 1)) / HIGH * (BOTTOM - TOP)
