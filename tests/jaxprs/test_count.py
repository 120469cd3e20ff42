import collections
import contextlib
import functools
import io
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import print_saved_residuals
from jax.custom_batching import custom_vmap
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from mpjax._jaxprs.count import (
  count_operations,
  half_share,
  products,
  residual_bytes,
)
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import FACTS
from mpjax._jaxprs.walk import walk
from tests import programs

F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16


def s(*shape: int, dtype=F32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def square(x):
  """One product of 4x4 matrices: 128 operations."""
  return x @ x


@jax.custom_jvp
def with_jvp(x):
  return square(x)


with_jvp.defjvp(lambda x, dx: (square(x[0]), dx[0]))


@jax.custom_vjp
def with_vjp(x):
  return square(x)


with_vjp.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x,))


@custom_vmap
def with_vmap(x):
  return square(x)


with_vmap.def_vmap(lambda size, batched, x: (jax.vmap(square)(x), True))


def turn(c, _):
  return square(c), None


def in_shard_map(x):
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = PartitionSpec("a")
  body = jax.shard_map(lambda y: y @ y.T, mesh=mesh, in_specs=spec, out_specs=spec)
  return body(x)


NESTED = {
  "plain": (square, 128, True),
  "jit": (jax.jit(square), 128, True),
  "jit in jit": (jax.jit(lambda x: jax.jit(square)(x) + square(x)), 256, True),
  "remat": (jax.checkpoint(square), 128, True),
  "scan": (lambda x: lax.scan(turn, x, None, length=5)[0], 5 * 128, True),
  "scan in scan": (
    lambda x: lax.scan(lambda c, _: (lax.scan(turn, c, None, length=5)[0], None), x, length=3)[0],
    15 * 128,
    True,
  ),
  "fori with known bounds": (lambda x: lax.fori_loop(0, 7, lambda _, c: square(c), x), 896, True),
  "fori with unknown bounds": (
    lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, c: square(c), x),
    128,
    False,
  ),
  "while": (lambda x: lax.while_loop(lambda c: jnp.sum(c @ c) < 9, square, x), 256, False),
  "scan in while": (
    lambda x: lax.while_loop(
      lambda c: jnp.sum(c) < 9, lambda c: lax.scan(turn, c, None, length=5)[0], x
    ),
    5 * 128,
    False,
  ),
  "cond": (lambda x: lax.cond(x[0, 0] > 0, square, lambda y: square(y) @ y, x), 384, False),
  "custom_jvp": (with_jvp, 128, True),
  "custom_vjp": (with_vjp, 128, True),
  "custom_vmap": (with_vmap, 128, True),
  "composite": (lax.composite(square, name="mpjax.square"), 128, True),
  "linear_call": (
    lambda x: jax.custom_derivatives.linear_call(lambda r, v: r @ v, lambda r, v: r.T @ v, x, x),
    128,
    True,
  ),
  # Of matvec, solve and their transposes only the one solve runs: twice a vector, 2 * 4 * 4.
  "custom_linear_solve": (
    lambda x: lax.custom_linear_solve(lambda v: x @ v, x[0], lambda _, b: x @ (x.T @ b)),
    64,
    True,
  ),
  # Two rows on each device of the axis "a", 2 * 2 * 4 * 2, on four devices ("b" repeats the work).
  "shard_map": (in_shard_map, 4 * 32, True),
}


@pytest.mark.parametrize("name", NESTED)
def test_products_are_found_wherever_they_are_written(name):
  fun, flops, certain = NESTED[name]
  program = jax.make_jaxpr(fun)(s(4, 4))
  found = products(program)
  assert sum(p.flops * p.times for p in found) == flops
  assert all(p.certain is certain for p in found)
  assert found == products(program.jaxpr), "closed or not"


def kernel(x, y):
  y[...] = x[...] * 2


OPAQUE_PROGRAMS = {
  "reduce": lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (0,)),
  "reduce_window": lambda x: lax.reduce_window(
    x, jnp.float32(0), lambda a, b: a + 2 * b, (2, 2), (1, 1), "VALID"
  ),
  "scatter-add": lambda x: x.at[0].add(1),
  "scatter": lambda x: x.at[0].set(1),
  "pallas_call": lambda x: pallas.pallas_call(kernel, out_shape=x)(x),
}


@pytest.mark.parametrize("name", OPAQUE_PROGRAMS)
def test_programs_of_elements_and_blocks_are_no_operations_of_the_program(name):
  counts = count_operations(jax.make_jaxpr(OPAQUE_PROGRAMS[name])(s(4, 4)))
  assert FACTS[name].holds in (Holds.BINARY, Holds.KERNEL)
  assert counts[name] == 1
  assert counts["mul"] == 0


def test_a_count_says_what_is_not_in_it():
  odd = Primitive("odd_call")
  odd.def_abstract_eval(lambda x, *, bodies: x)
  inner = jax.make_jaxpr(square)(s(4, 4))
  program = jax.make_jaxpr(lambda x: odd.bind(x @ x, bodies=(1, (inner,))))(s(4, 4))
  with pytest.warns(UserWarning, match=r"'odd_call'.*\['bodies'\].*not counted"):
    assert len(products(program)) == 1
  with pytest.warns(UserWarning, match="odd_call"):
    assert count_operations(program) == collections.Counter(dot_general=1, odd_call=1)
  assert [visit.entered for visit in walk(program)] == [True, False]


def test_operations_are_counted_as_written():
  def fun(x):
    y = lax.scan(lambda c, _: (jnp.sin(c), None), x, length=9)[0]
    return jax.jit(jnp.sin)(y.astype(BF16)).astype(F32)

  counts = count_operations(jax.make_jaxpr(fun)(s(3)))
  assert counts == collections.Counter(sin=2, convert_element_type=2)


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

  (found,) = products(jax.make_jaxpr(fun)(s(*lhs), s(*rhs)))
  assert found.flops == xla_flops(fun, s(*lhs), s(*rhs))


@pytest.mark.parametrize("argnum", [0, 1])
def test_flops_of_a_convolutions_gradients_are_those_of_xla(argnum):
  """They have holes, padding below zero, and features where the batch was."""

  def fun(x, k):
    return lax.conv_general_dilated(x, k, (2, 2), "SAME")

  def gradient(x, k, g):
    return jax.vjp(fun, x, k)[1](g)[argnum]

  args = s(2, 3, 9, 8), s(5, 3, 3, 3), s(2, 5, 5, 4)
  found = products(jax.make_jaxpr(gradient)(*args))
  # The forward product is written there too; XLA drops it, as its result is not used.
  assert found[-1].flops == xla_flops(gradient, *args)


DOTS = {
  "matrix": ((2, 3), (3, 5), "ij,jk->ik"),
  "vectors": ((7,), (7,), "i,i->"),
  "outer": ((2, 3), (4,), "ij,k->ijk"),
  "batch": ((6, 2, 3), (6, 3, 5), "bij,bjk->bik"),
  "two contracted": ((2, 3, 4), (4, 3, 5), "ijk,kjl->il"),
}


@pytest.mark.parametrize("name", DOTS)
def test_flops_of_matrix_products_are_those_of_xla(name):
  lhs, rhs, subscripts = DOTS[name]

  def fun(x, y):
    return jnp.einsum(subscripts, x, y)

  (found,) = products(jax.make_jaxpr(fun)(s(*lhs), s(*rhs)))
  assert found.flops == xla_flops(fun, s(*lhs), s(*rhs))


def test_flops_of_a_ragged_product_do_not_grow_with_the_groups():
  def fun(x, y, sizes):
    return lax.ragged_dot(x, y, sizes)

  args = s(8, 3), s(4, 3, 5), s(4, dtype=jnp.int32)
  (found,) = products(jax.make_jaxpr(fun)(*args))
  assert found.primitive == "ragged_dot_general"
  assert found.flops == 2 * 8 * 3 * 5


def test_a_product_is_half_by_both_operands():
  numbers = (((1,), (0,)), ((), ()))
  for lhs, rhs, half in (
    (BF16, BF16, True),
    (F16, F16, True),
    (jnp.float8_e4m3fn, jnp.float8_e5m2, True),
    (F32, F32, False),
    (F32, BF16, False),
    (F16, F32, False),
    (jnp.int8, jnp.int8, False),
    (jnp.complex64, jnp.complex64, False),
  ):
    program = jax.make_jaxpr(functools.partial(lax.dot_general, dimension_numbers=numbers))
    (found,) = products(program(s(2, 3, dtype=lhs), s(3, 2, dtype=rhs)))
    assert found.is_low_precision is half
    assert [x.dtype for x in found.operands] == [lhs, rhs]


def mixed(x, w):
  """A quarter of its operations in half: 2 of 8 turns, each of the same size."""

  def half(c, _):
    return (c.astype(BF16) @ w.astype(BF16)).astype(F32), None

  def full(c, _):
    return c @ w, None

  return lax.scan(full, lax.scan(half, x, length=2)[0], length=6)[0]


def test_share_in_half():
  def loss(w, x):
    hidden = jnp.tanh((x.astype(BF16) @ w["a"].astype(BF16)).astype(F32))
    return jnp.sum((hidden @ w["b"]) ** 2)

  params = {"a": s(8, 16), "b": s(16, 3)}
  mixed_program = jax.make_jaxpr(mixed)(s(4, 4), s(4, 4))
  assert half_share(products(mixed_program)) == 0.25
  for program in (mixed_program, jax.make_jaxpr(jax.grad(loss))(params, s(5, 8))):
    share = half_share(products(program))
    assert 0 < share < 1
    assert share == programs.half_share(program), "that of the other counter"


def test_share_in_half_leaves_integers_out():
  def fun(x, i):
    return x @ x, i @ i

  program = jax.make_jaxpr(fun)(s(2, 2, dtype=BF16), s(9, 9, dtype=jnp.int32))
  assert half_share(products(program)) == 1
  program = jax.make_jaxpr(lambda i: i @ i)(s(9, 9, dtype=jnp.int32))
  assert math.isnan(half_share(products(program)))


def reported_residual_bytes(fun, *args) -> int:
  """What JAX's own report of residuals adds up to, arguments and constants left out."""
  text = io.StringIO()
  with contextlib.redirect_stdout(text):
    print_saved_residuals(fun, *args)
  sizes = {"f32": 4, "bf16": 2, "f16": 2, "bool": 1, "i32": 4}
  total = 0
  for line in text.getvalue().splitlines():
    if "from the argument" in line or "from a constant" in line:
      continue
    found = re.match(r"(\w+)\[([\d,]*)\]", line)
    assert found, line
    shape = [int(n) for n in found[2].split(",") if n]
    total += sizes[found[1]] * math.prod(shape)
  return total


def mlp(dtype):
  def fun(w, x):
    hidden = jnp.tanh(x.astype(dtype) @ w["a"].astype(dtype))
    return jnp.sum((hidden @ w["b"].astype(dtype)).astype(F32) ** 2)

  return fun


W = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 3))}
X = jnp.ones((5, 8))
SCALE = jnp.float32(3) * jnp.ones((4, 4))

SAVED = {
  "float32": mlp(F32),
  "bfloat16": mlp(BF16),
  "all computed again": jax.checkpoint(mlp(BF16)),
  "inside of jit": jax.jit(mlp(F32)),
  "scan": lambda w, x: lax.scan(lambda c, _: (jnp.sin(c), None), mlp(F16)(w, x), length=3)[0],
}


@pytest.mark.parametrize("name", SAVED)
def test_residuals_are_those_that_jax_reports(name):
  assert residual_bytes(SAVED[name], W, X) == reported_residual_bytes(SAVED[name], W, X)


@pytest.mark.parametrize(
  ("fun", "saved"),
  [
    # sin keeps cos(x); the product keeps its operands, which are arguments.
    (jnp.sin, 4 * 16),
    (square, 0),
    (lambda x: jnp.sin(x.astype(BF16)), 2 * 16),
    (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0], 5 * 4 * 16),
    (jax.checkpoint(jnp.sin), 0),
    (lambda x: x * SCALE, 0),
    # Saved twice, kept once.
    (lambda x: (lambda y: (y @ x, y @ x))(x.astype(BF16).astype(F32)), 4 * 16),
  ],
)
def test_residuals_by_hand(fun, saved):
  assert residual_bytes(fun, s(4, 4)) == saved
