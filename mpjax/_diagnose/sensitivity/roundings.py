"""The roundings of a program: which operations round which of their values, and to what.

The program is traced under its policy, so that the rewriter alone decides what rounds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.types import Array, DType
from mpjax._jaxpr.in_float32 import is_low
from mpjax._jaxpr.primitives import Holds, facts_of
from mpjax._jaxpr.reader import aval_of, dtype_of
from mpjax._jaxpr.steps import Body, Step
from mpjax._matmul.format_rounding import format_of, format_rounding_p, roundoff

Rounds: TypeAlias = Callable[[Array], Array]
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
  rounded: Rounds


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


RESULT = -1
"""Stands for the position of an operand where the results of a step are rounded."""

Key: TypeAlias = tuple[int, int]
"""The number of a step that rounds, and the position of the operand; `RESULT` for its results."""


@dataclasses.dataclass(frozen=True)
class Places:
  """Where a program rounds.

  Attributes:
    roundings: by key. Two casts of one value have the key of the first.
    keys: by the number of a step, the keys of what it rounds: of its results, and of operands.
    lengths: by key, the numbers of iterations of the loops in which the value differs.
    bounds: the numbers of iterations of `while` loops, by the number of the step.
    blocked: the numbers of the steps that have no derivative, so that roundings before them count
      as none.
  """

  roundings: dict[Key, Rounding]
  keys: dict[int, dict[int, Key]]
  lengths: dict[Key, tuple[int, ...]]
  bounds: Mapping[int, int] = dataclasses.field(default_factory=dict)
  blocked: Collection[int] = ()


def places_of(body: Body, kept: Callable[[Step], bool], bounds: Mapping[int, int]) -> Places:
  """Finds the roundings of a program.

  Args:
    body: its steps.
    kept: says which of them are in float32 instead.
    bounds: the numbers of iterations of its `while` loops, by the number of the step.
  """
  finder = _Finder(kept, bounds, _unrounded(body, kept))
  finder.read_body(body, ())
  return finder.places


def _unrounded(body: Body, kept: Callable[[Step], bool]) -> set[int]:
  """Returns the low-precision values that hold float32 numbers because of the kept steps."""
  found, size = set[int](), -1
  # Loops carry values back to their first step, so the steps are read until nothing is added. A
  # carry has one type, so if one iteration returns it in float32, it is in float32 in all.
  while len(found) > size:
    size = len(found)
    for step in body.every_step():
      low = [slot for slot, v in zip(step.outs, step.eqn.outvars, strict=True) if is_low(v.aval)]
      if step.bodies:
        found.update(target for source, target in _links(step) if source in found)
      elif kept(step) or (not found.isdisjoint(step.reads) and not _rounded_by(step, found)[1]):
        found.update(low)
  return found


def _links(step: Step) -> list[tuple[int, int]]:
  """Returns pairs of a value and the one to which a loop or a branch passes it, in or out."""
  links: list[tuple[Any, int]] = []
  inputs: dict[int, list[int]] = {}
  for inner, body in zip(step.inner, step.bodies, strict=True):
    for i, slot in zip(inner.operands or (), body.inputs, strict=False):
      links.append((step.ins[i], slot))
      inputs.setdefault(i, []).append(slot)
  for inner, body in zip(step.inner, step.bodies, strict=True):
    # All bodies take the results of the last iteration, also the condition of a `while`.
    for i, again in zip(inner.carried, body.outputs, strict=False):
      links += [(again, slot) for slot in inputs[i]]
    if inner.returns:
      links += zip(body.outputs, step.outs, strict=True)
  return [(source, target) for source, target in links if isinstance(source, int)]


class _Finder:
  """Reads the steps of a program once, in order, and notes where it rounds."""

  def __init__(
    self, kept: Callable[[Step], bool], bounds: Mapping[int, int], unrounded: Collection[int]
  ) -> None:
    self.kept, self.unrounded = kept, unrounded
    self.places = Places({}, {}, {}, bounds)
    # One value that is cast twice has the same error both times, so it is one rounding. By value
    # and format: the key of the first cast.
    self._casts: dict[tuple[int, str], Key] = {}
    # A loop does not change its constants, such as the weights of a recurrent network, so their
    # rounding is the same in all iterations. By value: the one outside of the loop that it is, and
    # in how many of the loops around it differs.
    self._origins: dict[int, int] = {}
    self._depths: dict[int, int] = {}

  def read_body(self, body: Body, around: tuple[int, ...]) -> None:
    """Notes the roundings of a body; `around` has the iterations of the loops around it."""
    for step in body.steps:
      depth = len(around) if step.bodies else self._depth(step.ins)
      self._depths.update(dict.fromkeys(step.outs, depth))
      if step.bodies:
        self._read_bodies(step, around)
      elif not self.kept(step):
        for operand, format in _rounded_by(step, self.unrounded)[0]:
          self._add(step, operand, format, around)

  def _read_bodies(self, step: Step, around: tuple[int, ...]) -> None:
    """Notes the roundings inside of a step."""
    inside = (*around, *self._iterations(step))
    for inner, body in zip(step.inner, step.bodies, strict=True):
      self._depths.update(dict.fromkeys(body.inputs, len(inside)))
      # The constants of a loop come before its carry.
      for slot, i in zip(body.inputs, (inner.operands or ())[: inner.carry.start], strict=False):
        outside = step.ins[i]
        self._depths[slot] = self._depth([outside])
        if isinstance(outside, int):
          self._origins[slot] = self._origins.get(outside, outside)
      self.read_body(body, inside)

  def _iterations(self, step: Step) -> tuple[int, ...]:
    """Returns the number of iterations of a loop; () for a step that runs its bodies once."""
    if step.holds is Holds.SCAN:
      return (step.inner[0].times or 0,)
    bounds = self.places.bounds
    return (bounds[step.number],) if step.number in bounds else ()

  def _add(self, step: Step, operand: int, format: Format, around: tuple[int, ...]) -> None:
    """Notes a rounding of an operand, or of the results."""
    key = (step.number, operand)
    is_cast = operand == RESULT and step.eqn.primitive is p.convert_element_type_p
    slot = step.ins[0 if is_cast else operand] if step.ins else None
    if isinstance(slot, int) and (is_cast or operand != RESULT):
      key = self._casts.setdefault((self._origins.get(slot, slot), format.name), key)
    self.places.keys.setdefault(step.number, {})[operand] = key
    if key not in self.places.roundings:
      self.places.roundings[key] = Rounding(step, operand, format)
      depth = self._depth(step.ins if operand == RESULT else [slot])
      self.places.lengths[key] = around[:depth]

  def _depth(self, slots: Iterable[Any]) -> int:
    """Returns in how many of the loops around it something computed from these values differs."""
    return max((self._depths.get(slot, 0) for slot in slots if isinstance(slot, int)), default=0)


def _rounded_by(step: Step, unrounded: Collection[int]) -> tuple[list[tuple[int, Format]], bool]:
  """Returns what a step rounds, and whether its results are rounded then.

  Args:
    step: a step without bodies.
    unrounded: the low-precision values that hold float32 numbers. Literals and constants are
      never among them.

  Returns:
    The positions of what it rounds, with the formats, and whether each result is a number of its
    own format.
  """
  facts, is_cast = facts_of(step.eqn), step.eqn.primitive is p.convert_element_type_p
  wide = [i for i, slot in enumerate(step.ins) if isinstance(slot, int) and slot in unrounded]
  # The results are numbers of the format of the operands.
  if not is_cast and (facts.moves or facts.exact or facts.keeps_numbers):
    return [], not wide
  widens = is_cast and _widens(step)
  # With an operand in float32, the rules of a policy make all but a matmul float32 too.
  if wide and facts.flops is None and (widens or not is_cast):
    return [], False
  added = [(i, _format(dtype_of(step.eqn.invars[i]))) for i in wide]
  if step.eqn.primitive is format_rounding_p:
    rounded = functools.partial(format_rounding_p.bind, **step.eqn.params)
    added.append((RESULT, Format(*format_of(step.eqn), math.inf, rounded)))
  elif not widens:
    low = [dtype_of(v) for v in step.eqn.outvars if is_low(v.aval)]
    added += [(RESULT, _format(dtype)) for dtype in low[:1]]
  return added, True


@functools.cache
def _format(dtype: DType) -> Format:
  """Returns the format of a dtype, to which a cast rounds."""
  largest = float(jnp.finfo(dtype).max)
  return Format(dtype.name, roundoff(dtype), largest, lambda x: x.astype(dtype).astype(x.dtype))


def _widens(step: Step) -> bool:
  """Whether a cast loses nothing: from low precision to a dtype that holds its numbers."""
  before, after = aval_of(step.eqn.invars[0]), aval_of(step.eqn.outvars[0])
  if not is_low(before) or not jnp.issubdtype(after.dtype, jnp.floating):
    return False
  narrow, wide = jnp.finfo(before.dtype), jnp.finfo(after.dtype)
  holds_small = narrow.minexp - narrow.nmant >= wide.minexp - wide.nmant
  return narrow.nmant <= wide.nmant and narrow.maxexp <= wide.maxexp and holds_small
