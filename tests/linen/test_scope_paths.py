"""Flags of scopes: there for rules that depend on paths, and nowhere else."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.core import Scope

import mpjax
from mpjax._core.trees import instances_in
from mpjax.linen._scope_paths import PathScope
from tests.linen.probes import KEY, X, operands, text
from tests.programs import bits

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


def test_places_are_told_apart_where_a_rule_does_so():
  for rule in (
    Rule("float16", path="one"),
    Rule("float16", path="**/Dense_0"),
    Rule("float16", path="other"),
    Rule("float16", where=lambda m: m.name == "one"),
  ):
    one, two = flags("bfloat16", [rule])
    assert one
    assert two
    assert one != two


def test_scopes_stay_those_of_flax_where_no_rule_goes_by_place():
  for rules in ([], [Rule("float16", module=Leaf)]):
    assert flags("bfloat16", rules) == [{}, {}]
    assert {type(s) for s in scopes} == {Scope}


def test_scopes_made_from_one_that_is_flagged_are_flagged():
  flags("bfloat16", [Rule("float16", path="one")])
  assert {type(s) for s in scopes} == {PathScope}
  assert type(scopes[0].push("child")) is PathScope
  assert type(scopes[0].rewound()) is PathScope


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

  @nn.compact
  def __call__(self, x):
    return Holds(name="held")(x)


class Holds(nn.Module):
  def setup(self):
    self.a, self.b = (nn.jit(nn.Dense)(3) for _ in range(2))
    self.layers = [nn.jit(nn.Dense)(3) for _ in range(2)]
    self.by_name = {name: nn.jit(nn.Dense)(3) for name in "ab"}

  def __call__(self, x):
    for layer in (self.a, self.b, *self.layers, self.by_name["a"], self.by_name["b"]):
      x = layer(x)
    return x


class Given(nn.Module):
  """A jitted method that is given modules in a list: it calls what is elsewhere."""

  @nn.jit
  @nn.compact
  def __call__(self, layers, x):
    return layers[0](x)


class Gives(nn.Module):
  @nn.compact
  def __call__(self, x):
    first, second = nn.Dense(3, name="first"), nn.Dense(3, name="second")
    return Given(name="b")([second], Given(name="a")([first], x))


def test_modules_that_a_module_holds():
  variables = jax.eval_shape(Held().init, KEY, X)
  rules = [Rule("float16", path=f"held/{name}") for name in ("b", "layers_1", "by_name_b")]
  ours = with_policy(Held(), "mixed_bfloat16", rules)
  assert operands(ours.apply, variables, X) == [BF16, F16] * 3


def test_modules_that_a_method_is_given():
  variables = jax.eval_shape(Gives().init, KEY, X)
  ours = with_policy(Gives(), "mixed_bfloat16", [Rule("float16", path="second")])
  for apply in (ours.apply, jax.jit(ours.apply)):
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
