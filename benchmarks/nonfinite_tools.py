"""The planted faults of the tests, through every tool for JAX that looks for an inf or a NaN.

python benchmarks/nonfinite_tools.py --write   # the table in docs/find_nonfinite.md

Each tool is asked about one function at a time, and judged by what it says: whether it stops at
the operation that broke, names its module, and its iteration. `brainstate` is run if it is there.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import tables
from jax.experimental import checkify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mpjax
from tests.diagnose.faults import FAULTS, Fault

PAGE = Path(__file__).resolve().parent.parent / "docs" / "find_nonfinite.md"


def of_mpjax(fault: Fault) -> str:
  found = mpjax.find_nonfinite(fault.fn)(*fault.args)
  if not found:
    return ""
  where = "" if found.iteration is None else f", iteration {found.iteration}"
  return f"{found.path} {found.operation} {found.direction}{where}"


def of_flag(flag: str) -> Callable[[Fault], str]:
  def ask(fault: Fault) -> str:
    jax.config.update(flag, True)
    try:
      jax.block_until_ready(jax.jit(fault.fn)(*fault.args))
    except FloatingPointError as error:
      return str(error).splitlines()[0]
    finally:
      jax.config.update(flag, False)
    return ""

  return ask


def of_checkify(fault: Fault) -> str:
  error, _ = jax.jit(checkify.checkify(fault.fn, errors=checkify.float_checks))(*fault.args)
  return (error.get() or "").splitlines()[0] if error.get() else ""


def of_equinox(fault: Fault) -> str:
  # It looks at the cotangents of the values that it is given: here at those of the arguments.
  eqx = importlib.import_module("equinox")
  given, rest = eqx.partition(fault.args, eqx.is_inexact_array)

  @jax.jit
  def looked_at(given):
    watched = jax.tree.map(lambda x: eqx.debug.backward_nan(x, terminate=True), given)
    out = fault.fn(*eqx.combine(watched, rest))
    leaves = (x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact))
    return sum(jnp.sum(x).astype(jnp.float32) for x in leaves)

  try:
    with contextlib.redirect_stdout(io.StringIO()):
      jax.block_until_ready(jax.grad(looked_at)(given))
  except Exception as error:
    if "NaN" not in str(error):
      raise
    return "a NaN among the cotangents of the arguments"
  return ""


def of_brainstate(fault: Fault) -> str:
  brainstate = importlib.import_module("brainstate")
  try:
    brainstate.transform.debug_nan(fault.fn, *fault.args)
  except RuntimeError as error:
    return " ".join(str(error).split())
  return ""


TOOLS: dict[str, Callable[[Fault], str]] = {
  "mpjax.find_nonfinite": of_mpjax,
  "jax_debug_infs": of_flag("jax_debug_infs"),
  "jax_debug_nans": of_flag("jax_debug_nans"),
  "checkify.float_checks": of_checkify,
  "equinox.debug.backward_nan": of_equinox,
  "brainstate.debug_nan": of_brainstate,
}


def answers() -> Iterator[tuple[str, Fault, dict[str, str]]]:
  """Yields what each tool says of each fault; "-" where it is not installed."""
  for name, fault in FAULTS.items():
    said = {}
    for tool, ask in TOOLS.items():
      try:
        with warnings.catch_warnings():
          warnings.simplefilter("ignore")
          said[tool] = ask(copied(fault))
      except ModuleNotFoundError:
        said[tool] = "-"
      except Exception as error:
        said[tool] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    yield name, fault, said
    lines = (f"  {tool}: {verdict(fault, tool, text)}: {text[:90]}" for tool, text in said.items())
    print(f"{name}: {fault.operation}", *lines, sep="\n")


def copied(fault: Fault) -> Fault:
  """Returns a fault with arguments of its own, which the function may delete."""
  leaves, tree = jax.tree.flatten(fault.args)
  new = [x.copy() if isinstance(x, jax.Array) else x for x in leaves]
  return dataclasses.replace(fault, args=jax.tree.unflatten(tree, new))


def verdict(fault: Fault, tool: str, text: str) -> str:
  """Returns "right", "operation" (but not the module or iteration), "wrong" or "-"."""
  if text == "-":
    return "-"
  if re.match(r"\w+(Error|Exception): ", text):
    return "fails"
  if fault.operation is None:
    return "right" if not text else "wrong"
  if not text:
    return "silent"
  if fault.operation == "argument" and tool != "mpjax.find_nonfinite":
    return "wrong"
  named = re.search(rf"(?<![\w-]){re.escape(fault.operation)}(?![\w-])", text) is not None
  if not named:
    return "wrong"
  where = fault.path in text and (fault.iteration is None or f"iteration {fault.iteration}" in text)
  return "right" if where and (fault.path or fault.iteration is None) else "operation"


def table(rows: list[tuple[str, Fault, dict[str, str]]]) -> str:
  """Returns the table of the page: how often each tool was right."""
  lines = [["tool", f"right, of {len(rows)}", "operation alone", "neither"]]
  for tool in TOOLS:
    verdicts = collections.Counter(verdict(fault, tool, said[tool]) for _, fault, said in rows)
    if "-" not in verdicts:
      right, operation = verdicts["right"], verdicts["operation"]
      counts = (right, operation, len(rows) - right - operation)
      lines.append([f"`{tool}`", *map(str, counts)])
  return tables.table(lines)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--write", action="store_true", help="write the table into the page")
  options = parser.parse_args()
  text = table(list(answers()))
  print(text)
  if options.write:
    page = tables.replaced(PAGE.read_text(encoding="utf-8"), "tools", text)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
  main()
