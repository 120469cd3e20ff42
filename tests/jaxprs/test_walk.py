"""Every equation is met, as often as it runs: by the FLOPs of the matmuls."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from mpjax._jaxprs.count import flops_of, half_share
from mpjax._jaxprs.primitive_facts import Holds
from mpjax._jaxprs.primitives import FACTS
from mpjax._jaxprs.walk import walk


def s(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.float32)


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
  # From jax 0.11 on an equation of its own.
  "traced": (jax.jit(square).trace(s(4, 4)), 128, True),
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
def test_equations_are_met_wherever_they_are_written(name):
  fun, flops, certain = NESTED[name]
  program = jax.make_jaxpr(lambda x: fun(x))(s(4, 4))
  for each in (program, program.jaxpr):  # Closed or not.
    matmuls = [visit for visit in walk(each) if flops_of(visit.eqn) is not None]
    assert sum(visit.times * (flops_of(visit.eqn) or 0) for visit in matmuls) == flops
    assert all(visit.certain is certain for visit in matmuls)


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
  names = [v.eqn.primitive.name for v in walk(jax.make_jaxpr(OPAQUE_PROGRAMS[name])(s(4, 4)))]
  assert FACTS[name].holds in (Holds.BINARY, Holds.KERNEL)
  assert names.count(name) == 1
  assert "mul" not in names


def test_what_is_not_known_is_not_entered():
  odd = Primitive("odd_call")
  odd.def_abstract_eval(lambda x, *, bodies: x)
  inner = jax.make_jaxpr(square)(s(4, 4))
  program = jax.make_jaxpr(lambda x: odd.bind(x @ x, bodies=(1, (inner,))))(s(4, 4))
  assert [visit.entered for visit in walk(program)] == [True, False]
  with pytest.warns(UserWarning, match=r"'odd_call'.*\['bodies'\].*not counted"):
    assert half_share(program) == 0
