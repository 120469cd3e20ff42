"""Values of the jaxpr that is being written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._autocast.kinds import Kind, Role
from mpjax._autocast.numbers import UNKNOWN
from mpjax._autocast.values import FloatValue

BFLOAT16, FLOAT32 = np.dtype(jnp.bfloat16), np.dtype("float32")


def first_equation(fun, *args):
  return jax.make_jaxpr(fun)(*args).eqns[0]


def filled(x):
  return jax.lax.broadcast(1.5, (4,)) + x


FILLED = first_equation(filled, jnp.ones(4))


@pytest.mark.parametrize(("dtype", "low"), [(BFLOAT16, True), (FLOAT32, False)])
def test_a_value_in_low_precision_may_be_in_a_float32_variable(dtype, low):
  (variable,) = FILLED.outvars
  assert FloatValue(variable, Kind(Role.ACTIVATION, dtype)).is_low_in_float32 == low


def test_the_number_of_a_literal_and_of_an_array_that_is_filled_with_one():
  number = Kind(Role.NUMBER, FLOAT32, numbers=frozenset({1.5}))
  literal, (array,) = FILLED.invars[0], FILLED.outvars
  assert FloatValue(literal, number).number == 1.5
  assert FloatValue(array, number, producer=FILLED).number == 1.5
  # It cannot be written in another dtype: it is an array of unknown making, or one of two numbers.
  assert FloatValue(array, number).number is None
  assert (
    FloatValue(array, number._replace(numbers=frozenset({0.0, 1.0})), producer=FILLED).number
    is None
  )
  assert FloatValue(literal, number._replace(numbers=UNKNOWN)).number is None
