"""Conversion of parameter trees: which leaves change, to what, and that nothing else does."""

import re
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState as FlaxState

import mpjax
from tests.errors import refused
from tests.models.values import normal
from tests.nnx.rig import Does
from tests.programs import bits

Rule, convert = mpjax.Rule, mpjax.convert
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
BOTH = pytest.mark.parametrize("half", NUMPY)
WHERE = "mpjax.convert(params)"


def dense(inputs=3, outputs=4):
  return {"kernel": jnp.asarray(normal(inputs, outputs)), "bias": jnp.asarray(normal(outputs))}


def params():
  return {
    "encoder": {
      "attention": {"query": dense(), "norm_query": {"scale": jnp.ones(4)}},
      "LayerNorm_0": {"scale": jnp.ones(4), "bias": jnp.zeros(4)},
      "scanned": {"scale": jnp.ones((5, 4)), "bias": jnp.zeros((5, 4))},
      "old": {"gamma": jnp.ones(4), "beta": jnp.zeros(4), "mean": jnp.zeros(4)},
    },
    "head": dense(4, 2),
    "cls": jnp.ones((1, 1, 4)),
  }


def stored(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(p, simple=True, separator="/"): str(x.dtype) for p, x in leaves}


def in_float32(tree):
  return {path for path, dtype in stored(tree).items() if dtype == "float32"}


NORMS = {
  *("encoder/attention/norm_query/scale", "encoder/LayerNorm_0/scale", "encoder/LayerNorm_0/bias"),
  *("encoder/scanned/scale", "encoder/scanned/bias"),
  *("encoder/old/gamma", "encoder/old/beta", "encoder/old/mean"),
}
HEAD = {"head/kernel", "head/bias"}
KERNELS = {"head/kernel", "encoder/attention/query/kernel"}


@pytest.mark.slow
@BOTH
def test_all_but_norms_are_rounded_to_the_compute_dtype(half):
  before = params()
  for policy in (half, f"mixed_{half}", f"params=float32,compute={half}"):
    after = convert(before, policy)
    assert in_float32(after) == NORMS
    assert set(stored(after).values()) == {"float32", half}
    rounded = lambda x, y: np.asarray(x).astype(NUMPY.get(y.dtype.name, x.dtype))  # noqa: E731
    assert bits(after) == bits(jax.tree.map(rounded, before, after))
  assert set(stored(before).values()) == {"float32"}


@pytest.mark.parametrize(
  ("rules", "wanted"),
  [
    ([Rule("float32", path="head")], NORMS | HEAD),
    ([Rule("float32", path=re.compile(".*/kernel"))], NORMS | KERNELS),
    ([Rule("bfloat16", path="encoder/old")], {p for p in NORMS if "old" not in p}),
    ([Rule(None, path="head/bias"), Rule("bfloat16", path="head")], NORMS | {"head/bias"}),
    # The innermost place counts, whatever the order of the rules.
    ([Rule("float32", path="head"), Rule("bfloat16", path="head/bias")], NORMS | {"head/kernel"}),
    ([Rule("float32", path="**")], set(stored(params()))),
  ],
)
def test_rules_by_path(rules, wanted):
  assert in_float32(convert(params(), "bfloat16", rules)) == wanted, rules


def test_norms_of_other_kinds_and_what_only_looks_like_one():
  norms = {
    "bn": {"scale": (5, 4), "bias": (5, 4), "mean": (5, 4), "var": (5, 4)},  # nnx.vmap
    "layer_norm": {"scale": (5, 4), "offset": (5, 4)},  # Haiku, stacked
    "norm": {"weight": (3, 4), "bias": (3, 4)},  # Equinox, over two axes
    "ln": {"weight": (4,), "bias": (4,)},
    "RMSNorm_0": {"g": (4,)},
    "BatchNorm": {"moving_mean": (5, 4), "moving_var": (5, 4), "beta": (5, 4)},  # of TensorFlow
    **{f"scaled_{name}": {name: (5, 4)} for name in ("scale", "gamma")},
  }
  others = {"norm_block": {"kernel": (2, 2), "scale": (2,)}, "Dense_0": {"bias": (2,)}}
  others["projection"] = {"weight": (3, 4), "bias": (4,)}
  tree = jax.tree.map(jnp.ones, norms | others, is_leaf=lambda x: isinstance(x, tuple))
  found = in_float32(convert(tree | {"w": jnp.ones(2)}, "bfloat16"))
  assert found == {f"{norm}/{key}" for norm, arrays in norms.items() for key in arrays}


def test_a_tree_may_be_that_of_one_norm():
  norm = {"scale": jnp.ones(4), "bias": jnp.ones(4)}
  statistics = {"mean": jnp.ones(4), "var": jnp.ones(4)}
  for tree in (norm, norm | statistics, {"params": norm, "batch_stats": statistics}):
    assert set(stored(convert(tree, "bfloat16")).values()) == {"float32"}
  assert set(stored(convert({"w": jnp.ones(4)}, "bfloat16")).values()) == {"bfloat16"}


def test_float8_stays_unless_a_rule_names_it():
  tree = {"kernel": jnp.ones((2, 2), jnp.float8_e4m3fn), "bias": jnp.ones(2)}
  assert stored(convert(tree, "bfloat16")) == {"kernel": "float8_e4m3fn", "bias": "bfloat16"}
  assert stored(convert(tree, "float32")) == {"kernel": "float8_e4m3fn", "bias": "float32"}
  named = convert(tree, "bfloat16", [Rule("bfloat16", path="kernel")])
  assert stored(named)["kernel"] == "bfloat16"


class Attention(NamedTuple):
  value: Any
  key: Any


def test_names_of_haiku_and_attributes_called_value_are_paths():
  tree = {"body/~/linear_0": {"w": jnp.ones((2, 2))}, "head": {"w": jnp.ones((2, 2))}}
  found = convert(tree, "bfloat16", [Rule("float32", path="body")])
  assert in_float32(found) == {"body/~/linear_0/w"}
  tree = {"attention": Attention(jnp.ones((2, 2)), jnp.ones((2, 2)))}
  found = convert(tree, "bfloat16", [Rule("float32", path="attention/value")])["attention"]
  assert (found.value.dtype, found.key.dtype) == (jnp.float32, jnp.bfloat16)


def test_what_does_not_change_is_the_same_object():
  tree = {"n": jnp.arange(3), "mask": np.ones(2, bool), "key": jax.random.key(0), "none": None}
  tree |= {"text": "relu", "number": 0.5, "complex": jnp.ones(2, jnp.complex64)}
  tree |= {"w": jnp.ones(3, jnp.float16)}
  assert all(new is tree[name] for name, new in convert(tree, "float16").items())


def test_tied_leaves_stay_tied_in_the_wider_dtype():
  table, other = jnp.ones((5, 4)), jnp.ones((5, 4))
  tree = {"embed": {"embedding": table}, "head": {"kernel": table}, "other": {"kernel": other}}
  half = convert(tree, "bfloat16")
  assert half["embed"]["embedding"] is half["head"]["kernel"]
  assert half["other"]["kernel"] is not half["head"]["kernel"]
  mixed = convert(tree, "bfloat16", [Rule("float32", path="head")])
  assert mixed["embed"]["embedding"] is mixed["head"]["kernel"] is table
  assert mixed["other"]["kernel"].dtype == jnp.bfloat16


def test_shardings_are_kept(devices):
  mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=devices)
  placed = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, jax.P("data")))
  host = np.ones((2, 2), np.float32)
  found = convert({"a": placed, "b": host}, "bfloat16")
  assert found["a"].sharding == placed.sharding
  assert (found["a"].dtype, type(found["b"])) == (jnp.bfloat16, np.ndarray)
  abstract = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=placed.sharding)
  assert convert([abstract], "bfloat16")[0] == abstract.update(dtype=jnp.bfloat16)


@BOTH
def test_there_and_back_is_rounding_and_nothing_else(half):
  there = convert(params(), half)
  back = convert(there, "float32")
  assert set(stored(back).values()) == {"float32"}
  assert bits(back) == bits(jax.tree.map(lambda x: np.asarray(x, np.float32), there))
  again = convert(back, half)
  assert stored(again) == stored(there)
  assert bits(again) == bits(there)


class Small(nn.Module):
  @nn.compact
  def __call__(self, x):
    partitioned = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    x = nn.Dense(4, kernel_init=partitioned)(x)
    return nn.BatchNorm(use_running_average=True)(x)


def test_variables_of_a_linen_model():
  variables = Small().init(jax.random.key(0), jnp.ones((2, 3)))
  rules = [Rule("float32", path="Dense_0/bias")]
  for given in (variables, flax.core.freeze(variables)):
    found = convert(given, "float16", rules)
    assert jax.tree.structure(found) == jax.tree.structure(given)
    kernel = found["params"]["Dense_0"]["kernel"]
    assert (kernel.names, kernel.value.dtype) == ((None, "model"), jnp.float16)
    rest = jax.tree.leaves((found["batch_stats"], found["params"]["BatchNorm_0"]))
    assert {x.dtype for x in rest} == {np.dtype("float32")}
    assert found["params"]["Dense_0"]["bias"].dtype == jnp.float32


def test_state_of_an_nnx_model():
  # Also of one with an attribute called params.
  layers = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0))
  model = nnx.Sequential(*layers)
  nnx.update(model, convert(nnx.state(model), "bfloat16", [Rule(None, path="layers/0/bias")]))
  assert model.layers[0].kernel.dtype == jnp.bfloat16
  assert model.layers[0].bias.dtype == model.layers[1].scale.dtype == jnp.float32
  named = Does(None, params=nnx.Param(jnp.ones((2, 2))))
  assert set(stored(convert(nnx.state(named), "bfloat16")).values()) == {"bfloat16"}


def test_what_is_no_tree_of_parameters():
  model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
  state = mpjax.TrainState.create({"w": jnp.ones(2)}, mpjax.loss_scaling(optax.sgd(0.1)))
  for given, got, fix in [
    (model, "NNX module", "Pass nnx.state(model), or write"),
    (mpjax.linen.with_policy(Small(), "float16"), "model", "Pass its variables, or write"),
    (state, "training state: there is a TrainState", "Pass state.params"),
    (FlaxState.create(apply_fn=None, params={}, tx=optax.sgd(0.1)), "TrainState", "Pass state"),
    (optax.adam(0.1).init(state.params), "ScaleByAdamState", "Pass state.params"),
    (mpjax.master_weights(optax.sgd(0.1)).init(state.params), "MasterWeightsState", "Pass state"),
  ]:
    with refused(TypeError, WHERE, "a tree of parameters", got, fix):
      convert(given, "float16")
  # These are: what optax puts into trees of parameters, and what is beside those of a Linen model.
  beside = {"params": state.params, "opt_state": optax.adam(0.1).init(state.params)}
  for tree in ({"w": jnp.ones(2), "v": optax.MaskedNode()}, beside):
    assert jax.tree.structure(convert(tree, "float16")) == jax.tree.structure(tree)


def test_under_jit_and_abstract():
  tree = params()
  wanted = stored(convert(tree, "float16"))
  assert stored(jax.jit(lambda t: convert(t, "float16"))(tree)) == wanted
  assert stored(convert(jax.eval_shape(lambda: tree), "float16")) == wanted


def test_values_that_do_not_fit():
  tree = {"a": {"w": jnp.array([1.0, 7e4])}, "b": jnp.array([jnp.inf, 1.0])}
  fix, expected = "keep these leaves in float32 or bfloat16", "values that the new dtype can hold"
  with refused(ValueError, WHERE, expected, "float32 beyond float16 at a/w. ", fix):
    convert(tree, "float16")
  assert bool(jnp.isinf(convert(tree["b"], "float16")[0]))
  assert convert(tree, "bfloat16")["a"]["w"].dtype == jnp.bfloat16


def test_a_rule_that_matches_nothing():
  rule = Rule("float32", path="hed")
  expected, got = "a rule that picks out at least one node", "none of the 22 nodes in the tree"
  fix = "The nearest node paths: 'head', "
  with refused(mpjax.errors.UnmatchedRuleError, f"rules: {rule}", expected, got, fix):
    convert(params(), "bfloat16", [rule])
  with pytest.warns(UserWarning, match="nearest node paths: 'head'") as record:
    convert(params(), "bfloat16", [rule], unmatched="warn")
  assert record[0].filename == __file__
  convert(params(), "bfloat16", [rule], unmatched="ignore")  # A warning would be an error here.
  with refused(ValueError, "mpjax.convert(unmatched=...)", "'raise'", "'no'", "Did you mean"):
    convert(params(), "bfloat16", unmatched="no")


def test_a_rule_that_needs_modules():
  got = "module=Dense"
  fix = "mpjax.with_policy(model, policy, rules).convert(variables, *args)"
  with refused(ValueError, "mpjax.convert(rules=...)", "rules with path=", got, fix):
    convert(params(), "bfloat16", [Rule("float32", module=nn.Dense)])
