"""`find_nonfinite`: where the first inf or NaN came from."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import primitives as p

from mpjax._autocast.scopes import REGION
from mpjax._core.errors import check_call
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, NumpyArray, is_low_precision
from mpjax._debug import probes
from mpjax._debug.arguments import Call, is_array, name_by_parameters
from mpjax._debug.report import Pending, Report, Section, power
from mpjax._debug.tune_report import written
from mpjax._debug.tuning import homes_of, selector
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import MODULE, call_of
from mpjax._jaxpr.primitives import Holds
from mpjax._jaxpr.reader import aval_of, mapped_with
from mpjax._jaxpr.runner import Observer, run
from mpjax._jaxpr.steps import Step, body_of
from mpjax._optim.loss_scale import scales_in

_FIX = "Write mpjax.find_nonfinite(step)(state, batch): the arguments come in a second call."

_LEAST = 8
"""A smaller factor of a loss is rather a weight of it than a loss scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """The numbers of an array.

  Fields:
    name: what it is: an operand or the result.
    dtype: its dtype.
    shape: its shape; on one device, inside of a `shard_map`.
    least: the least absolute value of those that are finite; NaN if none is.
    most: the largest.
    inf: how many are inf.
    nan: how many are NaN.
    value: the value at the element that broke; NaN where operands have no such element.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  least: float
  most: float
  inf: int
  nan: int
  value: float


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NonfiniteReport(Report):
  """Where the first value of a function was not finite though what it came from was.

  False if there is none: `if mpjax.find_nonfinite(fn)(x): ...`. Printed, it says all of this.

  Args:
    operation: the primitive, as `jax.make_jaxpr` prints it; "argument" for an argument that came
      so, "constant" for an array that the function closes over; None if nothing was found.
    path: the module or named scope; of an argument its name, such as "params/w".
    direction: "forward" or "backward".
    source: the line of code, "model.py:57"; None if it is not known.
    iteration: that of the loop, counted from 0 along its inputs (so that the backward pass of a
      layer has the number of the layer); a tuple for loops inside of one another, None outside.
    verdict: "scale" if the function is finite at a smaller loss scale, "value" if it is at none.
    finite_at: the largest power of two, as loss scale, at which it was run and all of it is finite,
      if the verdict is "scale".
    index: the first element that broke, in the shape of the result: under `vmap`, it says the lane.
    device: which device of a `shard_map`, as its positions along the axes of the mesh.
    operands: the ranges of the operands.
    result: that of the result, with its dtype and shape.
    loss_scale: the loss scale, if one is in the arguments.
    step: how many steps it has seen.
    cause: why it is not finite, a sentence.
    cure: what to change, a line of code.

  >>> import jax.numpy as jnp, mpjax
  >>> found = mpjax.find_nonfinite(lambda x: jnp.sum(x * x))(jnp.asarray([300.0], jnp.float16))
  >>> bool(found), found.operation, found.direction, found.verdict
  (True, 'mul', 'forward', 'value')
  """

  operation: str | None = None
  path: str = ""
  direction: Literal["forward", "backward"] | None = None
  source: str | None = None
  iteration: int | tuple[int, ...] | None = None
  verdict: Literal["scale", "value"] | None = None
  finite_at: float | None = None
  index: tuple[int, ...] | None = None
  device: Mapping[str, int] | None = None
  operands: tuple[Range, ...] = ()
  result: Range | None = None
  loss_scale: float | None = None
  step: int | None = None
  cause: str = ""
  cure: str = ""

  def __bool__(self) -> bool:
    return self.operation is not None

  def sections(self) -> Sequence[Section]:
    scale = ()
    if self.loss_scale is not None:
      step = "Loss" if self.step is None else f"Step {self.step}, loss"
      scale = (f"{step} scale {power(self.loss_scale)}.",)
    if not self:
      return [Section(lines=("Every value that something computes with is finite.", *scale))]
    verdict = "The value's own: no loss scale helps."
    if self.finite_at is not None:
      verdict = f"The scale's fault: all is finite at {power(self.finite_at)}."
    elif self.loss_scale is None and self.direction == "backward":
      verdict = "The value's own, unless the loss is scaled: no argument holds a loss scale to try."
    parts = [part for part in (self.path, self.operation, self.direction, self.source) if part]
    if self.iteration is not None:
      parts.append(f"iteration {self.iteration}")
    if self.device is not None:
      parts.append("device " + ", ".join(f"{axis}={i}" for axis, i in self.device.items()))
    place = f"First value that is not finite: {' · '.join(parts)}"
    columns = ("value", "dtype and shape", "least", "largest", "inf", "NaN")
    rows = []
    for each in (*self.operands, *filter(None, [self.result])):
      shape = f"{each.dtype}[{','.join(map(str, each.shape))}]"
      numbers = ("-" if math.isnan(x) else f"{x:.3g}" for x in (each.least, each.most))
      rows.append((each.name, shape, *numbers, f"{each.inf}", f"{each.nan}"))
    return [
      Section(lines=(place, *scale, self.cause)),
      Section("Values", columns=columns, rows=tuple(rows)),
      Section("Verdict", lines=(verdict,)),
      Section("Cure", lines=(self.cure,)),
    ]


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
  >>> found.cure.split("  ")[0]
  'x.astype(jnp.float32)'
  >>> bool(mpjax.find_nonfinite(jax.grad(loss_fn))(w / 2, x))
  False
  """
  report = lambda fn, args, kwargs, _: Finder(fn, args, kwargs).report()  # noqa: E731
  return Pending("mpjax.find_nonfinite(fn)", fn, report, _FIX)


class Finder:
  """Looks for the first step that breaks, at this loss scale or at another one."""

  # One run says which values are not finite. Only if there are some, the steps that lead to them
  # are looked at closely, in a second one: most often -inf in masks, and the fault.

  def __init__(self, fn: Function, args: Args, kwargs: Kwargs) -> None:
    # A number may be a shape, and what is not finite is none.
    is_bad = lambda x: isinstance(x, (float, np.inexact)) and not np.isfinite(x)  # noqa: E731
    call = Call(args, kwargs, "mpjax.find_nonfinite(fn)", lambda x: is_array(x) or is_bad(x))
    call.check_concrete()
    self.arguments = call.arguments(fn)
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
    self.probe, self.uses = probes.FlagProbe(self.body), probes.uses_of(self.body)
    self.flags = self._looking(self.probe)
    self.closely: dict[frozenset[int], Callable[..., Any]] = {}
    modules = [x.module if x.is_first or x.is_parameter else () for x in self.arguments]
    name_by_parameters(self.graph, modules)
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
        self.closely[only] = self._looking(probes.FirstProbe(self.uses, only))
      first, *_ = self.closely[only](jnp.float32(factor), *self.leaves)
      if int(first[0]) in some:
        return np.asarray(first).tolist()
    return []

  def report(self) -> NonfiniteReport:
    broken = self.first()
    if not broken:
      return self.nothing
    return self._of_step(broken) if broken[0] >= 0 else self._of_argument(broken[0])

  def _of_argument(self, number: int) -> NonfiniteReport:
    slots = (*self.body.inputs, *self.body.consts)
    slot, position = slots[number], number + len(slots)
    if position < len(self.arguments):
      kind, x = "argument", jnp.asarray(self.leaves[position])
      path = name = self.arguments[position].name
    else:
      kind, x = "constant", jnp.asarray(self.body.consts[slot])
      readers = (self.operations.get(s.key) for s in self.body.every_step() if slot in s.reads)
      path = next((each.where.path for each in readers if each), "")
      name = f"an array that the function closes over, {x.dtype}{[*x.shape]}"
    result = _range(kind, x, jax.device_get(probes.row_of(x)))
    return dataclasses.replace(
      self.nothing,
      operation=kind,
      path=path,
      direction="forward",
      verdict="value",
      index=tuple(map(int, np.argwhere(~jnp.isfinite(x))[0])),
      result=result,
      cause=f"{name} holds {result.inf} inf and {result.nan} NaN before anything is computed.",
      cure="jnp.isfinite(x).all()  # of the data, or restore a checkpoint if it is a parameter",
    )

  def _of_step(self, broken: list[int]) -> NonfiniteReport:
    number, *iterations, device = broken
    step = next(each for each in self.body.every_step() if each.number == number)
    looking = self._looking(probes.FirstProbe(self.uses, {number}, step))
    _, index, rows = jax.device_get(looking(jnp.float32(1), *self.leaves))
    eqn, operation, finite_at = step.eqn, self.operations[step.key], self._finite_at(number)
    out = next(v for v in eqn.outvars if probes.is_inexact(v))
    operands = ((f"operand {i}", v) for i, v in enumerate(eqn.invars) if probes.is_inexact(v))
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
      index=tuple(map(int, np.unravel_index(index, result.shape))) if index < probes.NONE else (),
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
    where, source = operation.where, operation.where.source
    if where.marked(REGION) is None:  # No rule is for what has no policy.
      return f"x.astype(jnp.float32)  # the operands at {source},"
    path, module = where.path, where.marked(MODULE)
    # A rule for the root of a model, whose scope is called by its class, is one for all of it.
    if module == "" or (module is None and "/" not in path and path[:1].isupper()):
      return f"mpjax.full_precision(fn)(x)  # for the code of {source},"
    if not path:
      return "a jax.named_scope here and a Rule with its path  #"
    return f'Rule("float32", path={written(selector(module or path, homes_of(self.graph)))})  #'


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
        elif each.eqn.primitive is p.mul_p and each.results[0].aval.shape == ():
          passes.add(each.where.direction == "backward")
    if len(passes) == 2:
      return {position}
  return set()


def _range(name: str, array: ShapedArray | Array, row: probes.Row) -> Range:
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
  # A slope, such as the 0.5 / sqrt(x) of a root, is of the backward pass, wherever it is computed.
  if operation.where.direction == "backward":
    return "backward"
  # What the same call of the user's code, such as `jnp.sqrt(x)`, computed before.
  calls = {x: call_of(*(step.eqn for step in x.step.enclosing())) for x in graph.operations}
  earlier = itertools.takewhile(lambda each: each is not operation, graph.operations)
  before = [each for each in earlier if calls[each] == calls[operation]]
  if operation.where.direction == "recomputed":
    # What is computed again was computed before, of as many arrays and the same numbers.
    numbers = [v.label for v in operation.operands]
    again = (x.name == operation.name and [v.label for v in x.operands] == numbers for x in before)
    return "forward" if any(again) or not before else "backward"
  # It takes what the root takes or returns, and only the backward pass reads it.
  operands = set(operation.operands)
  beside = (each for each in before if each.facts.elementwise)
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


def cause_and_cure(
  report: NonfiniteReport, wide: Range, rounded: Operation | None, in_float32: str
) -> tuple[str, str]:
  """Returns why the result of a step is not finite, and what to change."""
  # `wide` is its range computed in float32, `rounded` what was computed in low precision before an
  # operation of linear algebra, and `in_float32` the code by which that, or else the step, is not.
  operation, operands, result = report.operation, report.operands, report.result or wide
  dtype, largest = result.dtype, float(jnp.finfo(jnp.dtype(result.dtype)).max)
  if report.finite_at is not None:
    text, exponent = f"It overflows {dtype} at this loss scale.", power(report.finite_at)
    call = f"opt_state = mpjax.states.set_loss_scale(opt_state, {report.finite_at:g})"
    if report.step is None:
      return text, f"loss_scale = {report.finite_at:g}  # {exponent}, or mpjax.DynamicLossScale()"
    return text, f"{call}  # {exponent}; DynamicLossScale gets there by itself"

  values, infs = [x.value for x in operands], [x for x in operands if x.inf or x.nan]
  mask = f"jnp.where(mask, x, jnp.finfo(jnp.{dtype}).min)"
  around = "# as the operand, or divisor, of this line, and a jnp.where around its result"
  if infs and result.nan and 0 in values and report.direction == "backward":
    text = "It is 0 * inf: a gradient of 0, and a slope at a pole, as of a root at 0."
    return text, f"jnp.where(allowed, x, safe)  {around}"
  if infs and result.nan and 0 in values:
    text = "It is 0 * inf, of an inf that did no harm before: discarded, or a constant beyond "
    cure = "x = jnp.where(mask, x, 1.0)  # before the operation whose inf is masked, or mask by "
    return f"{text}{dtype}.", f"{cure}{mask} instead of a multiplication"
  if infs and result.nan and (len(infs) > 1 or math.isinf(infs[0].value)):
    text = "It is inf - inf: a row all of which is masked by -inf has no finite element."
    return text, f"x = {mask}  # instead of -jnp.inf"
  if infs:
    text = "It adds up an inf that was no fault before, as of a mask, or of a label that is masked."
    return text, "jnp.where(jnp.isfinite(x), x, 0)  # before it, or other labels"

  if is_low_precision(jnp.dtype(dtype)) and wide.inf + wide.nan < result.inf + result.nan:
    text = f"It overflows {dtype}: in float32 the largest of these values is {wide.most:.3g}"
    return (
      f"{text}, and {dtype} ends at {largest:.5g}.",
      f"{in_float32} or the policy mixed_bfloat16",
    )
  if rounded is not None:
    low = next(v for v in (*rounded.results, *rounded.operands) if v.is_low)
    text = (
      f"{operation} is not defined for these operands, as for a matrix without an inverse. "
      f"Rounding may be why: they come from {rounded.name} of {rounded.where.path}, in {low.dtype}."
    )
    return text, f"{in_float32} or x + epsilon * jnp.eye(n)"

  # What no wider dtype would help: operands that the operation does not take, or too large.
  values = [x for x in values if not math.isnan(x)]
  kind = "NaN" if result.nan and math.isnan(result.value) else "-inf" if result.value < 0 else "inf"
  text = f"{operation} of {' and '.join(f'{x:.3g}' for x in values) or 'these operands'}"
  # No sum or matmul of small numbers overflows. Of one that does, parts may be inf - inf.
  overflows = any(x.most**2 * math.prod(x.shape) > largest for x in operands)
  if values:
    # Of ordinary numbers inf is a pole, as that of `log1p` at -1.
    overflows = kind != "NaN" and not (0 in values or all(1e-3 < abs(x) <= 1 for x in values))
  if overflows:
    text = f"{text} overflows {dtype}, which ends at {largest:.3g}."
    if operation == p.exp_p.name:
      return text, "jnp.exp(x - jnp.max(x))  # in a softmax; else jnp.minimum(x, limit) before it"
    return text, "jnp.clip(x, -limit, limit)  # of the operands, or another learning rate"
  if not values:
    text = f"{text} is {kind}: not defined, as of a matrix without an inverse, or beyond its dtype."
    return text, "x + epsilon * jnp.eye(n)  # of a matrix; else smaller operands, an index inside"
  text = f"{text} is {kind} in every precision."
  # In a backward pass it is a slope, and the line has the operation whose slope it is.
  number = "x != 0, x, 1" if 0 in values and report.direction == "forward" else "allowed, x, safe"
  return text, f"jnp.where({number})  {around}"
