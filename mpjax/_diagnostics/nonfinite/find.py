"""`find_nonfinite`: where the first inf or NaN came from."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core.primitives import mul_p

from mpjax._core.errors import check_call
from mpjax._core.leaves import key_names
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, NumpyArray
from mpjax._diagnostics.arguments import Call, check_function, is_array, positional_names
from mpjax._diagnostics.nonfinite.probes import (
  NONE,
  FirstProbe,
  FlagProbe,
  Row,
  Uses,
  is_inexact,
  not_finite,
  row_of,
)
from mpjax._diagnostics.nonfinite.report import NonfiniteReport, Range, cause_and_cure
from mpjax._diagnostics.parameter_scopes import name_by_parameters
from mpjax._diagnostics.report import Pending
from mpjax._diagnostics.tune.tune_report import written
from mpjax._diagnostics.tune.tuning import scopes_of, selector
from mpjax._jaxprs.graph import Graph, Operation
from mpjax._jaxprs.locations import call_of
from mpjax._jaxprs.primitives import Holds
from mpjax._jaxprs.reader import aval_of, mapped_with
from mpjax._jaxprs.runner import Observer, run
from mpjax._jaxprs.steps import Step, body_of
from mpjax.transforms._loss_scale import scales_in

_FIX = "Write mpjax.find_nonfinite(step)(state, batch): the arguments come in a second call."

_LEAST = 8
"""A smaller factor of a loss is rather a weight of it than a loss scale."""


@check_call("mpjax.find_nonfinite(fn)", fix=_FIX)
def find_nonfinite(fn: Function) -> Callable[..., NonfiniteReport]:
  """Returns a function that runs `fn`, and says where the first inf or NaN came from.

  That is the first value, in the order of execution, which is not finite though the values that it
  is computed from are, or which is NaN though they are not (0 * inf). A mask of -inf is no fault
  until a sum reads it, nor is a value that nothing reads but comparisons and a `where` that
  discards it. Smaller loss scales are tried, too. docs/find_nonfinite.md says what counts, and what
  it costs. Donated arguments are not deleted.

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
  return Pending(
    "find_nonfinite", fn, lambda fn, args, kwargs, _: Finder(fn, args, kwargs).report()
  )


class Finder:
  """Looks for the first step that breaks, at this loss scale or at another one."""

  # One run says which values are not finite. Only if there are some, the steps that lead to them
  # are looked at closely, in a second one: most often -inf in masks, and the fault.

  def __init__(self, fn: Function, args: Args, kwargs: Kwargs) -> None:
    # A number may be a shape, and what is not finite is none.
    is_bad = lambda x: isinstance(x, (float, np.inexact)) and not np.isfinite(x)  # noqa: E731
    call = Call(args, kwargs, lambda x: is_array(x) or is_bad(x))
    call.check_concrete("mpjax.find_nonfinite(fn)")
    pairs = jax.tree_util.tree_leaves_with_path((args, kwargs))
    self.keys = [pairs[i][0] for i in call.positions]
    self.names = positional_names(fn, len(args))
    traced = call.traced(fn)[0]
    self.body, self.leaves = body_of(traced, compiled=True), call.arrays
    # With what is not compiled: a slope may be all that is left of what it is the slope of.
    self.graph = Graph(traced)
    states = scales_in((args, kwargs))
    scales = [(state, each) for each in states if (state := each.state) is not None]
    self.nothing, self.factors, least = NonfiniteReport(), dict[float, float](), 1.0
    held = [state.scale for state, _ in scales]
    self.scales = {i for i, x in enumerate(self.leaves) if any(x is scale for scale in held)}
    if scales:
      state, owned = max(scales, key=lambda pair: float(np.max(pair[0].scale)))
      scale, step = float(np.max(state.scale)), int(np.max(state.total))
      self.nothing = NonfiniteReport(loss_scale=scale, step=step)
      least = owned.limits[0] if owned.dynamic else 1.0
    else:
      self.scales = scale_by_hand(self.graph, self.leaves)
      for i in self.scales:
        self.nothing = NonfiniteReport(loss_scale=float(self.leaves[i]))
    if scale := self.nothing.loss_scale:
      # Smaller ones. At the next power of two it breaks, or that is the scale.
      powers = range(math.ceil(math.log2(least)), math.ceil(math.log2(scale)))
      self.factors = {2.0**i: 2.0**i / scale for i in powers}
    self.probe, self.uses = FlagProbe(self.body), Uses(self.body)
    self.flags = self._looking(self.probe)
    self.closely: dict[frozenset[int], Callable[..., Any]] = {}
    owners = [tuple(n for n in key_names(path[2:]) if n != "value")[:-1] for path in self.keys]
    name_by_parameters(self.graph, dict(zip(self.graph.arguments, owners, strict=True)))
    # Of a loop, that of its first argument.
    self.operations = {each.step.key: each for each in reversed(self.graph.operations)}

  def _looking(self, observer: Observer) -> Callable[..., Any]:
    """Returns a function of a factor of the loss scale, and arguments, that says what is seen."""

    def looking(factor: Array, *leaves: Array) -> Any:
      scaled = list(leaves)
      for i in self.scales:
        scaled[i] = (leaves[i] * factor).astype(leaves[i].dtype)
      return run(self.body, scaled, observer)[1]

    # Every cast as it is written: else XLA may leave out a cast to float16 and back, with the
    # overflow that is looked for. What runs once need not be fast, and LLVM takes half of the time
    # that compiling takes for a CPU.
    options: dict[str, str | bool | int] = {"xla_allow_excess_precision": False}
    if jax.default_backend() == "cpu":
      options |= {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(looking, compiler_options=options)

  def flagged(self, factor: float) -> NumpyArray:
    """Returns which of the sentinels are not finite with the loss scale multiplied by a factor."""
    return np.asarray(self.flags(jnp.float32(factor), *self.leaves))

  def first(self, factor: float = 1.0) -> list[int]:
    """Returns what `FirstProbe` sees first with the loss scale multiplied by a factor, or []."""
    for some in self.probe.suspects(self.flagged(factor)):
      # One that was compiled for another scale will do if it looks at these among others.
      only = next((each for each in self.closely if some <= each), some)
      if only not in self.closely:
        self.closely[only] = self._looking(FirstProbe(self.uses, only))
      first, *_ = self.closely[only](jnp.float32(factor), *self.leaves)
      if int(first[0]) in some:
        return np.asarray(first).tolist()
    return []

  def report(self) -> NonfiniteReport:
    """Returns what is said of the first step that breaks."""
    broken = self.first()
    if not broken:
      return self.nothing
    return self._of_step(broken) if broken[0] >= 0 else self._of_argument(broken[0])

  def _of_argument(self, number: int) -> NonfiniteReport:
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
      readers = (self.operations.get(s.key) for s in self.body.every_step() if slot in s.reads)
      path = next((each.where.path for each in readers if each), "")
      name = f"an array that the function closes over, {x.dtype}{[*x.shape]}"
    result = _range(kind, x, jax.device_get(row_of(x)))
    return dataclasses.replace(
      self.nothing,
      operation=kind,
      path=path,
      direction="forward",
      verdict="value",
      index=tuple(map(int, np.argwhere(not_finite(x))[0])),
      result=result,
      cause=f"{name} holds {result.inf} inf and {result.nan} NaN before anything is computed.",
      cure="mpjax.all_finite(x)  # of the data, or restore a checkpoint if it is a parameter",
    )

  def _of_step(self, broken: list[int]) -> NonfiniteReport:
    """Returns the report of a step that broke."""
    number, *iterations, device = broken
    step = next(each for each in self.body.every_step() if each.number == number)
    looking = self._looking(FirstProbe(self.uses, {number}, step))
    _, index, rows = jax.device_get(looking(jnp.float32(1), *self.leaves))
    eqn, operation, finite_at = step.eqn, self.operations[step.key], self._finite_at(number)
    out = next(v for v in eqn.outvars if is_inexact(v))
    operands = ((f"operand {i}", v) for i, v in enumerate(eqn.invars) if is_inexact(v))
    values = zip([*operands, ("result", out), ("in float32", out)], rows, strict=True)
    *ranges, result, wide = [_range(name, aval_of(v), row) for (name, v), row in values]
    loops = tuple(i for i in iterations if i >= 0)
    report = dataclasses.replace(
      self.nothing,
      operation=eqn.primitive.name,
      path=operation.where.path,
      direction=direction_of(self.graph, operation),
      source=str(step.location.source) if step.location.source else None,
      iteration=loops[0] if len(loops) == 1 else loops or None,
      verdict="value" if finite_at is None else "scale",
      finite_at=finite_at,
      index=tuple(map(int, np.unravel_index(index, result.shape))) if index < NONE else (),
      device=_device(step, device),
      operands=tuple(ranges),
      result=result,
    )
    rounded = _rounded_before(operation)
    cause, cure = cause_and_cure(report, wide, rounded, self._in_float32(rounded or operation))
    return dataclasses.replace(report, cause=cause, cure=cure)

  def _finite_at(self, number: int) -> float | None:
    """Returns the largest power of two, as loss scale, at which all of the function is finite."""
    if not self.factors:
      return None
    lowest, *others = self.factors
    broken = self.first(self.factors[lowest])
    if broken[:1] == [number]:
      return None
    # What is not finite where nothing breaks does no harm, such as the -inf of masks.
    harmless = np.asarray(False) if broken else self.flagged(self.factors[lowest])
    for scale in reversed(others):
      if not np.any(self.flagged(self.factors[scale]) & ~harmless):
        return scale
    return None if broken else lowest

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


def scale_by_hand(graph: Graph, leaves: Sequence[Leaf]) -> set[int]:
  """Returns the position of a loss scale among the arguments that no `mpjax.loss_scaling` has."""
  # It is a power of two that multiplies scalars in both passes: the loss, and its cotangent.
  for position, argument in enumerate(graph.arguments):
    number = float(leaves[position]) if argument.is_floating and argument.aval.shape == () else 0.0
    if number < _LEAST or not math.isfinite(number) or not math.log2(number).is_integer():
      continue
    versions, passes = {argument}, set[bool]()
    for each in graph.operations:
      if not versions.isdisjoint(each.operands):
        if each.moves or each.casts:
          versions |= {*each.results}
        elif each.eqn.primitive is mul_p and each.results[0].aval.shape == ():
          passes.add(each.where.direction == "backward")
    if len(passes) == 2:
      return {position}
  return set()


def _range(name: str, array: ShapedArray | Array, row: Row) -> Range:
  numbers = {field: x.item() for field, x in row.items()}
  return Range(name=name, dtype=array.dtype.name, shape=array.shape, **numbers)


def _device(step: Step, device: int) -> dict[str, int] | None:
  """Returns the positions of a device along the axes of the `shard_map` that a step is in."""
  if device < 0:
    return None
  *_, outermost = (mapped_with(s.eqn) for s in step.enclosing() if s.holds is Holds.SHARD_MAP)
  sizes = {k: n for k, n in outermost["mesh"].shape.items() if k in outermost["axis_names"]}
  places = np.unravel_index(device, [*sizes.values()])
  return {str(name): int(i) for name, i in zip(sizes, places, strict=True)}


def direction_of(graph: Graph, operation: Operation) -> Literal["forward", "backward"]:
  """Returns the pass of an operation: what `remat` computes again is part of the forward pass."""
  if operation.where.direction != "forward":
    return "backward" if operation.where.direction == "backward" else "forward"
  # The slope of a square root, 0.5 / sqrt(x), is computed beside the root: by the same call, of
  # what the root takes or returns. Only the backward pass reads it.
  call, operands = call_of(operation.eqn), set(operation.operands)
  earlier = graph.operations[: graph.operations.index(operation)]
  beside = (each for each in earlier if each.facts.elementwise and call_of(each.eqn) == call)
  if all(operands.isdisjoint((*each.operands, *each.results)) for each in beside):
    return "forward"
  returned, seen, pending = set(graph.results), {operation}, [operation]
  for each in pending:
    for value in each.results:
      if value in returned or not value.consumers:
        return "forward"
      readers = {each for each in value.consumers if each.where.direction != "backward"} - seen
      seen |= readers
      pending += readers
  return "backward"


def _rounded_before(operation: Operation) -> Operation | None:
  """Returns the last operation in low precision before one of linear algebra."""
  pending = [operation] if operation.facts.role == "linear algebra" else []
  seen = set(pending)
  for each in pending:
    is_low = any(v.is_low for v in (*each.operands, *each.results))
    if is_low and not (each.moves or each.casts):
      return each
    before = {v.made_by for v in each.operands if v.made_by is not None} - seen
    seen |= before
    pending += before
  return None
