"""Compile a GPT whose matmuls state that they accumulate in float32, and one whose do not.

  PYTHONPATH=. python benchmarks/accumulation.py --chips h200 v5e

The policy states the accumulation by its `precision`. A chip that is named needs its compiler, as
`make gpu-hlo` and `make tpu-hlo` install it. Nothing runs, so there are no times.
"""

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import aot
import gpu_hlo
import jax
import measure
import tpu_hlo
import training_steps
from models import SIZES
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mpjax

OUT = pathlib.Path(__file__).parent / "results" / "accumulation"
CHIPS = (*gpu_hlo.GPUS, *tpu_hlo.CHIPS)
LAYERS = 2
STATED = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
FIGURES = ("kernels", "traffic_bytes", "temp_bytes")


def device_of(chip: str) -> tuple[Any, dict[str, Any]]:
  """Returns a device that programs can be compiled for, and options of its compiler."""
  if chip in tpu_hlo.CHIPS:
    return tpu_hlo.devices(tpu_hlo.CHIPS[chip])[0], {}
  return gpu_hlo.gpu_device(chip), gpu_hlo.OPTIONS


def compiled(half: str, precision: str | None, chip: str) -> dict[str, Any]:
  """Returns the figures of a training step, or the error of the compiler."""
  case = aot.shallower(SIZES["gpu"]["gpt"], LAYERS)
  policy = mpjax.Policy(
    param_dtype="float32", compute_dtype=half, output_dtype="float32", precision=precision
  )
  loss = functools.partial(training_steps.loss_fn, mpjax.with_policy(case.make(), policy).apply)
  device, options = device_of(chip)
  try:
    figures, _ = aot.compiled_step(
      functools.partial(training_steps.step_of, loss), aot.arguments_of(case, device), options
    )
  except jax.errors.JaxRuntimeError as error:
    return {"error": str(error).partition("\n")[0]}
  return {name: figures[name] for name in FIGURES}


def table(results: dict[str, Any]) -> Table:
  """Returns a table with the figures of both versions on each chip."""
  shown = Table("chip", "dtype", "precision", "kernels", "GB moved", "GB temporary")
  for chip, by_dtype in results["chips"].items():
    for half, versions in by_dtype.items():
      for name, row in versions.items():
        if "error" in row:
          shown.add_row(chip, half, name, row["error"])
          continue
        gigabytes = (f"{row[key] / 1e9:.3f}" for key in FIGURES[1:])
        shown.add_row(chip, half, name, str(row["kernels"]), *gigabytes)
  return shown


def main(chips: Sequence[str], out: pathlib.Path) -> None:
  """Compile all versions for each chip, write the figures of each chip, and show them."""
  console = Console()
  for chip in chips:
    packages = ("jax", "jaxlib", *(["libtpu"] if chip in tpu_hlo.CHIPS else []))
    environment = measure.environment({"mpjax": mpjax.__version__}, packages)
    results: dict[str, Any] = {"environment": environment, "chips": {chip: {}}}
    for half in track(STATED, chip, console=console):
      results["chips"][chip][half] = {
        name or "unstated": compiled(half, name, chip) for name in (None, STATED[half])
      }
    measure.write(out / f"{chip}.json", results)
    console.print(table(results))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--chips", nargs="+", default=["h200", "v5e"], choices=CHIPS)
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  main(**vars(parser.parse_args()))
