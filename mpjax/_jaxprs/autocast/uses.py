"""What the readers of each value want: looked up backwards, before a jaxpr is rewritten."""

from collections.abc import Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import reduce_precision_p

from mpjax._jaxprs.atoms import Atom, dtype_of
from mpjax._jaxprs.autocast.scopes import names_of, output_of
from mpjax._jaxprs.autocast.values import FLOATS, Settings, kept
from mpjax._jaxprs.inner_jaxprs import inner_jaxprs
from mpjax._jaxprs.primitives import is_higher_order

FULL = 1
"""Some operation of the float32 list reads it, at once or behind others without an opinion."""

HALF = 2
"""Some operation of the `half` list does."""

RESULT = 4
"""It becomes a float32 result of the entire function, at once or behind such operations."""

Demands: TypeAlias = dict[Atom, int]


def demands(jaxpr: Jaxpr, wanted: Sequence[int], settings: Settings) -> Demands:
  """Returns what the readers of each variable want: a sum of the above.

  Args:
    jaxpr: a jaxpr.
    wanted: what is wanted of each of its results, outside.
    settings: for the lists.
  """
  found: Demands = {}
  for atom, want in zip(jaxpr.outvars, wanted, strict=True):
    if want and not isinstance(atom, Literal):
      found[atom] = found.get(atom, 0) | want
  parts = settings.ops.part_of
  for eqn in reversed(jaxpr.eqns):
    if is_higher_order(eqn):
      wants = of_operands(eqn, tuple(found.get(v, 0) for v in eqn.outvars), settings)
      for atom, want in zip(eqn.invars, wants, strict=True):
        if want and not isinstance(atom, Literal):
          found[atom] = found.get(atom, 0) | want
      continue
    part = parts(eqn.primitive.name, eqn.params)
    if part == "half":
      want = HALF
    elif eqn.primitive is reduce_precision_p and output_of(
      names_of(str(eqn.source_info.name_stack))
    ):
      want = found.get(eqn.outvars[0], 0)
    elif part == "promote" or part == "keep":
      want = 0
      for v in eqn.outvars:
        if dtype_of(v) in FLOATS:  # Consumers of a comparison do not read its operands.
          want |= found.get(v, 0)
    else:
      want = FULL
    if want:
      for atom in eqn.invars:
        if not isinstance(atom, Literal):
          found[atom] = found.get(atom, 0) | want
  return found


def of_operands(eqn: JaxprEqn, outs: tuple[int, ...], settings: Settings) -> Sequence[int]:
  """What an equation that holds jaxprs wants of each operand."""
  found = inner_jaxprs(eqn)
  if not found or any(inner.operands is None for inner in found):
    return (FULL,) * len(eqn.invars)
  wants = [0] * len(eqn.invars)
  for inner in found:
    jaxpr = inner.jaxpr
    wanted = outs if inner.returns else (0,) * len(jaxpr.outvars)
    if inner.carry:
      wanted = of_loop(jaxpr, inner.carry, wanted, settings)
    for place, want in zip(inner.operands or (), of_inputs(jaxpr, wanted, settings), strict=True):
      wants[place] |= want
  return wants


def of_loop(
  body: Jaxpr, carry: range, wanted: tuple[int, ...], settings: Settings
) -> tuple[int, ...]:
  """What is wanted of the results of a loop's body: what the next iteration wants counts too."""
  while True:
    found = of_inputs(body, wanted, settings)[carry.start : carry.stop]
    again = tuple(a | b for a, b in zip(wanted, found, strict=False)) + wanted[len(carry) :]
    if again == wanted:
      return wanted
    wanted = again


@kept
def of_inputs(jaxpr: Jaxpr, wanted: tuple[int, ...], settings: Settings) -> tuple[int, ...]:
  """What is wanted of the arguments of a jaxpr of whose results this is wanted."""
  found = demands(jaxpr, wanted, settings)
  return tuple(found.get(v, 0) for v in jaxpr.invars)
