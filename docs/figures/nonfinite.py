"""A stack of 10 layers that overflows float16: how large its numbers are, and what broke first.

`mpjax.ranges` and `mpjax.find_nonfinite` measured the data, which is in nonfinite.json.
"""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import mpjax
from docs.figures import style
from docs.figures.style import FOLDER, SMALL, Theme, text

MEASURED = FOLDER / "nonfinite.json"

LAYERS = 10

LEFT, RIGHT, TOP, TALL = 66, 490, 88, 210

LOW, HIGH = 1, 6
"""Exponents of ten: the range of the numbers that are drawn."""


class Block(nn.Module):
  """A residual layer without a norm, whose numbers grow."""

  @nn.compact
  def __call__(self, x):
    y = nn.relu(nn.Dense(64, name="up")(x))
    return x + 3 * nn.Dense(16, name="down")(y)


class Net(nn.Module):
  """A stack of layers."""

  @nn.compact
  def __call__(self, x):
    for i in range(LAYERS):
      x = Block(name=f"block_{i}")(x)
    return nn.Dense(4, name="head")(x)


def measure() -> dict[str, Any]:
  """Returns the largest number of each layer in float32, and the report of float16."""
  x = 8 * jax.random.normal(jax.random.key(0), (32, 16))
  params = Net().init(jax.random.key(1), x)
  groups = mpjax.ranges(Net().apply)(params, x).of("activations")
  largest = [
    max(group.largest for group in groups if f"block_{i}" in group.path.split("/"))
    for i in range(LAYERS)
  ]

  def found(*rules: mpjax.Rule) -> mpjax.reports.NonfiniteReport:
    return mpjax.find_nonfinite(mpjax.with_policy(Net(), "mixed_float16", rules).apply)(params, x)

  report = found()
  return {
    "largest": [float(f"{number:.3g}") for number in largest],
    "path": report.path,
    "operation": report.operation,
    "cure": report.cure.partition("  #")[0],
  }


@functools.cache
def facts() -> Mapping[str, Any]:
  """What was measured."""
  return json.loads(MEASURED.read_text(encoding="utf-8"))


def draw(theme: Theme) -> Figure:
  found = facts()
  figure, axes = style.page(TOP + TALL + 66)
  text(axes, 14, 18, "Largest number of each block, in float32", theme.text, bold=True)
  text(axes, 14, 44, "First inf in float16, at", theme.text, size=SMALL)
  words = f"{found['path']}: {found['operation']}"
  text(axes, 162, 44, words, theme.lines["lost"], size=SMALL, bold=True)
  for exponent in range(LOW, HIGH + 1):
    y = _height(10.0**exponent)
    axes.plot([LEFT, RIGHT], [y, y], color=theme.rule, lw=0.5, zorder=0)
    text(axes, LEFT - 8, y, f"1e{exponent}", theme.faint, size=SMALL, ha="right")
  _limit(axes, theme)
  first = next(i for i in range(LAYERS) if f"block_{i}" in found["path"].split("/"))
  places = [(_at(i), _height(number)) for i, number in enumerate(found["largest"])]
  axes.plot([_at(first)] * 2, [TOP, TOP + TALL], color=theme.lines["lost"], lw=1.2, zorder=0)
  axes.plot(*zip(*places, strict=True), color=theme.lines["float32"], lw=1.2, zorder=1)
  for i, place in enumerate(places):
    color = theme.lines["lost" if i == first else "float32"]
    axes.add_patch(Circle(place, 4, fc=color, lw=0, zorder=2))
    text(axes, place[0], TOP + TALL + 20, str(i), theme.faint, size=SMALL, ha="center")
  text(axes, (LEFT + RIGHT) / 2, TOP + TALL + 46, "block", theme.faint, size=SMALL, ha="center")
  return figure


def _limit(axes: Axes, theme: Theme) -> None:
  """Draws the largest number of float16."""
  y, color = _height(65504.0), theme.lines["float16"]
  axes.plot([LEFT, RIGHT], [y, y], color=color, lw=1.2, ls="--", zorder=0)
  text(axes, LEFT + 6, y + 14, "float16 ends at 65504", color, size=SMALL)


def _at(layer: int) -> float:
  return LEFT + (layer + 0.5) / LAYERS * (RIGHT - LEFT)


def _height(number: float) -> float:
  share = (math.log10(number) - LOW) / (HIGH - LOW)
  return TOP + TALL - min(max(share, 0), 1) * TALL
