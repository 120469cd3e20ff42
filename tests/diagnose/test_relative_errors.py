import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnose.relative_errors import norm_of, relative_error, relative_errors


@pytest.mark.parametrize(
  ("found", "exact", "error"),
  [
    ([3.0, 4.0], [3.0, 4.0], 0.0),
    ([3.0, 4.5], [3.0, 4.0], 0.1),
    ([0.0, 0.0], [0.0, 0.0], 0.0),
    ([1.0, 0.0], [0.0, 0.0], np.inf),
    ([np.inf, 4.0], [3.0, 4.0], np.inf),
    ([3.0, 4.0], [np.nan, 4.0], np.inf),
    ([-np.inf, 4.0], [-np.inf, 4.0], 0.0),  # As in a mask.
    ([np.nan, 4.4], [np.nan, 4.0], 0.1),
    ([3e38, 4.0], [3e38, 4.0], 0.0),
    ([3.0 + 1j, 4.0], [3.0, 4.0], 0.2),
  ],
)
def test_relative_errors(found, exact, error):
  assert relative_error([(np.asarray(found), np.asarray(exact))]) == pytest.approx(error)


def test_a_relative_error_is_of_all_arrays_together_and_of_any_size():
  pairs = [(np.float32([1.5e38, 0]), np.float32([0, 2e38])), (jnp.zeros(3), jnp.zeros(3))]
  assert relative_error(pairs) == pytest.approx(5 / 4)
  # Differences of float16 numbers whose squares underflow and overflow it.
  tiny = (np.float16([6e-8, 60000]), np.float16([0, 60000]))
  assert relative_error([tiny]) == pytest.approx(6e-8 / 60000, rel=0.01)


def test_iterations_have_errors_of_their_own():
  found, exact = np.asarray([[3.0, 4.5], [1.0, 0.0]]), np.asarray([[3.0, 4.0], [0.0, 0.0]])
  errors = relative_errors([(found, exact)], lead=1)
  assert errors.values.tolist() == [pytest.approx(0.1), np.inf]
  assert errors.of_zero.tolist() == [False, True]


def test_a_norm_is_of_all_arrays_together():
  assert norm_of([np.asarray([3, 4j]), np.float16(12)]) == 13
  assert norm_of([np.float32([1.5e38]), np.float32([2e38])]) == pytest.approx(2.5e38)
