"""A jaxpr as a list of steps: calls are written out, loops and branches hold lists of their own.

Values have numbers instead of variables: a function that is called twice has one jaxpr, and its
values are not the same in both calls.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray, eval_jaxpr
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from mpjax._core.types import Array
from mpjax._jaxpr.compat import scopes_of
from mpjax._jaxpr.locations import Location, location
from mpjax._jaxpr.primitives import HAS_DERIVATIVE, NESTED, Holds, facts_of
from mpjax._jaxpr.reader import Atom, Inner, Program, aval_of, inner_jaxprs, opened, shape_of

Slot: TypeAlias = int | Literal
"""A value: its number, or what it is."""

Key: TypeAlias = tuple[int, ...]
"""Which equation: its number, or that of the one it is in, the inner jaxpr, its number."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """An equation that runs as it is, or a loop, a branch or a map over devices."""

  number: int  # in the order of execution; those inside a loop come after that of the loop
  key: Key
  eqn: JaxprEqn
  around: "Step | None"  # what holds the jaxpr: a call, which is in no list, too
  times: int = 1  # how often it runs, as far as the jaxpr says
  certain: bool = True  # whether that is all: not so inside of a `while` or a branch
  is_unknown: bool = False  # it holds jaxprs, and nobody knows how it runs them
  ins: tuple[Slot, ...] = ()
  outs: tuple[int, ...] = ()
  inner: tuple[Inner, ...] = ()  # what `inner_jaxprs` says of a loop and the like
  bodies: tuple["Body", ...] = ()  # the jaxprs of `inner`, as lists of steps

  @functools.cached_property
  def location(self) -> Location:
    """Its module or named scope, its pass and its line."""
    return location(self.eqn, None if self.around is None else self.around.location)

  @property
  def name_stack(self) -> tuple[tuple[str, bool], ...]:
    """The names of its scopes, the outermost first, each with whether it is of a transformation."""
    around = () if self.around is None else self.around.name_stack
    return around + scopes_of(self.eqn.source_info.name_stack)

  @property
  def holds(self) -> Holds | None:
    """How it runs its inner lists."""
    return facts_of(self.eqn).holds

  def enclosing(self) -> Iterator["Step"]:
    """Yields the step, and what it is in: calls have the number -1."""
    yield self
    if self.around is not None:
      yield from self.around.enclosing()

  @property
  def reads(self) -> tuple[int, ...]:
    """The numbers of its operands, those that are no literals."""
    return tuple(slot for slot in self.ins if isinstance(slot, int))


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
  """A list of steps."""

  inputs: tuple[int, ...]
  consts: Mapping[int, Array]  # values by their numbers
  avals: Mapping[int, ShapedArray]  # the types of the inputs and constants
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
    loops = (Holds.SCAN, Holds.WHILE)
    inside = (body.depth + (step.holds in loops) for step in self.steps for body in step.bodies)
    return max(inside, default=0)

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


def body_of(closed: ClosedJaxpr, *, compiled: bool = False, differentiable: bool = False) -> Body:
  """Returns a jaxpr as a list of steps.

  If it is to be `compiled` at once, steps that nothing reads are left out, and what `remat`
  computes again is kept apart from the first time. If it is to be `differentiable`, a function with
  a derivative of its own stays one step: written out, it would lose that.
  """
  return _Writer(compiled, differentiable).body(closed)


class _Writer:
  """Writes the lists of a function."""

  def __init__(self, compiled: bool, differentiable: bool) -> None:
    self.numbers, self.slots = itertools.count(), itertools.count()
    self.compiled, self.differentiable = compiled, differentiable
    self.consts: dict[int, Array] = {}
    self.avals: dict[int, ShapedArray] = {}
    self.steps: list[Step] = []

  def body(
    self, program: Program, around: Step | None = None, place: int = 0, runs: int | None = 1
  ) -> Body:
    """Returns a jaxpr as a list of its own: number `place` of those in `around`."""
    outer = self.consts, self.avals, self.steps
    self.consts, self.avals, self.steps = {}, {}, []
    inputs = tuple(map(self._typed, opened(program).invars))
    outputs = self._write(program, inputs, around, place, runs)
    steps = _needed(self.steps, outputs) if self.compiled else self.steps
    body = Body(inputs, self.consts, self.avals, tuple(steps), outputs)
    self.consts, self.avals, self.steps = outer
    return body

  def _typed(self, var: Var) -> int:
    slot = next(self.slots)
    self.avals[slot] = aval_of(var)
    return slot

  def _write(
    self,
    program: Program,
    args: Sequence[Slot],
    around: Step | None,
    place: int = 0,
    runs: int | None = 1,
  ) -> tuple[Slot, ...]:
    """Writes a jaxpr for these arguments, and returns its results."""
    jaxpr, consts = opened(program), getattr(program, "consts", ())
    env: dict[Var, Slot] = dict(zip(jaxpr.invars, args, strict=True))
    for var, value in zip(jaxpr.constvars, consts, strict=True):
      env[var] = slot = self._typed(var)
      self.consts[slot] = value

    def read(atom: Atom) -> Slot:
      return atom if isinstance(atom, Literal) else env[atom]

    for position, eqn in enumerate(jaxpr.eqns):
      step = _unwritten(eqn, tuple(map(read, eqn.invars)), position, around, place, runs)
      env.update(zip(eqn.outvars, self._write_one(step), strict=True))
    return tuple(map(read, jaxpr.outvars))

  def _write_one(self, step: Step) -> tuple[Slot, ...]:
    """Writes an equation, of a call the steps inside, and returns its results."""
    inner = inner_jaxprs(step.eqn)
    if inner is None:
      return self._append(dataclasses.replace(step, is_unknown=True))
    if step.holds in NESTED:
      return self._append(step, inner)
    if not inner or inner[0].operands is None or self._is_one(step):
      return self._append(step)
    ins: tuple[Slot, ...] = step.ins
    if self.compiled and _keeps_recomputed_apart(step.eqn):
      ins = self._append(dataclasses.replace(step, eqn=_barrier_before(step.eqn)))
    return self._write(inner[0].program, [ins[i] for i in inner[0].operands], step)

  def _is_one(self, step: Step) -> bool:
    """Whether a call stays one step, since it has a derivative of its own."""
    return self.differentiable and step.holds in HAS_DERIVATIVE

  def _append(self, step: Step, inner: tuple[Inner, ...] = ()) -> tuple[int, ...]:
    """Appends a step to the list, and returns its results."""
    number = next(self.numbers)
    if not inner:
      outs = tuple(next(self.slots) for _ in step.eqn.outvars)
      self.steps.append(dataclasses.replace(step, number=number, outs=outs))
      return outs
    step = dataclasses.replace(step, number=number)
    if step.holds is Holds.WHILE:
      inner = (inner[0], _of_lanes(*inner))
    bodies = tuple(
      self.body(each.program, step, place, each.times) for place, each in enumerate(inner)
    )
    outs = tuple(next(self.slots) for _ in step.eqn.outvars)
    self.steps.append(dataclasses.replace(step, outs=outs, inner=inner, bodies=bodies))
    return outs


def _unwritten(
  eqn: JaxprEqn,
  ins: tuple[Slot, ...],
  position: int,
  around: Step | None,
  place: int,
  runs: int | None,
) -> Step:
  """Returns an equation as a step that is in no list yet.

  Args:
    eqn: the equation.
    ins: its operands.
    position: its number in its jaxpr.
    around: the step that holds the jaxpr; None for the outermost one.
    place: the number of the jaxpr in `around`.
    runs: how often the jaxpr runs each time `around` does; None if that depends on values.
  """
  if around is None:
    return Step(-1, (position,), eqn, None, ins=ins)
  return Step(
    number=-1,
    key=(*around.key, place, position),
    eqn=eqn,
    around=around,
    times=around.times if runs is None else around.times * runs,
    certain=around.certain and runs is not None,
    ins=ins,
  )


def _needed(steps: Sequence[Step], outputs: Sequence[Slot]) -> list[Step]:
  """Returns the steps that an output depends on, and those with effects."""
  needed: list[Step] = []
  read = {slot for slot in outputs if isinstance(slot, int)}
  for step in reversed(steps):
    if step.eqn.effects or not read.isdisjoint(step.outs):
      needed.append(step)
      read.update(step.reads)
  needed.reverse()
  return needed


def _keeps_recomputed_apart(eqn: JaxprEqn) -> bool:
  """Whether `remat` computes an equation again, and the compiler must not reuse the first time."""
  return bool(eqn.params.get("prevent_cse") and eqn.params.get("differentiated"))


def _barrier_before(eqn: JaxprEqn) -> JaxprEqn:
  """Returns an `optimization_barrier` of the operands of an equation."""
  avals = [v.aval for v in eqn.invars]
  (barrier,) = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*avals).eqns
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
    new = eval_jaxpr(body.jaxpr, getattr(body.program, "consts", ()), *operands)
    pairs = zip(operands[len(operands) - carried :], new, strict=True)
    return [
      jnp.where(jax.lax.broadcast_in_dim(going, x.shape, [*range(going.ndim)]), y, x)
      for x, y in pairs
    ]

  avals = [v.aval for v in (*body.jaxpr.invars, goes_on)]
  return body._replace(program=jax.make_jaxpr(new_where_going)(*avals))
