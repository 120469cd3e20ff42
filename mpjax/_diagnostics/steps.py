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
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from mpjax._core.types import Array
from mpjax._jaxprs.atoms import Atom, shape_of
from mpjax._jaxprs.inner_jaxprs import Inner, Program, inner_jaxprs
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
    location: where it is.
    times: how often it runs, as far as the jaxpr says.
    inner: what `inner_jaxprs` says of a loop and the like; () of what runs as it is.
    bodies: the jaxprs of `inner`, as lists of steps.
  """

  number: int
  eqn: JaxprEqn
  ins: tuple[Slot, ...]
  outs: tuple[int, ...]
  location: Location
  times: int = 1
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


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
  """A list of steps.

  Fields:
    inputs: the numbers of its arguments.
    consts: values by their numbers.
    steps: the steps, in order.
    outputs: its results.
  """

  inputs: tuple[int, ...]
  consts: Mapping[int, Array]
  steps: tuple[Step, ...]
  outputs: tuple[Slot, ...]

  @functools.cached_property
  def last_reads(self) -> Sequence[Sequence[int]]:
    """The values that nothing reads after each step."""
    last: dict[int, int] = {}
    for place, step in enumerate(self.steps):
      last.update(dict.fromkeys((*step.reads, *step.outs), place))
    lists: list[list[int]] = [[] for _ in self.steps]
    for slot in last.keys() - set(filter(lambda slot: isinstance(slot, int), self.outputs)):
      lists[last[slot]].append(slot)
    return lists

  @functools.cached_property
  def is_straight(self) -> bool:
    """Whether no number decides what runs: it can be compiled for any."""
    return not any(step.holds in (Holds.COND, Holds.WHILE) for step in self.every_step())

  @functools.cached_property
  def depth(self) -> int:
    """How many loops are inside of one another, at most."""
    return max(
      (
        max((body.depth for body in step.bodies), default=0)
        + (bool(step.bodies) and step.holds in (Holds.SCAN, Holds.WHILE))
        for step in self.steps
      ),
      default=0,
    )

  def every_step(self) -> Iterator[Step]:
    """Yields all steps, those of inner lists included, by their numbers."""
    for step in self.steps:
      yield step
      for body in step.bodies:
        yield from body.every_step()

  def every_body(self) -> Iterator["Body"]:
    """Yields this list, and those inside of it."""
    yield self
    for step in self.steps:
      for body in step.bodies:
        yield from body.every_body()

  def path_to(self, number: int) -> list[tuple["Body", Step]]:
    """Returns the steps around a step, the outermost first, each with its list; itself last."""
    for step in self.steps:
      if step.number == number:
        return [(self, step)]
      inside = next(filter(None, (body.path_to(number) for body in step.bodies)), None)
      if inside:
        return [(self, step), *inside]
    return []


def body_of(closed: ClosedJaxpr, *, compiled: bool = False) -> Body:
  """Returns a jaxpr as a list of steps.

  Args:
    closed: the jaxpr.
    compiled: whether all of it is to be compiled at once: steps that nothing reads are left out,
      and what `remat` computes again is kept apart from the first time.
  """
  return _Writer(compiled).body(closed, Location(), 1)


class _Writer:
  """Writes the lists of a function."""

  def __init__(self, compiled: bool) -> None:
    self.numbers, self.slots, self.compiled = itertools.count(), itertools.count(), compiled
    self.consts: dict[int, Array] = {}
    self.steps: list[Step] = []

  def body(self, program: Program, around: Location, times: int) -> Body:
    """Returns a jaxpr as a list of its own."""
    outer, self.consts, self.steps = (self.consts, self.steps), {}, []
    jaxpr = program.jaxpr if isinstance(program, ClosedJaxpr) else program
    inputs = tuple(next(self.slots) for _ in jaxpr.invars)
    outputs = self._write(program, inputs, around, times)
    steps = _alive(self.steps, outputs) if self.compiled else tuple(self.steps)
    body = Body(inputs, self.consts, steps, outputs)
    self.consts, self.steps = outer
    return body

  def _write(
    self, program: Program, args: Sequence[Slot], around: Location, times: int
  ) -> tuple[Slot, ...]:
    """Writes a jaxpr for these arguments, and returns its results."""
    jaxpr, consts = (
      (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
    )
    env: dict[Var, Slot] = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Atom) -> Slot:
      return atom if isinstance(atom, Literal) else env[atom]

    for var, value in zip(jaxpr.constvars, consts, strict=True):
      env[var] = slot = next(self.slots)
      self.consts[slot] = value
    for eqn in jaxpr.eqns:
      ins, here = tuple(map(read, eqn.invars)), location(eqn, around)
      inner, holds = inner_jaxprs(eqn) or (), facts_of(eqn).holds
      if inner and holds in _CALLS:
        if self.compiled and eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
          # What `remat` computes again the compiler must not take from the first time.
          ins = tuple(self._step(_barrier(eqn), (), ins, here, times))
        outs = self._write(inner[0].program, ins, here, times)
      else:
        outs = self._step(eqn, inner if holds in _NESTED else (), ins, here, times)
      env.update(zip(eqn.outvars, outs, strict=True))
    return tuple(map(read, jaxpr.outvars))

  def _step(
    self,
    eqn: JaxprEqn,
    inner: tuple[Inner, ...],
    ins: tuple[Slot, ...],
    here: Location,
    times: int,
  ) -> Sequence[int]:
    number = next(self.numbers)
    if inner and facts_of(eqn).holds is Holds.WHILE:
      inner = (inner[0], _of_lanes(*inner))
    bodies = tuple(
      self.body(each.program, here, times * (1 if each.times is None else each.times))
      for each in inner
    )
    outs = tuple(next(self.slots) for _ in eqn.outvars)
    self.steps.append(Step(number, eqn, ins, outs, here, times, inner, bodies))
    return outs


def _barrier(eqn: JaxprEqn) -> JaxprEqn:
  avals = [v.aval for v in eqn.invars]
  (barrier,) = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*avals).jaxpr.eqns
  return barrier.replace(source_info=eqn.source_info)


def _of_lanes(test: Inner, body: Inner) -> Inner:
  """Returns the body of a while, which under `vmap` keeps the values of lanes that have ended.

  The condition of each lane is then one more argument of it.
  """
  (goes_on,) = test.jaxpr.outvars
  if shape_of(goes_on) == ():
    return body
  carried = len(body.carry)

  def new_where_going(*args: Array) -> list[Array]:
    *operands, going = args
    consts = body.program.consts if isinstance(body.program, ClosedJaxpr) else ()
    new = eval_jaxpr(body.jaxpr, consts, *operands)
    pairs = zip(operands[len(operands) - carried :], new, strict=True)
    return [
      jnp.where(jax.lax.broadcast_in_dim(going, x.shape, [*range(going.ndim)]), y, x)
      for x, y in pairs
    ]

  avals = [v.aval for v in (*body.jaxpr.invars, goes_on)]
  return body._replace(program=jax.make_jaxpr(new_where_going)(*avals))


def _alive(steps: Sequence[Step], outputs: Sequence[Slot]) -> tuple[Step, ...]:
  """Returns the steps whose results something reads, or that have effects."""
  read = {slot for slot in outputs if isinstance(slot, int)}
  alive = []
  for step in reversed(steps):
    if step.eqn.effects or not read.isdisjoint(step.outs):
      alive.append(step)
      read.update(step.reads)
  return tuple(reversed(alive))
