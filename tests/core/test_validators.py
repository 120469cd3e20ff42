"""Each check lets through what it should, as it came, and names what it refuses."""

import fractions
from functools import partial

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


def check_named(builtin, call, expected, got, fix):
  check_refused(call, where=CALL, expected=expected, got=got, fix=fix, builtin=builtin)


def test_another_type_is_named():
  check = partial(check_named, TypeError)
  for value in (1, None, "True", np.bool_(True)):
    check(partial(check_flag, value, CALL), FLAG, typed(value), "True or False")
  for value in (True, 2.0, "2", None, np.ones((), int), jnp.asarray(2)):
    call = partial(check_int, value, CALL, least=2, fix="3 is a good number.")
    check(call, INT, typed(value), "Pass a Python int.")
    check(partial(call, fix_type="Pass it."), INT, typed(value), "Pass it.")
  for value in (True, "2", None, 1j, np.ones(()), jnp.ones(())):
    check(partial(check_number, value, CALL, **WORDS), "this", typed(value), "Do that.")
  check(
    partial(check_type, [0] * 1000, (dict, tuple), CALL, **WORDS), "this", "a list.", "Do that."
  )
  check(partial(check_callable, 3, CALL, **WORDS), "this", "3", "Do that.")
  with pytest.raises(TypeError, match="Tracer"):
    jax.jit(lambda n: check_int(n, CALL, least=0, fix="Do that."))(3)


def test_another_value_is_named():
  check = partial(check_named, ValueError)
  for value in (1, 6, -(10**30), np.int64(0)):
    call = partial(check_int, value, CALL, least=2, most=5, fix="Do that.")
    check(call, f"{INT} and at most 5", f"{value}.", "Do")
    check(partial(call, expected="a few"), "a few", f"{value}.", "Do")
  check(partial(check_value, "x", False, CALL, **WORDS), "this", "'x'", "Do that.")
  for value in ("nearst", None, 3):
    call = partial(check_choice, value, CHOICES, CALL)
    check(call, "'nearest' or 'stochastic'", repr(value), "Did you mean 'nearest' or")
  call = partial(check_scalar, jnp.ones((1, 2)), CALL, **WORDS)
  check(call, "this", "an array of shape (1, 2)", "Do that.")
