"""Writing a program anew with other dtypes: one equation after the other, nothing is executed."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn, no_effects
from jax.extend.core.primitives import (
  broadcast_in_dim_p,
  convert_element_type_p,
  reduce_precision_p,
  sub_p,
)

from mpjax._core.dtypes import FLOAT32, HALVES
from mpjax._jaxprs.autocast.casts import convert, each_for_itself, filled, leave
from mpjax._jaxprs.autocast.eqn_params import in_precision, retype, wants_precision
from mpjax._jaxprs.autocast.marks import PREFIX
from mpjax._jaxprs.autocast.scopes import keeps_float32, names_of, output_of, region, weight_grads
from mpjax._jaxprs.autocast.sums import broadcast, is_linear, is_summed, repeats, with_float32_sums
from mpjax._jaxprs.autocast.uses import FULL, HALF, RESULT, demands
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Dtype,
  Kind,
  Scope,
  Settings,
  Value,
  dtype_of,
  is_statistic,
  literal_as,
  literal_value,
  retyped,
  shape_of,
)
from mpjax._jaxprs.autocast.weight_grads import with_wide_gradients
from mpjax._jaxprs.compat import without_scopes
from mpjax._jaxprs.inner_jaxprs import inner_jaxprs, warn_not_entered
from mpjax._jaxprs.primitives import facts_of


class Rewritten(NamedTuple):
  """A program as it is now.

  Fields:
    jaxpr: the program.
    outs: the kinds of its results: None for what is no floating value of ours.
    closed: the same, closed over no constants; None if it has some. JAX compiles an object once,
      and an equal one again.
  """

  jaxpr: Jaxpr
  outs: tuple[Kind | None, ...]
  closed: ClosedJaxpr | None


class Rewriter:
  """The rewriting of one program; those inside of its equations are rewritten by others.

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
    self._env: dict[Any, Value] = {}
    self._part_of = settings.ops.part_of
    self._places: dict[int, tuple[Scope, Dtype | None]] = {}
    self._names: dict[int, Any] = {}

  # Values.

  def define(self, var: Any, kind: Kind, *, scope: Scope | None, once: bool = True) -> Any:
    """Notes what a variable holds from now on, and returns the one that holds it."""
    dtype, neutral, held = kind
    held = held or dtype
    atom = var if held == var.aval.dtype else retyped(var, held)
    once = once or not neutral
    self._env[var] = Value(atom, dtype, neutral, scope, self.wanted.get(var, 0), once, held)
    return atom

  def hold(self, var: Any, value: Value) -> None:
    """Notes what a variable holds that nothing is written for."""
    self._env[var] = value

  def given(self, variables: Sequence[Any]) -> None:
    """Notes which values are arguments."""
    for var in variables:
      if var in self._env:
        self._env[var].given = self._env[var].neutral

  def value(self, atom: Any, half: Dtype) -> Value | None:
    """Returns what is known of a floating operand; None for everything else.

    Args:
      atom: a variable or literal of the program as it was.
      half: the dtype in which it is about to be read, perhaps: some literals do not survive that.
    """
    if type(atom) is not Literal:
      found = self._env.get(atom)
      if found is None and dtype_of(atom) in HALVES:
        found = self._env[atom] = Value(atom, dtype_of(atom), wanted=self.wanted.get(atom, 0))
      return found
    dtype = dtype_of(atom)
    if dtype == FLOAT32:
      return literal_value(atom, half)
    return Value(atom, dtype, neutral=True) if dtype in HALVES else None

  def view(self, value: Value, dtype: Dtype, eqn: JaxprEqn | None) -> Any:
    """Returns what holds a value in `dtype`, after a cast if need be."""
    if value.held == dtype:
      return value.atom
    if type(value.atom) is Literal:
      return literal_as(value.atom, dtype)
    views = value.views
    found = None if views is None else views.get(dtype)
    if found is None:
      if value.filled is None:
        found = self.cast(value.atom, retyped(value.atom, dtype), eqn)
      else:
        found = filled(value.filled, dtype, self.eqns)
      if value.once:
        value.views = {dtype: found} if views is None else {**views, dtype: found}
    return found

  def cast(self, atom: Any, var: Var, eqn: JaxprEqn | None) -> Var:
    """Writes a cast of `atom` to the dtype of `var`, in the place of an equation that reads it."""
    aval: Any = var.aval
    params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
    place = () if eqn is None else (self.shown(eqn).source_info, eqn.ctx)
    self.eqns.append(
      new_jaxpr_eqn([atom], [var], convert_element_type_p, params, no_effects, *place)
    )
    return var

  def place(self, eqn: JaxprEqn) -> tuple[Scope, Dtype | None]:
    """Returns the scope of an equation, and the half dtype there; None where nothing changes."""
    stack = eqn.source_info.name_stack  # Alive as long as the jaxpr is, and so its id is its own.
    found = self._places.get(id(stack))
    if found is None:
      scope = self._scope + names_of(str(stack))
      found = self._places[id(stack)] = (scope, region(scope, self.settings))
    return found

  def shown(self, eqn: JaxprEqn) -> JaxprEqn:
    """Returns an equation as a profile is to show it, without our marks, and in the same place."""
    place, stack = self.place(eqn), eqn.source_info.name_stack
    names = self._names.setdefault(id(stack), without_scopes(stack, PREFIX))
    if names is stack:
      return eqn
    self._places[id(names)] = place
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))

  def outside(
    self, value: Value | None, eqn: JaxprEqn, scope: Scope, half: Dtype, wanted: int
  ) -> Value | None:
    """Returns a value as an operation in another scope than its own reads it.

    A float32 value that has left the scope in which it was made, on its way to some half operation,
    is rounded to half, as the layers of Flax do it: it keeps activations as small as theirs. An
    operation whose result only float32 operations read reads it as it is.

    Args:
      value: an operand; None for what is no floating value.
      eqn: the equation that reads it.
      scope: that of the equation.
      half: the half dtype there.
      wanted: what the readers of that which the equation makes of it want, see `demands`.
    """
    if value is None or not value.scope or value.dtype != FLOAT32:
      return value
    made = value.scope
    if (
      scope[: len(made)] == made
      or not wanted & HALF
      or is_statistic(value.atom.aval.shape)
      or keeps_float32(made, self.settings)
    ):
      return value
    value.once = True
    return Value(self.view(value, half, eqn), half, wanted=value.wanted)

  # Equations.

  def write(
    self,
    eqn: JaxprEqn,
    operands: list[Any],
    kinds: Sequence[Kind | None],
    params: Any = None,
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
    params = eqn.params if params is None else params
    default = self.settings.precision
    unset = default is not None and params.get("precision", default) is None
    if unset and dtype_of(operands[0]) == dtype_of(eqn.invars[0]):  # It is left as it is.
      params = {**params, "precision": default}
    self.eqns.append(eqn.replace(invars=operands, outvars=outs, params=params))

  def untouched(self, eqn: JaxprEqn) -> None:
    """Writes an equation as it was, in the dtypes that it was traced with."""
    operands = [self.original(atom, eqn) for atom in eqn.invars]
    default = self.settings.precision
    params = None if default is None else in_precision(eqn, default)
    self.write(eqn, operands, [self.kind_of(v) for v in eqn.outvars], params)

  def not_entered(self, eqn: JaxprEqn) -> None:
    """Writes an equation as it was, since it is not known how it runs the jaxprs that it holds."""
    instead = "It runs as it was traced, in the dtypes that it was traced with."
    warn_not_entered(eqn, "mpjax.autocast", instead)
    self.untouched(eqn)

  def original(self, atom: Any, eqn: JaxprEqn) -> Any:
    """Returns an operand in the dtype that it was traced with."""
    value = None if isinstance(atom, Literal) else self._env.get(atom)
    return atom if value is None else self.view(value, dtype_of(atom), eqn)

  def kind_of(self, var: Any, neutral: bool = False) -> Kind | None:
    """The kind of something that has the dtype it was traced with."""
    dtype = dtype_of(var)
    return Kind(dtype, neutral) if dtype is not None and dtype in FLOATS else None

  def first_order(self, eqn: JaxprEqn) -> None:
    """Writes an equation that holds no program."""
    part = self._part_of(eqn.primitive.name, eqn.params)
    scope, half = self.place(eqn)
    leaving = output_of(scope) if eqn.primitive is reduce_precision_p else None
    if leaving is not None:
      return leave(self, eqn, leaving)
    # A multiplication that names its own dtype is the user's choice too.
    if half is None or part is None or part == "opaque" or eqn.params.get("out_dtype") is not None:
      unknown = half is not None and part is None and inner_jaxprs(eqn) is None
      return self.not_entered(eqn) if unknown else self.untouched(eqn)
    if eqn.primitive is convert_element_type_p:
      return convert(self, eqn, scope, half)
    values: list[Value | None] = []
    once, wide, known = True, False, False
    for atom in eqn.invars:
      value = self.value(atom, half)
      values.append(value)
      if value is not None:
        known = True
        once = once and value.once
        if dtype_of(atom) == FLOAT32:
          wide = True
        else:
          half = dtype_of(atom)  # The user's own choice.
    neutral, rounded, before = False, None, values
    if part == "half":
      if not wide or wants_precision(eqn.params):  # The user's own choice, again.
        return self.untouched(eqn)
      wide_grads = weight_grads(scope, self.settings)
      if made := with_wide_gradients(eqn, values, half, wide_grads, self.view):
        return self.write(made, made.invars, [Kind(half)])
      dtype = half
    elif part == "float32":
      dtype = FLOAT32
    else:
      wanted = self.wanted_of(eqn)
      values = [self.outside(value, eqn, scope, half, wanted) for value in values]
      if eqn.primitive.multiple_results and len(eqn.invars) == len(eqn.outvars):
        return each_for_itself(self, eqn, values)
      deciding = values
      if part == "keep" and len(values) > 1:  # A buffer that is written to keeps its dtype.
        deciding = [v for v in values if v is not None][:1]
      dtype, neutral = self._common(eqn, deciding, wide, half)
      if dtype != FLOAT32 and repeats(eqn):
        values, rounded, dtype = before, dtype, FLOAT32
    summed = [
      value is not None and part != "half" and is_summed(eqn, value, dtype) for value in values
    ]
    operands = [
      atom if value is None else self._operand(value, whole, each, dtype, eqn)
      for atom, value, whole, each in zip(eqn.invars, values, before, summed, strict=True)
    ]
    outs = [Kind(dtype, neutral) if dtype_of(v) in FLOATS else None for v in eqn.outvars]
    changed = known and wide != (dtype == FLOAT32)
    params = retype(eqn, dtype) if changed else eqn.params
    if any(summed) and not is_linear(eqn):
      made = with_float32_sums(eqn, operands, summed, dtype)
      return self.write(made, operands, outs)
    self.write(eqn, operands, outs, params, once=once)
    if eqn.primitive is broadcast_in_dim_p and type(operands[0]) is Literal and outs[0] is not None:
      self._env[eqn.outvars[0]].filled = self.eqns[-1]
    if neutral:
      shapes = {shape_of(v.atom) for v in values if v is not None and v.given}
      for var in eqn.outvars:
        if var in self._env:
          self._env[var].given = shape_of(var) in shapes
    if rounded is not None or (dtype == FLOAT32 and known and not wide):
      self._round(eqn, rounded or half)
    return None

  def _operand(
    self, value: Value, whole: Value | None, summed: bool, dtype: Dtype, eqn: JaxprEqn
  ) -> Any:
    """Returns what holds an operand, as an operation reads it.

    Args:
      value: the operand.
      whole: the same before it was rounded for having left its scope.
      summed: whether its derivative is a sum.
      dtype: that of the operation.
      eqn: the operation.
    """
    if not summed:
      if eqn.primitive is sub_p and value.held in HALVES and dtype == FLOAT32:
        # A norm's difference: with a cast of its own, as by hand, XLA groups the sums of its
        # backward pass so that they read less memory. Forward a compiler makes one cast of both.
        return self.cast(value.atom, retyped(value.atom, dtype), eqn)
      return self.view(value, dtype, eqn)
    if not is_linear(eqn):
      return value.atom if value.neutral else self.view(value, dtype, eqn)
    wide = whole if whole is not None and whole.held == FLOAT32 else value
    self.eqns.append(broadcast(self.view(wide, FLOAT32, eqn), eqn))
    repeated = self.eqns[-1].outvars[0]
    return self.cast(repeated, retyped(repeated, dtype), eqn)

  def _common(
    self, eqn: JaxprEqn, values: Sequence[Value | None], wide: bool, half: Dtype
  ) -> tuple[Dtype, bool]:
    """The dtype of an operation without an opinion, and whether its result is neutral."""
    halves = decided = given = False
    for value in values:
      if value is not None and value.dtype == FLOAT32:
        decided = decided or not value.neutral
        given = given or (value.given and shape_of(value.atom) == shape_of(eqn.outvars[0]))
      elif value is not None:
        halves = True
    if not halves or (wide and decided):
      return FLOAT32, not decided
    wanted = self.wanted_of(eqn)
    if given and wide and wanted & RESULT and not wanted & HALF:
      # An argument that comes back changed: a parameter after its update, a count, a moment.
      return FLOAT32, False
    # What is read in float32 anyway is computed in it, like the difference that exp reads.
    lift = self.is_full(wanted) and not facts_of(eqn).exact
    return (FLOAT32 if lift else half), False

  def wanted_of(self, eqn: JaxprEqn) -> int:
    """What the readers of all results of an equation want."""
    return functools.reduce(operator.or_, (self.wanted.get(v, 0) for v in eqn.outvars), 0)

  def is_full(self, wanted: int) -> bool:
    """Whether all readers are float32."""
    return wanted & (FULL | HALF) == FULL

  def _round(self, eqn: JaxprEqn, half: Dtype) -> None:
    """Takes float32 results of half operands back to half, but for readers that are float32 too."""
    for var in eqn.outvars:
      value = self._env.get(var)
      if value is not None and value.dtype == FLOAT32 and not self.is_full(value.wanted):
        # The cast is written where it is first read in half.
        self._env[var] = Value(
          value.atom, half, scope=value.scope, wanted=value.wanted, held=FLOAT32
        )
