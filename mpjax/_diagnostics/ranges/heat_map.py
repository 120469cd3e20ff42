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


def heat_map(name: str, kinds: Sequence[tuple[str, Sequence[Any]]], path: str | None) -> Any:
  """Draws how many numbers of each row have which exponent, in a panel for each kind."""
  try:
    plt = importlib.import_module("matplotlib.pyplot")
  except ImportError as error:
    raise MpjaxRuntimeError(
      "mpjax.ranges(fn)(...).plot()",
      expected="matplotlib, which draws it",
      got="an environment without it",
      fix="Install it: pip install matplotlib. The report prints, and has to_html, without.",
    ) from error
  panels: list[tuple[str, list[Any]]] = []
  for title, rows in kinds:  # Of each as many rows as can be read, evenly from all.
    numbers = np.linspace(0, len(rows) - 1, min(len(rows), _MOST_ROWS))
    panels += [(title, [rows[round(i)] for i in numbers])] if rows else []
  seen = [e for _, rows in panels for row in rows for e in row.exponents]
  low, high = min([*seen, -26]) - 1, max([*seen, 16]) + 2
  # What each dtype represents is the first panel.
  heights = [3.2, *(max(len(rows), 1.5) for _, rows in panels)]
  size, style = (10, 0.9 + 0.26 * sum(heights)), {"facecolor": "white", "layout": "constrained"}
  figure, grid = plt.subplots(
    len(heights), figsize=size, height_ratios=heights, sharex=True, squeeze=False, **style
  )
  ranges, *axes = grid[:, 0]
  for position, edges in enumerate(RANGES.values()):
    left, middle, right = (min(max(edge, low), high) for edge in edges)
    ranges.barh(position, middle - left, 0.8, left, color=f"C{position}", alpha=0.35)
    ranges.barh(position, right - middle, 0.8, middle, color=f"C{position}")
  ranges.set_yticks(range(len(RANGES)), list(RANGES), fontsize=7.5)
  ranges.set_ylim(len(RANGES) - 0.4, -0.6)
  ranges.set_title("what each dtype represents (pale: subnormal)", fontsize=9, loc="left")
  norm = importlib.import_module("matplotlib.colors").LogNorm(1e-5, 1)
  for axis, (title, rows) in zip(axes, panels, strict=True):
    shares: NumpyArray = np.full((len(rows), high - low), np.nan)
    for position, row in enumerate(rows):
      for exponent, count in row.exponents.items():
        shares[position, exponent - low] = count / row.nonzero
    columns, edges = np.arange(low, high + 1), np.arange(len(rows) + 1) - 0.5
    image = axis.pcolormesh(columns, edges, shares, norm=norm, cmap="YlGnBu", edgecolors="white")
    # The lines of all dtypes could not be told apart.
    for exponent, line in zip(RANGES["float16"], (":", "--", "-"), strict=True):
      axis.axvline(exponent, color="C0", linestyle=line, linewidth=1.1)
    labels = [row.path or "(no scope)" for row in rows]
    labels = [text if len(text) <= 38 else f"…{text[-37:]}" for text in labels]
    axis.set_yticks(range(len(rows)), labels, fontsize=7.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_title(title, fontsize=9.5, loc="left", weight="bold")
    if axis is axes[-1]:
      bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.025, aspect=45)
      bar.set_label("share of the row's nonzero numbers", fontsize=8)
  last = grid[-1, 0]
  last.set_xlabel("exponent of |x|: a number in column e is from $2^e$ to $2^{e+1}$", fontsize=9)
  figure.suptitle(f"Ranges of {name}", fontsize=13, x=0.01, ha="left", weight="bold")
  if path is not None:
    figure.savefig(path, dpi=150)
  plt.close(figure)  # A notebook would show an open one at the end of the cell, and as its result.
  return figure
