"""`find_nonfinite`: where the first inf or NaN came from."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from mpjax._core.errors import check_call
from mpjax._core.leaves import key_names
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, NumpyArray
from mpjax._diagnostics.arguments import Call, check_function, positional_names
from mpjax._diagnostics.nonfinite.probes import (
  CaptureProbe,
  FirstProbe,
  FlagProbe,
  Seen,
  row_of,
  sentinels_of,
  suspects,
)
from mpjax._diagnostics.nonfinite.report import NonfiniteReport, Range, cause_and_cure, power
from mpjax._diagnostics.nonfinite.scales import Rescale, Scale, implied_scale, scale_of
from mpjax._diagnostics.nonfinite.uses import Uses, direction_of, not_finite
from mpjax._diagnostics.parameter_scopes import name_by_parameters
from mpjax._diagnostics.report import progress
from mpjax._diagnostics.tune.tune_report import written
from mpjax._diagnostics.tune.tuning import prefixes, selector
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.locations import path_of
from mpjax._jaxprs.primitives import Holds
from mpjax._jaxprs.reader import aval_of, mapped_with
from mpjax._jaxprs.runner import Observer, run
from mpjax._jaxprs.steps import Step, body_of

_NO_SCALE = (
  "No loss scale was found in the arguments: pass the optimizer's state, as a training step does, "
  "if the gradients are scaled."
)


class _Broken(NamedTuple):
  """The number of the step that broke first, in which iterations, and on which device."""

  number: int
  iterations: tuple[int, ...]
  device: int


class Finder:
  """Looks for the first step that breaks, at this loss scale or at another one."""

  # One run says which values are not finite. Only if there are some, the steps that lead to them
  # are looked at closely, in a second one: most often -inf in masks, and the fault.

  def __init__(self, fn: Function, args: Args, kwargs: Kwargs) -> None:
    call = Call(args, kwargs, _is_traced)
    call.check_concrete("mpjax.find_nonfinite(fn)")
    pairs = jax.tree_util.tree_leaves_with_path((args, kwargs))
    self.leaves, self.keys = call.arrays, [pairs[i][0] for i in call.positions]
    traced = call.traced(fn)[0]
    self.body = body_of(traced, compiled=True)
    self.scale = scale_of(args, kwargs, self.leaves) or implied_scale(self.body, self.leaves)
    self.sentinels, self.uses = sentinels_of(self.body), Uses(self.body)
    self.flags = self._looking(functools.partial(FlagProbe, self.body, self.sentinels))
    self.closely: dict[frozenset[int], Callable[..., Array]] = {}
    # With what is not compiled: a slope may be all that is left of what it is the slope of.
    self.graph = Graph(traced)
    names = ([name for name in key_names(path[2:]) if name != "value"] for path in self.keys)
    owners = zip(self.graph.arguments, (tuple(each[:-1]) for each in names), strict=True)
    name_by_parameters(self.graph, dict(owners))
    # Of a loop, that of its first argument.
    every = {each.step.key: each for each in reversed(self.graph.operations)}
    steps = self.body.every_step()
    self.operations = {step.number: every[step.key] for step in steps if step.key in every}

  def _looking(self, probe: Callable[[Rescale], Observer]) -> Callable[..., Any]:
    """Returns a function of a factor of the scale, and arguments, that returns what a probe saw."""
    scale = self.scale or Scale()

    def looking(factor: Array, *leaves: Array) -> Any:
      observer = probe(functools.partial(scale.of_operands, factor))
      return run(self.body, scale.of_arguments(factor, leaves), observer)[1]

    return compiled(looking)

  def flagged(self, factor: float = 1.0) -> NumpyArray:
    """Returns which of the sentinels are not finite with the loss scale multiplied by a factor."""
    return np.asarray(self.flags(jnp.float32(factor), *self.leaves))

  def first(self, factor: float = 1.0) -> _Broken | None:
    """Returns what breaks first with the loss scale multiplied by a factor."""
    for some in suspects(self.body, self.sentinels, self.flagged(factor)):
      # One that was compiled for another scale will do if it looks at these among others.
      only = next((each for each in self.closely if some <= each), some)
      if only not in self.closely:
        self.closely[only] = self._looking(
          functools.partial(FirstProbe, self.body, self.uses, only)
        )
      first = jax.device_get(self.closely[only](jnp.float32(factor), *self.leaves))
      number, *iterations, device = map(int, first)
      if number in some:
        return _Broken(number, tuple(i for i in iterations if i >= 0), device)
    return None


def _is_traced(x: Leaf) -> bool:
  """Whether a leaf is traced: an array. A number may be a shape, and what is not finite is none."""
  if isinstance(x, float):
    return not math.isfinite(x)
  if isinstance(x, np.generic):
    return jnp.issubdtype(x.dtype, jnp.inexact)
  if isinstance(x, np.ndarray):
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
  return isinstance(x, jax.Array)


def compiled(fn: Function) -> Function:
  """Returns a function that XLA compiles with every cast as it is written."""
  # Else it may leave out a cast to float16 and back, with the overflow that is looked for. What
  # runs once need not be fast, and LLVM takes half of the time that compiling takes for a CPU.
  options: dict[str, str | bool | int] = {"xla_allow_excess_precision": False}
  if jax.default_backend() == "cpu":
    options |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
  return jax.jit(fn, compiler_options=options)


_FIX = "Write mpjax.find_nonfinite(step)(state, batch): the arguments come in a second call."


@check_call("mpjax.find_nonfinite(fn)", fix=_FIX)
def find_nonfinite(fn: Function) -> Callable[..., NonfiniteReport]:
  """Returns a function that runs `fn`, and says where the first inf or NaN came from.

  That is the first value, in the order of execution, which is not finite though the values that it
  is computed from are, or which is NaN though they are not (0 * inf). inf counts as NaN does. A
  constant that is -inf on purpose, as in a mask, is no fault until a sum reads it, nor is a value
  that nothing reads but comparisons and a `where` that discards it.

  Loops, branches, `remat`, functions with derivatives of their own, `vmap` and `shard_map` are
  looked into, and donated arguments are not deleted. If the arguments hold the state of
  `mpjax.loss_scaling`, or the loss is multiplied by a power of two, smaller scales are tried: the
  verdict says whether one helps.

  Args:
    fn: a function of trees of arrays: a loss, a gradient, a training step, jitted or not.

  Returns:
    `find(*args, **kwargs)`, which takes the arguments of `fn` and returns a `NonfiniteReport`. It
    is false if nothing was found. Print it; `operation`, `path`, `direction`, `source`, `iteration`
    and `verdict` are for code.

  Raises:
    MpjaxTypeError: `fn` is not a function, or one that is compiled already; when called: an
      argument is traced, or has no value.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def loss_fn(w, x):
  ...   with jax.named_scope("head"):
  ...     return jnp.mean(jnp.exp(x @ w))
  >>> w, x = jnp.full((4, 2), 3, jnp.float16), jnp.ones((2, 4), jnp.float16)
  >>> found = mpjax.find_nonfinite(jax.grad(loss_fn))(w, x)
  >>> found.path, found.operation, found.direction, found.verdict
  ('head', 'exp', 'forward', 'value')
  >>> found.cure
  'Rule("float32", path="**/head")  # or the policy mixed_bfloat16'
  >>> bool(mpjax.find_nonfinite(jax.grad(loss_fn))(w / 2, x))
  False
  """
  check_function(fn, "mpjax.find_nonfinite(fn)", _FIX)

  @functools.wraps(fn)
  def find(*args: object, **kwargs: object) -> NonfiniteReport:
    # Compiling a training step takes as long as the step's own.
    with progress("find_nonfinite: compiling and running the function"):
      return _find(fn, args, kwargs)

  return find


def _find(fn: Function, args: Args, kwargs: Kwargs) -> NonfiniteReport:
  finder = Finder(fn, args, kwargs)
  broken, scale = finder.first(), finder.scale
  report = NonfiniteReport(
    loss_scale=None if scale is None else scale.value, step=None if scale is None else scale.step
  )
  if broken is None:
    return report
  if broken.number < 0:
    return _of_argument(finder, broken.number, positional_names(fn, len(args)), report)
  if scale is not None:
    finite_at, notes = _finite_at(finder, scale, broken)
    report = dataclasses.replace(report, finite_at=finite_at, notes=notes)
  probe = CaptureProbe(finder.body, *broken)
  seen = compiled(lambda *xs: run(finder.body, xs, probe)[1])(*finder.leaves)
  return _of_step(finder, broken, probe, jax.device_get(seen), report)


def _finite_at(
  finder: Finder, scale: Scale, broken: _Broken
) -> tuple[float | None, tuple[str, ...]]:
  """Returns the largest power of two, as loss scale, at which all of the function is finite."""
  # Where there is none since another value breaks then, a note says which, and at which scale.
  low = math.ceil(math.log2(scale.least))
  high = math.ceil(math.log2(scale.value))  # It breaks there, or is not a power of two.
  other = finder.first(2.0**low / scale.value) if low < high else broken
  if other is not None and other.number == broken.number:
    return None, ()
  # What is not finite where nothing breaks does no harm, such as the -inf of masks.
  harmless = finder.flagged(2.0**low / scale.value) if other is None else np.asarray(False)

  def overflows(exponent: int) -> bool:
    return bool(np.any(finder.flagged(2.0**exponent / scale.value) & ~harmless))

  exponents = range(low + 1, high)
  if other is None:
    return 2.0 ** (low + bisect.bisect(exponents, False, key=overflows)), ()
  between = next((each for each in reversed(exponents) if not overflows(each)), None)
  if between is not None:
    return 2.0**between, ()
  if other.number < broken.number:
    return None, ()  # Of what runs later it is not known whether it is finite.
  operation = finder.operations[other.number]
  direction = direction_of(finder.graph, operation)
  place = " · ".join(filter(None, (operation.where.path, operation.name, direction)))
  return None, (f"At loss scale {power(2.0**low)} this value is finite, and {place} is not.",)


def _of_argument(
  finder: Finder, number: int, names: Sequence[str], report: NonfiniteReport
) -> NonfiniteReport:
  """Returns the report of an argument or a constant that came so."""
  body = finder.body
  slots = (*body.inputs, *body.consts)
  slot, position = slots[number], number + len(slots)
  if position < len(finder.leaves):
    kind, x = "argument", jnp.asarray(finder.leaves[position])
    part, first, *rest = finder.keys[position]
    argument = names[first.idx] if part.idx == 0 else first.key
    path = name = f"{argument}{jax.tree_util.keystr(tuple(rest))}"
  else:
    kind, x = "constant", jnp.asarray(body.consts[slot])
    readers = (finder.operations.get(s.number) for s in body.every_step() if slot in s.reads)
    path = next((each.where.path for each in readers if each), "")
    name = f"an array that the function closes over, {x.dtype}{[*x.shape]}"
  result = _range(kind, x, *jax.device_get(row_of(x, jnp.nan)))
  return dataclasses.replace(
    report,
    operation=kind,
    path=path,
    direction="forward",
    verdict="value",
    index=tuple(map(int, np.argwhere(not_finite(x))[0])),
    count=result.inf + result.nan,
    dtype=result.dtype,
    shape=result.shape,
    result=result,
    cause=f"{name} holds {result.inf} inf and {result.nan} NaN before anything is computed.",
    cure="mpjax.all_finite(x)  # of the data, or restore a checkpoint if it is a parameter",
  )


def _of_step(
  finder: Finder, broken: _Broken, probe: CaptureProbe, seen: Seen, report: NonfiniteReport
) -> NonfiniteReport:
  """Returns the report of a step that broke."""
  step, iterations = probe.step, broken.iterations
  operation, eqn = finder.operations[step.number], step.eqn
  path, direction = operation.where.path, direction_of(finder.graph, operation)
  out = eqn.outvars[probe.result]
  values = [
    *((s.eqn.primitive.name, s.eqn.outvars[0], s.location.path) for s in probe.before),
    *((f"operand {i}", eqn.invars[i], "") for i in probe.positions),
    *(("result", out, ""), ("in float32", out, "")),
  ]
  rows = zip(values, seen.sizes, seen.counts, strict=True)
  *others, result, wide = [_range(name, aval_of(v), a, b, at) for (name, v, at), a, b in rows]
  report = dataclasses.replace(
    report,
    operation=eqn.primitive.name,
    path=path,
    direction=direction,
    source=str(step.location.source) if step.location.source else None,
    iteration=iterations[0] if len(iterations) == 1 else iterations or None,
    verdict="value" if report.finite_at is None else "scale",
    index=tuple(map(int, np.unravel_index(seen.place, result.shape))) if result.size else (),
    count=int(seen.broken),
    device=_device(step, broken.device),
    dtype=result.dtype,
    shape=result.shape,
    operands=tuple(others[len(probe.before) :]),
    result=result,
    before=tuple(others[: len(probe.before)]),
    float32_value=wide.most if not wide.inf + wide.nan else math.inf,
    notes=(_NO_SCALE,) if report.loss_scale is None and direction == "backward" else report.notes,
  )
  if path_of(step.location.scopes) == path:
    every = [prefixes(each.location.path) for each in finder.body.every_step()]
    selects = selector(path, set[str]().union(*every))
  else:
    selects = f"**/{path}"  # That of a parameter, as rules for NNX have it.
  cause, cure = cause_and_cure(report, result, wide, written(selects))
  return dataclasses.replace(report, cause=cause, cure=cure)


def _range(
  name: str, array: ShapedArray | Array, sizes: NumpyArray, counts: NumpyArray, path: str = ""
) -> Range:
  """Returns the range of an array that a probe has seen, as a row."""
  (least, most, value), (inf, nan) = map(float, sizes), map(int, counts)
  return Range(
    name=name,
    dtype=array.dtype.name,
    shape=array.shape,
    least=least if most >= 0 else math.nan,
    most=most if most >= 0 else math.nan,
    inf=inf,
    nan=nan,
    path=path,
    value=None if math.isnan(value) else value,
  )


def _device(step: Step, device: int) -> dict[str, int] | None:
  """Returns the positions of a device along the axes of the `shard_map` that a step is in."""
  if device < 0:
    return None
  *_, outermost = (each.eqn for each in step.enclosing() if each.holds is Holds.SHARD_MAP)
  arguments = mapped_with(outermost)
  mesh = arguments["mesh"]
  names = [name for name in mesh.axis_names if name in arguments["axis_names"]]
  places = np.unravel_index(device, [mesh.shape[name] for name in names])
  return {str(name): int(i) for name, i in zip(names, places, strict=True)}
