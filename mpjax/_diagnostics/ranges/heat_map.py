"""The picture of a report of ranges. matplotlib is imported when one is drawn."""

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


def heat_map(
  name: str, kinds: Sequence[tuple[str, Sequence[Counted]]], path: str | None
) -> Any:
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
  heights = [1.7, *(max(len(rows), 1.2) for _, rows in panels)]
  figure, axes = plt.subplots(
    len(heights),
    figsize=(10, 1.3 + 0.26 * sum(heights) + 0.35 * len(panels)),
    height_ratios=heights,
    sharex=True,
    layout="constrained",
  )
  axes = np.atleast_1d(axes)
  _draw_ranges(axes[0], low, high)
  image: Any = None
  for axis, (title, rows) in zip(axes[1:], panels, strict=True):
    image = _draw_rows(plt, axis, title, rows, low, high)
  axes[-1].set_xlabel("exponent of |x|, floor(log2|x|)")
  figure.suptitle(f"Ranges of {name}", fontsize=12, x=0.01, ha="left")
  if image is not None:
    bar = figure.colorbar(image, ax=list(axes[1:]), pad=0.01, fraction=0.03, aspect=40)
    bar.set_label("share of the nonzero numbers of a row", fontsize=8)
    bar.ax.tick_params(labelsize=7)
  if path is not None:
    figure.savefig(path, dpi=150)
  return figure


def _shortened(rows: Sequence[Counted]) -> Sequence[Counted]:
  """Returns at most as many rows as can be read, evenly from all."""
  if len(rows) <= _MOST_ROWS:
    return rows
  return [rows[round(i)] for i in np.linspace(0, len(rows) - 1, _MOST_ROWS)]


def _window(rows: Sequence[Counted]) -> tuple[int, int]:
  """Returns the exponents to draw: those that occur, and the range of float16."""
  seen = [e for row in rows for e in row.exponents]
  return min([*seen, -26]) - 1, max([*seen, 17]) + 2


def _draw_ranges(axis: Any, low: int, high: int) -> None:
  """Draws the ranges of the dtypes as bars, pale where numbers are subnormal."""
  for position, (name, smallest, normal, end) in enumerate(RANGES):
    color = f"C{position}"
    left, right = max(smallest, low), min(end, high)
    middle = max(normal, low)
    axis.barh(position, middle - left, 0.62, left=left, color=color, alpha=0.3, linewidth=0)
    axis.barh(position, right - middle, 0.62, left=middle, color=color, alpha=0.85, linewidth=0)
    centre = (middle + min(right, high)) / 2
    axis.text(centre, position, name, ha="center", va="center", fontsize=7.5, color="white")
  axis.set_ylim(len(RANGES) - 0.5, -0.5)
  axis.set_yticks([])
  axis.tick_params(bottom=False)
  for side in axis.spines.values():
    side.set_visible(False)
  axis.set_title("representable (pale: subnormal)", fontsize=9, loc="left")


def _draw_rows(
  plt: Any, axis: Any, title: str, rows: Sequence[Counted], low: int, high: int
) -> Any:
  shares: NumpyArray = np.full((len(rows), high - low), np.nan)
  for position, row in enumerate(rows):
    total = sum(row.exponents.values())
    for exponent, count in row.exponents.items():
      shares[position, exponent - low] = count / total
  colors = plt.get_cmap("viridis").copy()
  colors.set_bad("#f2f2f2")
  log = importlib.import_module("matplotlib.colors").LogNorm(1e-5, 1)
  extent = (low, high, len(rows) - 0.5, -0.5)
  image = axis.imshow(
    shares, aspect="auto", cmap=colors, norm=log, extent=extent, interpolation="none"
  )
  for position, (_, smallest, normal, end) in enumerate(RANGES):
    if position < 1:  # The lines of all four could not be told apart.
      for place, style in ((smallest, ":"), (normal, "--"), (end, "-")):
        axis.axvline(place, color="C3", linestyle=style, linewidth=1.2)
  axis.set_yticks(range(len(rows)), [_label(row.path) for row in rows], fontsize=7.5)
  axis.tick_params(axis="y", length=0)
  axis.tick_params(axis="x", labelsize=8)
  for side in axis.spines.values():
    side.set_visible(False)
  axis.set_title(title, fontsize=10, loc="left")
  return image


def _label(path: str) -> str:
  path = path or "(no scope)"
  return path if len(path) <= 38 else "…" + path[-37:]
