"""Which results of a jaxpr are counted, under which heading, and which are updated parameters."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core import Literal as JaxprLiteral
from jax.extend.core.primitives import add_p, convert_element_type_p, sub_p

from mpjax._core.types import DType
from mpjax._diagnostics.ranges.observed import Key, entered
from mpjax._jaxprs.atoms import Atom, dtype_of, shape_of
from mpjax._jaxprs.inner_jaxprs import inner_jaxprs
from mpjax._jaxprs.locations import Location, location
from mpjax._jaxprs.primitives import facts_of

Kind: TypeAlias = Literal["activations", "gradients", "parameters", "updates"]
"""What numbers are: "gradients" are all results of the backward pass."""


class Group(NamedTuple):
  """A row of counts.

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
    is_parameter: whether it is a parameter.
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
    row: for the update.
    argument: which of the two operands holds the argument.
    dtype: that in which the sum is stored.
  """

  row: int
  argument: int
  dtype: DType


class Plan(NamedTuple):
  """What is to be counted.

  Fields:
    groups: the rows.
    inputs: the row of each argument that is a parameter.
    results: the row for the results of an equation.
    additions: the equations that add an update.
    dtypes: all dtypes that are counted.
  """

  groups: tuple[Group, ...]
  inputs: Mapping[int, int]
  results: Mapping[Key, int]
  additions: Mapping[Key, Addition]
  dtypes: frozenset[DType]


class _Tag(NamedTuple):
  """What a value is: an argument, and, with a key, the sum that an equation makes of it."""

  argument: int
  key: Key | None = None
  operand: int = 0


_Tags: TypeAlias = frozenset[_Tag]
"""The arguments, or sums with them, that a value is, in some dtype: several after a branch."""

_NOTHING: _Tags = frozenset()


class _Planner:
  """Walks a jaxpr as `run_observed` runs it."""

  def __init__(self) -> None:
    self.rows: dict[Group, int] = {}
    self.results: dict[Key, int] = {}
    self.dtypes: set[DType] = set()
    self.seen_backward = False

  def row(self, kind: Kind, path: str) -> int:
    return self.rows.setdefault(Group(kind, path), len(self.rows))

  def walk(self, jaxpr: Jaxpr, given: Sequence[_Tags], around: Location, at: Key) -> list[_Tags]:
    env: dict[Var, _Tags] = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Atom) -> _Tags:
      return _NOTHING if isinstance(atom, JaxprLiteral) else env.get(atom, _NOTHING)

    for number, eqn in enumerate(jaxpr.eqns):
      key, here = (*at, number), location(eqn, around)
      operands = [read(atom) for atom in eqn.invars]
      if entered(eqn) is None:
        self._count(eqn, here, key)
        made = [_tags(eqn, v, operands, key) for v in eqn.outvars]
      else:
        made = self._enter(eqn, operands, here, key)
      env |= dict(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def _enter(
    self, eqn: JaxprEqn, operands: Sequence[_Tags], here: Location, key: Key
  ) -> list[_Tags]:
    made = [_NOTHING] * len(eqn.outvars)
    for number, inner in enumerate(inner_jaxprs(eqn) or ()):
      if not inner.returns:
        continue
      given = [operands[i] for i in inner.operands or ()]
      outs = self.walk(inner.jaxpr, given, here, (*key, number))
      made = [old | new for old, new in zip(made, outs, strict=True)]
    return made

  def _count(self, eqn: JaxprEqn, here: Location, key: Key) -> None:
    self.seen_backward |= here.direction == "backward"
    if facts_of(eqn).moves or eqn.primitive is convert_element_type_p:
      return  # The same numbers again.
    kind: Kind = "gradients" if here.direction == "backward" else "activations"
    # What follows the backward pass and is in no module is the work of the optimizer.
    work = kind == "activations" and self.seen_backward and not here.path
    dtypes = map(dtype_of, eqn.outvars)
    found = {dtype for dtype in dtypes if dtype is not None and is_inexact(dtype)}
    if found and not work and here.direction != "recomputed":
      self.results[key] = self.row(kind, here.path)
      self.dtypes |= found


def _tags(eqn: JaxprEqn, out: Atom, operands: Sequence[_Tags], key: Key) -> _Tags:
  """Returns which arguments, or sums with one, a result is."""
  if not is_inexact(dtype_of(out)):
    return _NOTHING
  if eqn.primitive in (add_p, sub_p):
    made = set[_Tag]()
    for operand, tags in enumerate(operands[: 1 if eqn.primitive is sub_p else 2]):
      if shape_of(eqn.invars[operand]) == shape_of(out):
        made |= {_Tag(tag.argument, key, operand) for tag in tags if tag.key is None}
    return frozenset(made)
  facts = facts_of(eqn)
  if not (facts.exact or eqn.primitive is convert_element_type_p):
    return _NOTHING
  # Selected, clipped, cast: still the parameter, or the sum.
  same = [
    tags
    for atom, tags in zip(eqn.invars, operands, strict=True)
    if hasattr(atom.aval, "shape") and shape_of(atom) == shape_of(out)
  ]
  return _NOTHING.union(*same)


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
  given = {
    i: planner.row("parameters", one.path)
    for i, one in enumerate(inputs)
    if one is not None and one.is_parameter
  }
  tags = [_NOTHING if one is None else frozenset({_Tag(i)}) for i, one in enumerate(inputs)]
  outs = planner.walk(jaxpr, tags, Location(), ())
  additions: dict[Key, Addition] = {}
  for atom, keys, found in zip(jaxpr.outvars, outputs, outs, strict=True):
    for argument, key, operand in sorted(tag for tag in found if tag.key is not None):
      one = inputs[argument]
      if key is not None and one is not None and one.is_stored_in(atom, keys):
        # Of `a + b`, two arguments, the first is what is updated.
        row = planner.row("updates", one.path)
        additions.setdefault(key, Addition(row, operand, one.dtype))
  for one in inputs:
    planner.dtypes |= {one.dtype} if one is not None else set()
  return Plan(
    groups=tuple(planner.rows),
    inputs=given,
    results={k: v for k, v in planner.results.items() if k not in additions},
    additions=additions,
    dtypes=frozenset(planner.dtypes),
  )
