"""What the examples share shows every run, in text and in the plot."""

import io

import numpy as np
import pytest
from matplotlib import image
from rich.console import Console


@pytest.fixture
def side_by_side(example):
  return example("side_by_side")


def test_every_run_is_in_the_table_and_in_the_plot(side_by_side, tmp_path):
  text, counted = io.StringIO(), []

  def train(policy, steps, on_step):
    for _ in range(steps):
      on_step()
      counted.append(policy)
    figures = {"accuracy": f"{len(policy)} %", **({"skipped": "3"} if "16" in policy else {})}
    return side_by_side.Run(np.linspace(len(policy), 1, steps), figures)

  path = tmp_path / "new" / "plot.png"
  console = Console(file=text, width=100)
  runs = side_by_side.compare("Two losses", train, 30, path, ("float32", "mixed_float16"), console)
  assert counted == ["float32"] * 30 + ["mixed_float16"] * 30
  assert list(runs) == ["float32", "mixed_float16"]
  lines = {
    cells[0]: cells[1:]
    for line in text.getvalue().splitlines()
    if len(cells := [cell.strip() for cell in line.strip("│").split("│")]) == 3
  }
  assert lines["accuracy"] == ["7 %", "13 %"]
  assert lines["skipped"] == ["", "3"]
  assert "30/30" in text.getvalue()
  assert str(path) in text.getvalue()

  pixels = image.imread(path)
  wanted = [int(side_by_side.COLORS[1][i : i + 2], 16) / 255 for i in (1, 3, 5)]
  assert (np.abs(pixels[..., :3] - wanted).max(-1) < 0.02).sum() > 50
