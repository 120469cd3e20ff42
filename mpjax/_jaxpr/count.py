"""The floating-point operations and the sizes of matmuls."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.export import is_symbolic_dim
from jax.extend.core import JaxprEqn

from mpjax._jaxpr.primitives import EqnParams, facts_of
from mpjax._jaxpr.reader import aval_of


def flops_of(eqn: JaxprEqn) -> int | None:
  """Returns the floating-point operations of a matmul or convolution; None for other operations.

  A multiplication and an addition count as two. Products of a convolution with padding or with a
  hole of dilation do not count. XLA's cost analysis counts in the same way.
  """
  formula = facts_of(eqn).flops
  if formula is None:
    return None
  lhs, rhs, result = map(aval_of, (*eqn.invars[:2], eqn.outvars[0]))
  if formula != "convolution":
    # Each element of `lhs` is multiplied once for each column of `rhs`. A row meets only the matrix
    # of its own group, so the number of groups does not count.
    return 2 * lhs.size * matmul_sizes(eqn)[1]
  params, numbers = eqn.params, eqn.params["dimension_numbers"]
  out_batch, out_features, *out_space = (result.shape[axis] for axis in numbers.out_spec)
  _, in_features, *kernel = (rhs.shape[axis] for axis in numbers.rhs_spec)
  _, _, *space = (lhs.shape[axis] for axis in numbers.lhs_spec)
  # Along each spatial axis, count the pairs of an output position and a kernel tap that meet an
  # element of the input. The axes are independent, so their counts are multiplied.
  meetings = 1
  for axis, (size, taps, positions) in enumerate(zip(space, kernel, out_space, strict=True)):
    hole = params["lhs_dilation"][axis]
    # The place in the padded and dilated input that each pair (position, tap) reads.
    reached = (
      np.arange(positions)[:, None] * params["window_strides"][axis]
      + np.arange(taps)[None, :] * params["rhs_dilation"][axis]
      - params["padding"][axis][0]
    )
    # Before 0 and after the last element is padding. Between two elements are `hole - 1` zeros.
    inside = (reached >= 0) & (reached <= (size - 1) * hole) & (reached % hole == 0)
    meetings *= int(inside.sum())
  # With feature groups, the kernel's shape has the input features of one group. With batch groups,
  # the result's shape has the batch of one group. So groups need no factor.
  return 2 * out_batch * out_features * in_features * meetings


class DotAxes(NamedTuple):
  """The axes of a `dot_general` or `ragged_dot_general`."""

  contracted: tuple[Sequence[int], Sequence[int]]  # of the left and the right operand
  batch: tuple[Sequence[int], Sequence[int]]  # likewise
  groups: Sequence[int] = ()  # of the right operand: the axis with a matrix for each group
  ragged: int | None = None  # of the left operand: the axis whose rows are in groups

  def own(self, side: int, operand: Any) -> list[int]:
    """Returns the axes that only one operand has: rows on the left side, columns on the right."""
    shared = {*self.contracted[side], *self.batch[side], *(self.groups if side else ())}
    return [axis for axis in range(operand.ndim) if axis not in shared]

  def of_result(self, *operands: Any) -> list[dict[Any, int]]:
    """Returns for both operands the axis of the result that each axis becomes.

    Contracted axes are left out.
    """
    # If the rows in groups are contracted, each group has a sum of its own. The result then begins
    # with an axis for the groups.
    first = int(self.ragged in self.contracted[0])
    result_axes: list[dict[Any, int]] = []
    # After the batch come the rows of the left operand, then the columns of the right one.
    free = itertools.count(first + len(self.batch[0]))
    for side, operand in enumerate(operands):
      result_axes.append({axis: first + i for i, axis in enumerate(self.batch[side])})
      result_axes[side] |= {axis: next(free) for axis in self.own(side, operand)}
    # The matrix of a group belongs to the rows of that group.
    for axis in self.groups:
      result_axes[1][axis] = result_axes[0][self.ragged]
    return result_axes


def dot_axes(params: EqnParams) -> DotAxes:
  """Returns the axes of a `dot_general` or `ragged_dot_general`."""
  ragged = params.get("ragged_dot_dimension_numbers")
  if ragged is None:
    return DotAxes(*params["dimension_numbers"])
  contracted, batch = ragged.dot_dimension_numbers
  return DotAxes(contracted, batch, ragged.rhs_group_dimensions, ragged.lhs_ragged_dimensions[0])


def matmul_sizes(eqn: JaxprEqn) -> tuple[int, int, int]:
  """Returns M, N and K of a matmul or convolution: rows, columns and the length of the sum.

  For a batched matmul they are the sizes of one matrix. For a convolution they are the sizes of the
  matmul that Tensor Cores run: positions times output features, summed over taps and input
  features.
  """
  lhs, rhs, result = map(aval_of, (*eqn.invars[:2], eqn.outvars[0]))
  if facts_of(eqn).flops == "convolution":
    numbers = eqn.params["dimension_numbers"]
    out_features, in_features, *kernel = (rhs.shape[axis] for axis in numbers.rhs_spec)
    rows = result.size // max(result.shape[numbers.out_spec[1]], 1)
    return rows, out_features, in_features * math.prod(kernel)
  axes = dot_axes(eqn.params)
  each = (lhs, axes.own(0, lhs)), (rhs, axes.own(1, rhs)), (lhs, axes.contracted[0])
  rows, columns, depth = (math.prod(x.shape[axis] for axis in some) for x, some in each)
  return rows, columns, depth


FEWEST_PRODUCTS = 8
"""The fewest products that a low-precision matmul of an input or of small matrices sums.

Matmuls of coordinates, angles, cameras and rotations sum fewer. Rounding harms them, and Tensor
Cores would gain nothing.
"""


def sums_few_products(eqn: JaxprEqn) -> bool:
  """Whether each element of a matmul is a sum of few products; false for convolutions."""
  return facts_of(eqn).flops == "dot" and _is_short(matmul_sizes(eqn)[2])


def is_small_matmul(eqn: JaxprEqn) -> bool:
  """Whether a matmul sums few products and has few rows or columns, as a matmul of rotations does.

  A single row or column does not count, because the matmul is then a weighted sum of vectors, as
  over experts.
  """
  return sums_few_products(eqn) and any(n != 1 and _is_short(n) for n in matmul_sizes(eqn)[:2])


def _is_short(size: Any) -> bool:
  """Whether an axis is short. The symbolic size of an exported function may be large."""
  return not is_symbolic_dim(size) and size < FEWEST_PRODUCTS
