"""Which policy is in force for which module."""

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._core.active import ACTIVE
from mpjax._core.policy_config import parse_config
from mpjax.linen._context import OFF, Active, begin
from tests.linen.probes import KEY, Does, Probe, X, note, noted, seen, seen_under

Rule = mpjax.Rule


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    return Probe(name="leaf")(note(self, x))


class Net(nn.Module):
  """Two equal blocks, and a leaf between them."""

  @nn.compact
  def __call__(self, x):
    note(self, x)
    x = Block(name="one")(x)
    x = Probe(name="between")(x)
    return Block(name="two")(x)


class Gram(nn.Module):
  """Computes a product, so that what it returns has the dtype of its policy."""

  policy: Any = None

  @nn.compact
  def __call__(self, x):
    return x @ x.T


def returned(model, policy, rules=()):
  """Returns the dtypes of what a model has sown into "returned", in the order of their names."""
  variables = dict(jax.eval_shape(model.init, KEY, X))
  variables.pop("returned", None)
  wrapped = mpjax.linen.with_policy(model, policy, rules)
  _, found = jax.eval_shape(lambda v: wrapped.apply(v, X, mutable=["returned"]), variables)
  return [str(x.dtype) for x in jax.tree.leaves(found["returned"])]


PATHS = ("", "one", "one/leaf", "between", "two", "two/leaf")


def everywhere(dtype, **others):
  found = dict.fromkeys(PATHS, dtype)
  return {**found, **{path.replace("__", "/"): dtype for path, dtype in others.items()}}


@pytest.mark.case("A98")
@pytest.mark.parametrize(
  ("rules", "wanted"),
  [
    ([], everywhere("bfloat16")),
    # An inner policy overrides the outer, for all that it encloses, and is undone after it.
    (
      [Rule("float16", path="one")],
      everywhere("bfloat16", one="float16", one__leaf="float16"),
    ),
    ([Rule("float16", path="one/leaf")], everywhere("bfloat16", one__leaf="float16")),
    (
      [Rule("float16", path="one"), Rule("float32", path="one/leaf")],
      everywhere("bfloat16", one="float16", one__leaf="float32"),
    ),
    (
      [Rule("float16", path="**/leaf")],
      everywhere("bfloat16", one__leaf="float16", two__leaf="float16"),
    ),
    ([Rule("float16", path="**")], everywhere("float16")),
    ([Rule("float16", path="")], everywhere("float16")),
    ([Rule("float16", path="*")], {**everywhere("float16"), "": "bfloat16"}),
    # by class
    (
      [Rule("float16", module=Block)],
      {**everywhere("float16"), "": "bfloat16", "between": "bfloat16"},
    ),
    (
      [Rule("float16", module=Probe), Rule("float32", module=(Block, Probe))],
      everywhere("bfloat16", one="float32", two="float32", one__leaf="float16", two__leaf="float16")
      | {"between": "float16"},
    ),
    # by predicate
    (
      [Rule("float16", where=lambda m: m.name == "two")],
      everywhere("bfloat16", two="float16", two__leaf="float16"),
    ),
    # the first rule that matches a module wins; a rule on the module beats one on what encloses it
    (
      [Rule("float16", path="one/*"), Rule("float32", path="**/leaf"), Rule("float16", path="two")],
      everywhere("bfloat16", one__leaf="float16", two="float16", two__leaf="float32"),
    ),
  ],
)
def test_resolution(rules, wanted):
  assert seen_under(Net(), "bfloat16", rules) == wanted


def test_none_leaves_all_but_what_rules_pick_out():
  rules = [Rule("mixed_float16", path="one")]
  wanted = everywhere("float32", one="float16", one__leaf="float16")
  assert seen_under(Net(), None, rules) == wanted
  assert seen_under(Net(), None) == everywhere("float32")


class Chooses(nn.Module):
  """Takes a policy as an argument, as its users know it from elsewhere."""

  policy: Any = None

  @nn.compact
  def __call__(self, x):
    note(self, x)
    return Probe(name="leaf")(x)


def test_a_policy_in_the_modules_own_field_beats_rules():
  own = mpjax.Policy(compute_dtype="float16")

  def chooses(module, x):
    for i, policy in enumerate((own, None, "float16", 7)):
      x = Chooses(policy, name=f"at_{i}")(x)
    return x

  found = seen_under(Does(chooses), "bfloat16", [Rule("float32", module=Chooses)])
  # Only a field that holds a Policy is one: a string may mean anything in somebody's model.
  wanted = {"at_0": "float16", "at_1": "float32", "at_2": "float32", "at_3": "float32"}
  assert found == {**wanted, **{f"{path}/leaf": dtype for path, dtype in wanted.items()}}


def test_a_policy_in_a_field_begins_like_a_rule():
  own = mpjax.Policy(compute_dtype="float16", output_dtype="float32")

  def reads(module, x):
    module.sow("returned", "in_its_own", Gram(own)(x))
    module.sow("returned", "in_no_other", Gram(dataclasses.replace(own, output_dtype=None))(x))
    return x

  assert returned(Does(reads), "bfloat16") == ["float32", "float16"]


@pytest.mark.case("A108", "A86")
def test_an_exempt_module_stays_exempt_all_the_way_down():
  rules = [Rule(None, path="one"), Rule("float16", path="one/leaf")]
  found = seen_under(Net(), "bfloat16", rules, unmatched="ignore")
  assert found == everywhere("bfloat16", one="float32", one__leaf="float32")

  class WithPolicyInside(nn.Module):
    @nn.compact
    def __call__(self, x):
      return Chooses(mpjax.Policy(compute_dtype="float16"), name="chooses")(x)

  rules = [Rule(None, module=WithPolicyInside)]
  assert seen_under(WithPolicyInside(), "bfloat16", rules) == {
    "chooses": "float32",
    "chooses/leaf": "float32",
  }


class Holds(nn.Module):
  """Calls modules that it did not make: a field, an argument, one in a closure."""

  held: Any = None

  @nn.compact
  def __call__(self, x, *given, fun=None):
    note(self, x)
    for module in (self.held, *given):
      x = x if module is None else module(x)
    return x if fun is None else fun(x)


class Makes(nn.Module):
  @nn.compact
  def __call__(self, x):
    mine = Block(name="mine")
    x = Holds(mine, name="by_field")(x)
    x = Holds(name="by_argument")(x, mine)
    x = Holds(name="by_keyword")(x, fun=lambda x: mine(x))
    return x


@pytest.mark.case("B093")
def test_a_module_has_the_policy_of_where_it_was_made_not_of_who_calls_it():
  callers = ("by_field", "by_argument", "by_keyword")
  for caller in callers:
    found = seen_under(Makes(), "bfloat16", [Rule("float16", path=caller)])
    # A module passed into a constructor without a parent becomes a child of its holder; this one
    # was named by its maker first, and stays there.
    wanted = dict.fromkeys(("mine", "mine/leaf", *callers), "bfloat16")
    assert found == {**wanted, caller: "float16"}
  # This one has no other maker: it is adopted by its holder.
  found = seen_under(Holds(Block()), "bfloat16", [Rule("float16", path="held/leaf")])
  assert found == {"": "bfloat16", "held": "bfloat16", "held/leaf": "float16"}


LIFTED = {
  "remat": lambda cls, **kwargs: nn.remat(cls)(**kwargs),
  "jit": lambda cls, **kwargs: nn.jit(cls)(**kwargs),
  "vmap": lambda cls, **kwargs: nn.vmap(
    cls, variable_axes={"params": 0}, split_rngs={"params": True}
  )(**kwargs),
  "map_variables": lambda cls, **kwargs: nn.map_variables(cls, "params", lambda x: x)(**kwargs),
  "add_metadata_axis": lambda cls, **kwargs: nn.add_metadata_axis(cls, variable_axes={"params": 0})(
    **kwargs
  ),
}


LIFTED_RULES = [
  # The rules, and the dtypes of the lifted module and of the leaf in it.
  ([], ("bfloat16", "bfloat16")),
  ([Rule("float16", module=Block)], ("float16", "float16")),
  ([Rule("float16", path="lifted")], ("float16", "float16")),
  ([Rule("float16", path="lifted/leaf")], ("bfloat16", "float16")),
  ([Rule("float16", path="lifted"), Rule("float32", path="**/leaf")], ("float16", "float32")),
  ([Rule("float16", path="other")], ("bfloat16", "bfloat16")),
]


@pytest.mark.case("B072", "B095")
@pytest.mark.parametrize("lift", LIFTED.values(), ids=LIFTED)
def test_resolution_across_lifted_transforms(lift):
  """A lifted class hides the parent of what is inside; paths and classes are as without it."""

  lifts = Does(lambda module, x: Probe(name="other")(lift(Block, name="lifted")(x)))
  for rules, (lifted, leaf) in LIFTED_RULES:
    other = "float16" if [rule.path for rule in rules] == ["other"] else "bfloat16"
    found = seen_under(lifts, "bfloat16", rules)
    assert found == {"lifted": lifted, "lifted/leaf": leaf, "other": other}, rules


@pytest.mark.case("B095")
def test_paths_of_a_module_that_shares_a_scope():
  def shares(module, x):
    inner = Block(name="inner")
    nn.share_scope(module, inner)
    return inner(x)

  root = Does(lambda module, x: Does(shares, name="shares")(x))
  # The scopes are one, so the paths are: "inner" is where its holder is.
  found = seen_under(root, "bfloat16", [Rule("float16", path="shares/leaf")])
  assert found == {"shares": "bfloat16", "shares/leaf": "float16"}


@pytest.mark.case("B095", "B072")
def test_a_module_called_twice_matches_each_time():
  def twice(module, x):
    block = Block(name="block")
    return block(block(x))

  model, variables = Does(twice), {}
  wrapped = mpjax.linen.with_policy(model, "bfloat16", [Rule("float16", module=Probe)])
  once = [("block", "bfloat16"), ("block/leaf", "float16")]
  assert noted(wrapped.apply, variables, X) == [*once, *once]


class Teacher(nn.Module):
  """Applies a model of its own, with variables of its own, in its forward pass."""

  in_closure: Any = None

  @nn.compact
  def __call__(self, x):
    note(self, x)
    return Probe(name="after")(self.in_closure().apply({}, x))


def test_apply_inside_a_forward_pass_inherits():
  # The child is a root of its own; what it runs under is what surrounds the call.
  wanted = {"": "bfloat16", "leaf": "bfloat16", "after": "bfloat16"}
  assert seen_under(Teacher(in_closure=Block), "bfloat16") == wanted
  # It is that of the module that makes the call, not that of the outer root.
  model = mpjax.linen.with_policy(
    Holds(Teacher(in_closure=Block)), "bfloat16", [Rule("float16", path="held")]
  )
  assert noted(model.apply, {}, X) == [
    ("", "bfloat16"),
    ("held", "float16"),
    ("", "float16"),
    ("leaf", "float16"),
    ("held/after", "float16"),
  ]
  # And inside of an exempt module it is exempt.
  found = seen_under(Teacher(in_closure=Block), "bfloat16", [Rule(None, path="")])
  assert found == {"": "float32", "leaf": "float32", "after": "float32"}


def test_apply_of_a_named_child_is_at_its_name():
  class Parent(nn.Module):
    def setup(self):
      self.child = Probe()

    def __call__(self, x):
      return self.child.clone(parent=None).apply({}, x)

  for rules, wanted in (([], "bfloat16"), ([Rule("float16", path="child")], "float16")):
    model = mpjax.linen.with_policy(Parent(), "bfloat16", rules, unmatched="ignore")
    # Its path is that of a root; it is the rule that knows its name.
    assert noted(model.apply, {}, X) == [("", wanted)]


@pytest.mark.case("A98", "A99")
def test_a_wrapper_inside_a_forward_pass_wins_and_is_undone():
  def mixed(module, x):
    note(module, x)
    inner = mpjax.linen.with_policy(Block(parent=None), "float16", [Rule("float32", path="leaf")])
    x = inner.apply({}, x)
    module.sow("returned", "by the inner", x)
    return Probe(name="after")(x)

  model = mpjax.linen.with_policy(Does(mixed), "bfloat16", [Rule("float32", module=Block)])
  assert noted(model.apply, {}, X) == [
    ("", "bfloat16"),
    ("", "float16"),
    ("leaf", "float32"),
    ("after", "bfloat16"),
  ]
  assert returned(Does(mixed), "bfloat16", [Rule("float32", module=Block)]) == ["float16"]
  # The rules of the outer do not reach into the inner: the innermost given policy wins whole.


@pytest.mark.case("A89", "A98", "A104")
def test_the_innermost_given_policy_wins_whole():
  scope, wrapped = mpjax.linen.policy_scope, mpjax.linen.with_policy
  model, rules = Net(), [Rule("float32", path="one")]
  with scope("bfloat16", rules):
    assert seen(model.apply, {}, X) == everywhere("bfloat16", one="float32", one__leaf="float32")
    with scope("float16"):
      assert seen(model.apply, {}, X) == everywhere("float16")
      assert seen(wrapped(model, "bfloat16").apply, {}, X) == everywhere("bfloat16")
      assert seen(wrapped(model, None).apply, {}, X) == everywhere("float32")
      assert seen(model.apply, {}, X) == everywhere("float16")
    assert seen(wrapped(model, "float16").apply, {}, X) == everywhere("float16")
    assert seen(model.apply, {}, X) == everywhere("bfloat16", one="float32", one__leaf="float32")
  assert seen(model.apply, {}, X) == everywhere("float32")


@pytest.mark.case("B052")
def test_output_dtypes_of_nested_policies():
  model, wrapped = Gram(), mpjax.linen.with_policy
  half, x = mpjax.Policy(compute_dtype="float16"), X.astype("float16")
  with mpjax.linen.policy_scope("mixed_bfloat16"):
    for ours, wanted in ((model, "float32"), (wrapped(model, "float16"), "float16")):
      assert jax.eval_shape(ours.apply, {}, x).dtype == wanted
    assert jax.eval_shape(wrapped(model, half).apply, {}, X).dtype == jnp.float16


RETURNED = [
  # (policy of the root, policy of the rule, what the picked module returns)
  # Where it has no output dtype: what it computed.
  ("mixed_bfloat16", mpjax.Policy(compute_dtype="float32"), "float32"),
  ("mixed_bfloat16", "float32", "float32"),
  ("mixed_bfloat16", "float16", "float16"),
  ("mixed_bfloat16", mpjax.Policy(compute_dtype="float16"), "float16"),
  ("mixed_bfloat16", "mixed_float16", "float32"),
  ("float16", mpjax.Policy(compute_dtype="bfloat16"), "bfloat16"),
  ("c=bf16", mpjax.Policy(compute_dtype="bfloat16", output_dtype="float32"), "float32"),
  # None surrounds it.
  (None, mpjax.Policy(compute_dtype="float16"), "float16"),
  (None, "mixed_float16", "float32"),
]


@pytest.mark.case("B052", "A98")
def test_what_is_returned_where_a_policy_begins():
  def reads(module, x):
    x = Gram(name="block")(x)
    module.sow("returned", "x", x)
    return x

  for root, rule, wanted in RETURNED:
    assert returned(Does(reads), root, [Rule(rule, path="block")]) == [wanted], (root, rule)


class Chain(nn.Module):
  """Sows what the next of its kind returns; the last computes it."""

  depth: int

  @nn.compact
  def __call__(self, x):
    if self.depth == 0:
      return x @ x.T
    x = Chain(self.depth - 1, name="next")(x)
    self.sow("returned", f"at_{self.depth - 1}", x)
    return x


@pytest.mark.case("B052")
def test_nested_matches_of_one_rule_begin_once():
  for rule, first in (
    (Rule("mixed_float16", module=Chain), jnp.float16),
    (Rule("mixed_float16", path="**"), jnp.float16),
    (Rule("mixed_float16", path="next/**"), jnp.float32),  # It begins one level down.
  ):
    model = mpjax.linen.with_policy(Chain(3), "mixed_bfloat16", [rule])
    out, state = jax.eval_shape(lambda model=model: model.apply({}, X, mutable=["returned"]))
    assert out.dtype == jnp.float32
    outermost = state["returned"]
    inner = outermost["next"]
    assert inner["next"]["at_0"][0].dtype == inner["at_1"][0].dtype == jnp.float16
    assert outermost["at_2"][0].dtype == first


@pytest.mark.case("B052")
def test_the_output_dtype_is_that_of_the_root_and_of_nothing_inside():
  def reads(module, x):
    for _ in range(2):
      x = nn.Dense(3)(x)
      module.sow("returned", "x", x)
    return x

  variables = {"params": jax.eval_shape(Does(reads).init, KEY, X)["params"]}
  for policy, wanted in (("mixed_float16", "float32"), ("c=f16", "float16")):
    model = mpjax.linen.with_policy(Does(reads), policy)
    assert jax.eval_shape(model.apply, variables, X).dtype == jnp.dtype(wanted)
    assert returned(Does(reads), policy) == ["float16", "float16"]


def given(policy="bfloat16", rules=(), **options):
  settings = {"defaults": None, "unmatched": "raise", **options}
  return parse_config("mpjax.f", policy, rules, **settings)


@pytest.mark.case("B080")
def test_equal_states_are_equal_and_hash_alike():
  make = [
    given,
    lambda: given("mixed_float16"),
    lambda: given(None),
    lambda: given(rules=[Rule(None, path="a")]),
    lambda: given(defaults=()),
    lambda: given(unmatched="warn"),
  ]
  for one in make:
    assert begin(one()) == begin(one())
    assert hash(begin(one())) == hash(begin(one()))
    assert one() is not one()
  assert len({begin(one()) for one in make}) == len(make)


def test_no_state_is_in_force_to_begin_with():
  assert ACTIVE.value is None
  assert Active(on=False) == OFF


def test_what_was_given_is_hashed_anew_where_it_is_unpickled():
  model = mpjax.linen.with_policy(nn.Dropout(0.5), "bfloat16", [Rule(None, path="a")])
  program = (
    "import pickle, sys, flax.linen as nn, mpjax\n"
    "there = pickle.load(sys.stdin.buffer)\n"
    "rules = [mpjax.Rule(None, path='a')]\n"
    "here = mpjax.linen.with_policy(nn.Dropout(0.5), 'bfloat16', rules)\n"
    "assert there.given == here.given\n"
    "assert hash(there.given) == hash(here.given), 'equal, with two hashes'\n"
  )
  environment = {**os.environ, "PYTHONHASHSEED": "12345"}
  run = subprocess.run(
    [sys.executable, "-c", program],
    input=pickle.dumps(model),
    env=environment,
    capture_output=True,
    check=False,
  )
  assert run.returncode == 0, run.stderr.decode()
  assert hash(copy.deepcopy(model)) == hash(model)
