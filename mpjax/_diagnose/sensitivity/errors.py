"""The error that each rounding of a program causes in its results.

The program runs in float32. There, a rounding is an identity whose derivative by a factor is the
error of the rounding (`Perturbed`). One backward pass therefore gives the change of the results
that each rounding causes, to first order. It is projected on a few random vectors, because the
whole change is as large as the results, for each rounding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from mpjax._core.errors import REFUSALS
from mpjax._core.trees import low_to_float32
from mpjax._core.types import Array, NumpyArray, PyTree
from mpjax._diagnose.call import compiled_as_written
from mpjax._diagnose.relative_errors import norm_of, relative_error
from mpjax._diagnose.sensitivity.observers import (
  Counted,
  Finite,
  InFloat32,
  Largest,
  Perturbed,
  Recorded,
  Replayed,
  Rounded,
)
from mpjax._diagnose.sensitivity.roundings import Key, Places, Rounding, places_of
from mpjax._jaxpr.in_float32 import is_low, results_widened
from mpjax._jaxpr.primitives import Holds
from mpjax._jaxpr.reader import aval_of, is_inexact_atom
from mpjax._jaxpr.runner import run
from mpjax._jaxpr.steps import Body, Step, body_of, pieces_of

PROJECTIONS = 4
"""Random projections of the results. Each takes the time of two gradients. The contribution of a
rounding is known within 35 %, and that of all of them more exactly."""

_MORE_ROUNDS = 2
"""How often as many projections are added if the prediction differs from the measurement. A single
large rounding changes the results in one direction, which four may be nearly orthogonal to."""

_AGREES = 1.5
"""The ratio of both up to which the first projections are enough."""


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
  wide = _widened(operands)
  loops = [step for step in steps.values() if step.holds is Holds.WHILE]
  bounds = dict[int, int]()
  if loops:
    count = jax.jit(lambda xs: run(body, xs, Counted(loops))[1])
    bounds = {step.number: int(n) for step, n in zip(loops, count(wide), strict=True)}
  kernels = frozenset(number for number, step in steps.items() if step.holds is Holds.KERNEL)
  places = dataclasses.replace(places_of(body, kept, bounds), blocked=kernels)
  try:
    return _measured(body, wide, counted, places, projections)
  except REFUSALS:
    # Some operation cannot be differentiated. Only then each is tried alone.
    refusing = {n for n, step in steps.items() if not _has_derivative(step)}
    if not refusing - kernels:
      raise
    places = dataclasses.replace(places, blocked=kernels | refusing)
    return _measured(body, wide, counted, places, projections)


def _widened(operands: Sequence[Array]) -> list[Array]:
  return [low_to_float32(x) if is_low(x) else jnp.asarray(x) for x in operands]


def _measured(
  body: Body,
  wide: Sequence[Array],
  counted: Mapping[int, int | None],
  places: Places,
  projections: int,
) -> Errors:
  """Runs a program in float32: with all roundings, with their decisions, and backward."""
  factors = {key: jnp.zeros(lengths, jnp.float32) for key, lengths in places.lengths.items()}

  def of_counted(outs: Sequence[Any]) -> list[Array]:
    # A result may be a number of the program.
    return [jnp.asarray(outs[i]) for i in counted]

  @compiled_as_written
  def with_roundings(xs: Sequence[Array]) -> tuple[list[Array], PyTree]:
    outs, decisions = run(body, xs, Recorded(Rounded(places)))
    return of_counted(outs), decisions

  @compiled_as_written
  def with_decisions(xs: Sequence[Array], decisions: PyTree) -> tuple[list[Array], PyTree]:
    outs, shares = run(body, xs, Replayed(InFloat32(places), decisions))
    return of_counted(outs), shares

  @compiled_as_written
  def magnitudes(xs: Sequence[Array]) -> Mapping[Key, Array]:
    return run(body, xs, Largest(places))[1]

  @functools.partial(compiled_as_written, runs_often=True)
  def changes(seed: Array, xs: Sequence[Array]) -> Any:
    """Returns the results, and the mean squared change of them by each rounding.

    The results are divided by the largest of them, since float32 squares have half its range.
    """
    results, pull = jax.vjp(lambda x: of_counted(_run_in_pieces(body, xs, x, places)), factors)
    sizes = [jnp.max(jnp.abs(x), initial=0) for x in results]
    unit = functools.reduce(jnp.maximum, sizes, jnp.finfo(jnp.float32).tiny)

    def projected(key: Array) -> Mapping[Key, Array]:
      (each,) = pull([x / unit for x in _random_like(results, key)])
      # The iterations of a loop round independently, so their changes add as squares.
      return jax.tree.map(lambda x: jnp.sum(x**2), each)

    squares = jax.lax.map(projected, jax.random.split(jax.random.key(seed), projections))
    return results, jax.tree.map(lambda x: jnp.mean(x, axis=0), squares)

  # Several programs, since one would hold the values of all runs at the same time.
  rounded, decisions = with_roundings(wide)
  results, squares = changes(np.uint32(0), wide)
  replayed, shares = with_decisions(wide, decisions) if decisions else (results, {})
  has_float16 = any(each.format.name == "float16" for each in places.roundings.values())
  largest = magnitudes(wide) if has_float16 else {}
  found = results, rounded, replayed, shares, largest, squares
  results, rounded, replayed, shares, largest, squares = jax.device_get(found)

  old = [0.0 if i is None else wide[i] for i in counted.values()]
  # Nothing is an error relative to zeros.
  norm = norm_of(x - y for x, y in zip(results, old, strict=True)) or math.nan
  largest_result = max((float(np.max(np.abs(x), initial=0)) for x in results), default=0.0)
  steps = {step.number: step for step in body.every_step()}
  differing = {number: float(np.mean(x)) for number, x in shares.items()}
  decided = [Decision(steps[number], share) for number, share in differing.items() if share]

  def error(others: Sequence[NumpyArray]) -> float:
    return relative_error((x - z, y - z) for x, y, z in zip(others, results, old, strict=True))

  def errors(squares: Mapping[Key, NumpyArray]) -> Errors:
    roundings = [
      each._replace(
        contribution=math.sqrt(float(np.sum(squares[key]))) * largest_result / norm,
        largest=float(largest.get(key, 0.0)),
      )
      for key, each in places.roundings.items()
    ]
    return Errors(
      tuple(sorted(roundings, key=lambda each: -each.contribution)),
      tuple(sorted(decided, key=lambda each: -each.share)),
      error(replayed) if decided else 0.0,
      error(rounded) if roundings else 0.0,
      results,
      tuple(steps[number] for number in sorted(places.blocked)),
    )

  first = errors(squares)
  low, high = sorted((first.predicted, first.measured))
  if not low or not math.isfinite(high) or high <= _AGREES * low:
    return first
  seeds = [np.uint32(number) for number in range(1, 1 + _MORE_ROUNDS)]
  every = [squares, *(jax.device_get(changes(seed, wide)[1]) for seed in seeds)]
  return errors(jax.tree.map(lambda *each: np.mean(each, axis=0), *every))


_PIECE = 48
"""The steps after which values are kept for the backward pass. Those in between are computed again.

It has 3.2 times the memory of a gradient, and 7.5 times without pieces.
"""


def _run_in_pieces(
  body: Body,
  xs: Sequence[Array],
  factors: Mapping[Key, Array],
  places: Places,
) -> list[Any]:
  """Returns the results of a program, whose backward pass computes parts of it again."""
  env: dict[int, Any] = {**body.consts, **dict(zip(body.inputs, xs, strict=True))}
  for piece in pieces_of(body, _PIECE):
    inside = {step.number for step in piece.every_step()}
    keys = {key for n in inside for key in places.keys.get(n, {}).values()}

    def call(factors: Mapping[Key, Array], values: Sequence[Any], piece: Body = piece) -> list[Any]:
      return run(piece, values, Perturbed(places, factors))[0]

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
  if not (
    any(map(is_inexact_atom, step.eqn.invars)) and any(map(is_inexact_atom, step.eqn.outvars))
  ):
    return True
  types = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in map(aval_of, step.eqn.invars)]
  types = [jax.ShapeDtypeStruct(x.shape, jnp.float32) if is_low(x) else x for x in types]

  def gradient(*operands: Array) -> Any:
    inexact = [i for i, v in enumerate(step.eqn.invars) if is_inexact_atom(v)]

    def total(chosen: Sequence[Array]) -> Array:
      values = [*operands]
      for i, x in zip(inexact, chosen, strict=True):
        values[i] = x
      outs = results_widened(step.eqn, values)
      pairs = zip(outs, step.eqn.outvars, strict=True)
      return jnp.sum(jnp.stack([jnp.sum(jnp.abs(x)) for x, v in pairs if is_inexact_atom(v)]))

    return jax.grad(total)([operands[i] for i in inexact])

  try:
    jax.eval_shape(gradient, *types)
  except REFUSALS:
    return False
  return True


def before_nonfinite(
  program: ClosedJaxpr, operands: Sequence[Array], kept: Callable[[Step], bool]
) -> list[Step]:
  """Returns the steps whose roundings the first value that is not finite is computed from.

  That value is finite in float32, without roundings. The steps are the last ones before it. The
  list is empty if all values are finite, and if the value is in a branch or in a `while`.
  """
  body = body_of(program, compiled=True)
  steps = {step.number: step for step in body.every_step()}
  places = places_of(body, kept, {})
  finite = compiled_as_written(
    lambda xs: [run(body, xs, Finite(kind(places)))[1] for kind in (Rounded, InFloat32)]
  )
  with_roundings, without = jax.device_get(finite(_widened(operands)))
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
