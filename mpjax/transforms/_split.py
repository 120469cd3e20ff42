"""A float32 master as a bfloat16 parameter and an int16 remainder, in integers.

The parameter is the master rounded to nearest, ties away from zero: (bits + 2^15) >> 16. The
remainder is bits(master) - bits(parameter) 2^16, in [-2^15, 2^15), of the bits without the sign.
No compiler leaves out a rounding of integers, and no CPU takes a subnormal integer for zero.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.trees import round_to, saturate
from mpjax._core.types import Array, DType

_LARGEST = np.int32(0x7F7F7FFF).view(np.float32)
"""The largest number that rounds to a finite bfloat16."""


def differentiated_as(
  exact: Callable[..., Array],
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
  """Gives a function that rounds the derivative of `exact`, which does not round."""
  # Within `jit` it is one equation for each array, and is traced once for all of one shape.

  def decorate(function: Callable[..., Array]) -> Callable[..., Array]:
    rounding = jax.custom_jvp(function)
    rounding.defjvp(lambda x, dx: (rounding(*x), jax.jvp(exact, x, dx)[1]))
    return jax.jit(rounding)

  return decorate


@differentiated_as(lambda master: master)
def bounded(master: Array) -> Array:
  """Returns a float32 master no larger than what rounds to a finite bfloat16; an inf stays."""
  return _bounded(master)


@jax.jit
def split(master: Array, param: Array) -> Array:
  """Returns the remainder of a float32 master, to a parameter in bfloat16 or as float32."""
  # A compiler may compute a master twice, at a tie an ulp apart. So the remainder is that to the
  # parameter, and is clipped: as int16 it would wrap around, which is an ulp of bfloat16.
  base = param.astype(jnp.float32)
  # With the sign: where 0 has another one than the master, the remainder is clipped, and ignored.
  rest = jnp.clip(_bits(master) - _bits(base), -(2**15), 2**15 - 1)
  return jnp.where(jnp.isfinite(base), rest, 0).astype(jnp.int16)


@differentiated_as(lambda param, remainder: param.astype(jnp.float32))
def join(param: Array, remainder: Array) -> Array:
  """Returns the float32 master of a bfloat16 parameter."""
  # It is finite where the parameter is, which someone may have set to 0 with a remainder below 0.
  base = param.astype(jnp.float32)
  total = _bits(base) + remainder.astype(jnp.int32)
  is_usable = jnp.logical_and(jnp.isfinite(base), (total ^ _bits(base)) >= 0)
  return jnp.where(is_usable, _number(total), base)


@differentiated_as(lambda master, param: master.astype(param.dtype))
def stored(master: Array, param: Array) -> Array:
  """Returns a float32 master as it is stored in the dtype of `param`."""
  return _rounded(master, param.dtype).astype(param.dtype)


@differentiated_as(lambda master, param: master - param.astype(jnp.float32))
def update_to(master: Array, param: Array) -> Array:
  """Returns the float32 update that leads a parameter to its rounded master."""
  # It is -0.0, which leaves all bits alone, where the parameter is there already.
  goal, old = _rounded(master, param.dtype), param.astype(jnp.float32)
  return jnp.where(_bits(goal) == _bits(old), np.float32(-0.0), goal - old)


def _rounded(master: Array, dtype: DType) -> Array:
  """Returns float32 numbers rounded to nearest in `dtype`, still in float32."""
  # Beyond its range they are the largest number: from an inf no update would lead to a number.
  if dtype != jnp.bfloat16:
    return round_to(saturate(master, dtype), dtype).astype(jnp.float32)
  nearest = (_bits(_bounded(master)) + np.int32(2**15)) & np.int32(-(2**16))
  # An inf or NaN stays. In integers a NaN could become 0.
  return jnp.where(jnp.isfinite(master), _number(nearest), master)


def _bounded(master: Array) -> Array:
  nearest = jnp.clip(master, -_LARGEST, _LARGEST)
  # Where it is the same, `master` itself: a CPU takes a subnormal number for zero here.
  is_beyond = jnp.logical_and(jnp.isfinite(master), nearest != master)
  return jnp.where(is_beyond, nearest, master)


def _bits(x: Array) -> Array:
  return jax.lax.bitcast_convert_type(x, jnp.int32)


def _number(bits: Array) -> Array:
  return jax.lax.bitcast_convert_type(bits, jnp.float32)
