"""Parameters and caches: cast where they are read, stored as they were."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict, Scope, freeze
from flax.core.meta import is_axis_metadata
from jax.sharding import Mesh, PartitionSpec

import mpjax
from mpjax.linen._params import CastScope, LazyParam
from tests.linen.probes import KEY, X, calls, dtypes, text
from tests.programs import bits, products

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def operands(fun, *args):
  """Returns the dtypes of both operands of every product of a program."""
  return [p.dtypes for p in products(jax.make_jaxpr(fun)(*args))]


def all_half(fun, *args, count=None):
  found = operands(fun, *args)
  assert found
  assert count is None or len(found) == count
  assert all(dtypes == ("bfloat16", "bfloat16") for dtypes in found), found


class RawCompact(nn.Module):
  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 4))
    b = self.param("b", lambda key: jnp.ones(4))
    tree = self.param("tree", lambda key: {"u": jnp.ones((4, 2)), "n": jnp.arange(2)})
    assert tree["n"].dtype == jnp.int32
    return (x @ w + b) @ tree["u"]


class RawSetup(nn.Module):
  def setup(self):
    self.w = self.param("w", nn.initializers.lecun_normal(), (3, 4))
    self.variable_too = self.variable("params", "v", lambda: jnp.ones((4, 2)))

  def __call__(self, x):
    return x @ self.w @ self.variable_too.value


class RawGetVariable(nn.Module):
  @nn.compact
  def __call__(self, x):
    self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 4))
    again = self.get_variable("params", "w")
    return x @ again @ self.variables["params"]["w"].T


RAW = {"compact": RawCompact(), "setup": RawSetup(), "get_variable": RawGetVariable()}


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
    "['once']['bias']": 1,
    "['twice']['kernel']": 2,
    "['twice']['bias']": 2,
    "['three_reads']": 1,  # Read once by `self.param`; the half array is then used three times.
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
    calls.append(("x", str(x.dtype)))
    return WAYS[self.way](x, table)


WAYS = {
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
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["wrapper", "scope"])
def test_tied_weights_read_through_variables(way, child, how):
  model = Tied(way, child)
  variables = jax.eval_shape(model.init, KEY, IDS)
  apply = with_policy(model, "mixed_bfloat16").apply

  def in_scope(*args):
    with scope("mixed_bfloat16"):
      return model.apply(*args)

  apply = apply if how == "wrapper" else in_scope
  calls.clear()
  all_half(apply, variables, IDS, count=1)
  assert calls == [("x", "bfloat16")]
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
    calls.append(("memory", str(memory.value.dtype)))
    calls.append(("total", str(total.value.dtype)))
    if is_there:
      memory.value = memory.value * 0.5 + x
      index.value = index.value + 1
    total.value = total.value + x
    return nn.Dense(3)(memory.value)


@pytest.mark.case("B087", "A106", "B083")
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_cache_is_read_in_half_and_kept_in_the_dtype_that_it_came_in(stored):
  variables = Writes().init(KEY, X)
  variables = {**variables, "cache": {**variables["cache"], "memory": X.astype(stored)}}
  model = with_policy(Writes(), "mixed_bfloat16")
  calls.clear()
  _, changed = model.apply(variables, X, mutable=["cache", "statistics"])
  # Statistics, and whatever else is kept in other collections, are never cast.
  assert calls == [("memory", "bfloat16"), ("total", "float32")]
  assert dtypes(changed) == {
    "cache": {"memory": stored, "index": "int32"},
    "statistics": {"total": "float32"},
  }
  assert int(changed["cache"]["index"]) == 1
  assert dtypes(jax.tree.map(jnp.asarray, changed["cache"])) == dtypes({**variables["cache"]})


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


@pytest.mark.case("B087")
def test_a_cache_made_under_a_policy_keeps_its_dtype_in_a_scan():
  model = with_policy(nn.MultiHeadDotProductAttention(2, decode=True), "mixed_bfloat16")
  x = jnp.ones((1, 4, 4))
  variables = jax.eval_shape(model.init, KEY, x)
  # Flax makes the cache in the dtype of the keys.
  assert dtypes(variables["cache"]) == {
    "cached_key": "bfloat16",
    "cached_value": "bfloat16",
    "cache_index": "int32",
  }

  def step(cache, x):
    out, changed = model.apply({**variables, "cache": cache}, x, mutable=["cache"])
    return changed["cache"], out

  def run(variables, xs):
    def step(cache, x):
      out, changed = model.apply({**variables, "cache": cache}, x, mutable=["cache"])
      return changed["cache"], out

    return jax.lax.scan(step, variables["cache"], xs)

  for kind in ("bfloat16", "float32"):
    cast = {
      **variables,
      "cache": jax.tree.map(
        lambda c, kind=kind: jax.ShapeDtypeStruct(c.shape, kind if c.dtype == BF16 else c.dtype),
        variables["cache"],
      ),
    }
    cache, _ = jax.eval_shape(run, cast, jnp.ones((4, 1, 1, 4)))
    assert dtypes(cache) == dtypes(cast["cache"])


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
  assert changed["cache"]["c"]["a"].dtype == BF16


# Initialisation


class DtypeMeansParams(nn.Module):
  """Its `dtype` is what parameters are made in, as in models ported from elsewhere."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 4), self.dtype)
    v = self.param("v", lambda key, dtype: jax.random.normal(key, (4,), dtype), self.dtype)
    u = self.param("u", nn.initializers.normal(), shape=(4, 2), dtype=self.dtype)
    return (x @ w + v) @ u


@pytest.mark.case("B091", "A108", "I11")
@pytest.mark.parametrize("how", ["wrapper", "scope"])
@pytest.mark.parametrize(
  "dtype", [jnp.float32, "float32", np.dtype("float32"), jnp.float16], ids=str
)
def test_a_dtype_field_that_means_the_parameter_dtype(dtype, how):
  model = DtypeMeansParams(dtype)
  wanted = model.init(KEY, X)
  if how == "wrapper":
    found = with_policy(model, "p=f32,c=bf16,o=f32").init(KEY, X)
  else:
    with scope("p=f32,c=bf16,o=f32"):
      found = model.init(KEY, X)
  assert bits(found) == bits(jax.tree.map(lambda p: p.astype("float32"), wanted))
  all_half(with_policy(model, "mixed_bfloat16").apply, wanted, X, count=2)


@pytest.mark.case("B091", "I11")
@pytest.mark.parametrize(
  "model",
  [*RAW.values(), nn.Dense(4), DtypeMeansParams()],
  ids=[*RAW, "Dense", "dtype means params"],
)
def test_initial_values_are_drawn_as_without_a_policy(model):
  half = "bfloat16"
  plain = model.init(KEY, X)
  with scope(f"mixed_{half}"):
    assert bits(model.init(KEY, X)) == bits(plain)
  with scope(half):
    found = model.init(KEY, X)
  assert bits(found) == bits(jax.tree.map(lambda p: p.astype(half) if p.dtype == F32 else p, plain))


def test_an_initialiser_that_asks_for_half_gets_it():
  """The module's own wish for how parameters are made is no dtype that a policy sets."""

  class Asks(nn.Module):
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
      w = self.param("w", nn.initializers.lecun_normal(), (3, 4), jnp.bfloat16)
      v = self.param("v", nn.initializers.ones, (4,), self.param_dtype)
      return x @ w + v

  plain = Asks().init(KEY, X)
  assert plain["params"]["w"].dtype == BF16
  found = with_policy(Asks(), "p=f32,c=bf16").init(KEY, X)
  assert bits(found["params"]["w"]) == bits(plain["params"]["w"].astype("float32"))
  assert bits(found["params"]["v"]) == bits(plain["params"]["v"])


# Metadata boxes


class Boxed(nn.Module):
  @nn.compact
  def __call__(self, x):
    names = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
    w = self.param("w", names, (x.shape[-1], 4))
    box = self.param("w2", names, (4, 4), unbox=False)
    calls.append((type(box).__name__, str(box.unbox().dtype)))
    y = nn.Dense(4, kernel_init=names, name="dense")(x @ w)
    logical = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
    return y * self.param("scale", logical, (4,))


@pytest.mark.parametrize("mesh", [False, True], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("how", ["wrapper", "scope"])
@pytest.mark.case("B092", "B065")
def test_boxed_parameters(devices, how, mesh):
  model = Boxed()
  variables = model.init(KEY, X)
  boxes = jax.tree.leaves(variables, is_leaf=is_axis_metadata)
  assert any(map(is_axis_metadata, boxes))
  around = Mesh(np.asarray(devices).reshape(1, 4), ("in", "out"))

  def apply(variables, x):
    if how == "wrapper":
      return with_policy(model, "mixed_bfloat16").apply(variables, x)
    with scope("mixed_bfloat16"):
      return model.apply(variables, x)

  calls.clear()
  if mesh:
    with jax.set_mesh(around):
      all_half(apply, variables, X, count=2)
      out = jax.jit(apply)(variables, X)
  else:
    all_half(apply, variables, X, count=2)
    out = apply(variables, X)
  assert out.dtype == (F32)
  assert {dtype for _, dtype in calls} <= {"bfloat16", "float32"}
  with scope("bfloat16"):
    stored = model.init(KEY, X)
  assert jax.tree.structure(stored) == jax.tree.structure(variables)
  assert nn.get_partition_spec(stored)["params"]["w"] == PartitionSpec("in", "out")
  found = with_policy(model, "mixed_bfloat16").init(KEY, X)
  assert jax.tree.structure(found) == jax.tree.structure(variables)
  assert bits(found) == bits(variables)


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


@pytest.mark.case("B099", "A106", "B058")
def test_complex_and_integer_parameters_are_never_cast():
  class Odd(nn.Module):
    @nn.compact
    def __call__(self, x):
      w = self.param("w", lambda key: jnp.ones(3, jnp.complex64))
      n = self.param("n", lambda key: jnp.arange(3))
      flag = self.param("flag", lambda key: jnp.asarray([True, False, True]))
      key = self.param("key", lambda key: jax.random.key(3))
      kinds = (w.dtype, n.dtype, flag.dtype, key.dtype)
      calls.append(("kinds", " ".join(map(str, kinds))))
      return jnp.fft.ifft(jnp.fft.fft(x.astype("float32")) * w).real

  variables = Odd().init(KEY, X)
  wanted = ("kinds", "complex64 int32 bool key<fry>")
  for policy in ("mixed_bfloat16", "float16"):
    calls.clear()
    found = with_policy(Odd(), policy).init(KEY, X)
    with_policy(Odd(), policy).apply(variables, X)
    assert set(calls) == {wanted}
    assert dtypes(found) == dtypes(variables)


# The scope itself


def test_with_no_policy_in_force_a_scope_is_like_any_other():
  model = RawGetVariable()
  variables = model.init(KEY, X)
  bound = model.bind(variables)
  plain = text(lambda v, x: model.apply(v, x), variables, X)
  with scope("bfloat16"):
    assert bound(X).dtype == BF16
  # Its scope was given another class inside; outside nothing of it is left.
  assert isinstance(bound.scope, CastScope)
  assert bound(X).dtype == F32
  assert bound.variables["params"]["w"].dtype == F32
  assert type(bound.variables["params"]["w"]) is type(variables["params"]["w"])
  assert text(lambda v, x: model.apply(v, x), variables, X) == plain
  assert issubclass(CastScope, Scope)


def lazy():
  found = []

  class Takes(nn.Module):
    @nn.compact
    def __call__(self, x):
      self.param("w", nn.initializers.lecun_normal(), (3, 2))
      found.append(self.variables["params"]["w"])
      check_lazy(found[-1], stored)
      return x

  stored = jnp.asarray([[1 + 2.0**-12, -2.0], [3.0, 4.0], [5.0, 6.0]])
  with_policy(Takes(), "mixed_bfloat16").apply({"params": {"w": stored}}, X)
  return found[-1], stored


def check_lazy(w, stored):
  """What a parameter found in the variables does while its module is being called."""
  half = stored.astype(BF16)
  assert isinstance(w, LazyParam)
  assert w.dtype == BF16
  assert w.shape == (3, 2)
  assert w.ndim == 2
  assert w.size == 6
  assert len(w) == 3
  for found, wanted in [
    (w[0], half[0]),
    (w.T, half.T),
    (w + 1, half + 1),
    (1 - w, 1 - half),
    (-w, -half),
    (abs(w), abs(half)),
    (w > 1, half > 1),
    (w == half, jnp.ones((3, 2), bool)),
    (w**2, half**2),
    (w // 2, half // 2),
    (w % 2, half % 2),
    (list(w)[1], half[1]),
    (jnp.asarray(w), half),
    (w.sum(), half.sum()),
    (jnp.concatenate([w, w]), jnp.concatenate([half, half])),
    (jnp.where(w > 2, w, 0), jnp.where(half > 2, half, 0)),
    (jnp.sum(w, axis=0), jnp.sum(half, axis=0)),
    (np.asarray(w), half),
    (w.unbox(), half),
    (jax.nn.relu(w), jax.nn.relu(half)),
  ]:
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
  assert float(w[0, 1]) == -2.0
  # To trees it is the stored array.
  (leaf,) = jax.tree.leaves(w)
  assert leaf is stored
  assert w.replace_boxed(half).dtype == F32
  assert w.add_axis(0, {}) is w
  assert w.remove_axis(0, {}) is w
  assert "LazyParam" in repr(w)
  with pytest.raises(AttributeError):
    w.no_such_thing
  again = jax.tree.unflatten(jax.tree.structure(w), [half])
  assert again.unbox().dtype == BF16
  assert isinstance(hash(w), int)


def test_what_a_parameter_in_the_variables_can_do():
  w, stored = lazy()
  # After the call it is the stored array.
  assert w.dtype == F32
  np.testing.assert_array_equal(np.asarray(w), np.asarray(stored))


@pytest.mark.case("B092")
def test_parameters_returned_from_a_model_are_stored_ones():
  class Returns(nn.Module):
    @nn.compact
    def __call__(self, x):
      nn.Dense(2, name="dense")(x)
      return self.variables["params"], x

  variables = Returns().init(KEY, X)
  params, out = with_policy(Returns(), "bfloat16").apply(variables, X)
  assert bits(params) == bits(variables["params"])
  assert jax.tree.structure(params) == jax.tree.structure(variables["params"])
  assert out.dtype == BF16
  assert not any(isinstance(leaf, LazyParam) for leaf in jax.tree.leaves(params))
  bound = with_policy(Returns(), "bfloat16").bind(variables)
  assert bits(bound(X)[0]) == bits(variables["params"])


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
