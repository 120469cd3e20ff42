"""A float32 number in a bfloat16 parameter and 17 bits, for all bit patterns, against NumPy."""

import itertools

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
UPPER = [0, 1, 2, 0x7F, 0x80, 0x3F80, 0x3F81, 0x3F7F, 0x4049]
UPPER += [0x7F7E, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0]


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


def test_every_number_with_these_upper_bits_comes_back():
  x = np.stack([numbers(upper | sign) for upper in UPPER for sign in (0, 0x8000)])
  param, held, back, wide = there_and_back(x)
  expected = nearest(x)
  real = ~np.isnan(x)
  assert bits(np.asarray(param)[real]) == bits(expected[real])
  assert np.all(np.isnan(np.asarray(param)[~real]))
  assert same(back, x)
  assert same(wide, x)
  assert held.remainder.dtype == np.int16
  assert held.parity.dtype == np.uint8
  assert held.parity.shape == (len(x), 2**13)
  anywhere = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32).view(np.float32)
  assert same(there_and_back(anywhere)[2], anywhere)


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


joined = jax.jit(join)


def test_parts_of_numbers_that_differ_in_last_bits_give_one_of_them():
  """As a compiler gives that computes a master once for each of its consumers."""
  for upper, ulps in itertools.product([0x3F80, 0x3F81, 0x0080, 0xC049], [-3, -1, 1, 3]):
    x = numbers(upper)
    other = (x.view(np.int32) + ulps).view(np.float32)
    param, held, _, _ = there_and_back(x)
    other_param, other_held, _, _ = there_and_back(other)
    mixed = held._replace(parity=other_held.parity), other_held._replace(parity=held.parity)
    cases = [(other_param, held), (param, other_held), (param, mixed[0]), (param, mixed[1])]
    for p, parts in cases:
      steps = np.asarray(joined(p, parts)).view(np.int32).astype(np.int64) - x.view(np.int32)
      assert np.abs(steps).max() <= abs(ulps), (hex(upper), ulps)


def test_of_another_parameter_it_is_the_nearest_number_that_rounds_to_it():
  cases = [
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
  ]
  master, param, expected = np.asarray(cases, np.float32).T.copy()
  assert same(run(lambda m, p: join(p, split(m, p)), master, param.astype(BF16)), expected)


def test_what_belongs_to_other_parameters_is_finite():
  x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
  _, held, _, _ = there_and_back(x)
  others = np.arange(1000).astype(np.uint16).view(BF16)
  assert np.all(np.isfinite(run(join, others, held)))


EMPTY = [(0,), (4, 0), (0, 4), (2, 0, 3), (0, 17), (0, 0)]


@pytest.mark.case("B153")
def test_any_shape():
  """One program for arrays of all shapes."""
  shapes = [(), (1,), (7,), (8,), (9,), (3, 17), (2, 3, 8), *EMPTY]
  rng = np.random.default_rng(2)
  numbers_of = [np.asarray(rng.normal(size=shape), np.float32) for shape in shapes]

  @jax.jit
  def each(numbers_of):
    return [(*there_and_back(x)[:3], unpack(pack(x > 0), x)) for x in numbers_of]

  for shape, x, found in zip(shapes, numbers_of, each(numbers_of), strict=True):
    param, held, back, flags = found
    last = shape[-1] if shape else 1
    assert held.remainder.shape == param.shape == shape
    assert held.parity.shape == (*shape[:-1], -(-last // 8))
    assert same(back, x)
    np.testing.assert_array_equal(flags, x > 0)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_the_17th_bits_of_a_sharded_array(devices, axis_type):
  """Where bytes do not divide like the elements, the bits are replicated along the last axis."""
  mesh = jax.make_mesh((4,), ("data",), (axis_type,), devices=devices)
  rng, arrays, placed = np.random.default_rng(4), [], []
  for shape in ((16,), (128,), (8, 20), (4, 16), (0, 16), (0, 32), (8, 0)):
    spec = jax.P(None, "data") if shape[0] % 8 or not shape[0] else jax.P("data")
    arrays.append(rng.normal(size=shape).astype(np.float32))
    placed.append(jax.device_put(arrays[-1], jax.NamedSharding(mesh, spec)))

  @jax.jit
  def each(arrays):
    return [(there_and_back(x), unpack(pack(x > 0), x)) for x in arrays]

  for x, ((param, held, back, _), flags) in zip(arrays, each(placed), strict=True):
    assert same(back, x)
    assert held.remainder.sharding.is_equivalent_to(param.sharding, x.ndim)
    np.testing.assert_array_equal(flags, x > 0)
  (param, held, back, _) = there_and_back(placed[2])  # Not within another jitted function.
  assert same(back, arrays[2])
  assert held.remainder.sharding.is_equivalent_to(param.sharding, 2)
