"""A module's call under a policy: arguments, results, and what is done where tracing raises."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._core.active import Active
from mpjax._core.policy_config import ModulePolicy
from mpjax._jaxprs.module_calls import Layers, ModuleCall, inside

HALF = mpjax.Policy.parse("mixed_bfloat16")


class Layer:
  """Returns its arguments, and the dtype that its field says then."""

  dtype: Any = jnp.bfloat16

  def __call__(self, *args, **kwargs):
    return args, kwargs, self.dtype


def call_of(layer, policy, state, picked=False, outermost=None):
  how = ModulePolicy(policy, picked, output_dtype=outermost)
  return ModuleCall(layer, "layer", how, state, inside(state, layer, policy, Layers()))


def run(call, policy, **fields):
  layer = Layer()
  outputs = call_of(layer, policy, Active(**fields)).run(layer, *call)
  assert vars(layer) == {}, "a field was left behind"
  return outputs


def test_arguments_are_what_they_are_unless_a_module_is_called_in_its_compute_dtype():
  call = ((jnp.ones(2), jnp.arange(2)), {"y": 1.5})
  args, kwargs, dtype = run(call, HALF)
  assert all(a is b for a, b in zip(args, call[0], strict=True))
  assert (kwargs, dtype) == ({"y": 1.5}, jnp.float32)
  args, kwargs, dtype = run(call, HALF, cast=True)
  assert ([str(x.dtype) for x in args], kwargs, dtype) == (
    ["bfloat16", "int32"],
    {"y": 1.5},
    jnp.bfloat16,
  )
  args, *_ = run(call, HALF, casting=frozenset({Layer}))
  assert args[0].dtype == jnp.bfloat16
  complex_ = ((jnp.ones(2), jnp.ones(2, "complex64")), {})
  assert run(complex_, HALF, cast=True)[0][0] is complex_[0][0]
  (x,), _, _ = run(((jnp.ones(2, "bfloat16"),), {}), mpjax.Policy())
  assert x.dtype == "float32"
  assert run(call, None)[2] is jnp.bfloat16


def test_a_module_that_iterates_computes_in_float32_and_tells_those_inside_its_policy():
  found = inside(Active(), Layer(), HALF, Layers(iterates=(Layer,)))
  assert (found.region, found.policy, found.entered) == (str(mpjax.Policy()), HALF, True)
  assert inside(Active(), Layer(), HALF, Layers()).region == str(HALF)
  assert inside(Active(), Layer(), None, Layers(iterates=(Layer,))).region == "as-it-is"


@pytest.mark.parametrize(
  ("entered", "picked", "wanted"),
  [(False, False, "float32"), (True, False, None), (True, True, None)],
)
def test_where_a_policy_begins_it_says_the_dtype_of_results(entered, picked, wanted):
  state = Active(policy=HALF, entered=entered)
  assert call_of(Layer(), HALF, state, picked).output_dtype == wanted
  other = mpjax.Policy.parse("c=f16,o=f16")
  assert call_of(Layer(), other, state, picked=True).output_dtype == "float16"
  named = mpjax.Policy.parse("c=f16")
  assert call_of(Layer(), named, Active(), outermost=np.dtype("float32")).output_dtype == "float32"
  assert call_of(Layer(), None, Active(), outermost=np.dtype("float32")).output_dtype is None


@pytest.mark.parametrize("traced", [True, False])
def test_results_are_arrays_in_the_dtype_and_all_else_as_it_is(traced):
  out = {"x": jnp.ones(2, "bfloat16"), "n": jnp.arange(2), "name": "coder"}
  state = Active(tracing=traced)
  new = call_of(Layer(), HALF, state).result(out)
  assert new["name"] == "coder"
  assert [str(new[name].dtype) for name in ("x", "n")] == ["float32", "int32"]
  assert call_of(Layer(), mpjax.Policy.parse("c=bf16"), state).result(out) is out
  assert call_of(Layer(), None, state).result(out) is out
  cast = call_of(Layer(), mpjax.Policy.parse("c=f16"), Active(cast=True))
  assert cast.result(out)["x"].dtype == "float16"
