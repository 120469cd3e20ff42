import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives as p

import mpjax
from mpjax._core.leaves import key_names
from mpjax._diagnostics.nonfinite.report import Fault, NonfiniteReport, Range, cause_and_cure, power


def test_nothing_found_is_false_and_says_so():
  report = NonfiniteReport(loss_scale=1024.0, step=3)
  assert not report
  assert "finite" in str(report)
  assert "2^10" in str(report)
  assert repr(report) == "NonfiniteReport(nothing found)"
  assert (power(1024.0), power(0.5), power(1000.0)) == ("2^10", "2^-1", "1000")


def test_a_report_fits_80_columns_and_is_json():
  def fn(x):
    return jnp.sum(jnp.exp(x).astype(jnp.float32))

  report = mpjax.find_nonfinite(fn)(jnp.asarray([1, 12], jnp.float16))
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  for part in ("exp", "forward", "test_report.py:", "float16[2]", "1.63e+05 > 65504", "mixed_bf"):
    assert part in text
  found = json.loads(report.to_json())
  assert found["operation"] == "exp"
  assert found["index"] == [1]
  assert found["result"]["inf"] == 1
  assert "exp" in report._repr_html_()


def ranged(dtype="float32", least=1.0, most=2.0, inf=0, nan=0, value=None):
  return Range(
    name="", dtype=dtype, shape=(2,), least=least, most=most, inf=inf, nan=nan, value=value
  )


def fault(primitive, operands, result, wide=None, finite_at=None, path="Net/up", from_state=True):
  there = tuple(operands), result, wide, finite_at, from_state
  return Fault(primitive, False, path, '"**/up"', *there)


MINUS_INF = ranged(inf=1, value=float("-inf"))
HALF_INF = [ranged("float16")], ranged("float16", inf=1)
CURES = [
  (fault(p.mul_p, *HALF_INF, ranged(most=7.1e4)), "7.1e+04", 'Rule("float32", path="**/up")'),
  (
    *(fault(p.mul_p, *HALF_INF, finite_at=2.0**13), "at this loss scale"),
    "set_loss_scale(opt_state, 8192)",
  ),
  (fault(p.mul_p, [ranged(value=0), MINUS_INF], ranged(nan=1)), "0 * inf", "jnp.where(mask"),
  (fault(p.sub_p, [MINUS_INF] * 2, ranged(nan=1)), "inf - inf", "jnp.finfo(jnp.float32).min"),
  (fault(p.log_p, [ranged(value=0)], ranged(inf=1)), "log of 0 is inf", "jnp.where(x != 0, x, 1)"),
  (fault(p.div_p, [ranged(value=2), ranged(value=0)], ranged(nan=1)), "2 and 0", "x / jnp.where"),
  (fault(p.exp_p, [ranged(value=99)], ranged(inf=1)), "overflows float32", "jnp.max(x)"),
]


def test_the_cause_and_the_cure():
  for given, cause, cure in CURES:
    found = cause_and_cure(given)
    assert cause in found[0]
    assert cure in found[1]


BROKEN_AND_CURED = [
  (lambda x: x**-1.0, [0, 1], "forward: pow of 0 and -1 is inf", "jnp.where(x != 0", [1, 1]),
  (jnp.linalg.inv, [[2, 2], [2, 2]], "custom_linear_solve of these", "x + eps", [[3, 2], [2, 3]]),
  (jax.lax.erf_inv, [0, 1], "forward: erf_inv of 1 is inf", "jnp.where(allowed", [0, 0.5]),
  (jax.grad(jnp.linalg.norm), [0, 0], "backward: div of 0.5 and 0", "jnp.where(allowed", [1, 1]),
  (jax.grad(lambda x: x[0] ** 0.5), [0], "backward: pow of 0", "jnp.where(allowed", [1]),
  (
    *(lambda x: nn.relu(x) @ x, [[3e38, 1], [-1, 2]], "dot_general of these operands overflows"),
    *("jnp.clip", [[9, 1], [-1, 2]]),
  ),
]


def test_what_a_report_advises_cures():
  for fn, x, cause, cure, cured in BROKEN_AND_CURED:
    found = mpjax.find_nonfinite(fn)(jnp.asarray(x, jnp.float32))
    assert cause in f"{found.direction}: {found.cause}"
    assert found.cure.startswith(cure), cause
    assert not mpjax.find_nonfinite(fn)(jnp.asarray(cured, jnp.float32)), cause


class Named(nn.Module):
  """A layer that a method of another name calls."""

  def setup(self):
    self.up = nn.Dense(4)
    self.head = nn.Dense(4)

  def encode(self, x):
    return self.up(x)

  def __call__(self, x):
    return self.head(nn.tanh(self.encode(x)))


def large(params):
  """Returns parameters of which those of one layer make its matmul overflow float16."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: np.full(x.shape, 3e4 if {"up", "hi"} & set(key_names(path)) else 0.5, x.dtype),
    params,
  )


@pytest.mark.parametrize(
  ("model", "shape", "path"),
  [(Named(), (2, 4), "**/up"), (nn.RNN(nn.LSTMCell(4), name="rnn"), (2, 5, 4), "hi")],
)
def test_the_cure_is_a_rule_of_linen_that_cures(model, shape, path):
  x = jnp.full(shape, 3.0)
  params = large(jax.eval_shape(model.init, jax.random.key(0), x))

  def found(*rules):
    policied = mpjax.linen.with_policy(model, "mixed_float16", rules)
    return mpjax.find_nonfinite(policied.apply)(params, x)

  line = found().cure.partition("  #")[0]
  rule = eval(line, {"Rule": mpjax.Rule, "re": re})
  assert path in line
  assert rule.policy == mpjax.Policy.parse("float32")
  assert not found(rule)
