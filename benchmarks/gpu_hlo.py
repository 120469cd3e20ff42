"""Compile the benchmark models for a GPU that is not there, and count what it would run.

  make gpu-hlo
  make gpu-hlo ARGS="--size quick"              small models, in a few minutes
  python benchmarks/gpu_hlo.py --gpu none       for this machine's CPU, at the sizes of a CPU

One whole training step of each model: float32, dtypes by hand, under a policy, and with autocast
around its loss, all from the same float32 parameters and inputs. With `--versions steps` those of
`gpu_steps.py`: loss scaling, accumulation, master weights. Kernels, bytes moved and
temporaries are those of the optimized program. Nothing runs, so there are no times, and no
autotuner chooses among kernels.
"""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import aot
import gpu_steps
import hlo
import jax
import measure
import roofline
import tables
from jax.experimental import topologies
from models import SIZES, Case
from rich import box
from rich.console import Console
from rich.table import Table

import mpjax

FOLDER = pathlib.Path(__file__).parent
OUT = FOLDER.parent / "out" / "gpu_hlo.json"
GPUS = {file.stem: file for file in sorted((FOLDER / "targets").glob("*.txtpb"))}
"""Facts about chips, as XLA reads them: which one it compiles for."""

HALVES = {
  **{"resnet": "float16", "gpt": "bfloat16", "wide": "bfloat16"},
  **{"mlp": "bfloat16", "lstm": "float16", "after": "bfloat16", "experts": "bfloat16"},
}
OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
"""The autotuner would have to run kernels to choose one: every product is a call of cuBLAS."""


WITHOUT_MPJAX = ("float32", "by hand", "by hand, exact", aot.FLOAT32_LOGITS)
"""Versions whose programs stay as they are when mpjax changes."""


def gpu_device(name: str) -> Any:
  """Returns a device that programs can be compiled for and not run on; see `gpu_devices`."""
  return gpu_devices(name, 1)[0]


def gpu_devices(name: str, count: int) -> Sequence[Any]:
  """Returns devices of one machine, which programs can be compiled for and not run on.

  Raises:
    RuntimeError: jax's plugin for CUDA is not installed beside jax.
  """
  target = GPUS[name].read_text(encoding="utf-8")
  try:
    return topologies.get_topology_desc(
      platform="cuda", topology_name="", topology=f"1x1x{count}", target_config=target
    ).devices
  except Exception as error:
    raise RuntimeError(
      f"cannot compile for {name}: jax {jax.__version__} found no compiler for CUDA. Install "
      f"jax-cuda12-plugin and jax-cuda12-pjrt, both {jax.__version__}, beside it: `make gpu-hlo` "
      "does so in an environment of its own. Without them, `--gpu none` compiles for this CPU."
    ) from error


def estimate(gpu: str | None, figures: Mapping[str, Any], program: hlo.Module) -> float | None:
  """Returns the seconds of `roofline.seconds`; None where a loop runs kernels several times."""
  if gpu is None or program.count("while"):
    return None
  product_bytes = figures["product_bytes"]
  return roofline.seconds(gpu, figures["flops"], product_bytes, figures["bytes"] - product_bytes)


def main(
  models: Sequence[str] | None = None,
  gpu: str | None = "h200",
  size: str | None = None,
  depth: int | None = None,
  half: str | None = None,
  versions: Sequence[str] = aot.VERSIONS,
  triton: bool = False,
  differences: int = 0,
  texts: pathlib.Path | None = None,
  by_hand: pathlib.Path | None = None,
  out: pathlib.Path = OUT,
  console: Console | None = None,
) -> dict[str, Any]:
  """Compiles, prints tables, writes JSON, and returns what it wrote.

  Args:
    models: names of `SIZES`; by default all of the size "quick", `HALVES` of another.
    gpu: one of `GPUS`; None compiles for this machine's CPU.
    size: one of `SIZES`; by default the one for what is compiled for.
    depth: at most so many layers, or blocks in a stage.
    half: of every model; by default of each its own, see `HALVES`.
    versions: which of `VERSIONS`, `FLOAT32_LOGITS` and `gpu_steps.BASES`.
    triton: whether Triton may take products from cuBLAS, and fuse what stands around them.
    differences: how many lines about what a version has more or less than the one by hand.
    texts: a folder for the text of every compiled program.
    by_hand: a file for the figures of `WITHOUT_MPJAX`. Those that it has for these settings are not
      compiled again, whatever changed in mpjax; the others are added to it.
    out: the file for all figures.
    console: where to print.
  """
  console = console or Console()
  size = size or ("cpu" if gpu is None else "gpu")
  models = models or tuple(SIZES[size] if size == "quick" else HALVES)
  options = {} if gpu is None else OPTIONS | {"xla_gpu_enable_triton_gemm": triton}
  device = jax.devices("cpu")[0] if gpu is None else gpu_device(gpu)
  environment = environment_here()
  settings = {"target": gpu or "cpu", "size": size, "depth": depth, "options": options}
  results: dict[str, Any] = {"environment": environment, "settings": settings, "models": {}}
  programs: dict[tuple[str, str], hlo.Module] = {}
  known = Known(by_hand, settings, environment["versions"])
  with tables.progress_bar(console) as bar:
    task = bar.add_task("compile", total=len(models) * len(versions))
    for model in models:
      case = aot.shallower(SIZES[size][model], depth)
      precision = half or HALVES.get(model, "bfloat16")
      found = results["models"][model] = {"half": precision, "versions": {}}
      for name, (step, state) in steps(case, precision, versions).items():
        bar.update(task, description=f"{model}, {name}")
        one = known.get(model, precision, name)
        if one is None:
          args = aot.arguments_of(case, device, state)
          one, text = aot.compiled_step(step, args, options)
          programs[model, name] = program = hlo.parse(text)
          one["estimated_seconds"] = estimate(gpu, one, program)
          known.put(model, precision, name, one)
          write_text(texts, model, name, text)
        found["versions"][name] = one
        bar.advance(task)
    bar.update(task, description="compiled")
  measure.write(out, results)
  show(results, console)
  if differences:
    show_all_differences(programs, differences, console)
  console.print(f"All figures: {out}")
  return results


def environment_here() -> dict[str, Any]:
  """Returns the versions that figures depend on, without this machine, on which nothing runs."""
  environment = measure.environment(
    {"mpjax": mpjax.__version__}, ("jax", "jaxlib", "flax", "optax", "numpy")
  )
  left_out = ("load_average", "backend", "hardware")
  return {name: each for name, each in environment.items() if name not in left_out}


def steps(case: Case, half: str, names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
  """Returns the named steps and their states, in the order of `aot.steps`."""
  needs_more = not {*names} <= {*aot.VERSIONS, aot.FLOAT32_LOGITS}
  found = aot.steps(case, half) if needs_more else aot.plain_steps(case, half)
  return {name: each for name, each in found.items() if name in names}


def write_text(folder: pathlib.Path | None, model: str, version: str, text: str) -> None:
  """Writes the text of a program, if there is a folder for it."""
  if folder is not None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{model}_{version.replace(' ', '_').replace(',', '')}.txt"
    file.write_text(text, encoding="utf-8")


class Known:
  """Figures of `WITHOUT_MPJAX` in a file, by model and all that they depend on."""

  def __init__(
    self, file: pathlib.Path | None, settings: Mapping[str, Any], versions: Mapping[str, str]
  ) -> None:
    """Reads the file, if there is one."""
    self.file = file
    packages = {name: version for name, version in versions.items() if name != "mpjax"}
    self.where = json.dumps([settings, packages])
    exists = file is not None and file.exists()
    self.figures = measure.read(file) if file and exists else {}

  def _key(self, model: str, half: str, version: str) -> str:
    return " | ".join((model, half, version, self.where))

  def get(self, model: str, half: str, version: str) -> dict[str, Any] | None:
    """Returns the figures of a version, or None."""
    return self.figures.get(self._key(model, half, version))

  def put(self, model: str, half: str, version: str, figures: Mapping[str, Any]) -> None:
    """Adds figures to the file, if there is one and nothing in them is mpjax's."""
    if self.file is not None and version in WITHOUT_MPJAX:
      self.figures[self._key(model, half, version)] = figures
      measure.write(self.file, self.figures)


def show(results: dict[str, Any], console: Console) -> None:
  """Prints a row for each version of each model, with its ratios to the one by hand."""
  table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
  table.add_column("", min_width=12)
  for name in ("kernels", "GB moved", "GB temp", "ms*"):
    table.add_column(name, justify="right", no_wrap=True)
  table.add_column("products", min_width=15)
  for model, each in results["models"].items():
    table.add_row(f"[bold]{model}, {each['half']}")
    for name, one in each["versions"].items():
      base = gpu_steps.BASES.get(name, "by hand")
      table.add_row(f"  {name}", *cells(one, each["versions"].get(base)))
    table.add_section()
  console.print(table)
  show_ratios(results, console)
  settings, versions = results["settings"], results["environment"]["versions"]
  depth = "" if settings["depth"] is None else f", at most {settings['depth']} layers or blocks"
  console.print(
    f"A training step, for {settings['target']}, sizes {settings['size']!r}{depth}; in parentheses "
    "against by hand, or what `BASES` names. *: a roofline estimate of benchmarks/roofline.py, not "
    "a measurement. " + ", ".join(f"{name} {version}" for name, version in versions.items()),
    highlight=False,
  )


def show_ratios(results: dict[str, Any], console: Console) -> None:
  """Prints the bytes and temporaries of mpjax's versions as ratios to `FLOAT32_LOGITS`.

  Bytes of a loop count as often as it runs. Models without that version are left out.
  """
  table = Table(box=box.SIMPLE, pad_edge=False)
  table.add_column(f"{aot.FLOAT32_LOGITS} = 1")
  for name in ("bytes", "temporaries"):
    table.add_column(name, justify="right")
  for model, each in results["models"].items():
    base = each["versions"].get(aot.FLOAT32_LOGITS)
    for name, one in each["versions"].items():
      if base is not None and name not in WITHOUT_MPJAX:
        ratios = (one[key] / base[key] for key in ("traffic_bytes", "temp_bytes"))
        table.add_row(f"{model}, {name}", *(f"{ratio:.3f}" for ratio in ratios))
  if table.row_count:
    console.print(table)


def cells(one: dict[str, Any], by_hand: dict[str, Any] | None) -> list[str]:
  """Returns the figures of one version as a table has them."""
  shown = [str(one["kernels"]), *(f"{one[key] / 1e9:.2f}" for key in ("bytes", "temp_bytes"))]
  if by_hand is not None and one is not by_hand:
    pairs = zip(shown, ("kernels", "bytes", "temp_bytes"), strict=True)
    shown = [f"{text} ({one[key] / by_hand[key]:.3f})" for text, key in pairs]
  seconds = one.get("estimated_seconds")
  base = by_hand.get("estimated_seconds") if by_hand is not None else None
  shown.append("-" if seconds is None else f"{1e3 * seconds:.0f}")
  if seconds is not None and base and one is not by_hand:
    shown[-1] += f" ({seconds / base:.3f})"
  return [*shown, "\n".join(f"{count} {kind}" for kind, count in one["products"].items())]


def show_all_differences(
  programs: Mapping[tuple[str, str], hlo.Module], count: int, console: Console
) -> None:
  """Prints the differences of each `policy` and `autocast` to the version by hand beside it."""
  for (model, name), program in programs.items():
    by_hand = programs.get((model, "by hand"), programs.get((model, aot.FLOAT32_LOGITS)))
    if by_hand is not None and name in ("policy", "autocast"):
      show_differences(f"{model}: {name} minus by hand", program, by_hand, count, console)


def show_differences(
  title: str, one: hlo.Module, by_hand: hlo.Module, count: int, console: Console
) -> None:
  """Prints what makes up the difference of two versions, by the operation it was made of."""
  found = hlo.differences(hlo.by_source(one), hlo.by_source(by_hand))
  table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
  for name in ("GB", "kernels"):
    table.add_column(name, justify="right")
  table.add_column("made of", overflow="fold")
  for source, (kernels, moved) in found[:count]:
    table.add_row(f"{moved / 1e9:+.3f}", f"{kernels:+d}", source)
  console.print(table, highlight=False)


def arguments() -> dict[str, Any]:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  every = dict.fromkeys((*HALVES, *SIZES["quick"]))
  parser.add_argument("--models", nargs="+", choices=every, help="default: all of the size")
  parser.add_argument("--gpu", default="h200", choices=[*GPUS, "none"], help="none: for this CPU")
  parser.add_argument("--size", choices=list(SIZES), help="default: by what it compiles for")
  parser.add_argument("--depth", type=int, help="at most so many layers, or blocks in a stage")
  parser.add_argument("--half", choices=["bfloat16", "float16"], help="default: each its own")
  known = (*aot.VERSIONS, aot.FLOAT32_LOGITS, *gpu_steps.BASES)
  parser.add_argument(
    "--versions", nargs="+", default=list(aot.VERSIONS), choices=[*known, "steps"]
  )
  parser.add_argument("--by-hand", type=pathlib.Path, help="a file that keeps what has no mpjax")
  parser.add_argument("--triton", action="store_true", help="products by Triton, not cuBLAS")
  parser.add_argument("--differences", type=int, default=0, help="show what makes them up: lines")
  parser.add_argument("--texts", type=pathlib.Path, help="a folder for the programs themselves")
  parser.add_argument("--out", type=pathlib.Path, default=OUT)
  parser.add_argument("--show", type=pathlib.Path, help="only show figures recorded before")
  chosen = vars(parser.parse_args())
  if "steps" in chosen["versions"]:
    chosen["versions"] = ["policy", *gpu_steps.BASES]
  return chosen | {"gpu": None if chosen["gpu"] == "none" else chosen["gpu"]}


if __name__ == "__main__":
  given = arguments()
  recorded = given.pop("show")
  if recorded:
    show(measure.read(recorded), Console())
  else:
    main(**given)
