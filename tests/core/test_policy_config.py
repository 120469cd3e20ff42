"""What the user gave, and which policy a module gets of it."""

import pickle

import flax.linen as nn
import pytest

import mpjax
from mpjax._core.policy_config import (
  ModulePolicy,
  ModuleRecord,
  parse_config,
  resolve_policy,
)
from tests.errors import check_error

Rule = mpjax.Rule
HALF, OTHER = mpjax.Policy.parse("c=bf16"), mpjax.Policy.parse("c=f16")


def given(policy="c=bf16", rules=(), defaults=(), unmatched="raise"):
  return parse_config("mpjax.f", policy, rules, defaults=defaults, unmatched=unmatched)


def test_what_is_given_is_parsed():
  found = given("mixed_float16")
  assert found.policy == mpjax.Policy.parse("mixed_float16")
  assert (found.output_dtype, given().output_dtype, given(None).output_dtype) == (
    "float32",
    None,
    None,
  )
  assert given(defaults=None).defaults == mpjax.default_rules()
  with pytest.raises(mpjax.MpjaxValueError, match="unmatched"):
    given(unmatched="never")


def test_equal_ones_are_one_key_and_can_be_pickled():
  first, second = (given(rules=[Rule(None, path="a")]) for _ in range(2))
  assert first == second
  assert hash(first) == hash(second)
  assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.parametrize(
  ("rule", "by_path"),
  [({"path": "a"}, True), ({"where": callable}, True), ({"module": nn.Dense}, False)],
)
def test_rules_of_classes_do_not_depend_on_paths(rule, by_path):
  assert given(rules=[Rule(None, **rule)]).by_path == by_path


@pytest.mark.parametrize(
  ("policy", "rules", "rewrites"),
  [
    ("c=bf16", (), True),
    ("float32", (), False),
    (None, (), False),
    ("float32", [Rule("c=f16", path="a")], True),
    ("c=f32,precision=default", (), True),
    (None, [Rule("c=f32,precision=highest", path="a")], True),
  ],
)
def test_low_is_what_computes_in_low_precision_anywhere(policy, rules, rewrites):
  assert given(policy, rules).rewrites == rewrites


@pytest.mark.parametrize(
  ("rules", "own", "around", "wanted"),
  [
    ([], None, ModulePolicy(HALF), ModulePolicy(HALF)),
    ([], None, ModulePolicy(HALF, picked=True), ModulePolicy(HALF)),
    ([Rule(OTHER, path="a")], None, ModulePolicy(HALF), ModulePolicy(OTHER, picked=True)),
    ([Rule(OTHER, path="b")], None, ModulePolicy(HALF), ModulePolicy(HALF)),
    # The first that matches.
    (
      [Rule(None, module=nn.Dense), Rule(OTHER, path="a")],
      None,
      ModulePolicy(HALF),
      ModulePolicy(None, picked=True, exempt=True),
    ),
    # A field of its own beats rules; no field is a policy by chance.
    ([Rule(None, path="a")], OTHER, ModulePolicy(HALF), ModulePolicy(OTHER, picked=True)),
    ([], "float16", ModulePolicy(HALF), ModulePolicy(HALF)),
    # What is inside of an exempt module is exempt.
    (
      [Rule(OTHER, path="a")],
      OTHER,
      ModulePolicy(None, True, True),
      ModulePolicy(None, exempt=True),
    ),
  ],
)
def test_which_policy_a_module_gets(rules, own, around, wanted):
  found = resolve_policy(given(rules=rules), nn.Dense(2), "a", own, around)
  assert found._replace(rule=None) == wanted
  by_a_rule = wanted.picked and not isinstance(own, mpjax.Policy)
  assert found.rule == (rules[0] if by_a_rule else None)


def test_a_default_gives_way_to_a_rule():
  norm, defaults = nn.LayerNorm(), [Rule("float32", module=nn.LayerNorm)]
  plain, ruled = given(defaults=defaults), given(rules=[Rule(OTHER, path="a")], defaults=defaults)
  assert (
    resolve_policy(plain, norm, "a", None, ModulePolicy(HALF)).policy.compute_dtype == "float32"
  )
  assert resolve_policy(ruled, norm, "a", None, ModulePolicy(HALF)).policy == OTHER


def test_rules_that_match_nothing():
  rules = [Rule(OTHER, path="a"), Rule(None, module=nn.Dense), Rule(None, path="headd")]

  def record(unmatched):
    found = ModuleRecord(given(rules=rules, unmatched=unmatched))
    found.note(nn.Dense(2), "a")
    assert found.matched == set(rules[:2])
    found.classes = {"head": "Dense"}
    return found

  with pytest.raises(mpjax.UnmatchedRuleError) as excinfo:
    record("raise").check("of the model", 1)
  check_error(
    excinfo, where="headd", expected="at least one module", got="of the model", fix="head"
  )
  with pytest.warns(UserWarning, match="headd") as caught:
    record("warn").check("here", 1)
  assert caught[0].filename == __file__
  record("ignore").check("here", 1)
  found = record("raise")
  found.note_paths(["headd"])
  found.check("of the model", 1)
