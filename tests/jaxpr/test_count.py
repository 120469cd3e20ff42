"""FLOPs of matmuls and convolutions against XLA's own analysis."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax._jaxpr.count import flops_of, is_small_matmul, matmul_sizes, sums_few_products
from mpjax._jaxpr.reader import walk
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


def convolution(strides, padding, **how):
  return lambda x, k: lax.conv_general_dilated(x, k, strides, padding, **how)


def einsum(subscripts):
  return lambda x, y: jnp.einsum(subscripts, x, y)


CALLS = {
  # name: the function, and the shapes of both operands
  "valid": (convolution([1], "VALID"), (2, 3, 9), (5, 3, 4)),
  "same": (convolution([1], "SAME"), (2, 3, 9), (5, 3, 4)),
  "strides": (convolution([2, 3], "SAME"), (2, 3, 9, 8), (5, 3, 3, 2)),
  "negative padding": (convolution([1], [(-2, 3)]), (1, 1, 9), (1, 1, 3)),
  "holes in the input": (
    convolution([2, 2], [(1, 1), (1, 2)], lhs_dilation=(2, 1)),
    *((1, 3, 8, 8), (5, 3, 3, 3)),
  ),
  "holes in the kernel": (
    convolution([1, 1], "SAME", rhs_dilation=(2, 3)),
    *((1, 3, 9, 9), (5, 3, 3, 3)),
  ),
  "feature groups": (convolution([1], "SAME", feature_group_count=2), (2, 6, 5), (4, 3, 3)),
  "depthwise": (convolution([1], "SAME", feature_group_count=6), (2, 6, 5), (6, 1, 3)),
  "batch groups": (convolution([1], "SAME", batch_group_count=2), (4, 3, 5), (6, 3, 3)),
  "other layout": (
    convolution([1, 1], "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
    *((2, 9, 8, 3), (3, 2, 3, 5)),
  ),
  "matrix": (einsum("ij,jk->ik"), (2, 3), (3, 5)),
  "batch": (einsum("bij,bjk->bik"), (6, 2, 3), (6, 3, 5)),
  "two contracted": (einsum("ijk,kjl->il"), (2, 3, 4), (4, 3, 5)),
}


@pytest.mark.parametrize(("fun", "left", "right"), CALLS.values(), ids=CALLS)
def test_flops_are_those_of_xla(fun, left, right):
  assert flops(fun, s(*left), s(*right)) == [xla_flops(fun, s(*left), s(*right))]


def test_what_sums_nothing_is_a_multiplication():
  assert flops(jnp.outer, s(2), s(3)) == flops(einsum("i,j->ij"), s(2), s(3))


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


def test_flops_of_a_ragged_product_do_not_grow_with_the_groups():
  def fun(x, y, sizes):
    return lax.ragged_dot(x, y, sizes)

  args = s(8, 3), s(4, 3, 5), s(4, dtype=jnp.int32)
  assert flops(fun, *args) == [2 * 8 * 3 * 5]
  assert matmul_sizes(jax.make_jaxpr(fun)(*args).eqns[0]) == (8, 5, 3)


SMALL = {
  # name: shapes, axes, whether the matmul sums few products, and whether it is small
  "rotations": (("bij,bjk->bik", s(9, 3, 3), s(9, 3, 3)), True, True),
  "rows": (("ij,jk->ik", s(2, 7), s(7, 9)), True, True),
  "columns": (("ij,jk->ik", s(9, 7), s(7, 2)), True, True),
  "low rank": (("ij,jk->ik", s(8, 7), s(7, 8)), True, False),
  "one row": (("j,jk->k", s(7), s(7, 9)), True, False),
  "experts": (("be,bed->bd", s(9, 2), s(9, 2, 8)), True, False),
  "eight products": (("ij,jk->ik", s(2, 8), s(8, 2)), False, False),
}


@pytest.mark.parametrize("name", SMALL)
def test_which_matmuls_sum_few_products_and_are_small(name):
  (axes, *shapes), few, small = SMALL[name]
  (eqn,) = jax.make_jaxpr(functools.partial(jnp.einsum, axes))(*shapes).eqns
  assert (sums_few_products(eqn), is_small_matmul(eqn)) == (few, small)


def test_a_symbolic_size_may_be_large():
  (size,) = jax.export.symbolic_shape("n")
  for shapes in [s(size, 3), s(3, 9)], [s(2, size), s(size, 9)]:
    (eqn,) = jax.make_jaxpr(jnp.matmul)(*shapes).eqns
    assert not is_small_matmul(eqn)


def test_a_convolution_sums_enough_products():
  (eqn,) = jax.make_jaxpr(lambda x, w: lax.conv(x, w, (1,), "SAME"))(s(1, 1, 8), s(1, 1, 3)).eqns
  assert not sums_few_products(eqn)
