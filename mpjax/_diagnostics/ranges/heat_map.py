"""The picture of a report of ranges. matplotlib is imported when one is drawn."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpjax._core.errors import MpjaxRuntimeError
from mpjax._core.types import NumpyArray


class Counted(Protocol):
  """A row of a picture."""

  @property
  def path(self) -> str:
    """Where the numbers are."""
    ...

  @property
  def exponents(self) -> dict[int, int]:
    """How many of them have which exponent."""
    ...

  @property
  def note(self) -> str:
    """What is written beside the row."""
    ...


RANGES: tuple[tuple[str, int, int, int], ...] = (
  ("float16", -24, -14, 16),
  ("bfloat16", -133, -126, 128),
  ("float8 e4m3", -9, -6, 9),
  ("float8 e5m2", -16, -14, 16),
)
"""For each dtype the exponents of its smallest subnormal, its smallest normal number, its end."""

_MOST_ROWS = 40


def pyplot(where: str) -> Any:
  """Returns `matplotlib.pyplot`.

  Raises:
    MpjaxRuntimeError: it is not installed.
  """
  try:
    return importlib.import_module("matplotlib.pyplot")
  except ImportError as error:
    raise MpjaxRuntimeError(
      where,
      expected="matplotlib, which draws it",
      got="an environment without it",
      fix="Install it: pip install matplotlib. The report prints, and has to_html, without.",
    ) from error


def heat_map(name: str, kinds: Sequence[tuple[str, Sequence[Counted]]], path: str | None) -> Any:
  """Draws how many numbers of each module have which exponent.

  Args:
    name: that of the function, for the title.
    kinds: the panels, from the top: a heading, and its rows.
    path: a file to write; None writes none.

  Returns:
    The figure.
  """
  plt = pyplot("mpjax.ranges(fn)(...).plot()")
  panels = [(title, _shortened(rows)) for title, rows in kinds if rows]
  low, high = _window([row for _, rows in panels for row in rows])
  heights = [3.2, *(max(len(rows), 1.5) for _, rows in panels)]
  figure, axes = plt.subplots(
    len(heights),
    figsize=(10, 0.9 + 0.235 * sum(heights) + 0.3 * len(panels)),
    height_ratios=heights,
    sharex=True,
    layout="constrained",
    facecolor="white",
  )
  axes = np.atleast_1d(axes)
  _draw_ranges(axes[0], low, high)
  image: Any = None
  for axis, (title, rows) in zip(axes[1:], panels, strict=True):
    image = _draw_rows(plt, axis, title, rows, low, high)
  axes[-1].set_xlabel(
    "exponent of |x|: a number in column e is from $2^e$ to $2^{e+1}$", fontsize=9
  )
  axes[-1].tick_params(axis="x", labelbottom=True, bottom=True)
  figure.suptitle(f"Ranges of {name}", fontsize=13, x=0.01, ha="left", weight="bold")
  if image is not None:
    bar = figure.colorbar(image, ax=list(axes[1:]), pad=0.01, fraction=0.025, aspect=45)
    bar.set_label("share of the row's nonzero numbers", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
  if path is not None:
    figure.savefig(path, dpi=150)
  plt.close(figure)  # Else a notebook shows it at the end of the cell, and as its result.
  return figure


def _shortened(rows: Sequence[Counted]) -> Sequence[Counted]:
  """Returns at most as many rows as can be read, evenly from all."""
  if len(rows) <= _MOST_ROWS:
    return rows
  return [rows[round(i)] for i in np.linspace(0, len(rows) - 1, _MOST_ROWS)]


def _window(rows: Sequence[Counted]) -> tuple[int, int]:
  """Returns the exponents to draw: those that occur, and the range of float16."""
  seen = [e for row in rows for e in row.exponents]
  return min([*seen, -26]) - 1, max([*seen, 16]) + 2


def _draw_ranges(axis: Any, low: int, high: int) -> None:
  """Draws the ranges of the dtypes as bars, pale where numbers are subnormal."""
  for position, (name, smallest, normal, end) in enumerate(RANGES):
    left, middle, right = (min(max(place, low), high) for place in (smallest, normal, end))
    draw = functools.partial(axis.barh, position, height=0.8, color=f"C{position}", linewidth=0)
    draw(middle - left, left=left, alpha=0.35)
    draw(right - middle, left=middle)
    axis.text(
      right - 0.4, position, name, ha="right", va="center_baseline", fontsize=8, color="white"
    )
  axis.set_ylim(len(RANGES) - 0.4, -0.6)
  axis.set_yticks([])
  _bare(axis)
  axis.set_title("what each dtype represents (pale: subnormal)", fontsize=9, loc="left")


def _draw_rows(
  plt: Any, axis: Any, title: str, rows: Sequence[Counted], low: int, high: int
) -> Any:
  """Draws the rows of a panel, and where float16 ends."""
  shares: NumpyArray = np.full((len(rows), high - low), np.nan)
  for position, row in enumerate(rows):
    total = sum(row.exponents.values())
    for exponent, count in row.exponents.items():
      shares[position, exponent - low] = count / total
    # Beside the panel: inside of it, a line where float16 ends could cross the text.
    side = {"fontsize": 7.5, "va": "center_baseline", "ha": "left", "color": "#a03030"}
    axis.text(high + 0.4, position, row.note, **side)
  norm = importlib.import_module("matplotlib.colors").LogNorm(1e-5, 1)
  image = axis.pcolormesh(
    np.arange(low, high + 1),
    np.arange(len(rows) + 1) - 0.5,
    shares,
    cmap=plt.get_cmap("YlGnBu"),
    norm=norm,
    edgecolors="white",
    linewidth=0.4,
  )
  axis.set_ylim(len(rows) - 0.5, -0.5)
  axis.set_facecolor("#f4f4f4")
  _, smallest, normal, end = RANGES[0]  # The lines of all dtypes could not be told apart.
  for place, style in ((smallest, ":"), (normal, "--"), (end, "-")):
    axis.axvline(place, color="C0", linestyle=style, linewidth=1.1)
  axis.set_yticks(range(len(rows)), [_label(row.path) for row in rows], fontsize=7.5)
  axis.tick_params(axis="x", labelsize=8)
  _bare(axis)
  axis.set_title(title, fontsize=9.5, loc="left", weight="bold")
  return image


def _bare(axis: Any) -> None:
  axis.tick_params(length=0)
  for side in axis.spines.values():
    side.set_visible(False)


def _label(path: str) -> str:
  path = path or "(no scope)"
  return path if len(path) <= 38 else "…" + path[-37:]
