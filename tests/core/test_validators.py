"""Each check lets through what it should, as it came, and names what it refuses."""

import fractions

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
from tests.errors import check_error

CALL = "mpjax.something(argument)"
WORDS = {"expected": "this", "fix": "Do that."}


def test_a_type():
  state = {"a": 1}
  assert check_type(state, dict, CALL, **WORDS) is state
  assert check_type(None, (float, type(None)), CALL, **WORDS) is None
  with pytest.raises(TypeError) as error:
    check_type([0] * 1000, (dict, tuple), CALL, **WORDS)
  check_error(error, where=CALL, expected="this", got="a list.", fix="Do that.", builtin=TypeError)


def test_a_flag():
  assert check_flag(True, CALL) is True
  assert check_flag(False, CALL) is False


@pytest.mark.parametrize("value", [1, None, "True", np.bool_(True)])
def test_no_flag(value):
  with pytest.raises(TypeError) as error:
    check_flag(value, CALL)
  got = f"{value!r} of type {type(value).__name__}"
  check_error(error, where=CALL, expected="a bool", got=got, fix="True or False", builtin=TypeError)


@pytest.mark.parametrize("value", [2, 5, np.int64(3), np.uint8(4)])
def test_an_integer(value):
  found = check_int(value, CALL, least=2, most=5, fix="Do that.")
  assert type(found) is int
  assert found == value
  assert check_int(10**6, CALL, least=2, fix="Do that.") == 10**6


@pytest.mark.parametrize("value", [True, 2.0, "2", None, np.ones((), int), jnp.asarray(2)])
def test_no_integer(value):
  with pytest.raises(TypeError) as error:
    check_int(value, CALL, least=2, fix="3 is a good number.")
  got = f"{value!r} of type {type(value).__name__}"
  expected, fix = "an integer, at least 2", "Pass a Python int."
  check_error(error, where=CALL, expected=expected, got=got, fix=fix, builtin=TypeError)
  with pytest.raises(TypeError) as error:
    check_int(value, CALL, least=2, fix="3 is a good number.", fix_type="Pass how many.")
  assert error.value.fix == "Pass how many."


def test_a_traced_integer():
  with pytest.raises(TypeError, match="Tracer"):
    jax.jit(lambda n: check_int(n, CALL, least=0, fix="Do that."))(3)


@pytest.mark.parametrize("value", [1, 6, -(10**30), np.int64(0)])
def test_an_integer_out_of_range(value):
  with pytest.raises(ValueError) as error:
    check_int(value, CALL, least=2, most=5, fix="Do that.")
  expected = "an integer, at least 2 and at most 5"
  check_error(error, where=CALL, expected=expected, got=f"{value}.", fix="Do", builtin=ValueError)
  with pytest.raises(ValueError) as error:
    check_int(value, CALL, least=2, most=5, expected="a few", fix="Do that.")
  check_error(error, where=CALL, expected="a few", got=f"{value}.", fix="Do", builtin=ValueError)


@pytest.mark.parametrize("value", [2, 0.5, np.float32(0.5), np.int8(3), fractions.Fraction(1, 2)])
def test_a_number(value):
  assert check_number(value, CALL, **WORDS) is value


@pytest.mark.parametrize("value", [True, "2", None, 1j, np.ones(()), jnp.ones(())])
def test_no_number(value):
  with pytest.raises(TypeError) as error:
    check_number(value, CALL, **WORDS)
  got = f"{value!r} of type {type(value).__name__}"
  check_error(error, where=CALL, expected="this", got=got, fix="Do that.", builtin=TypeError)


def test_a_value():
  check_value(0.5, True, CALL, **WORDS)
  with pytest.raises(ValueError) as error:
    check_value("x", False, CALL, **WORDS)
  check_error(error, where=CALL, expected="this", got="'x'", fix="Do that.", builtin=ValueError)


def test_a_choice():
  check_choice("nearest", ("nearest", "stochastic"), CALL)


@pytest.mark.parametrize("value", ["nearst", None, 3])
def test_no_choice(value):
  with pytest.raises(ValueError) as error:
    check_choice(value, ("nearest", "stochastic"), CALL)
  check_error(
    error,
    where=CALL,
    expected="'nearest' or 'stochastic'",
    got=repr(value),
    fix="Did you mean 'nearest' or",
    builtin=ValueError,
  )


def test_a_function():
  assert check_callable(len, CALL, **WORDS) is len
  with pytest.raises(TypeError) as error:
    check_callable(3, CALL, **WORDS)  # type: ignore[type-var]
  got = "3 of type int"
  check_error(error, where=CALL, expected="this", got=got, fix="Do that.", builtin=TypeError)


@pytest.mark.parametrize("x", [1.0, np.float32(1), jnp.ones(()), jax.ShapeDtypeStruct((), "f4")])
def test_a_scalar(x):
  check_scalar(x, CALL, **WORDS)


def test_no_scalar():
  with pytest.raises(ValueError) as error:
    check_scalar(jnp.ones((1, 2)), CALL, **WORDS)
  got = "an array of shape (1, 2)"
  check_error(error, where=CALL, expected="this", got=got, fix="Do that.", builtin=ValueError)
