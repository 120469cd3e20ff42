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
from mpjax._jaxprs.atoms import Atom, aval_of, cast_to, dtype_of, literal_as, retyped, shape_of
from mpjax._jaxprs.autocast.eqn_params import fits, in_precision
from mpjax._jaxprs.autocast.marks import NOT_FLOAT8, PREFIX, REGION, TABLE
from mpjax._jaxprs.autocast.scopes import (
  keeps_float32,
  marked,
  matmul_precision,
  names_of,
  region,
)
from mpjax._jaxprs.autocast.uses import FULL, HALF, demands
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Kind,
  Kinds,
  Scope,
  Settings,
  Value,
  is_statistic,
  literal_value,
)
from mpjax._jaxprs.compat import NameStack, with_scope, without_scopes
from mpjax._jaxprs.inner_jaxprs import holds_jaxpr, warn_not_entered


class Rewritten(NamedTuple):
  """A jaxpr as it is now.

  Fields:
    jaxpr: the jaxpr.
    outs: the kinds of its results: None for what is no floating value of ours.
    closed: the same, closed over no constants; None if it has some. JAX compiles an object once,
      and an equal one again.
  """

  jaxpr: Jaxpr
  outs: Kinds
  closed: ClosedJaxpr | None


class Rewriter:
  """The rewriting of one jaxpr; those inside of its equations are rewritten by others.

  Fields:
    settings: what was asked for.
    wanted: what the readers of each variable want, see `demands`.
    eqns: what is written so far.
  """

  def __init__(self, jaxpr: Jaxpr, settings: Settings, scope: Scope, wanted: Sequence[int]) -> None:
    self.settings = settings
    self.wanted = demands(jaxpr, wanted, settings)
    self.eqns: list[JaxprEqn] = []
    self._scope = scope
    # The floating values by the variables that held them. Variables of other dtypes stay the same.
    self._env: dict[Var, Value] = {}
    self._places: dict[int, tuple[Scope, DType | None]] = {}
    self._names: dict[int, NameStack] = {}

  # Values.

  def define(self, var: Var, kind: Kind, *, scope: Scope | None, once: bool = True) -> Var:
    """Notes what a variable holds from now on, and returns the one that holds it."""
    dtype, neutral, held, weight = kind
    held = held or dtype
    # A variable that keeps its dtype stays, and so do the equations that are left as they are.
    atom = var if held == dtype_of(var) else retyped(var, held)
    once = once or not neutral
    made = Value(atom, dtype, neutral, scope, self.wanted.get(var, 0), once, held)
    made.weight = weight
    self._env[var] = made
    return atom

  def hold(self, var: Var, value: Value) -> None:
    """Notes what a variable holds that nothing is written for."""
    self._env[var] = value

  def known(self, var: Var) -> Value | None:
    """Returns what a variable was noted to hold."""
    return self._env.get(var)

  def given(self, variables: Sequence[Var]) -> None:
    """Notes which values are arguments."""
    for var in variables:
      if var in self._env:
        self._env[var].given = self._env[var].neutral

  def value(self, atom: Atom, half: DType) -> Value | None:
    """Returns what is known of a floating operand; None for everything else.

    Args:
      atom: a variable or literal of the jaxpr as it was.
      half: the dtype in which it is about to be read, perhaps: some literals do not survive that.
    """
    dtype = dtype_of(atom)
    if isinstance(atom, Literal):
      if dtype == FLOAT32:
        return literal_value(atom, half)
      return Value(atom, dtype, neutral=True) if dtype is not None and dtype in HALVES else None
    found = self._env.get(atom)
    if found is None and dtype is not None and dtype in HALVES:  # The user's own cast made it.
      found = self._env[atom] = Value(atom, dtype, wanted=self.wanted.get(atom, 0))
    return found

  def view(self, value: Value, dtype: DType, eqn: JaxprEqn | None) -> Atom:
    """Returns what holds a value in `dtype`, after a cast if need be."""
    if value.held == dtype:
      return value.atom
    if isinstance(value.atom, Literal):
      return literal_as(value.atom, dtype)
    views = value.views
    found = None if views is None else views.get(dtype)
    if found is None:
      if value.filled is None:
        found = self.cast(value.atom, retyped(value.atom, dtype), eqn)
      else:
        found = self._filled(value.filled, dtype)
      # Three casts of one weight, for the projections of attention: their gradients are cast to
      # float32 one by one and then added. With one cast for all, they would be added in bfloat16.
      if value.once:
        value.views = {dtype: found} if views is None else {**views, dtype: found}
    return found

  def _filled(self, eqn: JaxprEqn, dtype: DType) -> Var:
    """Fills an array with the number of `eqn`, which repeats a literal, in another dtype.

    It is what one writes by hand: with a cast of the float32 array instead, a mask of the size of
    attention's logits would be in memory twice.
    """
    (number, *sizes), (var,) = eqn.invars, eqn.outvars
    new = retyped(var, dtype)
    filled = literal_as(cast(Literal, number), dtype)
    self.eqns.append(eqn.replace(invars=[filled, *sizes], outvars=[new]))
    return new

  def cast(self, atom: Atom, var: Var, eqn: JaxprEqn | None) -> Var:
    """Writes a cast of `atom` to the dtype of `var`, instead of an equation that reads it."""
    self.eqns.append(cast_to(var, atom, None if eqn is None else self.shown(eqn)))
    return var

  def place(self, eqn: JaxprEqn) -> tuple[Scope, DType | None]:
    """Returns the scope of an equation, and the compute dtype there; None where nothing changes."""
    stack = eqn.source_info.name_stack  # Alive as long as the jaxpr is, and so its id is its own.
    found = self._places.get(id(stack))
    if found is None:
      scope = self._scope + names_of(str(stack))
      found = self._places[id(stack)] = (scope, region(scope, self.settings))
    return found

  def shown(self, eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation as a profile is to show it, without our marks, and from the same line."""
    place, stack = self.place(eqn), eqn.source_info.name_stack
    names = self._names.get(id(stack))
    if names is None:
      if AUDIT.value is None:
        names = without_scopes(stack, PREFIX)
      else:
        names = with_scope(without_scopes(stack, REGION), REGION + self._region_name(place))
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

  def _region_name(self, place: tuple[Scope, DType | None]) -> str:
    """Returns what an audit reads: the dtype of matmuls in a scope, whichever policy says so."""
    scope, half = place
    return marked(scope) or (FLOAT32 if half is None else half).name

  def outside(
    self, value: Value | None, eqn: JaxprEqn, scope: Scope, half: DType, wanted: int
  ) -> Value | None:
    """Returns a value as an operation in another scope than its own reads it.

    A float32 value that has left the scope in which it was made, on its way to an operation of the
    `half` list, is rounded to the compute dtype, as the layers of Flax do it: it keeps activations
    as small as theirs. An operation whose result only float32 operations read reads it as it is.

    Args:
      value: an operand; None for what is no floating value.
      eqn: the equation that reads it.
      scope: that of the equation.
      half: the compute dtype there.
      wanted: what the readers of that which the equation makes of it want, see `demands`.
    """
    if value is None or not value.scope or value.dtype != FLOAT32:
      return value
    made, scope = (tuple(name for name in each if name != TABLE) for each in (value.scope, scope))
    if (
      scope[: len(made)] == made
      or not wanted & HALF
      or is_statistic(shape_of(value.atom))
      or keeps_float32(made, self.settings)
    ):
      return value
    # An activation, not a parameter: rounded once, for all its consumers outside.
    value.once = True
    return Value(self.view(value, half, eqn), half, wanted=value.wanted)

  # Equations.

  def write(
    self,
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    kinds: Sequence[Kind | None],
    params: dict[str, Any] | None = None,
    *,
    once: bool = True,
  ) -> None:
    """Writes an equation with new operands and results.

    Args:
      eqn: the equation as it was.
      operands: variables and literals.
      kinds: those of the results.
      params: its parameters, where they are other ones.
      once: one cast of a neutral result is enough. Not so if it is a parameter that was moved or
        scaled.
    """
    scope = self.place(eqn)[0]
    outs = [
      v if kind is None else self.define(v, kind, scope=scope, once=once)
      for v, kind in zip(eqn.outvars, kinds, strict=True)
    ]
    params = self.precise(eqn, eqn.params if params is None else params, map(dtype_of, operands))
    self.eqns.append(eqn.replace(invars=list(operands), outvars=outs, params=params))

  def precise(
    self, eqn: JaxprEqn, params: dict[str, Any], dtypes: Iterable[DType | None]
  ) -> dict[str, Any]:
    """Returns parameters with a precision, if they are those of a matmul that names none itself.

    Args:
      eqn: the equation as it was.
      params: its parameters.
      dtypes: those of its operands, as they are now.
    """
    if params.get("precision", 0) is not None:
      return params
    now, default = [*dtypes], self.settings.precision
    asked = matmul_precision(self.place(eqn)[0], self.settings)
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
    default = self.settings.precision
    whole = default is not None and holds_jaxpr(eqn.params.values())
    params = in_precision(eqn, default) if whole else None
    self.write(eqn, operands, [self.kind_of(v) for v in eqn.outvars], params)

  def not_entered(self, eqn: JaxprEqn) -> None:
    """Writes an equation as it was, since it is not known how it runs the jaxprs that it holds."""
    instead = "It runs as it was traced, in the dtypes that it was traced with."
    warn_not_entered(eqn, "mpjax.autocast", instead)
    self.untouched(eqn)

  def original(self, atom: Atom, eqn: JaxprEqn) -> Atom:
    """Returns an operand in the dtype that it was traced with."""
    value = None if isinstance(atom, Literal) else self._env.get(atom)
    return atom if value is None else self.view(value, aval_of(atom).dtype, eqn)

  def kind_of(self, var: Atom, neutral: bool = False) -> Kind | None:
    """The kind of something that has the dtype it was traced with."""
    dtype = dtype_of(var)
    return Kind(dtype, neutral) if dtype is not None and dtype in FLOATS else None

  def wanted_of(self, eqn: JaxprEqn) -> int:
    """What the readers of all results of an equation want."""
    return functools.reduce(operator.or_, (self.wanted.get(v, 0) for v in eqn.outvars), 0)

  def is_full(self, wanted: int) -> bool:
    """Whether all readers are float32."""
    return wanted & (FULL | HALF) == FULL
