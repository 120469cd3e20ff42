"""A jaxpr as one graph of operations and values, which includes all inner jaxprs.

It is built from the steps of `steps.py`. The carry of a loop is one value: it comes from its start
and from each iteration. Nothing runs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.types import DType, is_floating_dtype, is_low_precision
from mpjax._jaxpr.count import flops_of
from mpjax._jaxpr.locations import RECIPE, Location
from mpjax._jaxpr.op_lists import OpLists, part_of
from mpjax._jaxpr.primitives import Row, facts_of
from mpjax._jaxpr.reader import Inner, aval_of
from mpjax._jaxpr.steps import Body, Slot, Step, body_of

ValueKind: TypeAlias = Literal["argument", "constant", "literal", "operation"]
Joins: TypeAlias = Literal["enter", "carry", "leave"]

_LISTS = OpLists()


@dataclasses.dataclass(eq=False)
class Value:
  """An array of the graph."""

  aval: ShapedArray  # its shape and dtype
  kind: ValueKind  # where it comes from
  label: str = ""  # the path of an argument; the number or the type of a constant or literal
  made_by: "Operation | None" = None  # the operation that returns it, if it is a result
  data: object = None  # the array or number of a constant or literal, if it is known
  consumers: list["Operation"] = dataclasses.field(default_factory=list)  # operations that use it
  dtype: DType | None = dataclasses.field(init=False)  # None for a token

  def __post_init__(self) -> None:
    self.dtype = getattr(self.aval, "dtype", None)

  @property
  def is_floating(self) -> bool:
    return self.dtype is not None and is_floating_dtype(self.dtype)

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
    return math.prod(getattr(self.aval, "shape", (0,)))

  @property
  def nbytes(self) -> int:
    return self.size * getattr(self.dtype, "itemsize", 0)


@dataclasses.dataclass(eq=False)
class Operation:
  """An operation of the graph: a first-order equation, or the way into a loop or out of it."""

  step: Step  # the equation; with `joins`, the loop or the branch
  times: int  # the number of its runs, as far as the jaxpr says
  operands: list[Value]
  # If it is set, nothing is computed: values enter a loop, are carried, or leave a loop or branch.
  joins: Joins | None = None
  results: list[Value] = dataclasses.field(default_factory=list)
  used: bool = False  # whether a result or an effect depends on it; a compiler drops the others
  facts: Row = dataclasses.field(init=False)  # of the primitive of `step`

  def __post_init__(self) -> None:
    self.facts = facts_of(self.eqn)

  @property
  def eqn(self) -> JaxprEqn:
    """The equation. With `joins` it is the loop or the branch."""
    return self.step.eqn

  @functools.cached_property
  def where(self) -> Location:
    """Its module or named scope, its pass and its line."""
    return self.step.location

  @property
  def name(self) -> str:
    return self.eqn.primitive.name

  @functools.cached_property
  def part(self) -> str | None:
    return part_of(self.eqn, _LISTS)

  @property
  def moves(self) -> bool:
    """Whether each element of a result is an element of an operand, moved or sorted."""
    # `max` of two arrays is exact too, but it compares two operands at each position.
    chosen = self.facts.exact and not self.facts.elementwise
    return self.joins is not None or self.facts.moves or chosen

  @property
  def casts(self) -> bool:
    return self.eqn.primitive is convert_element_type_p

  @property
  def flops(self) -> int | None:
    """The FLOPs of a matmul in all its runs, 0 if it is unused; None for other operations."""
    if self.facts.flops is None:
      return None
    return (flops_of(self.eqn) or 0) * self.times * self.used

  @property
  def matmul_dtype(self) -> DType | None:
    """The dtype of a matmul of floats or of a recipe; None for other operations.

    It is float32 if one operand is float32.
    """
    if self.facts.flops is None:
      return None
    operands = self.operands[:2]
    # The operands of an int8 recipe are integers, and are marked by the recipe.
    floats = all(v.is_floating for v in operands) or self.where.marked(RECIPE) is not None
    if not floats:
      return None
    return max(operands, key=lambda v: v.is_wide).dtype


class Graph:
  """The operations of a jaxpr.

  Attributes:
    operations: the operations in the order of the jaxpr. Operations of an inner jaxpr are at the
      position of its equation.
    arguments: the values of the arguments.
    results: the values that are returned.
  """

  def __init__(self, program: ClosedJaxpr | Body, names: Sequence[str] = ()) -> None:
    """Builds the graph of a jaxpr or of its steps; `names` are the names of its arguments."""
    body = program if isinstance(program, Body) else body_of(program)
    labels = names or [""] * len(body.inputs)
    self.operations: list[Operation] = []
    self.arguments = [
      Value(body.avals[slot], "argument", name)
      for slot, name in zip(body.inputs, labels, strict=True)
    ]
    self._conditions: list[Value] = []  # results of the conditions of `while` loops
    self.results = self._run(body, self.arguments)
    self._products = [each for each in self.computing() if each.facts.flops is not None]
    self._mark_used()

  def _mark_used(self) -> None:
    """Marks the operations that a result, a condition or an effect depends on."""
    needed = [v.made_by for v in (*self.results, *self._conditions)]
    needed += [each for each in self.operations if each.eqn.effects and not each.joins]
    # The loop appends to the list that it walks: the operations that others depend on.
    for operation in needed:
      if operation is not None and not operation.used:
        operation.used = True
        needed += [v.made_by for v in operation.operands]

  @functools.cached_property
  def walks(self) -> int:
    """The number of forward walks that reach all values: 2 with loops, whose carry flows back."""
    return 2 if any(each.joins == "carry" for each in self.operations) else 1

  def computing(self) -> Iterator[Operation]:
    """Yields the operations that compute something."""
    return (each for each in self.operations if not each.joins)

  def matmuls(self) -> Iterator[tuple[Operation, DType, int]]:
    """Yields the matmuls and convolutions of floats that are used, their dtypes and FLOPs."""
    for each in self._products:
      dtype, flops = each.matmul_dtype, each.flops
      if each.used and dtype is not None and flops is not None:
        yield each, dtype, flops

  def _run(self, body: Body, values: Sequence[Value]) -> list[Value]:
    """Adds the operations of a body for these arguments, and returns its results."""
    env = dict(zip(body.inputs, values, strict=True))
    env |= {slot: _constant(body.avals[slot], x) for slot, x in body.consts.items()}

    def read(slot: Slot) -> Value:
      if isinstance(slot, int):
        return env[slot]
      if np.ndim(slot.val):
        return _constant(aval_of(slot), slot.val)
      return Value(aval_of(slot), "literal", f"{slot.val}", data=slot.val)

    for step in body.steps:
      operands, avals = [*map(read, step.ins)], [*map(aval_of, step.eqn.outvars)]
      add = self._enter if step.bodies else self._add
      env |= zip(step.outs, add(step, operands, avals), strict=True)
    return [*map(read, body.outputs)]

  def _add(
    self,
    step: Step,
    operands: list[Value],
    avals: Sequence[ShapedArray],
    times: int | None = None,
    joins: Joins | None = None,
  ) -> list[Value]:
    """Adds one operation, and returns its results."""
    operation = Operation(step, step.times if times is None else times, operands, joins)
    operation.results = [Value(aval, "operation", made_by=operation) for aval in avals]
    for each in operands:
      each.consumers.append(operation)
    self.operations.append(operation)
    return operation.results

  def _enter(self, step: Step, operands: list[Value], avals: Sequence[ShapedArray]) -> list[Value]:
    """Adds the operations inside a loop, a branch or a `shard_map`, and returns its results."""
    returned: list[list[Value]] = []  # the results of each body, except conditions
    condition: list[Value] = []  # the result of the condition of a `while`
    for inner, body in zip(step.inner, step.bodies, strict=True):
      taken = [operands[i] for i in inner.operands or ()]
      # Under `vmap` the body of a `while` takes the condition of each lane as its last argument.
      arguments = [*taken, *condition][: len(body.inputs)]
      results = self._enter_body(step, inner, body, arguments)
      if inner.returns:
        returned.append(results)
      else:
        condition = results
        self._conditions += results
    if len(returned) == 1 and [x.aval for x in returned[0]] == avals:
      return returned[0]
    # A result may come from several branches. It may also have another type outside, such as the
    # stacked results of a `scan`.
    joined = zip(avals, zip(*returned, strict=True), strict=True)
    return [self._add(step, [*each], [aval], joins="leave")[0] for aval, each in joined]

  def _enter_body(
    self, step: Step, inner: Inner, body: Body, arguments: Sequence[Value]
  ) -> list[Value]:
    """Adds the operations of one body of a step, and returns the results of the body."""
    times = step.times if inner.times is None else step.times * inner.times
    inputs: list[Value] = []
    carries: list[Operation] = []
    for position, (slot, value) in enumerate(zip(body.inputs, arguments, strict=True)):
      aval = body.avals[slot]
      # A carry has two operands: its start, and the result of each iteration, added below.
      if position in inner.carry:
        inputs += self._add(step, [value], [aval], times, "carry")
        carries.append(self.operations[-1])
      elif value.aval != aval:  # An iteration or a device takes a slice of it.
        inputs += self._add(step, [value], [aval], times, "enter")
      else:
        inputs.append(value)
    results = self._run(body, inputs)
    # The first results of the body are the carries of the next iteration.
    for carry, again in zip(carries, results, strict=False):
      carry.operands.append(again)
      again.consumers.append(carry)
    return results


def moved_from(value: Value) -> Value:
  """Returns the argument, or the result, whose elements a value has, moved, gathered or cast."""
  # A gather takes its indices second, so the first operand has the elements.
  while value.made_by is not None and (value.made_by.moves or value.made_by.casts):
    value = value.made_by.operands[0]
  return value


def _constant(aval: ShapedArray, data: Any) -> Value:
  """Returns a constant. Its label is its number or its type, such as "float32[2,3]"."""
  if isinstance(data, Tracer):  # A function traced inside another may close over its tracers.
    data = None
  dtype = getattr(aval, "dtype", None)
  is_number = dtype is not None and (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_)
  if is_number and data is not None and np.ndim(data) == 0:
    return Value(aval, "constant", f"{np.asarray(data).item()}", data=data)
  text = aval.str_short(short_dtypes=False) if hasattr(aval, "str_short") else str(aval)
  return Value(aval, "constant", text, data=data)
