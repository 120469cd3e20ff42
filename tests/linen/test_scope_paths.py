"""Flags of scopes: there for rules that depend on paths, and nowhere else."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.core import Scope

import mpjax
from mpjax._core.trees import instances_in
from mpjax.linen._scope_paths import PathScope
from tests.linen.products import KEY, X, operands, text
from tests.programs import bits, products

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy

scopes: list[Scope] = []


class Leaf(nn.Module):
  @nn.compact
  def __call__(self, x):
    scopes.append(self.scope)
    return nn.Dense(3)(x)


class Two(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Leaf(name="two")(Leaf(name="one")(x))


def flags(policy, rules):
  """Returns the flags of the scopes of both leaves, those of Flax's own left out."""
  variables = Two().init(KEY, X)
  scopes.clear()
  model = with_policy(Two(), policy, rules, unmatched="ignore")
  jax.eval_shape(model.apply, variables, X)
  return [{k: v for k, v in s.flags.items() if k.startswith("mpjax")} for s in scopes]


@pytest.mark.parametrize(
  ("rules", "apart"),
  [
    ([Rule("float16", path="one")], True),
    ([Rule("float16", path="**/Dense_0")], True),
    ([Rule("float16", path="other")], True),
    ([Rule("float16", where=lambda m: m.name == "one")], True),
  ],
  ids=["path", "inside of both", "elsewhere", "predicate"],
)
def test_places_are_told_apart_where_a_rule_does_so(rules, apart):
  one, two = flags("bfloat16", rules)
  assert one
  assert two
  assert (one != two) is apart


@pytest.mark.parametrize("rules", [[], [Rule("float16", module=Leaf)]], ids=["none", "class"])
def test_scopes_stay_those_of_flax_where_no_rule_goes_by_place(rules):
  assert flags("bfloat16", rules) == [{}, {}]
  assert {type(s) for s in scopes} == {Scope}


def test_scopes_made_from_one_that_is_flagged_are_flagged():
  flags("bfloat16", [Rule("float16", path="one")])
  assert {type(s) for s in scopes} == {PathScope}
  assert type(scopes[0].push("child")) is PathScope
  assert type(scopes[0].rewound()) is PathScope


def test_a_module_that_nn_jit_is_given_is_told_where_it_is():
  class Calls(nn.Module):
    @nn.jit
    def __call__(self, inner, x):
      return inner[0](x)

  class Gives(nn.Module):
    @nn.compact
    def __call__(self, x):
      one, two, calls = nn.Dense(3, name="one"), nn.Dense(3, name="two"), Calls()
      return calls([two], calls([one], x))

  model = with_policy(Gives(), "bfloat16", [Rule("float16", path="two")])
  variables = Gives().init(KEY, X)
  found = [p.dtypes[0] for p in products(jax.make_jaxpr(model.apply)(variables, X))]
  assert found == ["bfloat16", "float16"]


def test_modules_in_plain_containers_are_found():
  a, b, c = nn.Dense(1), nn.Dense(2), nn.Dropout(0.5)
  held = (a, {"x": [b, 3, "text"], "y": jnp.ones(2)}, None, ((c,), {}))
  found = list(instances_in(held, nn.Module))
  assert [id(module) for module in found] == [id(a), id(b), id(c)]
  assert list(instances_in({"kernel": jnp.ones(2)}, nn.Module)) == []


# What the flags are for: `nn.jit` reuses a program for equal modules.

F16, BF16, F32 = ("float16",) * 2, ("bfloat16",) * 2, ("float32",) * 2


class Twice(nn.Module):
  """Two equal modules under `nn.jit`, of which JAX traces one."""

  @nn.compact
  def __call__(self, x):
    layer = nn.jit(nn.Dense)
    return layer(3, name="second")(layer(3, name="first")(x))


class Held(nn.Module):
  """Equal modules that one of them holds, in each way in which a module may."""

  way: str

  def setup(self):
    layers = [nn.jit(nn.Dense)(3) for _ in range(2)]
    if self.way == "fields":
      self.a, self.b = layers
    elif self.way == "list":
      self.layers = layers
    else:
      self.by_name = {"a": layers[0], "b": layers[1]}

  def __call__(self, x):
    if self.way == "fields":
      first, second = self.a, self.b
    elif self.way == "list":
      first, second = self.layers
    else:
      first, second = self.by_name["a"], self.by_name["b"]
    return second(first(x))


class Given(nn.Module):
  """A jitted method that is given modules: it calls what stands elsewhere."""

  @nn.jit
  @nn.compact
  def __call__(self, layer, x):
    return layer(x)


class Gives(nn.Module):
  @nn.compact
  def __call__(self, x):
    first, second = nn.Dense(3, name="first"), nn.Dense(3, name="second")
    return Given(name="b")(second, Given(name="a")(first, x))


@pytest.mark.parametrize("how", ["wrapper", "scope"])
def test_equal_jitted_modules_in_two_places_have_two_policies(how):
  variables = jax.eval_shape(Twice().init, KEY, X)

  def found(*rules):
    def apply(*args):
      if how == "wrapper":
        return with_policy(Twice(), "mixed_bfloat16", rules).apply(*args)
      with scope("mixed_bfloat16", rules):
        return Twice().apply(*args)

    return operands(apply, variables, X)

  assert found(Rule("float16", path="second")) == [BF16, F16]
  # And so they have when another rule, or none, was there before.
  assert found(Rule(None, path="first")) == [F32, BF16]
  assert found() == [BF16, BF16]


@pytest.mark.parametrize(
  ("way", "path"), [("fields", "b"), ("list", "layers_1"), ("dict", "by_name_b")]
)
def test_modules_that_a_module_holds(way, path):
  model = Held(way)
  variables = jax.eval_shape(model.init, KEY, X)
  ours = with_policy(model, "mixed_bfloat16", [Rule("float16", path=path)])
  assert operands(ours.apply, variables, X) == [BF16, F16]


@pytest.mark.parametrize("jitted", [False, True])
def test_modules_that_a_method_is_given(jitted):
  variables = jax.eval_shape(Gives().init, KEY, X)
  ours = with_policy(Gives(), "mixed_bfloat16", [Rule("float16", path="second")])
  apply = jax.jit(ours.apply) if jitted else ours.apply
  assert operands(apply, variables, X) == [BF16, F16]


def test_a_place_inside_of_a_jitted_module():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(3, name="in")(x)

  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
      for number in range(3):
        x = nn.jit(Block)(name=f"block_{number}")(x)
      return x

  variables = jax.eval_shape(Stack().init, KEY, X)
  ours = with_policy(Stack(), "mixed_bfloat16", [Rule("float16", path="block_1/**")])
  assert operands(ours.apply, variables, X) == [BF16, F16, BF16]


def traces(rules):
  """Returns how often `nn.jit` traces two equal modules under these rules."""
  count = []

  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
      count.append(self.name)
      return nn.Dense(3)(x)

  class Root(nn.Module):
    @nn.compact
    def __call__(self, x):
      layer = nn.jit(Layer)
      return layer(name="b")(layer(name="a")(x))

  variables = jax.eval_shape(Root().init, KEY, X)
  count.clear()
  jax.eval_shape(with_policy(Root(), "mixed_bfloat16", rules).apply, variables, X)
  return len(count)


def test_places_that_no_rule_tells_apart_share_one_program():
  assert traces([]) == 1
  assert traces([Rule("float16", module=nn.Conv)]) == 1
  assert traces([Rule("float16", path="a")]) == 2


def test_a_scope_in_a_place_is_like_any_other_afterwards():
  bound = Twice().bind(Twice().init(KEY, X))
  plain = text(lambda x: bound(x), X)
  before = bits(bound(X))
  assert type(bound.scope) is Scope
  rules = [Rule("float16", path="second")]
  for _ in range(2):
    with scope("mixed_bfloat16", rules):
      assert operands(bound, X) == [BF16, F16]
    assert isinstance(bound.scope, Scope)
    assert bits(bound(X)) == before
    assert text(lambda x: bound(x), X) == plain
  assert isinstance(bound.scope.rewound(), Scope)
  assert issubclass(PathScope, Scope)


def test_a_flag_is_that_of_the_scope_in_force():
  variables = Twice().init(KEY, X)
  bound = Twice().bind(variables)
  for rules, wanted in (
    ([Rule("float16", path="first")], [F16, BF16]),
    ([Rule("float16", path="second")], [BF16, F16]),
    ([], [BF16, BF16]),
  ):
    with scope("mixed_bfloat16", rules):
      assert operands(bound, X) == wanted
  with contextlib.nullcontext():
    assert operands(bound, X) == [F32, F32]
