"""A jaxpr as a list of steps: calls are written out, loops and branches hold lists of their own.

Values have numbers instead of variables: a function that is called twice has one jaxpr, and its
values are not the same in both calls.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from mpjax._core.types import Array
from mpjax._jaxprs.atoms import Atom, shape_of
from mpjax._jaxprs.inner_jaxprs import Inner, inner_jaxprs
from mpjax._jaxprs.locations import Location, location
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of

Slot: TypeAlias = int | Literal
"""A value: its number, or what it is."""

_CALLS = frozenset(
  (Holds.CALL, Holds.COMPOSITE, Holds.CUSTOM_JVP, Holds.CUSTOM_VJP, Holds.CUSTOM_VMAP)
) | {Holds.LINEAR_CALL}
_NESTED = frozenset((Holds.SCAN, Holds.WHILE, Holds.COND, Holds.SHARD_MAP))


class Step(NamedTuple):
  """An equation that runs as it is, or a loop, a branch or a map over devices.

  Fields:
    number: counts in the order of execution; those inside a loop come after that of the loop.
    eqn: the equation.
    ins: its operands.
    outs: its results.
    around: where the call is that it was written in.
    inner: what `inner_jaxprs` says of a loop and the like; () of what runs as it is.
    bodies: the jaxprs of `inner`, as lists of steps.
  """

  number: int
  eqn: JaxprEqn
  ins: tuple[Slot, ...]
  outs: tuple[int, ...]
  around: Location
  inner: tuple[Inner, ...] = ()
  bodies: tuple["Body", ...] = ()

  @property
  def holds(self) -> Holds | None:
    """How it runs its inner lists."""
    return facts_of(self.eqn).holds

  @property
  def reads(self) -> tuple[int, ...]:
    """The numbers of its operands, those that are no literals."""
    return tuple(slot for slot in self.ins if isinstance(slot, int))

  @property
  def location(self) -> Location:
    """Where it is."""
    return location(self.eqn, self.around)


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
  """A list of steps.

  Fields:
    inputs: the numbers of its arguments.
    consts: values by their numbers.
    steps: those that something reads, in order.
    outputs: its results.
  """

  inputs: tuple[int, ...]
  consts: Mapping[int, Array]
  steps: tuple[Step, ...]
  outputs: tuple[Slot, ...]

  @functools.cached_property
  def depth(self) -> int:
    """How many loops are inside of one another, at most."""
    return max((_loops(step) for step in self.steps), default=0)

  def around(self, number: int) -> tuple["Body", Step]:
    """Returns the body that a step is in, and the step."""
    for step in self.steps:
      if step.number == number:
        return self, step
    inner = (body for step in self.steps for body in step.bodies)
    return next(body for body in inner if body.holds_step(number)).around(number)

  def holds_step(self, number: int) -> bool:
    """Whether a step is in this list or in one inside of it."""
    return any(step.number == number for step in self.every_step())

  def every_step(self) -> Iterator[Step]:
    """Yields all steps, those of inner lists included, by their numbers."""
    for step in self.steps:
      yield step
      for body in step.bodies:
        yield from body.every_step()


def _loops(step: Step) -> int:
  inside = max((body.depth for body in step.bodies), default=0)
  return inside + (step.holds in (Holds.SCAN, Holds.WHILE))


def body_of(closed: ClosedJaxpr, first: int) -> Body:
  """Returns a jaxpr as a list of steps, which are numbered from `first` on."""
  return _body(closed.jaxpr, closed.consts, Location(), itertools.count(first))


def _body(jaxpr: Jaxpr, consts: Sequence[Array], around: Location, numbers: Iterator[int]) -> Body:
  writer = _Writer(numbers)
  inputs = tuple(next(writer.slots) for _ in jaxpr.invars)
  outputs = writer.write(jaxpr, consts, inputs, around)
  return Body(inputs, writer.consts, _alive(writer.steps, outputs), outputs)


class _Writer:
  """Writes the steps of one body."""

  def __init__(self, numbers: Iterator[int]) -> None:
    self.numbers, self.slots = numbers, itertools.count()
    self.consts: dict[int, Array] = {}
    self.steps: list[Step] = []

  def write(
    self, jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Slot], around: Location
  ) -> tuple[Slot, ...]:
    """Writes a jaxpr for these arguments, and returns its results."""
    env: dict[Var, Slot] = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Atom) -> Slot:
      return atom if isinstance(atom, Literal) else env[atom]

    for var, value in zip(jaxpr.constvars, consts, strict=True):
      env[var] = slot = next(self.slots)
      self.consts[slot] = value
    for eqn in jaxpr.eqns:
      ins = tuple(map(read, eqn.invars))
      found, holds = inner_jaxprs(eqn), facts_of(eqn).holds
      if found and holds in _CALLS:
        outs = self._call(eqn, found[0], ins, around)
      else:
        outs = self._step(eqn, found if holds in _NESTED else (), ins, around)
      env.update(zip(eqn.outvars, outs, strict=True))
    return tuple(map(read, jaxpr.outvars))

  def _call(
    self, eqn: JaxprEqn, inner: Inner, ins: tuple[Slot, ...], around: Location
  ) -> Sequence[Slot]:
    consts = inner.program.consts if isinstance(inner.program, ClosedJaxpr) else ()
    if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
      # What `remat` computes again the compiler must not take from the first time.
      ins = self._barrier(eqn, ins, around)
    return self.write(inner.jaxpr, consts, ins, location(eqn, around))

  def _barrier(self, eqn: JaxprEqn, ins: tuple[Slot, ...], around: Location) -> tuple[Slot, ...]:
    avals = [v.aval for v in eqn.invars]
    traced = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*avals)
    (barrier,) = traced.jaxpr.eqns
    return tuple(self._step(barrier.replace(source_info=eqn.source_info), (), ins, around))

  def _step(
    self,
    eqn: JaxprEqn,
    inner: tuple[Inner, ...] | None,
    ins: tuple[Slot, ...],
    around: Location,
  ) -> Sequence[int]:
    number, inner = next(self.numbers), inner or ()
    here = location(eqn, around) if inner else around
    bodies = []
    if facts_of(eqn).holds is Holds.WHILE and inner:
      test, body = inner
      inner = (test, _of_lanes(test, body))
    for each in inner:
      consts = each.program.consts if isinstance(each.program, ClosedJaxpr) else ()
      bodies.append(_body(each.jaxpr, consts, here, self.numbers))
    outs = tuple(next(self.slots) for _ in eqn.outvars)
    self.steps.append(Step(number, eqn, ins, outs, around, inner, tuple(bodies)))
    return outs


def _of_lanes(test: Inner, body: Inner) -> Inner:
  """Returns the body of a while, which under `vmap` keeps the values of lanes that have ended.

  The condition of each lane is then one more argument of it.
  """
  (goes_on,) = test.jaxpr.outvars
  if shape_of(goes_on) == ():
    return body
  carried = len(body.carry)

  def kept(*args: Array) -> list[Array]:
    *operands, going = args
    consts = body.program.consts if isinstance(body.program, ClosedJaxpr) else ()
    new = eval_jaxpr(body.jaxpr, consts, *operands)
    pairs = zip(operands[len(operands) - carried :], new, strict=True)
    return [
      jnp.where(jax.lax.broadcast_in_dim(going, x.shape, [*range(going.ndim)]), y, x)
      for x, y in pairs
    ]

  avals = [v.aval for v in (*body.jaxpr.invars, goes_on)]
  return body._replace(program=jax.make_jaxpr(kept)(*avals))


def _alive(steps: Sequence[Step], outputs: Sequence[Slot]) -> tuple[Step, ...]:
  """Returns the steps whose results something reads, or that have effects."""
  read = {slot for slot in outputs if isinstance(slot, int)}
  kept = []
  for step in reversed(steps):
    if step.eqn.effects or any(slot in read for slot in step.outs):
      kept.append(step)
      read.update(slot for slot in step.ins if isinstance(slot, int))
  return tuple(reversed(kept))
