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
DENSE = {"module": nn.Dense}


def given(policy="c=bf16", rules=(), defaults=(), unmatched="raise"):
  return parse_config("mpjax.f", policy, rules, defaults=defaults, unmatched=unmatched)


def test_what_is_given_is_parsed():
  found = given("mixed_float16")
  assert found.policy == mpjax.Policy.parse("mixed_float16")
  outputs = (found.output_dtype, given().output_dtype, given(None).output_dtype)
  assert outputs == ("float32", None, None)
  assert given(defaults=None).defaults == mpjax.default_rules()
  with pytest.raises(mpjax.MpjaxValueError, match="unmatched"):
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


AROUND, NEXT = ModulePolicy(HALF), ModulePolicy(OTHER, picked=True)
OF_OTHER = Rule(OTHER, path="a")


@pytest.mark.parametrize(
  ("rules", "own", "around", "wanted"),
  [
    ([], None, AROUND, AROUND),
    ([], None, ModulePolicy(HALF, picked=True), AROUND),
    ([OF_OTHER], None, AROUND, NEXT),
    ([Rule(OTHER, path="b")], None, AROUND, AROUND),
    # The first that matches.
    (
      [Rule(None, module=nn.Dense), OF_OTHER],
      *(None, AROUND, ModulePolicy(None, picked=True, exempt=True)),
    ),
    # A field of its own beats rules; no field is a policy by chance.
    ([Rule(None, path="a")], OTHER, AROUND, NEXT),
    ([], "float16", AROUND, AROUND),
    # What is inside of an exempt module is exempt.
    ([OF_OTHER], OTHER, ModulePolicy(None, True, True), ModulePolicy(None, exempt=True)),
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
