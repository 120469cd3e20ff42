"""What all figures share: two themes, a color for each dtype, fonts, and how a file is written."""

import dataclasses
import pathlib
from collections.abc import Callable

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).parent

WIDTH = 520
"""Of each figure, in pixels: a column of a page shows it as it is, a phone at 70 %."""

SIZE, SMALL = 15, 13.5
"""Font sizes in pixels: a phone shows them at 10 and 9."""

POINTS = 0.75
"""The points of a pixel: matplotlib takes sizes in points, and SVG shows 96 pixels to the inch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theme:
  """The colors of a figure. Those of dtypes can be told apart by people who are color-blind.

  They come from the palette of Okabe and Ito, darker or lighter for contrast with the text.
  `fills` are for areas with text on them, `lines` for bars, outlines and arrows; text on these has
  the color `on_lines`.
  """

  name: str
  text: str
  faint: str
  rule: str
  fills: dict[str, str]
  lines: dict[str, str]
  on_lines: str


LIGHT = Theme(
  name="light",
  text="#1f2328",
  faint="#59636e",
  rule="#b7bfc8",
  fills={
    "float32": "#cfe6f7",
    "bfloat16": "#fbe3ad",
    "float16": "#f3d3e6",
    "float8": "#c5ecdd",
    "lost": "#fbd3bd",
    "plain": "#eef1f4",
  },
  lines={
    "float32": "#0072b2",
    "bfloat16": "#b87400",
    "float16": "#b0508a",
    "float8": "#00805d",
    "lost": "#d14b00",
    "plain": "#59636e",
  },
  on_lines="#ffffff",
)

DARK = Theme(
  name="dark",
  text="#e6edf3",
  faint="#a5afba",
  rule="#515a64",
  fills={
    "float32": "#0d3f60",
    "bfloat16": "#5c4210",
    "float16": "#582945",
    "float8": "#0a4a3a",
    "lost": "#6b2c0d",
    "plain": "#2a3038",
  },
  lines={
    "float32": "#56b4e9",
    "bfloat16": "#f0b429",
    "float16": "#e08fc0",
    "float8": "#34c79a",
    "lost": "#ff7f3f",
    "plain": "#a5afba",
  },
  on_lines="#10151a",
)

THEMES = (LIGHT, DARK)

Draw = Callable[[Theme], Figure]


def page(height: float) -> tuple[Figure, Axes]:
  """Returns a figure and axes over all of it, in pixels from the upper left corner."""
  figure = Figure(figsize=(WIDTH / 96, height / 96))
  axes = figure.add_axes((0, 0, 1, 1))
  axes.set(xlim=(0, WIDTH), ylim=(height, 0))
  axes.set_axis_off()
  return figure, axes


def text(
  axes: Axes,
  x: float,
  y: float,
  words: str,
  color: str,
  *,
  size: float = SIZE,
  ha: str = "left",
  bold: bool = False,
) -> None:
  """Writes text whose lines are centered around `y`."""
  lines = words.split("\n")
  for number, line in enumerate(lines):
    axes.text(
      *(x, y + (number - (len(lines) - 1) / 2) * size * 1.25 + size * 0.36, line),
      color=color,
      fontsize=size * POINTS,
      ha=ha,
      va="baseline",
      weight="bold" if bold else "normal",
      parse_math=False,
    )


def files(name: str) -> list[pathlib.Path]:
  """The files of a figure, one for each theme."""
  return [FOLDER / f"{name}-{theme.name}.svg" for theme in THEMES]


def svg(draw: Draw, theme: Theme, path: pathlib.Path) -> None:
  """Writes a figure: the same bytes each time, with text that can be searched and selected."""
  settings = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mpjax",
    "font.family": "sans-serif",
    # The first comes with matplotlib and has the widest letters: others do not run over.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "text.color": theme.text,
  }
  with mpl.rc_context(settings):
    draw(theme).savefig(path, format="svg", transparent=True, metadata={"Date": None})
  # Lines end where their last number does.
  lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
  path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
