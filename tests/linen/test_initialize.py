"""What `init` stores under a policy: in which dtype, and drawn from which numbers."""

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.meta import is_axis_metadata
from jax.sharding import Mesh, PartitionSpec

import mpjax
from mpjax._core.trees import cast_like
from tests.linen.probes import HALF, KEY, Does, X, all_half, calls, dtypes
from tests.programs import assert_bit_equal, bits

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy
F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


def nested(module, x):
  w = module.param("w", nn.initializers.normal(), (8, 8))
  y = nn.BatchNorm(use_running_average=True, name="norm")(ManyParams(name="inner")(x @ w))
  count = module.variable("stats", "count", jnp.zeros, (), jnp.int32)
  return y + count.value


WAYS = pytest.mark.parametrize("way", ["wrapper", "scope", "jit"])


def init(way, model, policy, *args, rules=()):
  if way != "scope":
    found = with_policy(model, policy, rules)
    return (jax.jit(found.init) if way == "jit" else found.init)(KEY, *args)
  with scope(policy, rules):
    return model.init(KEY, *args)


class ManyParams(nn.Module):
  """Its `dtype` is what parameters are made in, as in models ported from elsewhere."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x):
    w = self.param("w", nn.initializers.lecun_normal(), (x.shape[-1], 4), self.dtype)
    v = self.param("v", lambda key, dtype: jax.random.normal(key, (4,), dtype), self.dtype)
    u = self.param("u", nn.initializers.normal(), shape=(4, 2), dtype=self.dtype)
    return (x @ w + v) @ u


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
    self.w = self.param("w", nn.initializers.lecun_normal(), (8, 4))
    self.variable_too = self.variable("params", "v", lambda: jnp.ones((4, 2)))

  def __call__(self, x):
    return x @ self.w @ self.variable_too.value


MODELS = {
  "nested": Does(nested),
  "Dense": nn.Dense(4),
  "dtype means params": ManyParams(),
  "dtype means params, as a string": ManyParams("float32"),
  "dtype means params, of NumPy": ManyParams(np.dtype("float32")),
  "compact": RawCompact(),
  "setup": RawSetup(),
}


@pytest.mark.slow
@WAYS
def test_initial_values_are_drawn_in_float32(way):
  # Drawn in half they would be other numbers, not the rounded ones.
  violations = []
  for name in ("dtype means params", "nested") if way == "jit" else MODELS:
    model = MODELS[name]
    plain = (jax.jit(model.init) if way == "jit" else model.init)(KEY, X)
    if bits(init(way, model, "mixed_bfloat16", X)) != bits(plain):
      violations.append(f"{name}: other parameters in float32")
    for half in HALF if name == "nested" else HALF[:1]:
      params = mpjax.Policy(param_dtype=half).cast_to_param(plain["params"])
      if bits(init(way, model, half, X)) != bits({**plain, "params": params}):
        violations.append(f"{name}: is not rounded to {half}")
  assert violations == []
  # They would be others.
  for half in HALF:
    drawn = nn.initializers.lecun_normal()(KEY, (8, 4), jnp.dtype(half))
    assert bits(drawn) != bits(nn.initializers.lecun_normal()(KEY, (8, 4)).astype(half))


class TakesHalfAlone(nn.Module):
  """Draws a parameter and a mask before a kernel that refuses float32, and a parameter after it."""

  kernel: Any

  @nn.compact
  def __call__(self, x):
    x = nn.Dropout(0.5, deterministic=False)(x * self.param("before", nn.initializers.normal(), 8))
    self.sow("masks", "mask", x != 0)
    y = nn.Dense(8)(self.kernel(nn.Dense(8)(x)))
    return y + self.param("after", nn.initializers.normal(), 8)


def half_alone(x):
  if x.dtype == jnp.float32:
    raise NotImplementedError("this kernel takes low precision alone")
  return x


def attends(kernel):
  def body(_, x):
    x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
    return nn.Dense(3)(x + TakesHalfAlone(kernel, name="attention")(x))

  return Does(body)


RULES_OF_KERNEL = {
  "": [],
  "advised": [Rule("bfloat16", path="**/attention")],
  "whole": [Rule("c=bf16", path="**/attention", rewrite=False)],
}


@pytest.mark.slow
@pytest.mark.parametrize("rules", RULES_OF_KERNEL)
@pytest.mark.parametrize("way", ["wrapper", "jit", "eval_shape", "output"])
def test_init_calls_a_module_that_raises_in_float32_in_its_compute_dtype(way, rules):
  rules = RULES_OF_KERNEL[rules]
  keys = {"params": KEY, "dropout": jax.random.key(1)}

  def init_by(way, kernel):
    found = with_policy(attends(kernel), "mixed_bfloat16", rules)
    if way == "output":
      return found.init_with_output(keys, X)[1]
    transform = {"jit": jax.jit, "eval_shape": lambda fn: functools.partial(jax.eval_shape, fn)}
    return transform.get(way, lambda fn: fn)(found.init)(keys, X)

  # Drawn once, from the same keys as with a kernel that takes float32.
  wanted, found = init_by(way, lambda x: x), init_by(way, half_alone)
  if way == "eval_shape":
    assert found == wanted
    return
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  for col in ("params", "masks"):
    assert bits(found[col]) == bits(wanted[col])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrapper", "scope"])
def test_init_shows_the_first_error_of_a_module_that_raises_in_both_dtypes(way):
  def refuses(x):
    raise NotImplementedError(f"got {x.dtype}")

  with pytest.raises(NotImplementedError, match="got float32") as error:
    init(way, attends(refuses), "mixed_bfloat16", X)
  assert "mpjax.low_precision" in error.value.__notes__[0]


@WAYS
def test_what_init_computes_from_results_is_that_of_the_model(way):
  # A module that has an output dtype by a rule rounds nothing that others start from.
  def fitted(module, x):
    y = nn.Dense(3, name="inner")(x)
    module.variable("stats", "deviation", lambda: jnp.std(y, axis=0))
    return y / module.param("scale", lambda _: jnp.mean(jnp.abs(y), axis=0))

  rules = [Rule("params=float32,compute=bfloat16,output=bfloat16", path="inner")]
  assert bits(init(way, Does(fitted), "mixed_bfloat16", X, rules=rules)) == bits(
    Does(fitted).init(KEY, X)
  )


@pytest.mark.slow
@WAYS
def test_each_module_stores_its_own_parameters_in_its_own_dtype(way):
  rules = [Rule(mpjax.Policy(param_dtype="float16"), path="inner"), Rule(None, path="norm")]
  found = dtypes(init(way, Does(nested), "bfloat16", X, rules=rules))
  assert found["params"]["w"] == "bfloat16"
  assert found["params"]["inner"] == dict.fromkeys("wvu", "float16")
  assert found["params"]["norm"] == {"scale": "float32", "bias": "float32"}
  assert found["batch_stats"]["norm"] == {"mean": "float32", "var": "float32"}
  assert found["stats"] == {"count": "int32"}


@WAYS
def test_a_cache_has_the_dtype_of_what_is_written_to_it_and_keeps_it(way):
  model, x, half = nn.MultiHeadDotProductAttention(2, decode=True), jnp.ones((1, 4, 4)), "bfloat16"
  found = jax.eval_shape(lambda: init(way, model, f"mixed_{half}", x))
  # Flax makes the cache in the dtype of the keys.
  assert dtypes(found["cache"]) == {
    "cached_key": half,
    "cached_value": half,
    "cache_index": "int32",
  }
  assert dtypes(found["params"]) == dtypes(jax.eval_shape(model.init, KEY, x)["params"])

  def step(variables, cache, x):
    with scope(f"mixed_{half}"):
      out, changed = model.apply({**variables, "cache": cache}, x, mutable=["cache"])
    return changed["cache"], out

  def over_time(variables, xs):
    scanned = functools.partial(step, variables)
    return jax.lax.scan(scanned, variables["cache"], xs)[0]

  for kind in (half, "float32"):
    cache = jax.tree.map(
      lambda c, kind=kind: c.update(dtype=jnp.dtype(kind)) if c.dtype == half else c, found["cache"]
    )
    after = jax.eval_shape(over_time, {**found, "cache": cache}, jnp.ones((4, 1, 1, 4)))
    assert dtypes(after) == dtypes(cache)


def test_a_cache_of_a_module_that_mixes_dtypes_where_jax_does_not_promote_stays_as_declared():
  def mixes(module, x):
    module.variable("cache", "y", jnp.zeros, (3,))
    return x @ module.param("w", nn.initializers.ones, (8, 3))

  with jax.numpy_dtype_promotion("strict"):
    found = with_policy(Does(mixes), "mixed_bfloat16").init(KEY, X)
  assert found["cache"]["y"].dtype == F32


def test_trees_that_are_not_alike_are_not_cast():
  half = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
  tree = {"a": jnp.ones(2), "n": jnp.zeros(2, jnp.int32)}
  assert dtypes(cast_like(tree, {"a": half, "n": half})) == {"a": "bfloat16", "n": "int32"}
  assert cast_like(tree, {"a": half}) is None


# Models with parameters of their own


def test_an_initialiser_that_asks_for_half_gets_it():
  # The module's own wish for how parameters are made is no dtype that a policy sets.
  class Asks(nn.Module):
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
      w = self.param("w", nn.initializers.lecun_normal(), (8, 4), jnp.bfloat16)
      v = self.param("v", nn.initializers.ones, (4,), self.param_dtype)
      return x @ w + v

  plain = Asks().init(KEY, X)
  assert plain["params"]["w"].dtype == BF16
  found = with_policy(Asks(), "p=f32,c=bf16").init(KEY, X)
  assert bits(found) == bits(jax.tree.map(lambda p: p.astype("float32"), plain))


@pytest.mark.slow
def test_complex_and_integer_parameters_are_never_cast():
  seen = set()

  def odd(module, x):
    w = module.param("w", lambda key: jnp.ones(8, jnp.complex64))
    n = module.param("n", lambda key: jnp.arange(3))
    flag = module.param("flag", lambda key: jnp.asarray([True, False, True]))
    key = module.param("key", lambda key: jax.random.key(3))
    seen.add(" ".join(str(x.dtype) for x in (w, n, flag, key)))
    return jnp.fft.ifft(jnp.fft.fft(x.astype("float32")) * w).real

  variables = Does(odd).init(KEY, X)
  for policy in ("mixed_bfloat16", "float16"):
    found = with_policy(Does(odd), policy).init(KEY, X)
    with_policy(Does(odd), policy).apply(variables, X)
    assert dtypes(found) == dtypes(variables)
  assert seen == {"complex64 int32 bool key<fry>"}


# Metadata boxes


def boxed(module, x):
  names = nn.with_partitioning(nn.initializers.lecun_normal(), ("in", "out"))
  w = module.param("w", names, (x.shape[-1], 8))
  box = module.param("w2", names, (8, 8), unbox=False)
  calls.append((type(box).__name__, str(box.unbox().dtype)))
  y = nn.Dense(8, kernel_init=names, name="dense")(x @ w)
  logical = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
  return y * module.param("scale", logical, (8,))


@pytest.mark.parametrize("mesh", [False, True], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("how", ["wrapper", "scope"])
def test_boxed_parameters(devices, how, mesh):
  model = Does(boxed)
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
  with jax.set_mesh(around) if mesh else contextlib.nullcontext():
    all_half(apply, variables, X, count=2)
    assert jax.eval_shape(apply, variables, X).dtype == F32
    assert not mesh or jax.jit(apply)(variables, X).dtype == F32
  assert {dtype for _, dtype in calls} <= {"bfloat16", "float32"}
  with scope("bfloat16"):
    stored = model.init(KEY, X)
  assert jax.tree.structure(stored) == jax.tree.structure(variables)
  assert nn.get_partition_spec(stored)["params"]["w"] == PartitionSpec("in", "out")
  found = with_policy(model, "mixed_bfloat16").init(KEY, X)
  assert_bit_equal(found, variables)
