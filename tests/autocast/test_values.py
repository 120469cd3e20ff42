"""What is known of a value: its types, and which numbers survive in half."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._autocast.values import Kind, Settings, constants, is_exact, joined, numbers_of, survives
from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.policy import Policy

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(d) for d in (jnp.bfloat16, "float16", "float32"))
SETTINGS = Settings(policy=Policy(compute_dtype=BFLOAT16), ops=OpLists())


class NotHere(np.ndarray):
  """A number on other processes' devices, as on several hosts: NumPy cannot read it."""

  is_fully_addressable = False


@pytest.mark.parametrize(
  ("number", "bfloat16", "float16"),
  [
    # IEEE half: largest 65504, smallest normal 2^-14. Bfloat16: (2 - 2^-7) 2^127 and 2^-126.
    (0.0, True, True),
    (-0.0, True, True),
    (1.0, True, True),
    (np.inf, True, True),
    (-np.inf, True, True),
    (np.nan, True, True),
    (65504.0, True, True),
    (65505.0, True, False),
    (-65520.0, True, False),
    (2.0**-14, True, True),
    (-(2.0**-14), True, True),
    (2.0**-14 * (1 - 2.0**-11), True, False),
    (1e-7, True, False),
    (-1e-9, True, False),
    ((2 - 2.0**-7) * 2.0**127, True, False),
    (float(np.finfo(np.float32).max), False, False),
    (float(np.finfo(np.float32).min), False, False),
    (2.0**-126, True, False),
    (2.0**-127, False, False),
  ],
)
def test_numbers_that_survive(number, bfloat16, float16):
  assert survives(number, BFLOAT16) == bfloat16
  assert survives(float(np.float32(number)), FLOAT16) == float16


def test_numbers_that_a_dtype_has():
  # Three significant digits in binary, and numbers between, and out of range.
  for number in (0.0, 0.5, -1.25, 100.0, np.inf, 2.0**-14):
    assert is_exact(number, BFLOAT16)
    assert is_exact(number, FLOAT16)
  for number in (0.1, 0.999, 1 - 1e-6, 1e-30):
    assert not is_exact(number, BFLOAT16)
    assert not is_exact(number, FLOAT16)
  assert not is_exact(1e5, FLOAT16)
  assert is_exact(1 + 2.0**-7, BFLOAT16)
  assert not is_exact(1 + 2.0**-8, BFLOAT16)


def test_the_kind_of_a_value():
  data, low, held = Kind(FLOAT32), Kind(FLOAT16), Kind(FLOAT16, held=True)
  carried = Kind(FLOAT16, carried=FLOAT32)
  kinds = (data, low, held, carried)
  assert [k.is_low for k in kinds] == [False, True, True, True]
  assert [k.rests for k in kinds] == [False, True, False, True]
  assert [k.current for k in kinds] == [FLOAT32, FLOAT16, FLOAT32, FLOAT16]
  assert [k.variable for k in kinds] == [FLOAT32, FLOAT16, FLOAT32, FLOAT32]


def test_the_kind_of_one_of_several():
  data, neutral, low = Kind(FLOAT32), Kind(FLOAT32, neutral=True), Kind(FLOAT16)
  held = Kind(FLOAT16, held=True)
  assert joined(low, data, neutral) == data
  assert joined(neutral, low) == low
  assert joined(neutral, held, low) == held
  assert joined(neutral, None) == neutral
  assert joined(None) is None


def test_the_number_of_a_literal_is_known():
  assert numbers_of(np.float32(0.1)) == (float(np.float32(0.1)),)
  # Not equal to itself, it would be another key each time.
  assert numbers_of(np.float32(np.nan)) is None


def test_constant_arrays_are_data_whatever_their_numbers():
  mask, number = np.zeros(4, np.float32), jnp.float32(0.5)
  assert constants([mask, mask + 3, np.int32(3)], SETTINGS) == (Kind(FLOAT32), Kind(FLOAT32), None)
  assert constants([number], SETTINGS) == (Kind(FLOAT32, neutral=True, numbers=(0.5,)),)
  assert constants([NotHere((), np.float32)], SETTINGS) == (Kind(FLOAT32, neutral=True),)
