"""The errors that `mpjax.sensitivity` predicts, against those that are measured.

`benchmarks/sensitivity.py` measured them, for the programs and models of the benchmarks.
"""

import functools
import json
import math
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Circle

from docs.figures import style
from docs.figures.style import FOLDER, SMALL, Theme, text

MEASURED = FOLDER.parents[1] / "benchmarks" / "results" / "sensitivity" / "cpu.json"

DTYPES = ("float16", "bfloat16")

LEFT, RIGHT, TOP, RADIUS = 76, 500, 80, 3.6

LOW, HIGH = -4.5, -0.5
"""Exponents of ten: the range of the errors that are drawn."""

FACTOR = math.log10(2)
"""Half of the width of the band around the diagonal."""


class Dot(NamedTuple):
  """A program in a dtype, with its errors."""

  kind: str
  dtype: str
  predicted: float
  measured: float


@functools.cache
def facts() -> tuple[Dot, ...]:
  """What was measured, the delicate programs last."""
  cases = json.loads(MEASURED.read_text(encoding="utf-8"))["cases"].values()
  dots = [
    Dot(case["kind"], dtype, case[dtype]["predicted"], case[dtype]["measured"])
    for case in cases
    for dtype in DTYPES
    if dtype in case
  ]
  return tuple(sorted(dots, key=lambda dot: dot.kind, reverse=True))


def draw(theme: Theme) -> Figure:
  bottom = TOP + RIGHT - LEFT
  figure, axes = style.page(bottom + 62)
  text(axes, 14, 18, "Error of the gradient, predicted and measured", theme.text, bold=True)
  for x, dtype in zip((19, 110), DTYPES, strict=True):
    axes.add_patch(Circle((x, 46), RADIUS, fc=theme.lines[dtype], lw=0))
    text(axes, x + 10, 46, dtype, theme.lines[dtype], size=SMALL, bold=True)
  axes.add_patch(Circle((222, 46), RADIUS, fc=theme.faint, lw=0))
  text(axes, 232, 46, "healthy", theme.text, size=SMALL)
  axes.add_patch(Circle((304, 46), RADIUS, fc="none", ec=theme.faint, lw=1.4))
  text(axes, 314, 46, "delicate", theme.text, size=SMALL)
  axes.fill([390, 412, 412, 390], [40, 40, 52, 52], color=theme.fills["plain"], lw=0)
  text(axes, 418, 46, "factor of 2", theme.text, size=SMALL)

  def at(exponent: float) -> tuple[float, float]:
    """Returns the place of an error on both axes."""
    share = min(max((exponent - LOW) / (HIGH - LOW), 0), 1) * (RIGHT - LEFT)
    return LEFT + share, bottom - share

  # The band stays inside of the axes.
  ends = ((LOW, LOW), (LOW, LOW + FACTOR), (HIGH - FACTOR, HIGH))
  ends += ((HIGH, HIGH), (HIGH, HIGH - FACTOR), (LOW + FACTOR, LOW))
  xs, ys = [at(x)[0] for x, _ in ends], [at(y)[1] for _, y in ends]
  axes.fill(xs, ys, color=theme.fills["plain"], lw=0, zorder=0)
  axes.plot(*zip(at(LOW), at(HIGH), strict=True), color=theme.faint, lw=0.8, zorder=1)
  for exponent in range(math.ceil(LOW), math.floor(HIGH) + 1):
    x, y = at(exponent)
    axes.plot([x, x], [TOP, bottom], color=theme.rule, lw=0.5, zorder=1)
    axes.plot([LEFT, RIGHT], [y, y], color=theme.rule, lw=0.5, zorder=1)
    text(axes, x, bottom + 18, f"1e{exponent}", theme.faint, size=SMALL, ha="center")
    text(axes, LEFT - 8, y, f"1e{exponent}", theme.faint, size=SMALL, ha="right")
  for dot in facts():
    x, y = at(math.log10(dot.measured))[0], at(math.log10(dot.predicted))[1]
    color, is_healthy = theme.lines[dot.dtype], dot.kind == "healthy"
    filled = {"fc": color, "lw": 0} if is_healthy else {"fc": "none", "ec": color, "lw": 1.4}
    axes.add_patch(Circle((x, y), RADIUS, zorder=2, **filled))
  text(axes, (LEFT + RIGHT) / 2, bottom + 44, "measured", theme.faint, size=SMALL, ha="center")
  text(axes, 14, TOP + 14, "predicted", theme.faint, size=SMALL)
  return figure
