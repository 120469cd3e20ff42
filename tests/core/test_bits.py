import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._core import bits


def numbers(dtype):
  special = [0.0, -0.0, 1.0, -1.0, np.inf, np.nan, 0.1]
  tiny = float(jnp.finfo(dtype).smallest_subnormal)
  return np.asarray([*special, tiny, 2 * tiny, -tiny], dtype)


@pytest.mark.parametrize(
  "dtype", ["float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn"]
)
def test_comparisons_are_those_of_numpy(dtype):
  dtype = jnp.dtype(dtype)
  a, b = (x.reshape(-1) for x in np.meshgrid(numbers(dtype), numbers(dtype)))
  same = jax.jit(bits.same_numbers)(jnp.asarray(a), jnp.asarray(b))
  np.testing.assert_array_equal(same, a == b)
  np.testing.assert_array_equal(jax.jit(bits.is_nonzero)(jnp.asarray(a)), a != 0)


def test_an_update_that_rounds_away_is_seen_although_xla_adds_in_float32():
  p = jax.random.normal(jax.random.key(0), (1000,), jnp.bfloat16)
  u = jax.random.normal(jax.random.key(1), (1000,), jnp.bfloat16) * 0.01
  lost = jax.jit(lambda p, u: bits.changes_nothing(p, p + u, u))(p, u)
  p, u = np.asarray(p), np.asarray(u)
  expected = (p + u == p) & (u != 0)
  assert 0 < expected.sum() < 1000
  np.testing.assert_array_equal(lost, expected)


def test_complex():
  p, u = jnp.asarray([1 + 1j, 1 + 1j, 1 + 0j]), jnp.asarray([1e-9 + 1j, 1 + 1j, 1 + 0j])
  np.testing.assert_array_equal(bits.changes_nothing(p, p + u, u), [True, False, False])
