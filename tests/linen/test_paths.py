"""Paths as part of the keys of lifted transforms: `nn.jit` reuses a program for equal modules."""

import flax.linen as nn
import jax
import pytest
from flax.core import Scope

import mpjax
from mpjax.linen._paths import PathScope
from tests.linen.probes import KEY, Does, X, calling, operands, text
from tests.programs import bits

# The models are written as their users write them.
pytestmark = pytest.mark.standard_promotion

Rule, scope, with_policy = mpjax.Rule, mpjax.linen.policy_scope, mpjax.linen.with_policy

F16, BF16 = ("float16",) * 2, ("bfloat16",) * 2


class HoldsEqual(nn.Module):
  def setup(self):
    self.a, self.b = (nn.jit(nn.Dense)(8) for _ in range(2))
    self.layers = [nn.jit(nn.Dense)(8) for _ in range(2)]
    self.by_name = {name: nn.jit(nn.Dense)(8) for name in "ab"}

  def __call__(self, x):
    for layer in (self.a, self.b, *self.layers, self.by_name["a"], self.by_name["b"]):
      x = layer(x)
    return x


GIVEN = calling(lambda module, layers, x: layers[0](x), nn.jit)


def gives(module, x):
  # Gives modules in a list to a jitted method, which calls what is elsewhere.
  first, second = nn.Dense(8, name="first"), nn.Dense(8, name="second")
  return GIVEN(name="b")([second], GIVEN(name="a")([first], x))


def stack(module, x):
  layer = nn.jit(calling(lambda module, x: nn.Dense(8, name="in")(x)))
  for number in range(3):
    x = layer(name=f"block_{number}")(x)
  return x


EQUAL = {
  # The model, the paths of rules for float16, the dtypes of its products.
  "held": (
    lambda module, x: HoldsEqual(name="held")(x),
    *([f"held/{name}" for name in ("b", "layers_1", "by_name_b")], [BF16, F16] * 3),
  ),
  "given": (gives, ["second"], [BF16, F16]),
  "inside": (stack, ["block_1/**"], [BF16, F16, BF16]),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_modules_with_other_policies(name):
  body, paths, wanted = EQUAL[name]
  variables = jax.eval_shape(Does(body).init, KEY, X)
  ours = with_policy(Does(body), "mixed_bfloat16", [Rule("float16", path=path) for path in paths])
  for apply in (ours.apply, jax.jit(ours.apply)):
    assert operands(apply, variables, X) == wanted


def test_paths_that_no_rule_tells_apart_share_one_program():
  traced = []

  def layer(module, x):
    traced.append(module.name)
    return nn.Dense(8)(x)

  jitted = nn.jit(calling(layer))
  model = Does(lambda module, x: jitted(name="b")(jitted(name="a")(x)))
  variables = jax.eval_shape(model.init, KEY, X)
  for rules, count in (
    ([], 1),
    ([Rule("float16", module=nn.Conv)], 1),
    ([Rule("float16", path="a")], 2),
    # What a predicate looks at may tell them apart.
    ([Rule("float16", where=lambda m: "b" in m.path)], 2),
    ([Rule("float16", where=lambda m: m.__dict__.get("name") == "b")], 2),
  ):
    traced.clear()
    jax.eval_shape(with_policy(model, "mixed_bfloat16", rules).apply, variables, X)
    assert len(traced) == count, rules


def test_a_bound_module_follows_each_scope_and_is_like_any_other_afterwards():
  class Two(nn.Module):
    def setup(self):
      self.one, self.two = nn.jit(nn.Dense)(8), nn.jit(nn.Dense)(8)

    def __call__(self, x):
      return self.two(self.one(x))

  bound = Two().bind(Two().init(KEY, X))
  plain = text(lambda x: bound(x), X)
  before = bits(bound(X))
  assert type(bound.scope) is Scope
  for policy, rules, wanted in (
    ("float16", [], [F16, F16]),
    ("bfloat16", [Rule("float16", path="two")], [BF16, F16]),
    ("float16", [Rule("bfloat16", path="*")], [BF16, BF16]),
    ("mixed_bfloat16", [Rule("float16", path="two")], [BF16, F16]),
    ("mixed_bfloat16", [Rule("float16", path="one")], [F16, BF16]),
  ):
    with scope(policy, rules):
      assert operands(bound, X) == wanted
    assert isinstance(bound.scope, Scope)
    assert bits(bound(X)) == before
    assert text(lambda x: bound(x), X) == plain
  assert isinstance(bound.scope.rewound(), Scope)
  assert issubclass(PathScope, Scope)


def test_flax_has_no_hook_for_new_scopes():
  # Once it has one, scopes need no change of their class.
  class Own(Scope):
    pass

  own = Own({}, rngs={}, name=None, flags={"flag": 1})
  assert [type(new) for new in (own.push("a"), own.rewound())] == [Scope, Scope]
  assert own.push("b").flags == own.flags
  seen = []

  def note(next_fun, args, kwargs, context):
    seen.append(context.module.path)
    return next_fun(*args, **kwargs)

  jitted = nn.jit(nn.Dense)
  model = Does(lambda module, x: jitted(8, name="b")(jitted(8, name="a")(x)))
  variables = model.init(KEY, X)
  with nn.intercept_methods(note):
    jax.eval_shape(model.apply, variables, X)
  # The second layer reuses the trace of the first, so no interceptor sees a call of it.
  assert ("a",) in seen
  assert ("b",) not in seen
