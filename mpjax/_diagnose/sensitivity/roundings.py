"""The roundings of a program, and the error that each of them causes in its results.

The program is traced under its policy, so that the rewriter alone decides what rounds, and runs in
float32. There, a rounding is an identity whose derivative by a factor, which is 0, is the error of
the rounding. One backward pass therefore gives the change of the results that each rounding causes,
to first order. It is projected on a few random vectors, because the whole change is as large as the
results, for each rounding.

Comparisons and indices have no derivative. They are measured: once with all roundings made, and
once in float32 with the decisions of that run.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.core import primitives as p

from mpjax._core.errors import REFUSALS
from mpjax._core.trees import low_to_float32
from mpjax._core.types import Array, DType, NumpyArray, PyTree
from mpjax._diagnose.call import compiled_as_written
from mpjax._diagnose.relative_errors import norm_of, relative_error
from mpjax._jaxpr.compat import varying_axes
from mpjax._jaxpr.in_float32 import is_low, results_widened
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of
from mpjax._jaxpr.runner import Enclosing, Observer, run, run_step
from mpjax._jaxpr.steps import Body, Step, body_of, pieces_of
from mpjax._matmul.format_rounding import format_of, format_rounding_p, roundoff
from mpjax._optim.scaled import AS_COMPUTED

PROJECTIONS = 4
"""Random projections of the results. Each takes the time of two gradients. The contribution of a
rounding is known within 35 %, and that of all of them more exactly."""

_MORE_ROUNDS = 2
"""How often as many projections are added if the prediction differs from the measurement. A single
large rounding changes the results in one direction, which four may be nearly orthogonal to."""

_AGREES = 1.5
"""The ratio of both up to which the first projections are enough."""


Rounded: TypeAlias = "Callable[[Array], Array]"
"""A function that returns a float32 array in the numbers of a format."""


class Format(NamedTuple):
  """A low-precision format.

  Fields:
    name: its name.
    roundoff: the relative error of a rounding to it, as a mean.
    largest: its largest number; inf if values are scaled to fit.
    rounded: rounds to it.
  """

  name: str
  roundoff: float
  largest: float
  rounded: Rounded


class Rounding(NamedTuple):
  """A rounding to low precision.

  Fields:
    step: the operation whose result is rounded, or that rounds an operand.
    operand: the position of that operand; `RESULT` if a result is rounded.
    format: the format.
    contribution: the norm of the change of the results that it causes, over the norm of these.
    largest: the largest magnitude before rounding; 0 where it is not measured.
  """

  step: Step
  operand: int
  format: Format
  contribution: float = 0.0
  largest: float = 0.0

  @property
  def amplification(self) -> float:
    """The contribution over the error of one rounding, which is uniform up to half a step."""
    return self.contribution / self.format.roundoff

  @property
  def overflows(self) -> bool:
    return self.largest > self.format.largest


class Decision(NamedTuple):
  """A comparison, an index or an integer that is computed from floating numbers.

  Fields:
    step: the operation.
    share: the share of its results that rounding changes, from 0 to 1.
  """

  step: Step
  share: float


class Errors(NamedTuple):
  """The errors that the roundings of a program cause in its results.

  Fields:
    roundings: all roundings. The largest contribution comes first.
    decisions: those that differ, by share.
    by_decisions: the relative change of the results from all these decisions together.
    measured: the relative error of the results with all roundings made; inf if not finite.
      Errors are NaN or inf if the results, or the changes, are zero.
    results: the floating results in float32.
    not_followed: the operations that cannot be differentiated. Roundings before them count as none.
  """

  roundings: tuple[Rounding, ...]
  decisions: tuple[Decision, ...]
  by_decisions: float
  measured: float
  results: list[NumpyArray]
  not_followed: tuple[Step, ...]

  @property
  def predicted(self) -> float:
    """The relative error of the results that the roundings and decisions cause together."""
    # Roundings are independent, so their errors add as squares.
    squares = sum(each.contribution**2 for each in self.roundings)
    return math.sqrt(squares + self.by_decisions**2)


@functools.cache
def _format(dtype: DType) -> Format:
  """Returns the format of a dtype, to which a cast rounds."""
  largest = float(jnp.finfo(dtype).max)
  return Format(dtype.name, roundoff(dtype), largest, lambda x: x.astype(dtype).astype(x.dtype))


RESULT = -1
"""Stands for the position of an operand where the results of a step are rounded."""

Key: TypeAlias = tuple[int, int]
"""The number of a step that rounds, and the position of the operand; `RESULT` for its results."""


@dataclasses.dataclass(frozen=True)
class _Places:
  """Where a program rounds.

  Attributes:
    roundings: by key. Two casts of one value have the key of the first.
    keys: by the number of a step, the keys of what it rounds: of its results, and of operands.
    lengths: by key, the numbers of iterations of the loops in which the value differs.
  """

  roundings: dict[Key, Rounding]
  keys: dict[int, dict[int, Key]]
  lengths: dict[Key, tuple[int, ...]]


def _places(body: Body, kept: Collection[int], bounds: Mapping[int, int]) -> _Places:
  """Finds the roundings of a program, in which the steps `kept` are in float32.

  `bounds` has the numbers of iterations of its `while` loops, by the number of the step.
  """
  places = _Places({}, {}, {})
  casts: dict[tuple[int, str], Key] = {}
  # A loop does not change its constants, such as the weights of a recurrent network, so their
  # rounding is the same in all iterations. By value: the one outside of the loop that it is, and in
  # how many of the loops around it differs.
  origins: dict[int, int] = {}
  depths: dict[int, int] = {}

  def depth_of(slots: Iterable[Any]) -> int:
    return max((depths.get(slot, 0) for slot in slots if isinstance(slot, int)), default=0)

  def add(step: Step, operand: int, format: Format, around: tuple[int, ...]) -> None:
    key = (step.number, operand)
    is_cast = operand == RESULT and step.eqn.primitive is p.convert_element_type_p
    slot = step.ins[0 if is_cast else operand] if step.ins else None
    # One value that is cast twice has the same error both times, so it is one rounding.
    if isinstance(slot, int) and (is_cast or operand != RESULT):
      key = casts.setdefault((origins.get(slot, slot), format.name), key)
    places.keys.setdefault(step.number, {})[operand] = key
    if key not in places.roundings:
      places.roundings[key] = Rounding(step, operand, format)
      places.lengths[key] = around[: depth_of(step.ins if operand == RESULT else [slot])]

  def walk(body: Body, exact: Mapping[int, bool], around: tuple[int, ...]) -> list[bool]:
    """Adds the roundings of a body, and returns which of its results are rounded already."""
    # By value: whether it is a number of its own low-precision format.
    rounded = dict(exact)
    for step in body.steps:
      depths.update(dict.fromkeys(step.outs, len(around) if step.bodies else depth_of(step.ins)))
      of_ins = [not isinstance(x, int) or rounded.get(x, True) for x in step.ins]
      if step.bodies:
        length = _iterations_of(step, bounds)
        results: list[list[bool]] = []
        for inner, each in zip(step.inner, step.bodies, strict=True):
          taken = [of_ins[i] for i in inner.operands or ()]
          # A carry is a number of its format if it is one in each iteration.
          inside = dict(zip(each.inputs, taken, strict=False))
          depths.update(dict.fromkeys(each.inputs, len(around) + len(length)))
          # The constants of a loop come before its carry.
          outer = [step.ins[i] for i in inner.operands or ()][: inner.carry.start]
          for slot, x in zip(each.inputs, outer, strict=False):
            depths[slot] = depth_of([x])
            if isinstance(x, int):
              origins[slot] = origins.get(x, x)
          results.append(walk(each, inside, (*around, *length)))
        returned = [x for x, inner in zip(results, step.inner, strict=True) if inner.returns]
        outs = [all(x) for x in zip(*returned, strict=True)]
      elif step.number in kept:
        outs = [False] * len(step.outs)
      elif _is_exact(step):
        outs = [all(of_ins)] * len(step.outs)
      else:
        is_cast = step.eqn.primitive is p.convert_element_type_p
        unrounded = [
          i
          for i, (v, is_rounded) in enumerate(zip(step.eqn.invars, of_ins, strict=True))
          if is_low(v.aval) and not is_rounded
        ]
        multiplies = facts_of(step.eqn).flops is not None
        if unrounded and not multiplies and (not is_cast or _widens(step)):
          # With an operand in float32, the rules of a policy make all but a matmul float32 too.
          rounded.update(dict.fromkeys(step.outs, False))
          continue
        for i in unrounded:
          add(step, i, _format(dtype_of(step.eqn.invars[i])), around)
        format = _format_of_results(step)
        if format is not None and not (is_cast and _widens(step)):
          add(step, RESULT, format, around)
        outs = [True] * len(step.outs)
      rounded.update(zip(step.outs, outs, strict=True))
    return [not isinstance(x, int) or rounded.get(x, True) for x in body.outputs]

  walk(body, {}, ())
  return places


def _iterations_of(step: Step, bounds: Mapping[int, int]) -> tuple[int, ...]:
  if step.holds is Holds.SCAN:
    return (step.inner[0].times or 0,)
  return (bounds[step.number],) if step.number in bounds else ()


def _format_of_results(step: Step) -> Format | None:
  """Returns the format that the results of a step are rounded to; None if to none."""
  if step.eqn.primitive is format_rounding_p:
    rounded = functools.partial(format_rounding_p.bind, **step.eqn.params)
    return Format(*format_of(step.eqn), math.inf, rounded)
  return next((_format(dtype_of(v)) for v in step.eqn.outvars if is_low(v.aval)), None)


def _widens(step: Step) -> bool:
  """Whether a cast loses nothing: from low precision to a dtype that holds its numbers."""
  before, after = aval_of(step.eqn.invars[0]), aval_of(step.eqn.outvars[0])
  if not is_low(before) or not jnp.issubdtype(after.dtype, jnp.floating):
    return False
  narrow, wide = jnp.finfo(before.dtype), jnp.finfo(after.dtype)
  holds_small = narrow.minexp - narrow.nmant >= wide.minexp - wide.nmant
  return narrow.nmant <= wide.nmant and narrow.maxexp <= wide.maxexp and holds_small


def _is_exact(step: Step) -> bool:
  """Whether the results of a step are numbers of the format of its operands."""
  facts = facts_of(step.eqn)
  is_cast = step.eqn.primitive is p.convert_element_type_p
  return not is_cast and (facts.moves or facts.exact or facts.keeps_numbers)


def _decides(step: Step) -> bool:
  """Whether a step has results without a derivative that depend on floating operands."""
  if step.bodies or not any(map(_is_inexact, step.eqn.invars)):
    return False
  # The pivots of a factorization belong to the factors that are returned with them.
  if facts_of(step.eqn).role == "linear algebra":
    return False
  return step.eqn.primitive in _STEPS or not all(map(_is_inexact, step.eqn.outvars))


_STEPS = frozenset((p.floor_p, p.ceil_p, p.round_p, p.sign_p))
"""Functions that are constant between steps."""


def _is_inexact(atom: Any) -> bool:
  dtype = dtype_of(atom)
  return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


# Runs in float32.


class _InFloat32(Observer):
  """Runs a program in float32."""

  def __init__(self, places: _Places, blocked: Collection[int]) -> None:
    self.places, self.blocked = places, blocked

  def rounded(self, key: Key, x: Array) -> Array:
    """Returns what the program goes on with where a value is rounded."""
    return x

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    keys = self.places.keys.get(step.number, {})
    wide = [low_to_float32(x) if is_low(x) else x for x in ins]
    for i, key in keys.items():
      if i != RESULT:
        wide[i] = self.rounded(key, wide[i])
    # For the backward pass of a loss it is a constant, and its roundings change the loss.
    if step.eqn.primitive is p.stop_gradient_p:
      return wide
    if step.eqn.primitive is format_rounding_p:
      return [self.rounded(keys[RESULT], *wide)] if RESULT in keys else wide
    if step.number in self.blocked:
      wide = [*map(jax.lax.stop_gradient, wide)]
    if (computed := AS_COMPUTED.get(step.eqn.primitive)) is not None:
      return [computed(*wide, **step.eqn.params)]
    outs = results_widened(step.eqn, wide)
    if RESULT not in keys:
      return [*outs]
    low = zip(outs, step.eqn.outvars, strict=True)
    return [self.rounded(keys[RESULT], x) if is_low(v.aval) else x for x, v in low]


class _Rounded(_InFloat32):
  """Makes all roundings."""

  def rounded(self, key: Key, x: Array) -> Array:
    return self.places.roundings[key].format.rounded(x)


class _Largest(_InFloat32):
  """Notes the largest finite magnitude of each value that is rounded to float16."""

  def nothing(self) -> dict[Key, Array]:
    roundings = self.places.roundings.items()
    return {key: jnp.float32(0) for key, each in roundings if each.format.name == "float16"}

  def rounded(self, key: Key, x: Array) -> Array:
    if key in self.seen:
      magnitudes = jnp.abs(jnp.where(jnp.isfinite(x), x, 0)).astype(jnp.float32)
      self.seen[key] = jnp.maximum(self.seen[key], jnp.max(magnitudes, initial=0))
    return x

  def merge(self, one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(jnp.maximum, one, other)

  def of_devices(self, seen: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.max(x, axis=0), seen)


class _Recorded(_InFloat32):
  """Notes the decisions of another run, by the number of their step.

  The iterations of a `while`, branches and devices are not observed.
  """

  merges: ClassVar[bool] = False

  def __init__(self, unobserved: _InFloat32) -> None:
    super().__init__(unobserved.places, unobserved.blocked)
    self.unobserved = unobserved

  def rounded(self, key: Key, x: Array) -> Array:
    return self.unobserved.rounded(key, x)

  def nothing(self) -> dict[int, Any]:
    return {}

  def inside(self, seen: Mapping[int, Any]) -> None:
    self.seen.update(seen)

  def of_devices(self, seen: PyTree) -> PyTree:
    return self.nothing()

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    if step.bodies:
      return run_step(step, ins, self.unobserved)
    outs = super().results_of(step, ins)
    return self.decide(step, outs) if _decides(step) else outs

  def decide(self, step: Step, outs: list[Any]) -> list[Any]:
    self.seen[step.number] = outs
    return outs


class _Replayed(_Recorded):
  """Takes the decisions of another run, and notes the share that differs."""

  def __init__(self, unobserved: _InFloat32, decisions: Mapping[int, list[Array]]) -> None:
    super().__init__(unobserved)
    self.decisions = decisions

  def slices(self, step: Step) -> Mapping[int, list[Array]]:
    inside = {each.number for body in step.bodies for each in body.every_step()}
    return {number: x for number, x in self.decisions.items() if number in inside}

  def in_iteration(self, slices: Mapping[int, list[Array]]) -> Self:
    one = copy.copy(self)
    one.decisions = {**self.decisions, **slices}
    return one

  def decide(self, step: Step, outs: list[Any]) -> list[Any]:
    if step.number not in self.decisions:
      return outs
    # Sorting returns values beside the indices. They differ by their rounding alone.
    counts = [not _is_inexact(v) or step.eqn.primitive in _STEPS for v in step.eqn.outvars]
    others = self.decisions[step.number]
    differ = [a != b for a, b, counted in zip(outs, others, counts, strict=True) if counted]
    shares = [jnp.mean(x, dtype=jnp.float32) for x in differ if x.size]
    self.seen[step.number] = functools.reduce(jnp.maximum, shares, jnp.float32(0))
    return [b if counted else a for a, b, counted in zip(outs, others, counts, strict=True)]


class _Perturbed(_InFloat32):
  """Makes each rounding a change in proportion to its factor."""

  def __init__(
    self,
    places: _Places,
    blocked: Collection[int],
    factors: Mapping[Key, Array],
    bounds: Mapping[int, int],
  ) -> None:
    super().__init__(places, blocked)
    self.factors, self.bounds = factors, bounds

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    facts = facts_of(step.eqn)
    # The derivatives of a move and of a matmul are finite.
    if not (facts.moves or facts.flops or step.eqn.primitive is p.convert_element_type_p):
      pairs = zip(ins, step.eqn.invars, strict=True)
      ins = [_with_finite_cotangent(x) if _is_inexact(v) else x for x, v in pairs]
    return super().results_of(step, ins)

  def bound(self, step: Step) -> int | None:
    return self.bounds.get(step.number)

  def slices(self, step: Step) -> Mapping[Key, Array]:
    steps = (each for body in step.bodies for each in body.every_step())
    inside = {key for each in steps for key in self.places.keys.get(each.number, {}).values()}
    # A value that is the same in all iterations has one factor, and each device needs all of them.
    on_devices = step.holds is Holds.SHARD_MAP
    return {key: self.factors[key] for key in inside if on_devices or self.factors[key].ndim}

  def in_iteration(self, slices: Mapping[Key, Array]) -> Self:
    one = copy.copy(self)
    one.factors = {**self.factors, **slices}
    return one

  def rounded(self, key: Key, x: Array) -> Array:
    factor = self.factors[key]
    # Each device of a `shard_map` has a part of the error, and their sum is the change.
    own = varying_axes(jax.typeof(factor))
    axes = tuple(axis for axis in varying_axes(jax.typeof(x)) if axis not in own)
    varying = jax.lax.pcast(factor, axes, to="varying") if axes else factor
    return _moved(self.places.roundings[key].format.rounded, x, varying)


class _Counted(_InFloat32):
  """Notes the most iterations of each `while`, by its position among those of a program."""

  def __init__(self, loops: Sequence[Step]) -> None:
    super().__init__(_Places({}, {}, {}), ())
    # The condition and the body of a loop are its bodies, and the body runs as often as it goes on.
    self.loops = {id(step.bodies[1]): i for i, step in enumerate(loops)}

  def nothing(self) -> Array:
    return jnp.zeros(len(self.loops), jnp.int32)

  def begin(self, body: Body, values: Sequence[Any], enclosing: Enclosing) -> None:
    if id(body) in self.loops:
      self.seen = self.seen.at[self.loops[id(body)]].max(enclosing.indices[-1] + 1)

  def merge(self, one: Array, other: Array) -> Array:
    return jnp.maximum(one, other)

  def of_devices(self, seen: Array) -> Array:
    return jnp.max(seen, axis=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _moved(rounded: Rounded, x: Array, factor: Array) -> Array:
  """Returns `x + factor * (rounded(x) - x)` at a factor of 0."""
  return x


def _moved_forward(rounded: Rounded, x: Array, factor: Array) -> tuple[Array, Array]:
  return x, x


def _moved_backward(rounded: Rounded, x: Array, cotangent: Array) -> tuple[Array, Array]:
  # The error is computed again here, so that no rounding needs memory of its own: other operations
  # keep the value anyway. It is infinite for an overflow, which is reported by itself.
  error = rounded(x) - x
  changes = cotangent * jnp.where(jnp.isfinite(error), error, 0)
  return cotangent, jnp.sum(changes).astype(jnp.float32)


_moved.defvjp(_moved_forward, _moved_backward)


@jax.custom_vjp
def _with_finite_cotangent(x: Array) -> Array:
  """Returns a value whose infinite derivatives count as 0, such as that of a square root at 0.

  They say nothing to first order, and their product with 0 is NaN. Adam takes the square root of 0
  where a parameter has had no gradient yet.
  """
  return x


_with_finite_cotangent.defvjp(
  lambda x: (x, None), lambda _, cotangent: (jnp.where(jnp.isfinite(cotangent), cotangent, 0),)
)


# The errors.


def errors_of(
  program: ClosedJaxpr,
  operands: Sequence[Array],
  counted: Mapping[int, int | None],
  kept: Callable[[Step], bool] = lambda step: False,
  projections: int = PROJECTIONS,
) -> Errors:
  """Returns the errors that the roundings of a program cause in its results.

  Args:
    program: a function that was traced under its policy.
    operands: its arguments.
    counted: the positions of the floating results that count. If a result is the new version of an
      argument, its errors are relative to the change, and the value is the position of that.
    kept: says which operations are in float32 instead.
    projections: the number of random projections of the results.
  """
  body = body_of(program, compiled=True)
  steps = {step.number: step for step in body.every_step()}
  in_float32 = frozenset(number for number, step in steps.items() if kept(step))
  wide = [low_to_float32(x) if is_low(x) else jnp.asarray(x) for x in operands]
  loops = [step for step in steps.values() if step.holds is Holds.WHILE]
  bounds = dict[int, int]()
  if loops:
    count = jax.jit(lambda xs: run(body, xs, _Counted(loops))[1])
    bounds = {step.number: int(n) for step, n in zip(loops, count(wide), strict=True)}
  places = _places(body, in_float32, bounds)
  blocked = frozenset(number for number, step in steps.items() if step.holds is Holds.KERNEL)
  try:
    found = _measured(body, wide, [*counted], places, blocked, bounds, projections)
  except REFUSALS:
    # Some operation cannot be differentiated. Only then each is tried alone.
    refusing = {n for n, step in steps.items() if not _has_derivative(step)}
    if not refusing - blocked:
      raise
    blocked |= refusing
    found = _measured(body, wide, [*counted], places, blocked, bounds, projections)
  results = found.results
  old = [0.0 if i is None else wide[i] for i in counted.values()]
  # Nothing is an error relative to zeros.
  norm = norm_of(x - y for x, y in zip(results, old, strict=True)) or math.nan

  def error(others: Sequence[NumpyArray]) -> float:
    return relative_error((x - z, y - z) for x, y, z in zip(others, results, old, strict=True))

  shares = {number: float(np.mean(x)) for number, x in found.shares.items()}
  decisions = [Decision(steps[number], share) for number, share in shares.items() if share]

  largest = max((float(np.max(np.abs(x), initial=0)) for x in results), default=0.0)

  def errors(squares: Mapping[Key, NumpyArray]) -> Errors:
    roundings = [
      each._replace(
        contribution=math.sqrt(float(np.sum(squares[key]))) * largest / norm,
        largest=float(found.largest.get(key, 0.0)),
      )
      for key, each in places.roundings.items()
    ]
    return Errors(
      tuple(sorted(roundings, key=lambda each: -each.contribution)),
      tuple(sorted(decisions, key=lambda each: -each.share)),
      error(found.replayed) if decisions else 0.0,
      error(found.rounded) if roundings else 0.0,
      results,
      tuple(steps[number] for number in sorted(blocked)),
    )

  first = errors(found.squares)
  low, high = sorted((first.predicted, first.measured))
  if not low or not math.isfinite(high) or high <= _AGREES * low:
    return first
  every = [found.squares, *map(found.squares_of_round, range(1, 1 + _MORE_ROUNDS))]
  return errors(jax.tree.map(lambda *each: np.mean(each, axis=0), *every))


def before_nonfinite(
  program: ClosedJaxpr, operands: Sequence[Array], kept: Callable[[Step], bool]
) -> list[Step]:
  """Returns the steps whose roundings the first value that is not finite is computed from.

  That value is finite in float32, without roundings. The steps are the last ones before it. The
  list is empty if all values are finite, and if the value is in a branch or in a `while`.
  """
  body = body_of(program, compiled=True)
  steps = {step.number: step for step in body.every_step()}
  in_float32 = frozenset(number for number, step in steps.items() if kept(step))
  wide = [low_to_float32(x) if is_low(x) else jnp.asarray(x) for x in operands]
  places = _places(body, in_float32, {})
  finite = compiled_as_written(
    lambda xs: [run(body, xs, _Finite(kind(places, ())))[1] for kind in (_Rounded, _InFloat32)]
  )
  with_roundings, without = jax.device_get(finite(wide))
  broken = [n for n in with_roundings if not np.all(with_roundings[n]) and np.all(without[n])]
  if not broken:
    return []
  # The steps of all lists, by the values that they compute.
  made_by = {slot: step for step in steps.values() for slot in step.outs}
  found: dict[int, Step] = {}
  waiting = [steps[min(broken)]]
  seen = set[int]()
  while waiting:
    step = waiting.pop()
    if step.number in seen:
      continue
    seen.add(step.number)
    if step.number in places.keys:
      found[step.number] = step
      # A rounding of the result comes after the operation, and may not be what broke it.
      if step.number != min(broken):
        continue
    waiting += [made_by[slot] for slot in step.reads if slot in made_by]
  return [*found.values()]


class _Finite(_Recorded):
  """Notes whether the results of each step are finite."""

  def results_of(self, step: Step, ins: Sequence[Any]) -> list[Any]:
    outs = super().results_of(step, ins)
    inexact = [x for x, v in zip(outs, step.eqn.outvars, strict=True) if _is_inexact(v)]
    if inexact:
      self.seen[step.number] = jnp.stack([jnp.all(jnp.isfinite(x)) for x in inexact])
    return outs

  def decide(self, step: Step, outs: list[Any]) -> list[Any]:
    return outs


class _Found(NamedTuple):
  """What a program returned in float32.

  Fields:
    results: its results that count.
    rounded: these with all roundings.
    replayed: these with the decisions of the program with roundings.
    shares: the shares of the decisions that differ, by the number of the step.
    largest: the largest magnitudes of what is rounded to float16.
    squares: the mean squared change of the results by each rounding, from the first projections.
      The results are divided by the largest of them, since float32 squares have half its range.
    squares_of_round: returns that from other projections, by their number.
  """

  results: list[NumpyArray]
  rounded: list[NumpyArray]
  replayed: list[NumpyArray]
  shares: Mapping[int, NumpyArray]
  largest: Mapping[Key, NumpyArray]
  squares: Mapping[Key, NumpyArray]
  squares_of_round: Callable[[int], Mapping[Key, NumpyArray]]


def _measured(
  body: Body,
  wide: Sequence[Array],
  positions: Sequence[int],
  places: _Places,
  blocked: Collection[int],
  bounds: Mapping[int, int],
  projections: int,
) -> _Found:
  """Runs a program in float32: with all roundings, with their decisions, and backward."""
  factors = {key: jnp.zeros(lengths, jnp.float32) for key, lengths in places.lengths.items()}

  def counted(outs: Sequence[Any]) -> list[Array]:
    # A result may be a number of the program.
    return [jnp.asarray(outs[i]) for i in positions]

  @compiled_as_written
  def with_roundings(xs: Sequence[Array]) -> tuple[list[Array], PyTree]:
    outs, decisions = run(body, xs, _Recorded(_Rounded(places, blocked)))
    return counted(outs), decisions

  @compiled_as_written
  def with_decisions(xs: Sequence[Array], decisions: PyTree) -> tuple[list[Array], PyTree]:
    outs, shares = run(body, xs, _Replayed(_InFloat32(places, blocked), decisions))
    return counted(outs), shares

  @compiled_as_written
  def magnitudes(xs: Sequence[Array]) -> Mapping[Key, Array]:
    return run(body, xs, _Largest(places, blocked))[1]

  @functools.partial(compiled_as_written, runs_often=True)
  def changes(seed: Array, xs: Sequence[Array]) -> Any:
    observer = functools.partial(_Perturbed, places, blocked, bounds=bounds)
    results, pull = jax.vjp(
      lambda x: counted(_run_in_pieces(body, xs, x, places, observer)), factors
    )

    magnitudes = [jnp.max(jnp.abs(x), initial=0) for x in results]
    largest = functools.reduce(jnp.maximum, magnitudes, jnp.finfo(jnp.float32).tiny)

    def projected(key: Array) -> Mapping[Key, Array]:
      (each,) = pull([x / largest for x in _random_like(results, key)])
      # The iterations of a loop round independently, so their changes add as squares.
      return jax.tree.map(lambda x: jnp.sum(x**2), each)

    squares = jax.lax.map(projected, jax.random.split(jax.random.key(seed), projections))
    return results, jax.tree.map(lambda x: jnp.mean(x, axis=0), squares)

  def squares_of_round(number: int) -> Mapping[Key, NumpyArray]:
    return jax.device_get(changes(np.uint32(number), wide)[1])

  # Several programs, since one would hold the values of all runs at the same time.
  rounded, decisions = with_roundings(wide)
  results, squares = changes(np.uint32(0), wide)
  replayed, shares = with_decisions(wide, decisions) if decisions else (results, {})
  has_float16 = any(each.format.name == "float16" for each in places.roundings.values())
  largest = magnitudes(wide) if has_float16 else {}
  found = results, rounded, replayed, shares, largest, squares
  return _Found(*jax.device_get(found), squares_of_round=squares_of_round)


_PIECE = 48
"""The steps after which values are kept for the backward pass. Those in between are computed again.

It has 3.2 times the memory of a gradient, and 7.5 times without pieces.
"""


def _run_in_pieces(
  body: Body,
  xs: Sequence[Array],
  factors: Mapping[Key, Array],
  places: _Places,
  observer: Callable[[Mapping[Key, Array]], Observer],
) -> list[Any]:
  """Returns the results of a program, whose backward pass computes parts of it again."""
  env: dict[int, Any] = {**body.consts, **dict(zip(body.inputs, xs, strict=True))}
  for piece in pieces_of(body, _PIECE):
    inside = {step.number for step in piece.every_step()}
    keys = {key for n in inside for key in places.keys.get(n, {}).values()}

    def call(factors: Mapping[Key, Array], values: Sequence[Any], piece: Body = piece) -> list[Any]:
      return run(piece, values, observer(factors))[0]

    has_effects = any(step.eqn.effects for step in piece.every_step())
    run_piece = call if has_effects else jax.checkpoint(call)
    outs = run_piece({key: factors[key] for key in keys}, [env[slot] for slot in piece.inputs])
    # A piece returns no literals.
    pairs = zip(piece.outputs, outs, strict=True)
    env.update((slot, x) for slot, x in pairs if isinstance(slot, int))
  return [slot.val if isinstance(slot, Literal) else env[slot] for slot in body.outputs]


def _random_like(arrays: Sequence[Array], key: Array) -> list[Array]:
  """Returns normal numbers, whose product with an error has the length of the error as a mean."""
  keys = (jax.random.fold_in(key, i) for i in range(len(arrays)))
  draws = [jax.random.normal(each, x.shape, x.dtype) for each, x in zip(keys, arrays, strict=True)]
  # The variance of a complex normal number is 1 too, and only its real part counts.
  draws = [x * math.sqrt(2) if jnp.iscomplexobj(x) else x for x in draws]
  # With explicit axes, the sharding is part of the type, so take it from the results.
  return [0 * x + draw for x, draw in zip(arrays, draws, strict=True)]


def _has_derivative(step: Step) -> bool:
  """Whether the results of a step have a backward pass by its floating operands."""
  # A collective cannot run outside of its devices. The bodies of a loop are steps of their own.
  on_devices = any(each.holds is Holds.SHARD_MAP for each in step.enclosing())
  if step.bodies or on_devices:
    return True
  if not (any(map(_is_inexact, step.eqn.invars)) and any(map(_is_inexact, step.eqn.outvars))):
    return True
  types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in map(aval_of, step.eqn.invars)]
  types = [jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_low(x) else x for x in types]

  def gradient(*operands: Array) -> Any:
    inexact = [i for i, v in enumerate(step.eqn.invars) if _is_inexact(v)]

    def total(chosen: Sequence[Array]) -> Array:
      values = [*operands]
      for i, x in zip(inexact, chosen, strict=True):
        values[i] = x
      outs = results_widened(step.eqn, values)
      pairs = zip(outs, step.eqn.outvars, strict=True)
      return jnp.sum(jnp.stack([jnp.sum(jnp.abs(x)) for x, v in pairs if _is_inexact(v)]))

    return jax.grad(total)([operands[i] for i in inexact])

  try:
    jax.eval_shape(gradient, *types)
  except REFUSALS:
    return False
  return True
