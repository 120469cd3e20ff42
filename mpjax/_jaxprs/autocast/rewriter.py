"""Writing a jaxpr anew with other dtypes: one equation after the other, nothing is executed."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.lax import Precision

from mpjax._core.audit_record import AUDIT
from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of, cast_to, dtype_of, literal_as, retyped
from mpjax._jaxprs.autocast.eqn_params import fits, in_precision
from mpjax._jaxprs.autocast.scopes import (
  NOT_FLOAT8,
  PREFIX,
  REGION,
  as_written,
  low_dtype,
  names_of,
  policy_at,
  region_of,
)
from mpjax._jaxprs.autocast.uses import readers_of
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Kind,
  Kinds,
  Scope,
  Settings,
  Value,
  joined,
  literal_value,
)
from mpjax._jaxprs.compat import NameStack, with_scope, without_scopes
from mpjax._jaxprs.inner_jaxprs import holds_jaxpr, warn_not_entered
from mpjax._jaxprs.primitives import facts_of


class Rewritten(NamedTuple):
  """A jaxpr as it is now, and the kinds of its results.

  `closed` is the same, closed over no constants; None if it has some. JAX compiles an object once,
  and an equal one again.
  """

  jaxpr: Jaxpr
  outs: Kinds
  closed: ClosedJaxpr | None


class Rewriter:
  """The rewriting of one jaxpr; those inside of its equations are rewritten by others.

  Fields:
    settings: what was asked for.
    readers: the consumers of each variable, see `readers_of`.
    eqns: what is written so far.
    values: the floating values by the variables that held them. Variables of other dtypes stay.
  """

  def __init__(self, jaxpr: Jaxpr, settings: Settings, scope: Scope, outs: Sequence[int]) -> None:
    self.settings = settings
    self.readers = readers_of(jaxpr, outs, settings)
    self.eqns: list[JaxprEqn] = []
    self.values: dict[Var, Value] = {}
    self._scope = scope
    self._places: dict[int, tuple[Scope, DType | None]] = {}
    self._names: dict[int, NameStack] = {}

  # Values.

  def define(self, var: Var, kind: Kind, *, recast: bool = False) -> Var:
    """Notes what a variable is from now on, and returns the variable of the dtype that it has."""
    # A variable that keeps its dtype stays, and so do the equations that are left as they are.
    atom = var if kind.variable == dtype_of(var) else retyped(var, kind.variable)
    self.values[var] = Value(atom, kind._replace(carried=None), recast and kind.neutral)
    return atom

  def value(self, atom: Atom) -> Value | None:
    """Returns what is known of a floating operand; None for everything else."""
    dtype = dtype_of(atom)
    if isinstance(atom, Literal):
      return literal_value(atom) if dtype in FLOATS else None
    value = self.values.get(atom)
    if value is None and dtype is not None and dtype in HALVES:  # A cast of the user's.
      value = self.values[atom] = Value(atom, Kind(dtype))
    return value

  def view(self, value: Value, dtype: DType, eqn: JaxprEqn | None) -> Atom:
    """Returns what holds a value in `dtype`, after a cast if need be."""
    if dtype_of(value.atom) == dtype:
      return value.atom
    if isinstance(value.atom, Literal):
      return literal_as(value.atom, dtype)
    view = None if value.views is None else value.views.get(dtype)
    if view is not None:
      return view
    producer = value.producer
    if producer is not None and value.is_repeated and isinstance(producer.invars[0], Literal):
      # The array is filled with the number in another dtype, as by hand: with a cast of the float32
      # array a mask of the size of attention's logits would be in memory twice.
      (number, *sizes), (var,) = producer.invars, producer.outvars
      view, filled = retyped(var, dtype), literal_as(cast(Literal, number), dtype)
      self.eqns.append(producer.replace(invars=[filled, *sizes], outvars=[view]))
    else:
      view = self.cast(value.atom, retyped(value.atom, dtype), eqn)
    # Three casts of one weight, for the projections of attention: their gradients are cast to
    # float32 one by one and then added. With one cast for all, they would be added in bfloat16.
    if not value.recast:
      value.views = {**(value.views or {}), dtype: view}
    return view

  def cast(self, atom: Atom, var: Var, eqn: JaxprEqn | None) -> Var:
    """Writes a cast of `atom` to the dtype of `var`, instead of an equation that reads it."""
    self.eqns.append(cast_to(var, atom, None if eqn is None else self.shown(eqn)))
    return var

  def place(self, eqn: JaxprEqn) -> tuple[Scope, DType | None]:
    """Returns the scope of an equation, and the compute dtype there; None where nothing changes."""
    stack = eqn.source_info.name_stack  # Alive as long as the jaxpr is, and so its id is its own.
    place = self._places.get(id(stack))
    if place is None:
      scope = self._scope + names_of(stack)
      place = self._places[id(stack)] = (scope, low_dtype(policy_at(scope, self.settings)))
    return place

  def shown(self, eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation as a profile is to show it, without our marks, and from the same line."""
    place, stack = self.place(eqn), eqn.source_info.name_stack
    names = self._names.get(id(stack))
    if names is None:
      if AUDIT.value is None:
        names = without_scopes(stack, PREFIX)
      else:
        # What an audit reads.
        region = REGION + region_of(policy_at(place[0], self.settings))
        names = with_scope(without_scopes(stack, REGION), region)
      self._names[id(stack)] = names
    if names is stack:
      return eqn
    self._places[id(names)] = place
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))

  def not_float8(self, eqn: JaxprEqn, reason: str) -> JaxprEqn:
    """Returns a matmul that says, where an audit reads it, why it is not in float8."""
    if AUDIT.value is None:
      return eqn
    place, names = self.place(eqn), with_scope(eqn.source_info.name_stack, NOT_FLOAT8 + reason)
    self._names[id(names)], self._places[id(names)] = names, place
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))

  # Equations.

  def write(
    self,
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    kinds: Sequence[Kind | None],
    params: dict[str, Any] | None = None,
    *,
    recast: bool = False,
  ) -> None:
    """Writes an equation with new operands, results of these kinds, and perhaps new parameters.

    A neutral result is `recast` if it is a parameter that was moved or scaled.
    """
    outs = [
      v if kind is None else self.define(v, kind, recast=recast)
      for v, kind in zip(eqn.outvars, kinds, strict=True)
    ]
    params = self.precise(eqn, eqn.params if params is None else params, map(dtype_of, operands))
    self.eqns.append(eqn.replace(invars=list(operands), outvars=outs, params=params))

  def precise(
    self, eqn: JaxprEqn, params: dict[str, Any], dtypes: Iterable[DType | None]
  ) -> dict[str, Any]:
    """Returns parameters with a precision, if a matmul, of operands in `dtypes` now, names none."""
    if params.get("precision", 0) is not None:
      return params
    now, default = [*dtypes], self.settings.precision
    policy = policy_at(self.place(eqn)[0], self.settings)
    asked = None if policy is None else policy.precision
    if asked is not None and fits(eqn, asked, now):
      # As JAX has it: of both operands, or an algorithm for both.
      both = (asked, asked) if isinstance(asked, Precision) else asked
      return {**params, "precision": both}
    # `jax_default_matmul_precision` was taken away for the trace, see `traced`. A matmul whose
    # operands keep their dtype gets it back: "highest" is about what runs in float32.
    left_as_it_is = default is not None and now[0] == dtype_of(eqn.invars[0])
    return {**params, "precision": default} if left_as_it_is else params

  def untouched(self, eqn: JaxprEqn) -> None:
    """Writes an equation as it was, in the dtypes that it was traced with."""
    operands = [self.original(atom, eqn) for atom in eqn.invars]
    default, params = self.settings.precision, None
    if default is not None and holds_jaxpr(eqn.params.values()):
      params = in_precision(eqn, default)
    self.write(eqn, operands, [self.kind_as_traced(eqn, v) for v in eqn.outvars], params)

  def not_entered(self, eqn: JaxprEqn) -> None:
    """Writes an equation as it was, since it is not known how it runs the jaxprs that it holds."""
    instead = "It runs as it was traced, in the dtypes that it was traced with."
    warn_not_entered(eqn, "mpjax.autocast", instead)
    self.untouched(eqn)

  def original(self, atom: Atom, eqn: JaxprEqn) -> Atom:
    """Returns an operand in the dtype that it was traced with."""
    value = None if isinstance(atom, Literal) else self.values.get(atom)
    return atom if value is None else self.view(value, aval_of(atom).dtype, eqn)

  def kind_as_traced(self, eqn: JaxprEqn, var: Var) -> Kind | None:
    """Returns the kind of a result in the dtype that it was traced with: that of the operands.

    What no floating operand went into is data, but for random numbers.
    """
    dtype = dtype_of(var)
    if dtype is None or dtype not in FLOATS:
      return None
    operands = [kind for kind in map(self.kind, eqn.invars) if kind is not None]
    if dtype != FLOAT32 or as_written(self.place(eqn)[0], self.settings):
      return Kind(dtype)
    kind = joined(operands) or Kind(FLOAT32, facts_of(eqn).neutral)
    return kind._replace(held=kind.is_low)

  def kind(self, atom: Atom) -> Kind | None:
    """Returns the kind of a floating operand, as it is held."""
    value = self.value(atom)
    return None if value is None else value.kind

  def readers_of(self, eqn: JaxprEqn) -> int:
    """The consumers of the floating results of an equation."""
    each = (self.readers.get(v, 0) for v in eqn.outvars if dtype_of(v) in FLOATS)
    return functools.reduce(operator.or_, each, 0)
