"""Leaves of one size together: a GPU launches a kernel for each that is looked at by itself.

What is here gives the same bits as leaf by leaf, and on other devices is computed so: a CPU has
nothing to launch, and may store what a GPU computes on the way. Which of the two is decided where
the function is lowered, and leaves no branch in what is compiled.
"""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType

from mpjax._core.types import Array, DType, Leaf, PyTree

_MOST = 32
"""Leaves in one reduction: a fusion of XLA takes at most 96 arrays, all that it reads included."""

_SMALL = 2**16
"""Elements of a leaf that may share a mask: its kernel takes less time than to launch it."""


def first_nonfinite_together(
  leaves: Sequence[Leaf], inexact: Sequence[int], one_by_one: Callable[..., Array]
) -> Array:
  """Returns `one_by_one(leaves)`, on a GPU by one reduction for all leaves of a size.

  Args:
    leaves: leaves of a tree.
    inexact: positions of those that are looked at: floating and complex ones.
    one_by_one: returns the position of the first with an inf or a NaN, `len(leaves)` without any.
  """
  groups = _of_one_size([leaves[i] for i in inexact])
  if all(len(group) == 1 for group in groups):
    return one_by_one(leaves)

  def together(arrays: Sequence[Array]) -> Array:
    flags = [jnp.all(jnp.isfinite(x), _but_first(x)) for x in _stacks(arrays, groups)]
    none = jnp.asarray(len(leaves), jnp.int32)
    positions = jnp.asarray([inexact[i] for group in groups for i in group], jnp.int32)
    return jnp.min(jnp.where(jnp.concatenate(flags), none, positions))

  def alone(arrays: Sequence[Array]) -> Array:
    found = list(leaves)
    for i, x in zip(inexact, arrays, strict=True):
      found[i] = x
    return one_by_one(found)

  return _on_gpu([jnp.asarray(leaves[i]) for i in inexact], together, alone)


def sums_of_squares(leaves: Sequence[Array]) -> list[Array]:
  """Returns the sum of the squares of the absolute values of each leaf."""
  groups = _of_one_size(leaves)

  def alone(leaves: Sequence[Array]) -> list[Array]:
    return [jnp.sum(jnp.square(jnp.abs(x))) for x in leaves]

  def together(leaves: Sequence[Array]) -> list[Array]:
    stacks = _stacks(leaves, groups)
    sums = [jnp.sum(jnp.square(jnp.abs(x)), _but_first(x)) for x in stacks]
    found = {i: sums[g][row] for g, group in enumerate(groups) for row, i in enumerate(group)}
    return [found[i] for i in range(len(leaves))]

  if all(len(group) == 1 for group in groups):
    return alone(leaves)
  return _on_gpu(leaves, together, alone)


def _stacks(arrays: Sequence[Array], groups: Sequence[Sequence[int]]) -> list[Array]:
  """Returns an array for each group, with an index for each of its leaves as the first axis.

  XLA computes it where it is read. What is alone may be divided among devices, and keeps its shape.
  """

  def stack(group: Sequence[int]) -> Array:
    if len(group) == 1:
      return arrays[group[0]][None]
    return jnp.stack([jnp.ravel(arrays[i]) for i in group])

  return [stack(group) for group in groups]


def _but_first(x: Array) -> tuple[int, ...]:
  return tuple(range(1, x.ndim))


def masks_of(condition: Array, leaves: Sequence[Leaf]) -> list[Array]:
  """Returns `condition` for each leaf: the scalar, or on a GPU a mask that small ones share.

  XLA for GPU puts operations of one shape that read the same array into one kernel, but not for the
  sake of a scalar: AdamW then updates 53 scales of norms in 6 kernels, and otherwise in 53.
  """
  found = [condition] * len(leaves)
  if not isinstance(condition, Tracer):
    return found
  small = [i for i, x in enumerate(leaves) if jnp.ndim(x) and 0 < jnp.size(x) <= _SMALL]
  groups = [g for g in _grouped([leaves[i] for i in small], jnp.shape, most=None) if len(g) > 1]
  if not groups:
    return found
  shapes = [jnp.shape(leaves[small[group[0]]]) for group in groups]

  def alone(flag: Array) -> list[Array]:
    return [jnp.broadcast_to(flag, shape) for shape in shapes]

  def stored(flag: Array) -> list[Array]:
    return [jax.lax.optimization_barrier(mask) for mask in alone(flag)]

  for group, mask in zip(groups, _on_gpu(condition, stored, alone), strict=True):
    for i in group:
      found[small[i]] = mask
  return found


def read_together(scalars: Mapping[str, Array]) -> dict[str, Array]:
  """Returns the same scalars (bool, int32, float32), on a GPU read from one array.

  XLA launches a kernel for each number that is computed from scalars, a copy for each that is
  overwritten while another still reads it, and one for all that read the same array.
  """
  found = dict(scalars)
  arrays = list({id(x): x for x in found.values()}.values())
  plain = all(isinstance(x, Tracer) and not jnp.ndim(x) for x in arrays)
  # Within a shard_map some may vary from device to device, and in one array all would.
  if not plain or jax.sharding.get_abstract_mesh().manual_axes:
    return found

  def stored(arrays: Sequence[Array]) -> list[Array]:
    row = jax.lax.optimization_barrier(jnp.stack([_as_int32(x) for x in arrays]))
    return [_from_int32(row[i], x.dtype) for i, x in enumerate(arrays)]

  read = _on_gpu(arrays, stored, lambda arrays: list(arrays))
  taken = {id(x): new for x, new in zip(arrays, read, strict=True)}
  return {name: taken[id(x)] for name, x in found.items()}


def _as_int32(x: Array) -> Array:
  if x.dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
  return x.astype(jnp.int32)


def _from_int32(x: Array, dtype: DType) -> Array:
  if dtype == jnp.float32:
    return jax.lax.bitcast_convert_type(x, jnp.float32)
  return x.astype(dtype)


def _on_gpu(
  operand: PyTree, together: Callable[..., PyTree], alone: Callable[..., PyTree]
) -> PyTree:
  """Returns `together(operand)` where it is lowered for a GPU, and `alone(operand)` elsewhere."""
  return jax.lax.platform_dependent(operand, cuda=together, rocm=together, default=alone)


def _of_one_size(leaves: Sequence[Leaf]) -> list[list[int]]:
  return _grouped(leaves, lambda x: (jnp.size(x), jnp.result_type(x)))


def _grouped(
  leaves: Sequence[Leaf], key: Callable[[Leaf], object], most: int | None = _MOST
) -> list[list[int]]:
  """Returns positions of leaves in groups of one key, of at most `most`; some are alone.

  Concrete leaves are, since operations on them run one by one, and so are those that may be divided
  among devices: to stack two that are divided differently takes a collective for all of one.
  """
  groups: dict[object, list[int]] = {}
  unknown = any(_divided(x, AxisType.Auto) for x in leaves)
  for i, x in enumerate(leaves):
    alone = unknown or not isinstance(x, Tracer) or _divided(x, AxisType.Explicit)
    groups.setdefault(("alone", i) if alone else key(x), []).append(i)
  step = most or max(len(leaves), 1)
  return [
    group[start : start + step] for group in groups.values() for start in range(0, len(group), step)
  ]


def _divided(x: Leaf, kind: AxisType) -> bool:
  """Whether XLA may divide an array among the devices of a mesh, along axes of this kind.

  Of an automatic axis the type shows that it is there, and not whether the array is divided.
  """
  if not isinstance(x, Tracer):
    return False
  sharding = jax.typeof(x).sharding
  mesh = sharding.mesh
  found = any(k == kind and n > 1 for k, n in zip(mesh.axis_types, mesh.axis_sizes, strict=True))
  return found and (kind == AxisType.Auto or any(axis is not None for axis in sharding.spec))
