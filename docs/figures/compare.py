"""The errors of a stack of 12 layers: with one rounding in it, and under a policy.

`mpjax.compare` measured the data, which is in compare.json.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import mpjax
from docs.figures import style
from docs.figures.style import FOLDER, SMALL, Theme, text

MEASURED = FOLDER / "compare.json"

LAYERS, AT = 12, 7

LEFT, RIGHT, TALL = 66, 490, 150

KINDS = {"output": "float32", "cotangent": "bfloat16", "gradient": "float8"}
"""The errors that are drawn, each in the color of a dtype."""

LOW, HIGH = -5, -1
"""Exponents of ten: the range of the errors that are drawn."""


class Block(nn.Module):
  """A layer that may round its activations to bfloat16."""

  rounds: bool

  @nn.compact
  def __call__(self, x):
    y = nn.gelu(nn.Dense(256, name="up")(nn.LayerNorm(name="norm")(x)))
    if self.rounds:
      y = y.astype(jnp.bfloat16).astype(jnp.float32)
    return x + nn.Dense(64, name="down")(y)


class Net(nn.Module):
  """A stack of layers, one of which may round."""

  at: int = -1

  @nn.compact
  def __call__(self, x):
    for i in range(LAYERS):
      x = Block(i == self.at, name=f"block_{i}")(x)
    return nn.Dense(10, name="head")(x)


def measure() -> dict[str, Any]:
  """Compares the stack with one that rounds, and with itself under a policy."""
  x = jax.random.normal(jax.random.key(0), (32, 64))
  labels = jax.random.randint(jax.random.key(1), (32,), 0, 10)
  params = Net().init(jax.random.key(2), x)

  def loss_of(net):
    def loss_fn(params, x):
      chosen = jnp.take_along_axis(nn.log_softmax(net.apply(params, x)), labels[:, None], 1)
      return -jnp.mean(chosen)

    return loss_fn

  exact = loss_of(Net())
  rounded = mpjax.compare(loss_of(Net(AT)), exact)(params, x)
  policy = mpjax.compare(exact, policy="mixed_bfloat16")(params, x)
  if rounded.first is None:
    raise RuntimeError("nothing was found")
  return {"first": rounded.first.path, "rounded": _errors(rounded), "policy": _errors(policy)}


def _errors(report: mpjax.reports.CompareReport) -> dict[str, list[float]]:
  paths = [f"Net/block_{i}" for i in range(LAYERS)]
  rows = [next(row for row in report.rows if row.path == path) for path in paths]
  kinds = ("output", "cotangent", "gradient")
  return {kind: [float(f"{getattr(row, kind):.3g}") for row in rows] for kind in kinds}


@functools.cache
def facts() -> Mapping[str, Any]:
  """What was measured."""
  return json.loads(MEASURED.read_text(encoding="utf-8"))


def draw(theme: Theme) -> Figure:
  found = facts()
  figure, axes = style.page(560)
  text(axes, 14, 18, "relative error of", theme.text, size=SMALL)
  for number, (kind, color) in enumerate(KINDS.items()):
    text(axes, 142 + 96 * number, 18, kind, theme.lines[color], size=SMALL, bold=True)
  _panel(axes, theme, 52, f"One rounding to bfloat16, in block {AT}", found["rounded"])
  x, top = _at(AT), 52 + 30
  axes.plot([x, x], [top + 8, top + TALL], color=theme.lines["lost"], lw=1.2, zorder=0)
  text(axes, x - 6, top + 20, "they part here", theme.lines["lost"], size=SMALL, ha="right")
  _panel(axes, theme, 304, "The policy mixed_bfloat16, against float32", found["policy"])
  text(axes, (LEFT + RIGHT) / 2, 545, "block", theme.faint, size=SMALL, ha="center")
  return figure


def _at(layer: float) -> float:
  return LEFT + (layer + 0.5) / LAYERS * (RIGHT - LEFT)


def _panel(
  axes: Axes, theme: Theme, y: float, name: str, errors: Mapping[str, Sequence[float]]
) -> None:
  text(axes, 14, y, name, theme.text, bold=True)
  top, bottom = y + 30, y + 30 + TALL
  zero = bottom + 18  # Below the axis, which has no 0.
  for exponent in range(LOW, HIGH + 1):
    height = _height(10.0**exponent, top, bottom)
    axes.plot([LEFT, RIGHT], [height, height], color=theme.rule, lw=0.5, zorder=0)
    text(axes, LEFT - 8, height, f"1e{exponent}", theme.faint, size=SMALL, ha="right")
  text(axes, LEFT - 8, zero, "0", theme.faint, size=SMALL, ha="right")
  for kind, color in KINDS.items():
    heights = [_height(error, top, bottom) if error else zero for error in errors[kind]]
    places = [_at(i) for i in range(LAYERS)]
    axes.plot(places, heights, color=theme.lines[color], lw=1.2, zorder=1)
    for x, height in zip(places, heights, strict=True):
      axes.add_patch(Circle((x, height), 3.2, fc=theme.lines[color], lw=0, zorder=2))
  for i in range(LAYERS):
    text(axes, _at(i), bottom + 40, str(i), theme.faint, size=SMALL, ha="center")


def _height(error: float, top: float, bottom: float) -> float:
  share = (math.log10(error) - LOW) / (HIGH - LOW)
  return bottom - min(max(share, 0), 1) * (bottom - top)
