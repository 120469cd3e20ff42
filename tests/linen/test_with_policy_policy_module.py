"""Conversion of a policied Linen model: what is stored in half, and that results stay the same."""

import functools
import re
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.errors import refused
from tests.linen.probes import Does
from tests.models.values import integers, normal
from tests.programs import bits

Rule, with_policy = mpjax.Rule, mpjax.linen.with_policy


class MyNorm(nn.Module):
  @nn.compact
  def __call__(self, x):
    g = self.param("g", nn.initializers.ones, (x.shape[-1],))
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * g[None, None]


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return nn.Dense(8)(MyNorm()(x)), None


class Tagger(nn.Module):
  """A table at both ends, stacked layers, a cell over time, statistics, a cache of its own."""

  @nn.compact
  def __call__(self, ids, train=False):
    embed = nn.Embed(11, 8)
    x = embed(ids)
    blocks = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=2)
    x, _ = blocks(name="blocks")(x, None)
    x = nn.RNN(nn.GRUCell(8), name="rnn")(x)
    x = nn.BatchNorm(use_running_average=not train)(x)
    x = x @ self.param("mix", nn.initializers.ones, (8, 8))
    return embed.attend(nn.LayerNorm()(x))


AS_TOLD = {"xla_allow_excess_precision": False}
"""XLA otherwise leaves out roundings of parameters that are stored in float32."""

IDS = integers(2, 5, below=11)


def stored(variables):
  leaves = flax.traverse_util.flatten_dict(flax.core.unfreeze(variables), sep="/")
  return {path: str(x.dtype) for path, x in leaves.items()}


@pytest.fixture(scope="module")
def variables():
  found = Tagger().init(jax.random.key(0), IDS)
  found["params"]["unused"] = jnp.ones(3)
  return found


def test_what_only_half_is_made_of_is_stored_in_half(variables):
  half = "bfloat16"
  model = with_policy(Tagger(), f"mixed_{half}")
  found = model.convert(variables, IDS)
  dtypes = stored(found)
  in_float32 = {path for path, dtype in dtypes.items() if dtype == "float32"}
  norms = {path for path in dtypes if "Norm" in path}
  assert norms <= in_float32
  assert in_float32 - norms == {"params/unused"}
  assert set(dtypes.values()) == {"float32", half}
  assert set(stored(variables).values()) == {"float32"}
  assert jax.tree.structure(found) == jax.tree.structure(variables)
  apply = jax.jit(model.apply, compiler_options=AS_TOLD)
  assert bits(apply(found, IDS)) == bits(apply(variables, IDS))
  # Casts that only the sums of gradients need are left out where it is compiled.
  costs: list[Any] = [apply.lower(v, IDS).compile().cost_analysis() for v in (variables, found)]
  before, after = (cost["bytes accessed"] for cost in costs)
  assert after < before


def test_a_float32_rule_counts_also_for_what_is_shared(variables):
  def found(*rules):
    model = with_policy(Tagger(), "mixed_bfloat16", rules)
    return {p for p, d in stored(model.convert(variables, IDS)).items() if d == "float32"}

  plain = found()
  # What the stacked layers carry is float32 then; the table that it begins with is rounded by Flax.
  assert found(Rule("float32", path="blocks/Dense_0")) - plain == {
    "params/blocks/Dense_0/kernel",
    "params/blocks/Dense_0/bias",
  }
  # The table is gathered from and multiplied by: one module, used in float32 at both ends.
  assert found(Rule("float32", module=nn.Embed)) - plain == {"params/Embed_0/embedding"}


def test_flags_methods_and_abstract_arguments(variables):
  model = with_policy(Tagger(), "mixed_bfloat16")
  wanted = stored(model.convert(variables, IDS))
  abstract = jax.ShapeDtypeStruct(IDS.shape, IDS.dtype)
  assert stored(model.convert(variables, abstract)) == wanted
  assert stored(model.convert(jax.eval_shape(lambda: variables), abstract)) == wanted
  frozen = model.convert(flax.core.freeze(variables), IDS, train=True, mutable=["batch_stats"])
  assert isinstance(frozen, flax.core.FrozenDict)
  assert stored(frozen) == wanted
  # A model without parameters, and a policy without low precision.
  assert with_policy(nn.Sequential([nn.relu]), "mixed_float16").convert({}, jnp.ones(2)) == {}
  same = with_policy(Tagger(), "float32").convert(variables, IDS)
  assert all(x is y for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(variables), strict=True))


def test_a_decode_cache_is_left_alone():
  model = with_policy(nn.MultiHeadDotProductAttention(2, decode=True), "mixed_bfloat16")
  x = normal(1, 6, 8)
  found = model.init(jax.random.key(0), x)
  half = model.convert(found, x[:, :1], mutable=["cache"])
  # The bias of what is returned is added to a float32 sum.
  own = half["params"]["out"].pop("bias")
  assert own.dtype == jnp.float32
  assert {x.dtype for x in jax.tree.leaves(half["params"])} == {np.dtype("bfloat16")}
  half["params"]["out"]["bias"] = own
  assert half["cache"] is found["cache"]
  step = jax.jit(lambda v: model.apply(v, x[:, :1], mutable=["cache"]), compiler_options=AS_TOLD)
  assert bits(step(half)) == bits(step(found))


MAPPING = ("a mapping with 'params' in it", 'Write model.convert({"params": params}, x).')
ERRORS = [
  # What is converted, what was expected, what came, what to do, which builtin.
  ({"kernel": 1}, MAPPING[0], "a dict with 'kernel'", MAPPING[1], TypeError),
  (jnp.ones(2), MAPPING[0], "an array float32[2]", MAPPING[1], TypeError),
]


def test_errors():
  model = with_policy(nn.Dense(1, use_bias=False), "mixed_float16")
  where = "mpjax.with_policy(model, policy).convert(variables)"
  for given, expected, got, fix, builtin in ERRORS:
    with refused(builtin, where, expected, got, fix):
      model.convert(given, jnp.ones((1, 8)))


class Parts(nn.Module):
  """A part without parameters, one that only training calls, one that another method calls."""

  def setup(self):
    self.body, self.auxiliary, self.other = nn.Dense(8), nn.Dense(8), nn.Dense(8)
    self.drop = nn.Dropout(0.5)

  def everything(self, x):
    return self.body(x) + self.auxiliary(x) + self.other(x)

  def decode(self, x):
    return self.other(x), {"name": "decoded"}  # And something that is no array.

  def __call__(self, x, train=False):
    x = self.drop(self.body(x), deterministic=not train)
    return self.auxiliary(x) if train else x


@functools.cache
def parts():
  x = jnp.ones((2, 8))
  return x, Parts().init(jax.random.key(0), x, method="everything")


def modules_in(variables, dtype):
  return {path.split("/")[1] for path, each in stored(variables).items() if each == dtype}


def test_rules_are_checked_where_the_whole_model_is_called():
  x, variables = parts()
  model = with_policy(Parts(), "mixed_bfloat16", [Rule("float32", path="boddy")])
  with pytest.warns(UserWarning, match="The nearest module paths: 'body', "):
    model.convert(variables, x)
  # A module that this call does not pass is there all the same.
  model = with_policy(Parts(), "mixed_bfloat16", [Rule("float32", path="auxiliary")])
  assert modules_in(model.convert(variables, x), "bfloat16") == {"body"}
  # Of one method nobody knows what is in the rest of the model.
  model = with_policy(Parts(), "mixed_bfloat16", [Rule("float32", path="body")])
  assert modules_in(model.convert(variables, x, method="decode"), "bfloat16") == {"other"}
  assert modules_in(model.convert(variables, x), "bfloat16") == set()


class Prediction:
  """No tree to JAX: a distribution, say."""

  def __init__(self, logits):
    self.logits = logits


def test_init_of_a_model_that_returns_a_plain_object():
  plain, x = Does(lambda module, x: (Prediction(nn.Dense(4)(x)), str, "text")), jnp.ones((2, 3))
  model, key = with_policy(plain, "bfloat16"), jax.random.key(0)
  wanted = jax.tree.map(lambda p: p.astype(jnp.bfloat16), plain.init(key, x))
  (prediction, *rest), made = model.init_with_output(key, x)
  for found in (made, model.init(key, x), jax.jit(model.init)(key, x)):
    assert bits(found) == bits(wanted)
  # It computes in float32, and nothing can be cast in an object that is no tree to JAX.
  assert (prediction.logits.dtype, rest) == (jnp.float32, [str, "text"])
  with pytest.raises(mpjax.errors.UnmatchedRuleError):
    with_policy(plain, "bfloat16", [Rule(None, path="typo")]).init(key, x)


def test_a_misspelt_rule_is_warned_of_where_only_apply_is_called():
  x, variables = parts()
  rules = [Rule("float32", path="boddy"), Rule("float32", path="body")]
  for jitted in (False, True):
    model = with_policy(Parts(), "mixed_bfloat16", rules)
    apply = jax.jit(model.apply) if jitted else model.apply
    with pytest.warns(UserWarning, match="boddy") as caught:
      apply(variables, x)
    (warning,) = caught
    text = str(warning.message)
    for part in ('path="boddy"', "that this call met or that have variables", "'body'", "ignore"):
      assert part in text
    assert jitted or warning.filename == __file__


MAY_MATCH = [
  # Rules that may pick out a module, since no call meets all: nothing is said of them.
  *(Rule(None, path=path) for path in ("drop", "auxiliary", "other", re.compile("(body|typo)"))),
  *(Rule("float32", path="**"), Rule("float32", module=nn.Conv)),
  Rule("float32", where=lambda m: False),
]


def test_no_rule_is_warned_of_that_may_pick_out_a_module():
  x, variables = parts()
  typo = Rule(None, path="typo")
  cases = [*((rule, {}, {}) for rule in MAY_MATCH)]
  cases += [(typo, {"unmatched": "ignore"}, {}), (typo, {}, {"method": "decode"})]
  for rule, options, call in cases:
    model = with_policy(Parts(), "mixed_bfloat16", [rule], **options)
    for given in (variables, flax.core.freeze(variables)):
      model.apply(given, x, **call)
    assert model == with_policy(Parts(), "mixed_bfloat16", [rule], **options)
