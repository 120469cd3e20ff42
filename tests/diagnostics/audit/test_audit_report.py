"""What an audit shows, and how."""

import functools
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax

pytestmark = pytest.mark.standard_promotion

HALF = jax.ShapeDtypeStruct((16, 8), "bfloat16")
WIDE = jax.ShapeDtypeStruct((16, 8), "float32")
W = jax.ShapeDtypeStruct((8, 8), "bfloat16")


def leaky(x, table, w):
  with jax.named_scope("block"):
    h = x @ w + table
  return h @ w


def test_nothing_to_say_is_not_said():
  text = str(mpjax.audit(jnp.add)(WIDE, WIDE))
  assert text.splitlines() == ["Precision audit", "No matmuls or convolutions, no leaks"]


def test_shares_of_what_is_in_float8_in_half_and_in_float32():
  def fn(a, b, c):
    return jax.lax.dot(a, a, preferred_element_type="bfloat16"), b @ b, c @ c, c @ c

  dtypes = ("float8_e4m3fn", "bfloat16", "float32")
  audit = mpjax.audit(fn)(*(jax.ShapeDtypeStruct((16, 16), dtype) for dtype in dtypes))
  assert (audit.float8_share, audit.half_share) == (0.25, 0.5)


def test_integers_count_for_neither_side():
  integers = jax.ShapeDtypeStruct((8, 8), "int8")
  audit = mpjax.audit(lambda a, b: (a @ a, b @ b))(integers, W)
  assert audit.half_share == 1
  assert math.isnan(mpjax.audit(jnp.matmul)(integers, integers).half_share)


def test_a_leak_has_a_place_a_cause_and_a_cure():
  text = str(mpjax.audit(leaky)(HALF, WIDE, W))
  flat = " ".join(text.split())
  assert "50.0 % of the matmuls' FLOPs in low precision, 1 leak" in flat
  assert "1. block · add · forward · test_audit_report.py:" in flat
  assert "float32 because of table (argument, float32) at test_audit_report.py:" in flat
  assert "Cast it where it is used: .astype(jnp.bfloat16)." in flat
  # What a GPU makes of float32 matmuls.
  assert "TF32" in flat
  assert "TF32" not in str(mpjax.audit(leaky)(HALF, HALF, W))


def test_float16_gradients_without_a_loss_scale_are_said():
  """The advice, obeyed, ends it; bfloat16 has the range of float32 and needs none."""
  tx = mpjax.loss_scaling(optax.sgd(0.1))
  x, w = jnp.ones((4, 8)), jnp.ones((8, 8))

  @functools.partial(mpjax.with_policy, policy="fp16")
  def loss_fn(w, x):
    return jnp.sum((x @ w) ** 2)

  def step(w, opt_state, x):
    return mpjax.value_and_grad(loss_fn, opt_state)(w, x)

  said = "Float16 gradients without a loss scale"
  assert said in str(mpjax.audit(jax.grad(loss_fn))(w, x))
  assert said not in str(mpjax.audit(jax.jit(step))(w, tx.init(w), x))
  assert said not in str(mpjax.audit(loss_fn)(w, x))
  bfloat16 = mpjax.with_policy(lambda w, x: jnp.sum((x @ w) ** 2), "bf16")
  assert said not in str(mpjax.audit(jax.grad(bfloat16))(w, x))


CAUSES = {
  "number": (lambda x, w: (x * np.float32(2)) @ w, "the float32 scalar 2.0"),
  "cast": (lambda x, w: x.astype("float32") @ w, "a cast to float32"),
  "operation": (lambda x, w: (x + jnp.arange(8.0)) @ w, "iota computes float32"),
}


def test_causes_in_words():
  for fn, words in CAUSES.values():
    assert words in " ".join(str(mpjax.audit(fn)(HALF, W)).split())


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


def test_one_line_in_several_layers_is_one_entry():
  audit = mpjax.audit(layers)([WIDE] * 20, W, HALF)
  text = " ".join(str(audit).split())
  assert len(audit.leaks) == 20
  assert "20 leaks" in text
  assert "1. layer_* (20) · add · forward · test_audit_report.py:" in text
  assert "100.0 % of FLOPs" in text
  assert "float32 because of tables/* (argument, float32)" in text
  assert "layer_0" not in text


def test_an_argument_that_several_layers_read_keeps_its_name():
  audit = mpjax.audit(lambda table_2, w, x: layers([table_2] * 20, w, x))(WIDE, W, HALF)
  assert len(audit.leaks) == 20
  text = " ".join(str(audit).split())
  assert "1. layer_* (20) · add · forward · test_audit_report.py:" in text
  assert "float32 because of table_2 (argument, float32)" in text


class Linear(nnx.Module):
  def __init__(self, rngs):
    self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

  def __call__(self, x):
    return self.second(self.first(x))


class Dense(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(8, name="second")(nn.Dense(8, name="first")(x))


def policied(module, rules):
  """Models under rules of which two match a layer: a view made outside of the call, and inside."""
  rules = [*rules, mpjax.Rule("float16", module=module)]
  if module is nnx.Linear:
    model = Linear(nnx.Rngs(0))
    view = mpjax.nnx.with_policy(model, "mixed_bfloat16", rules=rules)
    inside = mpjax.audit(
      lambda model, x: mpjax.nnx.with_policy(model, "mixed_bfloat16", rules=rules)(x)
    )
    return rules, [mpjax.audit(lambda x: view(x))(WIDE), inside(model, WIDE)]
  variables = jax.eval_shape(Dense().init, jax.random.key(0), WIDE)
  model = mpjax.linen.with_policy(Dense(), "mixed_bfloat16", rules=rules)
  return rules, [mpjax.audit(model.apply)(variables, WIDE)]


@pytest.mark.case("B141")
@pytest.mark.parametrize("module", [nn.Dense, nnx.Linear])
def test_rules_that_an_earlier_one_hides_are_listed(module):
  paths = mpjax.Rule("float32", path="first"), mpjax.Rule("mixed_bfloat16", path="*")
  rules, audits = policied(module, paths)
  for audit in audits:
    assert audit.rules == {rules[0]: 1, rules[1]: 1, rules[2]: 0}
    assert audit.hidden_rules == {rules[1]: 1, rules[2]: 2}
    assert "never used" in str(audit)
    assert "earlier rule wins" in str(audit)
    rows = json.loads(audit.to_json())["rules"]
    assert [(row["modules"], row["hidden"]) for row in rows] == [(1, 0), (1, 1), (0, 2)]
