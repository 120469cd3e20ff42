"""Number formats to scale: their bits, their range, and the numbers from 1 to 2."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures import style
from docs.figures.style import SMALL, Theme, text

LEFT, RIGHT = 130, 510
ROW = 30


class Format(NamedTuple):
  """A format of floating-point numbers.

  Fields:
    name: as JAX writes it.
    kind: the key of its color.
    exponent: bits of the exponent.
    mantissa: bits of the mantissa that are stored.
    least: the logarithm, to base 2, of the smallest number above 0.
    normal: that of the smallest number with all bits of the mantissa.
    largest: the largest finite number.
  """

  name: str
  kind: str
  exponent: int
  mantissa: int
  least: int
  normal: int
  largest: float


def facts() -> list[Format]:
  """What `finfo` says, the widest format first."""
  rows = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float8_e4m3fn", "float8"),
    ("float8_e5m2", "float8"),
  ]
  found = []
  for name, kind in rows:
    info = ml_dtypes.finfo(jnp.dtype(name))
    least = round(math.log2(float(info.smallest_subnormal)))
    normal = round(math.log2(float(info.smallest_normal)))
    found.append(
      Format(name, kind, info.bits - 1 - info.nmant, info.nmant, least, normal, float(info.max))
    )
  # NumPy has no TF32: it is the exponent of float32 with the mantissa of float16.
  wide, narrow = found[0], found[2]
  largest = 2.0 ** (math.floor(math.log2(wide.largest)) + 1) * (1 - 2.0 ** -(narrow.mantissa + 1))
  least = wide.normal - narrow.mantissa
  tf32 = Format("TF32", "plain", wide.exponent, narrow.mantissa, least, wide.normal, largest)
  return [wide, tf32, *found[1:]]


def draw(theme: Theme) -> Figure:
  formats = facts()
  figure, axes = style.page(3 * (50 + len(formats) * ROW) - 4)
  y = _bits(axes, theme, formats, 20)
  y = _ranges(axes, theme, formats, y + 20)
  _numbers(axes, theme, formats, y + 20)
  return figure


def _heading(axes: Axes, theme: Theme, y: float, words: str, more: str) -> float:
  text(axes, 10, y, words, theme.text, bold=True)
  text(axes, RIGHT, y, more, theme.faint, size=SMALL, ha="right")
  return y + 30


def _label(axes: Axes, theme: Theme, y: float, row: Format) -> None:
  text(axes, 10, y, row.name, theme.lines[row.kind], size=SMALL, bold=True)


def _bits(axes: Axes, theme: Theme, formats: list[Format], y: float) -> float:
  y = _heading(axes, theme, y, "Bits", "sign, exponent, mantissa")
  bit = (RIGHT - LEFT) / 32
  for row in formats:
    _label(axes, theme, y, row)
    x = LEFT
    parts = [(1, theme.rule, ""), (row.exponent, theme.fills[row.kind], f"{row.exponent}")]
    for bits, color, words in [*parts, (row.mantissa, theme.lines[row.kind], f"{row.mantissa}")]:
      for i in range(bits):
        axes.add_patch(Rectangle((x + i * bit + 0.6, y - 10), bit - 1.2, 20, fc=color, lw=0))
      if words:
        middle, half = x + bits * bit / 2, 4 + 5 * len(words)
        axes.add_patch(Rectangle((middle - half, y - 10), 2 * half, 20, fc=color, lw=0))
        inside = theme.on_lines if color == theme.lines[row.kind] else theme.text
        text(axes, middle, y, words, inside, size=SMALL, ha="center", bold=True)
      x += bits * bit
    y += ROW
  return y


def _ranges(axes: Axes, theme: Theme, formats: list[Format], y: float) -> float:
  y = _heading(axes, theme, y, "Range", "left end: subnormals, with fewer digits")
  low = min(row.least for row in formats)
  high = max(math.log2(row.largest) for row in formats)

  def at(exponent: float) -> float:
    return LEFT + (exponent - low) / (high - low) * (RIGHT - LEFT)

  for row in formats:
    _label(axes, theme, y, row)
    first, normal, last = at(row.least), at(row.normal), at(math.log2(row.largest))
    color, pale = theme.lines[row.kind], theme.fills[row.kind]
    axes.add_patch(Rectangle((first, y - 10), normal - first, 20, fc=pale, ec=color, lw=0.8))
    axes.add_patch(Rectangle((normal, y - 10), last - normal, 20, fc=color, ec=color, lw=0.8))
    smallest, largest = f"2^{row.least}", _number(row.largest)
    if last - normal > 200:
      text(axes, normal + 8, y, f"from {smallest}", theme.on_lines, size=SMALL)
      text(axes, last - 8, y, f"to {largest}", theme.on_lines, size=SMALL, ha="right")
    else:
      text(axes, first - 6, y, f"from {smallest}", theme.text, size=SMALL, ha="right")
      text(axes, last + 6, y, f"to {largest}", theme.text, size=SMALL)
    y += ROW
  return y


def _numbers(axes: Axes, theme: Theme, formats: list[Format], y: float) -> float:
  y = _heading(axes, theme, y, "All numbers from 1 to 2", "how many, and how far apart")
  for row in formats:
    _label(axes, theme, y, row)
    count, color = 2**row.mantissa, theme.lines[row.kind]
    ruler = LEFT + 4, RIGHT - 144
    if count > 200:  # Closer to one another than pixels.
      axes.add_patch(Rectangle((ruler[0], y - 8), ruler[1] - ruler[0], 16, fc=color, lw=0))
    else:
      for i in range(count + 1):
        x = ruler[0] + i / count * (ruler[1] - ruler[0])
        axes.plot([x, x], [y - 8, y + 8], color=color, lw=0.75 if count > 50 else 1.5)
    words = f"{count:,} × 2^-{row.mantissa}"
    text(axes, RIGHT, y, words, theme.text, size=SMALL, ha="right")
    y += ROW
  return y


def _number(x: float) -> str:
  return f"{x:,.0f}" if x < 1e6 else f"{x:.1e}".replace("e+", "e")
