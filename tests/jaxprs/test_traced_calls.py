"""The outermost call under a policy: what is done where tracing raises."""

import jax
import numpy as np
import pytest

from mpjax._core.active import Active
from mpjax._jaxprs import traced_calls


def test_the_class_that_raised_is_called_in_its_compute_dtype_and_no_class_twice():
  seen = []

  def attempt(state):
    assert state.tracing
    seen.append(state.casting)
    if int not in state.casting:
      state.failed.append(int)
      raise NotImplementedError("first")
    return "traced"

  assert (
    traced_calls.attempts(attempt, lambda state: None, Active(), "", "f", LookupError) == "traced"
  )
  assert seen == [frozenset(), frozenset({int})]

  # A class that is defined in the call is another one each time.
  for raising in (lambda: int, lambda: type("Local", (), {})):

    def always(state, raising=raising):
      state.failed.append(raising())
      raise NotImplementedError(str(len(state.casting)))

    with pytest.raises(NotImplementedError, match="0"):  # The first says what is wrong.
      traced_calls.attempts(always, lambda state: None, Active(), "", "f", LookupError)


def test_what_needs_values_runs_as_python_with_one_warning():
  def attempt(state):
    return jax.jit(lambda x: float(x))(1.0)

  with pytest.warns(UserWarning, match="f: body: expected a body that can be traced") as caught:
    found = traced_calls.attempts(attempt, lambda state: state, Active(), "body", "f", LookupError)
  assert found == Active(as_python=frozenset({"body"}))
  assert len(caught) == 1


def test_variables_of_numpy_are_arrays_and_no_constants():
  assert isinstance(traced_calls.array(np.ones(2)), jax.Array)
  assert traced_calls.array("name") == "name"
