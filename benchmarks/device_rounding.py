"""Gradient errors of hard programs as a GPU or a TPU would make them, measured on a CPU.

  PYTHONPATH=. python benchmarks/device_rounding.py
  PYTHONPATH=. python benchmarks/device_rounding.py --only "Fourier features" EGNN --out FILE.json

GPUs since Ampere round the operands of float32 matmuls of default precision to 11 significant bits
(TF32), and TPUs to 8 (one bfloat16 pass). A CPU rounds nothing, so this script rounds the operands
in the traced gradient, which then has the error of the device. It does so under the policy, which
asks for the highest precision in matmuls that it keeps in float32, and under the same policy with
`precision="default"`. The script also gives the share of the FLOPs in float32, because these
matmuls are slower. `hard_programs.py` has the programs.
"""

import argparse
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import hard_programs
import jax
import jax.numpy as jnp
import measure
import tables
from accuracy_report import geometric_mean
from hard import PROGRAMS
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from rich import box
from rich.console import Console
from rich.table import Table

import mpjax
from mpjax._autocast.precision import asked_precision
from mpjax._jaxpr.compat import bind
from mpjax._jaxpr.reader import opened, with_each
from tests import programs

OUT = pathlib.Path(__file__).parent.parent / "out" / "device_rounding.json"
BITS = {"TPU": 8, "TF32": 11}
"""The significant bits of the operands of a float32 matmul of default precision, by device."""

DTYPE = "bfloat16"
DEFAULT = "default precision"
COLUMNS = (*BITS, *(f"{device}, {DEFAULT}" for device in BITS))


def rounded(fun: Callable[..., Any], bits: int) -> Callable[..., Any]:
  """Returns a function whose float32 matmuls of default precision round their operands."""

  def call(*args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    flat = lambda *leaves: jax.tree.leaves(fun(*jax.tree.unflatten(tree, leaves)))  # noqa: E731
    program = jax.make_jaxpr(flat)(*leaves)
    results = _run(program.jaxpr, program.consts, leaves, bits)
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(fun, *args)), results)

  return call


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], bits: int) -> list[Any]:
  """Returns the results of a jaxpr, with rounded operands of its float32 matmuls."""
  env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]

  for eqn in jaxpr.eqns:
    operands = list(map(read, eqn.invars))
    is_default = "precision" in eqn.params and not asked_precision(eqn.params["precision"])
    if is_default and all(x.dtype == jnp.float32 for x in operands[:2]):
      operands[:2] = (jax.lax.reduce_precision(x, 8, bits - 1) for x in operands[:2])
    inside = eqn.replace(params=with_each(eqn, lambda program: _rewritten(program, bits)))
    env.update(zip(eqn.outvars, bind(inside, operands), strict=True))
  return list(map(read, jaxpr.outvars))


def _rewritten(program: Any, bits: int) -> Any:
  """Returns a jaxpr inside an equation, with rounded operands of its float32 matmuls."""
  jaxpr = opened(program)
  consts = program.consts if isinstance(program, ClosedJaxpr) else ()
  avals = [v.aval for v in jaxpr.invars]
  new = jax.make_jaxpr(lambda *args: _run(jaxpr, consts, args, bits))(*avals)
  return new if isinstance(program, ClosedJaxpr) else new.jaxpr


def measured(name: str, seeds: int) -> dict[str, Any]:
  """Returns the errors of a program on each device, and the float32 share of its FLOPs."""
  program = PROGRAMS[name]
  draws = hard_programs.drawn(program, seeds)
  true = hard_programs.reference(program, draws)
  gradient = hard_programs.gradient_of(program, "policy", DTYPE)
  unprotected = hard_programs.gradient_of(program, "default precision", DTYPE)

  def error(fun: Callable[..., Any]) -> float:
    run = programs.jitted(fun)
    errors = [
      hard_programs.error(jax.device_get(run(*draw)), want)
      for draw, want in zip(draws, true, strict=True)
    ]
    return geometric_mean(errors)

  flops = mpjax.audit(gradient)(*draws[0]).flops
  wide = sum(n for (_, dtype), n in flops.items() if dtype == "float32")
  found = {"CPU": error(gradient)}
  found |= {device: error(rounded(gradient, bits)) for device, bits in BITS.items()}
  found |= {f"{device}, {DEFAULT}": error(rounded(unprotected, BITS[device])) for device in BITS}
  return {"errors": found, "float32 share": wide / max(sum(flops.values()), 1)}


def main(
  only: Sequence[str] = tuple(PROGRAMS),
  seeds: int = hard_programs.SEEDS,
  out: pathlib.Path = OUT,
  console: Console | None = None,
) -> dict[str, Any]:
  """Measures, writes after each program, prints a table and returns all."""
  console = console or Console()
  environment = measure.environment({"mpjax": mpjax.__version__}, hard_programs.PACKAGES)
  results: dict[str, Any] = {"environment": environment, "seeds": seeds, "programs": {}}
  with tables.progress_bar(console, 26) as progress:
    bar = progress.add_task("", total=len(only))
    for name in only:
      progress.update(bar, description=name)
      results["programs"][name] = measured(name, seeds)
      measure.write(out, results)
      progress.advance(bar)
  show(results, console)
  console.print(f"All figures: {out}", soft_wrap=True)
  return results


def ratios(results: dict[str, Any], column: str) -> list[float]:
  """Returns the errors of a column over those of a CPU, for each program."""
  errors = (program["errors"] for program in results["programs"].values())
  return [each[column] / each["CPU"] for each in errors]


def show(results: dict[str, Any], console: Console) -> None:
  """Prints a row for each program, and the means."""
  table = Table(title=f"Gradient errors under mixed_{DTYPE}", box=box.SIMPLE)
  table.add_column("program", no_wrap=True)
  for heading in ("CPU", *(f"{column} / CPU" for column in COLUMNS), "float32 FLOPs"):
    table.add_column(heading, justify="right")
  for name, program in results["programs"].items():
    errors = program["errors"]
    shares = (f"{errors[column] / errors['CPU']:.3f}" for column in COLUMNS)
    table.add_row(name, f"{errors['CPU']:.1e}", *shares, f"{program['float32 share']:.1%}")
  table.add_section()
  means = (f"{geometric_mean(ratios(results, column)):.3f}" for column in COLUMNS)
  table.add_row("geometric mean", "", *means, "")
  console.print(table)


def arguments() -> dict[str, Any]:
  """Returns the arguments of the command line."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument(
    "--only", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS), metavar="PROGRAM",
    help="names of programs: " + ", ".join(PROGRAMS),
  )  # fmt: skip
  parser.add_argument("--seeds", type=int, default=hard_programs.SEEDS, help="how many draws")
  parser.add_argument("--out", type=pathlib.Path, default=OUT, help="where the figures go")
  return vars(parser.parse_args())


if __name__ == "__main__":
  # Compiling is most of the time. XLA reads this when the backend starts.
  os.environ.setdefault("XLA_FLAGS", hard_programs.FAST)
  main(**arguments())
