"""Leaves of a tree together: a GPU launches a kernel for each that is looked at by itself.

The bits are those of leaf by leaf (a sum but for its order), as other devices compute it: a CPU
has nothing to launch. Which of the two is decided where the function is lowered.
"""

import collections
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from mpjax._core.types import Array, DTypeLike, Leaf, PyTree, is_inexact

_MOST = 32
"""Leaves in one reduction: a fusion of XLA takes at most 96 arrays, all that it reads included."""

_ROW = 1024
"""Elements in a row. Leaves of all sizes are rows of one array, which XLA does not store.

A reduction over rows is one kernel, and one over all of a large leaf two."""

_SMALL = 2**16
"""Elements of a leaf that may share a mask: its kernel takes less time than to launch it."""


def first_nonfinite(leaves: Sequence[Leaf]) -> Array:
  """Returns the position of the first leaf with an inf or a NaN, or `len(leaves)` without any."""
  return least_nonfinite(leaves, range(len(leaves)), len(leaves))


def least_nonfinite(leaves: Sequence[Leaf], numbers: Sequence[int], none: int) -> Array:
  """Returns the least of the numbers of leaves with an inf or a NaN, or `none`, the largest."""
  # One int32 says both whether a leaf is bad and which. Devices agree by a minimum. Integers have
  # no NaN, which a minimum of floats may drop.
  inexact = [i for i, x in enumerate(leaves) if is_inexact(x)]
  largest = np.int32(none)

  def first(group: Sequence[int], arrays: Sequence[Array]) -> Array:
    # `group` has positions in `inexact`, so `own` has the numbers of these leaves.
    own = [numbers[inexact[i]] for i in group]
    if len(arrays) == 1:
      finite = jnp.all(jnp.isfinite(arrays[0]))
      return jnp.where(finite, largest, np.int32(own[0]))
    # One flag per row. `ends` has the first row behind each leaf.
    finite = jnp.all(jnp.isfinite(_rows(arrays)), 1)
    ends = np.cumsum([-(-x.size // _ROW) for x in arrays], dtype=np.int32)
    rows = jnp.where(finite, ends[-1], jnp.arange(ends[-1], dtype=jnp.int32))
    # The first bad row, or the number of rows. The least number of a leaf that ends behind it is
    # that of the bad leaf, since numbers ascend.
    row = jnp.min(rows, initial=ends[-1])
    return jnp.min(jnp.where(row < ends, np.asarray(own, np.int32), largest))

  return _reduced([leaves[i] for i in inexact], first, jnp.minimum, jnp.asarray(largest))


def sum_of_squares(leaves: Sequence[Array]) -> Array:
  """Returns the sum of the squares of all absolute values, at least in float32."""

  def total(group: Sequence[int], arrays: Sequence[Array]) -> Array:
    # A single leaf may be sharded. It keeps its shape, because `ravel` would gather it.
    alone = len(group) == 1
    size = jnp.abs(arrays[0] if alone else _rows(arrays))
    # In float16 the square of 256 is inf.
    wide = size if size.dtype == jnp.float64 else size.astype(jnp.float32)
    squares = jnp.square(wide)
    return jnp.sum(squares if alone else jnp.sum(squares, 1))

  return _reduced(leaves, total, jnp.add, jnp.zeros((), jnp.float32))


def _reduced(
  leaves: Sequence[Leaf],
  fun: Callable[[Sequence[int], Sequence[Array]], Array],
  combine: Callable[[Array, Array], Array],
  initial: Array,
) -> Array:
  """Combines `fun` of groups, their positions and leaves: on a GPU of many, elsewhere of one."""
  joins, groups = _joins(leaves), collections.defaultdict[object, list[int]](list)
  for i, x in enumerate(leaves):
    # Leaves of one dtype can be rows of one array. A leaf that must stay alone has a key of its
    # own.
    groups[jnp.result_type(x) if joins[i] else ("alone", i)].append(i)
  together = [g[k : k + _MOST] for g in groups.values() for k in range(0, len(g), _MOST)]

  def over(groups: Sequence[Sequence[int]], leaves: Sequence[Leaf]) -> Array:
    results = (fun(group, [leaves[i] for i in group]) for group in groups)
    return functools.reduce(combine, results, initial)

  alone = functools.partial(over, [[i] for i in range(len(leaves))])
  # No two leaves share a group, so both variants are the same.
  if len(together) == len(leaves):
    return alone(leaves)
  return _on_gpu(list(map(jnp.asarray, leaves)), functools.partial(over, together), alone)


def _rows(arrays: Sequence[Array]) -> Array:
  """Returns arrays as rows of one array; the last row of each is filled up with zeros."""

  def rows(x: Array) -> Array:
    filled = jax.lax.pad(jnp.ravel(x), jnp.zeros((), x.dtype), [(0, -x.size % _ROW, 0)])
    return filled.reshape(-1, _ROW)

  return jnp.concatenate([rows(x) for x in arrays])


def masks_of(condition: Array, leaves: Sequence[Leaf]) -> list[Array]:
  """Returns `condition` for each leaf: the scalar, or on a GPU a part of a mask in memory."""
  # XLA for GPU fuses operations of one shape that read the same array, but not if they share only a
  # scalar. A mask in memory is such an array: AdamW updates 53 scales of norms in 6 kernels instead
  # of 53.
  sizes = [
    math.prod(x.shape) if joins else 0 for x, joins in zip(leaves, _joins(leaves), strict=True)
  ]
  small = {i: leaves[i].shape for i, n in enumerate(sizes) if 0 < n <= _SMALL and leaves[i].ndim}
  # A mask pays off only if several leaves have its shape.
  counts = collections.Counter(small.values())
  shapes = [shape for shape, count in counts.items() if count > 1]
  if not shapes or not isinstance(condition, Tracer):
    return [condition] * len(leaves)
  # One mask in memory, as long as the largest leaf. Each shape reads its beginning. The barrier
  # keeps XLA from computing it anew in each kernel.
  row = jnp.broadcast_to(condition, (max(map(math.prod, shapes)),))
  mask = _on_gpu(row, jax.lax.optimization_barrier, lambda row: row)
  masks = {shape: mask[: math.prod(shape)].reshape(shape) for shape in shapes}
  return [masks.get(small.get(i), condition) for i in range(len(leaves))]


def read_together(arrays: Sequence[Array]) -> list[Array]:
  """Returns the same scalars (bool, int32, float32), on a GPU read from one array."""
  # XLA for GPU launches a kernel for each number that is computed from scalars. It also copies each
  # scalar that is overwritten while another kernel reads it. One array of all needs one kernel.
  plain = all(isinstance(x, Tracer) and not jnp.ndim(x) for x in arrays)
  # Inside a `shard_map` some scalars may vary between devices. In one array, all would.
  if not plain or jax.sharding.get_abstract_mesh().manual_axes:
    return list(arrays)

  def through_int32(x: Array, dtype: DTypeLike) -> Array:
    # int32 holds float32 by its bits, and a bool as 0 or 1.
    by_bits = x.dtype == jnp.float32 or dtype == jnp.float32
    return jax.lax.bitcast_convert_type(x, dtype) if by_bits else x.astype(dtype)

  def stored(arrays: Sequence[Array]) -> list[Array]:
    row = jax.lax.optimization_barrier(jnp.stack([through_int32(x, jnp.int32) for x in arrays]))
    return [through_int32(row[i], x.dtype) for i, x in enumerate(arrays)]

  return _on_gpu(arrays, stored, list)


def _on_gpu(
  operand: PyTree, together: Callable[..., PyTree], alone: Callable[..., PyTree]
) -> PyTree:
  """Returns `together(operand)` where it is lowered for a GPU, and `alone(operand)` elsewhere."""
  return jax.lax.platform_dependent(operand, cuda=together, rocm=together, default=alone)


def _joins(leaves: Sequence[Leaf]) -> list[bool]:
  """Returns which leaves may be read together with others.

  Sharded leaves may not, since they would be gathered. Neither may concrete arrays, on which
  operations run one by one, nor arrays with a symbolic length of `jax.export`, which cannot be
  divided into rows.
  """
  joins = [False] * len(leaves)
  for i, x in enumerate(leaves):
    if isinstance(x, Tracer):
      sharding = jax.typeof(x).sharding
      axes = zip(sharding.mesh.axis_types, sharding.mesh.axis_sizes, strict=True)
      kinds = {kind for kind, n in axes if n > 1}
      # With an automatic axis, types do not tell whether an array is sharded. Stacking arrays of
      # different shardings takes a collective for all of one.
      if AxisType.Auto in kinds:
        return [False] * len(leaves)
      # Types name only explicit axes. JAX refuses to reshape along one, even if its size is 1.
      divided = any(axis is not None for axis in sharding.spec)
      joins[i] = not divided and all(isinstance(n, int) for n in x.shape)
  return joins
