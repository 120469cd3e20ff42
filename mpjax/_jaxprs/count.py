"""What matmuls cost: their floating-point operations and sizes, and the share in low precision."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from mpjax._core.dtypes import is_low_precision
from mpjax._jaxprs.primitives import EqnParams, facts_of
from mpjax._jaxprs.reader import Program, aval_of, walk, warn_not_entered


def half_share(program: Program) -> float:
  """Returns the share of the matmuls' operations in low precision: 0 to 1, NaN of none at all.

  One is in low precision if both operands are. Matmuls of integers are no floating-point
  operations, and count for neither side.
  """
  half = total = 0
  for visit in walk(program):
    if not visit.entered:
      warn_not_entered(visit.eqn, "counting operations", "What it runs is not counted.")
    flops = flops_of(visit.eqn)
    if flops is not None:
      dtypes = [aval_of(v).dtype for v in visit.eqn.invars[:2]]
      inexact = any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
      total += flops * visit.times * inexact
      half += flops * visit.times * all(map(is_low_precision, dtypes))
  return half / total if total else math.nan


def flops_of(eqn: JaxprEqn) -> int | None:
  """Returns the floating-point operations of a matmul or convolution; None for all else.

  A multiplication and an addition count as two. Where a convolution meets padding or a hole of
  dilation nothing is counted, as XLA's own cost analysis does it.
  """
  formula = facts_of(eqn).flops
  if formula is None:
    return None
  lhs, rhs = map(aval_of, eqn.invars[:2])
  return _FLOPS[formula](lhs, rhs, aval_of(eqn.outvars[0]), eqn.params)


def _dot_flops(lhs: ShapedArray, rhs: ShapedArray, _: ShapedArray, params: EqnParams) -> int:
  # Every element of `lhs` meets one of `rhs` for each index that is `rhs`'s own. Of a `ragged_dot`
  # each row meets the matrix of its own group alone: the number of groups does not count.
  ((_, contracting), (_, batch)), groups = _numbers(params)
  shared = {*contracting, *batch, *groups}
  own = (size for axis, size in enumerate(rhs.shape) if axis not in shared)
  return 2 * math.prod(lhs.shape) * math.prod(own)


def _numbers(params: EqnParams) -> tuple[Any, Sequence[int]]:
  """Returns the dimension numbers of a matmul, and the axes of the groups of a ragged one."""
  ragged = params.get("ragged_dot_dimension_numbers")
  if ragged is None:
    return params["dimension_numbers"], ()
  return ragged.dot_dimension_numbers, ragged.rhs_group_dimensions


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


_FLOPS = {"convolution": _conv_flops, "dot": _dot_flops, "ragged_dot": _dot_flops}


def matmul_sizes(eqn: JaxprEqn) -> tuple[int, int, int]:
  """Returns M, N and K of a matmul or convolution: rows, columns and the length of the sum.

  Of a batched matmul they are those of one matrix; a convolution is the matmul that Tensor Cores
  run for it: positions times output features, summed over taps and input features.
  """
  lhs, rhs, result = (aval_of(v).shape for v in (*eqn.invars[:2], eqn.outvars[0]))
  if facts_of(eqn).flops == "convolution":
    numbers = eqn.params["dimension_numbers"]
    out_features, in_features, *kernel = (rhs[axis] for axis in numbers.rhs_spec)
    rows = math.prod(result) // max(result[numbers.out_spec[1]], 1)
    return rows, out_features, in_features * math.prod(kernel)
  ((contracting, others), (batch, other_batch)), _ = _numbers(eqn.params)
  depth = math.prod(lhs[axis] for axis in contracting)
  rows = math.prod(n for axis, n in enumerate(lhs) if axis not in {*contracting, *batch})
  columns = math.prod(n for axis, n in enumerate(rhs) if axis not in {*others, *other_batch})
  return rows, columns, depth
