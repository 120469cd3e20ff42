"""What an audit finds that costs time or memory: shapes, collectives, casts, residuals."""

import collections
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from mpjax._core.dtypes import is_float8
from mpjax._diagnostics.audit.causes import is_low, is_wide
from mpjax._diagnostics.audit.graph import Graph, Value
from mpjax._diagnostics.audit.leaks import module_path
from mpjax._jaxprs.autocast.scopes import FLOAT8
from mpjax._jaxprs.count import matmul_sizes
from mpjax._jaxprs.locations import Source
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import facts_of


class Misfit(NamedTuple):
  """A low-precision matmul whose sizes Tensor Cores have to pad.

  Args:
    path: of the module or named scope.
    sizes: rows, columns and the length of the sum: M, N and K.
    padded: the same as multiples of 8, or of 16 for float8.
    source: the line; None if unknown.
    flops: floating-point operations of all such matmuls there.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> half = jax.ShapeDtypeStruct((8, 10), "bfloat16"), jax.ShapeDtypeStruct((10, 16), "bfloat16")
  >>> fit, = mpjax.audit(jnp.matmul)(*half).misfits
  >>> fit.sizes, fit.padded
  ((8, 16, 10), (8, 16, 16))
  """

  path: str
  sizes: tuple[int, int, int]
  padded: tuple[int, int, int]
  source: Source | None
  flops: int


def find_misfits(graph: Graph) -> tuple[Misfit, ...]:
  """Returns the low-precision matmuls whose sizes do not fit Tensor Cores, the costliest first."""
  found: collections.Counter[Misfit] = collections.Counter()
  for operation in graph.computing():
    if not operation.flops or not all(is_low(v) for v in operation.operands[:2]):
      continue
    dtype = operation.operands[0].dtype
    unit = 16 if dtype is not None and is_float8(dtype) else 8
    m, n, k = matmul_sizes(operation.eqn)
    padded = (-(-m // unit) * unit, -(-n // unit) * unit, -(-k // unit) * unit)
    if padded != (m, n, k):
      where = operation.where
      fit = Misfit(module_path(where), (m, n, k), padded, where.source, 0)
      found[fit] += operation.flops
  return tuple(fit._replace(flops=flops) for fit, flops in found.most_common())


class Collective(NamedTuple):
  """What devices send to one another.

  Fields:
    operation: the name of the primitive.
    dtype: that of what is sent.
    nbytes: how much each device contributes, in all.
    times: how often.
  """

  operation: str
  dtype: str
  nbytes: int
  times: int


def find_collectives(graph: Graph) -> tuple[Collective, ...]:
  """Returns the collectives of a graph by operation and dtype."""
  nbytes: collections.Counter[tuple[str, str]] = collections.Counter()
  counts: collections.Counter[tuple[str, str]] = collections.Counter()
  for operation in graph.computing():
    if facts_of(operation.eqn).collective:
      for v in operation.operands:
        key = operation.name, str(v.dtype)
        nbytes[key] += v.nbytes * operation.times
        counts[key] += operation.times
  return tuple(Collective(*key, n, counts[key]) for key, n in nbytes.most_common())


class OpaqueKernel(NamedTuple):
  """A kernel written by hand: what it computes is in no count.

  Fields:
    path: of the module or named scope, and of the kernel.
    name: of the primitive.
    dtypes: of its floating operands, that of the most elements first.
    times: how often it runs.
  """

  path: str
  name: str
  dtypes: tuple[str, ...]
  times: int


def find_opaque(graph: Graph) -> tuple[OpaqueKernel, ...]:
  """Returns the kernels that the graph does not enter, in the order they run."""
  counts: collections.Counter[OpaqueKernel] = collections.Counter()
  for operation in graph.computing():
    if facts_of(operation.eqn).holds is Holds.KERNEL:
      path, dtypes = module_path(operation.where), dtypes_of(operation.operands)
      counts[OpaqueKernel(path, operation.name, dtypes, 0)] += operation.times
  return tuple(each._replace(times=n) for each, n in counts.items())


class RoundTrips(NamedTuple):
  """Casts of a value from low precision to float32 that are undone at once.

  The other way a value is rounded, as at the end of a layer.

  Fields:
    operations: how many of them run.
    nbytes: of the arrays that were cast for nothing.
  """

  operations: int
  nbytes: int


def find_round_trips(graph: Graph) -> RoundTrips:
  """Returns the casts that undo one another and serve nothing else."""
  operations = nbytes = 0
  for operation in graph.computing():
    if operation.eqn.primitive is not convert_element_type_p:
      continue
    value = operation.operands[0]
    before = value.made_by
    if before is None or before.eqn.primitive is not convert_element_type_p:
      continue
    # A matmul in float8 scales in float32 what is rounded to low precision before and after it.
    if any(FLOAT8 in each.where.scopes for each in (before, operation)):
      continue
    if len(value.consumers) != 1 or not before.operands:
      continue
    first, last = before.operands[0], operation.results[0]
    if is_low(first) and is_wide(value) and first.dtype == last.dtype:
      operations += operation.times
      nbytes += value.nbytes * operation.times
  return RoundTrips(operations, nbytes)


def residuals(graph: Graph) -> dict[str, int]:
  """Returns the bytes that the forward pass keeps for the backward pass, by dtype.

  These are what the forward pass computes and the backward pass takes; arguments and constants
  exist anyway. A compiler may keep fewer, by computing them again.
  """
  nbytes: collections.Counter[str] = collections.Counter()
  for operation in graph.operations:
    if operation.where.direction != "forward":
      continue
    for v in operation.results:
      if any(each.where.direction != "forward" for each in v.consumers):
        nbytes[str(v.dtype)] += v.nbytes * operation.times
  return dict(nbytes.most_common())


def dtypes_of(values: Iterable[Value]) -> tuple[str, ...]:
  """Returns the floating dtypes of values, that of the most elements first."""
  sizes: collections.Counter[str] = collections.Counter()
  for v in values:
    if v.dtype is not None and jnp.issubdtype(v.dtype, jnp.inexact):
      sizes[np.dtype(v.dtype).name] += v.size
  return tuple(name for name, _ in sizes.most_common())
