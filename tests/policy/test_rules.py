"""`Rule`: what each selector picks out, which rule wins, and what a wrong one is told."""

import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._policy.rules import ModuleRecord, first_match, glob_of, parse_config, parse_rules
from tests.errors import check_error, refused

Rule = mpjax.Rule
X = jnp.ones((1, 2))


class Plain:
  """A module, as far as a path or a class rule looks at one."""


class Derived(Plain):
  """A subclass of it."""


class Other:
  """A class of its own."""


Reloaded = type("Plain", (), {"__module__": __name__})
"""The class of `Plain` in a module that was loaded again."""


def matches(path, module_path):
  return Rule(None, path=path).matches(Plain(), module_path)


# A glob or regular expression, the paths that it matches, and others that it does not.
GLOBS = [
  ("encoder/attention", ["encoder/attention"], ["encoder/attention/query", "my/encoder/attention"]),
  ("encoder", ["encoder"], ["encoder_2", "Encoder"]),
  ("coder", [], ["encoder"]),
  # one level
  ("encoder/*/attention", ["encoder/layer_0/attention"], ["encoder/attention"]),
  ("encoder/*/attention", [], ["encoder/a/b/attention"]),
  ("*", ["encoder"], ["", "encoder/attention"]),
  ("block_*", ["block_12"], ["block_1/mlp"]),
  ("block_?", ["block_1"], ["block_12"]),
  ("block_[02]", ["block_2"], ["block_1"]),
  ("block_[!02]", ["block_1"], ["block_2"]),
  # characters in brackets stand for themselves
  ("layer[(]1[)]", ["layer(1)"], ["layer1"]),
  ("[[]x[]]/[.*]", ["[x]/.", "[x]/*"], ["x/.", "[x]/a"]),
  # any number of levels
  ("**", ["", "a/b/c"], []),
  ("**/head", ["head", "a/b/head"], ["a/head/b", "a/overhead"]),
  ("encoder/**", ["encoder", "encoder/a/b"], ["encoders/a"]),
  ("a/**/z", ["a/z", "a/b/c/z"], ["a/b"]),
  ("a/**/**/z", ["a/z"], ["z"]),
  ("**/a/**", ["x/a/y"], ["x/y"]),
  # the root
  ("", [""], ["a"]),
]
PATTERNS = [
  (r"block_\d+/mlp", ["block_12/mlp"], ["block_12/mlp/x"]),
  (r".*mlp", ["block_12/mlp"], []),
  (r"", [""], ["a"]),
  (r"(encoder|decoder)/.*", ["decoder/x/y"], ["x/decoder/y"]),
]


def test_globs_and_regular_expressions_match_in_full():
  patterns = [(re.compile(pattern), yes, no) for pattern, yes, no in PATTERNS]
  for path, yes, no in [*GLOBS, *patterns]:
    found = [matches(path, name) for name in yes + no]
    assert found == [True] * len(yes) + [False] * len(no), path


@pytest.mark.parametrize("path", ["", "a/b", "a(1)", "x[y]", "[]", "a*?", "!", "p.q", "^|{$}+\\"])
def test_a_glob_of_a_path_matches_it_alone(path):
  glob = glob_of(path)
  assert Rule("float32", path=glob).path == glob
  assert matches(glob, path)
  others = {"a", "x", "y", "xy", "a1", "ab", "(", "pq", f"{path}/a", f"a{path}"} - {path}
  assert not any(matches(glob, other) for other in others)


@pytest.mark.parametrize(
  ("selector", "module", "wanted"),
  [
    (Plain, Plain(), True),
    (Plain, Derived(), True),
    (Derived, Plain(), False),
    (Plain, Other(), False),
    ((Derived, Other), Other(), True),
    ((Derived, Other), Plain(), False),
    (Plain, Plain, False),
    (Plain, Reloaded(), False),
  ],
)
def test_classes(selector, module, wanted):
  assert Rule(None, module=selector).matches(module, "anywhere") is wanted, (selector, module)


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(2, name="head")(nn.Dense(2, name="body")(x))


def test_what_a_predicate_raises_names_the_module():
  rule = Rule(None, where=lambda module: module.missing)
  for path, name in (("encoder/head", "'encoder/head'"), ("", "'at the root'")):
    with pytest.raises(AttributeError) as caught:
      rule.matches(Plain(), path)
    (note,) = caught.value.__notes__
    assert f"for the module {name} (Plain)" in note
    assert "the root has no name" in note
  # What it returns counts by its truth.
  assert Rule(None, where=lambda m: "yes").matches(Plain(), "") is True
  assert Rule(None, where=lambda m: None).matches(Plain(), "") is False


def is_head(module):
  return module.name == "head"


def test_a_predicate_created_in_each_step_is_traced_in_each_step():
  traces, variables = [], Net().init(jax.random.key(0), X)

  @jax.jit
  def apply(variables, x):
    traces.append(None)
    return Net().apply(variables, x)

  def step(predicate):
    rules = [Rule("float32", where=predicate)]
    with mpjax.linen.policy_scope("params=float32,compute=bfloat16", rules):
      return apply(variables, X).dtype

  assert [step(is_head) for _ in range(3)] == [jnp.float32] * 3
  assert len(traces) == 1
  assert [step(lambda m: m.name == "head") for _ in range(2)] == [jnp.float32] * 2
  assert len(traces) == 3


EXACT = Rule("float32", path="encoder/head")
PATTERN = Rule("float16", path="**/head")


@pytest.mark.parametrize(
  ("rules", "path", "wanted"),
  [
    ((EXACT, PATTERN), "encoder/head", EXACT),
    ((PATTERN, EXACT), "encoder/head", PATTERN),
    ((EXACT, PATTERN), "decoder/head", PATTERN),
    ((EXACT, PATTERN), "encoder/heads", None),
  ],
)
def test_the_first_rule_that_matches_wins(rules, path, wanted):
  assert first_match(rules, Plain(), path) is wanted, (rules, path)


def test_a_rule_is_a_value_and_so_is_a_list_of_rules():
  pairs = [
    [Rule("mixed_float16", path="a/*"), Rule("p=f32,c=f16,o=f32", path="a/*")],
    [Rule(None, module=Plain), Rule(None, module=Plain)],
    [Rule(None, where=is_head), Rule(None, where=is_head)],
    [Rule(None, path=re.compile("a")), Rule(None, path=re.compile("a"))],
  ]
  for one, two in pairs:
    assert one == two
    assert hash(one) == hash(two)
    assert one is not two
  assert len({rule for pair in pairs for rule in pair}) == len(pairs)
  assert Rule(None, path="a") != Rule("float32", path="a")
  assert Rule(None, path="a") != Rule(None, path=re.compile("a"))
  assert Rule(None, module=Plain) != Rule(None, module=(Plain,))
  with pytest.raises(AttributeError):
    pairs[0][0].path = "b"
  # A predicate may have no hash.
  predicate = type("Predicate", (), {"__call__": lambda self, m: True, "__hash__": None})()
  assert len({Rule(None, where=predicate), Rule(None, where=predicate)}) == 1
  # A predicate is the function itself, and pickled by its name.
  assert pickle.loads(pickle.dumps(pairs[2][0])) == pairs[2][0]
  others = [Rule("float32", where=lambda m: m.name == "head") for _ in range(2)]
  assert others[0] != others[1]
  # Another order of rules is another value.
  assert given(rules=[EXACT, PATTERN]) == given(rules=(EXACT, PATTERN))
  assert given(rules=[PATTERN, EXACT], unmatched="ignore") != given(rules=[EXACT, PATTERN])


def test_the_text_of_a_rule_is_its_code():
  names = {"mpjax": mpjax, "re": re, "Plain": Plain, "Dense": nn.Dense, "is_named": is_named}
  long = re.compile("|".join(f"a_long_name_{i}" for i in range(30)), re.IGNORECASE | re.DOTALL)
  paths = ("it's", 'a "name"', re.compile("a+"), long, re.compile(r"""a\.'b"c\n"""))
  rules = [Rule("f32", path=path) for path in paths]
  rules += [Rule(None, module=classes) for classes in (Plain, (Plain,), (Plain, nn.Dense))]
  rules += [Rule(policy, path="**") for policy in ("bf16", "c=f16", "mixed_float8")]
  rules += [Rule(None, where=is_named), Rule("c=bf16", path="a", rewrite=False)]
  for rule in rules:
    assert eval(repr(rule), names) == rule
  assert repr(Rule("bf16", path="**")) == 'mpjax.Rule("mixed_bfloat16", path="**")'


def test_selectors_that_select_nothing():
  expected = "exactly one of path=, module= and where="
  for selectors, got in [
    ({}, "none of them"),
    ({"path": "a", "module": Plain}, "path= and module="),
    ({"path": "a", "module": Plain, "where": callable}, "path= and module= and where="),
    ({"module": Plain, "where": callable}, "module= and where="),
  ]:
    with refused(ValueError, "mpjax.Rule(...)", expected, got, "one rule for each selector"):
      Rule("float32", **selectors)
  expected = "a glob of module names joined by single slashes"
  globs = ["encoder/", "/encoder", "a//b", "/", "blocks[0", "block0]", "[a/b]", "a[]"]
  for path in globs + [f"a{sign}" for sign in r".\()|+^${}"]:
    where, fix = "mpjax.Rule(path=...)", "pass re.compile(...)"
    with refused(ValueError, where, expected, repr(path), fix):
      Rule("float32", path=path)
  classes = "a class or a non-empty tuple of classes"
  for selector, expected, values in [
    ("path", "a glob or a compiled regular expression", [3, ("encoder", "head"), Plain]),
    ("module", classes, ["Dense", Plain(), (), [Plain], (Plain, "Dense")]),
    ("where", "a predicate on the bound module", ["head", 3]),
  ]:
    for value in values:
      where, fix = f"mpjax.Rule({selector}=...)", "what each selector takes"
      with refused(TypeError, where, expected, repr(value), fix):
        Rule("float32", **{selector: value})


def test_a_model_in_place_of_a_class_or_a_rule_is_named_in_one_line():
  dense = nn.Dense(3)
  named = "Dense( # attributes features = 3"
  assert repr(dense).count("\n") > 9
  with refused(TypeError, "mpjax.Rule(module=...)", "a class", named, "write its path") as caught:
    Rule("float32", module=dense)
  with refused(TypeError, "rules", "a sequence of mpjax.Rule", named, "Write [") as of_rules:
    parse_rules([dense], "rules")
  assert "\n" not in f"{caught.value} {of_rules.value}"


def test_a_wrong_policy_is_told_as_anywhere_and_a_rule_written_otherwise_is_told_how():
  with refused(ValueError, "mpjax.Rule(policy)", "a preset", "'float61'", "'float16'"):
    Rule("float61", path="a")
  # What is nothing like a policy is not taken for the nearest one.
  for path in ("head", "encoder/mlp", "**/attention"):
    fix = 'The policy comes first: Rule("float32", path="head").'
    with refused(ValueError, "mpjax.Rule(policy)", "a preset", repr(path), fix) as caught:
      Rule(path, path="float32")
    assert "Did you mean" not in str(caught.value)
  expected, fix = "arguments policy, path, module, where", 'mpjax.Rule("float32", path="head")'
  for args, kwargs in [
    (("head", "float32"), {}),
    (("float32", "head"), {}),
    ((), {"path": "head"}),
    (("float32",), {"paths": "head"}),
  ]:
    with refused(TypeError, "mpjax.Rule(...)", expected, "argument", fix):
      Rule(*args, **kwargs)


def test_any_iterable_of_rules_will_do_and_nothing_else():
  assert parse_rules(iter([EXACT, PATTERN]), "f") == (EXACT, PATTERN)
  assert parse_rules((), "f") == ()
  where, fix = "mpjax.with_policy(rules=...)", "Write [mpjax.Rule("
  for rules, got in [
    (EXACT, repr(EXACT)),
    ([EXACT, "float32"], "'float32'"),
    ("head", "'head'"),
    ({"head": "float32"}, "'head'"),
  ]:
    with refused(TypeError, where, "a sequence of mpjax.Rule", got, fix):
      parse_rules(rules, where)


CLASSES = {
  **{"": "Net", "encoder": "Encoder", "encoder/attention": "Attention"},
  **{"encoder/mlp": "Dense", "decoder": "Dense"},
}


def unmatched_error(rule, classes=CLASSES):
  record = ModuleRecord(given(rules=[rule]))
  record.classes = classes
  with pytest.raises(mpjax.errors.UnmatchedRuleError) as caught:
    record.check("that init passed", 1)
  return caught.value


def test_the_error_for_a_rule_that_matches_nothing():
  of_classes = "The model's classes: Attention, Dense, Encoder, Net."
  similar = "The nearest module paths: 'encoder/attention', 'encoder', 'encoder/mlp'. Rules select "
  similar += "modules, not parameters: a float32 matmul of a parameter `w` is "
  similar += "mpjax.full_precision(jnp.matmul)(x, w)."
  for rule, near in (
    (Rule(None, path="encoder/atention"), similar),
    (Rule(None, path=re.compile("decodr")), "The nearest module paths: 'decoder', "),
    (Rule(None, module=Plain), of_classes),
    (Rule(None, where=callable), "The nearest module paths: '', 'decoder', 'encoder'."),
  ):
    error = unmatched_error(rule)
    fix = f'{near} Fix the selector, or pass unmatched="ignore".' if near.endswith(".") else near
    expected = "a rule that picks out at least one module"
    got = "none of the 5 modules that init passed"
    check_error(error, ValueError, f"rules: {rule!r}", expected, got, fix)
    assert isinstance(error, mpjax.errors.UnmatchedRuleError)
  # Profiles and reports begin paths with the root, by its name or its class.
  for path in ("Net/decoder", "GT/decoder"):
    classes = {"GT": "Net", **CLASSES} if path.startswith("GT") else CLASSES
    fix = unmatched_error(Rule(None, path=path), classes).fix
    assert f"The name of the root, {path[:-8]!r}, is no part of paths: write 'decoder'." in fix
  assert "root" not in unmatched_error(Rule(None, path="encoder/at")).fix
  for rule in (Rule(None, path="head"), Rule(None, where=callable)):
    fix = unmatched_error(rule, {"": "Dense"}).fix
    assert fix.startswith("The only module is the root, path ''. Fix the selector")


WILDCARDS = [
  ("*a" * 12 + "b", "a" * 40, "a" * 40 + "b"),
  ("**/a/" * 12 + "x", "/".join(["a"] * 40), "/".join(["a"] * 40) + "/x"),
  ("**/*a*/" * 6 + "x", "/".join(["aa"] * 40), "/".join(["aa"] * 40) + "/x"),
]


@pytest.mark.parametrize(("glob", "no", "yes"), WILDCARDS)
def test_a_glob_takes_no_longer_for_many_wildcards(glob, no, yes):
  # Trying each wildcard at each position takes minutes.
  assert (matches(glob, no), matches(glob, yes)) == (False, True)


def given(policy="c=bf16", rules=(), unmatched="raise"):
  return parse_config("mpjax.f", policy, rules, unmatched=unmatched)


def is_named(module):
  return module.name is not None


HIDDEN = [
  # Two rules, of which the second can never apply.
  (Rule("f32", path="**"), Rule("bf16", module=nn.Dense)),
  (Rule("f32", path="head"), Rule("bf16", path="head")),
  (Rule("f32", where=is_named), Rule("bf16", where=is_named)),
  (Rule("f32", module=nn.Module), Rule("bf16", module=nn.Dense)),
  (Rule("f32", module=(nn.Dense, nn.Conv)), Rule("bf16", module=(nn.Conv,))),
  (Rule("f32", path="**/up"), Rule("bf16", path="mlp/up")),
  (Rule("f32", path=re.compile("mlp.*")), Rule("bf16", path="mlp/up")),
  (Rule("bf16", path="head", rewrite=False), Rule("bf16", path="head")),
]
SEEN = [
  (Rule("bf16", path="head"), Rule("f32", path="**")),
  (Rule("f32", module=nn.Dense), Rule("bf16", module=nn.Module)),
  (Rule(None, path="encoder"), Rule("bf16", path="encoder2/head")),
  (Rule("f32", path="*/up"), Rule("bf16", path="up")),
  (Rule("f32", path="head"), Rule("bf16", module=nn.Dense)),
  (Rule("f32", module=nn.Dense), Rule("bf16", module=(nn.Dense, nn.Conv))),
]


def test_a_rule_that_can_never_apply_is_named():
  unmatched, where = mpjax.errors.UnmatchedRuleError, "rules: "
  for rules in HIDDEN:
    with refused(unmatched, f"{where}{rules[1]}", "can apply", "after mpjax", "first match wins"):
      given(rules=rules)
    with pytest.warns(UserWarning, match="first match wins"):
      given(rules=rules, unmatched="warn")
    assert given(rules=rules, unmatched="ignore").rules == rules
  for rules in SEEN:
    assert given(rules=rules).rules == rules


def test_which_rules_depend_on_paths_and_what_computes_in_low_precision_anywhere():
  for selector, by_path in (
    ({"path": "a"}, True),
    ({"where": callable}, True),
    ({"module": nn.Dense}, False),
  ):
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


def test_classes_of_one_name_stay_apart():
  # As those of a module that is loaded again do.
  def factory():
    class Block(nn.Module):
      pass

    return Block

  one, two = factory(), factory()
  assert one.__module__ == two.__module__
  assert one.__qualname__ == two.__qualname__
  rule = Rule("float16", module=one)
  assert rule.matches(one(), "")
  assert not rule.matches(two(), "")
