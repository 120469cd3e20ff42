"""Sums of derivatives in float32: where one number is read several times.

The transpose of a broadcast is a sum in the dtype of what is broadcast, that of a gather adds up in
the dtype of what is gathered, and the derivative of a maximum counts the positions that have it. So
these run in float32, and their result is rounded, which loses nothing.
"""

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal, Var, new_jaxpr_eqn, no_effects
from jax.extend.core.primitives import broadcast_in_dim_p
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._core.dtypes import FLOAT32
from mpjax._core.types import DType
from mpjax._jaxprs.atoms import Atom, aval_of, shape_of
from mpjax._jaxprs.autocast.values import Value
from mpjax._jaxprs.primitives import facts_of


def repeats(eqn: JaxprEqn) -> bool:
  """Whether an operation does nothing but move numbers, each perhaps to several positions."""
  return (
    facts_of(eqn).gradient == "repeated"
    and type(eqn.invars[0]) is not Literal
    and not eqn.params.get("unique_indices")
  )


def is_summed(eqn: JaxprEqn, value: Value, dtype: DType) -> bool:
  """Whether an operation in low precision adds up the derivative with respect to an operand.

  Not of one that only moves numbers.
  """
  if dtype == FLOAT32 or type(value.atom) is Literal or (value.once and value.neutral):
    return False
  gradient = facts_of(eqn).gradient
  if gradient in ("added", "multiplied"):  # They may broadcast axes of size 1.
    return shape_of(value.atom) != shape_of(eqn.outvars[0])
  return gradient == "chosen"


def broadcast(atom: Atom, eqn: JaxprEqn) -> JaxprEqn:
  """Returns an equation that repeats a value to the shape of the result of `eqn`."""
  aval = aval_of(atom)
  shape, sharding = shape_of(eqn.outvars[0]), _sharding(aval, eqn)
  axes = tuple(range(aval.ndim))
  params = {"shape": shape, "broadcast_dimensions": axes, "sharding": sharding}
  new = aval.update(shape=shape, weak_type=False)
  var = Var(new if sharding is None else new.update(sharding=sharding))
  place = (eqn.source_info, eqn.ctx)
  return new_jaxpr_eqn([atom], [var], broadcast_in_dim_p, params, no_effects, *place)


def _sharding(aval: ShapedArray, eqn: JaxprEqn) -> NamedSharding | None:
  """Returns the explicit sharding of a value that is repeated to the shape of the result."""
  out = aval_of(eqn.outvars[0])
  if AxisType.Explicit not in out.sharding.mesh.axis_types:
    return None
  spec = list(out.sharding.spec)
  for axis, size in enumerate(aval.shape):
    if size == out.shape[axis]:
      spec[axis] = aval.sharding.spec[axis]
  return NamedSharding(out.sharding.mesh, PartitionSpec(*spec))
