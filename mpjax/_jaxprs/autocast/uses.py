"""The consumers of each value: looked up backwards, before a jaxpr is rewritten."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import convert_element_type_p, reduce_precision_p

from mpjax._core.dtypes import FLOAT32
from mpjax._jaxprs.atoms import Atom, dtype_of
from mpjax._jaxprs.autocast.scopes import OUTPUT, REST, dtype_marked, names_of
from mpjax._jaxprs.autocast.values import FLOATS, Settings, cached_per_jaxpr
from mpjax._jaxprs.inner_jaxprs import Inner, inner_jaxprs
from mpjax._jaxprs.primitives import facts_of, is_higher_order

MATMUL = 1
"""A matmul, at once or behind operations that are in neither list."""

FULL = 2
"""An operation of the float32 list, likewise."""

SUMMED = 4
"""Something that a rounding would change: a sum, a comparison, an index, a carry, an operation of
the float32 list; at once or behind multiplications and what keeps its dtype."""

UNROUNDED = 8
"""A reader for which nothing rounds the value, nor a sum with it."""

FACTOR = 16
"""A multiplication, at once or behind operations that keep a dtype: rounded, a factor may overflow.
"""

CALLER = 32
"""The caller, who asks for float32: by the `output_dtype` of a module or of the function; at once,
behind what moves elements, or behind a sum that nothing else reads. A matmul that has such a reader
returns its float32 sum, to all of them."""

RETURNED = 64
"""A caller that takes the dtype that there is, likewise."""

EXACT = SUMMED | UNROUNDED
"""A comparison, an index, a carry."""

HELD = SUMMED | CALLER | RETURNED
"""All of these: a value that was computed in float32 is not rounded for them."""

DIGITS = UNROUNDED | CALLER | RETURNED
"""All of these: they get all digits of a value, or of a sum with it."""

Readers: TypeAlias = dict[Atom, int]
"""The sum of the above for each variable."""


def only_float32(readers: int) -> bool:
  """Whether operations of the float32 list read a value, and no matmul."""
  return readers & (FULL | MATMUL) == FULL


def readers_of(jaxpr: Jaxpr, outs: Sequence[int], settings: Settings) -> Readers:
  """Returns the consumers of each variable.

  `outs` has the consumers of each of its results, outside.
  """
  found: Readers = {}

  def note(atoms: Sequence[Atom], each: Sequence[int]) -> None:
    for atom, readers in zip(atoms, each, strict=True):
      if readers and not isinstance(atom, Literal):
        found[atom] = found.get(atom, 0) | readers

  note(jaxpr.outvars, outs)
  for eqn in reversed(jaxpr.eqns):
    results = tuple(found.get(v, 0) for v in eqn.outvars)
    if is_higher_order(eqn):
      note(eqn.invars, _of_operands(eqn, results, settings))
    else:
      note(eqn.invars, (_of_operation(eqn, results, settings),) * len(eqn.invars))
  return found


def _of_operation(eqn: JaxprEqn, results: Sequence[int], settings: Settings) -> int:
  """What an operation that holds no jaxpr is to its operands."""
  part = settings.ops.part_of(eqn.primitive.name, eqn.params)
  behind = 0
  for var, readers in zip(eqn.outvars, results, strict=True):
    behind |= readers if dtype_of(var) in FLOATS else EXACT
  if part == "half":
    return MATMUL
  if eqn.primitive is convert_element_type_p or part in ("promote", "keep"):
    rounded = eqn.primitive is convert_element_type_p and eqn.params["new_dtype"] != FLOAT32
    if rounded and dtype_of(eqn.outvars[0]) in FLOATS:
      return behind & MATMUL  # A cast of the user's.
    facts = facts_of(eqn)
    if facts.moves or eqn.primitive is convert_element_type_p:
      return behind
    if facts.role == "sum" and behind == CALLER:
      return CALLER
    returned = RETURNED if behind & CALLER else 0
    return behind & ~CALLER | returned | _ROLES.get(facts.role, 0)
  if eqn.primitive is reduce_precision_p:
    scope = names_of(eqn.source_info.name_stack)
    leaving = dtype_marked(scope, OUTPUT)
    if dtype_marked(scope, REST) is not None:
      return CALLER if behind & CALLER else behind & MATMUL
    if leaving is not None:
      return CALLER if leaving == FLOAT32 else behind & MATMUL
  return FULL | EXACT


_ROLES: Mapping[str | None, int] = {"sum": SUMMED, "product": FACTOR}


def _of_operands(eqn: JaxprEqn, outs: tuple[int, ...], settings: Settings) -> Sequence[int]:
  """What an equation that holds jaxprs is to each operand."""
  inners = inner_jaxprs(eqn)
  if not inners or any(inner.operands is None for inner in inners):
    return (FULL | EXACT,) * len(eqn.invars)
  each = [0] * len(eqn.invars)
  for inner in inners:
    results = outs if inner.returns else (EXACT,) * len(inner.jaxpr.outvars)
    if inner.carry:
      results = of_loop(inner, results, settings)
    readers = of_inputs(inner.jaxpr, results, settings)
    for place, more in zip(inner.operands or (), readers, strict=True):
      each[place] |= more
  return each


def of_loop(body: Inner, outs: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
  """Returns the consumers of the results of a loop's body, the next iteration among them."""
  carry = body.carry
  first = (readers | EXACT for readers in outs[: len(carry)])
  outs = (*first, *outs[len(carry) :])
  while True:
    found = of_inputs(body.jaxpr, outs, settings)[carry.start : carry.stop]
    again = tuple(a | b for a, b in zip(outs, found, strict=False)) + outs[len(carry) :]
    if again == outs:
      return outs
    outs = again


@cached_per_jaxpr
def of_inputs(jaxpr: Jaxpr, outs: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
  """Returns the consumers of the arguments of a jaxpr, from those of its results."""
  found = readers_of(jaxpr, outs, settings)
  return tuple(found.get(v, 0) for v in jaxpr.invars)
