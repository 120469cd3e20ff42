"""The `dtype` field of modules: which is set, and to what; and outputs that nothing can cast."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._core.module_dtype import dtype_field, plain_attribute

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


class NoDtype(nn.Module):
  features: int = 2


class DtypeProperty(nn.Module):
  """Its dtype is not a field that could be set."""

  @property
  def dtype(self):
    return jnp.bfloat16


class HasDtype(nn.Module):
  dtype: Any = None
  param_dtype: Any = jnp.float32


class Plain:
  """Not a dataclass: what it has are attributes."""

  def __init__(self, dtype, param_dtype="float32"):
    self.dtype, self.param_dtype = dtype, param_dtype


@dataclasses.dataclass
class Computed:
  """Declares a `dtype` that nobody gives it."""

  features: int = 3
  dtype: Any = dataclasses.field(default=jnp.float32, init=False)


NOT_SET = {
  "not given": Computed(),
  "none": NoDtype(),
  "property": DtypeProperty(),
  "integer": HasDtype(jnp.int32),
  "complex": HasDtype(jnp.complex64),
  "no dtype": HasDtype("anything"),
  "complex parameters": HasDtype(jnp.bfloat16, jnp.complex64),
  "integer parameters": HasDtype(jnp.bfloat16, jnp.int8),
  "integer attribute": Plain(jnp.int32),
}


@pytest.mark.case("B099", "A108")
def test_a_dtype_that_means_what_it_says_is_not_set():
  for name, module in NOT_SET.items():
    for dtype in (BF16, F32):
      for always in (True, False):
        assert dtype_field(module, dtype, always=always) == {}, name


@pytest.mark.parametrize("make", [HasDtype, Plain])
def test_the_compute_dtype_is_set_where_a_module_is_called_in_it_and_else_float32_for_low(make):
  for own in (None, jnp.float16, jnp.float32, np.dtype("float32")):
    # Code compares with `is jnp.bfloat16`.
    assert dtype_field(make(own), BF16, always=True)["dtype"] is jnp.bfloat16
  assert dtype_field(make("float32"), BF16, always=True) == {"dtype": "bfloat16"}
  for own in (None, jnp.float32, "float32"):
    assert dtype_field(make(own), F32, always=False) == {}
  for own in (jnp.float16, jnp.bfloat16):
    assert dtype_field(make(own), F32, always=False) == {"dtype": jnp.float32}
  assert dtype_field(make("bfloat16"), F32, always=False) == {"dtype": "float32"}


def test_an_attribute_is_asked_for_without_running_code():
  class Runs(HasDtype):
    @property
    def computed(self):
      raise RuntimeError("ran")

  module = Runs(jnp.float16)
  assert plain_attribute(module, "computed") is None
  assert plain_attribute(module, "computed", 3) == 3
  assert plain_attribute(module, "dtype") is jnp.float16
  assert plain_attribute(module, "missing", "default") == "default"
