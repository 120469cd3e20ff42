"""The script of `tests/strict_user.py`, which `make lint` checks strictly, does what it says."""

import jax.numpy as jnp
import pytest

import mpjax
from tests import strict_user

BATCH = (jnp.ones((3, 4)), jnp.zeros((3, 2)))


def test_it_does_what_it_says():
  assert strict_user.train_linen(BATCH) > 2**10
  assert strict_user.train_step(BATCH).step == 1
  model = strict_user.train_nnx(BATCH)
  assert model.head.kernel.dtype == jnp.float32
  assert "1.0" in strict_user.functions(BATCH)
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    mpjax.Policy.parse("float61")
  assert "float61" in strict_user.part_of(excinfo.value)
