"""What matmuls cost: their floating-point operations and sizes."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn

from mpjax._jaxpr.primitives import EqnParams, facts_of
from mpjax._jaxpr.reader import aval_of


def flops_of(eqn: JaxprEqn) -> int | None:
  """Returns the floating-point operations of a matmul or convolution; None for all else.

  A multiplication and an addition count as two. Where a convolution meets padding or a hole of
  dilation nothing is counted, as XLA's own cost analysis does it.
  """
  formula = facts_of(eqn).flops
  if formula is None:
    return None
  lhs, rhs, result = map(aval_of, (*eqn.invars[:2], eqn.outvars[0]))
  if formula != "convolution":
    # Every element of `lhs` meets one of `rhs` for each index that is `rhs`'s own. Each row meets
    # the matrix of its own group alone: the number of groups does not count.
    return 2 * lhs.size * matmul_sizes(eqn)[1]
  params, numbers = eqn.params, eqn.params["dimension_numbers"]
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


class DotAxes(NamedTuple):
  """The axes of a `dot_general` or `ragged_dot_general`, of each operand.

  `ragged` is that of the rows of the left one that are in groups, and `groups` that of the right
  one which has an entry for each group.
  """

  contracted: tuple[Sequence[int], Sequence[int]]
  batch: tuple[Sequence[int], Sequence[int]]
  groups: Sequence[int] = ()
  ragged: int | None = None

  def own(self, side: int, operand: Any) -> list[int]:
    """Returns the axes that an operand has alone: its rows, or columns."""
    shared = {*self.contracted[side], *self.batch[side], *(self.groups if side else ())}
    return [axis for axis in range(operand.ndim) if axis not in shared]

  def of_result(self, *operands: Any) -> list[dict[Any, int]]:
    """Returns which axis of the result each axis of both operands is; contracted ones are none."""
    first = int(self.ragged in self.contracted[0])  # Each group is a sum of its own.
    places: list[dict[Any, int]] = []
    free = itertools.count(first + len(self.batch[0]))
    for side, operand in enumerate(operands):
      places.append({axis: first + i for i, axis in enumerate(self.batch[side])})
      places[side] |= {axis: next(free) for axis in self.own(side, operand)}
    for axis in self.groups:
      places[1][axis] = places[0][self.ragged]
    return places


def dot_axes(params: EqnParams) -> DotAxes:
  """Returns the axes of a `dot_general` or `ragged_dot_general`."""
  ragged = params.get("ragged_dot_dimension_numbers")
  if ragged is None:
    return DotAxes(*params["dimension_numbers"])
  contracted, batch = ragged.dot_dimension_numbers
  return DotAxes(contracted, batch, ragged.rhs_group_dimensions, ragged.lhs_ragged_dimensions[0])


def matmul_sizes(eqn: JaxprEqn) -> tuple[int, int, int]:
  """Returns M, N and K of a matmul or convolution: rows, columns and the length of the sum.

  Of a batched matmul they are those of one matrix; a convolution is the matmul that Tensor Cores
  run for it: positions times output features, summed over taps and input features.
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
