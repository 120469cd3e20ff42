"""What a trainer did in a few steps: losses, dtypes, memory and the structure of its step.

Each trainer has a folder with `run.py`, which defines `run(variant)` and ends in
`observed.main(run)`. It runs in an environment of its own, one process for each variant:

  PYTHONPATH=.:benchmarks:benchmarks/trainers build/trainers/tunix/venv/bin/python \\
    benchmarks/trainers/tunix/run.py --variant mpjax_bfloat16 --out out.json
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import json
import math
import pathlib
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import jax
import jaxprs
import numpy as np
from flax import nnx
from jax.extend.core import Literal
from jax.tree_util import Partial

import mpjax

FLOAT32, OWN, BFLOAT16, FLOAT16 = "float32", "own_bfloat16", "mpjax_bfloat16", "mpjax_float16"
VARIANTS = (FLOAT32, OWN, BFLOAT16, FLOAT16)

COUNTED = {
  "remat": ("checkpoint", "remat", "remat2"),
  "scan": ("scan",),
  "name": ("name",),
  "sharding_constraint": ("sharding_constraint",),
}
"""The primitives that a policy must leave as they are, by the name of their count."""


@dataclasses.dataclass(kw_only=True)
class Run:
  """The results of a short training, and the functions that it ran.

  Fields:
    losses: the loss of each step, as the trainer reports it.
    params: the trained parameters.
    opt_state: the state of the optimizer after training.
    step: the trainer's own training step, jitted or not. Like `loss`, it takes only arrays, trees
      and NNX objects, so it has to close over everything else.
    step_args: the arguments of one call of it, which may be `jax.ShapeDtypeStruct`.
    loss: the function that the trainer differentiates by its first argument. It returns the loss,
      or a tuple that begins with it.
    loss_args: the arguments of one call of it.
    skipped: how many steps were skipped because of an overflow.
    context: the context in which `step` and `loss` are traced, such as a mesh.
  """

  losses: list[float]
  params: Any
  opt_state: Any
  step: Callable[..., Any]
  step_args: tuple[Any, ...]
  loss: Callable[..., Any]
  loss_args: tuple[Any, ...]
  skipped: int | None = None
  context: AbstractContextManager[Any] = dataclasses.field(default_factory=contextlib.nullcontext)


class Skipped(Exception):
  """The trainer has no such variant. The text says why."""


def source() -> pathlib.Path:
  """Returns the folder of the unpacked source that the environment was made with."""
  return pathlib.Path(sys.prefix).parent / "source"


def without_writers() -> None:
  """Puts a `clu.metric_writers` that writes nothing in place of clu's, which needs TensorFlow."""
  import clu

  stub: Any = types.ModuleType("clu.metric_writers")
  stub.MetricWriter = object
  stub.create_default_writer = lambda *_, **__: mock.MagicMock()
  stub.ensure_flushes = lambda *_: contextlib.nullcontext()
  sys.modules["clu.metric_writers"] = clu.metric_writers = stub


def without(*packages: str) -> None:
  """Makes imports of packages that are not installed return mocks.

  Large trainers import tokenizers, profilers and others that a few steps never use.
  """
  sys.meta_path.insert(0, _Absent(packages))


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds mocks of packages and of the modules in them."""

  def __init__(self, packages: tuple[str, ...]) -> None:
    self._packages = packages

  def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
    if name.partition(".")[0] in self._packages:
      return importlib.machinery.ModuleSpec(name, self, is_package=True)
    return None

  def create_module(self, spec: Any) -> types.ModuleType:
    return _AbsentModule(spec.name)

  def exec_module(self, module: types.ModuleType) -> None:
    pass


class _AbsentModule(types.ModuleType):
  """A module of mocks. Its version satisfies every check for a minimum."""

  __version__ = "99.0.0"

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    return mock.MagicMock()


class Calls:
  """A function that takes the place of one of a trainer, and remembers its last arguments.

  Plain arrays are remembered by their shapes, because the call may donate them. NNX objects are
  remembered themselves, since the call updates them.
  """

  def __init__(self, fn: Callable[..., Any]) -> None:
    self.fn, self.args, self.results = fn, (), []

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    self.args = tuple(x if _has_nnx(x) else shapes(x) for x in args)
    # Keywords are closed over, so that `step(*args)` is the same call.
    self.step = Partial(self.fn, **kwargs)
    return self.fn(*args, **kwargs)


def shapes(tree: Any) -> Any:
  """Returns a tree with descriptions in place of its arrays."""

  def shape(x: Any) -> Any:
    if not isinstance(x, jax.Array):
      return x
    # A single device says nothing, and would clash with arguments that are on several.
    sharding = x.sharding if len(x.sharding.device_set) > 1 else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return jax.tree.map(shape, tree)


def main(run: Callable[[str], Run]) -> None:
  """Runs one variant, and writes its figures as one JSON object.

  With `--fsdp N` there are N CPU devices, over which the trainer shards as it does by itself:
  `run` looks at `jax.device_count()`.
  """
  parser = argparse.ArgumentParser()
  parser.add_argument("--variant", required=True, choices=VARIANTS)
  parser.add_argument("--out", required=True, type=pathlib.Path)
  parser.add_argument("--fsdp", type=int, default=1, help="number of CPU devices")
  given = parser.parse_args()
  # Before the first array: the backend reads it once.
  jax.config.update("jax_num_cpu_devices", given.fsdp)
  try:
    trained = run(given.variant)
    with trained.context:
      results = figures(trained)
  except Skipped as error:
    results = {"not_run": str(error)}
  given.out.parent.mkdir(parents=True, exist_ok=True)
  given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def figures(run: Run) -> dict[str, Any]:
  """Returns what is recorded of a run."""
  audit = mpjax.audit(run.step)(*run.step_args)
  step, arrays = pure(run.step, run.step_args)
  program = jax.make_jaxpr(step)(arrays)
  # Trainers donate the old state.
  compiled = jax.jit(step, donate_argnums=0).lower(arrays).compile()
  kept = saved(*loss_of_params(run.loss, run.loss_args))
  return {
    "losses": [float(x) for x in run.losses],
    "low_share": None if math.isnan(audit.half_share) else audit.half_share,
    "leaks": [
      {"path": x.path, "operation": x.operation, "cause": f"{x.kind}: {x.cause}", "bytes": x.nbytes}
      for x in audit.leaks
    ],
    "params": dtypes(run.params),
    "opt_state": dtypes(run.opt_state),
    "shardings": shardings(run.params),
    "saved_bytes": kept.total(),
    "saved_by_type": dict(kept.most_common()),
    "temporary_bytes": int(compiled.memory_analysis().temp_size_in_bytes),
    "counts": counts(program),
    "skipped": run.skipped,
  }


def pure(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[[Any], Any], Any]:
  """Returns a function of arrays alone, and the arrays.

  The arrays of NNX objects go in, and come out as `fn` leaves them. Leaves that are no arrays are
  closed over.
  """
  with_objects = [i for i, x in enumerate(args) if _has_nnx(x)]
  # Split together, so that what two arguments share stays shared. NNX takes no descriptions of
  # arrays, so the other arguments stay out of it.
  graph, state = nnx.split([args[i] for i in with_objects])
  plain = [None if i in with_objects else x for i, x in enumerate(args)]
  leaves, structure = jax.tree.flatten((state, plain))
  places = [i for i, x in enumerate(leaves) if hasattr(x, "dtype") and hasattr(x, "shape")]

  def of_arrays(arrays: Any) -> Any:
    filled = dict(zip(places, arrays, strict=True))
    inside = [filled.get(i, x) for i, x in enumerate(leaves)]
    state, given = jax.tree.unflatten(structure, inside)
    objects = nnx.merge(graph, state)
    for i, x in zip(with_objects, objects, strict=True):
      given[i] = x
    returned = fn(*given)
    return _arrays((nnx.state(objects), returned))

  return of_arrays, [leaves[i] for i in places]


def differentiated(step: Callable[..., Any], args: tuple[Any, ...], module: Any) -> tuple[Any, Any]:
  """Returns the loss that a step passes to `module.value_and_grad`, and its arguments.

  The step stops at this call. It must not be jitted, because the loss would close over tracers.
  """
  found = []

  def value_and_grad(loss: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    def stop(*args: Any) -> Any:
      found.append((loss, args))
      raise _Found

    return stop

  with mock.patch.object(module, "value_and_grad", value_and_grad), contextlib.suppress(_Found):
    step(*args)
  return found[0]


class _Found(Exception):
  """The loss is found, so that the step need not go on."""


def loss_of_params(
  loss: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[[Any], Any], Any]:
  """Returns the loss as a function of its parameters alone, and the parameters."""
  first, *rest = args
  if not _has_nnx(first):
    return lambda params: _first(loss(params, *rest)), first
  graph, params, others = nnx.split(first, nnx.Param, ...)

  def of_params(params: Any) -> Any:
    # New variables, because those of the outside may not be written to inside of a trace.
    own = jax.tree.map(lambda x: x, others)
    return _first(loss(nnx.merge(graph, params, own), *rest))

  return of_params, params


def saved(loss: Callable[[Any], Any], params: Any) -> collections.Counter[str]:
  """Returns the bytes that the forward pass computes for the backward pass, by type.

  Parameters and inputs that the backward pass needs again are not counted.
  """
  program = jax.make_jaxpr(lambda p: jax.tree.leaves(jax.vjp(loss, p)[1]))(params).jaxpr
  # `mpjax.scaled` passes parameters through an identity, which computes nothing.
  same = {e.outvars[0]: e.invars[0] for e in program.eqns if e.primitive.name == "scale_cotangent"}
  kept = [same.get(v, v) for v in program.outvars if not isinstance(v, Literal)]
  given = {*program.invars, *program.constvars}
  found: collections.Counter[str] = collections.Counter()
  # Each array counts once.
  for v in dict.fromkeys(kept):
    if v not in given and not isinstance(v, Literal):
      found[v.aval.str_short()] += int(np.prod(v.aval.shape)) * v.aval.dtype.itemsize
  return found


def counts(program: Any) -> dict[str, int]:
  """Returns how many equations of each kind in `COUNTED` a program has, those inside included."""
  found = collections.Counter(eqn.primitive.name for eqn in jaxprs.walk(program))
  return {name: sum(found[p] for p in primitives) for name, primitives in COUNTED.items()}


def dtypes(tree: Any) -> dict[str, int]:
  """Returns how many arrays of each dtype a tree has."""
  found = collections.Counter(str(x.dtype) for x in jax.tree.leaves(tree) if hasattr(x, "dtype"))
  return dict(sorted(found.items()))


def shardings(tree: Any) -> dict[str, int]:
  """Returns how many arrays of a tree are sharded alike, where there are several devices."""
  if jax.device_count() == 1:
    return {}
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
  found = collections.Counter(str(getattr(x.sharding, "spec", "one device")) for x in arrays)
  return dict(sorted(found.items()))


def _first(result: Any) -> Any:
  return result[0] if isinstance(result, tuple) else result


def _arrays(tree: Any) -> list[Any]:
  return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def _has_nnx(tree: Any) -> bool:
  """Whether a tree is or holds an NNX object."""
  nodes = jax.tree.leaves(tree, is_leaf=_is_nnx)
  return any(map(_is_nnx, nodes))


def _is_nnx(x: Any) -> bool:
  return isinstance(x, (nnx.Module, nnx.Optimizer, nnx.Pytree, nnx.Variable))
