"""Counting what a jaxpr does: operations, FLOPs of matmuls, bytes saved for the backward pass."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal

from mpjax._core.dtypes import is_low_precision
from mpjax._core.types import Function, Leaf, PyTree
from mpjax._jaxprs.atoms import aval_of
from mpjax._jaxprs.inner_jaxprs import Program, warn_not_entered
from mpjax._jaxprs.primitive_facts import EqnParams
from mpjax._jaxprs.primitives import HIGHER_ORDER, facts_of
from mpjax._jaxprs.walk import Visit, walk


def _counted(program: Program) -> Iterator[Visit]:
  """Walks a jaxpr, and warns of what is not in the count."""
  for visit in walk(program):
    if not visit.entered:
      warn_not_entered(visit.eqn, "counting operations", "What it runs is not counted.")
    yield visit


def count_operations(program: Program) -> collections.Counter[str]:
  """Returns how often each first-order primitive is written in a jaxpr, loops counted once."""
  names = (visit.eqn.primitive.name for visit in _counted(program))
  return collections.Counter(name for name in names if name not in HIGHER_ORDER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
  """A matmul or a convolution.

  Fields:
    primitive: its name.
    operands: the abstract values of the two operands, with shape and dtype.
    result: the abstract value of what it computes.
    flops: floating-point operations of one execution.
    times: how often the jaxpr runs it.
    certain: whether `times` is known, as for `Visit`.
  """

  primitive: str
  operands: tuple[ShapedArray, ShapedArray]
  result: ShapedArray
  flops: int
  times: int
  certain: bool

  @property
  def is_low_precision(self) -> bool:
    """Whether both operands are narrower than float32."""
    return all(is_low_precision(x.dtype) for x in self.operands)


def products(program: Program) -> tuple[Product, ...]:
  """Returns every matmul and convolution in a jaxpr, in the order of the jaxpr.

  A multiplication and an addition count as two operations. Where a convolution meets padding or a
  hole of dilation nothing is counted, as XLA's own cost analysis does it.

  Args:
    program: a jaxpr, closed or not.
  """
  found = []
  for eqn, times, certain, _ in _counted(program):
    flops = flops_of(eqn)
    if flops is None:
      continue
    lhs, rhs = map(aval_of, eqn.invars[:2])
    product = Product(
      primitive=eqn.primitive.name,
      operands=(lhs, rhs),
      result=aval_of(eqn.outvars[0]),
      flops=flops,
      times=times,
      certain=certain,
    )
    found.append(product)
  return tuple(found)


def flops_of(eqn: JaxprEqn) -> int | None:
  """Returns the floating-point operations of a matmul or convolution; None for all else.

  A multiplication and an addition count as two.
  """
  formula = facts_of(eqn).flops
  if formula is None:
    return None
  lhs, rhs = map(aval_of, eqn.invars[:2])
  return _FLOPS[formula](lhs, rhs, aval_of(eqn.outvars[0]), eqn.params)


def half_share(found: Iterable[Product]) -> float:
  """Returns the share of the matmuls' operations in low precision: 0 to 1, NaN of none at all.

  Matmuls of integers are no floating-point operations, and count for neither side.
  """
  half = total = 0
  for product in found:
    inexact = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in product.operands)
    flops = product.flops * product.times if inexact else 0
    total += flops
    half += flops if product.is_low_precision else 0
  return half / total if total else math.nan


def _dot_flops(lhs: ShapedArray, rhs: ShapedArray, result: ShapedArray, params: EqnParams) -> int:
  del result
  (_, contracting), (_, batch) = params["dimension_numbers"]
  return _dot(lhs, rhs, {*contracting, *batch})


def _ragged_dot_flops(
  lhs: ShapedArray, rhs: ShapedArray, result: ShapedArray, params: EqnParams
) -> int:
  # Each row meets the matrix of its own group alone: the number of groups does not count.
  del result
  numbers = params["ragged_dot_dimension_numbers"]
  (_, contracting), (_, batch) = numbers.dot_dimension_numbers
  return _dot(lhs, rhs, {*contracting, *batch, *numbers.rhs_group_dimensions})


def _dot(lhs: ShapedArray, rhs: ShapedArray, shared: set[int]) -> int:
  """Every element of `lhs` meets one of `rhs` for each index that is `rhs`'s own."""
  own = (size for axis, size in enumerate(rhs.shape) if axis not in shared)
  return 2 * math.prod(lhs.shape) * math.prod(own)


def _conv_flops(lhs: ShapedArray, rhs: ShapedArray, result: ShapedArray, params: EqnParams) -> int:
  numbers = params["dimension_numbers"]
  out_batch, out_features, *out_space = (result.shape[axis] for axis in numbers.out_spec)
  _, in_features, *kernel = (rhs.shape[axis] for axis in numbers.rhs_spec)
  _, _, *space = (lhs.shape[axis] for axis in numbers.lhs_spec)
  meetings = 1
  for axis, (size, taps, positions) in enumerate(zip(space, kernel, out_space, strict=True)):
    hole = params["lhs_dilation"][axis]
    reached = (
      np.arange(positions)[:, None] * params["window_strides"][axis]
      + np.arange(taps)[None, :] * params["rhs_dilation"][axis]
      - params["padding"][axis][0]
    )
    inside = (reached >= 0) & (reached <= (size - 1) * hole) & (reached % hole == 0)
    meetings *= int(inside.sum())
  # The features of one group, and of batch groups only one, are already what the kernel's shape
  # and the result's say.
  return 2 * out_batch * out_features * in_features * meetings


_FLOPS = {"convolution": _conv_flops, "dot": _dot_flops, "ragged_dot": _ragged_dot_flops}


def residual_bytes(fun: Function, *args: PyTree) -> int:
  """Returns how many bytes a function keeps from its forward pass for its backward pass.

  These are the arrays that `jax.vjp` saves, as `jax.ad_checkpoint.print_saved_residuals` lists
  them, without the arguments and closed-over constants, which exist anyway. A compiler may keep
  fewer, by computing them again, but it starts from these.

  Args:
    fun: a function of floating arrays.
    *args: arrays, or `jax.ShapeDtypeStruct` for them: nothing is computed.
  """

  def saved(*args: PyTree) -> list[Leaf]:
    return jax.tree.leaves(jax.vjp(fun, *args)[1])

  jaxpr = jax.make_jaxpr(saved)(*args).jaxpr
  saved_once = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
  kept = (v.aval for v in saved_once - {*jaxpr.invars, *jaxpr.constvars})
  return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept)


def matmul_sizes(eqn: JaxprEqn) -> tuple[int, int, int]:
  """Returns M, N and K of a matmul or convolution: rows, columns and the length of the sum.

  Of a batched matmul they are those of one matrix; a convolution is the matmul that Tensor Cores
  run for it: positions times output features, summed over taps and input features.
  """
  lhs, rhs, result = (aval_of(v).shape for v in (*eqn.invars[:2], eqn.outvars[0]))
  numbers = eqn.params.get("dimension_numbers")
  if facts_of(eqn).flops == "convolution" and numbers is not None:
    out_features, in_features, *kernel = (rhs[axis] for axis in numbers.rhs_spec)
    rows = math.prod(result) // max(result[numbers.out_spec[1]], 1)
    return rows, out_features, in_features * math.prod(kernel)
  if numbers is None:
    numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
  (contracting, others), (batch, other_batch) = numbers
  depth = math.prod(lhs[axis] for axis in contracting)
  rows = math.prod(n for axis, n in enumerate(lhs) if axis not in {*contracting, *batch})
  columns = math.prod(n for axis, n in enumerate(rhs) if axis not in {*others, *other_batch})
  return rows, columns, depth
