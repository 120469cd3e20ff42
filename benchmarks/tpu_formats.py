"""Matmuls in formats, compiled for TPUs that are not there: which dtypes are multiplied?

  PYTHONPATH=. python benchmarks/tpu_formats.py --chips v5e v6e
  PYTHONPATH=. python benchmarks/tpu_formats.py --formats bfloat16 int8 --out int8.json

Loss and gradients of two layers, 2048 x 8192 x 2048 for 4096 rows, and of 8 experts of the same
kernels. It needs libtpu beside jax, as `make tpu-hlo` installs it. Nothing runs, so there are no
times.
"""

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aot
import hlo
import jax
import jax.numpy as jnp
import measure
import tpu_hlo
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

import mpjax

OUT = pathlib.Path(__file__).parent / "results" / "tpu_formats" / "v5e_v6e.json"
PACKAGES = ("jax", "jaxlib", "libtpu")
WIDTH, HIDDEN, ROWS, EXPERTS = 2048, 8192, 4096, 8

FORMATS = {
  "bfloat16": "c=bf16",
  "int8": "c=bf16,matmul=int8",
  "int8, per tensor": "c=bf16,matmul=int8:tensor",
  "int8, gradients too": "c=bf16,matmul=int8:input_grad=int8:weight_grad=int8",
}
"""Policies by what they are called."""


def layers(params: Mapping[str, jax.Array], x: jax.Array, sizes: jax.Array) -> jax.Array:
  """Returns a loss of two layers. `x` has shape [rows, features]."""
  return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2)


def experts(params: Mapping[str, jax.Array], x: jax.Array, sizes: jax.Array) -> jax.Array:
  """Returns a loss of experts, of which each has the rows of a group. `x` is [rows, features]."""
  hidden = jax.nn.relu(jax.lax.ragged_dot(x, params["up"], sizes))
  return jnp.mean(jax.lax.ragged_dot(hidden, params["down"], sizes) ** 2)


MODELS: dict[str, tuple[Callable[..., jax.Array], tuple[int, ...]]] = {
  "layers": (layers, ()),
  "experts": (experts, (EXPERTS,)),
}
"""A loss, and the first axes of its kernels."""


def compiled_gradient(model: str, policy: str, device: Any) -> jax.stages.Compiled:
  """Returns the compiled loss and gradients of one of `MODELS` under a policy."""
  loss, first = MODELS[model]
  shapes = {"up": (*first, WIDTH, HIDDEN), "down": (*first, HIDDEN, WIDTH)}
  params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
  x, sizes = (
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((ROWS, WIDTH), jnp.float32), ((EXPERTS,), jnp.int32))
  )
  args = aot.placed((params, x, sizes), SingleDeviceSharding(device))
  cast = mpjax.autocast(loss, policy, data_argnums=(1, 2))
  return jax.jit(jax.value_and_grad(cast)).lower(*args).compile()


def figures(compiled: jax.stages.Compiled) -> dict[str, Any]:
  """Returns products by dtype of operands and of results, and bytes of a compiled program."""
  program = hlo.parse(compiled.as_text() or "")
  cost: Any = compiled.cost_analysis()
  memory: Any = compiled.memory_analysis()
  return {
    "operands": dict(program.products()),
    "results": dict(program.results_of_products()),
    "bytes": cost["bytes accessed"],
    "temporaries": memory.temp_size_in_bytes,
  }


def table(title: str, found: Mapping[str, Mapping[str, Any]]) -> Table:
  """Returns a table of one model on one chip."""
  shown = Table("format", "operands", "results", "GB accessed", "GB temporary", title=title)
  for name, row in found.items():
    if "error" in row:
      shown.add_row(name, row["error"][:60])
      continue
    dtypes = [", ".join(f"{n} {kind}" for kind, n in row[key].items()) for key in KINDS]
    shown.add_row(name, *dtypes, f"{row['bytes'] / 1e9:.2f}", f"{row['temporaries'] / 1e9:.2f}")
  return shown


KINDS = ("operands", "results")


def main(chips: Sequence[str], formats: Sequence[str], out: pathlib.Path) -> None:
  """Compiles each model in each format for each chip, writes the figures, and shows them."""
  console = Console()
  results: dict[str, Any] = {
    "environment": measure.environment({"mpjax": mpjax.__version__}, PACKAGES),
    "chips": {},
  }
  for chip in chips:
    device = tpu_hlo.devices(tpu_hlo.CHIPS[chip])[0]
    for model in MODELS:
      rows = results["chips"].setdefault(chip, {}).setdefault(model, {})
      for name in formats:
        try:
          rows[name] = figures(compiled_gradient(model, FORMATS[name], device))
        except jax.errors.JaxRuntimeError as error:  # The compiler refuses it: a result, too.
          rows[name] = {"error": str(error).partition("\n")[0][:300]}
      measure.write(out, results)
      console.print(table(f"{model}, {chip}", rows))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"], choices=tpu_hlo.CHIPS)
  parser.add_argument("--formats", nargs="+", default=[*FORMATS], choices=FORMATS)
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  main(**vars(parser.parse_args()))
