"""A module's call under a policy: arguments, results, and what is done where tracing raises."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._autocast.module_calls import attempts, dtype_field, module_call, plain_attribute
from mpjax._policy.active import EVERY, Active, Region
from mpjax._policy.layers import Layers
from mpjax._policy.rules import ModulePolicy

HALF = mpjax.Policy.parse("mixed_bfloat16")
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


class Layer:
  """Returns its arguments, and the dtype that its field says then."""

  dtype: Any = jnp.bfloat16

  def __call__(self, *args, **kwargs):
    return args, kwargs, self.dtype


def call_in(state, layer, policy, iterates=(), **fields):
  output = None if policy is None else policy.output_dtype
  resolved = ModulePolicy(policy, **{"output_dtype": output, **fields})
  return module_call(layer, "layer", resolved, state, Layers(iterates=iterates))


def run(call, policy, **fields):
  layer = Layer()
  outputs = call_in(Active(**fields), layer, policy).run(layer, *call)
  assert vars(layer) == {}, "a field was left behind"
  return outputs


def test_arguments_are_what_they_are_unless_a_module_is_called_in_its_compute_dtype():
  call = ((jnp.ones(2), jnp.arange(2)), {"y": 1.5})
  args, kwargs, dtype = run(call, HALF)
  assert all(a is b for a, b in zip(args, call[0], strict=True))
  assert (kwargs, dtype) == ({"y": 1.5}, jnp.float32)
  args, kwargs, dtype = run(call, HALF, casting=EVERY)
  assert ([str(x.dtype) for x in args], kwargs, dtype) == (
    ["bfloat16", "int32"],
    {"y": 1.5},
    jnp.bfloat16,
  )
  args, *_ = run(call, HALF, casting=frozenset({Layer}))
  assert args[0].dtype == jnp.bfloat16
  complex_ = ((jnp.ones(2), jnp.ones(2, "complex64")), {})
  assert run(complex_, HALF, casting=EVERY)[0][0] is complex_[0][0]
  (x,), _, _ = run(((jnp.ones(2, "bfloat16"),), {}), mpjax.Policy())
  assert x.dtype == "float32"
  assert run(call, None)[2] is jnp.bfloat16


def test_a_module_that_iterates_computes_in_float32_and_tells_those_inside_its_policy():
  found = call_in(Active(), Layer(), HALF, iterates=(Layer,)).inner
  # No rounding of its matmuls may add up on a GPU or a TPU either.
  exact = Region(mpjax.Policy(precision="highest"))
  assert (found.region, found.around.policy, found.entered) == (exact, HALF, True)
  assert call_in(Active(), Layer(), HALF).inner.region == Region(HALF)
  assert call_in(Active(), Layer(), None, iterates=(Layer,)).inner.region == Region(None)
  # A precision that is named is kept.
  high = mpjax.Policy(compute_dtype="bfloat16", precision="high")
  named = call_in(Active(), Layer(), high, iterates=(Layer,)).inner
  with jax.default_matmul_precision("high"):
    by_jax = call_in(Active(), Layer(), HALF, iterates=(Layer,)).inner
  assert named.region == by_jax.region == Region(mpjax.Policy())


def test_where_a_policy_begins_it_says_the_dtype_of_results():
  entered, other = Active(entered=True), mpjax.Policy.parse("c=f16,o=f16")
  for state, policy, fields, dtype in [
    (Active(), HALF, {}, "float32"),
    (Active(), mpjax.Policy.parse("c=f16"), {"output_dtype": F32}, "float32"),
    (Active(), None, {"output_dtype": F32}, None),
    (entered, HALF, {}, None),
    (entered, other, {"begins": True}, "float16"),
    (entered, mpjax.Policy.parse("c=f16"), {"begins": True, "output_dtype": F32}, None),
  ]:
    assert call_in(state, Layer(), policy, **fields).output_dtype == dtype, (policy, fields)


@pytest.mark.parametrize("traced", [True, False])
def test_results_are_arrays_in_the_dtype_and_all_else_as_it_is(traced):
  out = {"x": jnp.ones(2, "bfloat16"), "n": jnp.arange(2), "name": "coder"}
  state = Active(tracing=traced)
  new = call_in(state, Layer(), HALF).result(out)
  assert new["name"] == "coder"
  assert [str(new[name].dtype) for name in ("x", "n")] == ["float32", "int32"]
  assert call_in(state, Layer(), mpjax.Policy.parse("c=bf16")).result(out) is out
  assert call_in(state, Layer(), None).result(out) is out
  cast = call_in(Active(casting=EVERY), Layer(), mpjax.Policy.parse("c=f16"))
  assert cast.result(out)["x"].dtype == "float16"


# The `dtype` field of modules


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


@pytest.mark.parametrize(("name", "module"), NOT_SET.items())
def test_a_dtype_that_means_what_it_says_is_not_set(name, module):
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
  vars(module)["computed"] = 4  # Its class comes before it.
  assert plain_attribute(module, "computed") is None
  assert plain_attribute(module, "computed", 3) == 3
  assert plain_attribute(module, "dtype") is jnp.float16
  assert plain_attribute(module, "missing", "default") == "default"


# The outermost call


def test_the_class_that_raised_is_called_in_its_compute_dtype_and_no_class_twice():
  seen = []

  def attempt(state):
    assert state.tracing
    seen.append(state.casting)
    if int not in state.casting:
      state.failed.append(int)
      raise NotImplementedError("first")
    return "traced"

  assert attempts(attempt, lambda state: None, Active(), None, "") == "traced"
  assert seen == [frozenset(), frozenset({int})]

  # A class that is defined in the call is another one each time. The first error says what is
  # wrong; where Python raises the same one, that has numbers for tracers.
  local, same = lambda: type("Local", (), {}), NotImplementedError("python")
  for raising, raised, text in ((lambda: int, ValueError(), "0"), (local, same, "python")):

    def always(state, raising=raising):
      state.failed.append(raising())
      raise NotImplementedError(str(len(state.casting)))

    def python(state, raised=raised):
      assert not state.casting
      raise raised

    with pytest.raises(NotImplementedError, match=text):
      attempts(always, python, Active(), None, "")


@pytest.mark.parametrize("then", [lambda x: float(x), lambda x: f"{x:.3f}"])
def test_a_class_that_low_precision_helps_stays_cast_in_python(then):
  def attempt(state):
    state.failed.append(int)
    if int not in state.casting:
      raise TypeError("no kernel for float32")
    return jax.jit(then)(1.0)

  with pytest.warns(UserWarning, match=r"policy\): body: expected a body that can be") as caught:
    state = attempts(attempt, lambda state: state, Active(), None, "body")
  assert (state.casting, state.as_python) == ({int}, {"body"})
  assert len(caught) == 1
