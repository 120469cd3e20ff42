"""A jaxpr as a list of steps: calls are written out, loops and branches hold lists of their own.

Values have numbers instead of variables. A function that is called twice has one jaxpr, but its
values differ in the two calls.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

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
"""A value: its number, or a literal."""

Key: TypeAlias = tuple[int, ...]
"""The position of an equation: its number in its jaxpr.

For an inner jaxpr, the key of the equation around and the number of the jaxpr come first.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """An equation that runs as it is, or a loop, a branch or a map over devices."""

  number: int  # in the order of execution; steps inside a loop follow the loop
  key: Key
  eqn: JaxprEqn
  around: "Step | None"  # the equation that holds its jaxpr, perhaps a call, which is in no list
  times: int = 1  # the number of its runs, as far as the jaxpr says
  certain: bool = True  # whether `times` is exact: it is not inside a `while` or a branch
  is_unknown: bool = False  # whether it holds jaxprs and `inner_jaxprs` does not know it
  ins: tuple[Slot, ...] = ()  # its operands
  outs: tuple[int, ...] = ()  # its results
  inner: tuple[Inner, ...] = ()  # the jaxprs of a loop, a branch or a `shard_map`
  bodies: tuple["Body", ...] = ()  # the same jaxprs as lists of steps

  @functools.cached_property
  def location(self) -> Location:
    """Its module or named scope, its pass and its line."""
    return location(self.eqn, None if self.around is None else self.around.location)

  @property
  def name_stack(self) -> tuple[tuple[str, bool], ...]:
    """The names of its scopes, the outermost first, each with whether a transformation set it."""
    around = () if self.around is None else self.around.name_stack
    return around + scopes_of(self.eqn.source_info.name_stack)

  @property
  def holds(self) -> Holds | None:
    """The way in which it runs its inner lists."""
    return facts_of(self.eqn).holds

  def enclosing(self) -> Iterator["Step"]:
    """Yields the step and the steps around it. Calls have the number -1."""
    yield self
    if self.around is not None:
      yield from self.around.enclosing()

  @property
  def reads(self) -> tuple[int, ...]:
    """The numbers of its operands, without literals."""
    return tuple(slot for slot in self.ins if isinstance(slot, int))


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
  """A list of steps."""

  inputs: tuple[int, ...]  # the numbers of its arguments
  consts: Mapping[int, Array]  # its constants by number
  avals: Mapping[int, ShapedArray]  # the types of the inputs and constants
  steps: tuple[Step, ...]
  outputs: tuple[Slot, ...]  # its results

  @functools.cached_property
  def last_reads(self) -> Sequence[Sequence[int]]:
    """For each step, the values that no later step reads."""
    # A result that nothing reads is free after its own step. An output is never free.
    last: dict[int, int] = {}
    for position, step in enumerate(self.steps):
      last.update(dict.fromkeys((*step.reads, *step.outs), position))
    lists: list[list[int]] = [[] for _ in self.steps]
    for slot in last.keys() - set(filter(lambda slot: isinstance(slot, int), self.outputs)):
      lists[last[slot]].append(slot)
    return lists

  @functools.cached_property
  def is_straight(self) -> bool:
    """Whether the same steps run for all values. It can then be compiled as one function."""
    return not any(step.holds in (Holds.COND, Holds.WHILE) for step in self.every_step())

  @functools.cached_property
  def depth(self) -> int:
    """The largest number of nested loops."""
    loops = (Holds.SCAN, Holds.WHILE)
    inside = (body.depth + (step.holds in loops) for step in self.steps for body in step.bodies)
    return max(inside, default=0)

  def every_step(self) -> Iterator[Step]:
    """Yields all steps in the order of their numbers, with those of inner lists."""
    for step in self.steps:
      yield step
      for body in step.bodies:
        yield from body.every_step()

  def every_body(self) -> Iterator["Body"]:
    """Yields this list and all lists inside it."""
    yield self
    for step in self.steps:
      for body in step.bodies:
        yield from body.every_body()


def pieces_of(body: Body, most: int) -> list[Body]:
  """Returns bodies that run one after the other, and compute what the steps of a body compute.

  A piece takes the values that its steps read, and returns those that later pieces read.

  Args:
    body: the body.
    most: the most steps of a piece with several, counting those inside of loops.
  """
  avals: dict[int, Any] = {**body.avals}
  last = {slot: i for i, step in enumerate(body.steps) for slot in step.reads}
  # The results of the body are read after its last step.
  last |= {slot: len(body.steps) for slot in body.outputs if isinstance(slot, int)}
  ends: list[int] = []
  weight, held = 0, 0
  for i, step in enumerate(body.steps):
    avals |= {slot: v.aval for slot, v in zip(step.outs, step.eqn.outvars, strict=True)}
    own = 1 + sum(1 for inner in step.bodies for _ in inner.every_step())
    # A loop with more steps is a piece of its own.
    if weight and weight + own > most and i > held:
      ends.append(i)
      weight = 0
    weight += own
    # A reference to memory that is written in place cannot leave a compiled function.
    others = [slot for slot in step.outs if not isinstance(avals[slot], ShapedArray)]
    held = max([held, *(last.get(slot, i) for slot in others)])
  ends.append(len(body.steps))
  return [_piece(body, avals, last, *part) for part in itertools.pairwise((0, *ends))]


def _piece(
  body: Body, avals: Mapping[int, Any], last: Mapping[int, int], begin: int, end: int
) -> Body:
  """Returns the steps from `begin` to `end` of a body as a body of its own."""
  steps = body.steps[begin:end]
  made = [slot for step in steps for slot in step.outs]
  read = dict.fromkeys(slot for step in steps for slot in step.reads).keys() - {*made}
  consts = {slot: x for slot, x in body.consts.items() if slot in read}
  inputs = tuple(sorted(read - consts.keys()))
  outputs = tuple(slot for slot in made if last.get(slot, 0) >= end)
  return Body(inputs, consts, {slot: avals[slot] for slot in read}, steps, outputs)


def body_of(closed: ClosedJaxpr, *, compiled: bool = False, differentiable: bool = False) -> Body:
  """Returns a jaxpr as a list of steps.

  Args:
    closed: the jaxpr.
    compiled: whether the list is compiled as one function. Unread steps are then left out. Work
      that `remat` repeats is kept apart from its first run, which the compiler would reuse.
    differentiable: whether the list is differentiated. A function with a derivative rule then stays
      one step, since its equations have lost the rule.
  """
  return _Writer(compiled, differentiable).body(closed)


class _Writer:
  """Writes the lists of a function."""

  def __init__(self, compiled: bool, differentiable: bool) -> None:
    # Steps and values are numbered through all lists.
    self.numbers, self.slots = itertools.count(), itertools.count()
    self.compiled, self.differentiable = compiled, differentiable
    # Of the list that is being written. `body` puts those of the list around aside.
    self.consts: dict[int, Array] = {}
    self.avals: dict[int, ShapedArray] = {}
    self.steps: list[Step] = []

  def body(
    self, program: Program, around: Step | None = None, index: int = 0, runs: int | None = 1
  ) -> Body:
    """Returns a jaxpr as a list of its own. It is number `index` of the jaxprs in `around`."""
    outer = self.consts, self.avals, self.steps
    self.consts, self.avals, self.steps = {}, {}, []
    inputs = tuple(map(self._typed, opened(program).invars))
    outputs = self._write(program, inputs, around, index, runs)
    steps = _needed(self.steps, outputs) if self.compiled else self.steps
    body = Body(inputs, self.consts, self.avals, tuple(steps), outputs)
    self.consts, self.avals, self.steps = outer
    return body

  def _typed(self, var: Var) -> int:
    """Returns a new number for an input or a constant, and notes its type."""
    slot = next(self.slots)
    self.avals[slot] = aval_of(var)
    return slot

  def _write(
    self,
    program: Program,
    args: Sequence[Slot],
    around: Step | None,
    index: int = 0,
    runs: int | None = 1,
  ) -> tuple[Slot, ...]:
    """Writes the equations of a jaxpr for these arguments, and returns its results."""
    jaxpr, consts = opened(program), getattr(program, "consts", ())
    env: dict[Var, Slot] = dict(zip(jaxpr.invars, args, strict=True))
    for var, value in zip(jaxpr.constvars, consts, strict=True):
      env[var] = slot = self._typed(var)
      self.consts[slot] = value

    def read(atom: Atom) -> Slot:
      return atom if isinstance(atom, Literal) else env[atom]

    for position, eqn in enumerate(jaxpr.eqns):
      step = _unwritten(eqn, tuple(map(read, eqn.invars)), position, around, index, runs)
      env.update(zip(eqn.outvars, self._write_one(step), strict=True))
    return tuple(map(read, jaxpr.outvars))

  def _write_one(self, step: Step) -> tuple[Slot, ...]:
    """Writes an equation, or the steps inside a call, and returns its results."""
    inner = inner_jaxprs(step.eqn)
    if inner is None:
      return self._append(dataclasses.replace(step, is_unknown=True))
    if step.holds in NESTED:
      return self._append(step, inner)
    if not inner or inner[0].operands is None or self._is_one(step):
      return self._append(step)
    # A call: its steps join this list, and it is only the `around` of these.
    ins: tuple[Slot, ...] = step.ins
    if self.compiled and _keeps_recomputed_apart(step.eqn):
      ins = self._append(dataclasses.replace(step, eqn=_barrier_before(step.eqn)))
    return self._write(inner[0].program, [ins[i] for i in inner[0].operands], step)

  def _is_one(self, step: Step) -> bool:
    """Whether a call stays one step, since it has a derivative rule."""
    return self.differentiable and step.holds in HAS_DERIVATIVE

  def _append(self, step: Step, inner: tuple[Inner, ...] = ()) -> tuple[int, ...]:
    """Appends a step to the list, and returns its results."""
    number = next(self.numbers)
    if not inner:
      outs = tuple(next(self.slots) for _ in step.eqn.outvars)
      self.steps.append(dataclasses.replace(step, number=number, outs=outs))
      return outs
    step = dataclasses.replace(step, number=number)
    # The number and `step` come before the bodies: steps inside refer to it, and follow it.
    if step.holds is Holds.WHILE:
      inner = (inner[0], _of_lanes(*inner))
    bodies = tuple(
      self.body(each.program, step, index, each.times) for index, each in enumerate(inner)
    )
    outs = tuple(next(self.slots) for _ in step.eqn.outvars)
    self.steps.append(dataclasses.replace(step, outs=outs, inner=inner, bodies=bodies))
    return outs


def _unwritten(
  eqn: JaxprEqn,
  ins: tuple[Slot, ...],
  position: int,
  around: Step | None,
  index: int,
  runs: int | None,
) -> Step:
  """Returns an equation as a step that is in no list yet.

  Args:
    eqn: the equation.
    ins: its operands.
    position: its number in its jaxpr.
    around: the step that holds the jaxpr; None for the outermost one.
    index: the number of the jaxpr in `around`.
    runs: the runs of the jaxpr in each run of `around`; None if they depend on values.
  """
  if around is None:
    return Step(-1, (position,), eqn, None, ins=ins)
  return Step(
    number=-1,
    key=(*around.key, index, position),
    eqn=eqn,
    around=around,
    times=around.times if runs is None else around.times * runs,
    certain=around.certain and runs is not None,
    ins=ins,
  )


def _needed(steps: Sequence[Step], outputs: Sequence[Slot]) -> list[Step]:
  """Returns the steps that an output depends on, and those with effects."""
  needed: list[Step] = []
  # Backwards, so that all readers of a step are met before it.
  read = {slot for slot in outputs if isinstance(slot, int)}
  for step in reversed(steps):
    if step.eqn.effects or not read.isdisjoint(step.outs):
      needed.append(step)
      read.update(step.reads)
  needed.reverse()
  return needed


def _keeps_recomputed_apart(eqn: JaxprEqn) -> bool:
  """Whether `remat` runs an equation again, and the compiler must not reuse the first result."""
  return bool(eqn.params.get("prevent_cse") and eqn.params.get("differentiated"))


def _barrier_before(eqn: JaxprEqn) -> JaxprEqn:
  """Returns an `optimization_barrier` of the operands of an equation."""
  avals = [v.aval for v in eqn.invars]
  (barrier,) = jax.make_jaxpr(lambda *xs: jax.lax.optimization_barrier(xs))(*avals).eqns
  return barrier.replace(source_info=eqn.source_info)


def _of_lanes(test: Inner, body: Inner) -> Inner:
  """Returns the body of a `while`. Under `vmap`, lanes that have ended keep their values.

  The body then has one more argument: the condition of each lane.
  """
  (goes_on,) = test.jaxpr.outvars
  if shape_of(goes_on) == ():
    return body
  carried = len(body.carry)

  def new_where_going(*args: Array) -> list[Array]:
    *operands, going = args
    # The carry is at the end of the operands, and is all that the body returns.
    new = eval_jaxpr(body.jaxpr, getattr(body.program, "consts", ()), *operands)
    pairs = zip(operands[len(operands) - carried :], new, strict=True)
    return [
      jnp.where(jax.lax.broadcast_in_dim(going, x.shape, [*range(going.ndim)]), y, x)
      for x, y in pairs
    ]

  avals = [v.aval for v in (*body.jaxpr.invars, goes_on)]
  return body._replace(program=jax.make_jaxpr(new_where_going)(*avals))
