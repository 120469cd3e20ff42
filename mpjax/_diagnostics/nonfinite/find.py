"""`find_nonfinite`: where the first inf or NaN came from."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

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
  Row,
  Uses,
  not_finite,
  row_of,
  sentinels_of,
  suspects,
)
from mpjax._diagnostics.nonfinite.report import NonfiniteReport, Range, cause_and_cure, power
from mpjax._diagnostics.nonfinite.scales import implied_scale, scale_of
from mpjax._diagnostics.parameter_scopes import name_by_parameters
from mpjax._diagnostics.report import progress
from mpjax._diagnostics.tune.modules import scopes_of, selector, written
from mpjax._jaxprs.graph import Graph, Operation
from mpjax._jaxprs.locations import call_of
from mpjax._jaxprs.primitives import Holds
from mpjax._jaxprs.reader import aval_of, mapped_with
from mpjax._jaxprs.runner import Observer, run
from mpjax._jaxprs.steps import Step, body_of

_FIX = "Write mpjax.find_nonfinite(step)(state, batch): the arguments come in a second call."


@check_call("mpjax.find_nonfinite(fn)", fix=_FIX)
def find_nonfinite(fn: Function) -> Callable[..., NonfiniteReport]:
  """Returns a function that runs `fn`, and says where the first inf or NaN came from.

  That is the first value, in the order of execution, which is not finite though the values that it
  is computed from are, or which is NaN though they are not (0 * inf). A mask of -inf is no fault
  until a sum reads it, nor is a value that nothing reads but comparisons and a `where` that
  discards it. If the arguments hold the state of `mpjax.loss_scaling`, or the loss is multiplied by
  a power of two, smaller scales are tried. docs/find_nonfinite.md says what counts, and what it
  costs; donated arguments are not deleted.

  Args:
    fn: a function of trees of arrays: a loss, a gradient, a training step, jitted or not.

  Returns:
    `find(*args, **kwargs)`, which takes the arguments of `fn` and returns a `NonfiniteReport`. It
    is false if nothing was found. Print it; its fields are for code.

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
      return Finder(fn, args, kwargs).report()

  return find


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
    self.keys = [pairs[i][0] for i in call.positions]
    self.names = positional_names(fn, len(args))
    traced = call.traced(fn)[0]
    self.body, self.leaves = body_of(traced, compiled=True), call.arrays
    self.scale = scale_of(args, kwargs, self.leaves)
    if self.scale is None:
      self.scale, self.body, self.leaves = implied_scale(self.body, self.leaves)
    self.sentinels, self.uses = sentinels_of(self.body), Uses(self.body)
    self.flags = self._looking(FlagProbe(self.body, self.sentinels))
    self.closely: dict[frozenset[int], Callable[..., Array]] = {}
    # With what is not compiled: a slope may be all that is left of what it is the slope of.
    self.graph = Graph(traced)
    owners = [tuple(n for n in key_names(path[2:]) if n != "value")[:-1] for path in self.keys]
    name_by_parameters(self.graph, dict(zip(self.graph.arguments, owners, strict=True)))
    # Of a loop, that of its first argument.
    every = {each.step.key: each for each in reversed(self.graph.operations)}
    steps = self.body.every_step()
    self.operations = {step.number: every[step.key] for step in steps if step.key in every}

  def _looking(self, observer: Observer) -> Callable[..., Any]:
    """Returns a function of a factor of the loss scale, and arguments, that says what is seen."""
    scales = () if self.scale is None else self.scale.positions

    def looking(factor: Array, *leaves: Array) -> Any:
      scaled = [x * factor.astype(x.dtype) if i in scales else x for i, x in enumerate(leaves)]
      return run(self.body, scaled, observer)[1]

    # Every cast as it is written: else XLA may leave out a cast to float16 and back, with the
    # overflow that is looked for. What runs once need not be fast, and LLVM takes half of the time
    # that compiling takes for a CPU.
    options: dict[str, str | bool | int] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
      options |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(looking, compiler_options=options)

  def flagged(self, factor: float = 1.0) -> NumpyArray:
    """Returns which of the sentinels are not finite with the loss scale multiplied by a factor."""
    return np.asarray(self.flags(jnp.float32(factor), *self.leaves))

  def first(self, factor: float = 1.0) -> _Broken | None:
    """Returns what breaks first with the loss scale multiplied by a factor."""
    for some in suspects(self.body, self.sentinels, self.flagged(factor)):
      # One that was compiled for another scale will do if it looks at these among others.
      only = next((each for each in self.closely if some <= each), some)
      if only not in self.closely:
        self.closely[only] = self._looking(FirstProbe(self.body, self.uses, only))
      first = jax.device_get(self.closely[only](jnp.float32(factor), *self.leaves))
      number, *iterations, device = map(int, first)
      if number in some:
        return _Broken(number, tuple(i for i in iterations if i >= 0), device)
    return None

  def report(self) -> NonfiniteReport:
    broken, scale = self.first(), self.scale
    report = NonfiniteReport()
    if scale is not None:
      report = dataclasses.replace(report, loss_scale=scale.value, step=scale.step)
    if broken is None:
      return report
    if broken.number < 0:
      return self._of_argument(broken.number, report)
    finite_at, notes = self._finite_at(broken)
    return self._of_step(broken, dataclasses.replace(report, finite_at=finite_at, notes=notes))

  def _finite_at(self, broken: _Broken) -> tuple[float | None, tuple[str, ...]]:
    """Returns the largest power of two, as loss scale, at which all of the function is finite."""
    # Where there is none since another value breaks then, a note says which, and at which scale.
    scale = self.scale
    if scale is None:
      return None, ()
    # It breaks at the highest, or that is no power of two.
    low, high = math.ceil(math.log2(scale.least)), math.ceil(math.log2(scale.value))
    factor = 2.0**low / scale.value
    other = self.first(factor) if low < high else broken
    if other is not None and other.number == broken.number:
      return None, ()
    # What is not finite where nothing breaks does no harm, such as the -inf of masks.
    harmless = self.flagged(factor) if other is None else np.asarray(False)
    for exponent in reversed(range(low + 1, high)):
      if not np.any(self.flagged(2.0**exponent / scale.value) & ~harmless):
        return 2.0**exponent, ()
    if other is None:
      return 2.0**low, ()
    if other.number < broken.number:
      return None, ()  # Of what runs later it is not known whether it is finite.
    operation = self.operations[other.number]
    direction = direction_of(self.graph, operation)
    place = " · ".join(filter(None, (operation.where.path, operation.name, direction)))
    return None, (f"At loss scale {power(2.0**low)} this value is finite, and {place} is not.",)

  def _of_argument(self, number: int, report: NonfiniteReport) -> NonfiniteReport:
    """Returns the report of an argument or a constant that came so."""
    slots = (*self.body.inputs, *self.body.consts)
    slot, position = slots[number], number + len(slots)
    if position < len(self.keys):
      kind, x = "argument", jnp.asarray(self.leaves[position])
      part, first, *rest = self.keys[position]
      argument = self.names[first.idx] if part.idx == 0 else first.key
      path = name = f"{argument}{jax.tree_util.keystr(tuple(rest))}"
    else:
      kind, x = "constant", jnp.asarray(self.body.consts[slot])
      readers = (self.operations.get(s.number) for s in self.body.every_step() if slot in s.reads)
      path = next((each.where.path for each in readers if each), "")
      name = f"an array that the function closes over, {x.dtype}{[*x.shape]}"
    result = _range(kind, x, jax.device_get(row_of(x)))
    return dataclasses.replace(
      report,
      operation=kind,
      path=path,
      direction="forward",
      verdict="value",
      index=tuple(map(int, np.argwhere(not_finite(x))[0])),
      result=result,
      cause=f"{name} holds {result.inf} inf and {result.nan} NaN before anything is computed.",
      cure="mpjax.all_finite(x)  # of the data, or restore a checkpoint if it is a parameter",
    )

  def _of_step(self, broken: _Broken, report: NonfiniteReport) -> NonfiniteReport:
    """Returns the report of a step that broke."""
    probe = CaptureProbe(self.body, *broken)
    _, index, rows = jax.device_get(self._looking(probe)(jnp.float32(1), *self.leaves))
    step, iterations, eqn = probe.step, broken.iterations, probe.step.eqn
    operation = self.operations[step.number]
    direction = direction_of(self.graph, operation)
    out = eqn.outvars[probe.result]
    values = [
      *((s.eqn.primitive.name, s.eqn.outvars[0], s.location.path) for s in probe.before),
      *((f"operand {i}", eqn.invars[i], "") for i in probe.positions),
      *(("result", out, ""), ("in float32", out, "")),
    ]
    pairs = zip(values, rows, strict=True)
    *others, result, wide = [_range(name, aval_of(v), row, at) for (name, v, at), row in pairs]
    report = dataclasses.replace(
      report,
      operation=eqn.primitive.name,
      path=operation.where.path,
      direction=direction,
      source=str(step.location.source) if step.location.source else None,
      iteration=iterations[0] if len(iterations) == 1 else iterations or None,
      verdict="value" if report.finite_at is None else "scale",
      index=tuple(map(int, np.unravel_index(index, result.shape))) if result.size else (),
      device=_device(step, broken.device),
      operands=tuple(others[len(probe.before) :]),
      result=result,
      before=tuple(others[: len(probe.before)]),
    )
    rounded = _rounded_before(operation)
    cure = self._in_float32(rounded or operation)
    cause, cure = cause_and_cure(report, wide, rounded, cure)
    return dataclasses.replace(report, cause=cause, cure=cure)

  def _in_float32(self, operation: Operation) -> str:
    """Returns the code by which an operation is computed in float32, and begins a comment."""
    path = operation.where.path
    if not path:
      return "a jax.named_scope here and a Rule with its path  #"
    # The outermost scope of a Flax model is called by its class. A rule on that would put all of
    # the model into float32, and in Linen it has no name.
    if "/" not in path and path[:1].isupper():
      return f"mpjax.full_precision(fn)(x)  # for the code of {operation.where.source},"
    of_parameter = operation.step.location.path != path  # As rules for NNX have it.
    selects = f"**/{path}" if of_parameter else selector(path, scopes_of(self.body))
    return f'Rule("float32", path={written(selects)})  #'


def _is_traced(x: Leaf) -> bool:
  """Whether a leaf is traced: an array. A number may be a shape, and what is not finite is none."""
  if isinstance(x, float):
    return not math.isfinite(x)
  if isinstance(x, np.generic):
    return jnp.issubdtype(x.dtype, jnp.inexact)
  if isinstance(x, np.ndarray):
    return jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool
  return isinstance(x, jax.Array)


def _range(name: str, array: ShapedArray | Array, row: Row, path: str = "") -> Range:
  numbers = {field: x.item() for field, x in row.items()}
  return Range(name=name, dtype=array.dtype.name, shape=array.shape, path=path, **numbers)


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


def direction_of(graph: Graph, operation: Operation) -> Literal["forward", "backward"]:
  """Returns the pass of an operation: what `remat` computes again is part of the forward pass."""
  # The slope of a square root, 0.5 / sqrt(x), is computed beside the root, by the same call and of
  # what the root takes or returns, and only the backward pass reads it.
  if operation.where.direction != "forward":
    return "backward" if operation.where.direction == "backward" else "forward"
  call, operands = call_of(operation.eqn), set(operation.operands)
  earlier = graph.operations[: graph.operations.index(operation)]
  is_beside = any(
    each.facts.elementwise
    and call_of(each.eqn) == call
    and not operands.isdisjoint((*each.operands, *each.results))
    for each in earlier
  )
  if not (call and is_beside):
    return "forward"
  returned, seen, pending = set(graph.results), {operation}, [operation]
  while pending:
    for value in pending.pop().results:
      if value in returned or not value.consumers:
        return "forward"
      readers = {each for each in value.consumers if each.where.direction != "backward"} - seen
      seen |= readers
      pending += readers
  return "backward"


def _rounded_before(operation: Operation) -> Operation | None:
  """Returns the last operation in low precision before one of linear algebra."""
  seen, pending = set[Operation](), [operation] * (operation.facts.role == "linear algebra")
  for each in pending:
    rounds = any(v.is_low for v in (*each.operands, *each.results))
    if rounds and not (each.moves or each.casts):
      return each
    before = {v.made_by for v in each.operands if v.made_by is not None} - seen
    seen |= before
    pending += before
  return None
