"""A float32 number in a bfloat16 parameter and 17 bits, for all bit patterns, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.transforms._split import join, pack, rounded, split, unpack
from tests.programs import bits, run

BF16 = np.dtype(jnp.bfloat16)
LARGEST = float(jnp.finfo(jnp.bfloat16).max)
LOW = np.arange(2**16, dtype=np.uint32)
# Zeros, subnormal numbers and the smallest normal ones; even and odd; powers of two, the ends of an
# interval; the largest; inf and NaN; each of them with both signs.
UPPER = [
  0,
  1,
  2,
  0x7F,
  0x80,
  0x3F80,
  0x3F81,
  0x3F7F,
  0x4049,
  0x7F7E,
  0x7F7F,
  0x7F80,
  0x7F81,
  0x7FC0,
]


def numbers(upper):
  """All float32 numbers with these 16 upper bits."""
  return (np.uint32(upper) << np.uint32(16) | LOW).view(np.float32)


def nearest(x):
  """Returns the bfloat16 parameters of float32 masters, by NumPy and ml_dtypes."""
  with np.errstate(all="ignore"):
    found = x.astype(BF16)
  finite = np.isfinite(x) & ~np.isfinite(found.astype(np.float32))
  found[finite] = np.where(x[finite] > 0, LARGEST, -LARGEST)
  return found


def same(a, b):
  """Whether the bits are equal, or both are NaN."""
  a, b = np.asarray(a), np.asarray(b)
  return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


@jax.jit
def there_and_back(x):
  param = rounded(x).astype(jnp.bfloat16)
  held = split(x, param)
  # As a wrapper shows the parameter, in float32, it is the same.
  return param, held, join(param, held), join(rounded(x), split(x, rounded(x)))


@pytest.mark.parametrize("sign", [0, 0x8000], ids=["positive", "negative"])
@pytest.mark.parametrize("upper", UPPER, ids=hex)
def test_every_number_with_these_upper_bits_comes_back(upper, sign):
  x = numbers(upper | sign)
  param, held, back, wide = there_and_back(x)
  expected = nearest(x)
  real = ~np.isnan(x)
  assert bits(np.asarray(param)[real]) == bits(expected[real])
  assert np.all(np.isnan(np.asarray(param)[~real]))
  assert same(back, x)
  assert same(wide, x)
  assert held.remainder.dtype == np.int16
  assert held.parity.dtype == np.uint8
  assert held.parity.shape == (2**13,)


def test_numbers_from_all_of_the_range_come_back():
  x = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
  _, _, back, _ = there_and_back(x)
  assert same(back, x)


def test_16_bits_are_the_difference_of_the_bits():
  """What the second array adds is nothing but the two ties of an even parameter."""
  x = np.concatenate([numbers(0x4049), numbers(0xBF80)])
  param, held, _, _ = there_and_back(x)
  base = np.asarray(param).view(np.uint16).astype(np.int64) << 16
  difference = x.view(np.uint32).astype(np.int64) - base
  assert difference.min() == -32768
  assert difference.max() == 32768
  np.testing.assert_array_equal(held.remainder, difference.astype(np.int16))
  both = np.float32([1 - 2.0**-9, 1 + 2.0**-8])
  param, held, back, _ = there_and_back(both)
  assert param.tolist() == [1, 1]
  assert held.remainder.tolist() == [-32768, -32768]
  assert back.tolist() == both.tolist()


@pytest.mark.parametrize("upper", [0x3F80, 0x3F81, 0x0080, 0xC049])
@pytest.mark.parametrize("ulps", [-3, -1, 1, 3])
def test_parts_of_numbers_that_differ_in_last_bits_give_one_of_them(upper, ulps):
  """As a compiler gives that computes a master once for each of its consumers."""
  x = numbers(upper)
  other = (x.view(np.int32) + ulps).view(np.float32)
  param, (remainder, parity), _, _ = there_and_back(x)
  other_param, (other_remainder, other_parity), _, _ = there_and_back(other)
  cases = [(other_param, remainder, parity), (param, other_remainder, other_parity)]
  for p, low, bit in [*cases, (param, remainder, other_parity), (param, other_remainder, parity)]:
    found = np.asarray(join(p, split(x, param)._replace(remainder=low, parity=bit)))
    steps = np.abs(found.view(np.int32).astype(np.int64) - x.view(np.int32))
    assert steps.max() <= abs(ulps)


@pytest.mark.parametrize(
  ("master", "param", "expected"),
  [
    (1.37e-6, 0.0, 2.0**-134),  # The largest number that rounds to 0.
    (-1.37e-6, 0.0, -(2.0**-134)),
    (0.0, -0.0, 0.0),
    (-0.0, 0.0, -0.0),
    (-1.0, 2.0, 2 - 2.0**-8),
    (1e30, 1.0, 1 + 2.0**-8),
    (0.1, 1.0078125, np.nextafter(np.float32(1 + 2.0**-8), np.float32(2))),
    (np.nan, np.nan, np.nan),
    (5.0, np.nan, np.nan),
    (5.0, -np.inf, -np.inf),
    (np.inf, np.inf, np.inf),
    (np.inf, LARGEST, np.finfo(np.float32).max),
  ],
)
def test_of_another_parameter_it_is_the_nearest_number_that_rounds_to_it(master, param, expected):
  master, param = np.float32([master]), np.asarray([param], BF16)
  found = run(lambda m, p: join(p, split(m, p)), master, param)
  assert same(found, np.float32([expected]))


def test_what_belongs_to_other_parameters_is_finite():
  x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
  _, held, _, _ = there_and_back(x)
  others = np.arange(1000).astype(np.uint16).view(BF16)
  assert np.all(np.isfinite(run(join, others, held)))


EMPTY = [(0,), (4, 0), (0, 4), (2, 0, 3), (0, 17), (0, 0)]


@pytest.mark.case("B153")
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (9,), (3, 17), (2, 3, 8), *EMPTY])
def test_any_shape(shape):
  x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
  param, held, back, _ = there_and_back(x)
  last = shape[-1] if shape else 1
  assert held.remainder.shape == param.shape == shape
  assert held.parity.shape == (*shape[:-1], -(-last // 8))
  assert same(back, x)
  np.testing.assert_array_equal(unpack(pack(jnp.asarray(x > 0)), jnp.asarray(x)), x > 0)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("shape", [(16,), (128,), (8, 20), (4, 16), (0, 16), (0, 32), (8, 0)])
def test_the_17th_bits_of_a_sharded_array(devices, axis_type, shape):
  """Where bytes do not divide like the elements, the bits are replicated along the last axis."""
  mesh = jax.make_mesh((4,), ("data",), (axis_type,), devices=devices)
  spec = jax.P(None, "data") if shape[0] % 8 or not shape[0] else jax.P("data")
  x = np.random.default_rng(4).normal(size=shape).astype(np.float32)
  placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
  for both in (there_and_back, jax.jit(there_and_back)):
    param, held, back, _ = both(placed)
    assert same(back, x)
    assert held.remainder.sharding.is_equivalent_to(param.sharding, len(shape))
    flags = unpack(pack(placed > 0), placed)
    np.testing.assert_array_equal(flags, x > 0)
