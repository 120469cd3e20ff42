"""Run a rewritten jaxpr so that JAX differentiates repeated parts, such as layers, once.

JAX differentiates the equations of a jaxpr one by one, which takes most of the time of tracing a
gradient. It differentiates a jitted function once. So repeated parts become jitted functions.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.types import HALVES, Array
from mpjax._jaxpr.calls import call_of, called, jaxpr_of
from mpjax._jaxpr.compat import (
  comes_from_program,
  is_in_program,
  varying_axes,
  with_equations,
  without_scopes,
)
from mpjax._jaxpr.locations import lines_of_call, location
from mpjax._jaxpr.primitives import is_higher_order
from mpjax._jaxpr.reader import Atom, aval_of, is_number
from mpjax._policy.active import AUDIT

_LONG = 64  # Equations. A shorter jaxpr is inlined: it is easier to read, and a call costs time.


def run(jaxpr: Jaxpr, consts: Sequence[Array], operands: Sequence[Array], name: str) -> list[Array]:
  """Returns the results of a jaxpr.

  If JAX is tracing another jaxpr, a long one becomes one call. Writing its equations again would
  take as long as tracing the function. Otherwise the equations run one by one, or under the active
  transformation.
  """
  values = [*consts, *operands]
  # A call is written only into a jaxpr, so no tracer may be of `grad` or `vmap`.
  tracers = [x for x in values if isinstance(x, Tracer)]
  is_long = len(jaxpr.eqns) >= _LONG and bool(tracers) and all(map(is_in_program, tracers))
  # In a `shard_map` the tangent of a varying operand may vary over fewer axes. A call adapts its
  # tangents to the types of its operands, and an equation does not. Outside of a program, results
  # of operations on a mesh of one device have no explicit axes, and other operands may have them.
  is_traced = bool(tracers) and all(map(comes_from_program, tracers))
  avals = [aval_of(v) for v in jaxpr.invars]
  is_sharded = not is_traced and any(any(aval.sharding.spec) for aval in avals)
  if is_long or is_sharded or any(map(varying_axes, avals)):
    jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    outs = called(ClosedJaxpr(jaxpr, ()), values, name)
  else:
    # Under `grad` or `vmap` inside `jit`, equations are traced one by one, and repeated parts once.
    # With concrete values each part would be compiled.
    if is_traced:
      jaxpr = with_shared_parts(jaxpr)
    outs = eval_jaxpr(jaxpr, consts, *operands)
  return [_of_type(x, aval_of(v)) for x, v in zip(outs, jaxpr.outvars, strict=True)]


def _of_type(x: Any, aval: ShapedArray) -> Array:
  """Returns a result as an array of its type; a literal is a number of Python or NumPy."""
  x = x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype)
  # A rule of mpjax may return a strong type for weakly typed operands. A result in low precision is
  # never weak, because the policy has chosen its dtype.
  weak_type = aval.weak_type and aval.dtype not in HALVES
  if jax.typeof(x).weak_type == weak_type:
    return x
  params = {"new_dtype": aval.dtype, "weak_type": weak_type, "sharding": None}
  return convert_element_type_p.bind(x, **params)


def with_shared_parts(jaxpr: Jaxpr) -> Jaxpr:
  """Returns the same jaxpr in which equal parts are calls of one jaxpr.

  JAX inlines these calls when it traces a jaxpr. Only profiles change: they show the lines of the
  first part, and the transformations around it.
  """
  groups = _groups(jaxpr.eqns)
  # The number of the last group that reads each variable; for results, one past all.
  last_read: dict[Atom, int] = {}
  for number, group in enumerate(groups):  # In order, so that a later group overwrites.
    last_read |= dict.fromkeys((v for eqn in group for v in variables(eqn.invars)), number)
  last_read |= dict.fromkeys(variables(jaxpr.outvars), len(groups))
  parts = [_part(group, number, last_read) for number, group in enumerate(groups)]
  counts = Counter(key for key, *_ in parts)
  # One call for each key, which later parts repeat with their own variables.
  calls: dict[Hashable, JaxprEqn] = {}
  eqns: list[JaxprEqn] = []
  for group, (key, invars, outvars) in zip(groups, parts, strict=True):
    if counts[key] == 1:
      eqns += group
      continue
    if key not in calls:
      closed = ClosedJaxpr(jaxpr_of(unscoped(group), invars, outvars), ())
      calls[key] = call_of(closed, invars, outvars, "part", inline=True)
    where = {"source_info": group[0].source_info, "ctx": group[0].ctx}
    eqns.append(calls[key].replace(invars=[*invars], outvars=outvars, **where))
  return with_equations(jaxpr, eqns)


def _groups(eqns: Sequence[JaxprEqn]) -> list[list[JaxprEqn]]:
  """Returns groups of consecutive equations of one scope. In an audit they are of one call, too.

  JAX gives all equations of a part the line of the first. An equation with effects is a group,
  since JAX orders prints by the effects of equations. So is an equation whose inner jaxprs occur
  once. A group also ends before an equation that it already has, so that equal layers without
  scopes become equal groups.
  """
  # Equal activation functions, and equal matmuls with a rule, share one dict of parameters, since
  # their equations are cached.
  held = Counter(id(eqn.params) for eqn in eqns)
  needs_lines = AUDIT.value is not None

  def place(eqn: JaxprEqn) -> Hashable:
    alone = eqn.effects or (is_higher_order(eqn) and held[id(eqn.params)] == 1)
    if alone:
      return id(eqn)
    lines = (location(eqn).source, lines_of_call(eqn)) if needs_lines else ()
    return (eqn.source_info.name_stack, eqn.ctx, *lines)

  groups: list[list[JaxprEqn]] = []
  for _, each in itertools.groupby(eqns, place):
    keys: set[Hashable] = set()
    groups.append([])
    for eqn in each:
      key, *_ = _part([eqn], 0, {})
      # Wherever the first group begins, equal layers are soon cut at equal places.
      if key in keys:
        groups.append([])
        keys.clear()
      groups[-1].append(eqn)
      keys.add(key)
  return groups


def unscoped(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
  """Returns equations without their scope, which the call of their jaxpr has."""
  # Otherwise a profile would show `layer_1/layer_0/tanh` for the second layer.
  names = without_scopes(eqns[0].source_info.name_stack, "")
  return [eqn.replace(source_info=eqn.source_info.replace(name_stack=names)) for eqn in eqns]


def variables(atoms: Iterable[Atom]) -> set[Var]:
  """Returns the variables among some atoms."""
  return {v for v in atoms if not isinstance(v, Literal)}


def _part(
  eqns: Sequence[JaxprEqn], index: int, last_read: Mapping[Atom, int]
) -> tuple[Hashable, list[Var], list[Var]]:
  """Returns a key of the part with this index, and the variables that it reads and returns."""
  # Parts with equal keys compute the same function. Variables count by the order in which the part
  # reads or defines them, since two layers have different variables.
  numbers: dict[Atom, int] = {}
  invars: list[Var] = []

  def number(atom: Atom) -> Hashable:
    if isinstance(atom, Literal):
      return _key_of_literal(atom)
    if atom not in numbers:  # No equation of the part defines it.
      numbers[atom] = len(numbers)
      invars.append(atom)
    return numbers[atom]

  # An equation with effects is never shared, so its own id makes the key unique.
  key: list[Hashable] = [id(eqns[0])] if eqns[0].effects else []
  for eqn in eqns:
    # A jaxpr has no cheap comparison, so parameters with jaxprs are compared by identity.
    params = (id(eqn.params),) if is_higher_order(eqn) else eqn.params.items()
    key.append((eqn.primitive, eqn.ctx, *map(number, eqn.invars), *params))
    numbers |= {v: len(numbers) + i for i, v in enumerate(eqn.outvars)}
  outvars = [v for eqn in eqns for v in eqn.outvars if last_read.get(v, -1) > index]
  key += [(numbers[v], v.aval) for v in (*invars, *outvars)]
  return tuple(key), invars, outvars


def _key_of_literal(literal: Literal) -> Hashable:
  """Returns a key that literals of the same value and type share."""
  # By bytes, since NaN is not equal to itself and -0.0 is equal to 0.0.
  # Large arrays are compared by identity. To compare their elements takes time.
  same = np.asarray(literal.val).tobytes() if is_number(literal) else id(literal.val)
  return literal.aval, same


def with_key(
  eqns: Sequence[JaxprEqn], roots: Sequence[Var], outs: Sequence[Atom]
) -> tuple[Jaxpr, Hashable]:
  """Returns a jaxpr of equations, and a key; jaxprs with equal keys compute the same function."""
  new = jaxpr_of(unscoped(eqns), roots, outs)
  # In an audit, each operation needs its own line.
  return new, _part(new.eqns, 0, dict.fromkeys(outs, 1))[0] if AUDIT.value is None else id(new)
