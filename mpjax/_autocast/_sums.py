"""Sums of derivatives in float32: where one number is read in several places.

The transpose of a broadcast is a sum in the dtype of what is broadcast, that of a gather adds up in
the dtype of what is gathered, and the derivative of a maximum counts the places that have it. So
these run in float32, and their result is rounded, which loses nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Primitive, Var, new_jaxpr_eqn, no_effects
from jax.extend.core.primitives import broadcast_in_dim_p
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._autocast._values import FLOAT32, Dtype, Value, shape_of
from mpjax._compat import context_of

_REPEATING = frozenset({"broadcast_in_dim", "broadcast_to", "gather", "tile"})

_ADDING = frozenset({"add", "sub"})

_MULTIPLYING = frozenset({"atan2", "div", "max", "min", "mul", "rem"})

_CHOOSING = frozenset({"reduce_max", "reduce_min"})


def repeats(eqn: JaxprEqn) -> bool:
  """Whether an operation does nothing but move numbers, each perhaps to several places."""
  return (
    eqn.primitive.name in _REPEATING
    and type(eqn.invars[0]) is not Literal
    and not eqn.params.get("unique_indices")
  )


def is_summed(eqn: JaxprEqn, value: Value, dtype: Dtype) -> bool:
  """Whether an operation adds up the derivative with respect to one of its operands.

  Args:
    eqn: an operation, but none that only moves numbers.
    value: the operand.
    dtype: that of the operation.
  """
  name = eqn.primitive.name
  if dtype == FLOAT32 or type(value.atom) is Literal or (value.once and value.neutral):
    return False
  if name in _ADDING or name in _MULTIPLYING:  # They may broadcast axes of size 1.
    return shape_of(value.atom) != shape_of(eqn.outvars[0])
  return name in _CHOOSING


def is_product(eqn: JaxprEqn) -> bool:
  """Whether the derivative with respect to one operand depends on the other ones."""
  return eqn.primitive.name in _MULTIPLYING


def is_linear(eqn: JaxprEqn) -> bool:
  """Whether an operation saves nothing for its derivative."""
  return eqn.primitive.name in _ADDING


def broadcast(atom: Any, eqn: JaxprEqn) -> JaxprEqn:
  """Returns an equation that repeats a value to the shape of the result of `eqn`."""
  shape, sharding = shape_of(eqn.outvars[0]), _sharding(atom.aval, eqn)
  axes = tuple(range(atom.aval.ndim))
  params = {"shape": shape, "broadcast_dimensions": axes, "sharding": sharding}
  aval = atom.aval.update(shape=shape, weak_type=False)
  var = Var(aval if sharding is None else aval.update(sharding=sharding))
  place = (eqn.source_info, eqn.ctx)
  return new_jaxpr_eqn([atom], [var], broadcast_in_dim_p, params, no_effects, *place)


def for_each_example(atom: Any, operands: Sequence[Any], eqn: JaxprEqn) -> JaxprEqn:
  """Returns an equation that gives a value itself, repeated for each example of `operands`.

  A `jax.vmap` around the program repeats what all examples share where it meets what they do not,
  in the dtype that it has there, and its gradient adds up in that.

  Args:
    atom: a float32 variable.
    operands: those of `eqn`.
    eqn: the operation that reads them.
  """
  others = [x for x in operands if type(x) is not Literal]
  place = (eqn.source_info, eqn.ctx)
  return new_jaxpr_eqn([atom, *others], [Var(atom.aval)], _repeat_p, {}, no_effects, *place)


_repeat_p = Primitive("repeat_for_examples")
"""Returns its first operand. Only `jax.vmap` looks at the others: where one of them differs between
examples, the result does too."""


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
  return _repeat_p.bind(*primals), tangents[0]


def _transpose(cotangent: Any, x: Any, *others: Any) -> list[Any]:
  return [cotangent if ad.is_undefined_primal(x) else None, *(None for _ in others)]


def _batch(operands: Sequence[Any], dims: Sequence[int | None]) -> tuple[Any, int]:
  (x, *others), (axis, *rest) = operands, dims
  if axis is None:
    other, axis = next((y, d) for y, d in zip(others, rest, strict=True) if d is not None)
    sharding: Any = jax.typeof(other).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
      spec = (sharding.spec[axis], *jax.typeof(x).sharding.spec)
      sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    else:
      sharding = None
    shape = (other.shape[axis], *x.shape)
    x, axis = lax.broadcast_in_dim(x, shape, range(1, len(shape)), out_sharding=sharding), 0
  return _repeat_p.bind(x, *others), axis


_repeat_p.def_impl(lambda x, *others: x)
_repeat_p.def_abstract_eval(lambda x, *others: x)
ad.primitive_jvps[_repeat_p] = _jvp
ad.primitive_transposes[_repeat_p] = _transpose
batching.primitive_batchers[_repeat_p] = _batch
mlir.register_lowering(_repeat_p, lambda ctx, x, *others: [x])


def _sharding(aval: Any, eqn: JaxprEqn) -> NamedSharding | None:
  """Returns the explicit sharding of a value that is repeated to the shape of the result."""
  out: Any = eqn.outvars[0].aval
  if AxisType.Explicit not in out.sharding.mesh.axis_types:
    return None
  spec = list(out.sharding.spec)
  for axis, size in enumerate(aval.shape):
    if size == out.shape[axis]:
      spec[axis] = aval.sharding.spec[axis]
  return NamedSharding(out.sharding.mesh, PartitionSpec(*spec))


def with_float32_sums(
  eqn: JaxprEqn, operands: Sequence[Any], summed: Sequence[bool], dtype: Dtype
) -> JaxprEqn:
  """Returns an operation whose derivative adds up in float32, and saves nothing but `operands`.

  It is inside of `jax.checkpoint`: what is between the operands and the operation, as large as its
  result or in float32, is computed again in the backward pass, where a compiler fuses it.

  Args:
    eqn: the operation.
    operands: those that are not summed in `dtype`.
    summed: for which of them the derivative is a sum.
    dtype: that of the operation.
  """

  def repeated(x: Any) -> Any:
    wide = lax.convert_element_type(x, FLOAT32)
    if eqn.primitive.name in _CHOOSING:
      return wide
    sharding = _sharding(jax.typeof(x), eqn)
    shape = shape_of(eqn.outvars[0])
    wide = lax.broadcast_in_dim(wide, shape, range(x.ndim), out_sharding=sharding)
    return lax.convert_element_type(wide, dtype)

  def operation(*operands: Any) -> Any:
    pairs = zip(operands, summed, strict=True)
    out = eqn.primitive.bind(*(repeated(x) if each else x for x, each in pairs), **eqn.params)
    return lax.convert_element_type(out, dtype)

  with context_of(eqn):
    again = jax.checkpoint(operation, prevent_cse=False)
    made = jax.make_jaxpr(again)(*(x.aval for x in operands)).eqns[-1]
  return eqn.replace(primitive=made.primitive, params=made.params, effects=made.effects)
