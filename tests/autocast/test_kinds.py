"""Roles and dtypes of values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._autocast.kinds import (
  Kind,
  Role,
  fits,
  joined,
  kind_of_input,
  kinds_of_constants,
)
from mpjax._autocast.scopes import Settings
from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.active import Region
from mpjax._policy.policy import Policy

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(d) for d in (jnp.bfloat16, "float16", "float32"))


def settings(*, modules: bool) -> Settings:
  return Settings(region=Region(Policy(compute_dtype=BFLOAT16)), ops=OpLists(), modules=modules)


class NotHere(np.ndarray):
  """A number on other processes' devices, as on several hosts: NumPy cannot read it."""

  is_fully_addressable = False


# Numbers.


def test_all_numbers_of_all_operands_have_to_fit():
  mask = Kind(Role.NUMBER, FLOAT32, numbers=frozenset({0.0, -1e9}))
  assert fits([mask, Kind(Role.ACTIVATION, FLOAT16)], BFLOAT16)
  assert not fits([Kind(Role.ACTIVATION, FLOAT16), mask], FLOAT16)


# Roles.


def kind(role: Role, dtype: object = FLOAT32, **fields: object) -> Kind:
  return Kind(role, np.dtype(dtype), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("largest", Role)
def test_a_result_has_the_largest_role(largest):
  for other in Role:
    if other <= largest:
      assert joined(kind(other), kind(largest)).role == largest


def test_inputs_and_activations_decide_the_dtype_then_parameters_then_numbers():
  stored_low = kind(Role.PARAMETER, BFLOAT16)
  for deciding, others, dtype in (
    (kind(Role.ACTIVATION, BFLOAT16), (kind(Role.PARAMETER), kind(Role.NUMBER)), BFLOAT16),
    (kind(Role.ACTIVATION, BFLOAT16), (kind(Role.INPUT),), FLOAT32),
    (kind(Role.ACTIVATION), (kind(Role.ACTIVATION, BFLOAT16),), FLOAT32),
    (kind(Role.INPUT), (stored_low,), FLOAT32),
    (stored_low, (kind(Role.NUMBER),), BFLOAT16),
    (kind(Role.PARAMETER), (stored_low,), FLOAT32),
    (kind(Role.NUMBER), (), FLOAT32),
  ):
    assert joined(deciding, *others).dtype == joined(*others, deciding).dtype == dtype


def test_of_two_low_precision_dtypes_the_order_decides_nothing():
  both = kind(Role.ACTIVATION, BFLOAT16), kind(Role.ACTIVATION, FLOAT16)
  assert joined(*both) == joined(*reversed(both)) == both[0]


def test_a_value_computed_from_weights_and_numbers_is_a_weight():
  weight = kind(Role.PARAMETER, weight=True)
  assert joined(weight, kind(Role.NUMBER)).weight
  assert not joined(weight, kind(Role.PARAMETER)).weight
  assert not joined(kind(Role.NUMBER)).weight


def test_an_argument_in_low_precision_is_an_activation():
  assert kind_of_input(FLOAT32) == kind(Role.INPUT)
  assert kind_of_input(FLOAT16) == kind(Role.ACTIVATION, FLOAT16)


# Constants: arrays that a function closes over.


def constants(*values: object, modules: bool = False) -> tuple[Kind | None, ...]:
  return kinds_of_constants(values, settings(modules=modules))


def test_an_array_is_a_parameter_of_a_function_and_an_input_of_a_module():
  array = np.zeros(4, np.float32)
  assert constants(array) == (kind(Role.PARAMETER, weight=True),)
  assert constants(array, modules=True) == (kind(Role.INPUT),)
  assert constants(array.astype(BFLOAT16), modules=True) == (kind(Role.ACTIVATION, BFLOAT16),)
  assert constants(np.int32(3), np.arange(3)) == (None, None)


@pytest.mark.parametrize("modules", [False, True])
def test_a_scalar_is_a_number_wherever_it_is(modules):
  known, unknown = constants(jnp.float32(0.5), NotHere((), np.float32), modules=modules)
  assert known == kind(Role.NUMBER, numbers=frozenset({0.5}))
  assert unknown == kind(Role.NUMBER)


def test_a_traced_scalar_is_a_parameter():
  found = []
  jax.make_jaxpr(lambda x: found.extend(constants(x)))(1.0)
  assert found == [kind(Role.PARAMETER, weight=True)]
