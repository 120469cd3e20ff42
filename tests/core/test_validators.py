"""Each check lets through what it should, as it came, and names what it refuses."""

import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._core.validators import (
  check_callable,
  check_choice,
  check_flag,
  check_int,
  check_number,
  check_scalar,
  check_type,
  check_value,
)
from tests.errors import check_refused

CALL = "mpjax.something(argument)"
WORDS = {"expected": "this", "fix": "Do that."}


FLAG, INT = "a bool", "an integer, at least 2"
CHOICES = ("nearest", "stochastic")


def test_what_is_allowed_comes_back_as_it_came():
  state = {"a": 1}
  assert check_type(state, dict, CALL, **WORDS) is state
  assert check_type(None, (float, type(None)), CALL, **WORDS) is None
  assert check_flag(True, CALL) is True
  assert check_flag(False, CALL) is False
  for value in (2, 5, np.int64(3), np.uint8(4)):
    found = check_int(value, CALL, least=2, most=5, fix="Do that.")
    assert type(found) is int
    assert found == value
  assert check_int(10**6, CALL, least=2, fix="Do that.") == 10**6
  for number in (2, 0.5, np.float32(0.5), np.int8(3), fractions.Fraction(1, 2)):
    assert check_number(number, CALL, **WORDS) is number
  check_value(0.5, True, CALL, **WORDS)
  check_choice("nearest", CHOICES, CALL)
  assert check_callable(len, CALL, **WORDS) is len
  for x in (1.0, np.float32(1), jnp.ones(()), jax.ShapeDtypeStruct((), "f4")):
    check_scalar(x, CALL, **WORDS)


def typed(value):
  return f"{value!r} of type {type(value).__name__}"


# The check, what was expected, what came, what to do.
TYPE_ERRORS = [
  (lambda: check_type([0] * 1000, (dict, tuple), CALL, **WORDS), "this", "a list.", "Do that."),
  *(
    (functools.partial(check_flag, value, CALL), FLAG, typed(value), "True or False")
    for value in (1, None, "True", np.bool_(True))
  ),
  *(
    (
      functools.partial(check_int, value, CALL, least=2, fix="3 is a good number.", **options),
      *(INT, typed(value), fix),
    )
    for value in (True, 2.0, "2", None, np.ones((), int), jnp.asarray(2))
    for options, fix in [({}, "Pass a Python int."), ({"fix_type": "Pass it."}, "Pass it.")]
  ),
  *(
    (functools.partial(check_number, value, CALL, **WORDS), "this", typed(value), "Do that.")
    for value in (True, "2", None, 1j, np.ones(()), jnp.ones(()))
  ),
  (lambda: check_callable(3, CALL, **WORDS), "this", "3", "Do that."),
]
VALUE_ERRORS = [
  *(
    (
      functools.partial(check_int, value, CALL, least=2, most=5, fix="Do that.", **options),
      *(expected, f"{value}.", "Do"),
    )
    for value in (1, 6, -(10**30), np.int64(0))
    for options, expected in [({}, f"{INT} and at most 5"), ({"expected": "a few"}, "a few")]
  ),
  (lambda: check_value("x", False, CALL, **WORDS), "this", "'x'", "Do that."),
  *(
    (
      functools.partial(check_choice, value, CHOICES, CALL),
      *("'nearest' or 'stochastic'", repr(value), "Did you mean 'nearest' or"),
    )
    for value in ("nearst", None, 3)
  ),
  (
    lambda: check_scalar(jnp.ones((1, 2)), CALL, **WORDS),
    *("this", "an array of shape (1, 2)", "Do that."),
  ),
]


@pytest.mark.parametrize(
  ("errors", "builtin"), [(TYPE_ERRORS, TypeError), (VALUE_ERRORS, ValueError)]
)
def test_what_is_not_allowed_is_named(errors, builtin):
  for call, expected, got, fix in errors:
    check_refused(call, where=CALL, expected=expected, got=got, fix=fix, builtin=builtin)


def test_a_traced_integer():
  with pytest.raises(TypeError, match="Tracer"):
    jax.jit(lambda n: check_int(n, CALL, least=0, fix="Do that."))(3)
