"""The `dtype` field of modules: which is set, and to what; and outputs that nothing can cast."""

import dataclasses
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax._core.module_dtype import dtype_field, plain_attribute, warn_of_uncast

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
@pytest.mark.parametrize("module", NOT_SET.values(), ids=NOT_SET)
@pytest.mark.parametrize("always", [True, False])
def test_a_dtype_that_means_what_it_says_is_not_set(module, always):
  assert dtype_field(module, BF16, always=always) == {}
  assert dtype_field(module, F32, always=always) == {}


@pytest.mark.parametrize("make", [HasDtype, Plain])
@pytest.mark.parametrize("own", [None, jnp.float16, jnp.float32, np.dtype("float32")], ids=str)
def test_the_compute_dtype_is_always_set_where_a_module_is_called_in_it(make, own):
  # Code compares with `is jnp.bfloat16`.
  assert dtype_field(make(own), BF16, always=True)["dtype"] is jnp.bfloat16
  assert dtype_field(make("float32"), BF16, always=True) == {"dtype": "bfloat16"}


@pytest.mark.parametrize("make", [HasDtype, Plain])
@pytest.mark.parametrize(
  ("own", "wanted"),
  [
    (None, {}),
    (jnp.float32, {}),
    ("float32", {}),
    (jnp.float16, {"dtype": jnp.float32}),
    (jnp.bfloat16, {"dtype": jnp.float32}),
    ("bfloat16", {"dtype": "float32"}),
  ],
  ids=["unset", "float32", "name", "float16", "bfloat16", "half by name"],
)
def test_else_only_low_precision_gives_way_to_float32(make, own, wanted):
  assert dtype_field(make(own), F32, always=False) == wanted


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


@dataclasses.dataclass
class Prediction:
  """No tree to JAX."""

  logits: Any
  label: str = "cat"


HALF, FULL = jnp.ones(2, BF16), jnp.ones(2)


@pytest.mark.parametrize(
  ("outputs", "kept"),
  [
    (Prediction(HALF), "logits stay in bfloat16"),
    ({"a": [Prediction(HALF, FULL)]}, "logits stay in bfloat16"),
    (Prediction(HALF, HALF), "logits, label stay in bfloat16"),
  ],
  ids=["object", "in a tree", "two"],
)
def test_arrays_in_an_output_that_is_no_tree_are_warned_of(outputs, kept):
  with pytest.warns(UserWarning, match=f"of which {kept}") as record:
    warn_of_uncast(HasDtype(), outputs, F32)
  text = str(record[0].message)
  for part in ("HasDtype under a policy with output_dtype=float32", "expected", "register_data"):
    assert part in text


OTHERS = {
  "array": FULL,
  "half": HALF,
  "tree": {"a": HALF},
  "same": Prediction(FULL),
  "integers": Prediction(jnp.arange(2)),
  "text": "text",
  "none": None,
  "class": Prediction,
  "partial": jax.tree_util.Partial(jnp.add, HALF),
  "function": nn.relu,
  "keys of two kinds": {1: HALF, "a": HALF},
  "model of NNX": nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("outputs", OTHERS.values(), ids=OTHERS)
def test_of_other_outputs_it_says_nothing(outputs):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    warn_of_uncast(HasDtype(), outputs, F32)
