"""What an audit counts in a transformer: with dtypes by hand, with its cures, under a policy."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import mpjax
from docs.figures import style
from docs.figures.style import SMALL, Theme, text

LAYERS, WIDTH, HEADS = 4, 256, 4

_INPUTS = jax.ShapeDtypeStruct((8, 128, WIDTH), "float32")


class Block(nn.Module):
  """A layer with attention of its own. `cured` divides its scores by a Python number."""

  dtype: str | None = None
  cured: bool = False

  @nn.compact
  def __call__(self, x):
    y = nn.LayerNorm(dtype=self.dtype)(x)
    y = nn.DenseGeneral((HEADS, 3, WIDTH // HEADS), dtype=self.dtype, name="qkv")(y)
    q, k, v = jnp.moveaxis(y, -2, 0)
    root = np.sqrt(WIDTH // HEADS)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (float(root) if self.cured else root)
    y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v)
    x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), dtype=self.dtype, name="out")(y)
    y = nn.relu(nn.Dense(4 * WIDTH, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x)))
    return x + nn.Dense(WIDTH, dtype=self.dtype, name="down")(y)


class Transformer(nn.Module):
  """Layers on inputs with positions, which `cured` casts."""

  dtype: str | None = None
  cured: bool = False

  @nn.compact
  def __call__(self, x):
    positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
    x = nn.Dense(WIDTH, dtype=self.dtype, name="embed")(x)
    x = x + (positions.astype(self.dtype) if self.cured else positions)
    for i in range(LAYERS):
      x = Block(self.dtype, self.cured, name=f"block_{i}")(x)
    return nn.LayerNorm(dtype=self.dtype)(x)


class Counted(NamedTuple):
  """What the audit of a gradient counts.

  Fields:
    leaks: the float32 operations where low precision was asked for.
    flops: the FLOPs of matmuls, by dtype.
    kept: the bytes of arrays that the backward pass takes from the forward pass, by dtype.
  """

  leaks: int
  flops: Mapping[str, int]
  kept: Mapping[str, int]


@functools.cache
def facts() -> Mapping[str, Counted]:
  """Audits each version of the model."""
  by_hand = Transformer("bfloat16"), Transformer("bfloat16", cured=True)
  return {
    "dtype=bfloat16 in each layer": counted(by_hand[0]),
    "the same, cured as the audit says": counted(by_hand[1]),
    "no dtype, the policy mixed_bfloat16": counted(
      mpjax.with_policy(Transformer(), "mixed_bfloat16")
    ),
  }


def counted(model: nn.Module) -> Counted:
  """Returns what the audit of the gradient of a model counts."""
  params = jax.eval_shape(model.init, jax.random.key(0), _INPUTS)["params"]

  def loss_fn(params, x):
    out = jnp.asarray(model.apply({"params": params}, x), jnp.float32)
    return jnp.mean(out**2)

  report = mpjax.audit(jax.grad(loss_fn))(params, _INPUTS)
  flops = {"float32": 0, "bfloat16": 0}
  for (_, dtype), count in report.flops.items():
    flops[dtype] += count
  kept = {dtype: report.residual_bytes.get(dtype, 0) for dtype in flops}
  return Counted(len(report.leaks), flops, kept)


LEFT, RIGHT, BARS, ROW = 12, 508, 74, 108


def draw(theme: Theme) -> Figure:
  found = facts()
  figure, axes = style.page(34 + ROW * len(found) + 30)
  text(axes, LEFT, 16, f"The gradient of a transformer of {LAYERS} layers", theme.text, bold=True)
  most = max(sum(each.kept.values()) for each in found.values())
  for number, (name, each) in enumerate(found.items()):
    y = 48 + ROW * number
    leaks = f"{each.leaks or 'no'} leak{'' if each.leaks == 1 else 's'}"
    color = theme.lines["lost"] if each.leaks else theme.lines["float8"]
    text(axes, LEFT, y, name, theme.text, size=SMALL)
    text(axes, RIGHT, y, leaks, color, size=SMALL, ha="right", bold=True)
    total = sum(each.flops.values())
    shares = {dtype: f"{100 * n / total:.1f} %" for dtype, n in each.flops.items()}
    _bar(axes, theme, y + 14, "FLOPs", each.flops, shares, total)
    sizes = {dtype: f"{n / 1e6:.1f} MB" for dtype, n in each.kept.items()}
    _bar(axes, theme, y + 46, "kept", each.kept, sizes, most)
  y, x = 48 + ROW * len(found), float(BARS)
  for dtype in ("bfloat16", "float32"):
    axes.add_patch(Rectangle((x, y - 7), 16, 14, **_edge(theme, dtype)))
    text(axes, x + 24, y, dtype, theme.faint, size=SMALL)
    x += 110
  return figure


def _bar(
  axes: Axes,
  theme: Theme,
  y: float,
  name: str,
  numbers: Mapping[str, int],
  words: Mapping[str, str],
  most: int,
) -> None:
  """Draws numbers by dtype, low precision first; `most` is as wide as the figure."""
  text(axes, LEFT, y + 13, name, theme.faint, size=SMALL)
  x = float(BARS)
  for dtype in ("bfloat16", "float32"):
    wide = numbers[dtype] / most * (RIGHT - BARS)
    if wide < 1:
      continue
    axes.add_patch(Rectangle((x + 0.75, y), wide - 1.5, 26, **_edge(theme, dtype)))
    if wide > 70:
      text(axes, x + wide / 2, y + 13, words[dtype], theme.text, size=SMALL, ha="center")
    x += wide


def _edge(theme: Theme, dtype: str) -> dict[str, str | float]:
  return {"fc": theme.fills[dtype], "ec": theme.lines[dtype], "lw": 1}
