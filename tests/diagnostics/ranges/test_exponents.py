import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnostics.ranges import exponents
from tests.diagnostics.ranges import oracle


def count(x, lost=None, *, times=1):
  on = exponents.grid([x.dtype])

  @jax.jit
  def counts(x):
    state = exponents.no_counts(2, on)
    for _ in range(times):
      state = exponents.counted(state, 1, x, on, lost)
    return exponents.settled(state, on)

  numbers, largest = exponents.as_integers(counts(x))
  assert not numbers[0].any()
  return numbers[1], largest[1], on


@pytest.mark.parametrize(
  "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_counts_are_those_of_numpy(dtype):
  x = oracle.awkward(dtype)
  numbers, largest, on = count(jnp.asarray(x))
  wide = x.astype(np.float64)
  assert exponents.exponents_of(numbers, on) == oracle.exponents(x)
  for name in exponents.FORMATS:
    assert exponents.fates_of(numbers, on, name) == oracle.fates(x, name), name
  inf, nan, lost = numbers[len(on.starts) :]
  assert (numbers[0], inf, nan, lost) == (
    np.sum(wide == 0),
    np.sum(np.isinf(wide)),
    np.sum(np.isnan(wide)),
    0,
  )
  assert largest == np.max(np.abs(wide[np.isfinite(wide)]))


def test_float64_and_complex():
  with jax.enable_x64(True):
    x = oracle.awkward("float64")
    numbers, _, on = count(jnp.asarray(x))
    assert exponents.exponents_of(numbers, on) == oracle.exponents(x)
    for name in ("float16", "bfloat16"):
      assert exponents.fates_of(numbers, on, name) == oracle.fates(x, name)
  z = np.asarray([3 + 0.5j, 0 + 1j], np.complex64)
  numbers, _, on = count(jnp.asarray(z))
  assert exponents.exponents_of(numbers, on) == {1: 1, -1: 1, 0: 1}
  assert numbers[0] == 1


def test_many_numbers_at_once_and_together():
  x = jax.random.normal(jax.random.key(0), (70_000,))
  numbers, _, on = count(x, times=2)
  assert exponents.exponents_of(numbers, on) == {e: 2 * n for e, n in oracle.exponents(x).items()}
  few = x[:60_000]
  numbers, _, on = count(few, times=6)
  assert exponents.exponents_of(numbers, on) == {e: 6 * n for e, n in oracle.exponents(few).items()}


def test_counts_beyond_32_bits():
  on = exponents.grid([np.dtype(np.float32)])
  state = exponents.no_counts(1, on)
  full = state._replace(low=state.low + np.uint32(2**32 - 1))
  numbers, _ = exponents.as_integers(exponents.added(full, full))
  assert (numbers == 2 * (2**32 - 1)).all()
  one = exponents.settled(exponents.counted(full, 0, jnp.ones(()), on), on)
  numbers, _ = exponents.as_integers(one)
  assert numbers.max() == 2**32
  assert numbers.min() == 2**32 - 1


def test_no_numbers():
  numbers, largest, _ = count(jnp.zeros((0, 3)))
  assert not numbers.any()
  assert largest == 0
