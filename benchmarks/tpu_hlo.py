"""Compile training steps for TPUs that are not there, and count what they would run.

  make tpu-hlo
  make tpu-hlo ARGS="--models gpt --versions 'by hand' policy"    a quick one

One whole training step of each model on one chip: float32, dtypes by hand with softmax in low
precision and in float32, under a policy, with autocast around its loss, with a dynamic loss scale,
and with float32 masters of bfloat16 parameters. Nothing runs, so there are no times. What is
recorded already is not compiled again.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aot
import gpu_hlo
import jax
import jax.numpy as jnp
import measure
import numpy as np
import training_steps
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import SIZES, Case
from rich.console import Console

import mpjax

FOLDER = pathlib.Path(__file__).parent
OUT = FOLDER.parent / "out" / "tpu_hlo"
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""The smallest topology of each; programs are for one chip of it."""

HALF = "bfloat16"
VERSIONS = (
  *("float32", "by hand, low softmax", "by hand", "by hand, exact", "policy", "autocast"),
  *("dynamic scale", "flax DynamicScale", "masters", "split masters", "masters, dynamic"),
  "float32 head",
)
GIGA = {
  "GB accessed": "traffic_bytes",
  "GB, XLA": "accessed_bytes",
  "GB temporary": "temp_bytes",
}


def words(figures: Mapping[str, Any]) -> str:
  """Returns the figures of one program as a line."""
  if "error" in figures:
    return figures["error"]
  found = [f"{figures[key] / 1e9:.2f} {name}" for name, key in GIGA.items()]
  travelling = (f"{n} {kind} ({b / 1e6:.0f} MB)" for kind, (n, b) in figures["collectives"].items())
  return ", ".join([*found, f"{figures['fusions']} fusions", *travelling])


def devices(topology: str) -> Sequence[Any]:
  """Returns the devices of a topology, which programs can be compiled for and not run on.

  Raises:
    RuntimeError: libtpu is not installed beside jax.
  """
  # No machine is asked for its TPU, and none is locked: there is none.
  os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
  try:
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
  except Exception as error:
    raise RuntimeError(
      f"cannot compile for {topology}: jax {jax.__version__} found no compiler for TPUs. Install "
      "libtpu beside it, `pip install 'jax[tpu]'`: `make tpu-hlo` does so in an environment of its "
      "own."
    ) from error


def steps(case: Case) -> dict[str, tuple[Callable[..., Any], Any]]:
  """Returns the step of each of `VERSIONS`, and shapes of its state."""

  def low_softmax(dtype: Any = None) -> Any:
    model = case.make(dtype)
    return model.clone(float32_softmax=False) if hasattr(model, "float32_softmax") else model

  found = aot.steps(case, HALF)
  by_hand = aot.steps(dataclasses.replace(case, make=low_softmax), HALF)["by hand"]
  found["by hand, low softmax"] = by_hand
  # The matmuls of which a softmax is taken: of a language model's head, and of each router.
  rules = [mpjax.Rule("float32", path=path) for path in ("Dense_0", "**/Experts_*/Dense_0")]
  if hasattr(case.make(), "vocabulary"):
    model = mpjax.linen.with_policy(case.make(), f"mixed_{HALF}", rules, unmatched="ignore")
    found["float32 head"] = (
      functools.partial(training_steps.plain_step, model.apply),
      aot.state_of(case),
    )
  return found


H200S = "8 H200s"
PODS = {"16 chips": "v5p:4x2x2", "64 chips": "v5p:4x4x4", "256 chips": "v5p:4x8x8"}
"""Topologies of a v5p. `H200S` are beside them, for JAX with a compiler for CUDA."""
MLP_WAYS = {"MLP, data parallel": AxisType.Auto, "MLP, explicit axes": AxisType.Explicit}
"""The large MLP, its rows on all chips: Flax's `nn.Embed` takes no rows along an explicit axis."""
WAYS = ("data parallel", "FSDP", "tensor parallel", *MLP_WAYS)
ROWS_EACH, MODEL_AXIS = 4, 4
TENSOR_AXES = {"query": -2, "key": -2, "value": -2, "out": -3, "Dense_0": -1, "Dense_1": -2}
"""Which axis of a kernel is in parts: heads, the hidden features of an MLP, the vocabulary."""


def pod_program(way: str, devices: Sequence[Any], version: str) -> tuple[Callable[..., Any], Any]:
  """Returns a step for many chips, and its arguments with their shardings.

  Args:
    way: one of `WAYS`, of the GPT if not of `MLP_WAYS`. Under FSDP kernels and tables, and what the
      optimizer has of them, are in parts on all chips, along the largest axis that can be divided.
      Tensor parallel are kernels alone, each on `MODEL_AXIS` chips, see `TENSOR_AXES`.
    devices: the chips.
    version: one of `VERSIONS`.
  """
  if way in MLP_WAYS:
    mesh = Mesh(np.array(devices), ("data",), axis_types=(MLP_WAYS[way],))
    step, state = steps(SIZES["tpu"]["mlp"])[version]
    _, *batch = aot.arguments_of(SIZES["tpu"]["mlp"], devices[0], ())
    rows = aot.placed(batch, NamedSharding(mesh, P("data")))
    return step, (aot.placed(state, NamedSharding(mesh, P())), *rows)
  many = MODEL_AXIS if way == "tensor parallel" else 1
  grid = np.array(devices).reshape(-1, many)
  mesh = Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
  rows = NamedSharding(mesh, P("data"))
  batch = (ROWS_EACH * len(devices), 1024)
  gpt = SIZES["tpu"]["gpt"]
  make = lambda dtype=None: gpt.make(dtype).clone(rows=rows)  # noqa: E731
  inputs = jax.ShapeDtypeStruct(batch, jnp.int32)
  case = dataclasses.replace(gpt, make=make, inputs=inputs, outputs=batch)
  step, state = steps(case)[version]

  def place(path: Any, x: Any) -> Any:
    names = ["", *(str(getattr(entry, "key", "")) for entry in path)]
    spec = [None] * x.ndim
    if way == "FSDP" and names[-1] in ("kernel", "embedding", "places"):
      fits = (i for i in range(x.ndim) if x.shape[i] % len(devices) == 0)
      spec[max(fits, key=lambda i: x.shape[i])] = "data"
    if way == "tensor parallel" and names[-1] == "kernel" and names[-2] in TENSOR_AXES:
      spec[TENSOR_AXES[names[-2]]] = "model"
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))

  state = jax.tree_util.tree_map_with_path(place, state)
  shardings = jax.tree.map(lambda x: x.sharding, state)

  def in_place(state: Any, *batch: Any) -> Any:
    state, loss = step(state, *batch)
    return jax.lax.with_sharding_constraint(state, shardings), loss

  tokens = jax.ShapeDtypeStruct(batch, jnp.int32, sharding=rows)
  return in_place, (state, tokens, tokens)


def read(file: pathlib.Path) -> dict[str, Any]:
  """Returns what is recorded in a file, which need not be there."""
  return measure.read(file) if file.exists() else {"models": {}}


def main(
  models: Sequence[str] = tuple(SIZES["tpu"]),
  chips: Sequence[str] = ("v5e",),
  versions: Sequence[str] = VERSIONS,
  pods: Sequence[str] = (),
  ways: Sequence[str] = WAYS,
  out: pathlib.Path = OUT,
  texts: pathlib.Path | None = None,
) -> None:
  """Compiles what is not recorded, and writes each program's figures as soon as they are there.

  Args:
    models: of `SIZES["tpu"]`, for one chip.
    chips: for which of `CHIPS`.
    versions: which of `VERSIONS`.
    pods: numbers of chips; with any, the programs for these are compiled, and not those for one.
    ways: which of `WAYS`.
    out: a folder, with a file for each chip, and one for all pods.
    texts: a folder for the text of every compiled program.
  """
  console = Console()
  if pods:
    everything = itertools.product((None,), pods, ways, versions)
  else:
    everything = itertools.product(chips, (None,), models, versions)
  for chip, pod, model, name in everything:
    on_gpus = pod == H200S
    title = f"{model}, {pod}" if pod else model
    file = out / f"{chip or ('h200' if on_gpus else 'pods')}.json"
    if name in read(file)["models"].get(title, {}).get("versions", {}):
      continue
    if pod:
      there = gpu_hlo.gpu_devices("h200", 8) if on_gpus else devices(PODS[pod])
      step, args = pod_program(model, there, name)
    else:
      case = SIZES["tpu"][model]
      step, state = steps(case).get(name, (None, None))
      if step is None:  # It is no language model.
        continue
      args = aot.arguments_of(case, devices(CHIPS[chip])[0], state)
    try:
      figures, text = aot.compiled_step(step, args, gpu_hlo.OPTIONS if on_gpus else {})
    except jax.errors.JaxRuntimeError as error:  # It does not fit, for one: a result, too.
      figures, text = {"error": str(error)[:500]}, ""
    compiler = "jax-cuda12-plugin" if on_gpus else "libtpu"
    packages = ("jax", "jaxlib", compiler, "flax", "optax", "numpy")
    environment = measure.environment({"mpjax": mpjax.__version__}, packages)
    results = read(file)  # Another process may have written to it meanwhile.
    results["environment"] = {key: environment[key] for key in ("date", "python", "versions")}
    found = results["models"].setdefault(title, {"half": HALF, "versions": {}})
    found["versions"][name] = figures
    measure.write(file, results)
    console.print(f"{file.stem}, {title}, {name}: {words(figures)}", highlight=False)
    if texts:
      texts.mkdir(parents=True, exist_ok=True)
      (texts / f"{file.stem}_{title}_{name}.txt".replace(" ", "_")).write_text(
        text, encoding="utf-8"
      )


def arguments() -> dict[str, Any]:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--models", nargs="+", default=list(SIZES["tpu"]), choices=SIZES["tpu"])
  parser.add_argument("--chips", nargs="+", default=["v5e"], choices=CHIPS)
  parser.add_argument("--versions", nargs="+", default=list(VERSIONS), choices=VERSIONS)
  parser.add_argument("--pods", nargs="+", default=[], choices=[*PODS, H200S])
  parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  parser.add_argument("--texts", type=pathlib.Path, help="a folder for the programs themselves")
  return vars(parser.parse_args())


if __name__ == "__main__":
  main(**arguments())
