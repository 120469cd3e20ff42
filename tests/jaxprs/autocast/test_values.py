"""What is known of a value: its types, and which numbers survive in half."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from mpjax._core.rules import Rule
from mpjax._jaxprs.autocast.values import (
  FLOATS,
  HALVES,
  Kind,
  Settings,
  Value,
  is_neutral_constant,
  literal_value,
  survives,
)
from mpjax._jaxprs.op_lists import OpLists

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(d) for d in (jnp.bfloat16, "float16", "float32"))


def literal(number):
  """Returns a float32 literal as JAX writes it."""
  program = jax.make_jaxpr(lambda x: x * np.float32(number))(jnp.float32(1))
  (found,) = [atom for atom in program.eqns[0].invars if isinstance(atom, Literal)]
  return found


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
  assert survives(np.float32(number), FLOAT16) == float16
  # A literal is neutral just then.
  for dtype, want in ((BFLOAT16, bfloat16), (FLOAT16, float16)):
    value = literal_value(literal(number), dtype)
    assert (value.dtype, value.neutral) == (FLOAT32, want)


def test_what_survives_has_its_relative_precision_in_half():
  for number, dtype in itertools.product([*np.logspace(-6, 38, 23), 3e-5, 0.1, 1 / 3], HALVES):
    with np.errstate(over="ignore"):
      rounded = float(np.asarray(number, dtype))
    precise = abs(rounded - number) <= number * 2.0 ** (-9 if dtype == BFLOAT16 else -12) * 2
    assert survives(number, dtype) == precise, (number, dtype)


def test_the_kind_of_a_value():
  value = Value(literal(1.0), FLOAT32, neutral=True)
  assert value.kind == Kind(FLOAT32, True) == (FLOAT32, True, None, False)
  assert Kind(FLOAT16) == Kind(FLOAT16, False) != Kind(FLOAT16, True)
  assert (value.held, value.once) == (FLOAT32, True)
  # It may be held in one dtype and count as another, where the cast is still to come.
  assert Value(literal(1.0), FLOAT32, held=FLOAT16).kind == Kind(FLOAT32)


def test_the_types_that_count():
  assert {BFLOAT16, FLOAT16} == HALVES
  assert HALVES | {FLOAT32} == FLOATS
  assert np.dtype("float64") not in FLOATS
  assert jnp.dtype("float8_e4m3fn") not in FLOATS


def test_settings_are_keys_of_caches():
  def make(**other):
    given = {"compute": BFLOAT16, "ops": OpLists(), "rules": (Rule(None, path="a"),), **other}
    return Settings(**given)

  assert hash(make()) == hash(make())
  assert make() == make()
  for other in (
    {"compute": FLOAT16},
    {"ops": OpLists().replace(half=["exp"])},
    {"rules": ()},
    {"rules": (Rule("float32", path="a"),)},
    {"weight_grads": FLOAT32},
  ):
    assert make(**other) != make()


class NotHere:
  """An array of which this process has a part, as on several hosts: NumPy cannot read it."""

  ndim, size, shape, dtype, is_fully_addressable = 1, 2, (2,), np.dtype("float32"), False

  def __array__(self, *args, **kwargs):
    raise RuntimeError("spans devices that are not addressable")


def test_arrays_that_are_elsewhere_or_very_large_are_not_looked_at():
  mask = np.zeros(4, np.float32)
  assert is_neutral_constant(mask, *HALVES)
  assert not is_neutral_constant(NotHere(), *HALVES)
  large = np.broadcast_to(np.float32(1), (2**25,))  # One number, in fact.
  assert not is_neutral_constant(large, *HALVES)
