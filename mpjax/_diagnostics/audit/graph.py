"""A jaxpr as one graph of operations and values, with those of all inner jaxprs in it.

Where a jaxpr calls another, the values simply go on inside. What a loop carries is one value that
comes from where it starts and from each iteration.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn
from jax.extend.core import Literal as JaxprLiteral

from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of
from mpjax._jaxprs.count import flops_of
from mpjax._jaxprs.inner_jaxprs import Inner, Program, inner_jaxprs, opened, warn_not_entered
from mpjax._jaxprs.locations import Location, location

Kind: TypeAlias = Literal["argument", "constant", "literal", "operation"]


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

  __slots__ = ("aval", "consumers", "data", "kind", "label", "made_by")

  def __init__(
    self,
    aval: ShapedArray,
    kind: Kind,
    label: str = "",
    made_by: "Operation | None" = None,
    data: object = None,
  ) -> None:
    self.aval, self.kind, self.label, self.made_by = aval, kind, label, made_by
    self.data = data
    self.consumers: list[Operation] = []

  @property
  def dtype(self) -> DType | None:
    """The dtype; None for a token."""
    return getattr(self.aval, "dtype", None)

  @property
  def size(self) -> int:
    """The number of elements."""
    return int(np.prod(self.aval.shape)) if hasattr(self.aval, "shape") else 0

  @property
  def nbytes(self) -> int:
    """The number of bytes."""
    return self.size * getattr(self.dtype, "itemsize", 0)


class Operation:
  """An operation of the graph: a first-order equation, or the way into a loop or out of it.

  Attributes:
    eqn: the equation; that of the loop for `joins`.
    where: its location.
    operands: the values that it takes.
    results: those that it computes.
    times: how often it runs, as far as the jaxpr says.
    certain: whether `times` is known.
    joins: nothing is computed: values come into a loop, out of it, or out of a branch.
    used: a result or an effect depends on it; a compiler drops what is not.
    position: of the operation in the order of the jaxpr.
  """

  __slots__ = (
    "certain",
    "eqn",
    "joins",
    "operands",
    "position",
    "results",
    "times",
    "used",
    "where",
  )

  def __init__(
    self,
    eqn: JaxprEqn,
    where: Location,
    operands: list[Value],
    avals: Sequence[ShapedArray],
    times: int,
    certain: bool,
    *,
    joins: bool = False,
  ) -> None:
    self.eqn, self.where, self.operands = eqn, where, operands
    self.times, self.certain, self.joins, self.position = times, certain, joins, 0
    self.used = False
    self.results = [Value(aval, "operation", made_by=self) for aval in avals]
    for each in operands:
      each.consumers.append(self)

  @property
  def name(self) -> str:
    """The name of the primitive."""
    return self.eqn.primitive.name

  @property
  def flops(self) -> int | None:
    """Those of a matmul in all its runs, 0 for one that is not used; None for all else."""
    flops = flops_of(self.eqn)
    return None if flops is None else flops * self.times * self.used


class Graph:
  """The operations of a jaxpr.

  Attributes:
    operations: in the order of the jaxpr, those of inner jaxprs at the position of their equation.
    arguments: the values of the arguments.
    results: the values that are returned.
  """

  def __init__(self, program: Program, names: Sequence[str]) -> None:
    """Builds the graph of a jaxpr; `names` are those of its arguments."""
    self.operations: list[Operation] = []
    jaxpr = opened(program)
    self.arguments = [
      Value(aval_of(v), "argument", name) for v, name in zip(jaxpr.invars, names, strict=True)
    ]
    self._conditions: list[Value] = []
    self.results = self._run(program, self.arguments, Location(), 1, True)
    self._mark_used()
    for position, each in enumerate(self.operations):
      each.position = position

  def computing(self) -> Iterator[Operation]:
    """Yields the operations that compute something."""
    return (each for each in self.operations if not each.joins)

  def _mark_used(self) -> None:
    pending = [v.made_by for v in (*self.results, *self._conditions)]
    pending += [each for each in self.operations if each.eqn.effects and not each.joins]
    while pending:
      operation = pending.pop()
      if operation is not None and not operation.used:
        operation.used = True
        pending += [v.made_by for v in operation.operands]

  def _run(
    self, program: Program, values: Sequence[Value], around: Location, times: int, certain: bool
  ) -> list[Value]:
    """Adds the operations of a jaxpr, and returns its results."""
    jaxpr = opened(program)
    consts = getattr(program, "consts", ())
    env: dict[Any, Value] = dict(zip(jaxpr.invars, values, strict=True))
    for v, x in zip(jaxpr.constvars, consts, strict=False):
      env[v] = Value(aval_of(v), "constant", constant_name(aval_of(v), x), data=x)

    def read(atom: Atom) -> Value:
      if isinstance(atom, JaxprLiteral):
        aval = aval_of(atom)
        if np.ndim(atom.val):
          return Value(aval, "constant", constant_name(aval, atom.val), data=atom.val)
        return Value(aval, "literal", f"{atom.val}", data=atom.val)
      if atom not in env:
        env[atom] = Value(aval_of(atom), "constant", constant_name(aval_of(atom), None))
      return env[atom]

    for eqn in jaxpr.eqns:
      where = location(eqn, around)
      operands = [read(v) for v in eqn.invars]
      found = inner_jaxprs(eqn)
      if found is None:
        warn_not_entered(eqn, "mpjax.audit", "What it runs is not shown.")
      if not found or found[0].operands is None:
        results = self._add(eqn, where, operands, times, certain).results
      else:
        results = self._enter(eqn, found, where, operands, times, certain)
      env |= zip(eqn.outvars, results, strict=True)
    return [read(v) for v in jaxpr.outvars]

  def _add(
    self,
    eqn: JaxprEqn,
    where: Location,
    operands: list[Value],
    times: int,
    certain: bool,
    avals: Sequence[ShapedArray] | None = None,
  ) -> Operation:
    joins = avals is not None
    types = [aval_of(v) for v in eqn.outvars] if avals is None else avals
    made = Operation(eqn, where, operands, types, times, certain, joins=joins)
    self.operations.append(made)
    return made

  def _enter(
    self,
    eqn: JaxprEqn,
    found: Sequence[Inner],
    where: Location,
    operands: list[Value],
    times: int,
    certain: bool,
  ) -> list[Value]:
    """Adds the operations inside of an equation, and returns its results."""
    outs: list[list[Value]] = []
    for inner in found:
      runs = times * (1 if inner.times is None else inner.times)
      sure = certain and inner.times is not None
      given = [operands[i] for i in inner.operands or ()]
      ins: list[Value] = []
      starts: list[Operation] = []
      for position, (v, value) in enumerate(zip(inner.jaxpr.invars, given, strict=True)):
        carried = position in inner.carry
        if carried or aval_of(v) != value.aval:
          join = self._add(eqn, where, [value], runs, sure, [aval_of(v)])
          value = join.results[0]
          if carried:
            starts.append(join)
        ins.append(value)
      results = self._run(inner.program, ins, where, runs, sure)
      for join, again in zip(starts, results, strict=False):
        join.operands.append(again)
        again.consumers.append(join)
      if inner.returns:
        outs.append(results)
      else:
        self._conditions += results
    if len(outs) == 1 and all(
      x.aval == aval_of(v) for x, v in zip(outs[0], eqn.outvars, strict=True)
    ):
      return outs[0]
    # What comes out of branches, or of a loop that stacks it.
    joined = []
    for position, v in enumerate(eqn.outvars):
      each = [x[position] for x in outs]
      joined += self._add(eqn, where, each, times, certain, [aval_of(v)]).results
    return joined


def constant_name(aval: ShapedArray, value: Any) -> str:
  """Returns what a constant looks like, such as "float32[2,3]"."""
  if value is not None and np.ndim(value) == 0 and dtype_is_number(aval):
    return f"{np.asarray(value).item()}"
  return aval.str_short(short_dtypes=False) if hasattr(aval, "str_short") else str(aval)


def dtype_is_number(aval: ShapedArray) -> bool:
  """Whether an array holds numbers: no keys, no tokens."""
  dtype = getattr(aval, "dtype", None)
  kinds = (jnp.number, jnp.bool_)
  return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)
