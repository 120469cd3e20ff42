"""Timing by turns, and what can be counted without a clock. Nothing but JAX and NumPy is needed."""

import dataclasses
import datetime
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import hlo
import jax
import numpy as np
from jax.extend.core import Literal

HLO_OPERATIONS = ("convert", "dot", "convolution", "custom-call", "fusion")


def take_turns(
  runs: Mapping[str, Callable[[], Any]], *, rounds: int, seconds: float = 0.1
) -> dict[str, list[float]]:
  """Returns seconds per call of each run, once for each round.

  A B C, then B C A, and so on: what the machine does besides meets all of them alike, and none is
  always first. Each measurement repeats the call until `seconds` are about full.

  Args:
    runs: functions that return arrays, which are waited for. Their first call is not measured.
    rounds: how many measurements of each.
    seconds: the least length of a measurement.
  """
  names = list(runs)
  repeats = {}
  for name, run in runs.items():
    jax.block_until_ready(run())
    repeats[name] = max(1, round(seconds / _seconds(run, 2)))
  times: dict[str, list[float]] = {name: [] for name in names}
  for order in orders(names, rounds):
    for name in order:
      times[name].append(_seconds(runs[name], repeats[name]))
  return times


def orders(names: Sequence[str], rounds: int) -> Iterator[Sequence[str]]:
  """Yields for each round in which order the runs are measured: none is always first."""
  for turn in range(rounds):
    first = turn % len(names)
    yield (*names[first:], *names[:first])


def _seconds(run: Callable[[], Any], repeats: int) -> float:
  start = time.perf_counter()
  for _ in range(repeats):
    out = run()
  jax.block_until_ready(out)
  return (time.perf_counter() - start) / repeats


def trace_turns(
  functions: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
  *,
  rounds: int,
  cold: bool,
  own_garbage: bool = False,
) -> dict[str, list[float]]:
  """Returns processor seconds to trace each function, once for each round, taken by turns.

  Tracing is Python in one thread: what else the machine does is left out by counting its own time.

  Args:
    functions: functions with their arguments.
    rounds: how many measurements of each.
    cold: JAX's caches are emptied before each, as in a new process. Otherwise only the function
      itself is new to it, as after a change of a model in a notebook.
    own_garbage: Python's collector looks only at what the tracing itself makes. Otherwise one of
      the functions may be charged with a walk over all that the process holds: whichever happens
      to make the last of so many objects.
  """
  names = list(functions)
  times: dict[str, list[float]] = {name: [] for name in names}
  for name in names:
    _trace(*functions[name])
  for order in orders(names, rounds):
    for name in order:
      if cold:
        jax.clear_caches()
      gc.collect()
      if own_garbage:
        gc.freeze()
      start = time.process_time()
      _trace(*functions[name])
      times[name].append(time.process_time() - start)
      gc.unfreeze()
  return times


def _trace(fun: Callable[..., Any], args: Sequence[Any]) -> Any:
  return jax.jit(lambda *args: fun(*args)).trace(*args)  # a new function: no cache knows it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
  """The ratio of two series of times, taken round by round: its median and quartiles."""

  median: float
  low: float
  high: float

  def __str__(self) -> str:
    return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(times: Sequence[float], to: Sequence[float]) -> Ratio:
  """Returns how many times as long each round of `times` took as the same round of `to`."""
  low, median, high = np.percentile(np.divide(times, to), [25, 50, 75])
  return Ratio(median=float(median), low=float(low), high=float(high))


def count_compiled(compiled: Any) -> dict[str, int]:
  """Returns operations in the optimized program, and the bytes it needs."""
  program = hlo.parse(compiled.as_text())
  counts = {name.replace("-", "_"): program.count(name) for name in HLO_OPERATIONS}
  memory = compiled.memory_analysis()
  sizes = ("temp", "argument", "output", "alias")
  return counts | {f"{s}_bytes": int(getattr(memory, f"{s}_size_in_bytes")) for s in sizes}


class Saved(NamedTuple):
  """Bytes of the arrays that `jax.vjp` keeps for the backward pass.

  Fields:
    own: those that the forward pass made.
    all: with those parameters and inputs that it needs again.
  """

  own: int
  all: int


def saved(loss: Callable[[Any], Any], params: Any) -> Saved:
  """Returns what the leaves of `jax.vjp(loss, params)[1]` take, each array counted once."""
  program = jax.make_jaxpr(lambda p: jax.tree.leaves(jax.vjp(loss, p)[1]))(params).jaxpr
  kept = {v for v in program.outvars if not isinstance(v, Literal)}
  given = {*program.invars, *program.constvars}
  return Saved(own=sum(map(_bytes, kept - given)), all=sum(map(_bytes, kept)))


def _bytes(var: Any) -> int:
  return int(np.prod(var.aval.shape)) * var.aval.dtype.itemsize


def environment(
  own: Mapping[str, str] | None = None, packages: Sequence[str] = ("jax", "jaxlib", "numpy")
) -> dict[str, Any]:
  """Returns what a figure depends on, without naming the machine.

  Args:
    own: versions of what is measured, if that is not installed.
    packages: whose installed versions matter.
  """
  versions = {name: importlib.metadata.version(name) for name in packages}
  return {
    "date": datetime.date.today().isoformat(),
    "python": platform.python_version(),
    "versions": {**(own or {}), **versions},
    "backend": jax.default_backend(),
    "hardware": hardware(),
    "load_average": [round(x, 1) for x in os.getloadavg()],
  }


def taken(environment: Mapping[str, Any]) -> str:
  """Returns when and on what figures were taken, to begin a sentence with."""
  versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
  python = f"Python {environment['python']}"
  return f"{environment['date']}, {environment['hardware']}, {python}, {versions}"


def hardware() -> str:
  """Returns the accelerator, or the number of cores, in words."""
  devices = jax.devices()
  if jax.default_backend() != "cpu":
    return f"{len(devices)} x {devices[0].device_kind}"
  return f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} CPU"


def write(path: pathlib.Path, results: Any) -> None:
  """Writes results as JSON. A process that ends in the midst of it leaves the old file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  new = path.with_suffix(".new")
  new.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
  new.replace(path)


def read(path: pathlib.Path) -> Any:
  """Returns what `write` wrote."""
  return json.loads(path.read_text(encoding="utf-8"))
