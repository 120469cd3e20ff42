"""What the report of `mpjax.audit` shows, and how."""

import ast
import json
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.models import parts
from tests.models.parts import module
from tests.programs import s

BF16 = jnp.bfloat16
X = np.ones((4, 8), np.float32)


def test_the_last_line_names_sensitivity_if_something_is_in_low_precision():
  line = "What its roundings do to the result: mpjax.sensitivity(fn)(*args)."
  assert str(mpjax.audit(mpjax.autocast(jnp.matmul))(X, X.T)).splitlines()[-1] == line
  assert line not in str(mpjax.audit(jnp.matmul)(X, X.T))


@pytest.mark.standard_promotion
def test_assert_no_leaks_names_the_first_and_takes_globs():
  def fn(x, table):
    with jax.named_scope("stem"):
      return (x + table) @ x

  audit = mpjax.audit(fn)(s(8, 8, dtype=BF16), s(8, 8))
  where, got = "AuditReport.assert_no_leaks", "float32 because of table (argument, float32)"
  assert ", 1 leak\n" in str(audit)
  with refused(AssertionError, where, "no float32 operation", got, "ignore=['stem']"):
    audit.assert_no_leaks()
  with pytest.raises(AssertionError) as error:
    audit.assert_no_leaks()
  (ignored,) = re.findall(r"assert_no_leaks\(ignore=(\[.*?\])\)", str(error.value))
  audit.assert_no_leaks(ignore=ast.literal_eval(ignored))
  audit.assert_no_leaks(ignore=["st*"])
  audit.assert_no_leaks(ignore="stem")


HALF = jax.ShapeDtypeStruct((16, 8), "bfloat16")
WIDE = jax.ShapeDtypeStruct((16, 8), "float32")
W = jax.ShapeDtypeStruct((8, 8), "bfloat16")


def test_shares_of_what_is_in_float8_in_half_and_in_float32_and_of_nothing():
  def fn(a, b, c, d):
    return jax.lax.dot(a, a, preferred_element_type="bfloat16"), b @ b, c @ c, c @ c, d @ d

  dtypes = ("float8_e4m3fn", "bfloat16", "float32", "int8")
  *floats, integers = (s(16, 16, dtype=dtype) for dtype in dtypes)
  audit = mpjax.audit(fn)(*floats, integers)
  assert (audit.format_share, audit.half_share) == (0.25, 0.5)
  assert math.isnan(mpjax.audit(jnp.matmul)(integers, integers).half_share)
  text = str(mpjax.audit(jnp.add)(WIDE, WIDE))
  title, line, _, *operations = text.splitlines()
  assert (title, line) == ("Precision audit", "No matmuls or convolutions, no leaks")
  assert [row.split() for row in operations[1:]] == [
    ["operation", "float32"],
    ["add", "1,", "512", "B"],
  ]


@pytest.mark.standard_promotion
def test_operations_are_shown_by_dtype_the_most_bytes_first():
  def fn(x, table):
    return jnp.tanh(jnp.tanh(x) + table)

  text = str(mpjax.audit(fn)(HALF, WIDE))
  rows = [row.split() for row in text[text.index("Operations") :].split("\n\n")[0].splitlines()[1:]]
  assert rows == [
    ["operation", "16", "bit", "float32"],
    ["tanh", "1,", "256", "B", "1,", "512", "B"],
    ["convert_element_type", "1,", "512", "B"],
    ["add", "1,", "512", "B"],
  ]


@pytest.mark.standard_promotion
def test_long_lists_are_cut_and_say_so():
  def fn(x, w):
    for number, letter in enumerate("abcdefghijklmnopqrst"):
      with jax.named_scope(letter):
        x = x + jnp.arange(8.0) * number
        x = (x @ w).astype("bfloat16")
    return x

  audit = mpjax.audit(fn)(HALF, W)
  assert len(audit.leaks) == 20
  # In the list of leaks, and as the last row of the table of modules.
  assert str(audit).count("… and 8 more") == 2


def layers(tables, w, x):
  for number in range(20):
    with jax.named_scope(f"layer_{number}"):
      x = ((x + tables[number]) @ w).astype("bfloat16")
  return x


@pytest.mark.standard_promotion
def test_one_line_in_several_layers_is_one_entry_with_a_cause_and_a_cure():
  audit = mpjax.audit(layers)([WIDE] * 20, W, HALF)
  text = " ".join(str(audit).split())
  assert len(audit.leaks) == 20
  assert "0.0 % of the matmuls' FLOPs in low precision, 20 leaks" in text
  assert "1. layer_* (20) · add · forward · test_report.py:" in text
  assert "100.0 % of FLOPs" in text
  assert "float32 because of tables/* (argument, float32) at test_report.py:" in text
  assert "Cast it where it is used: .astype(jnp.bfloat16)." in text
  assert "layer_0" not in text


TWO = module(
  lambda m, x: m.second(m.first(x)),
  first=parts.dense(8, 8, bias=True),
  second=parts.dense(8, 8, bias=True),
)


def policied(cls, rules):
  """Models under rules of which two match a layer: a view made outside of the call, and inside."""
  rules = [*rules, mpjax.Rule("float16", module=cls)]
  if cls is nnx.Linear:
    model = TWO.nnx(None, nnx.Rngs(0))
    view = mpjax.nnx.with_policy(model, "mixed_bfloat16", rules=rules)
    inside = mpjax.audit(
      lambda model, x: mpjax.nnx.with_policy(model, "mixed_bfloat16", rules=rules)(x)
    )
    return rules, [mpjax.audit(lambda x: view(x))(WIDE), inside(model, WIDE)]
  variables = jax.eval_shape(TWO.linen(None).init, jax.random.key(0), WIDE)
  model = mpjax.linen.with_policy(TWO.linen(None), "mixed_bfloat16", rules=rules)
  return rules, [mpjax.audit(model.apply)(variables, WIDE)]


@pytest.mark.parametrize("cls", [nn.Dense, nnx.Linear])
def test_rules_that_an_earlier_one_hides_are_listed(cls):
  paths = mpjax.Rule("float32", path="first"), mpjax.Rule("mixed_bfloat16", path="*")
  rules, audits = policied(cls, paths)
  for audit in audits:
    assert audit.rules == dict(zip(rules, [(1, 0), (1, 1), (0, 2)], strict=True))
    assert "never used" in str(audit)
    assert "earlier rule wins" in str(audit)
    rows = json.loads(audit.to_json())["rules"]
    assert [*rows.values()] == [[1, 0], [1, 1], [0, 2]]
