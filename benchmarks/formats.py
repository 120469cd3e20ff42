"""Train a small GPT and a mixture of experts in each format of matmuls, from several seeds.

  PYTHONPATH=.:examples python benchmarks/formats.py
  PYTHONPATH=.:examples python benchmarks/formats.py --models GPT --formats bfloat16 nvfp4 --seeds 2

A seed sets the first parameters, the batches and the dropout, and is the same in every format. CPUs
have none of the formats: their numbers are computed, and their speed is not. Runs that are in the
file already are not run again. `--write` puts the recorded table into docs/float8.md.
"""

import argparse
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import gpt
import jax
import measure
import moe
import numpy as np
import side_by_side
import tables
from rich.console import Console

import mpjax

FOLDER = pathlib.Path(__file__).parent
OUT = RECORDED = FOLDER / "results" / "formats" / "cpu.json"
PAGE = FOLDER.parent / "docs" / "float8.md"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn")
SEEDS = 3

NVFP4_ROWS = "c=bf16,o=f32,matmul=nvfp4:square_weights=false"
"""Weights have a scale for 1 x 16 elements, instead of 16 x 16."""

FORMATS = {
  "float32": "float32",
  "bfloat16": "mixed_bfloat16",
  "float8": "c=bf16,o=f32,matmul=float8:skip=none",
  "float8, row": "c=bf16,o=f32,matmul=float8:row:skip=none",
  "float8, block": "c=bf16,o=f32,matmul=float8:block:skip=none",
  "mxfp8": "mixed_mxfp8",
  "nvfp4": "mixed_nvfp4",
  "nvfp4, 1 x 16": NVFP4_ROWS,
  "nvfp4, 1 x 16, nearest": f"{NVFP4_ROWS}:stochastic_rounding=false",
  "nvfp4, 1 x 16, no Hadamard": f"{NVFP4_ROWS}:hadamard=false",
  "int8": "mixed_int8",
  "int8, gradients too": "c=bf16,o=f32,matmul=int8:input_grad=int8:weight_grad=int8",
}
"""Policies by what they are called. The matmuls are too small to gain, so none is skipped."""


class Trained(NamedTuple):
  """What a model is after training."""

  figures: Sequence[float]  # one for each seed
  share: float  # of the FLOPs of matmuls, in the format


class Model(NamedTuple):
  """A model, and how it is trained."""

  train: Callable[..., Trained]  # (policy, steps, seeds, on_step) -> what came of it
  steps: int
  figure: str


def train_gpt(policy: str, steps: int, seeds: int, on_step: Callable[[], Any]) -> Trained:
  """Returns perplexities of a character that was held out."""
  model = gpt.Gpt(layers=2, width=128)
  losses = [
    gpt.train(policy, steps, on_step, seed=seed, model=model).state.held_out_loss
    for seed in range(seeds)
  ]
  training = gpt.prepare(policy, model, steps)
  state = jax.eval_shape(training.start, jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((gpt.ROWS, model.context + 1), "int32")
  audit = mpjax.audit(training.step)(state, tokens)
  return Trained([float(np.exp(loss)) for loss in losses], audit.format_share)


def train_experts(policy: str, steps: int, seeds: int, on_step: Callable[[], Any]) -> Trained:
  """Returns losses of images that were not trained on."""
  network = moe.Network(width=128)
  losses, audit = moe.train(policy, steps, on_step, seeds=seeds, network=network).state
  return Trained(losses, audit.format_share)


MODELS = {
  "GPT": Model(train_gpt, 100, "held-out perplexity"),
  "experts": Model(train_experts, 60, "test loss"),
}


def rows(results: Mapping[str, Any]) -> list[list[str]]:
  """Returns the table, the heading first: the mean and the standard deviation over seeds."""
  found = [["model, figure", "format", "FLOPs in it", "mean ± deviation", "less bfloat16"]]
  for name, runs in results["models"].items():
    base = np.array(runs["bfloat16"]["figures"])
    for format in (x for x in FORMATS if x in runs):
      figures = np.array(runs[format]["figures"])
      spread = f"{np.mean(figures):.4f} ± {np.std(figures, ddof=1):.4f}"
      share = f"{100 * runs[format]['share']:.1f} %"
      less = f"{np.mean(figures - base):+.4f}"
      found.append([f"{name}, {MODELS[name].figure}", format, share, spread, less])
  return found


def by_format(results: Mapping[str, Any]) -> list[list[str]]:
  """Returns the table of the page, the heading first: a row for each format."""
  models = results["models"]
  found = [["format", *(f"{name}, {MODELS[name].figure}" for name in models)]]
  for format in FORMATS:
    cells = []
    for runs in models.values():
      figures = np.array(runs[format]["figures"])
      less = np.mean(figures - np.array(runs["bfloat16"]["figures"]))
      cells.append(f"{np.mean(figures):.4f} ± {np.std(figures, ddof=1):.4f} ({less:+.4f})")
    found.append([format, *cells])
  return found


def updated(page: str, results: Mapping[str, Any]) -> str:
  """Returns the text of the page with the part between its marks made from recorded figures."""
  steps = ", ".join(
    f"{name} {next(iter(runs.values()))['steps']} steps" for name, runs in results["models"].items()
  )
  taken = f"{measure.taken(results['environment'])}. {steps}, {results['seeds']} seeds."
  return tables.replaced(page, "formats", f"{taken}\n\n{tables.table(by_format(results))}")


def main(
  models: Sequence[str] = tuple(MODELS),
  formats: Sequence[str] = tuple(FORMATS),
  seeds: int = SEEDS,
  steps: int | None = None,
  out: pathlib.Path = OUT,
  console: Console | None = None,
  write: bool = False,
) -> dict[str, Any]:
  """Trains what is not in the file yet, writes after each format, and prints a table.

  With `write` the table goes into the page too.
  """
  console = console or Console()
  environment = measure.environment({"mpjax": mpjax.__version__}, PACKAGES)
  results: dict[str, Any] = {"environment": environment, "seeds": seeds, "models": {}}
  if out.exists():
    results = measure.read(out)
  with side_by_side.progress_bar(console) as progress:
    for name in models:
      model, runs = MODELS[name], results["models"].setdefault(name, {})
      count = steps or model.steps
      for format in (x for x in formats if x not in runs):
        bar = progress.add_task(f"{name} {format}", total=None)
        start = time.perf_counter()
        on_step = functools.partial(progress.advance, bar)
        trained = model.train(FORMATS[format], count, seeds, on_step)
        seconds = round(time.perf_counter() - start, 1)
        runs[format] = {**trained._asdict(), "steps": count, "seconds": seconds}
        measure.write(out, results)
  console.print(tables.table(rows(results), 2), soft_wrap=True)
  if write:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
  return results


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--models", nargs="+", default=[*MODELS], choices=MODELS)
  parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=FORMATS)
  parser.add_argument("--seeds", type=int, default=SEEDS)
  parser.add_argument("--steps", type=int)
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  parser.add_argument("--write", action="store_true")
  main(**vars(parser.parse_args()))
