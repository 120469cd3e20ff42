"""What an audit finds that costs time or memory: shapes, kernels, collectives, residuals."""

import collections
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._core.dtypes import is_float8, is_low_precision
from mpjax._jaxprs.count import matmul_sizes
from mpjax._jaxprs.graph import Graph, Value
from mpjax._jaxprs.locations import Source
from mpjax._jaxprs.primitive_facts import Holds

_INSTRUCTION = re.compile(
  r"= \(?(?P<dtype>[a-z]\w*)\[[\d,]*\]\S*(?: [^=]*?)?\)? (?P<op>[a-z][\w-]*)\("
)
_TARGET = re.compile(r'custom_call_target="(?P<target>[^"]+)"')
_SHOWN = frozenset({"dot", "convolution", "convert", "custom-call"})


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
  flops: collections.Counter[Misfit] = collections.Counter()
  for operation, dtype, count in graph.matmuls():
    unit = 16 if is_float8(dtype) else 8
    m, n, k = sizes = matmul_sizes(operation.eqn)
    padded = (-(-m // unit) * unit, -(-n // unit) * unit, -(-k // unit) * unit)
    if count and is_low_precision(dtype) and padded != sizes:
      flops[Misfit(operation.where.module, sizes, padded, operation.where.source, 0)] += count
  return tuple(fit._replace(flops=count) for fit, count in flops.most_common())


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


class OpaqueKernel(NamedTuple):
  """A kernel written by hand: what it computes is in no count."""

  path: str  # of the module or named scope, and of the kernel
  name: str  # of the primitive
  dtypes: tuple[str, ...]  # of its floating operands, that of the most elements first
  times: int


def find_collectives(graph: Graph) -> tuple[Collective, ...]:
  """Returns the collectives of a graph by operation and dtype, those of the most bytes first."""
  sums: dict[tuple[str, str], Collective] = {}
  for operation in graph.computing():
    times = operation.times
    for v in operation.operands if operation.facts.collective else ():
      key = operation.name, str(v.dtype)
      _, _, nbytes, before = sums.get(key, Collective(*key, 0, 0))
      sums[key] = Collective(*key, nbytes + v.nbytes * times, before + times)
  return tuple(sorted(sums.values(), key=lambda each: -each.nbytes))


def find_opaque(graph: Graph) -> tuple[OpaqueKernel, ...]:
  """Returns the kernels that the graph does not enter, in the order they run."""
  counts: collections.Counter[OpaqueKernel] = collections.Counter()
  for each in graph.computing():
    if each.facts.holds is Holds.KERNEL:
      kernel = OpaqueKernel(each.where.module, each.name, dtypes_of(each.operands), 0)
      counts[kernel] += each.times
  return tuple(kernel._replace(times=n) for kernel, n in counts.items())


def residuals(graph: Graph) -> dict[str, int]:
  """Returns the bytes that the forward pass computes and the backward pass takes, by dtype."""
  nbytes: collections.Counter[str] = collections.Counter()
  for operation in graph.operations:
    for v in operation.results if operation.where.direction == "forward" else ():
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


class Kernel(NamedTuple):
  """Instructions of a compiled function that are alike.

  Args:
    name: of the operation, or of the library's kernel, such as "__cublas$lt$matmul$f8".
    dtype: of its result.
    times: how many there are.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
  >>> compiled = jax.jit(jnp.matmul).lower(x, x).compile()
  >>> kernels = mpjax.audit(jnp.matmul, compiled=compiled)(x, x).kernels
  >>> len(kernels) > 0
  True
  """

  name: str
  dtype: str
  times: int


def kernels(text: str) -> tuple[Kernel, ...]:
  """Returns the matmuls, convolutions, casts and library calls in HLO; those in fusions count."""
  counts: collections.Counter[tuple[str, str]] = collections.Counter()
  for line in text.splitlines():
    match = _INSTRUCTION.search(line)
    if match is not None and match["op"] in _SHOWN:
      target = _TARGET.search(line)
      counts[match["op"] if target is None else target["target"], match["dtype"]] += 1
  return tuple(Kernel(*key, n) for key, n in counts.most_common())
