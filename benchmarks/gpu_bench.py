"""Measure training steps on a GPU: JAX in ten versions, PyTorch in three.

  make bench                                  on a machine with a GPU
  python benchmarks/gpu_bench.py --size tiny  the same script on a CPU, to see it work

Each model is measured in two parts. In the first a process holds all versions of JAX; in the second
one process holds two of them, with half of the memory, and another PyTorch's. Every part is written
as soon as it is there: the same call goes on where the last one ended.
"""

import argparse
import functools
import hashlib
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gpu_groups
import gpu_ratios
import measure
import tables
import workers
from gpu_versions import HALVES, IN_PYTORCH, NAMES
from rich.console import Console

FOLDER = pathlib.Path(__file__).parent
OUT = FOLDER.parent / "out" / "gpu_bench.json"
CACHE = FOLDER.parent / "out" / "jax_cache"

BESIDE_TORCH = ("policy", "dynamic")
TORCH_VERSIONS = ("torch float32 highest", "torch TF32", "torch amp")
ROUNDS = 11
SECONDS = 0.15
PATIENCE = 120
"""Seconds in which JAX and PyTorch must have started."""
LAST_SECONDS = 10
"""What is left for the tables when the time for measurements is over."""


def jax_worker(fraction: float, backend: str = "") -> workers.Worker:
  """Starts the process of JAX, which takes at most a fraction of the GPU's memory, as it needs it.

  A second process with the GPU gets the rest. What was compiled is kept for the next process.
  """
  environment: dict[str, str | None] = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": None,  # The old name of the next; not both.
    "XLA_CLIENT_MEM_FRACTION": str(fraction),
    "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
  }
  if backend == "gpu":
    environment["JAX_COMPILATION_CACHE_DIR"] = os.environ.get(
      "JAX_COMPILATION_CACHE_DIR", str(CACHE)
    )
  return workers.Worker([sys.executable, str(FOLDER / "jax_worker.py")], environment)


def torch_worker(python: str) -> workers.Worker:
  """Starts the process of PyTorch."""
  return workers.Worker([python, str(FOLDER / "torch_worker.py")], {})


def here(start: Callable[..., Any] = jax_worker) -> dict[str, Any]:
  """Asks a process of JAX where it runs; this one leaves the GPU alone.

  Raises:
    WorkerEndedError: JAX does not start.
  """
  worker = start(0.1)
  try:
    answer = worker.ask(time.monotonic() + PATIENCE, "hello")
  finally:
    worker.close()
  if "failed" in answer:
    raise workers.WorkerEndedError(answer["failed"])
  return answer


def torch_here(
  python: str, backend: str, start: Callable[..., Any] = torch_worker
) -> dict[str, Any]:
  """Returns what PyTorch says of itself, or `missing`: why it is not measured."""
  try:
    worker = start(python)
  except OSError as error:
    return {"missing": f"{python} does not start: {error}"}
  try:
    answer = worker.ask(time.monotonic() + PATIENCE, "hello")
  except workers.WorkerEndedError as error:
    return {"missing": f"no PyTorch in {python}: {error}"}
  except workers.OutOfTimeError:
    return {"missing": f"PyTorch in {python} did not start within {PATIENCE} seconds"}
  finally:
    worker.close()
  if "failed" in answer:
    return {"missing": answer["failed"]}
  if backend == "gpu" and not answer["cuda"]:
    return {"missing": f"PyTorch {answer['versions']['torch']} finds no GPU"}
  return answer


def sources() -> str:
  """Returns a name for the code that is measured: other code has other figures."""
  found = hashlib.sha256()
  files = [*FOLDER.glob("*.py"), *(FOLDER.parent / "mpjax").rglob("*.py")]
  for file in sorted(files):
    found.update(file.read_bytes())
  return found.hexdigest()[:12]


def main(
  models: Sequence[str] = tuple(HALVES),
  size: str = "gpu",
  half: str | None = None,
  versions: Sequence[str] = NAMES,
  minutes: float = 10,
  rounds: int = ROUNDS,
  seconds: float = SECONDS,
  out: pathlib.Path = OUT,
  fresh: bool = False,
  torch_python: str = sys.executable,
  torch_compile: str | None = None,
  console: Console | None = None,
  start_jax: Callable[..., Any] = jax_worker,
  start_torch: Callable[..., Any] = torch_worker,
) -> dict[str, Any]:
  """Measures what is not recorded yet, prints tables, and returns all figures.

  Args:
    models: names of `HALVES`.
    size: one of `models.SIZES`.
    half: the low precision of every model; by default of each its own, see `HALVES`.
    versions: which of JAX's are measured in the first part.
    minutes: after which nothing more is measured.
    rounds: how many measurements of each version.
    seconds: the least length of a measurement.
    out: the file for all figures, or a folder, for a file with the name of the GPU.
    fresh: whether to measure again what is recorded.
    torch_python: the interpreter that has PyTorch.
    torch_compile: see `torch_worker.Session.load`; by default layers of a transformer.
    console: where to print.
    start_jax: starts a process of JAX.
    start_torch: starts one of PyTorch.
  """
  console = console or Console()
  deadline = time.monotonic() + max(0, 60 * minutes - LAST_SECONDS)
  with console.status("start JAX and PyTorch"):
    jax_here = here(start_jax)
    environment = jax_here["environment"]
    backend = environment["backend"]
    torch = torch_here(torch_python, backend, start_torch)
  out = named(out, environment["hardware"])
  settings = {"size": size, "rounds": rounds, "seconds": seconds}
  code = sources()
  results = {"environment": environment, "settings": settings, "models": {}}
  if out.exists() and not fresh:
    results["models"] = measure.read(out)["models"]

  def keys_of(model: str) -> dict[str, Any]:
    where = {"code": code, "hardware": environment["hardware"]}
    key = {**settings, **where, "half": half or HALVES[model]}
    both = {**environment["versions"], **torch.get("versions", {})}
    return {
      "jax": {**key, "versions": environment["versions"], "names": list(versions)},
      "torch": {**key, "versions": both, "compile": compile_of(model)},
    }

  def compile_of(model: str) -> str:
    return torch_compile or ("layers" if model in ("gpt", "wide") else "model")

  unfinished = []
  for model in models:
    precision, keys = half or HALVES[model], keys_of(model)
    recorded = results["models"].get(model, {}).get("parts", {})
    parts = {name: x for name, x in recorded.items() if x["key"] == keys.get(name)}
    parts = {name: x for name, x in parts.items() if complete(x, rounds)}
    entry = results["models"][model] = {"half": precision, "parts": parts}
    todo = [name for name in keys if name not in parts]
    if not todo:
      console.print(f"{model}: recorded in {out}")
      continue

    def record(part: str, found: dict[str, Any], entry: Any = entry, keys: Any = keys) -> None:
      entry["parts"][part] = {"key": keys[part], **found}
      measure.write(out, results)

    other = torch if model in IN_PYTORCH else {"missing": "no PyTorch model for it"}
    run = functools.partial(
      _measure, model, size, precision, jax_here["attention"], versions, other, todo, rounds,
      seconds,
    )  # fmt: skip
    starts = (functools.partial(start_jax, backend=backend), lambda: start_torch(torch_python))
    try:
      with _bar(console, f"{model}, {precision}", todo, rounds) as progress:
        run(compile_of(model), starts, deadline, entry, record, progress)
      if not all(complete(part, rounds) for part in entry["parts"].values()):
        unfinished.append(model)
    except workers.OutOfTimeError:
      unfinished.append(model)
      if not entry["parts"]:
        del results["models"][model]
      break
  # What was recorded under other conditions stays in the file, and is not shown under these.
  shown = {
    name: x for name, x in results["models"].items()
    if all(part["key"] == keys_of(name)[of] for of, part in x["parts"].items())
  }  # fmt: skip
  gpu_ratios.show({**results, "models": shown}, console)
  unfinished += [name for name in models if name not in results["models"]]
  if unfinished:
    names = ", ".join(dict.fromkeys(unfinished))
    console.print(f"Out of time, not measured in full: {names}. The same command goes on there.")
  if "missing" in torch:
    console.print(f"PyTorch is not measured: {torch['missing']}")
  console.print(f"All figures: {out}", soft_wrap=True)
  return results


def _measure(
  model: str, size: str, half: str, attention: str, versions: Sequence[str],
  torch: Mapping[str, Any], todo: Sequence[str], rounds: int, seconds: float, compile: str,
  starts: Sequence[Callable[..., Any]], deadline: float, entry: Mapping[str, Any],
  record: Callable[[str, dict[str, Any]], None], progress: Callable[[str], None],
) -> None:  # fmt: skip
  """Measures the parts of a model that are not recorded."""
  start_jax, start_torch = starts
  sizes = {"model": model, "size": size, "half": half}
  groups: list[gpu_groups.Group] = []

  def jax_group(fraction: float, names: Sequence[str]) -> gpu_groups.Group:
    questions = [("describe", sizes), ("load", {**sizes, "attention": attention}), ("trace", {})]
    start = functools.partial(start_jax, fraction)
    groups.append(gpu_groups.Group(start, names, questions, deadline, progress))
    return groups[-1]

  def torch_group(description: Mapping[str, Any]) -> gpu_groups.Group:
    load = {"description": description, "compile": compile}
    questions = [("load", load), ("warm_up", {})]
    groups.append(gpu_groups.Group(start_torch, TORCH_VERSIONS, questions, deadline, progress))
    return groups[-1]

  in_torch = None
  with_torch = "torch" in todo and "missing" not in torch
  try:
    if "jax" in todo:
      alone = jax_group(0.9, versions)
      alone.ready("describe")
      if with_torch and "failed" not in alone.answers["describe"]:
        # While JAX traces: when it compiles, its autotuner measures kernels.
        in_torch = torch_group(alone.answers["describe"])
        in_torch.ready()
      alone.then("compile")
      figures = gpu_groups.take_turns([alone], rounds, seconds, progress)
      record("jax", _part(figures, figures, {"jax": alone}))
      alone.close()
    if "torch" not in todo:
      return
    if not with_torch:
      record("torch", {"versions": {}, "missing": torch["missing"]})
      return
    beside = jax_group(0.5, BESIDE_TORCH)
    beside.ready("describe")
    if in_torch is None:
      in_torch = torch_group(beside.answers["describe"])
      in_torch.ready()
    beside.then("compile")
    figures = gpu_groups.take_turns([beside, in_torch], rounds, seconds, progress)
    in_float32 = entry["parts"].get("jax", {}).get("versions", figures)
    record("torch", _part(figures, in_float32, {"jax": beside, "torch": in_torch}))
  finally:
    for group in groups:
      group.close()


def _part(
  figures: gpu_groups.Figures,
  in_float32: gpu_groups.Figures,
  groups: Mapping[str, gpu_groups.Group],
) -> dict[str, Any]:
  """Returns the record of a part, with what is suspicious about it."""
  first = next((x for x in ("float32 highest", "policy") if "losses" in in_float32.get(x, {})), "")
  reference = in_float32[first]["losses"] if first else None
  for name, what in gpu_groups.suspicions(figures, reference).items():
    figures[name]["suspicions"] = what
  sizes = {name: x.answers.get("load", {}).get("parameters") for name, x in groups.items()}
  found: dict[str, Any] = {"parameters": sizes, "versions": figures}
  if len({x for x in sizes.values() if x is not None}) > 1:
    for name in TORCH_VERSIONS:
      figures[name].setdefault("suspicions", []).append("another number of parameters")
  return found


def complete(part: Mapping[str, Any], rounds: int) -> bool:
  """Whether all versions of a part that did not fail have all rounds: the time did not end."""
  versions = part["versions"].values()
  return all("failed" in one or len(one["seconds"]) >= rounds for one in versions)


def named(out: pathlib.Path, hardware: str) -> pathlib.Path:
  """Returns the file for the figures: in a folder one with the name of the hardware."""
  if out.suffix == ".json":
    return out
  return out / (re.sub(r"[^a-z0-9]+", "_", hardware.lower()).strip("_") + ".json")


class _bar:
  """A progress bar of the steps of a model, and what is done at the moment."""

  def __init__(self, console: Console, title: str, todo: Sequence[str], rounds: int) -> None:
    versions = {"jax": len(NAMES), "torch": len(BESIDE_TORCH) + len(TORCH_VERSIONS)}
    # Each is traced, compiled, checked, and measured in every round.
    total = sum((rounds + 3) * versions[part] for part in todo)
    self.bar = tables.progress_bar(console, 42)
    self.title, self.task = title, self.bar.add_task(title, total=total)

  def __enter__(self) -> Callable[[str], None]:
    self.bar.start()
    return lambda text: self.bar.update(self.task, advance=1, description=f"{self.title}: {text}")

  def __exit__(self, *error: object) -> None:
    self.bar.update(self.task, description=self.title)
    self.bar.stop()


def arguments() -> dict[str, Any]:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--models", nargs="+", default=list(HALVES), choices=HALVES)
  parser.add_argument("--size", default="gpu", choices=["tiny", "cpu", "gpu"])
  parser.add_argument("--half", choices=["bfloat16", "float16"], help="default: each its own")
  parser.add_argument("--versions", nargs="+", default=list(NAMES), choices=NAMES)
  parser.add_argument("--minutes", type=float, default=10, help="nothing is measured after them")
  parser.add_argument("--rounds", type=int, default=ROUNDS)
  parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a measurement")
  parser.add_argument("--out", type=pathlib.Path, default=OUT, help="a file, or a folder")
  parser.add_argument("--fresh", action="store_true", help="measure again what is recorded")
  parser.add_argument("--torch-python", default=os.environ.get("TORCH_PYTHON") or sys.executable)
  parser.add_argument("--torch-compile", choices=["model", "layers", "none"])
  parser.add_argument("--show", type=pathlib.Path, help="only show figures recorded before")
  return vars(parser.parse_args())


def cli() -> None:
  """Does what the command line asks for."""
  chosen = arguments()
  recorded = chosen.pop("show")
  if recorded:
    gpu_ratios.show(measure.read(recorded), Console())
  else:
    main(**chosen)


if __name__ == "__main__":
  cli()
