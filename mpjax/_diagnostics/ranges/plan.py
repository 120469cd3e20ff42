"""Under which heading the results of each equation are counted: by what they are in the graph.

A number is an activation or a gradient where a policy would hold it in low precision: the results
of matmuls and convolutions, what they take, and what is computed from such results alone. The rest
stays in float32 whatever the policy says, so that a narrow dtype loses nothing of it: masks and the
cotangent of a loss, which are constants; softmax, which the float32 list computes; and what is
computed with float32 data. These are the kinds of `docs/concepts.md`.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal as JaxprLiteral
from jax.extend.core.primitives import add_p, convert_element_type_p, sub_p

from mpjax._core.dtypes import is_low_precision
from mpjax._core.paths import Path
from mpjax._core.types import DType
from mpjax._diagnostics.parameter_scopes import name_by_parameters, paths_of
from mpjax._jaxprs.atoms import Atom, dtype_of, shape_of
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.locations import Location
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitives import facts_of
from mpjax._jaxprs.steps import Body, Slot, Step

Kind: TypeAlias = Literal[
  "activations", "gradients", "float32", "parameters", "optimizer state", "updates"
]
"""What numbers are: "gradients" are results of the backward pass, "float32" what stays in that."""


class Group(NamedTuple):
  """A heading.

  Fields:
    kind: what the numbers are.
    path: the module, or that of a leaf of the arguments.
  """

  kind: Kind
  path: str


class Input(NamedTuple):
  """A floating argument.

  Fields:
    path: in the tree of arguments.
    is_parameter: whether it may be a parameter: those that the optimizer alone reads are not.
    dtype: that in which it is stored.
    shape: its shape.
    keys: the names of its keys within its argument.
  """

  path: str
  is_parameter: bool
  dtype: DType
  shape: tuple[int, ...]
  keys: tuple[str, ...] = ()

  @property
  def module(self) -> Path:
    """The path of the module whose parameter it is; () for none."""
    return self.keys[self.keys[:1] == ("params",) : -1] if self.is_parameter else ()

  def is_stored_in(self, aval: ShapedArray, keys: tuple[str, ...]) -> bool:
    """Whether a result may be the argument, changed.

    A momentum `0.9 * mu + grads` is no update of gradients that are an argument: another path.
    """
    if aval.dtype != self.dtype or aval.shape != self.shape:
      return False
    return self.is_parameter or bool(self.keys and self.shape and self.keys in (keys, keys[1:]))


class Addition(NamedTuple):
  """An equation that adds an update to an argument.

  Fields:
    group: of the update.
    argument: which of the two operands holds the argument.
    dtype: that in which the sum is stored.
  """

  group: Group
  argument: int
  dtype: DType


class Plan(NamedTuple):
  """What is to be counted.

  Fields:
    inputs: the group of each argument that is a parameter, or optimizer state.
    results: that of the results of a step.
    additions: the steps that add an update.
    readers: where an argument is read first.
  """

  inputs: Mapping[int, Group]
  results: Mapping[int, Group]
  additions: Mapping[int, Addition]
  readers: Mapping[int, Location]


class _Sum(NamedTuple):
  """A value that is a sum of an argument and an update."""

  argument: int
  step: int
  operand: int


_Held: TypeAlias = Literal["neutral", "low", "data"]


class _Value(NamedTuple):
  """A floating value.

  Fields:
    kind: "data" is float32 for a reason, "low" what a matmul returned and what is computed from it;
      parameters, numbers and what is computed from these alone are "neutral".
    wide: a policy holds it in float32, or it is a number that float16 does not have.
    origins: the values whose numbers these are, moved or cast: arguments, and results of steps.
    same: the arguments, or sums with one, that it is, element by element: several after a branch.
  """

  kind: _Held = "data"
  wide: bool = True
  origins: frozenset[int] = frozenset()
  same: frozenset[int | _Sum] = frozenset()


_OPS = OpLists()
_WIDEST: Sequence[_Held] = ("data", "low", "neutral")
_FLOAT16 = np.dtype(np.float16)


class _Planner:
  """Goes through the steps of a function."""

  def __init__(self) -> None:
    self.places: dict[int, Step] = {}
    """The steps that are counted, by number."""
    self.low: set[int] = set()
    """The values that a policy holds in low precision."""
    self.readers: dict[int, Location] = {}
    """Where a value is read first, but by the optimizer."""
    self.backward = False

  def walk(self, body: Body, values: Sequence[_Value | None]) -> list[_Value | None]:
    """Notes what is to be counted in a body, and returns what its results are."""
    env: dict[int, _Value | None] = dict(zip(body.inputs, values, strict=True))
    for slot, x in body.consts.items():
      env[slot] = _Value() if is_inexact(getattr(x, "dtype", None)) else None

    def read(slot: Slot) -> _Value | None:
      return _number(slot) if isinstance(slot, JaxprLiteral) else env[slot]

    for step in body.steps:
      operands = [*map(read, step.ins)]
      results = self._entered(step, operands) if step.bodies else self._computed(step, operands)
      env |= dict(zip(step.outs, results, strict=True))
    return [read(slot) for slot in body.outputs]

  def _entered(self, step: Step, operands: Sequence[_Value | None]) -> list[_Value | None]:
    joined: list[_Value | None] = []
    for inner, body in zip(step.inner, step.bodies, strict=True):
      if not inner.returns:
        continue
      values = [operands[i] for i in inner.operands or ()]
      values += [None] * (len(body.inputs) - len(values))  # Which lanes of a `vmap` go on.
      outs = self.walk(body, values)
      if inner.carry:
        # What a carry is that starts as zeros, the body says.
        for place, out in zip(inner.carry, outs, strict=False):
          values[place] = _either(values[place], out)
        outs = self.walk(body, values)
      joined = [_either(*pair) for pair in zip(joined, outs, strict=True)] if joined else outs
    return joined

  def _computed(self, step: Step, operands: Sequence[_Value | None]) -> list[_Value | None]:
    """Notes what is to be counted of a step, and returns what its results are."""
    eqn, here = step.eqn, step.location
    part = _OPS.part_of(eqn.primitive.name, eqn.params)
    self.backward |= here.direction == "backward"
    # What follows the backward pass and is in no module is the work of the optimizer.
    work = self.backward and here.direction == "forward" and not here.path
    origins = frozenset[int]().union(*(value.origins for value in operands if value is not None))
    for each in () if work else origins:
      self.readers.setdefault(each, here)
    if facts_of(eqn).moves or eqn.primitive is convert_element_type_p:
      # The same numbers again.
      return [_result(step, v, part, operands, origins) for v in eqn.outvars]
    self.low |= origins if part == "half" else set()
    results = [
      _result(step, v, part, operands, frozenset([slot]))
      for slot, v in zip(step.outs, eqn.outvars, strict=True)
    ]
    if not work and here.direction != "recomputed" and any(results):
      self.places[step.number] = step
      if any(value and value.kind == "low" and not value.wide for value in results):
        self.low.update(step.outs)
    return results

  @property
  def unread(self) -> Kind:
    """What an argument is that the optimizer alone reads."""
    return "optimizer state" if self.backward else "parameters"

  def group(self, step: Step, path: str) -> Group:
    """Returns the heading of a step."""
    kind: Kind = "gradients" if step.location.direction == "backward" else "activations"
    low = not self.low.isdisjoint(step.outs)
    return Group(kind if low else "float32", path)


def _number(literal: JaxprLiteral) -> _Value | None:
  if not is_inexact(dtype_of(literal)):
    return None
  with np.errstate(over="ignore"):
    exact = np.asarray(literal.val).astype(_FLOAT16) == literal.val
  return _Value("neutral", not bool(np.all(exact)))


def _result(
  step: Step,
  out: Atom,
  part: str | None,
  operands: Sequence[_Value | None],
  origins: frozenset[int],
) -> _Value | None:
  """Returns what a result of a step is: the table of `docs/concepts.md`."""
  eqn, dtype, facts = step.eqn, dtype_of(out), facts_of(step.eqn)
  if dtype is None or not is_inexact(dtype):
    return None
  floats = [value for value in operands if value is not None]
  same = _same(step, out, operands)
  if part == "half" or is_low_precision(dtype):
    return _Value("low", False, origins, same)
  if not floats:  # Random numbers and masks are neutral, positions are data.
    neutral = facts.neutral or np.dtype(np.bool_) in map(dtype_of, eqn.invars)
    return _Value("neutral" if neutral else "data", not neutral, origins, same)
  order = ("low", "data", "neutral") if facts.role == "product" else _WIDEST
  kind: _Held = min((value.kind for value in floats), key=lambda kind: order.index(kind))
  # Of a number that is computed from numbers, float16 may have it or not.
  computed = kind == "neutral" and not (facts.moves or eqn.primitive is convert_element_type_p)
  wide = part in ("float32", "opaque", None) or computed or any(value.wide for value in floats)
  return _Value(kind, wide, origins, same)


def _same(step: Step, out: Atom, operands: Sequence[_Value | None]) -> frozenset[int | _Sum]:
  """Returns which arguments, or sums with one, a result is."""
  pairs = [
    (position, value.same)
    for position, (atom, value) in enumerate(zip(step.eqn.invars, operands, strict=True))
    if value is not None and shape_of(atom) == shape_of(out)
  ]
  primitive = step.eqn.primitive
  if primitive in (add_p, sub_p):
    return frozenset(
      _Sum(one, step.number, position)
      for position, same in pairs
      if primitive is add_p or position == 0
      for one in same
      if isinstance(one, int)
    )
  if facts_of(step.eqn).exact or primitive is convert_element_type_p:
    # Selected, clipped, cast: still the parameter, or the sum.
    return frozenset[int | _Sum]().union(*(same for _, same in pairs))
  return frozenset()


def _either(one: _Value | None, other: _Value | None) -> _Value | None:
  """Returns what a value is that comes from one of two branches."""
  if one is None or other is None:
    return one or other
  kind: _Held = min(one.kind, other.kind, key=lambda kind: _WIDEST.index(kind))
  origins, same = one.origins | other.origins, one.same | other.same
  return _Value(kind, one.wide or other.wide, origins, same)


def is_inexact(dtype: DType | None) -> bool:
  """Whether values of a dtype are floating or complex numbers."""
  return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def plan(
  body: Body,
  inputs: Sequence[Input | None],
  outputs: Sequence[tuple[tuple[str, ...], ShapedArray]] = (),
) -> Plan:
  """Returns what is to be counted in a function.

  Args:
    body: the function.
    inputs: what its arguments are; None for those that are no floating arrays.
    outputs: the names of the keys of its results, and their types; () if nothing is updated.
  """
  planner = _Planner()
  graph = Graph(body)
  owned = zip(graph.arguments, inputs, strict=True)
  name_by_parameters(graph, {v: one.module for v, one in owned if one is not None})
  paths = paths_of(graph)
  pairs = zip(body.inputs, inputs, strict=True)
  outs = planner.walk(
    body, [one and _argument(i, slot, one) for i, (slot, one) in enumerate(pairs)]
  )
  additions: dict[int, Addition] = {}
  for (keys, aval), out in zip(outputs, outs, strict=False):
    for argument, number, operand in sorted(
      each for each in (out.same if out else ()) if isinstance(each, _Sum)
    ):
      one = inputs[argument]
      if one is not None and one.is_stored_in(aval, keys):
        # Of `a + b`, two arguments, the first is what is updated.
        additions.setdefault(number, Addition(Group("updates", one.path), operand, one.dtype))
  readers = {
    i: planner.readers[slot] for i, slot in enumerate(body.inputs) if slot in planner.readers
  }
  counted = {
    i: Group("parameters" if i in readers else planner.unread, one.path)
    for i, one in enumerate(inputs)
    if one is not None and one.is_parameter
  }
  results = {
    number: planner.group(step, paths[number])
    for number, step in planner.places.items()
    if number not in additions
  }
  return Plan(counted, results, additions, readers)


def _argument(position: int, slot: int, one: Input) -> _Value:
  origins, same = frozenset([slot]), frozenset[int | _Sum]([position])
  if is_low_precision(one.dtype):
    return _Value("low", False, origins, same)
  return _Value("neutral" if one.is_parameter else "data", not one.is_parameter, origins, same)
