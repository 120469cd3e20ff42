"""Gradient errors of 25 programs in which low precision is delicate.

  PYTHONPATH=. python benchmarks/hard_programs.py --label old
  PYTHONPATH=. python benchmarks/hard_programs.py --only SIREN "Kalman filter" --seeds 16
  PYTHONPATH=. python benchmarks/hard_programs.py --compare OLD.json NEW.json

Each program of `hard/` runs under `mpjax.with_policy`, under `mpjax.autocast` and with dtypes set
by hand. All get the same float32 parameters and inputs. All parameters together have one error: the
norm of the difference from the float64 gradient, over the norm of that gradient. The figures are
geometric means over seeds. In float16 the loss has a static scale.

Where a program selects a nearest point or code, three seeds are noisy. Repeat these with
`--seeds 64`.
"""

import argparse
import math
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import tables
from accuracy import error, in_float64, not_in_float64
from accuracy_report import geometric_mean
from hard import PROGRAMS
from hard.program import PLAIN, Program, Style
from rich import box
from rich.console import Console
from rich.table import Table

import mpjax
from tests import programs

FOLDER = pathlib.Path(__file__).parent / "results" / "hard_programs"
PACKAGES = ("jax", "jaxlib", "flax", "numpy")
DTYPES = ("bfloat16", "float16")
WAYS = ("policy", "autocast", "by hand")
OURS = ("policy", "autocast")
SEEDS = 3
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
WIDTH = 150
WORSE = 1.15
"""A program whose error grows by more than this is marked in a comparison."""

Draw = tuple[Any, Any]
Errors = Mapping[str, Any]


def drawn(program: Program, seeds: int) -> list[Draw]:
  """Return parameters and inputs for each seed, as NumPy arrays."""
  init = jax.jit(program.module(PLAIN).init)
  draws = []
  for seed in range(seeds):
    inputs = program.draw(np.random.default_rng(seed))
    variables = init(jax.random.key(seed), inputs)
    draws.append((jax.device_get(variables["params"]), inputs))
  return draws


def loss_of(program: Program, way: str, dtype: str) -> Callable[[Any, Any], Any]:
  """Return `(parameters, inputs) -> loss` for one of the ways, "float32" or "float64".

  "default precision" is the policy without the highest precision of its float32 matmuls.
  """
  module: Any = program.module(PLAIN)
  if way == "policy":
    module = mpjax.with_policy(module, f"mixed_{dtype}")
  if way == "default precision":
    policy = mpjax.Policy.parse(f"mixed_{dtype}")
    module = mpjax.with_policy(module, f"{policy},precision=default")
  if way == "by hand":
    module = program.module(Style(jnp.dtype(dtype)))

  def loss(params: Any, inputs: Any) -> Any:
    outputs = module.apply({"params": params}, inputs)
    return program.loss(jax.tree.map(wide, outputs), inputs)

  if way == "autocast":
    return mpjax.autocast(loss, f"mixed_{dtype}", data_argnums=(1,))
  return loss


def wide(x: Any) -> Any:
  """Return an array in float32, or in float64 if it is."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def gradient_of(program: Program, way: str, dtype: str) -> Callable[[Any, Any], Any]:
  """Return the gradient of the loss. In float16 the loss is scaled, then the gradient unscaled."""
  loss = loss_of(program, way, dtype)
  scale = program.scale if dtype == "float16" and way in WAYS else 1.0

  def gradient(params: Any, inputs: Any) -> Any:
    grads = jax.grad(lambda params: loss(params, inputs) * scale)(params)
    return jax.tree.map(lambda g: g.astype(wide(g).dtype) / scale, grads)

  return gradient


def reference(program: Program, draws: Sequence[Draw]) -> list[Any]:
  """Return the gradient for each draw, computed in float64 throughout.

  Raises:
    ValueError: if a result in the program has another floating dtype.
  """
  with jax.enable_x64(True):
    gradient = gradient_of(program, "float64", "float64")
    draws = [in_float64(draw) for draw in draws]
    run = programs.jitted(gradient)
    found = not_in_float64(run.trace(*draws[0]).jaxpr)
    if found:
      raise ValueError(f"the reference is not in float64: {found}")
    return [jax.device_get(run(*draw)) for draw in draws]


def errors_of(
  program: Program, way: str, dtype: str, draws: Sequence[Draw], true: Sequence[Any]
) -> list[float]:
  """Return the error of each draw. That of a gradient that is not finite is infinite."""
  run = programs.jitted(gradient_of(program, way, dtype))
  found = [error(jax.device_get(run(*draw)), want) for draw, want in zip(draws, true, strict=True)]
  return [each if math.isfinite(each) else math.inf for each in found]


def measured(program: Program, dtypes: Sequence[str], seeds: int) -> dict[str, Any]:
  """Return the errors of a program: in float32, and by dtype and way."""
  draws = drawn(program, seeds)
  true = reference(program, draws)

  def entry(way: str, dtype: str) -> Any:
    errors = errors_of(program, way, dtype, draws, true)
    return {"geometric_mean": geometric_mean(errors), "seeds": errors}

  found = {"float32": entry("float32", "float32")}
  return found | {dtype: {way: entry(way, dtype) for way in WAYS} for dtype in dtypes}


def commit() -> str:
  """Return the commit of the checkout, and whether the library differs from it."""

  def git(*words: str) -> str:
    command = ["git", "-C", str(pathlib.Path(mpjax.__file__).parent), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

  changed = git("status", "--porcelain", "--untracked-files=no", ".")
  return git("rev-parse", "--short=8", "HEAD") + (" with changes" if changed else "")


def main(
  only: Sequence[str] = tuple(PROGRAMS),
  dtypes: Sequence[str] = DTYPES,
  seeds: int = SEEDS,
  label: str | None = None,
  out: pathlib.Path | None = None,
  console: Console | None = None,
) -> dict[str, Any]:
  """Measure, write after each program if there is a label or file, and print a table.

  Other programs in the file are kept if they were measured at the same commit with as many seeds.
  """
  console = console or Console(width=WIDTH)
  out = out or (FOLDER / f"{label}.json" if label else None)
  environment = measure.environment({"mpjax": mpjax.__version__}, PACKAGES)
  environment["commit"] = commit()
  results: dict[str, Any] = {
    "environment": environment,
    "reference": "float64",
    "seeds": seeds,
    "programs": {},
  }
  results["programs"] = recorded(out, results)
  with tables.progress_bar(console, 26) as progress:
    bar = progress.add_task("", total=len(only))
    for name in only:
      progress.update(bar, description=name)
      results["programs"][name] = measured(PROGRAMS[name], dtypes, seeds)
      if out:
        measure.write(out, results)
      progress.advance(bar)
  for dtype in dtypes:
    console.print(table(results, dtype))
  if out:
    console.print(f"All figures: {out}", soft_wrap=True)
  return results


def recorded(out: pathlib.Path | None, results: Mapping[str, Any]) -> dict[str, Any]:
  """Return the programs in a file, if it has the commit and the seeds of `results`."""
  if out is None or not out.exists():
    return {}
  old = measure.read(out)
  same = old["seeds"] == results["seeds"]
  same = same and old["environment"]["commit"] == results["environment"]["commit"]
  return old["programs"] if same else {}


# Reports


def mean_of(errors: Errors, way: str) -> float:
  """Return the recorded geometric mean of one way."""
  return errors[way]["geometric_mean"]


def ratios(results: Mapping[str, Any], dtype: str, way: str) -> Iterator[float]:
  """Yield the error of one way over that by hand, for each program."""
  for program in results["programs"].values():
    yield mean_of(program[dtype], way) / mean_of(program[dtype], "by hand")


def together(numbers: Sequence[float]) -> str:
  """Return the geometric mean of the finite numbers, and how many others there are."""
  finite = [x for x in numbers if math.isfinite(x)]
  others = len(numbers) - len(finite)
  mean = f"{geometric_mean(finite):.2f}" if finite else "-"
  return mean + (f" ({others} not finite)" if others else "")


def new_table(title: str, *headings: str) -> Table:
  """Return a table whose first column holds names of programs."""
  made = Table(title=title, box=box.SIMPLE)
  for i, heading in enumerate(headings):
    made.add_column(heading, justify="right" if i else "left", no_wrap=not i)
  return made


def table(results: Mapping[str, Any], dtype: str) -> Table:
  """Return the errors of each program in one dtype, and their ratios to those by hand."""
  over = [f"{way} / by hand" for way in OURS]
  made = new_table(f"Gradient errors, {dtype}", "program", *WAYS, *over, "float32")
  for name, program in results["programs"].items():
    errors = {way: mean_of(program[dtype], way) for way in WAYS}
    shares = [f"{errors[way] / errors['by hand']:.2f}" for way in OURS]
    shown = [f"{x:.1e}" for x in (*errors.values(), mean_of(program, "float32"))]
    made.add_row(name, *shown[:-1], *shares, shown[-1])
  means = [together(list(ratios(results, dtype, way))) for way in OURS]
  made.add_section()
  made.add_row("geometric mean", *[""] * len(WAYS), *means, "")
  return made


def compared(old: Mapping[str, Any], new: Mapping[str, Any], dtype: str) -> Table:
  """Return the ratios of the errors of two records in one dtype, program by program."""
  headings = [f"{way}: {part}" for way in OURS for part in ("old", "new", "new / old")]
  made = new_table(f"Gradient errors, {dtype}", "program", *headings, "by hand")
  common = [name for name in old["programs"] if name in new["programs"]]
  found: dict[str, list[float]] = {way: [] for way in OURS}
  for name in common:
    before, after = (each["programs"][name][dtype] for each in (old, new))
    cells = []
    for way in OURS:
      ratio = mean_of(after, way) / mean_of(before, way)
      found[way].append(ratio)
      cells += [f"{mean_of(before, way):.1e}", f"{mean_of(after, way):.1e}", marked(ratio)]
    made.add_row(name, *cells, f"{mean_of(after, 'by hand'):.1e}")
  made.add_section()
  means = [("", "", together(found[way])) for way in OURS]
  made.add_row("geometric mean", *means[0], *means[1], "")
  both = [
    cell
    for way in OURS
    for cell in (*(together(list(ratios(each, dtype, way))) for each in (old, new)), "")
  ]
  made.add_row("geometric mean / by hand", *both, "")
  return made


def marked(ratio: float) -> str:
  """Return a ratio, with a star if the error grew by much."""
  return f"{ratio:.2f}" + (" *" if ratio > WORSE else "")


def compare(paths: Sequence[pathlib.Path], console: Console | None = None) -> None:
  """Print the ratios of two records."""
  console = console or Console(width=WIDTH)
  old, new = (measure.read(path) for path in paths)
  first = next(iter(old["programs"].values()))
  for dtype in (dtype for dtype in DTYPES if dtype in first):
    console.print(compared(old, new, dtype))
  console.print(f"old: {paths[0]}, commit {old['environment']['commit']}", soft_wrap=True)
  console.print(f"new: {paths[1]}, commit {new['environment']['commit']}", soft_wrap=True)
  console.print(f"* the error grew by more than {WORSE} times")


def arguments() -> dict[str, Any]:
  """Return what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument(
    "--only", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="PROGRAM",
    help="names of programs: " + ", ".join(PROGRAMS),
  )  # fmt: skip
  parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
  parser.add_argument("--seeds", type=int, default=SEEDS, help=f"how many draws ({SEEDS})")
  parser.add_argument("--label", help="records results/hard_programs/LABEL.json")
  parser.add_argument("--out", type=pathlib.Path, help="records another file")
  parser.add_argument(
    "--compare", nargs=2, type=pathlib.Path, metavar=("OLD", "NEW"),
    help="compares two records, and measures nothing",
  )  # fmt: skip
  return vars(parser.parse_args())


if __name__ == "__main__":
  # Compiling is most of the time. XLA reads this when the backend starts.
  os.environ.setdefault("XLA_FLAGS", FAST)
  given = arguments()
  records = given.pop("compare")
  if records:
    compare(records)
  else:
    main(**given)
