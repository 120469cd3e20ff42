import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnostics.ranges.exponents import FORMATS, Tally
from tests.diagnostics.ranges import oracle


@pytest.mark.parametrize(
  "dtype", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_counts_are_those_of_numpy(dtype):
  x = oracle.awkward(dtype)
  tally, wide = Tally(), x.astype(np.float64)
  for each in (x[:1000], x[1000:], x[:0]):
    tally.add(each if dtype == "float64" else jnp.asarray(each))
  assert tally.exponents == oracle.exponents(x)
  assert tally.lost == {name: oracle.fates(x, name) for name in FORMATS}
  special = np.sum(wide == 0), np.sum(np.isinf(wide)), np.sum(np.isnan(wide)), 0
  assert (tally.zero, tally.inf, tally.nan, tally.lost_updates) == special
  assert tally.largest == np.max(np.abs(wide[np.isfinite(wide)]))


def test_parts_of_complex_numbers_and_lost_updates():
  tally = Tally()
  tally.add(np.asarray([3 + 0.5j, 0 + 1j], np.complex64), np.asarray([True, False]))
  assert (tally.exponents, tally.zero, tally.lost_updates) == ({1: 1, -1: 1, 0: 1}, 1, 1)
