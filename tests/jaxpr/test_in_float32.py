"""A program in float32: the program that casts nothing, through every way to nest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from mpjax._jaxpr.in_float32 import in_float32, results_in_float32

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)


def layer(x, dtype):
  return jnp.sin(x.astype(dtype) @ x.astype(dtype).T) * jnp.asarray(0.375, dtype)


def rows(x, dtype):
  table = jnp.zeros((8, 4), dtype).at[jnp.asarray([1, 1, 3, 7])].add(x.astype(dtype) / 3)
  return table[jnp.asarray([1, 3])] + jnp.sum(table, axis=0, keepdims=True)


def scanned(x, dtype):
  body = lambda c, row: (c * row + jnp.asarray(0.125, dtype), jnp.exp(c))  # noqa: E731
  return jax.lax.scan(body, jnp.ones(4, dtype), x.astype(dtype))


def looped(x, dtype):
  def body(carry):
    return carry[0] + 1, jax.lax.cond(carry[0] > 1, jnp.sin, jnp.cos, carry[1])

  return jax.lax.while_loop(lambda c: c[0] < 4, body, (0, x.astype(dtype)))


def on_devices(x, dtype):
  mesh = jax.make_mesh((1,), ("d",))
  fun = lambda x: jax.lax.psum(layer(x, dtype), "d")  # noqa: E731
  return jax.shard_map(fun, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)


PROGRAMS = {
  "layer": layer,
  "jit and checkpoint": lambda x, dtype: jax.jit(
    jax.checkpoint(layer, static_argnums=1), static_argnums=1
  )(x, dtype),
  "gradient": lambda x, dtype: jax.grad(lambda x: jnp.sum(layer(x, dtype).astype("f4")))(x),
  "custom_jvp": lambda x, dtype: jax.nn.relu(jax.nn.silu(layer(x, dtype))),
  "scatter and sum": rows,
  "scan": scanned,
  "while and cond": looped,
  "shard_map": on_devices,
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_the_program_in_float32(name, dtype):
  fun = functools.partial(PROGRAMS[name], dtype=dtype)
  wide = functools.partial(PROGRAMS[name], dtype="float32")
  results = jax.jit(in_float32(jax.make_jaxpr(fun)(X)))(X)
  for x, expected in zip(results, jax.tree.leaves(jax.jit(wide)(X)), strict=True):
    assert x.dtype == expected.dtype
    np.testing.assert_array_equal(x, expected)


def test_operations_on_bits_run_as_they_are_written():
  # They, and all that reads a half as it is stored, would be others in float32.
  fun = lambda x: jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.int16)  # noqa: E731
  (bits,) = in_float32(jax.make_jaxpr(fun)(X))(X)
  np.testing.assert_array_equal(bits, fun(X))
  half = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.bfloat16) * 3  # noqa: E731
  (number,) = in_float32(jax.make_jaxpr(half)(bits))(bits)
  np.testing.assert_array_equal(number, X.astype(jnp.bfloat16).astype(jnp.float32) * 3)


def test_one_operation_in_float32():
  x = jnp.full((2, 2), 300, jnp.float16)
  (eqn,) = jax.make_jaxpr(lambda x: jax.lax.dot(x, x))(x).eqns
  product = results_in_float32(eqn, [x.astype("float32")] * 2)
  np.testing.assert_array_equal(product, np.full((1, 2, 2), 180000, np.float32))
  (eqn,) = jax.make_jaxpr(lambda x: jax.lax.bitcast_convert_type(x, "int16"))(x).eqns
  assert results_in_float32(eqn, [x.astype("float32")]) is None
