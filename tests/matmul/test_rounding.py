"""Stochastic rounding, random bits without a key, and the random Hadamard transform."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._matmul.rounding import SIZE, hadamard, random_bits, signs_of, stochastic
from tests.format_oracle import FORMATS, normal
from tests.format_oracle import nearest as oracle_nearest
from tests.format_oracle import stochastic as oracle_stochastic

formats = pytest.mark.parametrize("name", FORMATS)


def dtype_of(name):
  return np.dtype(getattr(ml_dtypes, name))


def spread_numbers(elements, count=4096):
  """Normal numbers of many magnitudes, the numbers of the format, and numbers beside these."""
  x = normal(0, count, elements.largest) * np.exp2(-(np.arange(count) % 30)).astype(np.float32)
  exact = elements.numbers.astype(np.float32)
  beside = [np.nextafter(exact, np.float32(way)) for way in (-np.inf, np.inf)]
  x = np.concatenate([x, exact, -exact, *beside, [3 * elements.largest, -np.inf]])
  return x[(x == 0) | (np.abs(x) >= np.finfo(np.float32).tiny)].astype(np.float32)


# The oracle itself: its elements and its rounding to nearest are those of `ml_dtypes`.


@formats
def test_the_oracle_has_the_numbers_and_rounding_of_ml_dtypes(name):
  elements, dtype = FORMATS[name], dtype_of(name)
  codes = np.arange(2 ** (elements.exponent + elements.fraction), dtype=np.uint8)
  numbers = codes.view(dtype).astype(np.float64)
  np.testing.assert_array_equal(numbers[np.isfinite(numbers)], elements.numbers)
  ties = (elements.numbers[1:] + elements.numbers[:-1]) / 2
  x = np.concatenate([spread_numbers(elements), ties, -ties]).astype(np.float32)
  clipped = np.clip(x, -elements.largest, elements.largest)
  np.testing.assert_array_equal(oracle_nearest(x, elements), clipped.astype(dtype))


# Stochastic rounding.


@formats
def test_stochastic_rounding_is_that_of_numpy_for_given_bits(name):
  elements = FORMATS[name]
  x = spread_numbers(elements)
  rng = np.random.default_rng(1)
  for bits in (
    rng.integers(0, 2**32, x.shape, np.uint32),
    np.zeros(x.shape, np.uint32),
    np.full(x.shape, 2**32 - 1, np.uint32),
  ):
    found = jax.jit(lambda x, bits: stochastic(x, dtype_of(name), bits))(x, bits)
    assert found.dtype == dtype_of(name)
    wanted = oracle_stochastic(x, elements, bits)
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), wanted)


@formats
def test_stochastic_rounding_is_right_on_average(name):
  elements, count = FORMATS[name], 2**16
  # Subnormal numbers, numbers in each binade, and numbers that the format has.
  x = np.concatenate([elements.numbers[:9], elements.largest * np.array([0.01, 0.3, 0.77, 1])])
  x = np.concatenate([x, 0.9 * elements.numbers[1:6], [elements.numbers[1] / 100]])
  bits = np.random.default_rng(2).integers(0, 2**32, (count, len(x)), np.uint32)
  many = np.broadcast_to(x.astype(np.float32), bits.shape)
  found = np.asarray(stochastic(jnp.asarray(many), dtype_of(name), bits)).astype(np.float64)
  numbers = elements.numbers
  below = np.searchsorted(numbers, many[0], side="right") - 1
  gap = numbers[np.minimum(below + 1, len(numbers) - 1)] - numbers[below]
  error = np.abs(np.mean(found, axis=0) - many[0])
  assert np.all(error <= 5 * gap / 2 / np.sqrt(count))


def test_what_is_not_a_number_stays():
  x = jnp.array([np.nan, 1.0], jnp.float32)
  found = stochastic(x, dtype_of("float8_e4m3fn"), jnp.zeros(2, jnp.uint32))
  assert np.isnan(np.asarray(found).astype(np.float32)).tolist() == [True, False]


# Random bits.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_depend_on_every_element_the_seed_and_the_stream(dtype):
  x = jnp.asarray(normal(0, (64, 128)), dtype)
  bits = np.asarray(jax.jit(lambda x: random_bits(x, 0))(x))
  assert (bits.dtype, bits.shape) == (np.uint32, x.shape)
  np.testing.assert_array_equal(bits, random_bits(x, 0))
  for other in (
    random_bits(x.at[5, 7].multiply(1.01), 0),
    random_bits(x, 1),
    random_bits(x, 0, stream=1),
    random_bits(x, 2**32 - 1),
  ):
    # Of independent bits, half differ.
    assert abs(np.mean(np.bitwise_count(bits ^ np.asarray(other))) - 16) < 0.2


def test_bits_are_uniform_and_independent():
  x = jnp.asarray(normal(0, (256, 256)))
  bits = np.asarray(random_bits(x, 0)).astype(np.uint32)
  deviation = 1 / np.sqrt(bits.size)
  ones = (bits[..., None] >> np.arange(32, dtype=np.uint32)) & 1
  assert np.all(np.abs(np.mean(ones, axis=(0, 1)) - 0.5) < 5 * deviation / 2)
  uniform = bits / 2.0**32 - 0.5
  for other in (
    np.roll(uniform, 1, 0),
    np.roll(uniform, 1, 1),
    np.asarray(x),
    np.asarray(random_bits(x, 1)) / 2.0**32 - 0.5,
    np.asarray(random_bits(x.at[0, 0].set(2), 0)) / 2.0**32 - 0.5,
  ):
    assert abs(np.corrcoef(uniform.ravel(), other.ravel())[0, 1]) < 5 * deviation
  counts, _ = np.histogram(uniform, 64)
  assert np.sum((counts - bits.size / 64) ** 2 / (bits.size / 64)) < 63 + 5 * np.sqrt(2 * 63)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_loss_scale_changes_no_bit(dtype):
  x = jnp.asarray(normal(0, (64, 128)), dtype)
  for scale in (2.0, 2.0**10):
    np.testing.assert_array_equal(random_bits(x * scale, 0), random_bits(x, 0))
  zeros = jnp.zeros((64, 128), dtype)
  assert np.unique(random_bits(zeros, 0)).size > 64 * 127


@pytest.mark.slow
def test_bits_are_those_of_each_example_under_vmap():
  x = jnp.asarray(normal(0, (3, 4, 16)))
  found = jax.vmap(lambda x: random_bits(x, 0))(x)
  for each, wanted in zip(found, x, strict=True):
    np.testing.assert_array_equal(each, random_bits(wanted, 0))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_have_the_bits_of_the_array(kind):
  x = jnp.asarray(normal(0, (32, 16)))
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind, kind))

  def both(x):
    bits = random_bits(x, 3)
    return stochastic(x, dtype_of("float4_e2m1fn"), bits).astype(jnp.float32), bits

  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", "b")))
    found = jax.jit(both)(sharded)
  for one, other in zip(found, both(x), strict=True):
    np.testing.assert_array_equal(one, other)


# The random Hadamard transform.


def matrix(seed):
  """The orthogonal matrix of a seed, from its definition."""
  two = np.array([[1, 1], [1, -1]])
  return np.diag(signs_of(seed)) @ np.kron(np.kron(two, two), np.kron(two, two)) / 4


@pytest.mark.parametrize("seed", [0, 7])
def test_signs_are_random_and_the_matrix_is_orthogonal(seed):
  assert set(signs_of(seed)) == {-1, 1}
  np.testing.assert_array_equal(matrix(seed) @ matrix(seed).T, np.eye(SIZE))
  assert not np.array_equal(signs_of(seed), signs_of(seed + 1))
  all_signs = np.stack([signs_of(each) for each in range(1000)])
  assert np.all(np.abs(np.mean(all_signs, axis=0)) < 5 / np.sqrt(1000))


@pytest.mark.parametrize(("shape", "axis"), [((3, 32), 1), ((48, 5), 0), ((2, 16, 3), -2)])
def test_blocks_along_an_axis_are_multiplied_by_the_matrix(shape, axis):
  # Sums of few bits are exact.
  x = np.random.default_rng(0).integers(-128, 128, shape).astype(np.float32)
  blocks = np.moveaxis(x, axis, -1)
  wanted = (blocks.reshape(*blocks.shape[:-1], -1, SIZE) @ matrix(3)).reshape(blocks.shape)
  for dtype in ("float32", "bfloat16"):
    found = jax.jit(lambda x: hadamard(x, axis, 3))(jnp.asarray(x, dtype))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.moveaxis(wanted, -1, axis))


@pytest.mark.slow
def test_a_product_of_transformed_operands_is_the_product():
  x, w = normal(0, (5, 64)), normal(1, (64, 7))
  found = np.asarray(hadamard(jnp.asarray(x), 1, 1), np.float64) @ hadamard(jnp.asarray(w), 0, 1)
  np.testing.assert_allclose(found, x.astype(np.float64) @ w, atol=1e-5)


@pytest.mark.slow
def test_the_inverse_restores_an_array():
  x = jnp.asarray(normal(0, (3, 32, 2)))
  restored = hadamard(hadamard(x, 1, 5), 1, 5, inverse=True)
  np.testing.assert_allclose(restored, x, atol=1e-6)


@pytest.mark.slow
def test_an_outlier_is_spread_over_its_block():
  x = jnp.zeros((1, 32)).at[0, 3].set(8.0)
  np.testing.assert_array_equal(np.abs(hadamard(x, 1, 0)), [[2.0] * SIZE + [0.0] * SIZE])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_transform_of_shards_is_that_of_the_array(kind, axis):
  x = jnp.asarray(normal(0, (64, 64)))
  mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
  with jax.set_mesh(mesh):
    sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a", None)))
    found = jax.jit(lambda x: hadamard(x, axis, 0))(sharded)
  np.testing.assert_array_equal(found, hadamard(x, axis, 0))
