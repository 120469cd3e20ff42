"""What the user gave, and which policy a module gets of it."""

import functools
import pickle

import flax.linen as nn
import pytest

import mpjax
from mpjax._core.policy_config import ModulePolicy, parse_config, resolve_policy

Rule = mpjax.Rule
HALF, OTHER = mpjax.Policy.parse("c=bf16"), mpjax.Policy.parse("c=f16")
DENSE = {"module": nn.Dense}


def given(policy="c=bf16", rules=(), unmatched="raise"):
  return parse_config("mpjax.f", policy, rules, unmatched=unmatched)


def test_what_is_given_is_parsed():
  found = given("mixed_float16")
  assert found.policy == mpjax.Policy.parse("mixed_float16")
  outputs = (found.output_dtype, given().output_dtype, given(None).output_dtype)
  assert outputs == ("float32", None, None)
  with pytest.raises(mpjax.errors.MpjaxValueError, match="unmatched"):
    given(unmatched="never")
  # Equal ones are one key and can be pickled.
  first, second = (given(rules=[Rule(None, path="a")]) for _ in range(2))
  assert first == second
  assert hash(first) == hash(second)
  assert pickle.loads(pickle.dumps(first)) == first


def test_which_rules_depend_on_paths_and_what_computes_in_low_precision_anywhere():
  for selector, by_path in ({"path": "a"}, True), ({"where": callable}, True), (DENSE, False):
    assert given(rules=[Rule(None, **selector)]).by_path == by_path
  for policy, rules, rewrites in [
    ("c=bf16", (), True),
    ("float32", (), False),
    (None, (), False),
    ("float32", [Rule("c=f16", path="a")], True),
    ("c=f32,precision=default", (), True),
    (None, [Rule("c=f32,precision=highest", path="a")], True),
  ]:
    assert given(policy, rules).rewrites == rewrites, (policy, rules)


def test_the_policy_of_a_module_comes_with_the_rule_that_picked_it():
  around, of_other, exempt = ModulePolicy(HALF), Rule(OTHER, path="a"), Rule(None, module=nn.Dense)
  picked = functools.partial(ModulePolicy, picked=True)
  for rules, own, wanted in (
    ([Rule(OTHER, path="b")], None, around),
    ([Rule("float32", path="b"), of_other, exempt], None, picked(OTHER, rule=of_other)),
    ([exempt, of_other], None, picked(None, exempt=True, rule=exempt)),
    # A field of its own beats rules.
    ([exempt], OTHER, picked(OTHER)),
  ):
    assert resolve_policy(given(rules=rules), nn.Dense(2), "a", own, around) == wanted
  # Those that it hides are found where they are asked for.
  config = given(rules=[Rule("float32", path="b"), of_other, exempt])
  found = resolve_policy(config, nn.Dense(2), "a", None, around, all_matches=True)
  assert found == picked(OTHER, rule=of_other, hidden=(exempt,))
