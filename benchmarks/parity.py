"""Train five models from several seeds in float32 and in less: do they end up in the same place?

  make bench SCRIPT=parity
  PYTHONPATH=.:examples python benchmarks/parity.py --only LSTM --seeds 2

A seed stands for first parameters, batches and dropout, the same ones under every policy. The means
over the seeds may differ by the standard deviation of the float32 seeds: the script ends with 1 if
a figure of a model does not hold to that. Runs that are in the file already are not run again.

float8 is trained where a model has matmuls that can be in it, small ones too (`FLOAT8`).
"""

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import digits
import gpt
import jax
import lenet_per_module as lenet
import lstm_language_model as lstm
import measure
import numpy as np
import optax
import parity_report
import side_by_side
from rich import box
from rich.console import Console
from rich.table import Table

import mpjax

OUT = pathlib.Path(__file__).parent.parent / "out" / "parity.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn")


FLOAT8 = mpjax.Policy(
  param_dtype="float32",
  compute_dtype="bfloat16",
  output_dtype="float32",
  matmul=mpjax.Float8(skip=()),
)
"""`mixed_float8`, but for the sizes that are too small to gain: all matmuls here are."""


def spelled(policy: str) -> str:
  """Returns what the examples are given for one of `parity_report.POLICIES`."""
  return str(FLOAT8) if policy == parity_report.FLOAT8 else policy


def digits_cnn(network, policy, steps, seed, on_step):
  """Trains a network of examples/digits.py, and returns its figures."""
  train, test = digits.load_data()
  scale = digits.LOSS_SCALES.get(policy, mpjax.NoLossScale())
  step = _digits_step(policy, scale, steps, network)
  state = digits.prepare(policy, scale, steps, network, seed=seed).state
  for images, labels in digits.batches(train, steps, seed=seed):
    state, _ = jax.block_until_ready(step(state, images, labels))
    on_step()
  model = mpjax.with_policy(network, policy)
  variables = {"params": state.params, "batch_stats": state.batch_stats}
  logits = model.apply(variables, test.images, train=False)
  return classified(logits, test.labels) | scaling(state.opt_state)


@functools.cache
def _digits_step(*args):
  """Returns the step, which is compiled once for all seeds."""
  return digits.prepare(*args).step


def lenet5(policy, steps, seed, on_step):
  """Trains LeNet-5 of examples/lenet_per_module.py, and returns its figures."""
  train, test = _enlarged_digits()
  model, state, _ = lenet.prepare(lenet.POLICIES[policy], steps, seed)
  step = _lenet_step(policy, steps)
  for batch in lenet.batches(train, steps, seed):
    state, _ = jax.block_until_ready(step(state, batch))
    on_step()
  logits = model.apply({"params": state.params}, test.images)
  return classified(logits, test.labels) | scaling(state.opt_state)


@functools.cache
def _lenet_step(policy, steps):
  return lenet.prepare(lenet.POLICIES[policy], steps, 0)[2]


@functools.cache
def _enlarged_digits():
  return lenet.load_data()


def language_model(example, model, policy, steps, seed, on_step):
  """Trains a model of one of the language examples, and returns its figures."""
  found = example.train(policy, steps, on_step, seed=seed, model=model).state
  return {"character_loss": found.held_out_loss} | scaling(found.state.opt_state)


def classified(logits, labels):
  """Returns the share of right answers and the mean loss."""
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  right = np.asarray(logits).argmax(-1) == labels
  return {"accuracy": float(right.mean()), "loss": float(losses.mean())}


def scaling(opt_state):
  """Returns what happened to the loss scale."""
  mpjax.check_skipped_steps(opt_state)  # raises if the last 50 steps in a row were skipped
  metrics = mpjax.loss_scaling_metrics(opt_state)
  return {"skipped": int(metrics["skipped"]), "loss_scale": float(metrics["loss_scale"])}


class Task(NamedTuple):
  """One model: how it is trained, and how much."""

  run: Callable[..., dict[str, float]]  # (policy, steps, seed, on_step) -> figures
  steps: int
  seeds: int
  policies: tuple[str, ...] = parity_report.POLICIES


# Their matmuls are convolutions, and layers of 120, 84 or 10: none is one of float8.
NO_FLOAT8 = tuple(name for name in parity_report.POLICIES if name != parity_report.FLOAT8)


# The test set of digits has 450 images, 0.2 % each: more seeds, which are cheap there.
LSTM = functools.partial(language_model, lstm, lstm.LanguageModel(features=96))
GPT = functools.partial(language_model, gpt, gpt.Gpt(layers=2, width=64))
CNN = functools.partial(digits_cnn, digits.NETWORK)
DENSE_CNN = functools.partial(digits_cnn, digits.Network(hidden=(128, 128)))
TASKS = {
  "digits CNN": Task(CNN, steps=200, seeds=10, policies=NO_FLOAT8),
  "dense CNN": Task(DENSE_CNN, steps=200, seeds=10),
  "LeNet-5": Task(lenet5, steps=200, seeds=10, policies=NO_FLOAT8),
  "LSTM": Task(LSTM, steps=200, seeds=5),
  "GPT": Task(GPT, steps=500, seeds=5),
}


def main(
  only: Sequence[str] = tuple(TASKS),
  seeds: int | None = None,
  steps: int | None = None,
  out: pathlib.Path = OUT,
  console: Console | None = None,
) -> dict[str, Any]:
  """Trains what is not in the file yet, writes after each run, prints a table, returns all."""
  console = console or Console()
  environment = measure.environment({"mpjax": mpjax.__version__}, PACKAGES)
  results: dict[str, Any] = {"environment": environment, "models": {}}
  if out.exists():
    results = measure.read(out)
    _check_same("versions", results["environment"]["versions"], environment["versions"])
    _check_same("python", results["environment"]["python"], environment["python"])
  with side_by_side.progress_bar(console) as progress:
    for name in only:
      task = TASKS[name]
      wanted = steps or task.steps
      entry = results["models"].setdefault(name, {"steps": wanted, "runs": {}})
      _check_same(f"steps of {name}", entry["steps"], wanted)
      for policy in task.policies:
        runs = entry["runs"].setdefault(policy, {})
        missing = [x for x in range(seeds or task.seeds) if str(x) not in runs]
        bar = progress.add_task(f"{name} {policy}", total=wanted * len(missing))
        for seed in missing:
          runs[str(seed)] = task.run(
            spelled(policy), wanted, seed, lambda b=bar: progress.advance(b)
          )
          measure.write(out, results)
  chosen = {**results, "models": {name: results["models"][name] for name in only}}
  show(chosen, console)
  console.print(f"All figures: {out}", soft_wrap=True)
  return chosen


def _check_same(what, recorded, now):
  if recorded != now:
    raise ValueError(f"the file has other {what} ({recorded}) than these ({now}): name another")


def show(results: dict[str, Any], console: Console) -> None:
  """Prints what an 80-column terminal has room for, one row for each comparison."""
  heading, *rows = parity_report.rows(results)
  shown = [x for x in heading if x not in ("mean", "float32", "range", "same seed", "skipped")]
  table = Table(
    title="Low precision less float32, and the deviation of float32 seeds", box=box.SIMPLE
  )
  for name in shown:
    table.add_column(name, justify="right" if name in ("difference", "deviation") else "left")
  for row in rows:
    cells = dict(zip(heading, row, strict=True))
    table.add_row(*(cells[name].strip("*") for name in shown))
  console.print(table)
  console.print(parity_report.summary(results))


def arguments() -> dict[str, Any]:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--only", nargs="+", default=list(TASKS), choices=list(TASKS))
  parser.add_argument("--seeds", type=int, help="how many, instead of each model's own number")
  parser.add_argument("--steps", type=int, help="how many, instead of each model's own number")
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  return vars(parser.parse_args())


if __name__ == "__main__":
  found = parity_report.comparisons(main(**arguments()))
  sys.exit(0 if all(one.holds for one in found.values()) else 1)
