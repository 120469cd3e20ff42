"""FLOPs of matmuls and convolutions against XLA's own analysis."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax._jaxprs.count import flops_of, matmul_sizes
from mpjax._jaxprs.reader import walk
from tests.programs import s

F32 = jnp.float32


def flops(fun, *args) -> list[int]:
  """Those of each matmul and convolution."""
  found = (flops_of(eqn) for eqn in walk(jax.make_jaxpr(fun)(*args)))
  return [n for n in found if n is not None]


def xla_flops(fun, *args) -> float:
  """What XLA's own cost analysis counts, for functions of one operation."""
  analysis = jax.jit(fun).lower(*args).cost_analysis()
  assert analysis is not None
  return analysis["flops"]


CONVOLUTIONS = {
  "valid": ((2, 3, 9), (5, 3, 4), [1], "VALID", {}),
  "same": ((2, 3, 9), (5, 3, 4), [1], "SAME", {}),
  "strides": ((2, 3, 9, 8), (5, 3, 3, 2), [2, 3], "SAME", {}),
  "negative padding": ((1, 1, 9), (1, 1, 3), [1], [(-2, 3)], {}),
  "holes in the input": (
    *((1, 3, 8, 8), (5, 3, 3, 3), [2, 2], [(1, 1), (1, 2)], {"lhs_dilation": (2, 1)}),
  ),
  "holes in the kernel": ((1, 3, 9, 9), (5, 3, 3, 3), [1, 1], "SAME", {"rhs_dilation": (2, 3)}),
  "feature groups": ((2, 6, 5), (4, 3, 3), [1], "SAME", {"feature_group_count": 2}),
  "depthwise": ((2, 6, 5), (6, 1, 3), [1], "SAME", {"feature_group_count": 6}),
  "batch groups": ((4, 3, 5), (6, 3, 3), [1], "SAME", {"batch_group_count": 2}),
  "other layout": (
    *((2, 9, 8, 3), (3, 2, 3, 5), [1, 1], "SAME"),
    {"dimension_numbers": ("NHWC", "HWIO", "NHWC")},
  ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_flops_of_convolutions_are_those_of_xla(name):
  lhs, rhs, strides, padding, how = CONVOLUTIONS[name]

  def fun(x, k):
    return lax.conv_general_dilated(x, k, strides, padding, **how)

  assert flops(fun, s(*lhs), s(*rhs)) == [xla_flops(fun, s(*lhs), s(*rhs))]
  # What sums nothing is a multiplication.
  assert flops(jnp.outer, s(2), s(3)) == flops(lambda x, y: jnp.einsum("i,j->ij", x, y), s(2), s(3))


@pytest.mark.parametrize("argnum", [0, 1])
def test_flops_of_a_convolutions_gradients_are_those_of_xla(argnum):
  # They have holes, padding below zero, and features where the batch was.
  def fun(x, k):
    return lax.conv_general_dilated(x, k, (2, 2), "SAME")

  def gradient(x, k, g):
    return jax.vjp(fun, x, k)[1](g)[argnum]

  args = s(2, 3, 9, 8), s(5, 3, 3, 3), s(2, 5, 5, 4)
  # The forward product is written there too; XLA drops it, as its result is not used.
  assert flops(gradient, *args)[-1] == xla_flops(gradient, *args)


DOTS = {
  "matrix": ((2, 3), (3, 5), "ij,jk->ik"),
  "batch": ((6, 2, 3), (6, 3, 5), "bij,bjk->bik"),
  "two contracted": ((2, 3, 4), (4, 3, 5), "ijk,kjl->il"),
}


@pytest.mark.parametrize("name", DOTS)
def test_flops_of_matrix_products_are_those_of_xla(name):
  lhs, rhs, subscripts = DOTS[name]

  def fun(x, y):
    return jnp.einsum(subscripts, x, y)

  assert flops(fun, s(*lhs), s(*rhs)) == [xla_flops(fun, s(*lhs), s(*rhs))]


def test_flops_of_a_ragged_product_do_not_grow_with_the_groups():
  def fun(x, y, sizes):
    return lax.ragged_dot(x, y, sizes)

  args = s(8, 3), s(4, 3, 5), s(4, dtype=jnp.int32)
  assert flops(fun, *args) == [2 * 8 * 3 * 5]
  assert matmul_sizes(jax.make_jaxpr(fun)(*args).eqns[0]) == (8, 5, 3)
