import jax
import jax.numpy as jnp
import pytest

import mpjax
from tests.diagnostics.nonfinite.faults import FAULTS
from tests.errors import check_error

pytestmark = [
  pytest.mark.standard_promotion,
  # -1e9 in float16, which is the fault.
  pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


@pytest.mark.parametrize("name", FAULTS)
def test_the_planted_fault_is_found(name):
  wanted = FAULTS[name]
  found = mpjax.find_nonfinite(wanted.fn)(*wanted.args)
  assert bool(found) == (wanted.operation is not None), found
  assert found.operation == wanted.operation
  if not found:
    return
  assert found.path == wanted.path
  assert found.direction == wanted.direction
  assert found.iteration == wanted.iteration
  assert found.verdict == wanted.verdict
  assert found.finite_at == wanted.finite_at
  if wanted.index is not None:
    assert found.index == wanted.index
  if wanted.device is not None:
    assert found.device == wanted.device


def test_no_argument_is_deleted():
  x = jnp.asarray([0.0, 1.0])
  mpjax.find_nonfinite(jax.jit(jnp.log, donate_argnums=0))(x)
  assert not x.is_deleted()


def test_a_function_is_expected():
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    mpjax.find_nonfinite(jnp.ones(3))
  check_error(
    excinfo,
    where="mpjax.find_nonfinite(fn)",
    expected="a function that JAX can trace",
    got="Array",
    fix="mpjax.find_nonfinite(step)(state, batch)",
  )
