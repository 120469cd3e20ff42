"""The outermost call: what it is given, what it returns, and what it does where tracing raises."""

import contextlib
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, freeze

import mpjax
from tests.linen.products import HALF, KEY, RAW, X, all_half, dtypes, operands
from tests.programs import Derivatives, bits, products

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")

WAYS = pytest.mark.parametrize("way", ["wrapper", "scope", "bound"])


def call(way, model, policy, variables, *args, **kwargs):
  """Calls a model under a policy, by one of the three ways that there are."""
  if way == "wrapper":
    return with_policy(model, policy).apply(variables, *args, **kwargs)
  with scope(policy):
    if way == "scope":
      return model.apply(variables, *args, **kwargs)
    bound = model.bind(variables, **kwargs)
    return bound(*args)


@pytest.mark.parametrize("half", HALF)
@WAYS
def test_the_gradient_of_a_table_adds_up_in_the_stored_dtype(way, half):
  """In half a sum of ones ends where the distance of two numbers is more than one."""
  ids = jnp.zeros(4096, jnp.int32)
  model, variables = nn.Embed(2, 1), {"params": {"embedding": jnp.ones((2, 1))}}

  def loss(variables):
    return call(way, model, f"c={half}", variables, ids).sum(dtype=jnp.float32)

  (found,) = jax.tree.leaves(jax.grad(loss)(variables))
  assert found.dtype == jnp.float32
  np.testing.assert_array_equal(found, [[4096.0], [0.0]])


class TakesHalfAlone(nn.Module):
  """Draws a mask, and then calls what takes no float32, as a kernel may."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dropout(0.5, deterministic=False)(x)
    if x.dtype == jnp.float32:
      raise ValueError("this kernel takes low precision alone")
    return x * 2


@WAYS
def test_a_module_that_raises_in_float32_draws_the_same_masks_in_its_compute_dtype(way):
  x, rngs = jnp.ones((8, 16)), {"dropout": KEY}
  model = TakesHalfAlone()
  found = call(way, model, "c=bf16", {}, x, rngs=rngs)
  plain = model.apply({}, x.astype("bfloat16"), rngs=rngs)
  assert found.dtype == jnp.bfloat16
  np.testing.assert_array_equal(found, plain)
  assert 0 < np.count_nonzero(plain) < plain.size


@WAYS
def test_what_raises_in_every_dtype_raises_what_float32_raised(way):
  class Refuses(nn.Module):
    @nn.compact
    def __call__(self, x):
      raise ValueError(f"no {x.dtype}")

  with pytest.raises(ValueError, match="no float32"):
    call(way, Refuses(), "bfloat16", {}, X)


class Looks(nn.Module):
  """Asks for a value, between two layers that can be traced."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(4, name="before")(x)
    count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
    count.value = count.value + 1
    if float(x.sum()) > 1e9:
      raise ValueError("too large")
    return nn.Dense(2, name="after")(x)


@WAYS
def test_a_body_that_looks_at_values_runs_as_python_and_its_submodules_are_rewritten(way):
  model = Looks()
  variables = model.init(KEY, X)
  with pytest.warns(UserWarning, match="expected a body that can be traced") as record:
    returned = call(way, model, "c=bf16", variables, X, mutable=["counts"])
  assert len(record) == 1
  assert "test_outermost.py" in str(record[0].message)  # The line that asks.
  out, state = returned if way != "bound" else (returned, None)
  # Each layer by hand: operands are rounded, and so is the result.
  half = jax.tree.map(lambda p: p.astype("bfloat16"), variables["params"])
  wanted = X.astype("bfloat16")
  for name, features in (("before", 4), ("after", 2)):
    wanted = nn.Dense(features, dtype=jnp.bfloat16).apply({"params": half[name]}, wanted)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out, wanted)
  assert state is None or int(state["counts"]["calls"]) == 1 + int(variables["counts"]["calls"])


class Keeps(nn.Module):
  """Writes to what is there, and adds something new."""

  @nn.compact
  def __call__(self, x):
    old = self.variable("kept", "old", jnp.zeros, (2, 4))
    y = nn.Dense(4)(x)
    old.value = y
    self.sow("new", "y", y)
    return y


@pytest.mark.parametrize("kind", [dict, freeze], ids=["dict", "FrozenDict"])
def test_what_was_stored_keeps_its_dtype_and_what_is_new_has_that_of_the_result(kind):
  variables = Keeps().init(KEY, X)
  variables = {**variables, "kept": {"old": jnp.zeros((2, 4), jnp.float16)}}
  del variables["new"]
  model = with_policy(Keeps(), "mixed_bfloat16")

  def run(variables):
    return model.apply(variables, X, mutable=["kept", "new"])

  out, state = run(kind(variables))
  assert type(state) is type(Keeps().apply(kind(variables), X, mutable=["kept", "new"])[1])
  assert dtypes(state)["kept"]["old"] == "float16"
  assert dtypes(state)["new"]["y"] == ("bfloat16",)
  assert out.dtype == jnp.float32
  abstract = jax.eval_shape(run, kind(variables))
  assert dtypes(abstract) == dtypes((out, state))


@WAYS
def test_variables_of_numpy_are_parameters_like_others(way):
  model = nn.Dense(4)
  variables = model.init(KEY, X)
  loaded = jax.tree.map(np.asarray, variables)
  found = call(way, model, "c=bf16", loaded, X)
  assert found.dtype == jnp.bfloat16
  assert bits(found) == bits(call(way, model, "c=bf16", variables, X))


@WAYS
def test_what_is_no_array_comes_and_goes_as_it_is(way):
  given, returned = object(), object()

  class Passes(nn.Module):
    @nn.compact
    def __call__(self, x, thing, size):
      assert thing is given
      assert type(size) is int
      return nn.Dense(size)(x), returned, "text", size

  variables = Passes().init(KEY, X, given, 3)
  out, *rest = call(way, Passes(), "c=f16", variables, X, given, 3)
  assert out.dtype == jnp.float16
  assert rest == [returned, "text", 3]


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


@WAYS
@pytest.mark.parametrize("hiding", HIDING)
def test_an_array_in_an_object_that_is_no_tree_comes_out_as_an_array(way, hiding):
  hide, get = HIDING[hiding]

  class Hides(nn.Module):
    @nn.compact
    def __call__(self, x):
      return hide(nn.Dense(4)(x))

  variables = {"params": {"Dense_0": nn.Dense(4).init(KEY, X)["params"]}}
  with pytest.warns(UserWarning, match="expected a body that can be traced") as record:
    out = get(call(way, Hides(), "c=bf16", variables, X))
  assert "with arrays in it, which is no tree" in str(record[0].message)
  assert out.dtype == jnp.bfloat16
  wanted = call(way, nn.Dense(4), "c=bf16", {"params": variables["params"]["Dense_0"]}, X)
  np.testing.assert_array_equal(out, wanted)


@WAYS
def test_a_change_of_an_argument_in_place_is_there_after_the_call(way):
  class Notes(nn.Module):
    @nn.compact
    def __call__(self, x, notes):
      notes["inner"] = nn.Dense(4)(x)
      return nn.Dense(2)(notes["inner"])

  inner, outer = nn.Dense(4).init(KEY, X)["params"], nn.Dense(2).init(KEY, jnp.ones((1, 4)))
  variables, notes = {"params": {"Dense_0": inner, "Dense_1": outer["params"]}}, {}
  with pytest.warns(UserWarning, match="one that changes an argument in place"):
    out = call(way, Notes(), "c=bf16", variables, X, notes)
  assert out.dtype == notes["inner"].dtype == jnp.bfloat16
  wanted = call(way, nn.Dense(4), "c=bf16", {"params": inner}, X)
  np.testing.assert_array_equal(notes["inner"], wanted)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16"])
def test_the_dtype_of_what_an_object_hides_is_warned_of_where_it_is_another(policy):
  class Hides(nn.Module):
    @nn.compact
    def __call__(self, x):
      return Box(nn.Dense(4)(x))

  model, variables = with_policy(Hides(), policy), Hides().init(KEY, X)
  with pytest.warns(UserWarning, match="which is no tree|stay in bfloat16") as record:
    assert model.apply(variables, X).content.dtype == jnp.bfloat16
  found = ["of which content stay in bfloat16" in str(w.message) for w in record]
  assert found == ([False] if policy == "bfloat16" else [True, False])


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
def test_a_model_inside_a_call_that_is_traced_is_rewritten_with_it(wrapped):
  """It is traced once: in the program of the outer there is one product of each."""

  class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
      inner = nn.Dense(2, parent=None)
      inner = with_policy(inner, "float16") if wrapped else inner
      weights = {"params": {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}}
      return inner.apply(weights, nn.Dense(4)(x))

  variables = Outer().init(KEY, X)
  program = jax.make_jaxpr(with_policy(Outer(), "bfloat16").apply)(variables, X)
  inner = "float16" if wrapped else "bfloat16"
  assert [p.dtypes for p in products(program)] == [("bfloat16",) * 2, (inner,) * 2]


# Parameters


calls: list[tuple[str, str]] = []
"""What modules note while they are traced."""


def lifted(cls):
  return {
    "plain": cls,
    "remat": nn.remat(cls),
    "jit": nn.jit(cls),
    "vmap": nn.vmap(
      cls, in_axes=None, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=2
    ),
  }


@pytest.mark.case("B092", "B069")
@pytest.mark.parametrize("lift", ["plain", "remat", "jit", "vmap"])
@pytest.mark.parametrize("model", RAW.values(), ids=RAW)
def test_raw_parameters_compute_in_half_with_float32_gradients(model, lift):
  model = lifted(type(model))[lift]()
  variables = jax.eval_shape(model.init, KEY, X)
  policied = with_policy(model, "mixed_bfloat16")
  assert dtypes(jax.eval_shape(policied.init, KEY, X)) == dtypes(variables)
  all_half(policied.apply, variables, X)

  params = variables["params"]
  if "tree" in params:
    return  # Integer leaves have no gradient; the forward pass is what this model is for.

  def loss(params):
    return policied.apply({"params": params}, X).sum()

  assert set(jax.tree.leaves(dtypes(jax.eval_shape(jax.grad(loss), params)))) == {"float32"}
  all_half(jax.grad(loss), params)


class OverTime(nn.Module):
  """One weight, used at each of T steps."""

  steps: int = 300

  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.ones, (1,))

    def step(module, carry, x):
      return carry, x * module.get_variable("params", "w")

    # A weight read inside of the body, at each step.
    body = nn.scan(step, variable_broadcast="params", split_rngs={"params": False})
    return body(self, (), jnp.broadcast_to(x, (self.steps, 1)))[1] + 0 * w


@pytest.mark.case("A75", "B069")
def test_the_cotangents_of_a_weight_used_many_times_add_up_in_float32():
  """Cast once at entry, a sum of 300 terms would be rounded to 8 bits at each step."""
  model = with_policy(OverTime(), "mixed_bfloat16")
  params = {"params": {"w": jnp.ones(1)}}
  x = jnp.full((1,), 1 + 2.0**-7)
  grad = jax.grad(lambda p: model.apply(p, x).sum())(params)["params"]["w"]
  assert grad.dtype == F32
  assert float(grad[0]) == 300 * (1 + 2.0**-7)
  in_half = np.asarray(0, jnp.bfloat16)
  for _ in range(300):
    in_half = in_half + np.asarray(1 + 2.0**-7, jnp.bfloat16)
  assert float(in_half) == 346  # 15 % off


def casts_of_parameters(fun, params):
  """Returns how often each parameter is cast to half, counted where it is an input."""
  jaxpr = jax.make_jaxpr(fun)(params).jaxpr
  names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
  found = {}

  def walk(jaxpr, owners):
    for eqn in jaxpr.eqns:
      if eqn.primitive.name == "convert_element_type" and eqn.params["new_dtype"] == jnp.bfloat16:
        (var,) = eqn.invars
        if not isinstance(var, jax.extend.core.Literal) and var in owners:
          found[owners[var]] = found.get(owners[var], 0) + 1
      for inner in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")
      ):
        if hasattr(inner, "jaxpr") and len(inner.jaxpr.invars) == len(eqn.invars):
          passed = {
            var: owners[outer]
            for var, outer in zip(inner.jaxpr.invars, eqn.invars, strict=True)
            if not isinstance(outer, jax.extend.core.Literal) and outer in owners
          }
          walk(inner.jaxpr, passed)

  walk(jaxpr, dict(zip(jaxpr.invars, names, strict=True)))
  return found


@pytest.mark.case("A75")
def test_one_cast_for_each_parameter_and_use():
  class Uses(nn.Module):
    @nn.compact
    def __call__(self, x):
      shared = nn.Dense(3, name="twice")
      w = self.param("three_reads", nn.initializers.ones, (3, 3))
      return nn.Dense(3, name="once")(shared(shared(x))) @ w @ w @ w

  params = Uses().init(KEY, X)["params"]
  model = with_policy(Uses(), "mixed_bfloat16")

  def forward(params):
    return model.apply({"params": params}, X)

  wanted = {
    "['once']['kernel']": 1,
    "['twice']['kernel']": 2,
    "['three_reads']": 3,
    # Biases are broadcast in float32 beforehand, so that their gradients are float32 sums.
  }
  assert casts_of_parameters(forward, params) == wanted
  # The gradient casts nothing again.
  assert casts_of_parameters(jax.grad(lambda p: forward(p).sum()), params) == wanted


class Tied(nn.Module):
  """A head that reads the table of another module from the variables."""

  way: str = "T @"
  child: bool = True

  @nn.compact
  def __call__(self, ids):
    if self.child:
      embed = nn.Embed(11, 4, name="embed")
      x = embed(ids)
      table = embed.variables["params"]["embedding"]
      again = self.variables["params"]["embed"]["embedding"]
      assert table.shape == again.shape == (11, 4)
    else:
      self.param("table", nn.initializers.lecun_normal(), (11, 4))
      table = self.variables["params"]["table"]
      x = jnp.take(table, ids, axis=0)
    return TIED[self.way](x, table)


TIED = {
  "T @": lambda x, table: x @ table.T,
  "dot": lambda x, table: jnp.dot(x, jnp.transpose(table)),
  "jnp.matmul": lambda x, table: jnp.matmul(x, table.transpose()),
  "einsum": lambda x, table: jnp.einsum("btd,vd->btv", x, table),
  "right operand": lambda x, table: (table @ x.reshape(-1, 4).T).T,
  "asarray": lambda x, table: x @ jnp.asarray(table).swapaxes(0, 1),
  "index": lambda x, table: x @ table[:7].T,
  "arithmetic": lambda x, table: x @ (2 * table + 1 - table / 2).T,
  "dot_general": lambda x, table: jax.lax.dot_general(
    x, jnp.asarray(table), (((2,), (1,)), ((), ()))
  ),
  "inner jit": lambda x, table: jax.jit(lambda x, t: x @ t.T)(x, jnp.asarray(table)),
  "astype": lambda x, table: x @ table.astype(x.dtype).T,
  "at": lambda x, table: x @ table.at[0].set(0).T,
}
IDS = jnp.asarray([[1, 4, 4], [0, 10, 257 % 11]])


@pytest.mark.case("B092", "B082")
@pytest.mark.parametrize("child", [True, False], ids=["child", "own"])
@pytest.mark.parametrize("way", TIED)
@pytest.mark.parametrize("how", ["wrapper", "scope"])
def test_tied_weights_read_through_variables(way, child, how):
  model = Tied(way, child)
  variables = jax.eval_shape(model.init, KEY, IDS)
  apply = with_policy(model, "mixed_bfloat16").apply

  def in_scope(*args):
    with scope("mixed_bfloat16"):
      return model.apply(*args)

  apply = apply if how == "wrapper" else in_scope
  all_half(apply, variables, IDS, count=1)
  grads = jax.eval_shape(jax.grad(lambda v: apply(v, IDS).sum()), variables)
  assert set(jax.tree.leaves(dtypes(grads))) == {"float32"}
  all_half(jax.grad(lambda v: apply(v, IDS).sum()), variables)


@pytest.mark.case("B082", "B093")
def test_the_gradients_of_both_uses_of_a_table_sum_in_float32():
  model = Tied("T @", child=False)
  table = np.zeros((11, 4), np.float32)
  table[0] = 1.0
  table[1] = 2.0**-8  # Too small beside 1 for a sum in bfloat16.
  variables = {"params": {"table": jnp.asarray(table)}}
  ids = jnp.asarray([[1]])
  policied = with_policy(model, "mixed_bfloat16")
  grad = jax.grad(lambda v: policied.apply(v, ids)[0, 0, 0] + policied.apply(v, ids)[0, 0, 1])(
    variables
  )["params"]["table"]
  # d/dt1 of t1·t0 + t1·t1 = t0 + 2 t1 = 1 + 2^-7, three terms from two uses.
  np.testing.assert_array_equal(np.asarray(grad[1]), np.full(4, 1 + 2.0**-7, np.float32))


class Penalised(nn.Module):
  """Computes a penalty on its own weights, as L2 terms in a forward pass do."""

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(2, name="dense")(x)
    params = self.variables["params"]
    leaves = jax.tree.leaves(params)
    calls.extend((type(leaf).__name__, str(leaf.dtype)) for leaf in leaves)
    by_path = jax.tree_util.tree_leaves_with_path(params)
    calls.extend((type(leaf).__name__, str(leaf.dtype)) for _, leaf in by_path)
    paths = [jax.tree_util.keystr(path) for path, _ in by_path]
    calls.append(("paths", str(paths)))
    structure = jax.tree.structure(params)
    penalty = sum(jax.tree.leaves(jax.tree.map(lambda w: jnp.sum(jnp.square(w)), params)))
    self.sow("losses", "l2", penalty)
    assert jax.tree.structure(jax.tree.map(lambda w: w, params)) == structure
    return x


@pytest.mark.case("A107")
@pytest.mark.parametrize("how", ["wrapper", "scope", "neither"])
def test_a_penalty_on_weights_is_computed_on_the_stored_ones(how):
  variables = Penalised().init(KEY, X)["params"]
  kernel = np.full((3, 2), 1 + 2.0**-12, np.float32)  # bfloat16 would see 1.
  variables = {"params": {"dense": {**variables["dense"], "kernel": jnp.asarray(kernel)}}}
  calls.clear()
  if how == "scope":
    with scope("mixed_bfloat16"):
      _, kept = Penalised().apply(variables, X, mutable=["losses"])
  else:
    model = with_policy(Penalised(), "mixed_bfloat16") if how == "wrapper" else Penalised()
    _, kept = model.apply(variables, X, mutable=["losses"])
  (penalty,) = kept["losses"]["l2"]
  assert penalty.dtype == F32
  np.testing.assert_allclose(np.float64(penalty), np.sum(np.float64(kernel) ** 2), rtol=1e-7)
  kinds = [call for call in calls if call[0] != "paths"]
  assert {dtype for _, dtype in kinds} == {"float32"}
  # Paths as without a policy: a filter by path, such as one for biases, still works.
  assert ("paths", "[\"['dense']['bias']\", \"['dense']['kernel']\"]") in calls


@pytest.mark.case("A107")
def test_the_gradient_of_a_penalty_is_float32_and_exact():
  model = with_policy(Penalised(), "mixed_bfloat16")
  kernel = jnp.full((3, 2), 1 + 2.0**-12)

  def loss(kernel):
    variables = {"params": {"dense": {"kernel": kernel, "bias": jnp.zeros(2)}}}
    return model.apply(variables, X * 0, mutable=["losses"])[1]["losses"]["l2"][0]

  grad = jax.grad(loss)(kernel)
  assert grad.dtype == F32
  np.testing.assert_array_equal(np.asarray(grad), 2 * np.asarray(kernel))


@pytest.mark.parametrize("kind", [dict, FrozenDict], ids=["dict", "FrozenDict"])
def test_variables_keep_their_container(kind):
  class Looks(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(2, name="dense")(x)
      calls.append((type(self.variables).__name__, str(jax.tree.structure(self.variables))))
      return x

  variables = Looks().init(KEY, X)
  variables = freeze(variables) if kind is FrozenDict else variables
  calls.clear()
  Looks().apply(variables, X)
  with_policy(Looks(), "mixed_bfloat16").apply(variables, X)
  plain, ours = calls
  assert ours[0] == plain[0]


# Writing


class Writes(nn.Module):
  """Keeps a cache and a parameter that it changes itself."""

  @nn.compact
  def __call__(self, x):
    is_there = self.has_variable("cache", "memory")
    memory = self.variable("cache", "memory", jnp.zeros, x.shape, jnp.float32)
    index = self.variable("cache", "index", lambda: jnp.zeros((), jnp.int32))
    total = self.variable("statistics", "total", jnp.zeros, x.shape, jnp.float32)
    if is_there:
      memory.value = memory.value * 0.5 + x
      index.value = index.value + 1
    total.value = total.value + x
    return nn.Dense(3)(memory.value)


@pytest.mark.case("B087", "A106", "B083")
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("half", HALF)
def test_a_cache_is_kept_in_the_dtype_that_it_came_in(stored, half):
  variables = Writes().init(KEY, X)
  memory = (3 * X).astype(stored)
  variables = {**variables, "cache": {**variables["cache"], "memory": memory}}
  model = with_policy(Writes(), f"mixed_{half}")
  _, changed = model.apply(variables, X, mutable=["cache", "statistics"])
  # Statistics, and whatever else is kept in other collections, are never cast.
  assert dtypes(changed) == {
    "cache": {"memory": stored, "index": "int32"},
    "statistics": {"total": "float32"},
  }
  assert int(changed["cache"]["index"]) == 1
  # The input is float32, and so is what is added to it: it is rounded where it is kept.
  wanted = (np.asarray(memory, np.float32) * np.float32(0.5) + np.asarray(X)).astype(memory.dtype)
  # The other half type is read in that of the policy.
  loss = 0 if stored in ("float32", half) else 2.0**-8
  np.testing.assert_allclose(changed["cache"]["memory"], wanted, rtol=loss, atol=0)
  assert operands(lambda v: model.apply(v, X, mutable=["cache", "statistics"]), variables) == [
    (half, half)
  ]


@pytest.mark.case("B087", "B073")
def test_a_float32_cache_carried_through_a_scan():
  variables = Writes().init(KEY, X)
  model = with_policy(Writes(), "mixed_bfloat16")

  def step(cache, x):
    out, changed = model.apply({**variables, "cache": cache}, x, mutable=["cache", "statistics"])
    return changed["cache"], out

  def decode(cache, xs):
    return jax.lax.scan(step, cache, xs)

  cache, outs = jax.eval_shape(decode, variables["cache"], jnp.stack([X] * 3))
  assert dtypes(cache) == dtypes(variables["cache"])
  assert outs.dtype == F32
  all_half(decode, variables["cache"], jnp.stack([X] * 3))


def test_a_parameter_written_in_a_call_keeps_its_dtype():
  class Moves(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = self.variable("params", "w", jnp.ones, (3,))
      w.value = w.value - 2.0**-3 * x.mean(0)
      self.put_variable("params", "v", self.param("v", nn.initializers.ones, (3,)) * 2)
      return x * w.value

  variables = Moves().init(KEY, X)
  for policy in ("mixed_bfloat16", "mixed_float16"):
    _, changed = with_policy(Moves(), policy).apply(variables, X, mutable=["params"])
    assert dtypes(changed) == {"params": {"w": "float32", "v": "float32"}}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_what_is_written_has_its_gradient_where_it_equals_what_was_there(policy):
  class Remembers(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = self.param("w", nn.initializers.ones, (3,))
      kept = self.variable("cache", "kept", jnp.zeros, (3,))
      kept.value = x * w
      return kept.value

  def gradients(model, x, kept):
    def loss(x, w, kept):
      variables = {"params": {"w": w}, "cache": {"kept": kept}}
      return model.apply(variables, x, mutable=["cache"])[0].sum()

    return jax.tree.map(np.asarray, jax.grad(loss, (0, 1, 2))(x, jnp.full(3, 2.0), kept))

  x = jnp.array([0.0, 1.5, 4.0])
  for kept in (jnp.zeros(3), 2 * x, 2 * x + 2.0**-20):  # The last is equal once it is rounded.
    found = gradients(with_policy(Remembers(), policy), x, kept)
    # By mathematics: of x * w the gradients are w and x, and nothing of what was there is left.
    np.testing.assert_array_equal(found, [np.full(3, 2.0), x, np.zeros(3)])


def test_put_variable_of_another_structure_is_stored_as_it_is():
  class Replaces(nn.Module):
    @nn.compact
    def __call__(self, x):
      self.variable("cache", "c", lambda: jnp.zeros(3))
      self.put_variable("cache", "c", {"a": x.mean(0), "b": 3})
      return x

  with scope("bfloat16"):
    _, changed = Replaces().apply({"cache": {"c": jnp.zeros(3)}}, X, mutable=["cache"])
  assert changed["cache"]["c"]["b"] == 3
  np.testing.assert_allclose(changed["cache"]["c"]["a"], X.mean(0), atol=1e-7)


# Sharing


@pytest.mark.case("B093")
def test_one_weight_under_two_rules():
  class Uses(nn.Module):
    @nn.compact
    def __call__(self, x, dense):
      return x @ dense.variables["params"]["kernel"]

  class Shares(nn.Module):
    @nn.compact
    def __call__(self, x):
      dense = nn.Dense(3, use_bias=False, name="dense")
      x = dense(x)
      x = Uses(name="half")(x, dense)
      return Uses(name="full")(x, dense)

  variables = Shares().init(KEY, X)
  model = with_policy(
    Shares(), "mixed_bfloat16", [Rule("float16", path="half"), Rule("float32", path="full")]
  )
  assert operands(model.apply, variables, X) == [
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "float32"),
  ]
  assert dtypes(model.init(KEY, X)) == {"params": {"dense": {"kernel": "float32"}}}
  grads = jax.eval_shape(jax.grad(lambda v: model.apply(v, X).sum()), variables)
  assert dtypes(grads) == dtypes(variables)


@pytest.mark.case("B092")
def test_parameters_returned_from_a_model_are_stored_ones():
  class Returns(nn.Module):
    @nn.compact
    def __call__(self, x):
      out = nn.Dense(2, name="dense")(x)
      return self.variables["params"], out

  variables = Returns().init(KEY, X)
  for policy, dtype in (("c=bf16", BF16), ("mixed_bfloat16", F32)):
    params, out = with_policy(Returns(), policy).apply(variables, X)
    assert bits(params) == bits(variables["params"])
    assert jax.tree.structure(params) == jax.tree.structure(variables["params"])
    assert out.dtype == dtype
    bound = with_policy(Returns(), policy).bind(variables)
    assert bits(bound(X)[0]) == bits(variables["params"])
  # An output dtype is that of all results.
  params, out = with_policy(Returns(), "bfloat16").apply(variables, X)
  assert set(jax.tree.leaves(dtypes(params))) == {"bfloat16"}


def test_fields_of_a_dataclass_of_parameters():
  """A container of the user's own, registered as a tree, holds parameters too."""

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass
  class Weights:
    w: Any
    n: Any

  class Custom(nn.Module):
    @nn.compact
    def __call__(self, x):
      weights = self.param("weights", lambda key: Weights(jnp.ones((3, 2)), jnp.arange(2)))
      assert isinstance(weights, Weights)
      assert weights.n.dtype == jnp.int32
      return x @ weights.w

  variables = Custom().init(KEY, X)
  all_half(with_policy(Custom(), "mixed_bfloat16").apply, variables, X, count=1)


@pytest.mark.parametrize("kind", [dict, FrozenDict], ids=["dict", "FrozenDict"])
def test_all_collections_come_back_as_they_were_where_all_are_mutable(kind):
  variables = nn.Dense(2).init(KEY, X)
  variables = freeze(variables) if kind is FrozenDict else variables
  out, changed = with_policy(nn.Dense(2), "mixed_bfloat16").apply(variables, X, mutable=True)
  assert out.dtype == F32
  assert bits(changed) == bits(variables)
  assert set(changed) == {"params"}


# Random numbers


class Drops(nn.Module):
  """Drops what it does in `setup` and what it does in its method, before and after a product."""

  def setup(self):
    self.first = nn.Dropout(0.5, deterministic=False)
    self.dense = nn.Dense(8)

  def __call__(self, x, fail=False):
    x = self.dense(self.first(x))
    if fail:
      raise ZeroDivisionError
    return jnp.where(jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape), x, 0)


@pytest.mark.parametrize("how", ["apply", "bound", "scope", "bound in a scope", "jit"])
def test_the_same_numbers_are_dropped_as_without_a_policy(how):
  model, x = Drops(), jnp.ones((4, 8))
  params = {"params": {"dense": {"kernel": jnp.eye(8), "bias": jnp.zeros(8)}}}
  rngs = {"dropout": jax.random.key(3)}
  ours, plain = with_policy(model, "mixed_bfloat16"), model.bind(params, rngs=rngs)
  bound = ours.bind(params, rngs=rngs) if how == "bound" else model.bind(params, rngs=rngs)
  apply = jax.jit(ours.apply) if how == "jit" else ours.apply
  for turn in range(2):
    wanted = plain(x)  # Zeros, ones, twos and fours, which bfloat16 holds; others at each turn.
    if how.startswith("bound"):
      with scope("mixed_bfloat16") if "scope" in how else contextlib.nullcontext():
        found = bound(x)
    elif turn == 0 and how == "scope":
      with scope("mixed_bfloat16"):
        found = model.apply(params, x, rngs=rngs)
    elif turn == 0:
      found = apply(params, x, rngs=rngs)
    else:
      return
    assert 0 < np.count_nonzero(wanted) < wanted.size
    assert bits(found) == bits(wanted)


def test_a_call_that_fails_uses_up_no_random_numbers():
  model, x = Drops(), jnp.ones((4, 8))
  params = {"params": {"dense": {"kernel": jnp.eye(8), "bias": jnp.zeros(8)}}}
  rngs = {"dropout": jax.random.key(3)}
  bound = with_policy(model, "mixed_bfloat16").bind(params, rngs=rngs)
  with pytest.raises(ZeroDivisionError):
    bound(x, fail=True)
  assert bits(bound(x)) == bits(model.apply(params, x, rngs=rngs))


# What cannot be traced in float32, or at all


class Kernel(nn.Module):
  """A layer whose kernel takes low precision alone."""

  takes: str = "bfloat16"

  @nn.compact
  def __call__(self, x):
    calls.append(("kernel", str(x.dtype)))
    if str(x.dtype) != self.takes:
      raise ValueError(f"no {x.dtype}")
    return nn.Dense(3)(x)


class AroundKernel(nn.Module):
  takes: str = "bfloat16"

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(3)(x)
    calls.append(("around", str(x.dtype)))
    return nn.Dense(3)(Kernel(self.takes, name="kernel")(x))


@pytest.mark.parametrize("how", ["wrapper", "scope", "jit", "grad"])
def test_a_layer_that_raises_in_float32_is_called_in_its_compute_dtype(how):
  model = AroundKernel()
  variables = {"params": {**nn.Dense(3).init(KEY, X)["params"]}}
  variables = {
    "params": {
      "Dense_0": variables["params"],
      "Dense_1": variables["params"],
      "kernel": {"Dense_0": variables["params"]},
    }
  }
  ours = with_policy(model, "mixed_bfloat16")

  def apply(variables, x):
    if how == "scope":
      with scope("mixed_bfloat16"):
        return model.apply(variables, x)
    return ours.apply(variables, x)

  with pytest.raises(ValueError, match="no float32"):
    model.apply(variables, X)
  calls.clear()
  if how == "grad":
    grads = jax.grad(lambda v: apply(v, X).sum())(variables)
    assert set(jax.tree.leaves(dtypes(grads))) == {"float32"}
  else:
    out = (jax.jit(apply) if how == "jit" else apply)(variables, X)
    assert out.dtype == F32
  kinds = [dtype for kind, dtype in calls if kind == "kernel"]
  assert kinds[:2] == ["float32", "bfloat16"]
  # All else is traced as it was.
  assert {dtype for kind, dtype in calls if kind == "around"} == {"float32"}
  all_half(apply, variables, X, count=3)


class LooksAtValues(nn.Module):
  inside: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(3, name="first")(x)
    if self.inside:
      return LooksAtValues(name="inner")(x)
    factor = 2.0 if float(x.sum()) > -1e9 else 1.0
    return nn.Dense(3, name="second")(x) * factor


@pytest.mark.parametrize("how", ["wrapper", "scope", "bound"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_body_that_looks_at_values_runs_as_python_with_one_warning(how, inside):
  model = LooksAtValues(inside)
  variables = model.init(KEY, X)
  wanted = model.apply(variables, X)
  ours = with_policy(model, "mixed_bfloat16")

  def apply():
    if how == "scope":
      with scope("mixed_bfloat16"):
        return model.apply(variables, X)
    return ours.bind(variables)(X) if how == "bound" else ours.apply(variables, X)

  with pytest.warns(UserWarning, match="expected a body that can be traced") as warned:
    found = apply()
  texts = [str(w.message) for w in warned]
  assert all("factor = 2.0 if float(x.sum())" in text for text in texts), texts
  assert "the root" in texts[-1]
  assert found.dtype == F32
  # The layers computed in half.
  assert bits(found) != bits(wanted)
  np.testing.assert_allclose(found, wanted, rtol=0.03, atol=0.03)
  # To a trace there is no value to look at: it is the user's own error.
  with pytest.raises(jax.errors.ConcretizationTypeError):
    jax.jit(ours.apply)(variables, X)


def test_variables_that_are_no_mapping_are_the_models_own_error():
  with pytest.raises(Exception) as ours:
    with_policy(nn.Dense(2), "mixed_bfloat16").apply([1], X)
  with pytest.raises(type(ours.value)):
    nn.Dense(2).apply([1], X)


# Nothing of a trace stays


def test_no_tracer_is_left_behind():
  kept = []

  class Keeps(nn.Module):
    @nn.compact
    def __call__(self, x):
      self.sow("seen", "x", nn.Dense(3)(x))
      return nn.Dense(2)(x)

  variables = {"params": Keeps().init(KEY, X)["params"]}
  model = with_policy(Keeps(), "mixed_bfloat16")
  with jax.check_tracer_leaks():
    out, changed = jax.jit(lambda v, x: model.apply(v, x, mutable=["seen"]))(variables, X)
  kept.extend(jax.tree.leaves((out, changed)))
  assert not any(isinstance(x, jax.core.Tracer) for x in kept)
  assert dtypes(changed) == {"seen": {"x": ("bfloat16",)}}


class TakesDict(nn.Module):
  """Reads one entry of a dict, and returns a dict of the same keys."""

  @nn.compact
  def __call__(self, xs):
    return {key: nn.Dense(2)(x) if key == 1 else x for key, x in xs.items()}


@WAYS
def test_a_dict_whose_keys_do_not_sort_runs_as_python(way):
  odd, model = {1: X, "b": X}, TakesDict()
  variables = model.init(KEY, {1: X})
  with pytest.warns(UserWarning, match="got one that is given a dict whose keys do not sort"):
    found = call(way, model, "c=bfloat16", variables, odd)
  expected = call(way, nn.Dense(2), "c=bfloat16", {"params": variables["params"]["Dense_0"]}, X)
  assert found["b"] is X
  np.testing.assert_array_equal(bits(found[1]), bits(expected))


class Perturbed(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.tanh(self.perturb("bump", nn.Dense(2)(x)))


@pytest.mark.parametrize("half", HALF)
@WAYS
def test_perturbations_made_without_a_policy_take_the_dtype_of_what_they_meet(way, half):
  variables = Perturbed().init(KEY, X)
  assert variables["perturbations"]["bump"].dtype == F32
  assert call(way, Perturbed(), f"c={half}", variables, X).dtype == half

  def loss(perturbations):
    given = {**variables, "perturbations": perturbations}
    return call(way, Perturbed(), f"c={half}", given, X).sum(dtype=F32)

  found = jax.grad(loss)(variables["perturbations"])["bump"]
  y = np.asarray(call(way, Perturbed(), f"c={half}", variables, X), np.float64)
  assert found.dtype == F32
  np.testing.assert_allclose(found, 1 - y**2, atol=2 * float(jnp.finfo(half).eps))


class FullPrecisionInside(nn.Module):
  """What full_precision returns is read by an addition, and that by a matmul."""

  @nn.compact
  def __call__(self, x):
    y = mpjax.full_precision(lambda x: x * 3)(nn.Dense(2)(x))
    return nn.Dense(2)(y + 1e-3 * y)


def test_full_precision_is_the_same_in_a_module_that_a_rule_picked():
  class Outer(nn.Module):
    @nn.compact
    def __call__(self, x):
      return FullPrecisionInside(name="inner")(x)

  variables = Outer().init(KEY, X)
  plain, picked = (
    with_policy(Outer(), "c=float16", rules).apply(variables, X)
    for rules in ((), [Rule("c=float16", path="inner")])
  )
  np.testing.assert_array_equal(bits(plain), bits(picked))


# What repeats


@WAYS
def test_layers_that_are_alike_are_differentiated_once(way):
  """So tracing a step of a deep model takes little longer than that of a shallow one."""
  seen = Derivatives()

  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
      return x + seen.of(nn.Dense(3)(nn.LayerNorm()(x)))

  class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
      for _ in range(8):
        x = Layer()(x)
      return x

  variables = Model().init(KEY, X)
  cast = functools.partial(call, way, Model(), "mixed_bfloat16")
  jax.jit(jax.grad(lambda v: cast(v, X).sum())).trace(variables)
  assert 0 < seen.count <= 3  # The first reads an argument, and the last makes the result.


class Adds(nn.Module):
  """Adds what is a field of the module to what a layer returns."""

  grid: Any

  @nn.compact
  def __call__(self, x):
    return self.grid + nn.Dense(4)(x)


@pytest.mark.parametrize("half", HALF)
@WAYS
def test_an_array_that_is_closed_over_decides_whoever_traces(way, half):
  """Coordinates of up to 1,000 are whole numbers in float16, and multiples of 4 in bfloat16."""
  grid = np.linspace(0.3, 1000, 4, dtype="float32")
  variables = Adds(grid).init(KEY, X)
  layer = with_policy(nn.Dense(4), f"c={half}")
  wanted = grid + np.asarray(layer.apply({"params": variables["params"]["Dense_0"]}, X), np.float32)

  def fun(grid):
    return call(way, Adds(grid), f"c={half}", variables, X)

  for found in (fun(jnp.asarray(grid)), jax.jit(fun)(grid), jax.jvp(fun, (grid,), (grid,))[0]):
    assert found.dtype == F32
    # XLA may leave out the rounding of what the layer returns.
    np.testing.assert_allclose(found, wanted, atol=0.02)


class Reads(nn.Module):
  """Does with an array what only an array with values can do, in the way that `ask` does."""

  ask: Any

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(4)(x)
    return x if (found := self.ask(x)) is None else found


@pytest.mark.parametrize(
  "ask",
  [lambda x: x[x > 0], lambda x: print(f"{x.mean():.3f}"), lambda x: x.sharding and None],
  ids=["mask", "format", "sharding"],
)
@WAYS
def test_all_that_needs_values_runs_as_python(way, ask):
  model = Reads(ask)
  variables = model.init(KEY, X)
  with pytest.warns(UserWarning, match="needs the values of arrays: .*test_outermost.py"):
    found = call(way, model, "c=bf16", variables, X)
  layer = {"params": variables["params"]["Dense_0"]}
  wanted = call(way, nn.Dense(4), "c=bf16", layer, X)
  np.testing.assert_array_equal(found, wanted if ask(wanted) is None else wanted[wanted > 0])


@WAYS
def test_the_warning_names_what_the_user_called(way):
  variables = Looks().init(KEY, X)
  with pytest.warns(UserWarning, match="expected a body that can be traced") as record:
    call(way, Looks(), "c=bf16", variables, X, mutable=["counts"])
  name = "with_policy(model, policy)" if way == "wrapper" else "policy_scope(policy)"
  assert str(record[0].message).startswith(f"mpjax.linen.{name}: the root: ")


@WAYS
def test_an_output_dtype_holds_for_float64_too(way):
  """Nothing of float64 is rounded inside: it comes where `jax_enable_x64` is set."""
  with jax.enable_x64(True):
    x = jnp.asarray(X, jnp.float64)
    variables = nn.Dense(2).init(KEY, jnp.asarray(X, jnp.float32))
    assert call(way, nn.Dense(2), "bfloat16", variables, x).dtype == BF16


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
  found = call(way, Helped(), "mixed_bfloat16", variables, x)
  np.testing.assert_array_equal(found, x + 6)
