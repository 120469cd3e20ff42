"""The layers of Linen and of NNX under a policy, one by one."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._jaxprs.module_calls import StateKind
from tests.linen.probes import KEY, X, dtypes
from tests.models.values import filled, normal, shapes
from tests.nnx import rig
from tests.programs import bits, dtypes_of, error, products, run

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule = mpjax.Rule
HALF = ["bfloat16", "float16"]
FRAMEWORKS = pytest.mark.parametrize("framework", ["linen", "nnx"])
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
RNGS = {"dropout": jax.random.key(1)}


class Layer(NamedTuple):
  """A layer of either framework as a function of its state.

  Fields:
    under: `(policy, rules)` to `(params, rest, *args, **kwargs) -> (out, new rest)`.
    params: parameters, with values made by NumPy.
    rest: all other variables.
  """

  under: Callable[..., Callable[..., Any]]
  params: Any
  rest: Any


def linen(module, *args, **kwargs):
  variables = filled(shapes(module, *args, **kwargs))
  params = variables.pop("params", {})

  def under(policy, rules=(), method=None):
    model = module if policy is None else mpjax.linen.with_policy(module, policy, rules)

    def call(params, rest, *args, **kwargs):
      options = {"rngs": RNGS, "mutable": list(rest), "method": method}
      return model.apply({"params": params, **rest}, *args, **kwargs, **options)

    return call

  return Layer(under, params, variables)


def of_nnx(make, split=rig.split):
  graphdef, params, rest = split(make)

  def under(policy, rules=(), method="__call__"):
    def call(params, rest, *args, **kwargs):
      plain = nnx.merge(graphdef, params, rest, copy=True)
      model = plain if policy is None else mpjax.nnx.with_policy(plain, policy, rules)
      return getattr(model, method)(*args, **kwargs), nnx.state(plain, nnx.Not(nnx.Param))

    return call

  return Layer(under, params, rest)


def as_initialised(make):
  """Returns the parts of a model with its own values, which layers that keep them need."""
  return nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)


def traced(layer, policy, *args, **kwargs):
  """Returns the jaxpr of a layer's call, and the shape of its output."""
  call = functools.partial(layer.under(policy), **kwargs)
  program, (out, _) = jax.make_jaxpr(call, return_shape=True)(layer.params, layer.rest, *args)
  return program, out


def operands(program):
  return [p.dtypes for p in products(program)]


# Tables


TABLES = {
  "linen": lambda: linen(nn.Embed(11, 4), jnp.asarray([1])),
  "nnx": lambda: of_nnx(lambda rngs: nnx.Embed(11, 4, rngs=rngs)),
}


@pytest.mark.case("B081")
@pytest.mark.parametrize("half", HALF)
@FRAMEWORKS
def test_embed_gathers_what_is_stored_and_casts_the_rows(framework, half):
  layer, ids = TABLES[framework](), np.asarray([[1, 257 % 11, 1]])
  policy = f"c={half},o={half}"
  (table,) = jax.tree.leaves(layer.params)
  program, out = traced(layer, policy, ids)
  assert dtypes_of(program, "gather") == {"float32"}
  assert out.dtype == half
  # As with the layer's own `dtype`, also without an output dtype.
  assert traced(layer, f"c={half}", ids)[1].dtype == half

  # The cotangents of one token add up in float32: 300 times 1 + 2^-7 is not rounded on the way.
  def loss(params):
    rows, _ = layer.under(policy)(params, layer.rest, np.ones(300, np.int32))
    return jnp.sum(rows.astype("float32") * (1 + 2.0**-7))

  def both(params):
    return layer.under(policy)(params, layer.rest, ids)[0], jax.grad(loss)(params)

  rows, gradient = run(both, layer.params)
  np.testing.assert_array_equal(rows, np.asarray(table)[ids].astype(half))
  np.testing.assert_array_equal(jax.tree.leaves(gradient)[0][1], np.full(4, 300 * (1 + 2.0**-7)))


# Norms


class MyNorm(nn.LayerNorm):
  """Somebody's own version."""


NORM_X = jnp.linspace(200.0, 400.0, 24).reshape(2, 4, 3)  # 300² is more than float16 holds.
NORMS = {
  "LayerNorm": lambda: linen(nn.LayerNorm(), NORM_X),
  "RMSNorm": lambda: linen(nn.RMSNorm(), NORM_X),
  "GroupNorm": lambda: linen(nn.GroupNorm(num_groups=3), NORM_X),
  "InstanceNorm": lambda: linen(nn.InstanceNorm(), NORM_X),
  "BatchNorm": lambda: linen(nn.BatchNorm(use_running_average=False), NORM_X),
  "running BatchNorm": lambda: linen(nn.BatchNorm(use_running_average=True), NORM_X),
  "somebody's own": lambda: linen(MyNorm(), NORM_X),
  "nnx: LayerNorm": lambda: of_nnx(lambda rngs: nnx.LayerNorm(3, rngs=rngs)),
  "nnx: RMSNorm": lambda: of_nnx(lambda rngs: nnx.RMSNorm(3, rngs=rngs)),
  "nnx: GroupNorm": lambda: of_nnx(lambda rngs: nnx.GroupNorm(3, 3, rngs=rngs)),
  "nnx: BatchNorm": lambda: of_nnx(lambda rngs: nnx.BatchNorm(3, rngs=rngs)),
  "nnx: running BatchNorm": lambda: of_nnx(
    lambda rngs: nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
  ),
}


def finely(tree):
  """Returns a state of values that float32 has, and half rounds: of 2^12 scales, 2^8 means."""
  sizes = {"scale": 2.0**12, "mean": 2.0**8, "var": 2.0**14}

  def leaf(path, x):
    names = jax.tree_util.keystr(path)
    size = next((size for name, size in sizes.items() if name in names), 1.0)
    return np.full(x.shape, size * (1 + 2.0**-12), x.dtype)

  return jax.tree_util.tree_map_with_path(leaf, tree)


@pytest.mark.case("B083", "B084", "A81")
def test_norms_reduce_in_float32_and_use_what_they_store_unrounded():
  layers = {name: make() for name, make in NORMS.items()}
  states = {name: (finely(each.params), finely(each.rest)) for name, each in layers.items()}
  # Both compute in float32, from the same low-precision input, and ours rounds once.
  inputs = {half: NORM_X.astype(half) for half in HALF}
  ways = {half: (f"c={half},o={half}", x) for half, x in inputs.items()}
  ways |= {f"plain {half}": (None, x.astype("float32")) for half, x in inputs.items()}

  def every(states):
    return {
      name: {way: layer.under(policy)(*states[name], x) for way, (policy, x) in ways.items()}
      for name, layer in layers.items()
    }

  found, violations = run(every, states), []
  for (name, layer), half in itertools.product(layers.items(), HALF):
    (ours, state), (plain, wanted) = found[name][half], found[name][f"plain {half}"]
    program, _ = traced(layer, *ways[half])
    _, unset = traced(layer, f"c={half}", inputs[half])
    if dtypes_of(program, "reduce_sum", "rsqrt") != {"float32"}:
      violations.append(f"{name}, {half}: reduces in half")
    if bits(ours) != bits(plain.astype(half)) or not np.isfinite(plain).all():
      violations.append(f"{name}, {half}: is not the float32 norm of what is stored, rounded once")
    if bits(state) != bits(wanted):
      violations.append(f"{name}, {half}: other statistics than in float32")
    # As with the layer's own `dtype`, also without an output dtype.
    if unset.dtype != half:
      violations.append(f"{name}, {half}: returns {unset.dtype} where no output dtype is set")
  assert violations == []


# Cells


def test_what_is_told_of_a_cell_over_time_before_it_runs():
  # To tell the dtypes of caches modules are called in half there, and a loop starts in float32.
  class Model(nn.Module):
    @nn.compact
    def __call__(self, xs):
      xs = self.perturb("bump", nn.Dense(3)(xs))
      return nn.RNN(nn.LSTMCell(3))(xs)

  model, xs = Model(), jnp.stack([X] * 4, axis=1)
  ours = mpjax.linen.with_policy(model, "mixed_bfloat16")
  wanted = dtypes(jax.eval_shape(model.init, KEY, xs))
  for way in (ours.init, ours.lazy_init):
    assert dtypes(jax.eval_shape(way, KEY, xs)) == wanted
  with mpjax.linen.policy_scope("mixed_bfloat16"):
    assert dtypes(jax.eval_shape(model.init, KEY, xs)) == wanted


# Attention


@pytest.mark.case("B088")
@pytest.mark.parametrize("half", HALF)
@FRAMEWORKS
def test_a_fully_masked_row_stays_finite(framework, half):
  x = normal(1, 3, 4)
  layer = {
    "linen": lambda: linen(nn.MultiHeadDotProductAttention(2), x),
    "nnx": lambda: of_nnx(lambda rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)),
  }[framework]()
  mask = np.asarray([[[[True, False, False], [True, True, False], [False, False, False]]]])

  def loss(params, policy=f"mixed_{half}"):
    return layer.under(policy)(params, layer.rest, x, mask=mask)[0].sum()

  wanted, (out, grads) = run(lambda p: (loss(p, None), jax.value_and_grad(loss)(p)), layer.params)
  np.testing.assert_allclose(out, wanted, atol=0.05)
  assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


@pytest.mark.case("B087")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_decode_cache_keeps_its_dtype(stored):
  model = rig.model(lambda rngs: nnx.MultiHeadAttention(2, 4, decode=True, rngs=rngs))
  x = normal(1, 3, 4)
  view = mpjax.nnx.with_policy(model, "c=bf16")
  view.init_cache((1, 3, 4), dtype=jnp.dtype(stored))
  assert model.cached_key is view.cached_key
  wanted = nnx.jit(lambda m, x: m(x, is_causal=True, decode=False))(model, x)
  step = nnx.jit(lambda view, x: view(x))
  steps = [step(view, x[:, i : i + 1]) for i in range(3)]
  assert model.cached_key.dtype == model.cached_value.dtype == stored
  assert int(nnx.state(model)["cache_index"][...]) == 3
  assert {x.dtype for x in steps} == {BF16}
  assert error(np.concatenate(steps, axis=1), wanted) < 0.02


# Layers around layers


class Wrapped(nn.Module):
  wrapper: type[nn.Module]

  @nn.compact
  def __call__(self, x):
    if self.wrapper is nn.WeightNorm:
      return nn.WeightNorm(nn.Dense(4))(x)
    return nn.SpectralNorm(nn.Dense(4), n_steps=2)(x, update_stats=True)


WRAPPERS = {
  "WeightNorm": lambda: linen(Wrapped(nn.WeightNorm), X),
  "SpectralNorm": lambda: linen(Wrapped(nn.SpectralNorm), X),
  "nnx: WeightNorm": lambda: of_nnx(
    lambda rngs: nnx.WeightNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs), as_initialised
  ),
  "nnx: SpectralNorm": lambda: of_nnx(
    lambda rngs: nnx.SpectralNorm(nnx.Linear(3, 4, rngs=rngs), rngs=rngs), as_initialised
  ),
}


@pytest.mark.case("B094")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_computed_weight_is_computed_from_what_is_stored_and_used_in_half(name):
  layer = WRAPPERS[name]()
  program, out = traced(layer, "mixed_bfloat16", X)
  assert out.dtype == F32
  # The layer itself is in half, and it comes last; all before it is float32.
  assert operands(program)[-1] == ("bfloat16", "bfloat16")
  assert set(operands(program)[:-1]) <= {("float32", "float32")}
  assert dtypes_of(program, "rsqrt", "sqrt", "reduce_sum") <= {"float32"}

  def steps(policy):
    rest = layer.rest
    for _ in range(3):
      out, rest = layer.under(policy)(layer.params, rest, X)
    return out, rest

  (ours, state), (plain, wanted) = run(lambda: (steps("mixed_bfloat16"), steps(None)))
  # It never sees a rounded weight, so nothing drifts.
  assert bits(state) == bits(wanted)
  assert set(jax.tree.leaves(dtypes(state))) <= {"float32", "key<fry>", "uint32"}
  np.testing.assert_allclose(ours, plain, rtol=0.02, atol=0.02)
  gradient = jax.grad(lambda p: layer.under("mixed_bfloat16")(p, layer.rest, X)[0].sum())
  assert dtypes(jax.eval_shape(gradient, layer.params)) == dtypes(layer.params)


# Dropout

DROPOUTS = {
  "linen": lambda rate: linen(nn.Dropout(rate, deterministic=False), jnp.ones((4, 8))),
  "nnx": lambda rate: of_nnx(lambda rngs: nnx.Dropout(rate, rngs=rngs)),
}


@pytest.mark.case("B090", "I11")
@FRAMEWORKS
def test_a_dropout_mask_does_not_depend_on_the_policy_nor_on_the_kind_of_its_rate(framework):
  for rate in (0.5, np.float32(0.5), np.float64(0.5)):
    layer = DROPOUTS[framework](rate)

    def found(policy, dtype, layer=layer):
      return layer.under(policy)(layer.params, layer.rest, jnp.ones((4, 8), dtype))[0]

    plain = found(None, "float32")
    assert 0 < np.count_nonzero(plain) < plain.size
    for half in HALF:
      assert bits(found(f"c={half}", "float32")) == bits(plain)
      low = found(f"c={half}", half)
      assert low.dtype == half
      assert bits(low.astype(F32)) == bits(plain)  # The same mask; 1 / 0.5 is exact.


# A layer with state of its own


class RunningMax(nn.Module):
  """Divides by the largest number so far, which it keeps, as a layer in float8 would."""

  @nn.compact
  def __call__(self, x):
    largest = self.variable("amax", "largest", lambda: jnp.ones(()))
    out = x / largest.value
    largest.value = jnp.maximum(largest.value, jnp.max(jnp.abs(x)))
    return out @ jnp.eye(x.shape[-1], dtype=x.dtype)


class Amax(nnx.Variable):
  """The largest number so far."""


class RunningMaxOfNnx(nnx.Module):
  """The same, and it creates another such variable in its first call."""

  def __init__(self):
    self.largest = Amax(jnp.ones(()))

  def __call__(self, x):
    if not hasattr(self, "first"):
      self.first = Amax(jnp.exp(x[0, 0]))
    out = x / self.largest[...]
    self.largest[...] = jnp.maximum(self.largest[...], jnp.max(jnp.abs(x)))
    return out @ jnp.eye(x.shape[-1], dtype=x.dtype)


STORED_IN_HALF = "params=bfloat16,compute=bfloat16"


def state_of_linen(x):
  """Returns the dtype of new state, that of the division, and that of the product."""
  ours = mpjax.linen.with_policy(RunningMax(), STORED_IN_HALF)
  variables = ours.init(KEY, x)
  apply = functools.partial(ours.apply, mutable=["amax"])
  program, changed = jax.make_jaxpr(apply)(variables, x), apply(variables, x)[1]
  stored = variables["amax"]["largest"]
  assert changed["amax"]["largest"] == 2
  assert changed["amax"]["largest"].dtype == stored.dtype
  return str(stored.dtype), dtypes_of(program, "div"), operands(program)[0][0]


def state_of_nnx(x):
  model = RunningMaxOfNnx()
  view = mpjax.nnx.with_policy(model, STORED_IN_HALF)
  view(x)
  assert model.largest[...] == 2
  assert model.largest.dtype == "float32"
  program = jax.make_jaxpr(lambda: nnx.clone(view)(x))()
  return str(model.first.dtype), dtypes_of(program, "div"), operands(program)[0][0]


@FRAMEWORKS
def test_a_layer_with_state_of_its_own_is_one_row(framework, monkeypatch):
  layers, key, cls, found = {
    "linen": (mpjax.linen._layers, "amax", RunningMax, state_of_linen),
    "nnx": (mpjax.nnx._layers, Amax, RunningMaxOfNnx, state_of_nnx),
  }[framework]
  x = jnp.full((2, 3), 2, BF16)
  # State that nobody knows decides the dtype of what it meets, and is what the code declares.
  assert found(x) == ("float32", {"float32"}, "bfloat16")
  row = StateKind(neutral=True, stored="param_dtype")
  monkeypatch.setattr(layers, "STATE", {**layers.STATE, key: row})
  # The division is in float32, since the gradient of one number for many is a sum.
  assert found(x) == ("bfloat16", {"float32"}, "bfloat16")
  # One that starts each step from its own last result computes in float32.
  iterates = (*layers.LAYERS.iterates, cls)
  monkeypatch.setattr(layers, "LAYERS", layers.LAYERS._replace(iterates=iterates))
  assert found(x) == ("bfloat16", {"float32"}, "float32")
