"""The picture of a report of ranges. matplotlib is imported when one is drawn."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax._core.errors import MpjaxRuntimeError
from mpjax._core.types import NumpyArray

RANGES: Mapping[str, tuple[int, int, int]] = {
  "float16": (-24, -14, 16),
  "bfloat16": (-133, -126, 128),
  "float8_e4m3fn": (-9, -6, 9),
  "float8_e5m2": (-16, -14, 16),
}
"""For each dtype the exponents of its smallest subnormal, its smallest normal number, its end."""

_MOST_ROWS = 40


def pyplot(where: str) -> Any:
  """Returns `matplotlib.pyplot`; raises MpjaxRuntimeError if it is not installed."""
  try:
    return importlib.import_module("matplotlib.pyplot")
  except ImportError as error:
    raise MpjaxRuntimeError(
      where,
      expected="matplotlib, which draws it",
      got="an environment without it",
      fix="Install it: pip install matplotlib. The report prints, and has to_html, without.",
    ) from error


def finished(plt: Any, figure: Any, path: str | None) -> Any:
  """Returns a figure, which is written to a file if there is a path, and closed."""
  # A notebook would show an open one at the end of the cell, and as its result too.
  if path is not None:
    figure.savefig(path, dpi=150)
  plt.close(figure)
  return figure


def heat_map(name: str, kinds: Sequence[tuple[str, Sequence[Any]]], path: str | None) -> Any:
  """Draws how many numbers of each module have which exponent, in a panel for each kind."""
  # Rows have a `path`, `exponents` and a `note`.
  plt = pyplot("mpjax.ranges(fn)(...).plot()")
  panels: list[tuple[str, list[Any]]] = []
  for title, rows in kinds:  # Of each as many rows as can be read, evenly from all.
    places = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_ROWS))
    panels += [(title, [rows[round(i)] for i in places])] if rows else []
  seen = [e for _, rows in panels for row in rows for e in row.exponents]
  low, high = min([*seen, -26]) - 1, max([*seen, 16]) + 2
  heights = [3.2, *(max(len(rows), 1.5) for _, rows in panels)]
  figure, grid = plt.subplots(
    len(heights),
    figsize=(10, 0.9 + 0.235 * sum(heights) + 0.3 * len(panels)),
    height_ratios=heights,
    sharex=True,
    squeeze=False,
    layout="constrained",
    facecolor="white",
  )
  ranges, *axes = grid[:, 0]
  for axis in (ranges, *axes):
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
  # What each dtype represents, as bars.
  for position, (dtype, edges) in enumerate(RANGES.items()):
    left, middle, right = (min(max(edge, low), high) for edge in edges)
    for start, end, alpha in ((left, middle, 0.35), (middle, right, 1)):
      ranges.barh(position, end - start, 0.8, start, color=f"C{position}", alpha=alpha)
    style = {"ha": "right", "va": "center_baseline", "fontsize": 8, "color": "white"}
    ranges.text(right - 0.4, position, dtype.removesuffix("fn").replace("_", " "), **style)
  ranges.set_ylim(len(RANGES) - 0.4, -0.6)
  ranges.set_yticks([])
  ranges.set_title("what each dtype represents (pale: subnormal)", fontsize=9, loc="left")
  for axis, (title, rows) in zip(axes, panels, strict=True):
    shares: NumpyArray = np.full((len(rows), high - low), np.nan)
    for position, row in enumerate(rows):
      total = sum(row.exponents.values())
      for exponent, count in row.exponents.items():
        shares[position, exponent - low] = count / total
      # Beside the panel: inside of it, a line where float16 ends could cross the text.
      side = {"fontsize": 7.5, "va": "center_baseline", "ha": "left", "color": "#a03030"}
      axis.text(high + 0.4, position, row.note, **side)
    columns, edges = np.arange(low, high + 1), np.arange(len(rows) + 1) - 0.5
    norm = importlib.import_module("matplotlib.colors").LogNorm(1e-5, 1)
    style = {"cmap": "YlGnBu", "edgecolors": "white", "linewidth": 0.4}
    image = axis.pcolormesh(columns, edges, shares, norm=norm, **style)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_facecolor("#f4f4f4")
    # The lines of all dtypes could not be told apart.
    for place, line in zip(RANGES["float16"], (":", "--", "-"), strict=True):
      axis.axvline(place, color="C0", linestyle=line, linewidth=1.1)
    labels = [row.path or "(no scope)" for row in rows]
    labels = [text if len(text) <= 38 else f"…{text[-37:]}" for text in labels]
    axis.set_yticks(range(len(rows)), labels, fontsize=7.5)
    axis.set_title(title, fontsize=9.5, loc="left", weight="bold")
    if axis is axes[-1]:
      bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.025, aspect=45)
      bar.set_label("share of the row's nonzero numbers", fontsize=8)
      bar.ax.tick_params(labelsize=7)
      bar.outline.set_visible(False)
  last = grid[-1, 0]
  last.set_xlabel("exponent of |x|: a number in column e is from $2^e$ to $2^{e+1}$", fontsize=9)
  last.tick_params(axis="x", labelbottom=True, bottom=True)
  figure.suptitle(f"Ranges of {name}", fontsize=13, x=0.01, ha="left", weight="bold")
  return finished(plt, figure, path)
