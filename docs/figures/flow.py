"""Boxes and arrows, for figures that show what flows where."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path

from docs.figures.style import SIZE, SMALL, Theme, text

Point: TypeAlias = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Box:
  """A rectangle, by its middle and its size in pixels."""

  x: float
  y: float
  width: float
  height: float

  @property
  def left(self) -> Point:
    """The middle of the left side."""
    return self.x - self.width / 2, self.y

  @property
  def right(self) -> Point:
    """The middle of the right side."""
    return self.x + self.width / 2, self.y

  @property
  def top(self) -> Point:
    """The middle of the upper side."""
    return self.x, self.y - self.height / 2

  @property
  def bottom(self) -> Point:
    """The middle of the lower side."""
    return self.x, self.y + self.height / 2


@dataclasses.dataclass(frozen=True)
class Flow:
  """Draws boxes, and arrows between them, on a page."""

  axes: Axes
  theme: Theme

  def box(self, x: float, y: float, width: float, height: float, words: str, kind: str) -> Box:
    """Draws a box around its middle, in the color of a dtype; its first line is bold."""
    self.axes.add_patch(
      FancyBboxPatch(
        *((x - width / 2, y - height / 2), width, height),
        boxstyle="round,pad=0,rounding_size=6",
        fc=self.theme.fills[kind],
        ec=self.theme.lines[kind],
        lw=1.1,
      )
    )
    first, *more = words.split("\n")
    start = y - len(more) * 9
    text(self.axes, x, start, first, self.theme.text, ha="center", bold=True, size=SIZE - 1)
    for number, line in enumerate(more, 1):
      text(self.axes, x, start + number * 18, line, self.theme.text, ha="center", size=SMALL)
    return Box(x, y, width, height)

  def question(self, x: float, y: float, width: float, height: float, words: str) -> Box:
    """Draws a diamond with text in it: where one of two ways is taken."""
    corners = [(x - width / 2, y), (x, y - height / 2), (x + width / 2, y), (x, y + height / 2)]
    fill, line = self.theme.fills["plain"], self.theme.lines["plain"]
    self.axes.add_patch(Polygon(corners, closed=True, fc=fill, ec=line, lw=1.1))
    text(self.axes, x, y, words, self.theme.text, ha="center", bold=True, size=SIZE - 1)
    return Box(x, y, width, height)

  def arrow(self, points: Sequence[Point], kind: str = "plain", *, width: float = 1.6) -> None:
    """Draws an arrow along some points, in the color of a dtype."""
    color = self.theme.lines[kind]
    (x0, y0), (x1, y1) = points[-2:]
    length = max(abs(x1 - x0), abs(y1 - y0))
    dx, dy = (x1 - x0) / length, (y1 - y0) / length
    neck = (x1 - 9 * dx, y1 - 9 * dy)
    path = Path([*points[:-1], neck])
    self.axes.add_patch(PathPatch(path, fc="none", ec=color, lw=width, joinstyle="round"))
    side = (-dy * 4.5, dx * 4.5)
    head = [
      (x1, y1),
      (neck[0] + side[0], neck[1] + side[1]),
      (neck[0] - side[0], neck[1] - side[1]),
    ]
    self.axes.add_patch(Polygon(head, closed=True, fc=color, lw=0))

  def note(self, x: float, y: float, words: str, *, ha: str = "left", kind: str = "") -> None:
    """Writes a note; with a kind, in the color of that dtype."""
    color = self.theme.lines[kind] if kind else self.theme.faint
    text(self.axes, x, y, words, color, size=SMALL, ha=ha, bold=bool(kind))
