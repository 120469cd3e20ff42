"""Casts that a jaxpr has already (the user's, of promotion, where a policy ends), or needs not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from mpjax._core.dtypes import FLOAT32
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  Dtype,
  Kind,
  Scope,
  Value,
  dtype_of,
  literal_as,
  retyped,
)


def leave(self: Any, eqn: JaxprEqn, dtype: Dtype) -> None:
  """Casts what leaves the module where a policy began, for all who read it.

  Args:
    self: the `Rewriter` of the jaxpr.
    eqn: the equation that marks the result.
    dtype: the dtype of the result.
  """
  value = self.value(eqn.invars[0], dtype)
  if value is None:
    return self.untouched(eqn)
  held = dtype if dtype != FLOAT32 else value.held
  atom = self.view(value, held, eqn)
  wanted = self.wanted.get(eqn.outvars[0], 0)
  self.hold(eqn.outvars[0], Value(atom, dtype, wanted=wanted, held=held))
  return None


def filled(eqn: JaxprEqn, dtype: Dtype, eqns: list[JaxprEqn]) -> Var:
  """Fills an array with a number in another dtype, as one writes it by hand: no cast of the array.

  Args:
    eqn: the equation that repeats a literal.
    dtype: that of the new array.
    eqns: where to write the new equation.
  """
  number: Any = eqn.invars[0]
  var = retyped(eqn.outvars[0], dtype)
  eqns.append(eqn.replace(invars=[literal_as(number, dtype), *eqn.invars[1:]], outvars=[var]))
  return var


def each_for_itself(self: Any, eqn: JaxprEqn, values: Sequence[Value | None]) -> None:
  """Writes an operation whose results are its operands, moved: each keeps its own dtype.

  Args:
    self: the `Rewriter` of the jaxpr.
    eqn: the operation.
    values: its operands.
  """
  operands: list[Any] = []
  kinds: list[Kind | None] = []
  for atom, value, var in zip(eqn.invars, values, eqn.outvars, strict=True):
    operands.append(atom if value is None else self.view(value, value.dtype, eqn))
    kinds.append(value.kind if value is not None and dtype_of(var) in FLOATS else None)
  self.write(eqn, operands, kinds, once=all(v is None or v.once for v in values))


def convert(self: Any, eqn: JaxprEqn, scope: Scope, half: Dtype) -> None:
  """Writes a cast of the user's, or of the rules of promotion; none to a dtype that is there.

  Args:
    self: the `Rewriter` of the jaxpr.
    eqn: the cast.
    scope: that of the equation.
    half: the low-precision dtype there.
  """
  (atom,), (var,) = eqn.invars, eqn.outvars
  target = eqn.params["new_dtype"]
  wanted = self.wanted.get(var, 0)
  value = self.outside(self.value(atom, half), eqn, scope, half, wanted)
  if value is None or target not in FLOATS:
    # An index or a count is more than half can hold; of a mask it holds both numbers.
    neutral = target == FLOAT32 and dtype_of(atom) == np.bool_
    operand = atom if value is None else self.view(value, value.dtype, eqn)
    return self.write(eqn, [operand], [self.kind_of(var, neutral=neutral)])
  if dtype_of(atom) == target:  # Only the weak type goes.
    value.wanted |= wanted
    self.hold(var, value)
    return None
  made = Value(
    value.atom,
    target,
    neutral=value.neutral and target == FLOAT32,
    scope=scope,
    wanted=wanted,
    once=value.once,
    held=value.held,
  )
  if target != FLOAT32 or FLOAT32 in (value.views or ()):
    # A cast to half happens here for all consumers; one to float32 only where float32 is read.
    made.atom, made.held = self.view(value, target, eqn), target
  self.hold(var, made)
  return None
