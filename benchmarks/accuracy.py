"""How far gradients are from float64: under a policy, and with dtypes written by hand.

  make bench SCRIPT=accuracy
  PYTHONPATH=. python benchmarks/accuracy.py --only "Linen MLP" "NNX LSTM" --seeds 8

The models are those of `accuracy_models.py`. All versions of a model get the same float32
parameters and inputs; an error is the norm of the difference from the gradient in float64, over the
norm of that gradient, of all parameters together. A seed stands for parameters and inputs. Under a
policy a model may err 1.1 times as much as by hand, and all together no more: the script ends with
1 if one does not hold to that.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import accuracy_report
import jax
import jax.numpy as jnp
import measure
import numpy as np
import tables
from accuracy_models import MODELS, Model
from rich import box
from rich.console import Console
from rich.table import Table

import mpjax
from tests import programs

OUT = pathlib.Path(__file__).parent.parent / "out" / "accuracy.json"
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
SEEDS = 128
ENOUGH = 0.9
"""What share of the FLOPs of its matmuls a version by hand must have in low precision to be one.

JAX's own attention multiplies what comes back to it in float32."""


def reference(model: Model, draws: Sequence[Any]) -> list[Any]:
  """Returns the gradient for each draw, computed in float64 throughout.

  Raises:
    ValueError: if a result in the program has another floating dtype.
  """
  with jax.enable_x64(True):
    gradient = jax.grad(model.loss("float64", ""))
    draws = [in_float64(draw) for draw in draws]
    found = not_in_float64(jax.make_jaxpr(gradient)(*draws[0]))
    if found:
      raise ValueError(f"the reference is not in float64: {found}")
    run = programs.jitted(gradient)
    return [jax.device_get(run(*draw)) for draw in draws]


def in_float64(tree: Any) -> Any:
  """Returns a tree with its floating arrays in float64."""
  return jax.tree.map(
    lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
  )


def not_in_float64(program: Any) -> set[str]:
  """Returns the operations of a program that have a result in another floating dtype."""
  return {
    f"{eqn.primitive.name} {var.aval.dtype}"
    for eqn, _ in programs.equations(program)
    for var in eqn.outvars
    if jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.dtype != jnp.float64
  }


def error(got: Any, want: Any) -> float:
  """Returns the norm of the difference of two trees, over the norm of the second."""
  pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
  difference = sum(np.sum(np.square(np.asarray(x, np.float64) - y)) for x, y in pairs)
  return float(np.sqrt(difference / sum(np.sum(np.square(y)) for _, y in pairs)))


def measured(model: Model, dtype: str, draws: Sequence[Any], true: Sequence[Any]) -> dict[str, Any]:
  """Returns means of the errors of all draws, by way; a string says why there are none."""
  found: dict[str, Any] = {}
  for way in ("policy", *model.by_hand):
    gradient = jax.grad(model.loss(way, dtype))
    share = programs.half_share(jax.make_jaxpr(gradient)(*draws[0]))
    if share < ENOUGH:
      found[way] = f"{share:.0%} of its matmuls are in {dtype}"
      continue
    run = programs.jitted(gradient)
    try:
      grads = [jax.device_get(run(*draw)) for draw in draws]
    except ValueError as reason:
      if "not supported" not in str(reason):
        raise
      found[way] = str(reason)  # of a product that this backend does not have
      continue
    errors = [error(got, want) for got, want in zip(grads, true, strict=True)]
    found[way] = accuracy_report.means(errors)
  return found


def main(
  only: Sequence[str] = tuple(MODELS),
  dtypes: Sequence[str] = accuracy_report.DTYPES,
  seeds: int = SEEDS,
  out: pathlib.Path = OUT,
  console: Console | None = None,
) -> dict[str, Any]:
  """Measures, writes after each model, prints a table and returns all."""
  console = console or Console()
  environment = measure.environment({"mpjax": mpjax.__version__}, PACKAGES)
  results: dict[str, Any] = {"environment": environment, "seeds": seeds, "models": {}}
  with tables.progress_bar(console, 34) as progress:
    bar = progress.add_task("", total=len(only))
    for name in only:
      progress.update(bar, description=name)
      draws = [MODELS[name].draw(seed) for seed in range(seeds)]
      true = reference(MODELS[name], draws)
      results["models"][name] = {
        dtype: measured(MODELS[name], dtype, draws, true) for dtype in dtypes
      }
      measure.write(out, results)
      progress.advance(bar)
  show(results, console)
  console.print(f"All figures: {out}", soft_wrap=True)
  return results


def show(results: dict[str, Any], console: Console) -> None:
  """Prints a row for each model, and what they say together."""
  heading, *rows = accuracy_report.rows(results)
  shown = [
    i for i, name in enumerate(heading) if name != "by hand"
  ]  # what 80 columns have room for
  table = Table(title="Gradients: relative error against float64", box=box.SIMPLE)
  for i in shown:
    table.add_column(heading[i], justify="right" if i else "left", no_wrap=not i)
  for row in rows:
    table.add_row(*(row[i].strip("*") for i in shown))
  console.print(table)
  console.print(accuracy_report.summary(results))


def arguments() -> dict[str, Any]:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument(
    "--only", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL",
    help="names of models: " + ", ".join(MODELS),
  )  # fmt: skip
  dtypes = accuracy_report.DTYPES
  parser.add_argument("--dtypes", nargs="+", default=list(dtypes), choices=dtypes)
  parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many draws ({SEEDS})")
  parser.add_argument("--out", type=pathlib.Path, default=OUT, help="where the figures go")
  return vars(parser.parse_args())


if __name__ == "__main__":
  sys.exit(0 if accuracy_report.holds(main(**arguments())) else 1)
