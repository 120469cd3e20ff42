"""Where an equation stands, and what the rules say of that place."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxprs.autocast.marks import REGION, region_of
from mpjax._jaxprs.autocast.scopes import (
  as_written,
  check_rules_match,
  low_dtype,
  names_of,
  policy_at,
)
from mpjax._jaxprs.autocast.values import Settings
from tests.errors import check_error

BFLOAT16, FLOAT16 = np.dtype(jnp.bfloat16), np.dtype("float16")


@pytest.mark.parametrize(
  ("stack", "names"),
  [
    ("", ()),
    ("Net", ("Net",)),
    ("Net/head", ("Net", "head")),
    ("jvp(Net)/head", ("Net", "head")),
    ("transpose(jvp(Net))/head", ("Net", "head")),
    ("transpose(jvp(Net/blocks_0))/attn/head", ("Net", "blocks_0", "attn", "head")),
    ("vmap(transpose(jvp(Net)))/vmap(head)", ("Net", "head")),
    ("jvp()/Net", ("Net",)),
    ("Net/head/", ("Net", "head")),
    ("Net/jvp(head.norm)", ("Net", "head.norm")),
    ("mpjax.full_precision/x", ("mpjax.full_precision", "x")),
  ],
)
def test_names_in_a_stack(stack, names):
  assert names_of(stack) == names


def settings(compute=BFLOAT16, *rules):
  return Settings(policy=mpjax.Policy(compute_dtype=compute), ops=mpjax.OpLists(), rules=rules)


def region(scope, settings):
  return low_dtype(policy_at(scope, settings))


def test_without_rules_all_is_in_half_but_full_precision():
  for scope in ((), ("a",), ("a", "b")):
    assert region(scope, settings()) == BFLOAT16
    assert region(scope, settings(np.dtype("float32"))) is None
  given = settings(BFLOAT16, mpjax.Rule("bfloat16", path="**"))
  assert region(("a", "mpjax.full_precision", "b"), given) is None
  assert region(("mpjax.full_precision",), settings()) is None
  assert region(("a", "b"), given) == BFLOAT16


@pytest.mark.parametrize(
  ("scope", "want"),
  [
    ((), BFLOAT16),
    (("a",), FLOAT16),
    (("a", "x"), FLOAT16),
    (("a", "b"), None),
    (("a", "b", "x", "y"), None),
    (("a", "b", "c"), BFLOAT16),
    (("b",), BFLOAT16),
    (("b", "a"), BFLOAT16),
    (("x", "head"), None),
    (("a", "b", "c", "head"), None),
  ],
)
def test_the_innermost_rule_decides(scope, want):
  rules = (
    mpjax.Rule("float16", path="a"),
    mpjax.Rule(None, path="a/b"),
    mpjax.Rule("bfloat16", path="a/b/c"),
    mpjax.Rule("float32", path="**/head"),
    mpjax.Rule("float16", path="**/head"),
  )
  for given in (rules, (*rules[3:], *rules[2::-1])):
    assert region(scope, settings(BFLOAT16, *given)) == want
  root = settings(BFLOAT16, mpjax.Rule(None, path="**"), mpjax.Rule("float16", path="a"))
  assert region(scope, root) is None, "the first that matches it"


def test_the_policy_in_a_scope():
  precise, other = mpjax.Policy(precision="highest"), mpjax.Policy.parse("mixed_float8")
  rules = (mpjax.Rule(precise, path="a"), mpjax.Rule(None, path="b"))
  given = Settings(policy=other, ops=mpjax.OpLists(), rules=rules)
  assert policy_at(("a", "x"), given) == precise
  assert policy_at(("c",), given) == other
  assert policy_at(("b",), given) is None
  assert policy_at(("a", "mpjax.full_precision"), given) is None
  # The innermost mark is stronger than rules.
  marks = [REGION + region_of(policy) for policy in (precise, None, other)]
  assert policy_at(("a", *marks), given) == other
  assert policy_at((marks[2], "a", marks[1]), given) is None


def program():
  def fun(x):
    with jax.named_scope("net"):
      x = jax.lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0]
      return jax.jit(step)(x)

  def step(x):
    with jax.named_scope("step"):
      return jnp.sin(x)

  return jax.make_jaxpr(fun)(jnp.ones(3)).jaxpr


@pytest.mark.parametrize("path", ["net", "net/step", "**", "**/step", re.compile("net/.*")])
def test_scopes_in_all_bodies_are_known(path):
  check_rules_match(program(), [mpjax.Rule(None, path=path)], "here")


def test_a_rule_that_matches_nothing():
  good = mpjax.Rule(None, path="net")
  for path, shown in (("nett/step", "'nett/step'"), (re.compile("step"), "re.compile('step')")):
    with pytest.raises(mpjax.UnmatchedRuleError) as error:
      check_rules_match(program(), [good, mpjax.Rule(None, path=path)], "mpjax.autocast(fn)")
    check_error(
      error,
      where=f"mpjax.autocast(fn): Rule(None, path={shown})",
      expected="picks out at least one named scope",
      got="none of the 3 scopes",
      fix="'net/step'",
    )
    assert 'begin the path with "**/"' in str(error.value)


@pytest.mark.parametrize("mark", [(), ("mpjax.region=float16",), ("mpjax.region=float32",)])
def test_what_full_precision_returns_stays_float32_in_any_region(mark):
  settings = Settings(policy=mpjax.Policy(compute_dtype=BFLOAT16), ops=mpjax.OpLists())
  assert as_written((*mark, "mpjax.full_precision"), settings)
  assert not as_written(("mpjax.region=float32",), settings)
