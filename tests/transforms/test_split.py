"""A float32 number as a bfloat16 parameter and an int16 remainder, for all bit patterns."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.transforms._split import bounded, join, split, stored, update_to
from tests.programs import bits, run

BF16 = np.dtype(jnp.bfloat16)
ALL = np.arange(2**16, dtype=np.uint16).view(BF16)
MOST = 0x7F7F7FFF
"""The largest number that rounds to a finite bfloat16."""


def sizes(x):
  """Returns the bits of float32 numbers without their signs, in 64 bits."""
  return (np.asarray(x, np.float32).view(np.uint32) & 0x7FFFFFFF).astype(np.int64)


def number(size, sign):
  return (size.astype(np.uint32) | sign << np.uint32(31)).view(np.float32)


def signs(x):
  return np.signbit(x).astype(np.uint32)


def same(a, b):
  """Whether the bits are equal, or both are NaN."""
  a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
  return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def there_and_back(x):
  param = stored(bounded(x), jnp.zeros((), BF16))
  rest = split(bounded(x), param)
  return stored(x, param), rest, join(param, rest), bounded(x)


def test_every_parameter_with_remainders_at_the_edges():
  # All upper 16 bits with lower ones at ties and around, and numbers from anywhere.
  low = np.uint32([0, 1, 2, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
  upper = np.arange(2**16, dtype=np.uint32)[:, None] << np.uint32(16)
  anywhere = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
  x = np.concatenate([(upper | low).ravel(), anywhere]).view(np.float32)
  param, rest, back, master = jax.device_get(run(there_and_back, x))
  finite = np.isfinite(x)
  size = np.where(finite, np.minimum(sizes(x), MOST), sizes(x))
  nearest = (size + 0x8000) >> 16
  assert same(master, number(size, signs(x)))
  assert same(back, master)
  assert same(param[~np.isnan(x)], number(nearest << 16, signs(x))[~np.isnan(x)])
  assert np.all(np.isnan(param[np.isnan(x)].astype(np.float32)))
  assert rest.dtype == np.int16
  np.testing.assert_array_equal(rest, np.where(finite, size - (nearest << 16), 0))


def test_any_parameter_with_any_remainder():
  # Stale ones too: a parameter that was set from outside is no NaN with the remainder of another.
  #
  # Nor is it of the other sign.
  rest = np.int16([-32768, -32767, -5, -1, 0, 1, 32766, 32767])[:, None]
  param = np.broadcast_to(ALL, (8, 2**16))
  wide = param.astype(np.float32)
  size = np.clip(sizes(wide) + rest, 0, MOST)
  expected = np.where(np.isfinite(wide), number(size, signs(wide)), wide)
  assert same(run(join, param, np.broadcast_to(rest, param.shape)), expected)


def test_the_remainder_is_that_to_the_parameter_which_is_committed():
  # As a compiler gives that computes a master twice: at a tie they are an ulp apart.
  #
  # In 16 bits that wrap around, the master would be an ulp of bfloat16 away.
  tie = (np.arange(2**15 - 2**8, dtype=np.uint32) << np.uint32(16) | 0x8000).view(np.float32)
  below = (tie.view(np.uint32) - np.uint32(1)).view(np.float32)
  zero = np.zeros((), BF16)
  back = run(lambda m, p: join(stored(p, zero), split(m, stored(p, zero))), below, tie)
  finite = np.isfinite(stored(tie, zero).astype(np.float32)) & (sizes(tie) < MOST)
  assert same(np.asarray(back)[finite], tie[finite])
  back = run(lambda m, p: join(stored(p, zero), split(m, stored(p, zero))), tie, below)
  assert same(back, below)


def test_where_no_remainder_leads_to_the_master_it_is_the_nearest():
  cases = [
    (1.37e-6, 0.0, 32767 * 2.0**-149),  # The largest number that rounds to 0.
    (-1.37e-6, 0.0, 0.0),
    (-0.0, 0.0, 0.0),
    (1e30, 1.0, 1 + 2.0**-8 - 2.0**-23),
    (0.1, 1.0, 1 - 2.0**-8 + 2.0**-9),
    (5.0, -np.inf, -np.inf),
    (5.0, np.nan, np.nan),
  ]
  master, param, expected = np.asarray(cases, np.float32).T.copy()
  assert same(run(lambda m, p: join(p, split(m, p)), master, param.astype(BF16)), expected)


def test_an_update_leads_to_the_rounded_master():
  # -0.0 changes no bit of one that is there.
  rng = np.random.default_rng(1)
  param, goal = (rng.uniform(0.5, 2.0, 2**16).astype(BF16) for _ in range(2))
  master = goal.astype(np.float32) * np.float32(1 + 2.0**-10)
  update = np.asarray(run(update_to, master, param))
  assert bits((param.astype(np.float32) + update).astype(BF16)) == bits(goal)
  finite = ALL[np.isfinite(ALL.astype(np.float32))]
  update = np.asarray(run(update_to, finite.astype(np.float32), finite))
  assert not np.any(update)
  assert np.all(np.signbit(update))
  # What is left of a step that brings a parameter too near to 0 is a bfloat16 number all the same.
  far = param.astype(np.float32) * 2.0 ** rng.integers(-40, 40, 2**16).astype(np.float32)
  total = param.astype(np.float32) + np.asarray(run(update_to, far, param))
  assert bits(total.astype(BF16).astype(np.float32)) == bits(total)
