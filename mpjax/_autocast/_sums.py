"""Sums of derivatives in float32: what is repeated is repeated in float32, and rounded afterwards.

The transpose of a broadcast is a sum, in the dtype of what is broadcast.
"""

from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var, new_jaxpr_eqn, no_effects
from jax.extend.core.primitives import broadcast_in_dim_p
from jax.sharding import AxisType

from mpjax._autocast._values import FLOAT32, Dtype, Value, shape_of

BROADCASTING = frozenset({"add", "sub"})
"""Operations that may repeat an operand along axes of size 1, and save none for their derivative: a
factor that was broadcast beforehand would be kept as large as what it multiplies."""


def is_widened(atom: Any) -> bool:
  """Whether an operand is broadcast in float32."""
  if type(atom) is Literal:
    return False
  # An explicit sharding would have to be said of the result.
  return AxisType.Explicit not in atom.aval.sharding.mesh.axis_types


def is_repeated(eqn: JaxprEqn, value: Value, dtype: Dtype) -> bool:
  """Whether an operand is broadcast in float32, and then cast to the dtype of the operation.

  Args:
    eqn: the operation.
    value: the operand.
    dtype: that of the operation.
  """
  return (
    dtype != FLOAT32
    and eqn.primitive.name in BROADCASTING
    and not (value.once and value.neutral)
    and shape_of(value.atom) != shape_of(eqn.outvars[0])
    and is_widened(value.atom)
  )


def broadcast(atom: Any, eqn: JaxprEqn) -> JaxprEqn:
  """Returns an equation that repeats a value to the shape of the result of `eqn`."""
  shape = shape_of(eqn.outvars[0])
  params = {"shape": shape, "broadcast_dimensions": tuple(range(atom.aval.ndim)), "sharding": None}
  var = Var(atom.aval.update(shape=shape, weak_type=False))
  place = (eqn.source_info, eqn.ctx)
  return new_jaxpr_eqn([atom], [var], broadcast_in_dim_p, params, no_effects, *place)
