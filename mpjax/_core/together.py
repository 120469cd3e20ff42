"""Leaves of a tree together: a GPU launches a kernel for each that is looked at by itself.

The bits are those of leaf by leaf (a sum but for its order), as other devices compute it: a CPU
has nothing to launch. Which of the two is decided where the function is lowered.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from mpjax._core.types import Array, DTypeLike, Leaf, PyTree

Groups: TypeAlias = Sequence[Sequence[int]]
"""Positions of leaves, those that are reduced together in one group."""

_MOST = 32
"""Leaves in one reduction: a fusion of XLA takes at most 96 arrays, all that it reads included."""

_ROW = 1024
"""Elements in a row. Leaves of all sizes are rows of one array, which XLA does not store.

A reduction over rows is one kernel, and one over all of a large leaf two."""

_SMALL = 2**16
"""Elements of a leaf that may share a mask: its kernel takes less time than to launch it."""


def is_inexact(x: Leaf) -> bool:
  """Whether `x` holds floating or complex numbers: a Python number or an array of any kind."""
  is_array = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
  return is_array or isinstance(x, (float, complex))


def first_nonfinite(leaves: Sequence[Leaf]) -> Array:
  """Returns the position of the first leaf with an inf or a NaN, or `len(leaves)` without any."""
  # One int32 says both whether and where. It can be reduced over devices by a minimum, which for
  # integers, unlike for floating values, no NaN gets past.
  none, inexact = np.int32(len(leaves)), [i for i, x in enumerate(leaves) if is_inexact(x)]

  def first(groups: Groups, arrays: Sequence[Array]) -> Array:
    position = jnp.asarray(none)
    for group in groups:
      members = [inexact[i] for i in group]
      if len(group) > 1:
        bad = _first_bad([arrays[i] for i in group], members, none)
      else:
        x = arrays[group[0]]
        finite = jnp.all(jnp.isfinite(x))
        bad = jnp.where(finite, none, np.int32(members[0]))
      position = jnp.minimum(position, bad)
    return position

  return _reduced([leaves[i] for i in inexact], first)


def _first_bad(arrays: Sequence[Array], positions: Sequence[int], none: np.int32) -> Array:
  """Returns the position of the first array with an inf or a NaN; `none` without any."""
  finite = jnp.all(jnp.isfinite(_rows(arrays)), 1)
  ends = np.cumsum([-(-x.size // _ROW) for x in arrays], dtype=np.int32)
  rows = jnp.where(finite, ends[-1], jnp.arange(ends[-1], dtype=jnp.int32))
  row = jnp.min(rows, initial=ends[-1])
  return jnp.min(jnp.where(row < ends, np.asarray(positions, np.int32), none))


def sum_of_squares(leaves: Sequence[Array]) -> Array:
  """Returns the sum of the squares of all absolute values, at least in float32."""

  def total(groups: Groups, arrays: Sequence[Array]) -> Array:
    sums = jnp.zeros((), jnp.float32)
    for group in groups:
      # What is alone may be divided among devices, and keeps its shape.
      alone = len(group) == 1
      x = arrays[group[0]] if alone else _rows([arrays[i] for i in group])
      size = jnp.abs(x)
      # The square of 256 is more than float16 holds.
      wide = size if size.dtype == jnp.float64 else size.astype(jnp.float32)
      squares = jnp.square(wide)
      sums += jnp.sum(squares if alone else jnp.sum(squares, 1))
    return sums

  return _reduced(leaves, total)


def _reduced(leaves: Sequence[Leaf], fun: Callable[[Groups, Any], Array]) -> Array:
  """Returns `fun` of the leaves: in groups on a GPU, and elsewhere of each by itself."""
  alone = functools.partial(fun, [[i] for i in range(len(leaves))])
  groups = _grouped(leaves, jnp.result_type)
  if len(groups) == len(leaves):
    return alone(leaves)
  return _on_gpu(list(map(jnp.asarray, leaves)), functools.partial(fun, groups), alone)


def _rows(arrays: Sequence[Array]) -> Array:
  """Returns arrays as rows of one array; the last row of each is filled up with zeros."""

  def rows(x: Array) -> Array:
    filled = jax.lax.pad(jnp.ravel(x), jnp.zeros((), x.dtype), [(0, -x.size % _ROW, 0)])
    return filled.reshape(-1, _ROW)

  return jnp.concatenate([rows(x) for x in arrays])


def masks_of(condition: Array, leaves: Sequence[Leaf]) -> list[Array]:
  """Returns `condition` for each leaf: the scalar, or on a GPU a mask that small ones share."""
  # XLA for GPU puts operations of one shape that read the same array into one kernel, but not for
  # the sake of a scalar: AdamW then updates 53 scales of norms in 6 kernels, and otherwise in 53.
  masks = [condition] * len(leaves)
  if not isinstance(condition, Tracer):
    return masks
  arrays = [i for i, x in enumerate(leaves) if jnp.ndim(x) and not _is_symbolic(x)]
  small = [i for i in arrays if 0 < jnp.size(leaves[i]) <= _SMALL]
  groups = [g for g in _grouped([leaves[i] for i in small], jnp.shape, most=None) if len(g) > 1]
  if not groups:
    return masks
  shapes = [jnp.shape(leaves[small[group[0]]]) for group in groups]

  def alone(flag: Array) -> list[Array]:
    return [jnp.broadcast_to(flag, shape) for shape in shapes]

  def stored(flag: Array) -> list[Array]:
    longest = max(map(math.prod, shapes))
    mask = jax.lax.optimization_barrier(jnp.broadcast_to(flag, (longest,)))
    return [mask[: math.prod(shape)].reshape(shape) for shape in shapes]

  for group, mask in zip(groups, _on_gpu(condition, stored, alone), strict=True):
    for i in group:
      masks[small[i]] = mask
  return masks


def read_together(scalars: Mapping[str, Array]) -> dict[str, Array]:
  """Returns the same scalars (bool, int32, float32), on a GPU read from one array."""
  # XLA launches a kernel for each number that is computed from scalars, a copy for each that is
  # overwritten while another still reads it, and one for all that read the same array.
  arrays = list({id(x): x for x in scalars.values()}.values())
  plain = all(isinstance(x, Tracer) and not jnp.ndim(x) for x in arrays)
  # Within a shard_map some may vary from device to device, and in one array all would.
  if not plain or jax.sharding.get_abstract_mesh().manual_axes:
    return dict(scalars)

  def stored(arrays: Sequence[Array]) -> list[Array]:
    row = jax.lax.optimization_barrier(jnp.stack([_through_int32(x, jnp.int32) for x in arrays]))
    return [_through_int32(row[i], x.dtype) for i, x in enumerate(arrays)]

  read = dict(zip(map(id, arrays), _on_gpu(arrays, stored, lambda x: list(x)), strict=True))
  return {name: read[id(x)] for name, x in scalars.items()}


def _through_int32(x: Array, dtype: DTypeLike) -> Array:
  """Returns `x` cast to int32 or back from it, a float32 number by its bits."""
  by_bits = x.dtype == jnp.float32 or dtype == jnp.float32
  return jax.lax.bitcast_convert_type(x, dtype) if by_bits else x.astype(dtype)


def _on_gpu(
  operand: PyTree, together: Callable[..., PyTree], alone: Callable[..., PyTree]
) -> PyTree:
  """Returns `together(operand)` where it is lowered for a GPU, and `alone(operand)` elsewhere."""
  return jax.lax.platform_dependent(operand, cuda=together, rocm=together, default=alone)


def _grouped(
  leaves: Sequence[Leaf], key: Callable[[Leaf], object], most: int | None = _MOST
) -> list[list[int]]:
  """Returns positions of leaves in groups of one key, of at most `most`; some are alone."""
  # Concrete leaves are, since operations on them run one by one, and so are those of symbolic
  # shapes, and those that may be divided among devices: to stack two that are divided differently
  # takes a collective for all of one.
  groups: dict[object, list[int]] = {}
  unknown = any(_divided(x, AxisType.Auto) for x in leaves)
  for i, x in enumerate(leaves):
    alone = unknown or not isinstance(x, Tracer) or _divided(x, AxisType.Explicit)
    groups.setdefault(("alone", i) if alone or _is_symbolic(x) else key(x), []).append(i)
  step = most or max(len(leaves), 1)
  return [
    group[start : start + step] for group in groups.values() for start in range(0, len(group), step)
  ]


def _is_symbolic(x: Leaf) -> bool:
  """Whether a length is a symbol of `jax.export`, which is not compared, nor divided into rows."""
  return not all(isinstance(n, int) for n in jnp.shape(x))


def _divided(x: Leaf, kind: AxisType) -> bool:
  """Whether XLA may divide an array among the devices of a mesh, along axes of this kind."""
  if not isinstance(x, Tracer):
    return False
  sharding = jax.typeof(x).sharding
  axes = zip(sharding.mesh.axis_types, sharding.mesh.axis_sizes, strict=True)
  # Of an automatic axis the type shows that it is there, and not whether the array is divided.
  divided = kind == AxisType.Auto or any(axis is not None for axis in sharding.spec)
  return divided and any(k == kind and n > 1 for k, n in axes)
