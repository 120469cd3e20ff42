"""`Rule`: what each selector picks out, which rule wins, and what a wrong one is told."""

import fnmatch
import importlib.util
import pickle
import re
import subprocess
import sys

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._core.rules import depends_on_path, first_match, parse_rules, unmatched_error
from tests import programs
from tests.errors import check_error


class Plain:
  """A module, as far as a path or a class rule looks at one."""


class Derived(Plain):
  """A subclass of it."""


class Other:
  """A class of its own."""


def matches(path, module_path):
  return mpjax.Rule(None, path=path).matches(Plain(), module_path)


@pytest.mark.case("A111")
@pytest.mark.parametrize(
  ("glob", "path", "wanted"),
  [
    # exact
    ("encoder/attention", "encoder/attention", True),
    ("encoder/attention", "encoder/attention/query", False),
    ("encoder/attention", "my/encoder/attention", False),
    ("encoder", "encoder_2", False),
    ("encoder", "Encoder", False),
    ("coder", "encoder", False),
    # one level
    ("encoder/*/attention", "encoder/layer_0/attention", True),
    ("encoder/*/attention", "encoder/attention", False),
    ("encoder/*/attention", "encoder/a/b/attention", False),
    ("*", "encoder", True),
    ("*", "", False),
    ("*", "encoder/attention", False),
    ("block_*", "block_12", True),
    ("block_*", "block_1/mlp", False),
    ("block_?", "block_1", True),
    ("block_?", "block_12", False),
    ("block_[02]", "block_2", True),
    ("block_[02]", "block_1", False),
    ("block_[!02]", "block_1", True),
    # any number of levels
    ("**", "", True),
    ("**", "a/b/c", True),
    ("**/head", "head", True),
    ("**/head", "a/b/head", True),
    ("**/head", "a/head/b", False),
    ("**/head", "a/overhead", False),
    ("encoder/**", "encoder", True),
    ("encoder/**", "encoder/a/b", True),
    ("encoder/**", "encoders/a", False),
    ("a/**/z", "a/z", True),
    ("a/**/z", "a/b/c/z", True),
    ("a/**/**/z", "a/z", True),
    ("**/a/**", "x/a/y", True),
    # the root
    ("", "", True),
    ("", "a", False),
  ],
)
def test_globs(glob, path, wanted):
  assert matches(glob, path) is wanted


@pytest.mark.case("A111")
@pytest.mark.parametrize(
  ("pattern", "path", "wanted"),
  [
    (r"block_\d+/mlp", "block_12/mlp", True),
    (r"block_\d+", "block_12/mlp", False),
    (r"mlp", "block_12/mlp", False),
    (r".*mlp", "block_12/mlp", True),
    (r"", "", True),
    (r"(encoder|decoder)/.*", "decoder/x/y", True),
  ],
)
def test_regular_expressions_match_in_full(pattern, path, wanted):
  assert matches(re.compile(pattern), path) is wanted


NAMES = st.lists(st.sampled_from(["a", "b", "ab", "block_0"]), max_size=5)


def glob_oracle(glob, names):
  """Says it as a regular expression over names that each end in a slash."""
  pieces = {"**": r"(?:[^/]+/)*", "*": r"[^/]+/"}
  pattern = "".join(pieces.get(level, re.escape(level) + "/") for level in glob)
  return re.fullmatch(pattern, "".join(f"{name}/" for name in names)) is not None


@pytest.mark.case("A111")
@hypothesis.settings(max_examples=300)
@hypothesis.given(
  glob=st.lists(st.sampled_from(["a", "b", "ab", "block_0", "*", "**"]), min_size=1, max_size=5),
  names=NAMES,
)
def test_globs_against_an_oracle(glob, names):
  assert matches("/".join(glob), "/".join(names)) is glob_oracle(glob, names)


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
  ],
)
def test_classes(selector, module, wanted):
  assert mpjax.Rule(None, module=selector).matches(module, "anywhere") is wanted


def factory():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(2)(x)

  return Block


@pytest.mark.case("A100")
def test_classes_of_one_name_stay_apart():
  one, two = factory(), factory()
  assert one.__qualname__ == two.__qualname__
  rule = mpjax.Rule("float16", module=one)
  assert rule.matches(one(), "")
  assert not rule.matches(two(), "")
  x = jnp.ones((1, 2))
  wanted = {one: jnp.float16, two: jnp.bfloat16}
  for cls, dtype in wanted.items():
    policy = mpjax.Policy(compute_dtype="bfloat16")
    model = mpjax.linen.with_policy(cls(), policy, [rule], unmatched="ignore")
    variables = model.init(jax.random.key(0), x)
    kept = model.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])[1]
    (dense,) = kept["intermediates"]["Dense_0"]["__call__"]
    assert dense.dtype == dtype


@pytest.mark.case("A100")
def test_a_reloaded_class_is_another_class(tmp_path):
  path = tmp_path / "reloaded_model.py"
  path.write_text(
    "import flax.linen as nn\n"
    "class Net(nn.Module):\n"
    "  @nn.compact\n"
    "  def __call__(self, x):\n"
    "    return nn.Dense(2)(x)\n"
  )
  spec = importlib.util.spec_from_file_location("reloaded_model", path)
  module = importlib.util.module_from_spec(spec)
  sys.modules["reloaded_model"] = module
  try:
    spec.loader.exec_module(module)
    before = module.Net
    spec.loader.exec_module(module)
    after = module.Net
  finally:
    del sys.modules["reloaded_model"]
  assert before is not after
  x = jnp.ones((1, 2))
  rules = [mpjax.Rule("float16", module=before)]
  old = mpjax.linen.with_policy(before(), "bfloat16", rules)
  new = mpjax.linen.with_policy(after(), "bfloat16", rules)
  assert jax.eval_shape(old.init_with_output, jax.random.key(0), x)[0].dtype == jnp.float16
  with pytest.raises(mpjax.UnmatchedRuleError) as excinfo:
    jax.eval_shape(new.init, jax.random.key(0), x)
  check_error(
    excinfo, where="Rule('", expected="picks out", got="none of the 2 modules", fix="Dense, Net"
  )
  # A rule by path does not mind.
  by_path = mpjax.linen.with_policy(after(), "bfloat16", [mpjax.Rule("float16", path="**")])
  assert jax.eval_shape(by_path.init_with_output, jax.random.key(0), x)[0].dtype == jnp.float16


def test_predicates_see_the_bound_module():
  seen = []
  rule = mpjax.Rule("float32", where=lambda m: seen.append(m.path) or m.name == "head")

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(2, name="head")(nn.Dense(2, name="body")(x))

  model = mpjax.linen.with_policy(Net(), "bfloat16", [rule])
  out, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), jnp.ones((1, 2)))
  assert ("head",) in seen
  assert variables["params"]["head"]["kernel"].dtype == jnp.float32
  assert variables["params"]["body"]["kernel"].dtype == jnp.bfloat16
  assert out.dtype == jnp.bfloat16


def test_a_predicate_that_gives_no_bool_counts_by_its_truth():
  assert mpjax.Rule(None, where=lambda m: "yes").matches(Plain(), "") is True
  assert mpjax.Rule(None, where=lambda m: None).matches(Plain(), "") is False


def is_head(module):
  return module.name == "head"


def test_rules_with_one_predicate_are_equal_and_pickled_by_its_name():
  rule, same = (mpjax.Rule("float32", where=is_head) for _ in range(2))
  assert rule == same
  assert hash(rule) == hash(same)
  assert pickle.loads(pickle.dumps(rule)) == rule
  others = [mpjax.Rule("float32", where=lambda m: m.name == "head") for _ in range(2)]
  assert others[0] != others[1]


def test_a_predicate_created_in_each_step_is_traced_in_each_step():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(2, name="head")(nn.Dense(2, name="body")(x))

  x, traces = jnp.ones((1, 2)), []
  variables = Net().init(jax.random.key(0), x)

  @jax.jit
  def apply(variables, x):
    traces.append(None)
    return Net().apply(variables, x)

  def step(predicate):
    rules = [mpjax.Rule("float32", where=predicate)]
    with mpjax.linen.policy_scope("params=float32,compute=bfloat16", rules):
      return apply(variables, x).dtype

  assert [step(is_head) for _ in range(3)] == [jnp.float32] * 3
  assert len(traces) == 1
  assert [step(lambda m: m.name == "head") for _ in range(2)] == [jnp.float32] * 2
  assert len(traces) == 3


EXACT = mpjax.Rule("float32", path="encoder/head")
PATTERN = mpjax.Rule("float16", path="**/head")


@pytest.mark.case("A111")
@pytest.mark.parametrize(
  ("rules", "path", "wanted"),
  [
    ((EXACT,), "encoder/head", EXACT),
    ((PATTERN,), "encoder/head", PATTERN),
    ((EXACT, PATTERN), "encoder/head", EXACT),
    ((PATTERN, EXACT), "encoder/head", PATTERN),
    ((PATTERN, EXACT), "decoder/head", PATTERN),
    ((EXACT, PATTERN), "encoder/heads", None),
    ((EXACT,), "encoder/head/out", None),
    ((), "encoder/head", None),
  ],
)
def test_the_first_rule_that_matches_wins(rules, path, wanted):
  assert first_match(rules, Plain(), path) is wanted


@pytest.mark.case("B080")
def test_a_rule_is_a_value():
  def is_head(module):
    return module.name == "head"

  pairs = [
    [mpjax.Rule("mixed_float16", path="a/*"), mpjax.Rule("p=f32,c=f16,o=f32", path="a/*")],
    [mpjax.Rule(None, module=Plain), mpjax.Rule(None, module=Plain)],
    [mpjax.Rule(None, where=is_head), mpjax.Rule(None, where=is_head)],
    [mpjax.Rule(None, path=re.compile("a")), mpjax.Rule(None, path=re.compile("a"))],
  ]
  for one, two in pairs:
    assert one == two
    assert hash(one) == hash(two)
    assert one is not two
  assert len({rule for pair in pairs for rule in pair}) == len(pairs)
  assert mpjax.Rule(None, path="a") != mpjax.Rule("float32", path="a")
  assert mpjax.Rule(None, path="a") != mpjax.Rule(None, path=re.compile("a"))
  assert mpjax.Rule(None, module=Plain) != mpjax.Rule(None, module=(Plain,))
  with pytest.raises(AttributeError):
    pairs[0][0].path = "b"


@pytest.mark.case("B080")
def test_another_order_of_rules_is_another_value():
  model = nn.Dense(2)
  one, two, three = (
    mpjax.linen.with_policy(model, "bfloat16", rules)
    for rules in ([EXACT, PATTERN], [PATTERN, EXACT], (EXACT, PATTERN))
  )
  assert one == three
  assert hash(one) == hash(three)
  assert one != two
  assert one != mpjax.linen.with_policy(nn.Dense(3), "bfloat16", [EXACT, PATTERN])


@pytest.mark.parametrize(
  ("rule", "text"),
  [
    (EXACT, "Rule('params=float32,compute=float32,output=float32', path='encoder/head')"),
    (mpjax.Rule(None, module=Plain), f"Rule(None, module={Plain!r})"),
    (mpjax.Rule(None, path=re.compile("a+")), "Rule(None, path=re.compile('a+'))"),
  ],
)
def test_the_text_of_a_rule(rule, text):
  assert repr(rule) == text


@pytest.mark.parametrize(
  ("selectors", "got"),
  [
    ({}, "none of them"),
    ({"path": "a", "module": Plain}, "path= and module="),
    ({"path": "a", "module": Plain, "where": callable}, "path= and module= and where="),
    ({"module": Plain, "where": callable}, "module= and where="),
  ],
)
def test_exactly_one_selector(selectors, got):
  with pytest.raises(ValueError) as excinfo:
    mpjax.Rule("float32", **selectors)
  check_error(
    excinfo,
    where="mpjax.Rule(...)",
    expected="exactly one of path=, module= and where=",
    got=got,
    fix="one rule for each selector",
    builtin=ValueError,
  )


@pytest.mark.parametrize(
  ("selector", "value", "expected"),
  [
    ("path", 3, "a glob or a compiled regular expression"),
    ("path", ("encoder", "head"), "a glob or a compiled regular expression"),
    ("path", Plain, "a glob or a compiled regular expression"),
    ("module", "Dense", "a class or a non-empty tuple of classes"),
    ("module", Plain(), "a class or a non-empty tuple of classes"),
    ("module", (), "a class or a non-empty tuple of classes"),
    ("module", [Plain], "a class or a non-empty tuple of classes"),
    ("module", (Plain, "Dense"), "a class or a non-empty tuple of classes"),
    ("where", "head", "a predicate on the bound module"),
    ("where", 3, "a predicate on the bound module"),
  ],
)
def test_selectors_of_the_wrong_type(selector, value, expected):
  with pytest.raises(TypeError) as excinfo:
    mpjax.Rule("float32", **{selector: value})
  check_error(
    excinfo,
    where=f"mpjax.Rule({selector}=...)",
    expected=expected,
    got=repr(value),
    fix="what each selector takes",
    builtin=TypeError,
  )


@pytest.mark.case("B142")
@pytest.mark.parametrize(
  "glob",
  [
    "encoder/",
    "/encoder",
    "a//b",
    "/",
    "encoder.attention",
    "blocks[0",
    "block0]",
    r"block_\d+",
    "(a",
    "a|b",
    "a$",
  ],
)
def test_malformed_globs(glob):
  with pytest.raises(ValueError) as excinfo:
    mpjax.Rule("float32", path=glob)
  check_error(
    excinfo,
    where="mpjax.Rule(path=...)",
    expected="a glob of module names joined by single slashes",
    got=repr(glob),
    fix="pass re.compile(...)",
    builtin=ValueError,
  )


def test_a_wrong_policy_is_told_as_anywhere():
  with pytest.raises(ValueError) as excinfo:
    mpjax.Rule("float61", path="a")
  check_error(
    excinfo, where="mpjax.Policy.parse", expected="a preset", got="'float61'", fix="'float16'"
  )


@pytest.mark.parametrize(
  ("rules", "got"),
  [
    (EXACT, repr(EXACT)),
    (3, "3"),
    ([EXACT, "float32"], "'float32'"),
    ([("head", "float32")], "('head', 'float32')"),
    ("head", "'head'"),
    ({"head": "float32"}, "'head'"),
    (None, "None"),
  ],
)
def test_what_is_no_sequence_of_rules(rules, got):
  with pytest.raises(TypeError) as excinfo:
    parse_rules(rules, "mpjax.linen.with_policy(rules=...)")
  check_error(
    excinfo,
    where="mpjax.linen.with_policy(rules=...)",
    expected="a sequence of mpjax.Rule",
    got=got,
    fix="Write [mpjax.Rule(",
    builtin=TypeError,
  )


def test_any_iterable_of_rules_will_do():
  assert parse_rules(iter([EXACT, PATTERN]), "f") == (EXACT, PATTERN)
  assert parse_rules((), "f") == ()


PATHS = ("", "encoder", "encoder/attention", "encoder/mlp", "decoder")
CLASSES = ("Net", "Encoder", "Attention", "Dense", "Dense")


@pytest.mark.case("B140")
@pytest.mark.parametrize(
  ("rule", "near"),
  [
    (
      mpjax.Rule(None, path="encoder/atention"),
      "The nearest module paths: 'encoder/attention', 'encoder', 'encoder/mlp'.",
    ),
    (mpjax.Rule(None, path=re.compile("decodr")), "The nearest module paths: 'decoder', "),
    (mpjax.Rule(None, module=Plain), "The model's classes: Attention, Dense, Encoder, Net."),
    (mpjax.Rule(None, where=callable), "The nearest module paths: '', 'decoder', 'encoder'."),
  ],
)
def test_the_error_for_a_rule_that_matches_nothing(rule, near):
  error = unmatched_error(rule, PATHS, CLASSES)
  check_error(
    error,
    where=f"rules: {rule!r}",
    expected="a rule that picks out at least one module",
    got="none of the 5 modules that init passed",
    fix=f'{near} Fix the selector, or pass unmatched="ignore".' if near.endswith(".") else near,
    builtin=ValueError,
  )
  assert isinstance(error, mpjax.UnmatchedRuleError)


@pytest.mark.case("B140")
@pytest.mark.parametrize("rule", [mpjax.Rule(None, path="head"), mpjax.Rule(None, where=callable)])
def test_the_error_for_a_model_of_one_module_names_no_path_but_the_root(rule):
  error = unmatched_error(rule, ("",), ("Dense",))
  assert error.fix.startswith("The only module is the root, path ''. Fix the selector")


# Default rules. The class of a norm says who wrote it.


class ScaleNorm(nn.Module):
  @nn.compact
  def __call__(self, x):
    scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
    return x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True)) * scale[None]


class ProjectNorm(nn.Module):
  """Ends in Norm, but owns a matrix."""

  @nn.compact
  def __call__(self, x):
    return x @ self.param("w", nn.initializers.ones, (x.shape[-1], 2))


class Normalizer(nn.Module):
  """Does not end in Norm."""

  @nn.compact
  def __call__(self, x):
    return x * self.param("scale", nn.initializers.ones, x.shape[-1:])[None]


class OurLayerNorm(nn.LayerNorm):
  """A subclass of Flax's own that its author named."""


class Bare(nn.Module):
  inner: type

  @nn.compact
  def __call__(self, x):
    return self.inner(name="norm")(x)


def compute_dtype_of(cls, **kwargs):
  """Returns the compute dtype of a module of `cls`: that of a matmul in it."""

  class Spy(cls):
    @nn.compact
    def __call__(self, x):
      return super().__call__(x @ jnp.ones((3, 3)))

  Spy.__name__ = cls.__name__
  Spy.__module__ = cls.__module__
  x = jnp.ones((2, 3))
  variables = Bare(Spy).init(jax.random.key(0), x)
  model = mpjax.linen.with_policy(Bare(Spy), "mixed_bfloat16", **kwargs)
  program = jax.make_jaxpr(model.apply)(variables, x)
  assert program.out_avals[0].dtype == jnp.float32
  first, *_ = programs.products(program)
  return first.dtypes[0]


@pytest.mark.parametrize(
  ("cls", "wanted"), [(ScaleNorm, "float32"), (ProjectNorm, "bfloat16"), (Normalizer, "bfloat16")]
)
def test_norms_that_users_wrote_compute_in_float32(cls, wanted):
  assert compute_dtype_of(cls) == wanted


def test_other_defaults():
  assert isinstance(mpjax.default_rules(), tuple)
  assert compute_dtype_of(ScaleNorm, defaults=()) == "bfloat16"
  edited = (mpjax.Rule(mpjax.Policy(compute_dtype="float32"), module=Normalizer),)
  assert compute_dtype_of(Normalizer, defaults=edited) == "float32"
  assert compute_dtype_of(ScaleNorm, defaults=(*mpjax.default_rules(), *edited)) == "float32"
  # The user's own rules come first.
  rules = [mpjax.Rule("bfloat16", module=ScaleNorm)]
  assert compute_dtype_of(ScaleNorm, rules=rules) == "bfloat16"


def test_a_default_that_matches_nothing_is_no_mistake():
  model = mpjax.linen.with_policy(nn.Dense(2), "bfloat16")
  assert model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]["kernel"].dtype == jnp.bfloat16


def test_what_a_norm_returns_is_rounded_for_a_matmul():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = ScaleNorm()(x)
      return x, nn.Dense(2)(x)

  x = jnp.ones((1, 2))
  variables = Net().init(jax.random.key(0), x)
  model = mpjax.linen.with_policy(Net(), mpjax.Policy(compute_dtype="bfloat16"))
  norm, dense = jax.eval_shape(model.apply, variables, x)
  assert (norm.dtype, dense.dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize(
  ("rule", "expected"),
  [
    (mpjax.Rule(None, path="a/*"), True),
    (mpjax.Rule(None, module=int), False),
    (mpjax.Rule(None, where=lambda m: isinstance(m, int)), True),
    (mpjax.default_rules()[0], False),
  ],
  ids=["path", "class", "predicate", "default"],
)
def test_which_rules_can_tell_equal_modules_apart(rule, expected):
  assert depends_on_path(rule) is expected


@pytest.mark.parametrize(
  ("glob", "path"),
  [
    ("*a" * 12 + "b", "a" * 40),
    ("**/a/" * 12 + "x", "/".join(["a"] * 40)),
    ("**/*a*/" * 6 + "x", "/".join(["aa"] * 40)),
  ],
  ids=["stars", "levels", "both"],
)
def test_a_glob_takes_no_longer_for_many_wildcards(glob, path):
  """Trying each wildcard anew at each position takes minutes: a process of its own can be ended."""
  fits = f"{path}{'b' if glob.endswith('b') else '/x'}"
  code = "import sys, mpjax; rule = mpjax.Rule(None, path=sys.argv[1]);"
  code += "print([rule.matches(None, path) for path in sys.argv[2:]])"
  command = [sys.executable, "-c", code, glob, path, fits]
  ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
  assert ran.stdout == "[False, True]\n"


@hypothesis.given(
  st.lists(st.sampled_from([*"ab-*?!&~", "[ab]", "[!a]", "[a-b]", "[b-a]", "[!]"]), max_size=6),
  st.text("ab-!&~]", max_size=5),
)
def test_a_level_of_a_glob_is_matched_as_fnmatch_does(pieces, name):
  glob = "".join(pieces)
  hypothesis.assume(name and glob not in ("", "**"))
  hypothesis.assume(glob.count("[") == glob.count("]"))
  assert matches(glob, name) is fnmatch.fnmatchcase(name, glob)
  assert not matches(glob, f"{name}/{name}")


@pytest.mark.parametrize(
  "call",
  [
    lambda: mpjax.Rule("head", "float32"),
    lambda: mpjax.Rule("float32", "head"),
    lambda: mpjax.Rule("float32", "head", nn.Dense),
    lambda: mpjax.Rule(path="head"),
    lambda: mpjax.Rule("float32", paths="head"),
  ],
)
def test_a_rule_written_otherwise_is_told_how(call):
  with pytest.raises(mpjax.MpjaxTypeError) as excinfo:
    call()
  check_error(
    excinfo,
    where="mpjax.Rule(...)",
    expected="arguments policy, path, module, where",
    got="argument",
    fix='mpjax.Rule("float32", path="head")',
    builtin=TypeError,
  )
