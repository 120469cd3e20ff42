"""What a training step on a v5e reads, writes and keeps, beside dtypes by hand.

What is drawn is recorded in benchmarks/results/tpu_hlo/v5e.json; `make tpu-hlo` compiles it.
"""

import json
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.figures import style
from docs.figures.style import FOLDER, SMALL, Theme, text

RECORDED = FOLDER.parents[1] / "benchmarks" / "results" / "tpu_hlo" / "v5e.json"

MODELS = {
  "gpt": "GPT, 8 layers of width 1024",
  "encoder": "without a mask",
  "moe": "with 8 experts a layer",
  "mlp": "MLP of width 8192",
}
VERSIONS = {
  "policy": "float32",
  "dynamic scale": "float32",
  "masters": "bfloat16",
  "split masters": "bfloat16",
}
"""What is drawn of each model, in which color: parameters in float32, and in bfloat16."""

FIGURES = {"traffic_bytes": "GB accessed", "temp_bytes": "GB of temporaries"}
COLUMNS, WIDE, ROW = (150, 342), 112, 24


def ratios() -> Mapping[str, Mapping[str, Mapping[str, float]]]:
  """Returns the figures of each version divided by those by hand, by model."""
  models = json.loads(RECORDED.read_text(encoding="utf-8"))["models"]

  def of(each: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    found, by_hand = each["versions"], each["versions"]["by hand"]
    names = [name for name in VERSIONS if name in found]
    return {name: {key: found[name][key] / by_hand[key] for key in FIGURES} for name in names}

  return {model: of(models[model]) for model in MODELS}


def draw(theme: Theme) -> Figure:
  found = ratios()
  rows = sum(len(each) for each in found.values())
  height = 62 + ROW * rows + 34 * len(found) + 30
  figure, axes = style.page(height)
  text(axes, 12, 16, "A training step on a v5e, by hand = 1", theme.text, bold=True)
  for x, words in zip(COLUMNS, FIGURES.values(), strict=True):
    text(axes, x, 44, words, theme.faint, size=SMALL)
    axes.plot([x + WIDE] * 2, [58, height - 34], color=theme.rule, lw=1)
  y = 72.0
  for model, versions in found.items():
    text(axes, 12, y, MODELS[model], theme.text, size=SMALL, bold=True)
    y += 24
    for name, figures in versions.items():
      text(axes, 20, y, name, theme.faint, size=SMALL)
      for x, ratio in zip(COLUMNS, figures.values(), strict=True):
        _bar(axes, theme, x, y, ratio, VERSIONS[name])
      y += ROW
    y += 10
  x = 12.0
  for kind, words, wide in (
    ("float32", "float32 parameters", 170.0),
    ("bfloat16", "bfloat16 parameters, with masters", 0.0),
  ):
    edge = {"fc": theme.fills[kind], "ec": theme.lines[kind], "lw": 1}
    axes.add_patch(Rectangle((x, height - 23), 16, 14, **edge))
    text(axes, x + 24, height - 16, words, theme.faint, size=SMALL)
    x += wide
  return figure


def _bar(axes: Axes, theme: Theme, x: float, y: float, ratio: float, kind: str) -> None:
  edge = {"fc": theme.fills[kind], "ec": theme.lines[kind], "lw": 1}
  axes.add_patch(Rectangle((x, y - 8), ratio * WIDE, 16, **edge))
  text(axes, x + 6, y, f"{ratio:.2f}", theme.text, size=SMALL)
