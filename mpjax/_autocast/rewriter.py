"""Write the equations of a jaxpr in other dtypes, without running them."""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import broadcast_in_dim_p, copy_p

from mpjax._autocast.consumers import Flag, Flags, terms_of
from mpjax._autocast.kinds import Kind, Kinds, Role, kind_of_constant, kind_of_input
from mpjax._autocast.numbers import MASK, UNKNOWN, numbers_of, numbers_of_result
from mpjax._autocast.precision import Asked, ParamsDict, in_precision, with_precision
from mpjax._autocast.scopes import ScopePolicies, mark_of
from mpjax._core.types import FLOAT32, FLOATS, DType
from mpjax._jaxpr.compat import NameStack, with_scope, without_scopes
from mpjax._jaxpr.locations import PREFIX, Source, location
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
  shape_of,
  warn_not_entered,
  with_each,
)


@dataclasses.dataclass(slots=True, eq=False)
class FloatValue:
  """A floating value, and its variable in the jaxpr that is being written."""

  # The variable or the literal. It may be float32 while the value is in low precision.
  atom: Atom
  kind: Kind  # its role and dtype
  # The equation that returns it; None for arguments, constants and literals.
  producer: JaxprEqn | None = None
  uncast: Atom | None = None  # the variable before the cast, if the function has cast a parameter
  # Its variables in other dtypes, which consumers share.
  casts: dict[DType, Atom] = dataclasses.field(default_factory=dict)

  @property
  def is_low_in_float32(self) -> bool:
    """Whether it is a low-precision value in a float32 variable."""
    return self.kind.is_low and aval_of(self.atom).dtype == FLOAT32

  @property
  def number(self) -> float | None:
    """The number of a literal or of a broadcast literal; None for other values."""
    # If a value is not known entirely, None is one of its numbers.
    number, *others = self.kind.numbers
    if others:
      return None
    # `Rewriter.cast` writes the number again in another dtype. It can do so for a literal and for a
    # broadcast scalar.
    if self.producer is not None and self.producer.primitive is broadcast_in_dim_p:
      is_scalar = not shape_of(self.producer.invars[0])
    else:
      is_scalar = is_number(self.atom)
    return number if is_scalar else None


class Rewritten(NamedTuple):
  """A rewritten jaxpr, and the kinds of its results."""

  jaxpr: Jaxpr
  outs: Kinds
  closed: ClosedJaxpr | None  # None if it has constants. JAX compiles an equal object again.
  linear_algebra: tuple[str, ...] = ()  # of activations; the caller warns


Rewrite: TypeAlias = Callable[..., Rewritten]

LINEAR_ALGEBRA = (
  "mpjax: {names} takes the result of low-precision matmuls, and linear algebra multiplies their "
  "rounding by the condition number of the matrix. Compute the matmuls before it in float32: wrap "
  "the function that holds them and this line in mpjax.full_precision(fn)."
)
"""The warning of linear algebra that takes a rounded activation."""


class Rewriter:
  """The values and equations of one jaxpr; `rewrite` rewrites its inner jaxprs."""

  def __init__(self, flags: Flags, scope_policies: ScopePolicies, rewrite: Rewrite) -> None:
    self.flags = flags  # of all old variables
    self.scope_policies = scope_policies  # from an equation to its policy
    self.settings, self.rewrite = scope_policies.scoped.settings, rewrite
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
    written, others = terms_of(arrays, self.values, self.flags.sums, self.flags.origins)
    kinds = map(self.kind, written)
    # Parameters and numbers take the dtype of the sum, so they do not make it float32.
    is_wide = others or any(k is not None and k.role >= Role.INPUT and not k.is_low for k in kinds)
    return flags & ~Flag.GATED | (Flag.FLOAT32 if is_wide else Flag.PRODUCT)

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
    # Parameters and inputs are cast at each use, so that their gradients are summed in float32. All
    # consumers of another value share one cast.
    if value.kind.role not in (Role.PARAMETER, Role.INPUT):
      value.casts[dtype] = var
    return var

  def number(
    self, literal: Atom, dtype: DType, eqn: JaxprEqn | None, number: float | None = None
  ) -> Atom:
    """Returns a number in another dtype, or `number` in the type of a scalar."""
    rounded = literal_as(literal, dtype, number)
    exact = literal_as(literal, FLOAT32, number)
    if not self.settings.shows_roundings or exact.val == rounded.val:
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
    params = in_precision(
      eqn.primitive,
      eqn.params if params is None else params,
      map(dtype_of, operands),
      self.scope_policies(eqn).asked,
    )
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
    """Writes an equation as it was traced; linear algebra of a rounded activation warns.

    `inners` are the jaxprs in it, None if they are unknown. `role` is the role of its results, if
    known.
    """
    scope_policy = self.scope_policies(eqn)
    # A primitive in no list that holds jaxprs hides operations from the policy.
    is_unknown = inners is None or (
      part_of(eqn, self.settings.ops) is None and inner_jaxprs(eqn) is None
    )
    in_policy = scope_policy.low_dtype is not None
    if is_unknown and in_policy and not is_object(eqn):
      text = "It runs as it was traced, in the dtypes that it had."
      warn_not_entered(eqn, "mpjax.autocast", text)
    operands = [self.read(atom, eqn, dtype_of(atom)) for atom in eqn.invars]
    of_operands = [kind for kind in map(self.kind, eqn.invars) if kind is not None]
    rounded = any(kind.role == Role.ACTIVATION for kind in of_operands)
    if facts_of(eqn).acts_as == "linear algebra" and rounded and in_policy:
      self.warn_of_linear_algebra(eqn, [eqn.primitive.name])
    if role is None and scope_policy.as_written:
      role = Role.INPUT
    elif role is None:
      alone = Role.NUMBER if facts_of(eqn).draws else Role.INPUT
      role = max((kind.role for kind in of_operands), default=alone)
    # A result in low precision is an activation, since the user's code has chosen its dtype.
    low = Role.NUMBER if role == Role.NUMBER else Role.ACTIVATION
    kinds: dict[DType | None, Kind] = {dtype: Kind(low, dtype) for dtype in FLOATS}
    numbers = UNKNOWN
    if role < Role.INPUT:
      numbers = numbers_of_result(eqn, [kind.numbers for kind in of_operands])
    kinds[FLOAT32] = Kind(role, FLOAT32, numbers=numbers)
    # A policy keeps the jaxprs of a linear solve in float32, so their matmuls get the precision of
    # the scope. In kernels, which are the user's code, only JAX's setting applies.
    is_kept = facts_of(eqn).holds in AS_TRACED
    asked = scope_policy.asked if is_kept else Asked(default=self.settings.default_precision)
    params = with_each(eqn, lambda each: with_precision(each, asked) or each)
    self.write(eqn, operands, [kinds.get(dtype_of(v)) for v in eqn.outvars], params)

  def warn_of_linear_algebra(self, eqn: JaxprEqn, names: Collection[str]) -> None:
    """Warns at the user's line that linear algebra takes a rounded activation.

    Equations inside jitted functions of JAX, such as `jnp.linalg.solve`, have no line. Their names
    are therefore kept until the equation of a call has a line.
    """
    where = location(eqn)
    # A backward or recomputed operation has the line of a forward one, which has warned.
    if where.direction != "forward":
      return
    if where.source is None:
      self.linear_algebra.update(dict.fromkeys(names))
    elif names and where.source not in self.warned:
      self.warned.add(where.source)
      text = LINEAR_ALGEBRA.format(names=", ".join(names))
      warnings.warn_explicit(text, UserWarning, where.source.file, where.source.line)

  def shown(self) -> list[JaxprEqn]:
    """Returns the written equations without marks, or with those of their regions."""
    # New name stacks by the id of the old: thousands of equations share a few. The equations keep
    # the old stacks alive, so no id is reused.
    names: dict[int, NameStack] = {}
    eqns: list[JaxprEqn] = []
    for eqn in self._with_products_at_readers():
      stack = eqn.source_info.name_stack
      if id(stack) not in names:
        if self.settings.keeps_marks:
          names[id(stack)] = with_scope(stack, mark_of(self.scope_policies(eqn).region))
        else:
          names[id(stack)] = without_scopes(stack, PREFIX)
      if names[id(stack)] is stack:
        eqns.append(eqn)
      else:
        info = eqn.source_info.replace(name_stack=names[id(stack)])
        eqns.append(eqn.replace(source_info=info))
    return eqns

  def _with_products_at_readers(self) -> list[JaxprEqn]:
    """Returns equations with each float32 product right before the first reader in its scope."""
    # JAX adds the gradients of a value from its last reader to its first. A batch norm squares its
    # input before it takes the means of both, so the gradient of the input's mean, one number for
    # many elements, would be added before that of the square, a number for each. XLA for GPUs fuses
    # as with dtypes by hand only if it is added last. Else a ResNet-50 moves 4 % more bytes.
    eqns = self.eqns
    readers: dict[Atom, int] = {}
    for position, eqn in reversed([*enumerate(eqns)]):
      readers |= dict.fromkeys((v for v in eqn.invars if isinstance(v, Var)), position)

    def place(position: int) -> tuple[int, bool]:
      eqn = eqns[position]
      is_product = facts_of(eqn).acts_as == "product" and dtype_of(eqn.outvars[0]) == FLOAT32
      # A policy in float32 changes no bit, so its gradients are added as they were traced.
      if is_product and self.scope_policies(eqn).low_dtype is not None:
        reader = readers.get(eqn.outvars[0], position)
        # Reports follow the operations of a module, so none leaves it.
        if eqns[reader].source_info.name_stack == eqn.source_info.name_stack:
          # False sorts a product before its reader, which has the same position.
          return reader, False
      return position, True

    return [eqns[position] for position in sorted(range(len(eqns)), key=place)]
