"""What several tools make of the programs in `autocast_programs.py`, in one run.

  python benchmarks/autocast_tools.py --tools jaxamp --out figures.json

It runs by itself too, in an environment that has the JAX that a tool needs: nothing of mpjax is
imported unless it is asked for.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
from autocast_programs import PLAIN, PROGRAMS, Program, Style

from tests import programs as jaxprs

Loss = Callable[[Any, Any], Any]
"""`(params, batch) -> scalar`."""

SCALES = {"bfloat16": 1.0, "float16": 2.0**10}
"""What a loss is multiplied by, outside of what the tool sees."""

BOUNDS = {"bfloat16": 1.6e-2, "float16": 2e-3}
"""Of the error of gradients, and half of it with attention."""


def _by_hand(program: Program, half: Any) -> Loss:
  return lambda params, batch: program.loss(params, batch, Style(half))


def _mpjax(program: Program, half: Any) -> Loss:
  mpjax = importlib.import_module("mpjax")
  return mpjax.autocast(program.loss, str(jnp.dtype(half)))


def _jaxamp(program: Program, half: Any) -> Loss:
  """As its README says: the loss is wrapped, and the scale of the loss stays outside."""
  jaxamp = importlib.import_module("jaxamp")
  return jaxamp.amp(program.loss, compute_dtype=half)


TOOLS: Mapping[str, Callable[[Program, Any], Loss]] = {
  "by hand": _by_hand,
  "mpjax": _mpjax,
  "jaxamp": _jaxamp,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What is measured.

  Fields:
    half: the half type.
    size: the width of the programs.
    rounds: how often each trace is timed.
  """

  half: str = "bfloat16"
  size: int = 64
  rounds: int = 11


def _scaled_grad(loss: Loss, scale: float) -> Callable[..., Any]:
  """Returns loss and gradients, multiplied and divided by a power of two, as loss scaling does."""

  def fun(params: Any, batch: Any) -> Any:
    value, grads = jax.value_and_grad(lambda p: loss(p, batch) * scale)(params)
    return value / scale, jax.tree.map(lambda g: g / scale, grads)

  return fun


def _share(fun: Callable[..., Any], *args: Any) -> float:
  return jaxprs.half_share(jax.make_jaxpr(fun)(*args))


def _saved(loss: Loss, params: Any, batch: Any) -> int:
  """Bytes that the forward pass makes for the backward pass."""
  return measure.saved(lambda p: loss(p, batch), params).own


def shortened(error: Exception) -> str:
  """Returns the first sentence of an error, in one line."""
  first = str(error).strip().splitlines() or [""]
  text = re.sub(r"\s+", " ", first[0])
  return f"{type(error).__name__}: {text[:100]}{'…' if len(text) > 100 else ''}"


def compare(name: str, tools: Sequence[str], settings: Settings) -> dict[str, Any]:
  """Returns the figures of one program under each tool; under one that fails, the error."""
  program = PROGRAMS[name]
  params, batch = program.make(settings.size)
  half = jnp.dtype(settings.half).type
  scale = SCALES[settings.half]
  plain = functools.partial(program.loss, style=PLAIN)
  exact = jaxprs.run(_scaled_grad(plain, scale), params, batch)
  losses: dict[str, Loss] = {"float32": plain}
  figures: dict[str, Any] = {}
  for tool in tools:
    try:
      loss = TOOLS[tool](program, half)
      grad = _scaled_grad(loss, scale)
      found = {
        "forward_half": _share(loss, params, batch),
        "gradient_half": _share(grad, params, batch),
        "saved_bytes": _saved(loss, params, batch),
      }
      _, grads = jaxprs.run(grad, params, batch)
      found["error"] = jaxprs.error(grads, exact[1])
      compiled = jax.jit(grad).lower(params, batch).compile()
      figures[tool] = {**found, "compiled": measure.count_compiled(compiled)}
      losses[tool] = loss
    except Exception as error:
      figures[tool] = {"failed": shortened(error)}
  figures["float32"] = {
    "saved_bytes": _saved(plain, params, batch),
    "compiled": measure.count_compiled(
      jax.jit(_scaled_grad(plain, scale)).lower(params, batch).compile()
    ),
  }
  runs = {tool: (_scaled_grad(loss, scale), (params, batch)) for tool, loss in losses.items()}
  times = measure.trace_turns(runs, rounds=settings.rounds, cold=False, own_garbage=True)
  for tool, seconds in times.items():
    figures[tool]["trace_seconds"] = seconds
  return figures


def main(
  tools: Sequence[str],
  settings: Settings,
  names: Sequence[str] = tuple(PROGRAMS),
  progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
  """Returns the environment, and the figures of each program.

  Args:
    tools: names of `TOOLS`.
    settings: what is measured.
    names: which programs.
    progress: is called with the name of each program before it is measured.
  """
  programs = {}
  for name in names:
    progress(name)
    programs[name] = compare(name, tools, settings)
  packages = ["jax", "jaxlib", "numpy"]
  if "jaxamp" in tools and importlib.util.find_spec("jaxamp"):
    packages.append("jaxamp")
  own = {"mpjax": importlib.import_module("mpjax").__version__} if "mpjax" in tools else {}
  return {"environment": measure.environment(own, packages), "programs": programs}


def arguments() -> argparse.Namespace:
  """Returns what the command line asks for."""
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=TOOLS)
  parser.add_argument("--half", default="bfloat16", choices=SCALES)
  parser.add_argument("--size", type=int, default=64)
  parser.add_argument("--rounds", type=int, default=11)
  parser.add_argument("--names", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
  parser.add_argument("--out", type=pathlib.Path, required=True)
  return parser.parse_args()


if __name__ == "__main__":
  given = arguments()
  chosen = Settings(half=given.half, size=given.size, rounds=given.rounds)
  results = main(given.tools, chosen, given.names)
  measure.write(given.out, results)
