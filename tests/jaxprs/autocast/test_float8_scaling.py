"""Arrays of float8 and their scales, against NumPy and the rounding of `ml_dtypes`."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax._jaxprs.autocast.float8_scaling import quantise
from tests.float8_oracle import E4M3, E5M2, normal, quantised, scale_of


@pytest.mark.case("I22")
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("axes", [None, (0,), (1,), (0, 1)])
def test_quantised_numbers_are_those_of_numpy(dtype, power_of_two, axes):
  x = normal(3, (64, 96)) * np.exp2(np.arange(96) % 40 - 20).astype(np.float32)
  q, scale = jax.jit(lambda x: quantise(x, dtype, axes, power_of_two))(x)
  wanted = scale_of(x, dtype, axes, power_of_two)
  np.testing.assert_array_equal(scale, wanted.reshape(scale.shape))
  assert q.dtype == dtype
  values = np.asarray(q).astype(np.float64) * np.asarray(scale, np.float64)
  np.testing.assert_array_equal(values, quantised(x, dtype, axes, power_of_two))
  # The largest number of each group is the largest of the format, or at least half of it.
  most = float(ml_dtypes.finfo(dtype).max)
  found = np.max(np.abs(np.asarray(q).astype(np.float32)), axis=axes)
  assert np.all(found <= most)
  assert np.all(found >= (most / 2 if power_of_two else most))


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16], ids=lambda low: low.__name__)
@pytest.mark.parametrize("axes", [None, (1,)])
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_the_largest_is_taken_in_the_dtype_of_the_array(low, axes, bad):
  """Not of a copy in float32, which XLA for a GPU would read once more."""
  wide = normal(5, (32, 48))
  if bad is not None:
    wide[3, 4] = bad

  def fun(wide):
    return quantise(wide.astype(low), E4M3, axes, False)

  (reduced,) = (eqn for eqn in jax.make_jaxpr(fun)(wide).eqns if eqn.primitive.name == "reduce_max")
  assert reduced.invars[0].aval.dtype == low
  rounded = np.asarray(jnp.asarray(wide).astype(low)).astype(np.float32)
  largest = np.max(np.abs(rounded), axis=axes, keepdims=axes is not None)
  found = np.asarray(jax.jit(fun)(wide).scale)
  np.testing.assert_array_equal(found, largest * np.float32(1 / 448))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_powers_of_two_are_exact_where_a_logarithm_is_not(dtype):
  most = float(ml_dtypes.finfo(dtype).max)
  for exponent in range(-100, 111, 7):
    edge = np.float32(most * 2.0**exponent)
    beside = (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf)))
    found = [float(quantise(jnp.full((2,), x), dtype, None, True).scale) for x in beside]
    assert found == [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]


def test_a_cast_without_clipping_would_be_nan():
  """The trap: e4m3 has no inf, and JAX casts what is above its range to NaN."""
  assert math.isnan(jnp.float32(500).astype(jnp.float8_e4m3fn))
  x = jnp.asarray([448.00003, -448.00003, 3.0], jnp.float32)
  q, _ = quantise(x, E4M3, None, False)
  assert [float(each) for each in q[:2]] == [448, -448]
