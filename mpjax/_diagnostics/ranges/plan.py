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
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as JaxprLiteral
from jax.extend.core.primitives import add_p, convert_element_type_p, sub_p

from mpjax._core.dtypes import is_low_precision
from mpjax._core.types import DType
from mpjax._diagnostics.runner import Key, entered
from mpjax._jaxprs.atoms import Atom, dtype_of, shape_of
from mpjax._jaxprs.inner_jaxprs import Inner, inner_jaxprs
from mpjax._jaxprs.locations import Location, location
from mpjax._jaxprs.op_lists import OpLists
from mpjax._jaxprs.primitives import facts_of

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

  def is_stored_in(self, atom: Atom, keys: tuple[str, ...]) -> bool:
    """Whether a result may be the argument, changed.

    A momentum `0.9 * mu + grads` is no update of gradients that are an argument: another path.
    """
    if dtype_of(atom) != self.dtype or shape_of(atom) != self.shape:
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
    results: that of the results of an equation.
    additions: the equations that add an update.
    readers: where an argument is read first.
  """

  inputs: Mapping[int, Group]
  results: Mapping[Key, Group]
  additions: Mapping[Key, Addition]
  readers: Mapping[int | Key, Location]


class _Sum(NamedTuple):
  """A value that is a sum of an argument and an update."""

  argument: int
  key: Key
  operand: int


_Held: TypeAlias = Literal["neutral", "low", "data"]


class _Value(NamedTuple):
  """A floating value.

  Fields:
    kind: "data" is float32 for a reason, "low" what a matmul returned and what is computed from it;
      parameters, numbers and what is computed from these alone are "neutral".
    wide: a policy holds it in float32, or it is a number that float16 does not have.
    origins: the arguments whose numbers these are, moved or cast, and the equations.
    same: the arguments, or sums with one, that it is, element by element: several after a branch.
  """

  kind: _Held = "data"
  wide: bool = True
  origins: frozenset[int | Key] = frozenset()
  same: frozenset[int | _Sum] = frozenset()


_OPS = OpLists()
_WIDEST: Sequence[_Held] = ("data", "low", "neutral")
_FLOAT16 = np.dtype(np.float16)


class _Planner:
  """Walks a jaxpr as `runner.run` runs it."""

  def __init__(self) -> None:
    self.places: dict[Key, Location] = {}
    self.low: set[Key | int] = set()
    """The equations whose results a policy holds in low precision."""
    self.readers: dict[Key | int, Location] = {}
    """Where something is read first, but by the optimizer."""
    self.backward = False

  def walk(
    self, jaxpr: Jaxpr, values: Sequence[_Value | None], around: Location, at: Key
  ) -> list[_Value | None]:
    env: dict[Var, _Value | None] = dict(zip(jaxpr.invars, values, strict=True))
    for v in jaxpr.constvars:
      env[v] = _Value() if is_inexact(dtype_of(v)) else None

    def read(atom: Atom) -> _Value | None:
      return _number(atom) if isinstance(atom, JaxprLiteral) else env[atom]

    for number, eqn in enumerate(jaxpr.eqns):
      key, here = (*at, number), location(eqn, around)
      operands = [read(atom) for atom in eqn.invars]
      if entered(eqn) is None:
        results = self._computed(eqn, operands, here, key)
      else:
        results = self._enter(eqn, operands, here, key)
      env |= dict(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def _enter(
    self, eqn: JaxprEqn, operands: Sequence[_Value | None], here: Location, key: Key
  ) -> list[_Value | None]:
    joined: list[_Value | None] = []
    for number, inner in enumerate(inner_jaxprs(eqn) or ()):
      if inner.returns:
        outs = self._inside(inner, operands, here, (*key, number))
        joined = [_either(*pair) for pair in zip(joined, outs, strict=True)] if joined else outs
    return joined

  def _inside(
    self, inner: Inner, operands: Sequence[_Value | None], here: Location, at: Key
  ) -> list[_Value | None]:
    values = [operands[i] for i in inner.operands or ()]
    outs = self.walk(inner.jaxpr, values, here, at)
    if not inner.carry:
      return outs
    # What a carry is that starts as zeros, the body says.
    for place, out in zip(inner.carry, outs, strict=False):
      values[place] = _either(values[place], out)
    return self.walk(inner.jaxpr, values, here, at)

  def _computed(
    self, eqn: JaxprEqn, operands: Sequence[_Value | None], here: Location, key: Key
  ) -> list[_Value | None]:
    """Notes what is to be counted of an equation, and returns what its results are."""
    part = _OPS.part_of(eqn.primitive.name, eqn.params)
    self.backward |= here.direction == "backward"
    # What follows the backward pass and is in no module is the work of the optimizer.
    work = self.backward and here.direction == "forward" and not here.path
    floats = [value for value in operands if value is not None]
    origins = frozenset[int | Key]().union(*(value.origins for value in floats))
    for each in () if work else origins:
      self.readers.setdefault(each, here)
    if facts_of(eqn).moves or eqn.primitive is convert_element_type_p:
      # The same numbers again.
      return [_result(eqn, v, part, operands, key, origins) for v in eqn.outvars]
    self.low |= origins if part == "half" else set()
    results = [_result(eqn, v, part, operands, key, frozenset([key])) for v in eqn.outvars]
    if not work and here.direction != "recomputed" and any(results):
      self.places[key] = here
      if any(value and value.kind == "low" and not value.wide for value in results):
        self.low.add(key)
    return results

  @property
  def unread(self) -> Kind:
    """What an argument is that the optimizer alone reads."""
    return "optimizer state" if self.backward else "parameters"

  def group(self, key: Key) -> Group:
    """Returns the heading of an equation."""
    here = self.places[key]
    kind: Kind = "gradients" if here.direction == "backward" else "activations"
    return Group(kind if key in self.low else "float32", here.path)


def _number(literal: JaxprLiteral) -> _Value | None:
  if not is_inexact(dtype_of(literal)):
    return None
  with np.errstate(over="ignore"):
    exact = np.asarray(literal.val).astype(_FLOAT16) == literal.val
  return _Value("neutral", not bool(np.all(exact)))


def _result(
  eqn: JaxprEqn,
  out: Atom,
  part: str | None,
  operands: Sequence[_Value | None],
  key: Key,
  origins: frozenset[int | Key],
) -> _Value | None:
  """Returns what a result of an equation is: the table of `docs/concepts.md`."""
  dtype, facts = dtype_of(out), facts_of(eqn)
  if dtype is None or not is_inexact(dtype):
    return None
  floats = [value for value in operands if value is not None]
  same = _same(eqn, out, operands, key)
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


def _same(
  eqn: JaxprEqn, out: Atom, operands: Sequence[_Value | None], key: Key
) -> frozenset[int | _Sum]:
  """Returns which arguments, or sums with one, a result is."""
  pairs = [
    (position, value.same)
    for position, (atom, value) in enumerate(zip(eqn.invars, operands, strict=True))
    if value is not None and shape_of(atom) == shape_of(out)
  ]
  if eqn.primitive in (add_p, sub_p):
    return frozenset(
      _Sum(one, key, position)
      for position, same in pairs
      if eqn.primitive is add_p or position == 0
      for one in same
      if isinstance(one, int)
    )
  if facts_of(eqn).exact or eqn.primitive is convert_element_type_p:
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


def plan(jaxpr: Jaxpr, inputs: Sequence[Input | None], outputs: Sequence[tuple[str, ...]]) -> Plan:
  """Returns what is to be counted in a jaxpr.

  Args:
    jaxpr: the jaxpr.
    inputs: what its arguments are; None for those that are no floating arrays.
    outputs: the names of the keys of its results.
  """
  planner = _Planner()
  values = [None if one is None else _argument(i, one) for i, one in enumerate(inputs)]
  outs = planner.walk(jaxpr, values, Location(), ())
  additions: dict[Key, Addition] = {}
  for atom, keys, out in zip(jaxpr.outvars, outputs, outs, strict=True):
    for argument, key, operand in sorted(
      each for each in (out.same if out else ()) if isinstance(each, _Sum)
    ):
      one = inputs[argument]
      if one is not None and one.is_stored_in(atom, keys):
        # Of `a + b`, two arguments, the first is what is updated.
        additions.setdefault(key, Addition(Group("updates", one.path), operand, one.dtype))
  counted = {
    i: Group("parameters" if i in planner.readers else planner.unread, one.path)
    for i, one in enumerate(inputs)
    if one is not None and one.is_parameter
  }
  results = {key: planner.group(key) for key in planner.places if key not in additions}
  return Plan(counted, results, additions, planner.readers)


def _argument(position: int, one: Input) -> _Value:
  origins, same = frozenset[int | Key]([position]), frozenset[int | _Sum]([position])
  if is_low_precision(one.dtype):
    return _Value("low", False, origins, same)
  return _Value("neutral" if one.is_parameter else "data", not one.is_parameter, origins, same)
