"""Matmuls of operands with scales in blocks along the summed axis.

Every operand is a stack of matrices `(batch, rows, summed)`, as `jax.nn.scaled_matmul` takes it.
The matmul is a primitive, so a jaxpr has one equation with operands in the format. It is lowered to
`jax.nn.scaled_matmul` on CUDA, if that supports the format. Otherwise the operands are multiplied
by their scales, and a matmul in bfloat16 follows.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpjax._core.types import FLOAT32, Array, DType
from mpjax._jaxpr.caches import remembered_off_mesh
from mpjax._matmul.protocol import Scaled

BFLOAT16 = np.dtype(jnp.bfloat16)
E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
E2M1, E8M0 = np.dtype(jnp.float4_e2m1fn), np.dtype(jnp.float8_e8m0fnu)

UNITS = {(E4M3, E8M0): 32, (E5M2, E8M0): 32, (E2M1, E4M3): 16}
"""The formats of `jax.nn.scaled_matmul` on GPUs: dtypes of values and scales, and their block."""

STACKS = (((2,), (2,)), ((0,), (0,)))
"""The `dimension_numbers` of a matmul of two stacks of matrices."""


# Stacks of matrices.


class Layout(NamedTuple):
  """The axes of an operand that become the batch, the rows and the sums of a stack of matrices."""

  batch: tuple[int, ...]
  rows: tuple[int, ...]
  summed: tuple[int, ...]

  @property
  def order(self) -> tuple[int, ...]:
    return (*self.batch, *self.rows, *self.summed)


def stacked(x: Array, layout: Layout, block: int) -> Array:
  """Returns an operand as a stack of matrices, its sums padded with zeros to whole blocks."""
  matrices = merge_axes(jax.lax.transpose(x, layout.order), [*map(len, layout)])
  missing = -matrices.shape[2] % block
  if missing == 0:
    return matrices
  return jax.lax.pad(matrices, np.zeros((), x.dtype), ((0, 0, 0), (0, 0, 0), (0, missing, 0)))


def unstacked(matrices: Array, layout: Layout, shape: Sequence[int]) -> Array:
  """Returns the operand of this shape from the stack of matrices that `stacked` made of it."""
  sizes = [[shape[axis] for axis in axes] for axes in layout]
  # The padding of `stacked` is at the end of the summed axis.
  x = jax.lax.slice_in_dim(matrices, 0, math.prod(sizes[2]), axis=2)
  return jax.lax.transpose(split_axes(x, sizes), np.argsort(layout.order))


def dequantised(values: Array, scale: Array | None) -> Array:
  """Returns the product of a stack of matrices and its scales.

  It is exact for the formats of `UNITS`: bfloat16 holds each of their numbers.
  """
  if scale is None:
    return values
  wide = FLOAT32 if scale.dtype == FLOAT32 else BFLOAT16
  # Each axis becomes two: the number of blocks, and the elements of a block, which share a scale.
  sizes = [(m, n // m) for n, m in zip(values.shape, scale.shape, strict=True)]
  blocks = split_axes(jax.lax.convert_element_type(values, wide), sizes)
  factors = jax.lax.expand_dims(jax.lax.convert_element_type(scale, wide), (1, 3, 5))
  return merge_axes(blocks * factors, [2, 2, 2])


def split_axes(x: Array, sizes: Sequence[Sequence[int]]) -> Array:
  """Returns an array with each axis split into axes of these sizes.

  On a mesh with explicit axes, the first of them gets the sharding of the axis if its size allows.
  """
  mesh = jax.typeof(x).sharding.mesh
  names = [
    None if each and each[0] % _devices(mesh, name) else name
    for name, each in zip(spec_of(x), sizes, strict=True)
  ]
  x = placed(x, names)
  # An axis that is split into no axes has size 1 and no sharding: `[: len(each)]` drops its entry.
  spec = [
    (name, *[None] * (len(each) - 1))[: len(each)] for name, each in zip(names, sizes, strict=True)
  ]
  return _reshaped(x, [n for each in sizes for n in each], [n for each in spec for n in each])


def merge_axes(x: Array, counts: Sequence[int]) -> Array:
  """Returns an array whose first `counts[0]` axes are one axis, the next `counts[1]` another.

  A count of 0 gives a new axis of size 1.
  """
  ends = np.cumsum(counts)
  shape = [math.prod(x.shape[end - n : end]) for end, n in zip(ends, counts, strict=True)]
  return _reshaped(x, shape, _joined_spec(spec_of(x), counts))


def spec_of(x: Array) -> tuple[Any, ...]:
  """Returns the names of the explicit mesh axes over which each axis is sharded, or None."""
  return tuple(jax.typeof(x).sharding.spec)


def placed(x: Array, spec: Sequence[Any]) -> Array:
  """Returns an array that is sharded over these axes of a mesh."""
  return x if spec_of(x) == tuple(spec) else jax.sharding.reshard(x, PartitionSpec(*spec))


def _devices(mesh: AbstractMesh, names: Any) -> int:
  """Returns how many parts an axis has that is sharded over some axes of a mesh, or over None."""
  several = names if isinstance(names, tuple) else (names,)
  return math.prod(mesh.shape[name] for name in several if name is not None)


def of_stacks(sharding: NamedSharding | None, counts: Sequence[int]) -> NamedSharding | None:
  """Returns the sharding of an array after `merge_axes` with these counts."""
  if sharding is None:
    return None
  return NamedSharding(sharding.mesh, PartitionSpec(*_joined_spec(tuple(sharding.spec), counts)))


def _joined_spec(spec: Sequence[Any], counts: Sequence[int]) -> list[Any]:
  """Returns the entries of a `PartitionSpec` after `merge_axes` with these counts."""
  ends = np.cumsum(counts)
  names = [
    [name for name in spec[end - count : end] if name is not None]
    for end, count in zip(ends, counts, strict=True)
  ]
  # An entry of a `PartitionSpec` is one name, a tuple of names, or None.
  return [each[0] if len(each) == 1 else tuple(each) or None for each in names]


def _reshaped(x: Array, shape: Sequence[int], spec: Sequence[Any]) -> Array:
  """Returns an array in another shape; with explicit axes, in the sharding `spec`."""
  # JAX cannot infer how to shard a reshaped axis. It also needs a spec, all None, if only the axis
  # of a `vmap` around is sharded, which no spec here shows.
  is_explicit = AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
  sharding = PartitionSpec(*spec) if is_explicit else None
  return jax.lax.reshape(x, shape, out_sharding=sharding)


# The matmul.


block_dot_p = Primitive("block_scaled_dot")
"""Takes the values of both operands, then their scales.

Its parameter `native` is the jaxpr that CUDA runs, or None. It is a parameter so that JAX finds it:
the lowering of `jax.nn.scaled_matmul` asks for the devices.
"""


def block_dot(
  left: Scaled, right: Scaled, dtype: DType, out_sharding: NamedSharding | None = None
) -> Array:
  """Returns the matmul of two stacks of matrices with scales in blocks, without `of_tensor`."""
  arrays = (left.values, right.values, left.scale, right.scale)
  return _bind(*arrays, preferred_element_type=dtype, out_sharding=out_sharding)


def _bind(*operands: Any, preferred_element_type: DType, out_sharding: Any, **_: Any) -> Array:
  """Binds the primitive, with the native jaxpr for these operands."""
  # `**_` has the `native` of the unbatched operands if `_batch` calls this.
  types = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
  result: Array = block_dot_p.bind(
    *operands,
    dimension_numbers=STACKS,
    preferred_element_type=preferred_element_type,
    out_sharding=out_sharding,
    native=_native_jaxpr(preferred_element_type, *types),
  )
  return result


@functools.lru_cache(maxsize=1024)
def _native_jaxpr(dtype: DType, *types: jax.ShapeDtypeStruct) -> ClosedJaxpr | None:
  """Returns the matmul by `jax.nn.scaled_matmul`; None if that does not have the format."""
  # The native format has one scale for each unit. A block of several units has repeated scales.
  for values, scale in zip(types[:2], types[2:], strict=True):
    unit = UNITS.get((values.dtype, scale.dtype))
    if unit is None or (values.shape[2] // scale.shape[2]) % unit:
      return None
  return jax.make_jaxpr(functools.partial(_native, dtype=dtype))(*types)


def _native(left: Array, right: Array, of_left: Array, of_right: Array, *, dtype: DType) -> Array:
  scales = _each(of_left, left), _each(of_right, right)
  return jax.nn.scaled_matmul(left, right, *scales, preferred_element_type=dtype)


def _each(scale: Array, values: Array) -> Array:
  """Returns a scale for each row and unit. The units of a larger block have the same scale."""
  batch, rows, depth = values.shape
  blocks = depth // UNITS[values.dtype, scale.dtype]
  if scale.shape == (batch, rows, blocks):
    return scale
  scale = jnp.repeat(scale, rows // scale.shape[1], axis=1)
  return jnp.repeat(scale, blocks // scale.shape[2], axis=2)


def _emulated(left: Array, right: Array, of_left: Array, of_right: Array, **params: Any) -> Array:
  """Returns the matmul of dequantised operands."""
  operands, out = (dequantised(left, of_left), dequantised(right, of_right)), params["out_sharding"]
  # A CPU sums a batch of matrices in the dtype of the result, so that is float32.
  options = {"preferred_element_type": FLOAT32, "out_sharding": out}
  sums = jax.lax.dot_general(*operands, params["dimension_numbers"], **options)
  return jax.lax.convert_element_type(sums, params["preferred_element_type"])


def _on_cuda(*operands: Array, native: ClosedJaxpr | None, **params: Any) -> Array:
  if native is None:
    return _emulated(*operands, **params)
  return jaxpr_as_fun(native)(*operands)[0]


_STATIC = ("dimension_numbers", "preferred_element_type", "out_sharding", "native")


_compiled = jax.jit(_bind, static_argnames=_STATIC)


def _evaluate(*operands: Array, **params: Any) -> Array:
  # Without `jit` the compiled call would evaluate the primitive here again, without end.
  is_disabled = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
  call = _emulated if is_disabled else _compiled
  return call(*operands, **params)


@remembered_off_mesh
def _abstract(*avals: ShapedArray, **params: Any) -> AbstractValue:
  # A trace of the emulation also gives the sharding and the varying axes of the result.
  return jax.make_jaxpr(functools.partial(_emulated, **params))(*avals).jaxpr.outvars[0].aval


def _batch(
  operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
  # An axis of both operands joins the batch. An axis of one joins its rows, or columns.
  size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
  # The values or the scales of an operand may be mapped alone.
  mapped = [dims[side] is not None or dims[2 + side] is not None for side in (0, 1)]
  at = 0 if all(mapped) else 1
  merged = [*operands]
  for i, (x, axis) in enumerate(zip(operands, dims, strict=True)):
    if mapped[i % 2]:
      # If only the values or only the scales are mapped, the others are repeated.
      one = jax.lax.broadcast(x, (size,)) if axis is None else x
      one = jnp.moveaxis(one, axis or 0, at)
      shape = [*one.shape[:at], size * one.shape[at + 1], *one.shape[at + 2 :]]
      merged[i] = jax.lax.reshape(one, shape)
  result = _bind(*merged, **params)
  # The result has the axes batch, rows of the left and rows of the right. The mapped axis is part
  # of one of them, and is split off.
  axis = at if mapped[0] else 2
  shape = [*result.shape[:axis], size, result.shape[axis] // size, *result.shape[axis + 1 :]]
  return jax.lax.reshape(result, shape), axis


block_dot_p.def_impl(_evaluate)
block_dot_p.def_abstract_eval(_abstract)
batching.primitive_batchers[block_dot_p] = _batch
mlir.register_lowering(block_dot_p, mlir.lower_fun(_emulated, multiple_results=False))
mlir.register_lowering(
  block_dot_p, mlir.lower_fun(_on_cuda, multiple_results=False), platform="cuda"
)
