import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._diagnose.call import Call
from mpjax._diagnose.compare.modules import Loop, find_modules, module_paths
from mpjax._diagnose.module_names import with_models_under
from mpjax._diagnose.parameter_scopes import with_parameter_scopes
from mpjax._jaxpr.locations import MODULE
from mpjax._jaxpr.steps import body_of
from tests.models.catalogue import MODELS

X = jnp.ones((2, 3))


def calls_of(fn, *args, weights=()):
  """Returns the calls of modules in a function as (path, call, outputs, inputs)."""
  body = body_of(jax.make_jaxpr(fn)(*args), compiled=True, differentiable=True)
  calls = find_modules(body, weights).calls
  return [(call.path, call.call, len(call.outputs), len(call.inputs)) for call in calls]


@pytest.mark.parametrize(
  ("scopes", "paths"),
  [
    ((), ()),
    (("Net", "Dense_0"), ("Net", "Net/Dense_0")),
    # Of Linen, where modules are marked beside their scopes.
    (("Net", MODULE, "Dense_0", f"{MODULE}Dense_0"), ("Net", "Net/Dense_0")),
    # Of NNX, where nothing but the marks has their paths.
    ((MODULE, f"{MODULE}layers/0", f"{MODULE}layers/0/up"), ("layers/0", "layers/0/up")),
    ((MODULE, f"{MODULE}layers/0", "attend"), ("layers/0", "layers/0/attend")),
    # Of parameters in a list.
    (("layers", "3", "up"), ("layers/3", "layers/3/up")),
    (("up", "bqhd,bkhd->bhqk"), ("up",)),
  ],
)
def test_paths_of_modules_around_an_operation(scopes, paths):
  assert module_paths(scopes) == paths


def test_a_module_returns_what_others_read():
  def fn(x):
    with jax.named_scope("a"):
      y, kept, unread = jnp.sin(x), jnp.cos(x), jnp.exp(x)
      z = y + unread
    with jax.named_scope("b"):
      return z * kept

  assert calls_of(fn, X) == [("a", 0, 2, 0), ("b", 0, 1, 2)]


def test_a_module_inside_of_another():
  def fn(x):
    with jax.named_scope("outer"):
      with jax.named_scope("inner"):
        y = jnp.sin(x)
      return jnp.cos(y)

  assert calls_of(fn, X) == [("outer", 0, 1, 0), ("outer/inner", 0, 1, 0)]


def test_a_cast_is_the_value_that_it_is_of():
  def fn(x):
    with jax.named_scope("a"):
      y = jnp.sin(x)
      low, again = y.astype(jnp.bfloat16), y.astype(jnp.bfloat16).astype(jnp.float32)
    with jax.named_scope("b"):
      return y + 1, low * 2, again

  # One value, and one that was rounded.
  assert calls_of(fn, X) == [("a", 0, 2, 0), ("b", 0, 2, 1)]


def test_calls_of_one_module_are_told_apart():
  def dense(w, x):
    with jax.named_scope("dense"):
      return jnp.sin(x @ w)

  w = jnp.ones((3, 3))

  def apart(w, x):
    return jnp.cos(dense(w, jnp.cos(dense(w, x))))

  def in_a_row(w, x):
    return dense(w, dense(w, x))

  def two_weights(v, w, x):  # They may be of one call.
    return dense(w, dense(v, x))

  assert [call[1] for call in calls_of(apart, w, X) if call[0] == "dense"] == [0, 1]
  assert [call[1] for call in calls_of(in_a_row, w, X, weights={0})] == [0, 1]
  assert [call[1] for call in calls_of(two_weights, w, w, X, weights={0, 1})] == [0]


def test_functions_without_scopes_have_lines():
  def fn(x):
    y = jnp.sin(x)
    return jnp.cos(y)

  paths = [path for path, *_ in calls_of(fn, X)]
  first, second = (path.partition("test_modules.py:")[2] for path in paths)
  assert int(second) == int(first) + 1


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ["linen/bert", "linen/scan_remat", "nnx/gpt", "function/haiku"])
def test_a_policy_changes_no_module_and_no_shape(name):
  params, rest, inputs = MODELS[name].arguments()
  plain = MODELS[name].call("plain", None)

  def loss_fn(params):
    return sum(jnp.sum(x) for x in jax.tree.leaves(plain(params, rest, inputs)[0]))

  if name.startswith("linen"):
    versions = [with_models_under(loss_fn, policy, ()) for policy in (None, "mixed_bfloat16")]
  else:
    named = with_parameter_scopes(loss_fn)
    versions = [named, mpjax.autocast(named, "mixed_bfloat16")]
  call = Call((params,), {})
  shapes = []
  for version in versions:
    body = body_of(call.traced(version).program, compiled=True, differentiable=True)
    modules = find_modules(body, range(len(body.inputs)))
    shapes.append(
      [
        (each.path, each.call, sorted(modules.avals[slot].shape for slot in each.outputs))
        for each in modules.calls
      ]
    )
  assert len(shapes[0]) > 3
  assert shapes[0] == shapes[1]


def test_a_scan_is_entered_and_a_branch_is_not():
  def fn(ws, x):
    def body(x, w):
      with jax.named_scope("layer"):
        y = x @ w
      return jnp.sin(y), None

    with jax.named_scope("stack"):
      x, _ = jax.lax.scan(body, x, ws, reverse=True)
      return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)

  body = body_of(jax.make_jaxpr(fn)(jnp.ones((5, 3, 3)), X), compiled=True, differentiable=True)
  modules = find_modules(body, {0})
  stack, layer = modules.calls
  assert (stack.path, stack.loops) == ("stack", ())
  assert layer.path == "stack/layer"
  assert layer.loops == (Loop(layer.loops[0].number, 5, True),)
  assert len(layer.inputs) == 1  # The carry. The weights are parameters.
  assert modules.readers[0] == ("stack/layer", 1)
  (slot,) = layer.outputs
  assert modules.limit(slot) == 2**20 // 5
