"""The gradients of a real network against the range of float16, without a loss scale and with one.

What is drawn is in underflow.json: the histogram of the gradients of examples/digits.py at the end
of its training in float16, and the loss scale that it had found by then.
"""

import functools
import importlib
import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

import mpjax
from docs.figures import style
from docs.figures.style import FOLDER, SMALL, Theme, text
from mpjax._diagnose.report import percent

MEASURED = FOLDER / "underflow.json"

LEFT, RIGHT, TALL = 14, 506, 118

ZERO, SUBNORMAL, OVERFLOW = -25, -14, 16
"""Exponents of float16: below the first a number rounds to 0, below the second it has fewer than
11 bits, from the third on it is inf."""


class Shares(NamedTuple):
  """What float16 does to the gradients that are not zero, each from 0 to 1."""

  zero: float
  subnormal: float
  overflow: float


def measure(steps: int | None = None) -> dict[str, Any]:
  """Trains the network of examples/digits.py under mixed_float16, and counts its gradients.

  They are those of a float32 backward pass: of every operation in the network, of weights and
  of activations.
  """
  sys.path.append(str(FOLDER.parent.parent / "examples"))
  digits = importlib.import_module("digits")
  steps = steps or digits.STEPS
  state, metrics = (result := digits.main("mixed_float16", steps)).state, result.metrics
  training = digits.prepare("float32", mpjax.NoLossScale(), steps)
  images, labels = next(digits.batches(digits.load_data()[0], 1, seed=1))
  gradient = jax.value_and_grad(training.loss_fn, has_aux=True)
  report = mpjax.ranges(gradient)(state.params, state.batch_stats, images, labels)
  counts: dict[int, int] = {}
  for group in report.of("gradients"):
    if group.path.startswith("Network"):  # Not the loss, which is float32 in any case.
      for exponent, count in group.exponents.items():
        counts[exponent] = counts.get(exponent, 0) + count
  return {
    "steps": int(metrics["total"]),
    "skipped": int(metrics["skipped"]),
    "loss_scale": float(metrics["loss_scale"]),
    "exponents": {str(exponent): counts[exponent] for exponent in sorted(counts)},
  }


@functools.cache
def facts() -> Mapping[str, Any]:
  """What was measured."""
  return json.loads(MEASURED.read_text(encoding="utf-8"))


def shares(exponents: Mapping[int, int]) -> Shares:
  """Returns what float16 does to numbers, given how many there are of each exponent."""
  total = sum(exponents.values())
  zero = sum(n for e, n in exponents.items() if e < ZERO)
  subnormal = sum(n for e, n in exponents.items() if ZERO <= e < SUBNORMAL)
  overflow = sum(n for e, n in exponents.items() if e >= OVERFLOW)
  return Shares(zero / total, subnormal / total, overflow / total)


def draw(theme: Theme) -> Figure:
  found = facts()
  exponents = {int(e): n for e, n in found["exponents"].items()}
  moved = round(float(np.log2(found["loss_scale"])))
  scaled = {e + moved: n for e, n in exponents.items()}
  low, high = min(exponents) - 2, OVERFLOW + 4
  figure, axes = style.page(478)
  _histogram(axes, theme, 18, "Gradients of the loss", exponents, low, high)
  peak = max(exponents, key=lambda e: exponents[e])
  _shift(axes, theme, 229, [_at(e, low, high) for e in (peak, peak + moved)], moved)
  _histogram(axes, theme, 254, f"In the backward pass, × 2^{moved}", scaled, low, high)
  for exponent in range(-32, high, 8):
    x = _at(exponent, low, high)
    text(axes, x, 434, f"2^{exponent}", theme.faint, size=SMALL, ha="center")
  words = f"size of a gradient; {sum(exponents.values()):,} of them, after {found['steps']} steps"
  text(axes, (LEFT + RIGHT) / 2, 460, words, theme.faint, size=SMALL, ha="center")
  return figure


def _at(exponent: float, low: int, high: int) -> float:
  return LEFT + (exponent - low) / (high - low) * (RIGHT - LEFT)


def _shift(axes: Axes, theme: Theme, y: float, ends: list[float], moved: int) -> None:
  arrow = FancyArrowPatch(
    *((ends[0], y), (ends[1], y)), arrowstyle="-|>", mutation_scale=11, color=theme.text, lw=1.2
  )
  axes.add_patch(arrow)
  words = f"each gradient × 2^{moved}"
  text(axes, sum(ends) / 2, y - 13, words, theme.text, size=SMALL, ha="center")


def _histogram(
  axes: Axes, theme: Theme, y: float, name: str, counts: Mapping[int, int], low: int, high: int
) -> None:
  lost = shares(counts)
  text(axes, LEFT, y, name, theme.text, bold=True)
  words = f"{percent(lost.zero)} become 0, {percent(lost.subnormal)} lose bits"
  text(axes, RIGHT, y, words, theme.text, size=SMALL, ha="right")
  top, bottom = y + 20, y + 46 + TALL
  edges = [low, ZERO, SUBNORMAL, OVERFLOW, high]
  names = ["become 0", "lose bits", "have all 11 bits of float16", "inf"]
  kinds = ["lost", "plain", "float16", "lost"]
  for (left, right), zone, kind in zip(pairwise(edges), names, kinds, strict=True):
    x, end = _at(left, low, high), _at(right, low, high)
    color, alpha = theme.fills[kind], 1 if kind != "float16" else 0.75
    axes.add_patch(Rectangle((x, top), end - x, bottom - top, fc=color, lw=0, alpha=alpha))
    text(axes, (x + end) / 2, top + 13, zone, theme.text, size=SMALL, ha="center")
    for exponent in range(left, right):
      height = counts.get(exponent, 0) / max(counts.values()) * (TALL - 4)
      if height:
        bar = _at(exponent, low, high) + 0.7, _at(exponent + 1, low, high) - 0.7
        size = bar[1] - bar[0], max(height, 1)
        axes.add_patch(Rectangle((bar[0], bottom - size[1]), *size, fc=theme.lines[kind], lw=0))
  axes.plot([LEFT, RIGHT], [bottom, bottom], color=theme.rule, lw=0.8)
