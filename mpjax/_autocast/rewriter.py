"""Write the equations of a jaxpr in other dtypes, without running them."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import copy_p

from mpjax._autocast.consumers import Flag, flags_of, terms_of
from mpjax._autocast.kinds import (
  FLOATS,
  Kind,
  Kinds,
  Role,
  kind_of_constant,
  kind_of_input,
)
from mpjax._autocast.numbers import MASK, UNKNOWN, numbers_of, numbers_of_result
from mpjax._autocast.origins import Origins, origins_of
from mpjax._autocast.precision import Asked, ParamsDict, in_precision, with_precision
from mpjax._autocast.scopes import REGION, shown_region
from mpjax._autocast.settings import Scope, Settings
from mpjax._autocast.values import FloatValue
from mpjax._core.types import FLOAT32, DType
from mpjax._jaxpr.compat import NameStack, with_scope, without_scopes
from mpjax._jaxpr.locations import NOT_IN, PREFIX, Source
from mpjax._jaxpr.op_lists import part_of
from mpjax._jaxpr.primitives import AS_TRACED, facts_of
from mpjax._jaxpr.reader import (
  Atom,
  Inner,
  aval_of,
  cast_to,
  dtype_of,
  inner_jaxprs,
  is_number,
  is_object,
  literal_as,
  retyped,
  warn_not_entered,
  with_each,
)
from mpjax._policy.audit_record import AUDIT


class Rewritten(NamedTuple):
  """A rewritten jaxpr, and the kinds of its results."""

  jaxpr: Jaxpr
  outs: Kinds
  closed: ClosedJaxpr | None  # None if it has constants. JAX compiles an equal object again.
  linear_algebra: tuple[str, ...] = ()  # of activations; the caller warns


Rewrite: TypeAlias = Callable[..., Rewritten]


class Rewriter:
  """The values and equations of one jaxpr; `rewrite` rewrites its inner jaxprs."""

  def __init__(
    self,
    jaxpr: Jaxpr,
    settings: Settings,
    scope: Scope,
    outs: tuple[int, ...],
    ins: Origins,
    rewrite: Rewrite,
  ) -> None:
    self.settings, self.rewrite = settings, rewrite
    # The flags of the old variables, and a function from an equation to its scope.
    self.flags, self.scope_policy = flags_of(jaxpr, tuple(outs), ins, settings, scope)
    self.origins = origins_of(jaxpr, ins, settings, scope).of  # of the old variables
    self.eqns: list[JaxprEqn] = []  # written so far
    self.linear_algebra: dict[str, None] = {}  # of activations, without a line of the user
    self.warned: set[Source] = set()  # lines with a warning, so that each has one
    # The floating values, by their old variables. Variables of other dtypes stay.
    self.values: dict[Var, FloatValue] = {}
    # Integer variables that are literals at the call of this jaxpr, as in `jnp.clip(x, 0, 6)`.
    self.literals: dict[Var, Kind] = {}

  # Values.

  def define(self, var: Var, kind: Kind) -> Var:
    """Sets the kind of a variable, and returns a variable of its dtype."""
    # An integer with a kind is a literal at the call. It keeps its dtype.
    if dtype_of(var) not in FLOATS:
      self.literals[var] = kind
      return var
    dtype = kind.variable or kind.dtype
    # A variable that keeps its dtype stays, so that unchanged equations stay too.
    atom = var if dtype == dtype_of(var) else retyped(var, dtype)
    # Inside a jaxpr the `FloatValue` has the variable. `Kind.variable` is for its boundary.
    inside = kind if kind.variable is None else kind._replace(variable=None)
    self.values[var] = FloatValue(atom, inside)
    return atom

  def value(self, atom: Atom) -> FloatValue | None:
    """Returns the value of a floating operand; None for other operands."""
    if not isinstance(atom, Literal):
      return self.values.get(atom)
    if dtype_of(atom) not in FLOATS:
      return None
    if is_number(atom):
      return FloatValue(atom, Kind(Role.NUMBER, aval_of(atom).dtype, numbers=numbers_of(atom.val)))
    # With `jax_use_simplified_jaxpr_constants` an array that the function closes over is a literal.
    kind = kind_of_constant(atom.val, self.settings)
    return None if kind is None else FloatValue(atom, kind)

  def kind(self, atom: Atom) -> Kind | None:
    """Returns the kind of a floating operand; None for other operands."""
    value = self.value(atom)
    return None if value is None else value.kind

  def literal(self, atom: Atom) -> Kind | None:
    """Returns the kind of an integer or boolean literal; None for other operands."""
    if not isinstance(atom, Literal):
      return self.literals.get(atom)
    dtype = dtype_of(atom)
    is_integer = dtype == np.bool_ or (dtype is not None and jnp.issubdtype(dtype, jnp.integer))
    if dtype is None or not is_integer or not is_number(atom):
      return None
    return Kind(Role.NUMBER, dtype, numbers=numbers_of(atom.val))

  def kind_of_integers(self, atom: Atom, dtype: DType) -> Kind:
    """Returns the kind of integers or booleans that are cast to a floating dtype."""
    if (kind := self.literal(atom)) is not None:
      return kind._replace(dtype=dtype)
    if dtype_of(atom) == np.bool_:
      return Kind(Role.NUMBER, dtype, numbers=MASK)
    # An index or a count counts as an input, since low precision cannot hold all of them.
    return kind_of_input(dtype)

  def flags_at(self, var: Atom) -> int:
    """Returns the flags of a variable, with `FLOAT32` or `PRODUCT` in place of `GATED`."""
    flags = self.flags.of.get(var, 0)
    if not flags & Flag.GATED:
      return flags
    arrays = self.flags.addends.get(var, ())
    written, others = terms_of(arrays, self.values, self.flags.sums, self.origins)
    kinds = map(self.kind, written)
    # Parameters and numbers take the dtype of the sum, so they do not make it float32.
    wide = others or any(k is not None and k.role >= Role.INPUT and not k.is_low for k in kinds)
    return flags & ~Flag.GATED | (Flag.FLOAT32 if wide else Flag.PRODUCT)

  def flags_of_results(self, eqn: JaxprEqn) -> int:
    """Returns the flags of the floating results of an equation."""
    flags = 0
    for var in eqn.outvars:
      flags |= self.flags_at(var) if dtype_of(var) in FLOATS else 0
    return flags

  def read(self, atom: Atom, eqn: JaxprEqn, dtype: DType | None = None) -> Atom:
    """Returns a floating operand in `dtype`, or in its own dtype; other operands unchanged."""
    value = self.value(atom)
    return atom if value is None else self.cast(value, dtype or value.kind.dtype, eqn)

  def cast(self, value: FloatValue, dtype: DType, eqn: JaxprEqn | None) -> Atom:
    """Returns the variable or literal of a value in `dtype`; writes a cast for it if needed."""
    if dtype_of(value.atom) == dtype:
      return value.atom
    if is_number(value.atom):
      return self.number(value.atom, dtype, eqn)
    if dtype in value.casts:
      return value.casts[dtype]
    var = retyped(value.atom, dtype)
    if value.producer is not None and value.number is not None:
      # A broadcast number is broadcast again in another dtype. With a cast, a mask of the size of
      # attention logits would be in memory twice.
      scalar = self.number(value.producer.invars[0], dtype, eqn, value.number)
      invars = [scalar, *value.producer.invars[1:]]
      self.eqns.append(value.producer.replace(invars=invars, outvars=[var]))
    else:
      self.write_cast(value.atom, var, eqn)
    if value.is_cast_once:
      value.casts[dtype] = var
    return var

  def number(
    self, literal: Atom, dtype: DType, eqn: JaxprEqn | None, number: float | None = None
  ) -> Atom:
    """Returns a number in another dtype, or `number` in the type of a scalar."""
    rounded = literal_as(literal, dtype, number)
    exact = literal_as(literal, FLOAT32, number)
    record = AUDIT.value
    if record is None or not record.shows_roundings or exact.val == rounded.val:
      return rounded
    # The largest number is not rounded, but becomes the largest of the dtype.
    if not np.isfinite(exact.val.astype(dtype)):
      return rounded
    # JAX would compute the cast of a number at once. A copy of it is a value of the program.
    copy = retyped(exact, FLOAT32)
    self.eqns.append(cast_to(copy, exact, eqn).replace(primitive=copy_p, params={}))
    return self.write_cast(copy, retyped(literal, dtype), eqn)

  def write_cast(self, atom: Atom, var: Var, eqn: JaxprEqn | None) -> Var:
    """Writes a cast of `atom` to the dtype of `var`, with the source line of `eqn`."""
    self.eqns.append(cast_to(var, atom, eqn))
    return var

  # Equations.

  def write(
    self,
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    kinds: Sequence[Kind | None],
    params: ParamsDict | None = None,
  ) -> None:
    """Writes an equation with new operands, kinds of results and, if given, parameters."""
    pairs = zip(eqn.outvars, kinds, strict=True)
    outs = [v if kind is None else self.define(v, kind) for v, kind in pairs]
    # Only here the dtypes of the operands are known, on which an algorithm depends.
    params = self.precise(eqn, eqn.params if params is None else params, map(dtype_of, operands))
    self.eqns.append(eqn.replace(invars=list(operands), outvars=outs, params=params))

  def write_rounding(
    self,
    eqn: JaxprEqn,
    operands: Sequence[Atom],
    kinds: Sequence[Kind | None],
    low: DType,
    params: ParamsDict | None = None,
  ) -> None:
    """Writes an equation, and rounds float32 activations that only matmuls use."""
    self.write(eqn, operands, kinds, params)
    for var, kind in zip(eqn.outvars, kinds, strict=True):
      # A value without flags has only matmuls as consumers. Inputs and parameters are cast at each
      # of them, so that their gradients are summed in float32.
      if kind is None or kind.role < Role.UNROUNDED or kind.is_low or self.flags_at(var):
        continue
      if dtype_of(var) == FLOAT32:
        rounded = self.cast(self.values[var], low, eqn)
        self.values[var] = FloatValue(rounded, kind._replace(role=Role.ACTIVATION, dtype=low))

  def write_as_traced(
    self, eqn: JaxprEqn, inners: tuple[Inner, ...] | None = (), role: Role | None = None
  ) -> None:
    """Writes an equation as it was traced; `role` is the role of its results, if known."""
    scope_policy = self.scope_policy(eqn)
    # A primitive in no list that holds jaxprs hides operations from the policy.
    is_unknown = inners is None or (
      part_of(eqn, self.settings.ops) is None and inner_jaxprs(eqn) is None
    )
    if is_unknown and scope_policy.compute_dtype is not None and not is_object(eqn):
      text = "It runs as it was traced, in the dtypes that it had."
      warn_not_entered(eqn, "mpjax.autocast", text)
    operands = [self.read(atom, eqn, dtype_of(atom)) for atom in eqn.invars]
    if role is None:
      role = Role.INPUT if scope_policy.as_written else self._role_of_operands(eqn)
    # A result in low precision is an activation, since the user's code has chosen its dtype.
    low = Role.NUMBER if role == Role.NUMBER else Role.ACTIVATION
    kinds: dict[DType | None, Kind] = {dtype: Kind(low, dtype) for dtype in FLOATS}
    each = [kind.numbers for kind in map(self.kind, eqn.invars) if kind is not None]
    numbers = numbers_of_result(eqn, each) if role < Role.INPUT else UNKNOWN
    kinds[FLOAT32] = Kind(role, FLOAT32, numbers=numbers)
    # A policy keeps the jaxprs of a linear solve in float32, so their matmuls get the precision of
    # the scope. In kernels, which are the user's code, only JAX's setting applies.
    is_kept = facts_of(eqn).holds in AS_TRACED
    asked = scope_policy.asked if is_kept else Asked(default=self.settings.default_precision)
    params = with_each(eqn, lambda each: with_precision(each, asked) or each)
    self.write(eqn, operands, [kinds.get(dtype_of(v)) for v in eqn.outvars], params)

  def _role_of_operands(self, eqn: JaxprEqn) -> Role:
    """Returns the largest role of the operands; without floating operands, number or input."""
    roles = [kind.role for kind in map(self.kind, eqn.invars) if kind is not None]
    alone = Role.NUMBER if facts_of(eqn).draws else Role.INPUT
    return max(roles, default=alone)

  def precise(
    self, eqn: JaxprEqn, params: ParamsDict, dtypes: Iterable[DType | None]
  ) -> ParamsDict:
    """Returns parameters with the precision of the scope, if a matmul has none."""
    return in_precision(eqn.primitive, params, dtypes, self.scope_policy(eqn).asked)

  # Names for audits and profiles.

  def explained(self, eqn: JaxprEqn, precision: str, reason: str) -> JaxprEqn:
    """Returns a matmul whose name stack tells an audit why it is not in a precision."""
    names = with_scope(eqn.source_info.name_stack, NOT_IN[precision] + reason)
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=names))

  def shown(self) -> list[JaxprEqn]:
    """Returns the written equations without marks, except the marks for an audit."""
    # New name stacks by the id of the old: thousands of equations share a few. The equations keep
    # the old stacks alive, so no id is reused.
    names: dict[int, NameStack] = {}
    eqns: list[JaxprEqn] = []
    for eqn in self.eqns:
      stack = eqn.source_info.name_stack
      if id(stack) not in names:
        if AUDIT.value is not None:
          names[id(stack)] = with_scope(stack, REGION + shown_region(self.scope_policy(eqn)))
        else:
          names[id(stack)] = without_scopes(stack, PREFIX)
      if names[id(stack)] is stack:
        eqns.append(eqn)
      else:
        info = eqn.source_info.replace(name_stack=names[id(stack)])
        eqns.append(eqn.replace(source_info=info))
    return eqns
