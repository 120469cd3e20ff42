"""The script of `tests/strict_user.py`, which `make lint` checks strictly, does what it says."""

import jax.numpy as jnp
import pytest

import mpjax
from tests import strict_user


def test_the_script_trains_and_reads_errors():
  batch = jnp.ones((3, 4)), jnp.zeros((3, 2))
  assert strict_user.train_linen(batch) > 2**10
  assert strict_user.train_step(batch).step == 1
  assert strict_user.train_nnx(batch).head.kernel.dtype == jnp.float32
  assert "1.0" in strict_user.functions(batch)
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    mpjax.Policy.parse("float61")
  assert "float61" in strict_user.part_of(excinfo.value)
