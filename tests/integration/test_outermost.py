"""The outermost call, by each of the four ways to call a model under a policy.

A model is a layer and a function that is given the layer: the same function in Linen and in NNX.
"""

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.models.parts import module
from tests.programs import Derivatives, bits

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
HALF = pytest.mark.parametrize("half", ["bfloat16", "float16"])
EVERY_WAY = ("wrapper", "scope", "bound", "view")
WAYS = pytest.mark.parametrize("way", EVERY_WAY)
X = jnp.linspace(-1.0, 1.0, 16).reshape(2, 8)
PARAMS = {"kernel": jnp.eye(8), "bias": jnp.full(8, 0.5)}
"""Of a layer whose results are exact."""


class OfLinen(nn.Module):
  """Calls a function with a layer and its own arguments, and counts its calls."""

  body: Any

  @nn.compact
  def __call__(self, *args, **named):
    count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
    count.value = count.value + 1
    return self.body(nn.Dense(8, name="layer"), *args, **named)


class OfNnx(nnx.Module):
  """The same."""

  def __init__(self, body):
    self.body, self.layer = body, nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    nnx.update(self.layer, PARAMS)
    self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

  def __call__(self, *args, **named):
    self.calls[...] += 1
    return self.body(self.layer, *args, **named)


def call(way, policy, body, *args, **named):
  """Returns what `body(layer, ...)` returns in a model under a policy, and the calls counted."""
  if way == "view":
    model = OfNnx(body)
    return mpjax.nnx.with_policy(model, policy)(*args, **named), model.calls[...]
  model, mutable = OfLinen(body), ["counts"]
  variables = {"params": {"layer": PARAMS}, "counts": {"calls": jnp.zeros((), jnp.int32)}}
  if way == "wrapper":
    wrapped = mpjax.linen.with_policy(model, policy)
    out, variables = wrapped.apply(variables, *args, **named, mutable=mutable)
    return out, variables["counts"]["calls"]
  with mpjax.linen.policy_scope(policy):
    if way == "scope":
      out, variables = model.apply(variables, *args, **named, mutable=mutable)
      return out, variables["counts"]["calls"]
    bound = model.bind(variables, mutable=mutable)
    return bound(*args, **named), bound.variables["counts"]["calls"]


def layer_in(dtype, x=X):
  """Returns what the layer computes by Flax's own `dtype`: operands and result are rounded."""
  return nn.Dense(8, dtype=dtype).apply({"params": PARAMS}, x.astype(dtype))


# What Python does in a call, or what leaves it, that cannot be traced


class Box:
  """No tree to JAX."""

  def __init__(self, content):
    self.content = content

  def get(self):
    return self.content


class Slots:
  __slots__ = ("content",)

  def __init__(self, content):
    self.content = content


def raise_if(condition):
  if condition:
    raise ValueError


def shown(x):
  assert f"{x.mean():.3f}"
  return x


VALUES = "values of arrays: .*test_outermost.py"
TRACED = "raises .*Error where it is traced: .*test_outermost.py"
PYTHON = {
  # What a model does with an array between two layers, and what the warning says of it.
  "if": (lambda x: raise_if(float(x.sum()) > 1e9) or x, VALUES),
  "mask": (lambda x: x[x > -1e9].reshape(x.shape), VALUES),
  "format": (shown, TRACED),
  "sharding": (lambda x: x.sharding and x, TRACED),
}
CALLED = {"wrapper": "mpjax.with_policy(model, policy)", "view": "mpjax.with_policy(model, policy)"}


@pytest.mark.parametrize(
  ("way", "name"),
  [*((way, "if") for way in EVERY_WAY), *(("wrapper", name) for name in PYTHON if name != "if")],
)
def test_what_cannot_be_traced_runs_as_python_and_its_submodules_are_rewritten(way, name):
  do, warning = PYTHON[name]
  body = lambda layer, x: layer(do(layer(x)))  # noqa: E731
  with pytest.warns(UserWarning, match=warning) as record:
    out, count = call(way, "c=bf16", body, X)
  (text,) = (str(w.message) for w in record)
  called = CALLED.get(way, "mpjax.policy_scope(policy)")
  assert text.startswith(f"{called}: the root: expected a body that can be traced")
  assert bits(out) == bits(layer_in(BF16, layer_in(BF16)))
  assert int(count) == 1
  # To a trace there is no value to look at: it is the user's own error.
  if name == "if":
    with pytest.raises(jax.errors.ConcretizationTypeError):
      jax.jit(lambda x: call(way, "c=bf16", body, x)[0])(X)


HIDING = {
  # By name: how to hide an array from JAX, and how to get it back.
  "attribute": (Box, lambda box: box.content),
  "object in object": (lambda x: Box(Box(x)), lambda box: box.content.content),
  "list": (lambda x: Box([{"x": x}]), lambda box: box.content[0]["x"]),
  "slot": (Slots, lambda box: box.content),
  "method": (lambda x: Box(x).get, lambda method: method()),
  "closure": (lambda x: lambda: x, lambda function: function()),
  "default": (lambda x: lambda x=x: x, lambda function: function()),
  "partial": (lambda x: functools.partial(jnp.add, x, 0), lambda function: function()),
  "generator": (lambda x: (x for _ in range(1)), next),
}


@pytest.mark.parametrize("hiding", HIDING)
def test_an_array_in_an_object_that_is_no_tree_comes_out_as_an_array(hiding):
  hide, get = HIDING[hiding]
  for way in EVERY_WAY if hiding == "attribute" else ("wrapper",):
    with pytest.warns(UserWarning, match="holds arrays and is not a pytree"):
      out, _ = call(way, "c=bf16", lambda layer, x: hide(layer(x)), X)
    assert bits(get(out)) == bits(layer_in(BF16))


# What is the same on both sides of the boundary of a call


@WAYS
def test_dicts_have_their_own_order_and_one_array_is_one_object(way):
  # In a jitted step too, where the dicts are made: `jax.jit` sorts at its own boundary alone.
  def body(layer, xs, other, **named):
    assert list(xs) == ["z", "a"]
    assert list(named) == ["y", "b"]
    assert xs["z"] is other is named["y"]
    assert xs["a"] is not other
    return {"second": layer(xs["z"]), "first": {"z": layer(xs["a"]), "a": xs["z"]}}

  def step(x):
    return list(call(way, "c=bf16", body, {"z": x, "a": 2 * x}, x, y=x, b=1)[0].items())

  def numbers(x):
    (second, y), (first, inner) = step(x)
    assert (second, first, list(inner)) == ("second", "first", ["z", "a"])
    return y, inner["z"]

  wanted = layer_in(BF16), layer_in(BF16, 2 * X)
  assert bits(numbers(X)) == bits(jax.jit(numbers)(X)) == bits(wanted)


@WAYS
def test_a_list_that_is_given_gets_what_it_gets_without_a_policy(way):
  def body(layer, x, taps, named):
    taps.append(layer(x))
    named["x"] = x
    return taps[-1], taps

  taps, named = [], {}
  (last, same), _ = call(way, "c=bf16", body, X, taps, named)
  assert taps is same
  assert taps[0] is last
  assert bits(last) == bits(layer_in(BF16))
  assert bits(named["x"]) == bits(X)


@WAYS
def test_a_dict_whose_keys_do_not_sort(way):
  # Flax cannot lift a method with one.
  def body(layer, xs):
    return {key: layer(x) if key == 1 else x for key, x in xs.items()}

  fits = way in ("wrapper", "view")
  with contextlib.nullcontext() if fits else pytest.warns(UserWarning, match="where it is traced"):
    found, _ = call(way, "c=bf16", body, {1: X, "b": X})
  assert list(found) == [1, "b"]
  assert bits(found[1]) == bits(layer_in(BF16))


@WAYS
def test_calls_that_are_alike_are_differentiated_once(way):
  # So tracing a step of a deep model takes little longer than that of a shallow one.
  derivatives = Derivatives()

  def body(layer, x):
    for _ in range(8):
      x = jax.nn.relu(derivatives.of(layer(x)))
    return x

  jax.jit(jax.grad(lambda x: call(way, "mixed_bfloat16", body, x)[0].sum())).trace(X)
  assert 0 < derivatives.count <= 3  # The first reads an argument, and the last makes the result.


# What raises


def takes_half_alone(layer, x):
  """Refuses float32, as a kernel may."""
  if x.dtype == jnp.float32:
    raise NotImplementedError("this kernel takes low precision alone")
  return layer(x)


@WAYS
def test_what_raises_in_float32_is_called_in_its_compute_dtype(way):
  assert bits(call(way, "c=bf16", takes_half_alone, X)[0]) == bits(layer_in(BF16))
  kernels = {"bfloat16": lambda layer, x: layer(x)}  # A table that has none for float32.
  table = call(way, "c=bf16", lambda layer, x: kernels[x.dtype.name](layer, x), X)
  assert bits(table[0]) == bits(layer_in(BF16))
  for policy in (None, "float32"):
    with pytest.raises(NotImplementedError, match="low precision alone"):
      call(way, policy, takes_half_alone, X)

  def refuses(layer, x):
    raise NotImplementedError(f"no {x.dtype}")

  with pytest.raises(NotImplementedError, match="no float32"):
    call(way, "bfloat16", refuses, X)


def mixes(x, buffer=jnp.bfloat16):
  """Uses `jax.lax` on operands of two dtypes, which does not promote."""
  return jax.lax.dynamic_update_slice(jnp.zeros((4, 8), buffer), x, (0, 0))


MIXES = module(lambda m, x: mixes(x))
KERNEL = module(lambda m, x: takes_half_alone(jnp.tanh, x))


def linen_call(model):
  return lambda policy, *rules: mpjax.linen.with_policy(model, policy, rules).apply({}, X)


def nnx_call(model):
  def under(policy, *rules):
    # Equal modules have one class between them, and each has its own path.
    mpjax.nnx.with_policy(MIXES.nnx(None, None), policy)
    return mpjax.nnx.with_policy(model, policy, rules)(X)

  return under


def jit_call(model):
  return lambda policy: nnx.jit(lambda view: view(X))(mpjax.nnx.with_policy(model, policy))


OF_LINEN, OF_NNX = MIXES.linen(None), MIXES.nnx(None, None)
MIXING = {
  # The call under a policy and rules, the path of the module.
  "linen": (linen_call(nn.Sequential([OF_LINEN])), "layers_0"),
  "linen, remat": (linen_call(nn.Sequential([nn.remat(type(OF_LINEN))()])), "layers_0"),
  "nnx": (nnx_call(nnx.Sequential(jnp.tanh, OF_NNX)), "layers/1"),
  "nnx.jit": (jit_call(nnx.Sequential(OF_NNX)), "layers/0"),
  "linen, the root": (linen_call(OF_LINEN), ""),
  "nnx, the root": (nnx_call(OF_NNX), ""),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_type_error_gets_a_note_that_names_the_module(name):
  under, path = MIXING[name]
  with pytest.raises(TypeError) as excinfo:
    under("mixed_float16")
  # It is the user's own error, with one note.
  assert not isinstance(excinfo.value, mpjax.MpjaxError)
  (note,) = [note for note in excinfo.value.__notes__ if "mpjax" in note]
  for part in (
    f"'{path}' (" if path else "the root",
    "Linen)" if "linen" in name else "(Nnx)",
    "compute=float16",
    "cast there",
  ):
    assert part in note
  # No note advises to switch the entire model off.
  assert (f"mpjax.Rule(None, path={path!r})" in note) == bool(path)
  assert "**" not in note
  # In the dtype that it takes, it runs.
  if path and "jit" not in name:
    assert under("mixed_float16", mpjax.Rule("bfloat16", path=path)).dtype == F32


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
@pytest.mark.parametrize(
  ("under", "path"),
  [
    (linen_call(nn.Sequential([KERNEL.linen(None)])), "layers_0"),
    (nnx_call(nnx.Sequential(KERNEL.nnx(None, None))), "layers/0"),
  ],
  ids=["linen", "nnx"],
)
def test_a_kernel_for_low_precision_alone_under_a_float32_rule(under, path, policy):
  with pytest.raises(NotImplementedError, match="low precision alone") as excinfo:
    under(policy, mpjax.Rule("float32", path=path))
  (note,) = (note for note in excinfo.value.__notes__ if "mpjax" in note)
  assert f"raised inside '{path}' (" in note
  assert "under the policy 'params=float32,compute=float32" in note
  assert f"Rule(\"bfloat16\", path='{path}')" in note
  assert 'implementation="xla"' in note
  assert under(policy, mpjax.Rule("c=bf16,o=f32", path=path)).dtype == "float32"


@WAYS
def test_errors_of_other_kinds_and_without_a_policy_get_no_note(way):
  def raises(layer, error):
    raise error

  abstract = NotImplementedError()
  cases = ("bfloat16", ValueError("x")), (None, TypeError("x")), ("float16", abstract)
  for policy, error in cases:
    with pytest.raises(type(error)) as excinfo:
      call(way, policy, raises, error)
    assert not [note for note in getattr(excinfo.value, "__notes__", ()) if "mpjax" in note]
  # Float32 operands of a policy that meet no product are no error.
  out, _ = call(way, "mixed_bfloat16", lambda layer, x: mixes(x, jnp.float32), X)
  np.testing.assert_array_equal(out[:2], X)


# Dtypes of what goes in and out


@HALF
@WAYS
def test_arguments_in_low_precision_show_as_float32_and_count_as_low_precision(way, half):
  seen = []

  def body(layer, tree):
    seen.append(str(tree["x"].dtype))
    return {"n": tree["n"] * 2, "x": tree["x"] * 2, "y": tree["x"] + layer(tree["x"])}

  x = X.astype(half)
  found, _ = call(way, f"c={half}", body, {"x": x, "n": 3})
  assert set(seen) == {"float32"}
  assert found["n"] == 6
  assert bits(found["x"]) == bits(x * 2)
  assert found["y"].dtype == half


@WAYS
def test_an_array_that_is_closed_over_decides_whatever_traces(way):
  # Coordinates of up to 1,000 are multiples of 4 in bfloat16.
  grid = np.linspace(0.3, 1000, 8, dtype="float32")
  wanted = grid + np.asarray(layer_in(BF16), np.float32)

  def fun(grid):
    return call(way, "c=bf16", lambda layer, x: grid + layer(x), X)[0]

  for found in (fun(jnp.asarray(grid)), jax.jit(fun)(grid), jax.jvp(fun, (grid,), (grid,))[0]):
    assert found.dtype == F32
    # XLA may leave out the rounding of what the layer returns.
    np.testing.assert_allclose(found, wanted, atol=0.02)


@WAYS
def test_float64_and_complex_numbers(way):
  # Nothing of float64 is rounded inside: it comes where `jax_enable_x64` is set.
  z = X.astype(jnp.complex64) * (1 + 1j)
  out, _ = call(way, "c=bf16", lambda layer, x: layer(x), z)
  assert out.dtype == jnp.complex64
  np.testing.assert_allclose(out, z + 0.5, atol=0.01)
  with jax.enable_x64(True):
    x = jnp.asarray(X, jnp.float64)
    assert call(way, "bfloat16", lambda layer, x: layer(x), x)[0].dtype == BF16
