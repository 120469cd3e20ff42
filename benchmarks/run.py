"""Measure what a policy and loss scaling cost, against the same thing written by hand.

  make bench

On a machine whose JAX has a GPU this is `gpu_bench.py`, with its options. Else it prints tables and
writes all figures as JSON. Times are ratios, taken by turns in one process; see README.md in this
folder for what is compared and for recorded results.
"""

import argparse
import collections
import functools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import gpu_bench
import gpu_ratios
import jax
import jax.numpy as jnp
import jaxprs
import measure
import report
from flax.training import dynamic_scale
from models import SIZES, Case
from rich.console import Console
from training_steps import (
  first_state,
  flax_step,
  loss_fn,
  mpjax_step,
  optimizer,
  plain_step,
  variants,
)

import mpjax

OUT = pathlib.Path(__file__).parent.parent / "out" / "benchmarks.json"


def count_program(fun: Callable[..., Any], *args: Any) -> dict[str, Any]:
  """Returns what the traced program holds, before any compiler saw it."""
  audit, program = mpjax.audit(fun)(*args), jax.make_jaxpr(fun)(*args)
  operations = collections.Counter(eqn.primitive.name for eqn in jaxprs.walk(program))
  products = ("dot_general", "conv_general_dilated", "ragged_dot_general")
  return {
    "equations": sum(operations.values()),
    "converts": operations.get("convert_element_type", 0),
    "products": sum(operations.get(name, 0) for name in products),
    "half_share": audit.half_share,
    "flops": sum(audit.flops.values()),
    "residual_bytes": sum(audit.residual_bytes.values()),
  }


class Stepper:
  """A compiled step that feeds on its own state, which is donated as in real training."""

  def __init__(self, step: Callable[..., Any], state: Any, batch: Sequence[Any]) -> None:
    self.state = jax.tree.map(jnp.array, state)
    self.batch = batch
    self.compiled = jax.jit(step, donate_argnums=0).lower(self.state, *batch).compile()

  def __call__(self) -> Any:
    self.state, loss = self.compiled(self.state, *self.batch)
    return loss


def compare_precisions(case: Case, half: str, rounds: int) -> dict[str, Any]:
  """Returns figures of float32, half by hand and half by policy."""
  state, batch = first_state(case, optimizer()), case.data()
  params, rest, _ = state
  applies = variants(case, half)
  steps = {
    name: Stepper(functools.partial(plain_step, apply), state, batch)
    for name, apply in applies.items()
  }
  times = measure.take_turns(steps, rounds=rounds)
  figures: dict[str, Any] = {}
  for name, apply in applies.items():
    traced = count_program(functools.partial(plain_step, apply), state, *batch)
    figures[name] = {
      "seconds": times[name],
      "residual_bytes": traced.pop("residual_bytes"),
      "traced": traced,
      "compiled": measure.count_compiled(steps[name].compiled),
    }
  del steps
  gradients = {
    name: (
      jax.value_and_grad(functools.partial(loss_fn, apply), has_aux=True),
      (params, rest, *batch),
    )
    for name, apply in applies.items()
  }
  for kind, cold in (("cold", True), ("warm", False)):
    for name, seconds in measure.trace_turns(gradients, rounds=rounds, cold=cold).items():
      figures[name][f"{kind}_trace_seconds"] = seconds
  return figures


def compare_scalings(case: Case, half: str, rounds: int) -> dict[str, Any]:
  """Returns figures of the policied model with no, static, dynamic and Flax's loss scaling."""
  apply = variants(case, half)["policy"]
  batch = case.data()
  # Arrays from the start: Flax's own Python numbers would cost a second compilation.
  flax_scale = dynamic_scale.DynamicScale(
    fin_steps=jnp.asarray(0, jnp.int32), scale=jnp.asarray(2.0**15, jnp.float32)
  )
  states = {"none": first_state(case, optimizer())}
  functions = {"none": functools.partial(plain_step, apply)}
  for name, scale in (
    ("static", mpjax.StaticLossScale(2**15)),
    ("dynamic", mpjax.DynamicLossScale()),
  ):
    tx = mpjax.loss_scaling(optimizer(), scale)
    states[name] = first_state(case, tx)
    functions[name] = functools.partial(mpjax_step, tx, apply)
  states["flax"] = (states["none"], flax_scale)
  functions["flax"] = functools.partial(flax_step, apply)
  steps = {name: Stepper(fun, states[name], batch) for name, fun in functions.items()}
  times = measure.take_turns(steps, rounds=rounds)
  return {
    name: {"seconds": times[name], "compiled": measure.count_compiled(steps[name].compiled)}
    for name in steps
  }


def main(
  size: str | None = None,
  half: str = "bfloat16",
  rounds: int = 15,
  models: Sequence[str] = ("mlp", "resnet", "gpt"),
  out: pathlib.Path = OUT,
  console: Console | None = None,
) -> dict[str, Any]:
  """Measures, prints tables, writes JSON, and returns what it wrote."""
  console = console or Console()
  size = size or ("cpu" if jax.default_backend() == "cpu" else "gpu")
  settings = {"size": size, "half": half, "rounds": rounds}
  environment = measure.environment(
    {"mpjax": mpjax.__version__}, ("jax", "jaxlib", "flax", "optax", "numpy")
  )
  results: dict[str, Any] = {"environment": environment, "settings": settings}
  results |= {"precision": {}, "scaling": {}}
  for model in models:
    case = SIZES[size][model]
    with console.status(f"{model}: float32, by hand, policy"):
      results["precision"][model] = compare_precisions(case, half, rounds)
    with console.status(f"{model}: loss scaling"):
      results["scaling"][model] = compare_scalings(case, half, rounds)
    measure.write(out, results)
  report.show(results, console)
  console.print(f"All figures: {out}")
  return results


def arguments() -> dict[str, Any]:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--size", choices=list(SIZES), help="default: by the backend")
  parser.add_argument("--half", default="bfloat16", choices=["bfloat16", "float16"])
  parser.add_argument("--rounds", type=int, default=15)
  parser.add_argument("--models", nargs="+", default=list(SIZES["tiny"]), choices=SIZES["tiny"])
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  parser.add_argument("--show", type=pathlib.Path, help="only show figures recorded before")
  return vars(parser.parse_args())


if __name__ == "__main__":
  # Another process says whether there is a GPU: this one must not take of its memory.
  if "--show" not in sys.argv and gpu_bench.here()["environment"]["backend"] != "cpu":
    gpu_bench.cli()
    sys.exit()
  chosen = arguments()
  recorded = chosen.pop("show")
  if recorded:
    figures = measure.read(recorded)
    (gpu_ratios if "models" in figures else report).show(figures, Console())
  else:
    main(**chosen)
