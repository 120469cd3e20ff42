"""A float32 number as a bfloat16 parameter and the 17 bits that it lacks.

The parameter is the number rounded to nearest, ties to even: bits(number) and bits(parameter) 2^16
are at most 2^15 apart. Both ties round to the same even parameter: 65,537 numbers have it, and the
lower 16 bits of a number are one too few to tell which it is. The 17th bit decides it. It is in an
array of its own, 8 to a byte.

A compiler may compute a master once for each of its consumers, here contracted to a fused
multiplication and addition and there not: parameter, 16 bits and 17th bit may be those of three
numbers that differ in their last bits. So each is read only where last bits do not matter: the 17th
bit far from a number that bfloat16 has, and how the parameter was rounded far from a tie.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.types import Array, PyTree

_SIGN, _MAGNITUDE = np.int32(-(2**31)), np.int32(2**31 - 1)
_INF, _LARGEST = np.int32(0x7F80 << 16), np.int32(0x7F7F << 16)
_LARGEST_NUMBER = _INF - np.int32(1)


class SplitMaster(NamedTuple):
  """What `mpjax.master_weights(..., storage="split")` keeps instead of a float32 master.

  Of all masters in a state it holds two trees, each like the parameters.

  Args:
    remainder: int16 in the shape (..., n) of the parameter, the lower 16 bits of the masters: the
      signed difference to the parameter, of their bits as integers.
    parity: uint8 of shape (..., ceil(n / 8)), the bit above these, packed along the last axis; of a
      scalar parameter its shape is (1,).
  """

  remainder: PyTree
  parity: PyTree


def split(master: Array, param: Array) -> SplitMaster:
  """Returns what is left of a float32 master when it is rounded to its parameter.

  Args:
    master: float32.
    param: the parameter, in bfloat16, or in float32 as wrappers show it.

  Returns:
    What `join` needs. Where `param` is not the rounded master, `join` returns the number nearest to
    the master that does round to it. Of a zero `param` the master's sign is kept nevertheless.
  """
  number, base = _bits(master), _bits(param)
  size, base_size = number & _MAGNITUDE, base & _MAGNITUDE
  odd = (base >> 16) & 1
  reach = np.int32(2**15) - odd
  most = base_size + jnp.where(base_size == _LARGEST, np.int32(2**16 - 1), reach)
  least = base_size - jnp.where(base_size == 0, np.int32(0), reach)
  is_zero, same_sign = base_size == 0, (number ^ base) >= 0
  size = jnp.where(jnp.logical_or(same_sign, is_zero), size, np.int32(0))
  size = jnp.minimum(jnp.maximum(size, least), most)
  size = jnp.where(base_size < _INF, size, base_size)  # An inf or NaN is all in `param`.
  # Near zero the 17th bit is always 0.
  parity = jnp.where(is_zero, jnp.logical_not(same_sign), (size & np.int32(2**16)) != 0)
  return SplitMaster(_low(size), pack(parity))


def join(param: Array, held: SplitMaster) -> Array:
  """Returns the float32 master of a parameter: an inf or a NaN where the parameter is one."""
  base = _bits(param)
  size = base & _MAGNITUDE
  rest = held.remainder.astype(jnp.int32)
  parity = unpack(held.parity, held.remainder).astype(jnp.int32)
  is_near = jnp.logical_and(jnp.abs(rest) < np.int32(2**14), size != _LARGEST)
  above = size + (rest & np.int32(2**16 - 1))
  apart = jnp.where((above >> 16) & 1 == parity, above, above - np.int32(2**16))
  total = jnp.where(is_near, size + rest, apart)
  is_zero = size == 0
  total = jnp.where(is_zero, above, total)
  # Beyond that is nothing but what `split` has not made: other parameters than those of this state.
  total = jnp.minimum(jnp.maximum(total, np.int32(0)), _LARGEST_NUMBER)
  sign = (base & _SIGN) ^ jnp.where(is_zero, parity << 31, np.int32(0))
  joined = jnp.where(size < _INF, sign | total, base)
  return jax.lax.bitcast_convert_type(joined, jnp.float32)


def rounded(master: Array) -> Array:
  """Returns float32 numbers rounded to bfloat16, still in float32: the parameters of masters.

  To nearest, ties to even; beyond the range to the largest number. In integers, where no compiler
  leaves out a rounding, and no CPU takes a subnormal number for zero.
  """
  number = _bits(master)
  size = number & _MAGNITUDE
  nearest = (size + np.int32(0x7FFF) + ((size >> 16) & 1)) & np.int32(-(2**16))
  nearest = jnp.where(size < _INF, jnp.minimum(nearest, _LARGEST), size)
  bits = (number & _SIGN) | nearest
  return jnp.where(jnp.isnan(master), master, jax.lax.bitcast_convert_type(bits, jnp.float32))


def pack(flags: Array) -> Array:
  """Returns bools of shape (..., n) as uint8 of shape (..., ceil(n / 8)); of a scalar (1,)."""
  flags = jnp.atleast_1d(flags)
  sharding, shards = _last_axis(flags)
  if sharding is not None and flags.shape[-1] % (8 * shards):
    # Axes of a mesh that are Explicit do not divide what is no multiple.
    spec = jax.P(*sharding.spec[:-1], None)
    flags = jax.sharding.reshard(flags, jax.NamedSharding(sharding.mesh, spec))
  if not flags.size:  # jnp.packbits fails at some of these shapes, jnp.unpackbits at most of them.
    return jax.lax.slice_in_dim(flags, 0, -(-flags.shape[-1] // 8), axis=-1).astype(jnp.uint8)
  return jnp.packbits(flags, axis=-1)


def unpack(packed: Array, like: Array) -> Array:
  """Returns the bools (as uint8) that `pack` was given for an array of the shape of `like`."""
  if not like.size:
    return jnp.zeros_like(like, jnp.uint8)
  bits = jnp.unpackbits(packed, axis=-1, count=like.shape[-1] if like.shape else 1)
  sharding, _ = _last_axis(like)
  if sharding is not None and jax.typeof(bits).sharding != sharding:
    bits = jax.sharding.reshard(bits, sharding)
  return bits if like.shape else bits[0]


def _last_axis(x: Array) -> tuple[jax.NamedSharding | None, int]:
  """Returns the sharding of `x` if it divides the last axis of it as part of its type, and by what.

  Only Explicit axes of a mesh are part of a type.
  """
  sharding = jax.typeof(x).sharding
  names = sharding.spec[-1] if x.ndim and len(sharding.spec) else None
  if names is None:
    return None, 1
  names = names if isinstance(names, tuple) else (names,)
  return sharding, int(np.prod([sharding.mesh.shape[name] for name in names]))


def _bits(x: Array) -> Array:
  """Returns the bits of `x` as int32; of bfloat16 they are the upper ones."""
  if x.dtype == jnp.bfloat16:
    return jax.lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) << 16
  return jax.lax.bitcast_convert_type(x, jnp.int32)


def _low(x: Array) -> Array:
  """Returns the lower 16 bits of int32 as int16."""
  return ((x << 16) >> 16).astype(jnp.int16)
