"""`Adapter` and the pieces that adapters are made of."""

import contextlib
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._adapter import (
  Adapter,
  cast_inputs,
  cast_outputs,
  keep_carry_inputs,
  keep_carry_outputs,
  like,
  set_dtype,
)
from tests.errors import check_error
from tests.programs import bits, products

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
X = jnp.ones((2, 3))
to_half = functools.partial(
  jax.tree.map, lambda x: x.astype("bfloat16") if hasattr(x, "dtype") else x
)


def dtypes(tree):
  return {name: str(leaf.dtype) for name, leaf in tree.items()}


def test_cast_inputs_casts_all_arguments():
  args, kwargs = cast_inputs(nn.Dense(2), "__call__", ((X, 3), {"y": X, "n": 1}), to_half)
  assert args[0].dtype == kwargs["y"].dtype == BF16
  assert args[1] == 3
  assert kwargs["n"] == 1


def test_cast_outputs_casts_what_came():
  assert cast_outputs(nn.Dense(2), "__call__", ((), {}), (X, 3), to_half)[0].dtype == BF16


class NoDtype(nn.Module):
  features: int = 2


class DtypeProperty(nn.Module):
  """Its dtype is not a field that could be set."""

  @property
  def dtype(self):
    return jnp.float32


class HasDtype(nn.Module):
  dtype: Any = None
  param_dtype: Any = jnp.float32


class Plain:
  """Not a dataclass: what it has are attributes."""

  def __init__(self, dtype, param_dtype="float32"):
    self.dtype, self.param_dtype = dtype, param_dtype


@pytest.mark.case("B099", "A108")
@pytest.mark.parametrize(
  ("module", "wanted"),
  [
    (NoDtype(), {}),
    (DtypeProperty(), {}),
    (HasDtype(), {"dtype": jnp.bfloat16}),
    (HasDtype(jnp.float16), {"dtype": jnp.bfloat16}),
    (HasDtype("float32"), {"dtype": "bfloat16"}),
    (HasDtype(np.dtype("float32")), {"dtype": jnp.bfloat16}),
    (HasDtype(jnp.int32), {}),
    (HasDtype(jnp.complex64), {}),
    (HasDtype("anything"), {}),
    (HasDtype(None, jnp.complex64), {}),
    (HasDtype(None, jnp.int8), {}),
    (Plain(None), {"dtype": jnp.bfloat16}),
    (Plain(jnp.int32), {}),
  ],
  ids=[
    "none",
    "property",
    "unset",
    "half",
    "string",
    "dtype",
    "integer",
    "complex",
    "no dtype",
    "complex parameters",
    "integer parameters",
    "attribute",
    "integer attribute",
  ],
)
def test_set_dtype(module, wanted):
  found = set_dtype(module, "__call__", BF16)
  assert found == wanted
  if "dtype" in wanted and not isinstance(wanted["dtype"], str):
    # Code compares with `is jnp.bfloat16`.
    assert found["dtype"] is jnp.bfloat16


def test_like_follows_dtypes_where_shapes_agree():
  old = {"c": X, "n": jnp.arange(2), "h": X.astype("float16")}
  new = {"c": X.astype("bfloat16"), "n": jnp.arange(2), "h": X}
  assert dtypes(like(new, old)) == {"c": "float32", "n": "int32", "h": "float16"}
  assert like(X.astype("bfloat16"), X[0]).dtype == BF16
  other = {"another": X.astype("bfloat16")}
  assert like(other, old) is other
  assert like(X.astype("bfloat16"), jnp.ones(X.shape, jnp.complex64)).dtype == BF16


def test_cells_keep_their_carry():
  call = ((X, X), {})
  args, _ = keep_carry_inputs(nn.GRUCell(3), "__call__", call, to_half)
  assert [x.dtype for x in args] == [F32, BF16]
  by_keyword = ((), {"carry": X, "inputs": X})
  args, kwargs = keep_carry_inputs(nn.GRUCell(3), "__call__", by_keyword, to_half)
  assert args == ()
  assert kwargs["carry"].dtype == F32
  assert kwargs["inputs"].dtype == BF16
  assert keep_carry_inputs(nn.GRUCell(3), "other", call, to_half) == call
  for made in (call, by_keyword):
    half = X.astype("bfloat16")
    carry, out = keep_carry_outputs(nn.GRUCell(3), "__call__", made, (half, X), to_half)
    assert carry.dtype == F32
    assert out.dtype == BF16
  assert keep_carry_outputs(nn.GRUCell(3), "__call__", call, X, to_half).dtype == BF16
  assert keep_carry_outputs(nn.GRUCell(3), "other", call, X, to_half) is X


# Errors


@pytest.mark.parametrize("value", ["half", None, jnp.float32], ids=["string", "none", "type"])
def test_adapter_params_is_one_of_two(value):
  with pytest.raises(TypeError) as excinfo:
    Adapter(params=value)
  check_error(
    excinfo,
    where="Adapter(params=...)",
    expected="'compute' or 'stored'",
    got=repr(value),
    fix="Leave it out",
    builtin=TypeError,
  )


@pytest.mark.parametrize("name", ["inputs", "fields", "outputs"])
@pytest.mark.parametrize("value", [None, "cast", {}], ids=str)
def test_adapter_fields_are_functions(name, value):
  with pytest.raises(TypeError) as excinfo:
    Adapter(**{name: value})
  check_error(
    excinfo,
    where=f"Adapter({name}=...)",
    expected="a function",
    got=repr(value),
    fix="See mpjax.linen.Adapter",
    builtin=TypeError,
  )


def test_an_adapter_is_a_value():
  assert Adapter() == Adapter()
  assert hash(Adapter(params="stored")) == hash(Adapter(params="stored"))
  assert Adapter() != Adapter(params="stored")
  with pytest.raises(AttributeError):
    Adapter().params = "stored"


class Called(nn.Module):
  """Its `param_dtype` is a property that calls a method, which a policy intercepts."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, dtype=self.dtype, param_dtype=self.param_dtype)(x)

  @property
  def param_dtype(self):
    return self.storage()

  def storage(self):
    return jnp.float32


class Reads(nn.Module):
  """Its `param_dtype` is that of a parameter, which `setup` makes."""

  dtype: Any = jnp.float32

  def setup(self):
    self.w = self.param("w", nn.initializers.lecun_normal(), (3, 2))

  @property
  def param_dtype(self):
    return self.w.dtype

  def __call__(self, x):
    return x @ self.w


class Exempt(nn.Module):
  """A module that a rule leaves alone, and whose `dtype` is a property that calls a method."""

  @property
  def dtype(self):
    return self.own()

  def own(self):
    return jnp.float32

  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, dtype=self.dtype)(x)


class Outer(nn.Module):
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    return Exempt(name="inner")(x)


@pytest.mark.parametrize(
  ("model", "rules", "wanted"),
  [
    (Called(), [], "bfloat16"),
    (Reads(), [], "bfloat16"),
    (Outer(), [], "bfloat16"),
    (Outer(), [mpjax.Rule(None, path="inner")], "float32"),
  ],
  ids=["method", "parameter", "own dtype", "exempt"],
)
@pytest.mark.standard_promotion
def test_a_linen_module_whose_dtypes_are_properties(model, rules, wanted):
  x = jnp.ones((2, 3))
  policied = mpjax.linen.with_policy(model, "mixed_bfloat16", rules)
  variables = policied.init(jax.random.key(0), x)
  assert bits(variables) == bits(model.init(jax.random.key(0), x))
  found = products(jax.make_jaxpr(policied.apply)(variables, x))
  assert [product.dtypes for product in found] == [(wanted, wanted)]


class Computed(nnx.Module):
  """Its dtypes are properties, one of which cannot be asked for yet."""

  def __init__(self):
    self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

  @property
  def dtype(self):
    raise RuntimeError("not before the first call")

  @property
  def param_dtype(self):
    return self.storage()

  def storage(self):
    return self.layer.kernel.dtype

  def __call__(self, x):
    return self.layer(x)


def test_a_nnx_module_whose_dtypes_are_properties():
  view = mpjax.nnx.with_policy(Computed(), "mixed_bfloat16")
  found = products(jax.make_jaxpr(view)(jnp.ones((2, 3))))
  assert [product.dtypes for product in found] == [("bfloat16", "bfloat16")]


@pytest.mark.parametrize(
  ("name", "function", "arguments"),
  [
    ("inputs", lambda module, call: call, "(module, method, (args, kwargs), cast)"),
    ("fields", lambda module, method, dtype, more: {}, "(module, method, compute_dtype)"),
    ("outputs", lambda out: out, "(module, method, (args, kwargs), outputs, cast)"),
  ],
  ids=["inputs", "fields", "outputs"],
)
def test_adapter_functions_take_what_they_are_given(name, function, arguments):
  with pytest.raises(TypeError) as excinfo:
    Adapter(**{name: function})
  check_error(
    excinfo,
    where=f"Adapter({name}=...)",
    expected=f"a function of {arguments}",
    got="<function",
    fix="See mpjax.linen.Adapter",
    builtin=TypeError,
  )
  # Defaults, stars and classes whose signature is not known are as good as names.
  Adapter(**{name: lambda *args: None})
  Adapter(**{name: lambda *args, extra=1: None})
  Adapter(**{name: dict})


LAYERS = {
  "linen": lambda options: mpjax.linen.with_policy(
    nn.Dense(2), "bfloat16", adapters={nn.Dense: Adapter(**options)}
  ).init(jax.random.key(0), X),
  "nnx": lambda options: mpjax.nnx.with_policy(
    nnx.Linear(3, 2, rngs=nnx.Rngs(0)), "bfloat16", adapters={nnx.Linear: Adapter(**options)}
  )(X),
}


@pytest.mark.parametrize("library", LAYERS)
@pytest.mark.parametrize(
  ("options", "expected", "got"),
  [
    ({"inputs": lambda *args: args[2][0]}, "(args, kwargs)", "["),
    ({"inputs": lambda *args: None}, "(args, kwargs)", "None"),
    ({"fields": lambda *args: None}, "a dict", "None"),
    ({"fields": lambda *args: {"features_typo": 1}}, "fields", "no such field: 'features_typo'"),
    ({"outputs": lambda *args: None}, "the outputs", "None"),
  ],
  ids=["no pair", "no inputs", "no fields", "misspelt", "no outputs"],
)
def test_adapter_functions_return_what_is_asked_of_them(library, options, expected, got):
  with pytest.raises(TypeError) as excinfo:
    LAYERS[library](options)
  check_error(
    excinfo,
    where=f"Adapter({next(iter(options))}=...) for {'Dense' if library == 'linen' else 'Linear'}",
    expected=expected,
    got=got if got != "[" else "(",
    fix="Return",
    builtin=TypeError,
  )


@dataclasses.dataclass
class Prediction:
  """No tree to JAX."""

  logits: Any
  label: str = "cat"


class Predicts(nn.Module):
  @nn.compact
  def __call__(self, x):
    return {"prediction": Prediction(nn.Dense(2)(x))}


class PredictsNnx(nnx.Module):
  def __init__(self):
    self.layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return {"prediction": Prediction(self.layer(x))}


@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize(
  ("policy", "warned"), [("mixed_bfloat16", True), ("bfloat16", False), ("float32", False)]
)
def test_arrays_in_an_output_that_is_no_tree_are_warned_of(library, policy, warned):
  if library == "linen":
    model = mpjax.linen.with_policy(Predicts(), policy)
    call = functools.partial(model.apply, model.init(jax.random.key(0), X))
  else:
    call = mpjax.nnx.with_policy(PredictsNnx(), policy)
  found = pytest.warns(UserWarning, match="a Prediction, of which logits stay in bfloat16")
  with found if warned else contextlib.nullcontext():
    out = call(X)
  assert out["prediction"].logits.dtype == ("float32" if policy == "float32" else "bfloat16")
