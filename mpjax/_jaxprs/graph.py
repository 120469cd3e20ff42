"""A jaxpr as one graph of operations and values, with those of all inner jaxprs in it.

Where a jaxpr calls another, the values simply go on inside. What a loop carries is one value that
comes from where it starts and from each iteration. Nothing runs.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn
from jax.extend.core import Literal as JaxprLiteral
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.dtypes import is_low_precision
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.inner_jaxprs import Inner, Program, inner_jaxprs, opened
from mpjax._jaxprs.locations import Location, location
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitive_facts import Row
from mpjax._jaxprs.primitives import facts_of

Key: TypeAlias = tuple[int, ...]
"""Which equation: its number, or that of the one it is in, the inner jaxpr, its number."""

Kind: TypeAlias = Literal["argument", "constant", "literal", "operation"]

_LISTS = OpLists()


@dataclasses.dataclass(eq=False)
class Value:
  """An array of the graph.

  Attributes:
    aval: its shape and dtype.
    kind: where it comes from.
    label: of an argument, its path; of a constant or literal, what it looks like.
    made_by: the operation that computes it; None for what is no result.
    data: of a constant or literal, what it holds, if that is known.
    consumers: the operations that take it.
  """

  aval: ShapedArray
  kind: Kind
  label: str = ""
  made_by: "Operation | None" = None
  data: object = None
  consumers: list["Operation"] = dataclasses.field(default_factory=list)

  @property
  def dtype(self) -> DType | None:
    """The dtype; None for a token."""
    return getattr(self.aval, "dtype", None)

  @property
  def is_floating(self) -> bool:
    """Whether it is an array of floating numbers."""
    return self.dtype is not None and jnp.issubdtype(self.dtype, jnp.floating)

  @property
  def is_low(self) -> bool:
    """Whether it is a floating array in low precision."""
    return self.dtype is not None and is_low_precision(self.dtype)

  @property
  def is_wide(self) -> bool:
    """Whether it is a floating array of float32 or wider."""
    return self.is_floating and not self.is_low

  @property
  def size(self) -> int:
    """The number of elements."""
    return int(np.prod(self.aval.shape)) if hasattr(self.aval, "shape") else 0

  @property
  def nbytes(self) -> int:
    """The number of bytes."""
    return self.size * getattr(self.dtype, "itemsize", 0)


class Place(NamedTuple):
  """Where in the jaxpr something is, and how often that runs.

  Fields:
    key: of the equation, or of what holds the jaxpr.
    around: the location of what holds the jaxpr.
    times: how often it runs, as far as the jaxpr says.
    certain: whether `times` is known: not so inside of a `while` or a branch.
  """

  key: Key = ()
  around: Location = Location()
  times: int = 1
  certain: bool = True


@dataclasses.dataclass(eq=False)
class Operation:
  """An operation of the graph: a first-order equation, or the way into a loop or out of it.

  Attributes:
    eqn: the equation; that of the loop for `joins`.
    place: where it is in the jaxpr.
    operands: the values that it takes.
    joins: nothing is computed: values come into a loop, out of it, or out of a branch.
    results: those that it computes.
    used: a result or an effect depends on it; a compiler drops what is not.
  """

  eqn: JaxprEqn
  place: Place
  operands: list[Value]
  joins: Literal["enter", "carry", "leave"] | None = None
  results: list[Value] = dataclasses.field(default_factory=list)
  used: bool = False

  @functools.cached_property
  def where(self) -> Location:
    """Its module or named scope, its pass and its line."""
    return location(self.eqn, self.place.around)

  @property
  def name(self) -> str:
    """The name of the primitive."""
    return self.eqn.primitive.name

  @property
  def facts(self) -> Row:
    """What the table says of the primitive."""
    return facts_of(self.eqn)

  @property
  def part(self) -> str | None:
    """The part of the operation lists that it is in."""
    return _LISTS.part_of(self.name, self.eqn.params)

  @property
  def moves(self) -> bool:
    """Whether each element of a result is one of an operand."""
    return self.joins is not None or self.facts.moves

  @property
  def casts(self) -> bool:
    """Whether it is a cast."""
    return self.eqn.primitive is convert_element_type_p

  @property
  def flops(self) -> int | None:
    """Those of a matmul in all its runs, 0 for one that is not used; None for all else."""
    flops = flops_of(self.eqn)
    return None if flops is None else flops * self.place.times * self.used

  @property
  def matmul_dtype(self) -> DType | None:
    """The dtype of a matmul of floats: float32 if one operand is; None for all else."""
    operands = self.operands[:2]
    if self.facts.flops is None or not all(v.is_floating for v in operands):
      return None
    return max(operands, key=lambda v: v.is_wide).dtype


class Graph:
  """The operations of a jaxpr.

  Attributes:
    operations: in the order of the jaxpr, those of inner jaxprs at the position of their equation.
    arguments: the values of the arguments.
    results: the values that are returned.
  """

  def __init__(self, program: Program, names: Sequence[str] = ()) -> None:
    """Builds the graph of a jaxpr; `names` are those of its arguments, if they have any."""
    self.operations: list[Operation] = []
    invars = opened(program).invars
    labels = names or [""] * len(invars)
    self.arguments = [
      Value(aval_of(v), "argument", name) for v, name in zip(invars, labels, strict=True)
    ]
    self._conditions: list[Value] = []
    self.results = self._run(program, self.arguments, Place())
    self._mark_used()

  def computing(self) -> Iterator[Operation]:
    """Yields the operations that compute something."""
    return (each for each in self.operations if not each.joins)

  def matmuls(self) -> Iterator[tuple[Operation, DType, int]]:
    """Yields the matmuls and convolutions of floats that are used, their dtypes and FLOPs."""
    for each in self.computing():
      dtype, flops = each.matmul_dtype, each.flops
      if each.used and dtype is not None and flops is not None:
        yield each, dtype, flops

  def _mark_used(self) -> None:
    pending = [v.made_by for v in (*self.results, *self._conditions)]
    pending += [each for each in self.operations if each.eqn.effects and not each.joins]
    while pending:
      operation = pending.pop()
      if operation is not None and not operation.used:
        operation.used = True
        pending += [v.made_by for v in operation.operands]

  def _run(self, program: Program, values: Sequence[Value], at: Place) -> list[Value]:
    """Adds the operations of a jaxpr, and returns its results."""
    jaxpr = opened(program)
    consts = getattr(program, "consts", ())
    env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    for v, x in zip(jaxpr.constvars, consts, strict=False):
      env[v] = _constant(aval_of(v), x)

    def read(atom: Atom) -> Value:
      if isinstance(atom, JaxprLiteral):
        if np.ndim(atom.val):
          return _constant(aval_of(atom), atom.val)
        return Value(aval_of(atom), "literal", f"{atom.val}", data=atom.val)
      if atom not in env:
        env[atom] = _constant(aval_of(atom), None)
      return env[atom]

    for number, eqn in enumerate(jaxpr.eqns):
      here = at._replace(key=(*at.key, number))
      operands = [read(v) for v in eqn.invars]
      inner = inner_jaxprs(eqn)
      if not inner or inner[0].operands is None:
        results = self._add(eqn, here, operands, [aval_of(v) for v in eqn.outvars]).results
      else:
        results = self._enter(eqn, here, operands, inner)
      env |= zip(eqn.outvars, results, strict=True)
    return [read(v) for v in jaxpr.outvars]

  def _add(
    self,
    eqn: JaxprEqn,
    place: Place,
    operands: list[Value],
    avals: Sequence[ShapedArray],
    joins: Literal["enter", "carry", "leave"] | None = None,
  ) -> Operation:
    operation = Operation(eqn, place, operands, joins)
    operation.results = [Value(aval, "operation", made_by=operation) for aval in avals]
    for each in operands:
      each.consumers.append(operation)
    self.operations.append(operation)
    return operation

  def _enter(
    self, eqn: JaxprEqn, here: Place, operands: list[Value], jaxprs: Sequence[Inner]
  ) -> list[Value]:
    """Adds the operations inside of an equation, and returns its results."""
    outs: list[list[Value]] = []
    around = location(eqn, here.around)
    for number, inner in enumerate(jaxprs):
      times = here.times * (1 if inner.times is None else inner.times)
      place = here._replace(times=times, certain=here.certain and inner.times is not None)
      ins = [operands[i] for i in inner.operands or ()]
      starts: list[Operation] = []
      for position, v in enumerate(inner.jaxpr.invars):
        carried = position in inner.carry
        if carried or aval_of(v) != ins[position].aval:
          joins = "carry" if carried else "enter"
          join = self._add(eqn, place, [ins[position]], [aval_of(v)], joins)
          (ins[position],) = join.results
          starts += [join] * carried
      inside = place._replace(key=(*here.key, number), around=around)
      results = self._run(inner.program, ins, inside)
      for join, again in zip(starts, results, strict=False):
        join.operands.append(again)
        again.consumers.append(join)
      if inner.returns:
        outs.append(results)
      else:
        self._conditions += results
    avals = [aval_of(v) for v in eqn.outvars]
    if len(outs) == 1 and [x.aval for x in outs[0]] == avals:
      return outs[0]
    # What comes out of branches, or of a loop that stacks it.
    joins = [
      self._add(eqn, here, list(each), [aval], "leave")
      for aval, *each in zip(avals, *outs, strict=True)
    ]
    return [join.results[0] for join in joins]


def _constant(aval: ShapedArray, data: Any) -> Value:
  """Returns a constant, called by its number or else by its type, such as "float32[2,3]"."""
  dtype = getattr(aval, "dtype", None)
  kinds = (jnp.number, jnp.bool_)
  is_number = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)
  if is_number and data is not None and np.ndim(data) == 0:
    return Value(aval, "constant", f"{np.asarray(data).item()}", data=data)
  text = aval.str_short(short_dtypes=False) if hasattr(aval, "str_short") else str(aval)
  return Value(aval, "constant", text, data=data)
