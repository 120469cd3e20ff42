"""The outermost call: variables, random numbers, and what surrounds it."""

import contextlib
import dataclasses
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import mpjax
from tests.linen.probes import HALF, KEY, Does, X, calls, dtypes
from tests.programs import bits, products, run

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")

WAYS = pytest.mark.parametrize("way", ["wrapper", "scope", "bound"])
CONTAINERS = pytest.mark.parametrize("kind", [dict, freeze], ids=["dict", "FrozenDict"])


def call(way, model, policy, variables, *args, **kwargs):
  # Calls a model under a policy, by one of the three ways that there are.
  if way == "wrapper":
    return with_policy(model, policy).apply(variables, *args, **kwargs)
  with scope(policy):
    if way == "scope":
      return model.apply(variables, *args, **kwargs)
    bound = model.bind(variables, **kwargs)
    return bound(*args)


def ones(features, inputs=8):
  # Returns the parameters of a Dense layer whose results are exact.
  return {"kernel": jnp.eye(inputs, features), "bias": jnp.full(features, 0.5)}


# What cannot be traced, and what raises in float32


@pytest.mark.parametrize("name", [None, "net"])
def test_a_submodule_that_looks_at_values_is_named_and_so_is_what_is_around_it(name):
  def looks(module, x):
    x = nn.Dense(3)(x)
    if float(x.sum()) > 1e9:
      raise ValueError
    return nn.Dense(3)(x)

  body = lambda module, x: Does(looks, name="inner")(nn.Dense(3, name="first")(x))  # noqa: E731
  around = Does(body, name=name)
  with pytest.warns(UserWarning, match="expected a body that can be traced") as record:
    found = with_policy(around, "mixed_bfloat16").apply(around.init(KEY, X), X)
  texts = [str(w.message) for w in record]
  assert all("if float(x.sum()) > 1e9" in text for text in texts), texts
  assert f": {name or 'the root'}: expected a body" in texts[-1]
  assert found.dtype == F32


@WAYS
def test_a_module_that_raises_in_float32_draws_the_same_masks_in_its_compute_dtype(way):
  def takes_half_alone(module, x):
    # Draws a mask, and then calls what takes no float32, as a kernel may.
    x = nn.Dropout(0.5, deterministic=False)(x)
    if x.dtype == jnp.float32:
      raise NotImplementedError("this kernel takes low precision alone")
    return x * 2

  x, rngs = jnp.ones((8, 16)), {"dropout": KEY}
  model = Does(takes_half_alone)
  found = call(way, model, "c=bf16", {}, x, rngs=rngs)
  plain = model.apply({}, x.astype("bfloat16"), rngs=rngs)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, plain)
  assert 0 < np.count_nonzero(plain) < plain.size


@WAYS
def test_numpy_variables_are_parameters_and_a_list_raises_the_error_of_flax(way):
  loaded = {"params": jax.tree.map(np.asarray, ones(3))}
  found = call(way, nn.Dense(3), "c=bf16", loaded, X)
  assert bits(found) == bits(nn.Dense(3, dtype=BF16).apply({"params": ones(3)}, X))
  with pytest.raises(Exception) as ours:
    with_policy(nn.Dense(2), "mixed_bfloat16").apply([1], X)
  with pytest.raises(type(ours.value)):
    nn.Dense(2).apply([1], X)


# Parameters


def penalised(module, x):
  # Computes a penalty on its own weights, as L2 terms in a forward pass do.
  x = nn.Dense(2, name="dense")(x)
  params = module.variables["params"]
  calls.append(("container", type(module.variables).__name__))
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    calls.append((jax.tree_util.keystr(path), str(leaf.dtype)))
  penalty = sum(jax.tree.leaves(jax.tree.map(lambda w: jnp.sum(jnp.square(w)), params)))
  module.sow("losses", "l2", penalty)
  return x


@CONTAINERS
@pytest.mark.parametrize("how", ["wrapper", "scope", "neither"])
def test_a_penalty_on_weights_is_computed_on_the_stored_ones(how, kind):
  kernel = jnp.full((8, 2), 1 + 2.0**-12)  # bfloat16 would see 1.
  model = Does(penalised)
  model = with_policy(model, "mixed_bfloat16") if how == "wrapper" else model

  def loss(kernel):
    variables = kind({"params": {"dense": {"kernel": kernel, "bias": jnp.zeros(2)}}})
    with scope("mixed_bfloat16") if how == "scope" else contextlib.nullcontext():
      return model.apply(variables, X * 0, mutable=["losses"])[1]["losses"]["l2"][0]

  plain = kind({"params": {"dense": ones(2)}})
  calls.clear()
  jax.eval_shape(lambda: Does(penalised).apply(plain, X, mutable=["losses"]))
  wanted_calls = set(calls)  # The container, and paths for a filter by path.
  calls.clear()
  penalty, gradient = run(jax.value_and_grad(loss), kernel)
  assert penalty.dtype == gradient.dtype == F32
  wanted = np.sum(np.square(np.asarray(kernel, np.float64)))
  np.testing.assert_allclose(np.float64(penalty), wanted, rtol=1e-7)
  np.testing.assert_array_equal(np.asarray(gradient), 2 * np.asarray(kernel))
  assert set(calls) == wanted_calls
  assert {dtype for name, dtype in calls if name != "container"} == {"float32"}


def test_parameters_returned_from_a_model_are_stored_ones():
  def body(module, x):
    out = nn.Dense(2, name="dense")(x)
    return module.variables["params"], out

  returning = Does(body)
  variables = {"params": {"dense": ones(2)}}
  for policy, dtype in (("c=bf16", BF16), ("mixed_bfloat16", F32)):
    model = with_policy(returning, policy)
    for params, out in (model.apply(variables, X), model.bind(variables)(X)):
      assert bits(params) == bits(variables["params"])
      assert jax.tree.structure(params) == jax.tree.structure(variables["params"])
      assert out.dtype == dtype
  # An output dtype is that of all results.
  params, out = with_policy(returning, "bfloat16").apply(variables, X)
  assert set(jax.tree.leaves(dtypes(params))) == {"bfloat16"}


# Writing


def writes(module, x):
  # Keeps a cache, statistics and a parameter that it changes itself; sows something new.
  is_there = module.has_variable("cache", "memory")
  memory = module.variable("cache", "memory", jnp.zeros, x.shape, jnp.float32)
  index = module.variable("cache", "index", lambda: jnp.zeros((), jnp.int32))
  total = module.variable("statistics", "total", jnp.zeros, x.shape, jnp.float32)
  moved = module.variable("params", "moved", jnp.ones, (8,))
  if is_there:
    memory.value = memory.value * 0.5 + x
    index.value = index.value + 1
    moved.value = moved.value - 2.0**-3 * x.mean(0)
    module.put_variable("params", "twice", module.param("twice", nn.initializers.ones, (8,)) * 2)
  total.value = total.value + x
  y = nn.Dense(3)(memory.value)
  module.sow("new", "y", y)
  return y


MUTABLE = ["params", "cache", "statistics", "new"]


def written(stored):
  params = {"moved": jnp.ones(8), "twice": jnp.ones(8), "Dense_0": ones(3)}
  cache = {"memory": (3 * X).astype(stored), "index": jnp.zeros((), jnp.int32)}
  return {"params": params, "cache": cache, "statistics": {"total": jnp.zeros(X.shape)}}


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@CONTAINERS
def test_a_cache_is_kept_in_the_dtype_that_it_came_in(stored, kind):
  variables, half = written(stored), "bfloat16"
  model = with_policy(Does(writes), f"mixed_{half}")

  def apply(variables):
    return model.apply(variables, X, mutable=MUTABLE)

  program = jax.make_jaxpr(apply)(kind(variables))
  assert [p.dtypes for p in products(program)] == [(half, half)]
  out, changed = run(apply, kind(variables))
  assert out.dtype == F32
  assert type(changed) is type(Does(writes).apply(kind(variables), X, mutable=MUTABLE)[1])
  # Stored variables keep their dtype. A new one holds the float32 sum that the policy returns.
  assert dtypes(changed["cache"]) == kind({"memory": stored, "index": "int32"})
  assert set(jax.tree.leaves(dtypes((changed["params"], changed["statistics"])))) == {"float32"}
  assert dtypes(changed["new"]["y"]) == ("float32",)
  assert int(changed["cache"]["index"]) == 1
  # The input is float32, and so is what is added to it: it is rounded where it is kept.
  memory = variables["cache"]["memory"]
  wanted = (np.asarray(memory, np.float32) * np.float32(0.5) + np.asarray(X)).astype(memory.dtype)
  # The other half type is read in that of the policy.
  loss = 0 if stored in ("float32", half) else 2.0**-8
  np.testing.assert_allclose(changed["cache"]["memory"], wanted, rtol=loss, atol=0)


def test_put_variable_of_another_structure_is_stored_as_it_is():
  def replaces(module, x):
    module.variable("cache", "c", lambda: jnp.zeros(3))
    module.put_variable("cache", "c", {"a": x.mean(0), "b": 3})
    return x

  with scope("bfloat16"):
    _, changed = Does(replaces).apply({"cache": {"c": jnp.zeros(3)}}, X, mutable=["cache"])
  assert changed["cache"]["c"]["b"] == 3
  np.testing.assert_allclose(changed["cache"]["c"]["a"], X.mean(0), atol=1e-7)


PERTURBED = Does(lambda module, x: nn.tanh(module.perturb("bump", nn.Dense(2)(x))))


@pytest.mark.parametrize("half", HALF)
@WAYS
def test_a_float32_perturbation_decides_no_dtype_and_gets_a_float32_gradient(way, half):
  params, bump = {"Dense_0": ones(2)}, {"bump": jnp.zeros((2, 2))}

  def loss(perturbations):
    given = {"params": params, "perturbations": perturbations}
    y = call(way, PERTURBED, f"c={half}", given, X)
    return y.sum(dtype=F32), y

  found, y = run(jax.grad(loss, has_aux=True), bump)
  assert (y.dtype, found["bump"].dtype) == (half, F32)
  wanted = 1 - np.asarray(y, np.float64) ** 2
  np.testing.assert_allclose(found["bump"], wanted, atol=2 * float(jnp.finfo(half).eps))


# Random numbers


class Drops(nn.Module):
  """Drops something in a submodule of `setup` and in its method, before and after a product."""

  def setup(self):
    self.first = nn.Dropout(0.5, deterministic=False)
    self.dense = nn.Dense(8)

  def __call__(self, x, fail=False):
    x = self.dense(self.first(x))
    if fail:
      raise ZeroDivisionError
    return jnp.where(jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape), x, 0)


@pytest.mark.slow
def test_the_same_numbers_are_dropped_as_without_a_policy():
  model, x, rngs = Drops(), jnp.ones((4, 8)), {"dropout": jax.random.key(3)}
  params = {"params": {"dense": {"kernel": jnp.eye(8), "bias": jnp.zeros(8)}}}
  ours, plain = with_policy(model, "mixed_bfloat16"), model.bind(params, rngs=rngs)
  bound, in_scope = ours.bind(params, rngs=rngs), model.bind(params, rngs=rngs)
  first, second = plain(x), plain(x)  # Zeros, ones, twos and fours, which bfloat16 has.
  assert 0 < np.count_nonzero(first) < first.size
  assert bits(first) != bits(second)
  for apply in (ours.apply, jax.jit(ours.apply)):
    assert bits(apply(params, x, rngs=rngs)) == bits(first)
  with scope("mixed_bfloat16"):
    assert bits(model.apply(params, x, rngs=rngs)) == bits(first)
    assert [bits(in_scope(x)) for _ in range(2)] == [bits(first), bits(second)]
  # A call that fails uses up no random numbers.
  with pytest.raises(ZeroDivisionError):
    bound(x, fail=True)
  assert [bits(bound(x)) for _ in range(2)] == [bits(first), bits(second)]


# What surrounds a call


def test_full_precision_is_the_same_in_a_module_that_a_rule_picked():
  def inside(module, x):
    # What full_precision returns is an operand of an addition, and that of a matmul.
    y = mpjax.full_precision(lambda x: x * 3)(nn.Dense(2)(x))
    return nn.Dense(2)(y + 1e-3 * y)

  outer = Does(lambda module, x: Does(inside, name="inner")(x))
  variables = outer.init(KEY, X)
  plain, picked = (
    with_policy(outer, "c=float16", rules).apply(variables, X)
    for rules in ((), [Rule("c=float16", path="inner")])
  )
  np.testing.assert_array_equal(bits(plain), bits(picked))


class Helped(nn.Module):
  """Makes layers and a parameter in a method that `setup` calls, with an argument of its own."""

  def setup(self):
    self.first = nn.Dense(4)
    self.shift = self.prepared(3.0)

  def prepared(self, factor):
    self.second = nn.Dense(4)
    return self.param("shift", nn.initializers.ones, (4,)) * factor

  def __call__(self, x):
    return self.second(self.first(x)) + self.shift


@WAYS
def test_a_method_that_setup_calls_is_given_its_own_argument(way):
  x = jnp.arange(8.0).reshape(2, 4)
  eye = {"kernel": jnp.eye(4), "bias": jnp.zeros(4)}
  variables = {"params": {"first": eye, "second": eye, "shift": jnp.full(4, 2.0)}}
  np.testing.assert_array_equal(call(way, Helped(), "mixed_bfloat16", variables, x), x + 6)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Context:
  z: Any


@WAYS
@pytest.mark.parametrize("kind", [Context, lambda z: types.SimpleNamespace(z=z, log=[])])
def test_an_object_that_is_changed_is_changed_by_python(way, kind):
  # Flax counts the names of submodules, and they are called again. One is no tree to JAX.
  def body(module, context):
    context.z = nn.Dense(3)(context.z)
    vars(context).get("log", []).append(context.z)
    return context.z

  model, context = Does(body), kind(X)
  variables = model.init(KEY, kind(X))
  with pytest.warns(UserWarning, match="got one that changes an argument in place"):
    out = call(way, model, "c=bf16", variables, context)
  assert context.z is out
  assert vars(context).get("log", [out]) == [out]
  np.testing.assert_allclose(out, model.apply(variables, kind(X)), atol=0.02)


class Keyed(nn.Module):
  """Returns the order in which `setup` and a method find what the module holds and is given."""

  held: Any

  def setup(self):
    self.keys = list(self.held)

  def __call__(self, given=None):
    within = given and (list(given), given["z"]())
    return list(self.keys), list(self.held), list(self.held["a"][0]), within


@WAYS
@CONTAINERS
def test_what_a_module_holds_and_is_given_is_in_its_order(way, kind):
  inner = Keyed({"z": None, "a": [kind({"q": 1, "b": 2})]})
  model = Keyed(kind({"z": inner, "a": [{"q": inner, "b": 2}]}))
  order = ["z", "a"], ["z", "a"], ["q", "b"]
  assert call(way, model, "c=bf16", {}) == (*order, None)
  bound = model.bind({})
  with scope("c=bf16"):
    assert bound({"z": bound.held["z"], "a": X}) == (*order, (["z", "a"], (*order, None)))


def test_variables_keep_their_dtypes_though_they_hold_one_array():
  def holds(module, x):
    held = [
      module.variable("state", name, jnp.zeros, (2, 3), dtype)
      for name, dtype in (("a", jnp.float32), ("b", jnp.bfloat16))
    ]
    y = nn.Dense(3)(x)
    for each in held:
      each.value = y
    return y

  variables = Does(holds).init(KEY, X)
  variables["state"]["b"] = variables["state"]["b"].astype("bfloat16")
  _, new = with_policy(Does(holds), "mixed_bfloat16").apply(variables, X, mutable=["state"])
  assert [new["state"][name].dtype for name in "ab"] == ["float32", "bfloat16"]


class WritesGradient(nn.Module):
  @nn.compact
  def __call__(self, x, ref):
    tap = jax.custom_vjp(lambda ref, x: x)

    def backward(ref, g):
      ref[...] = g
      return None, g

    tap.defvjp(lambda ref, x: (x, ref), backward)
    return tap(ref, nn.Dense(8)(x))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_reference_that_a_derivative_rule_writes(transform):
  model, x, ref = WritesGradient(), X, jax.new_ref(jnp.zeros((2, 8)))
  variables = model.init(KEY, x, ref)
  low = mpjax.with_policy(model, "mixed_bfloat16")

  def loss(variables, ref):
    return jnp.sum(low.apply(variables, x, ref) ** 2)

  transform(jax.grad(loss))(variables, ref)
  np.testing.assert_array_equal(ref[...], 2 * low.apply(variables, x, ref))
