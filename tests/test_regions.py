"""A module's call under a policy: arguments, results, and what is done where tracing raises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import _regions as regions

HALF = mpjax.Policy.parse("mixed_bfloat16")


@dataclasses.dataclass(frozen=True)
class State:
  tracing: bool = False
  failed: list | None = None
  casting: frozenset = frozenset()
  as_python: frozenset = frozenset()


def test_arguments_are_what_they_are_unless_a_module_is_called_in_its_compute_dtype():
  call = ((jnp.ones(2), jnp.arange(2)), {"y": 1.5})
  assert regions.arguments(call, HALF, False) is call
  args, kwargs = regions.arguments(call, HALF, True)
  assert ([str(x.dtype) for x in args], kwargs) == (["bfloat16", "int32"], {"y": 1.5})
  complex_ = ((jnp.ones(2), jnp.ones(2, "complex64")), {})
  assert regions.arguments(complex_, HALF, True) is complex_
  (x,), _ = regions.arguments(((jnp.ones(2, "bfloat16"),), {}), mpjax.Policy(), False)
  assert x.dtype == "float32"


@pytest.mark.parametrize("traced", [True, False])
def test_results_are_arrays_in_the_dtype_and_all_else_as_it_is(traced):
  out = {"x": jnp.ones(2, "bfloat16"), "n": jnp.arange(2), "name": "coder"}
  new = regions.returned(out, np.dtype("float32"), traced)
  assert new["name"] == "coder"
  assert [str(new[name].dtype) for name in ("x", "n")] == ["float32", "int32"]


def test_the_class_that_raised_is_called_in_its_compute_dtype_and_no_class_twice():
  seen = []

  def attempt(state):
    assert state.tracing
    seen.append(state.casting)
    if int not in state.casting:
      state.failed.append(int)
      raise NotImplementedError("first")
    return "traced"

  assert regions.attempts(attempt, lambda state: None, ((), {}), State(), "", "f") == "traced"
  assert seen == [frozenset(), frozenset({int})]

  def always(state):
    state.failed.append(int)
    raise NotImplementedError(str(len(state.casting)))

  with pytest.raises(NotImplementedError, match="0"):  # The first says what is wrong.
    regions.attempts(always, lambda state: None, ((), {}), State(), "", "f")


def test_what_needs_values_runs_as_python_with_one_warning():
  def attempt(state):
    return jax.jit(lambda x: float(x))(1.0)

  with pytest.warns(UserWarning, match="f: body: expected a body that can be traced") as caught:
    found = regions.attempts(attempt, lambda state: state, ((), {}), State(), "body", "f")
  assert found == State(as_python=frozenset({"body"}))
  assert len(caught) == 1


def test_variables_of_numpy_are_arrays_and_no_constants():
  assert isinstance(regions.array(np.ones(2)), jax.Array)
  assert regions.array("name") == "name"
