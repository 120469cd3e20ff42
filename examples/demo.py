"""Train one network on real digits in float32, bfloat16 and float16, and compare.

  make demo

The training itself, which is what to read, is in `digits.py`.
"""

import argparse

import digits
import jax
import numpy as np
import side_by_side
from rich.console import Console
from rich.table import Table
from rich.text import Text

import mpjax

LAST = 20
"""Steps whose loss is averaged: the loss on one batch says little."""


def describe(result: digits.Result) -> dict[str, float]:
  """Returns one row of the table, from a finished run."""
  images, labels = next(digits.batches(digits.load_data()[0], 1))
  params = result.training.state[0]
  audit = mpjax.audit(result.training.step)(result.training.state, images, labels)
  return {
    "accuracy": result.accuracy,
    "loss": float(np.mean(result.losses[-LAST:])),
    "skipped": int(result.metrics["skipped"]),
    "loss_scale": float(result.metrics["loss_scale"]),
    "half_share": audit.half_share,
    "parameter_bytes": nbytes(params),
    "activation_bytes": sum(audit.residual_bytes.values()),
  }


def nbytes(tree):
  """Returns how many bytes the arrays of a tree take."""
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def table(rows: dict[str, dict[str, float]]) -> Table:
  """Returns the comparison, one column for each policy."""
  lines = {
    "test accuracy": lambda row: f"{row['accuracy']:.2%}",
    f"final loss (mean of {LAST} batches)": lambda row: f"{row['loss']:.4f}",
    "skipped steps": lambda row: f"{row['skipped']}",
    "final loss scale": lambda row: f"{row['loss_scale']:.0f}",
    "matmuls in low precision [1]": lambda row: f"{row['half_share']:.1%}",
    "parameters [2]": lambda row: f"{row['parameter_bytes'] / 1e3:.0f} kB",
    "activations [3]": lambda row: f"{row['activation_bytes'] / 1e3:.0f} kB",
  }
  found = Table(title="One network, the same batches: 1347 digits to train on, 450 to test on")
  found.add_column()
  for policy in rows:
    found.add_column(policy, justify="right")
  for heading, text in lines.items():
    found.add_row(Text(heading), *map(text, rows.values()))
  return found


NOTES = (
  """Share of the floating-point operations of all matmuls and convolutions, counted from the traced
  training step, forward and backward, whose operands are both in float16 or bfloat16.""",
  """As they are stored and updated: float32 under every mixed policy.""",
  f"""What the forward pass of one batch of {digits.BATCH} saves for the backward pass, counted from
  the residuals in the traced step, without the parameters and the batch. Copies of the weights in
  low precision are among them, and so is what batch normalisation keeps in float32.""",
)


def notes() -> Table:
  """Returns what the numbers in brackets stand for."""
  grid = Table.grid(padding=(0, 1))
  for number, note in enumerate(NOTES, 1):
    grid.add_row(Text(f"[{number}]"), " ".join(note.split()))
  return grid


def main(steps: int = digits.STEPS, console: Console | None = None) -> dict[str, dict[str, float]]:
  """Runs the comparison, prints it, and returns its rows."""
  console = console or Console()
  rows = {}
  with side_by_side.progress_bar(console) as progress:
    for policy in digits.LOSS_SCALES:
      task = progress.add_task(policy, total=steps)
      result = digits.main(policy, steps, on_step=lambda task=task: progress.advance(task))
      rows[policy] = describe(result)
  console.print(table(rows))
  console.print(notes())
  return rows


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--steps", type=int, default=digits.STEPS, help="for each policy")
  main(parser.parse_args().steps)
