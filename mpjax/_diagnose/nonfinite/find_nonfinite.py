"""`find_nonfinite`: where the first inf or NaN came from."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import primitives as p

from mpjax._autocast.scopes import REGION
from mpjax._core.errors import check_call
from mpjax._core.leaves import is_array
from mpjax._core.types import Args, Array, Function, Kwargs, Leaf, NumpyArray, PyTree
from mpjax._diagnose.call import Call, compiled_as_written
from mpjax._diagnose.nonfinite import probes
from mpjax._diagnose.nonfinite.cause import advice
from mpjax._diagnose.nonfinite.report import NonfiniteReport, Range
from mpjax._diagnose.nonfinite.uses import Uses, faults_in, uses_of
from mpjax._diagnose.parameter_scopes import name_by_parameters
from mpjax._diagnose.paths import rule_paths_of, selector
from mpjax._diagnose.report import Advance, Pending
from mpjax._jaxpr.graph import Graph, Operation
from mpjax._jaxpr.locations import MODULE, Source, lines_of_call
from mpjax._jaxpr.primitives import Holds
from mpjax._jaxpr.reader import aval_of, is_inexact_atom, mapped_with
from mpjax._jaxpr.runner import run
from mpjax._jaxpr.steps import Body, Step, body_of, pieces_of
from mpjax._optim.find_scale import scales_in
from mpjax._policy.policy import EXACT_FLOAT32
from mpjax._policy.rules import Rule

_FIX = "Write mpjax.find_nonfinite(step)(state, batch): the arguments come in a second call."

_PIECE = 64
"""The most steps of a piece. A longer piece compiles more than leads to a fault,
and a shorter one computes more values that it has to return."""

_SMALLEST_SCALE = 8
"""The smallest loss scale that is recognized. A smaller factor is taken for a weight of a loss."""


@check_call("mpjax.find_nonfinite(fn)", fix=_FIX)
def find_nonfinite(fn: Function) -> Callable[..., NonfiniteReport]:
  """Find the operation that made the first inf or NaN.

  That is the first operation, in the order of execution, whose result is not finite though its
  operands are, or is NaN though they are not (0 * inf). A mask of -inf is no fault until a sum
  reads it. Neither is a value that only comparisons read, or a `where` that discards it. Smaller
  loss scales are tried too. docs/find_nonfinite.md says what counts, and what it costs. Donated
  arguments are not deleted.

  Args:
    fn: a function of trees of arrays: a loss, a gradient, a training step, jitted or not.

  Returns:
    A function with the arguments of `fn` that returns a `NonfiniteReport`. It is false if nothing
    was found. Print it; its fields are for code.

  Raises:
    MpjaxTypeError: `fn` is not a function, or is compiled already; when called: an argument is
      traced, or has no value.

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

  def report(fn: Function, args: Args, kwargs: Kwargs, _: Advance) -> NonfiniteReport:
    return Finder(fn, args, kwargs).report()

  return Pending("mpjax.find_nonfinite(fn)", fn, report, _FIX)


class Broken(NamedTuple):
  """The first step that broke."""

  number: int  # of the step; negative for arguments and constants
  iterations: tuple[int, ...]  # of the loops around it, the outermost first
  device: int | None  # in the mesh of a `shard_map`


class FoundScale(NamedTuple):
  """A loss scale among the arguments."""

  value: float
  positions: Collection[int]  # of the arguments that hold it
  least: float = 1.0  # the smallest value that it may have
  step: int | None = None  # how many steps it has seen


class Piece:
  """A part of the function. It is compiled when it first runs, once for each way to look at it."""

  def __init__(self, body: Body, uses: Uses) -> None:
    self.body, self.uses = body, uses
    self.steps = {*body.every_step()}
    # A piece returns no literals.
    self.returned = [slot for slot in body.outputs if isinstance(slot, int)]
    self.probe = probes.FlagProbe(body, uses.arguments)
    self.flagged = compiled_as_written(functools.partial(run, body, observer=self.probe))
    # The compiled close looks, by the steps that they look at and the values that they follow.
    self.closely: dict[tuple[frozenset[int], frozenset[int]], Callable[..., Any]] = {}

  def first(
    self, only: frozenset[int], given: Mapping[int, Array], values: Sequence[Any]
  ) -> probes.Seen:
    """Returns the first of some steps that broke, given the values that are followed."""
    key = only, frozenset(given)

    def looking(values: Sequence[Any], given: Mapping[int, Array]) -> probes.Seen:
      probe = probes.FirstProbe(self.uses, only, given=given, returned=self.returned)
      return run(self.body, values, probe)[1]

    if key not in self.closely:
      self.closely[key] = compiled_as_written(looking)
    return self.closely[key](values, given)

  def shown(self, step: Step, values: Sequence[Any]) -> probes.Seen:
    """Returns the numbers of a step that broke."""
    probe = probes.FirstProbe(self.uses, {step.number}, step)
    return compiled_as_written(lambda values: run(self.body, values, probe)[1])(values)


class PieceRun(NamedTuple):
  """A piece as it ran: the values that it took, and which of its sentinels are not finite."""

  piece: Piece
  values: Sequence[Any]
  flags: NumpyArray


class Finder:
  """Looks for the first step that breaks, at this loss scale or at another one."""

  # The function runs in pieces, so that nothing after the fault is compiled. The first look at a
  # piece says which values are not finite. If there are any, a second look follows the steps that
  # lead to them. Most often these are masks of -inf, and the fault.

  def __init__(self, fn: Function, args: Args, kwargs: Kwargs) -> None:
    # A Python number that is not finite is traced too, so that it can be reported as an argument.
    call = Call(args, kwargs, "mpjax.find_nonfinite(fn)", _is_traced)
    call.check_concrete()
    self.arguments = call.arguments(fn)
    self.leaves = call.arrays
    traced = call.traced(fn).program
    self.body = body_of(traced, compiled=True)
    # This graph keeps unused steps: a slope may be all that remains of its operation.
    self.graph = Graph(traced)
    modules = [x.module if x.is_first or x.is_parameter else () for x in self.arguments]
    name_by_parameters(self.graph, modules)
    # A loop has several operations of one key. The one of its first argument is kept.
    self.operations = {each.step.key: each for each in reversed(self.graph.operations)}

    # An optimizer state knows its scale. Otherwise look for an argument that scales the loss.
    self.scale = _scale_of_state((args, kwargs), self.leaves)
    if self.scale is None:
      self.scale = _scale_by_hand(self.graph, self.leaves)
    # Smaller powers of two as loss scales, and their ratio to the present scale, which is left out,
    # since it has been run. Without a loss scale, only the arguments as they are can be run. Nor is
    # there another one to try if the scale itself is damaged, which the report shows.
    self.factors = dict[float, float]()
    if self.scale is not None and 0 < self.scale.value < math.inf:
      ends = (math.ceil(math.log2(x)) for x in (self.scale.least, self.scale.value))
      self.factors = {2.0**i: 2.0**i / self.scale.value for i in range(*ends)}
    self.uses = uses_of(self.body)
    self.pieces = [Piece(each, self.uses) for each in pieces_of(self.body, _PIECE)]

  @property
  def nothing(self) -> NonfiniteReport:
    """The report if every value is finite."""
    if self.scale is None:
      return NonfiniteReport()
    return NonfiniteReport(loss_scale=self.scale.value, step=self.scale.step)

  def runs(self, factor: float = 1.0) -> Iterator[PieceRun]:
    """Yields the pieces as they run with the loss scale multiplied by a factor."""
    leaves = [*self.leaves]
    for i in () if self.scale is None or factor == 1 else self.scale.positions:
      leaf = jnp.asarray(leaves[i])
      leaves[i] = (leaf * factor).astype(leaf.dtype)
    env = dict(zip(self.body.inputs, leaves, strict=True))
    for position, piece in enumerate(self.pieces):
      values = [env[slot] for slot in piece.body.inputs]
      outs, flags = piece.flagged(values)
      yield PieceRun(piece, values, np.asarray(flags))
      # A value is freed before the first piece that runs without it.
      read = self.read_after(position)
      env |= dict(zip(piece.returned, outs, strict=True))
      env = {slot: x for slot, x in env.items() if slot in read}

  def read_after(self, position: int) -> set[int]:
    """Returns the values that the pieces after a position take."""
    return {slot for piece in self.pieces[position + 1 :] for slot in piece.body.inputs}

  def first(self, factor: float = 1.0) -> Broken | None:
    """Returns the first step that broke with the loss scale multiplied by a factor."""
    broken, followed = None, dict[int, Array]()
    for position, (piece, values, flags) in enumerate(self.runs(factor)):
      some = piece.probe.suspects(flags)
      given = {slot: followed[slot] for slot in piece.body.inputs if slot in followed}
      if some or given:
        seen = piece.first(some, given, values)
        number, *iterations, device = np.asarray(seen.first).tolist()
        if number < (probes.NONE if broken is None else broken.number):
          loops = tuple(i for i in iterations if i >= 0)
          broken = Broken(number, loops, device if device >= 0 else None)
        followed |= seen.followed
      # A later piece may compute with a value that an earlier step broke than the one found so far.
      read, least = self.read_after(position), probes.NONE if broken is None else broken.number
      followed = {k: x for k, x in followed.items() if k in read and np.any(np.asarray(x) < least)}
      if broken is not None and not followed:
        break
    return broken

  def report(self) -> NonfiniteReport:
    broken = self.first()
    if broken is None:
      return self.nothing
    return self._of_argument(broken.number) if broken.number < 0 else self._of_step(broken)

  def _of_argument(self, number: int) -> NonfiniteReport:
    # Negative numbers count from the end of arguments and constants.
    slots = (*self.body.inputs, *self.body.consts)
    slot = slots[number]
    position = number + len(slots)
    if position < len(self.arguments):
      kind, x = "argument", jnp.asarray(self.leaves[position])
      path = name = self.arguments[position].name
    else:
      kind, x = "constant", jnp.asarray(self.body.consts[slot])
      # A constant has no name. Its first reader says where it is used.
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
      index=tuple(map(int, np.argwhere(faults_in(x, slot, self.uses))[0])),
      result=result,
      cause=f"{name} holds {result.inf} inf and {result.nan} NaN before anything is computed.",
      cure="jnp.isfinite(x).all()  # of the data, or restore a checkpoint if it is a parameter",
    )

  def _of_step(self, broken: Broken) -> NonfiniteReport:
    step = next(each for each in self.body.every_step() if each.number == broken.number)
    # Run its piece once more to see the numbers of the step that broke.
    holds = next(ran for ran in self.runs() if step in ran.piece.steps)
    seen = jax.device_get(holds.piece.shown(step, holds.values))
    inexact = [(i, v) for i, v in enumerate(step.eqn.invars) if is_inexact_atom(v)]
    out = next(v for v in step.eqn.outvars if is_inexact_atom(v))
    # `FirstProbe` returns rows in the same order.
    named = [*((f"operand {i}", v) for i, v in inexact), ("result", out), ("in float32", out)]
    *operands, result, in_float32 = (
      _range(name, aval_of(v), row) for (name, v), row in zip(named, seen.rows, strict=True)
    )
    operation = self.operations[step.key]
    finite_at = self._finite_at(broken.number)
    loops = broken.iterations
    # If a result after the first one broke, the place is `NONE`.
    index = seen.place
    report = dataclasses.replace(
      self.nothing,
      operation=step.eqn.primitive.name,
      path=operation.where.path,
      direction=direction_of(self.graph, operation),
      source=str(step.location.source) if step.location.source else None,
      iteration=loops[0] if len(loops) == 1 else loops or None,
      verdict="value" if finite_at is None else "scale",
      finite_at=finite_at,
      index=tuple(map(int, np.unravel_index(index, result.shape))) if index < probes.NONE else (),
      device=None if broken.device is None else _device(step, broken.device),
      operands=tuple(operands),
      result=result,
    )
    rounded = _rounded_before(operation)
    code = self._in_float32(rounded or operation)
    cause, cure = advice(report, in_float32, rounded, code)
    return dataclasses.replace(report, cause=cause, cure=cure)

  def _finite_at(self, number: int) -> float | None:
    """Returns the largest power of two, as loss scale, at which all of the function is finite."""
    if not self.factors:
      return None
    # The smallest scale decides: if the step breaks even there, no scale helps.
    lowest, *others = self.factors
    broken = self.first(self.factors[lowest])
    if broken is not None and broken.number == number:
      return None
    # If nothing breaks, values that are not finite do no harm, such as the -inf of masks.
    harmless = {} if broken else {ran.piece: ran.flags for ran in self.runs(self.factors[lowest])}
    # The largest finite scale is the best, because it keeps the most small gradients.
    for scale in reversed(others):
      runs = self.runs(self.factors[scale])
      if not any(np.any(ran.flags & ~harmless.get(ran.piece, np.False_)) for ran in runs):
        return scale
    return None if broken else lowest

  def _in_float32(self, operation: Operation) -> str:
    """Returns the code by which an operation is computed in float32, and begins a comment."""
    where = operation.where
    source = operation.where.source
    if where.marked(REGION) is None:  # A rule applies only under a policy.
      return f"x.astype(jnp.float32)  # the operands at {source},"
    path = where.path
    module = where.marked(MODULE)
    # A rule for the root of a model would apply to the entire model. In Linen the scope of the root
    # is the name of its class.
    if module == "" or (module is None and "/" not in path and path[:1].isupper()):
      return f"mpjax.full_precision(fn)(x)  # for the code of {source},"
    if not path:
      return "a jax.named_scope here and a Rule with its path  #"
    rule = Rule(EXACT_FLOAT32, path=selector([module or path], rule_paths_of(self.graph)))
    return f"{rule}  #"


def _is_traced(x: Leaf) -> bool:
  """Whether an argument is traced: an array, or a number that is not finite.

  A finite Python number stays one, since it may be a shape.
  """
  # `np.isfinite` raises for text and objects.
  is_bad = isinstance(x, (float, np.inexact)) and not np.isfinite(x)
  return is_array(x) or is_bad


def _scale_of_state(tree: PyTree, leaves: Sequence[Leaf]) -> FoundScale | None:
  """Returns the loss scale in optimizer states, the largest of several."""
  owned = [each for each in scales_in(tree) if each.state is not None]
  if not owned:
    return None
  states = [each.state for each in owned if each.state is not None]
  positions = {i for i, x in enumerate(leaves) if any(x is state.scale for state in states)}
  # Under `pmap` a state has one scale for each device.
  values = [float(np.max(state.scale)) for state in states]
  largest = values.index(max(values))
  # A static scale has no limits. 1 is the scale of a plain backward pass.
  least = owned[largest].limits[0] if owned[largest].dynamic else 1.0
  return FoundScale(values[largest], positions, least, int(np.max(states[largest].total)))


def _scale_by_hand(graph: Graph, leaves: Sequence[Leaf]) -> FoundScale | None:
  """Returns the loss scale that is an argument of its own, without `mpjax.loss_scaling`.

  It is a scalar and a power of two, and multiplies scalars in both passes: the loss in the forward
  pass, and the cotangent of the loss in the backward pass.
  """
  for position, argument in enumerate(graph.arguments):
    if not argument.is_floating or argument.aval.shape != ():
      continue
    number = float(leaves[position])
    # A factor that is no power of two would round gradients, so users choose powers.
    is_power = number > 0 and math.isfinite(number) and math.log2(number).is_integer()
    if not is_power or number < _SMALLEST_SCALE:
      continue
    # The scale may be cast or broadcast before it multiplies.
    copies, passes = {argument}, set[bool]()
    for operation in graph.operations:
      if copies.isdisjoint(operation.operands):
        continue
      if operation.moves or operation.casts:
        copies.update(operation.results)
      elif operation.eqn.primitive is p.mul_p and operation.results[0].aval.shape == ():
        passes.add(operation.where.direction == "backward")
    if len(passes) == 2:
      return FoundScale(number, {position})
  return None


def _range(name: str, array: ShapedArray | Array, row: probes.ValuesByName) -> Range:
  numbers = {field: x.item() for field, x in row.items()}
  return Range(name=name, dtype=array.dtype.name, shape=array.shape, **numbers)


def _device(step: Step, device: int) -> dict[str, int]:
  """Returns the positions of a device along the axes of the `shard_map` that a step is in."""
  # The runner counts devices along the axes of the outermost `shard_map`.
  *_, outermost = (mapped_with(s.eqn) for s in step.enclosing() if s.holds is Holds.SHARD_MAP)
  sizes = {k: n for k, n in outermost["mesh"].shape.items() if k in outermost["axis_names"]}
  places = np.unravel_index(device, [*sizes.values()])
  return {str(name): int(i) for name, i in zip(sizes, places, strict=True)}


def direction_of(graph: Graph, operation: Operation) -> Literal["forward", "backward"]:
  """Returns the pass of an operation, which may not be the one that computes it.

  What `remat` computes again is part of the forward pass. A slope, such as the 0.5 / sqrt(x) of a
  root, is part of the backward pass, though JAX computes it in the forward pass.
  """
  if operation.where.direction == "backward":
    return "backward"

  def call_of(each: Operation) -> tuple[Source, ...]:
    return lines_of_call(*(step.eqn for step in each.step.enclosing()))

  # JAX computes the slope in the forward pass, in the same call in the user's code as the function
  # itself, such as `jnp.sqrt(x)`.
  earlier = itertools.takewhile(lambda each: each is not operation, graph.operations)
  call = call_of(operation)
  before = [each for each in earlier if call_of(each) == call]
  if operation.where.direction == "recomputed":
    # An operation that is computed again was computed before, unless it is a slope. Literals have
    # their number as label, and all results have "".
    labels = [v.label for v in operation.operands]
    is_repeated = any(
      each.name == operation.name and [v.label for v in each.operands] == labels for each in before
    )
    return "forward" if is_repeated or not before else "backward"
  # The slope of sqrt(x), 0.5 / sqrt(x), takes the result. That of log(x) takes the operand.
  values = [v for x in before if x.facts.elementwise for v in (*x.operands, *x.results)]
  is_slope = any(v in values for v in operation.operands)
  return "backward" if is_slope and _only_backward_reads(graph, operation) else "forward"


def _only_backward_reads(graph: Graph, operation: Operation) -> bool:
  """Whether all that is computed from an operation is computed in the backward pass."""
  # A result of the function is used by the caller, so it is no slope.
  returned = set(graph.results)
  seen = set[Operation]()
  pending = [operation]
  while pending:
    each = pending.pop()
    if each in seen:
      continue
    seen.add(each)
    for value in each.results:
      if value in returned or not value.consumers:
        return False
      pending += [x for x in value.consumers if x.where.direction != "backward"]
  return True


def _rounded_before(operation: Operation) -> Operation | None:
  """Returns the last operation in low precision before one of linear algebra."""
  # Linear algebra runs in float32, so the rounding lies before the cast of its operand.
  if operation.facts.acts_as != "linear algebra":
    return None
  seen = set[Operation]()
  # The operations nearest to it come first.
  pending = collections.deque([operation])
  while pending:
    each = pending.popleft()
    if each in seen:
      continue
    seen.add(each)
    is_low = any(v.is_low for v in (*each.operands, *each.results))
    if is_low and not (each.moves or each.casts):
      return each
    pending += [v.made_by for v in each.operands if v.made_by is not None]
  return None
