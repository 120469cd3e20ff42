import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._core.leaves import key_names
from mpjax._diagnostics.nonfinite.report import NonfiniteReport, power


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
  for part in ("exp", "forward", "test_report.py:", "float16[2]", "1.63e+05", "mixed_bf"):
    assert part in text
  found = json.loads(report.to_json())
  assert found["operation"] == "exp"
  assert found["index"] == [1]
  assert found["result"]["inf"] == 1
  assert "exp" in report._repr_html_()


def test_a_gradient_may_be_scaled_by_hand_and_a_value_of_the_forward_pass_is_not():
  x = jnp.zeros(2)
  assert "unless the loss is scaled" in str(mpjax.find_nonfinite(jax.grad(jnp.linalg.norm))(x))
  assert "no loss scale helps" in str(mpjax.find_nonfinite(jnp.log)(x))


MASK = jnp.asarray([-jnp.inf, 1])
# Each cure is obeyed, on the operand.
CURES = [
  *(
    (fn, [0, 1], f"{name} of 0", "jnp.where(x != 0", lambda x: jnp.where(x != 0, x, 1))
    for fn, name in ((jnp.log, "forward: log"), (lambda x: x**-1.0, "forward: pow"))
  ),
  (lambda x: x[0] / x[1], [2, 0], "div of 2 and 0", "x / jnp.where(y", lambda x: x.at[1].set(1)),
  (jnp.exp, [99, 1], "exp of 99 overflows float32", "jnp.exp(x - jnp", lambda x: x - jnp.max(x)),
  (lambda x: x * MASK, [0, 1], "0 * inf", "x = jnp.where(mask", lambda x: jnp.where(x == 0, 1, x)),
  (
    *(nn.softmax, [-np.inf, -np.inf], "inf - inf", "x = jnp.where(mask, x, jnp.finfo"),
    lambda x: jnp.maximum(x, jnp.finfo(jnp.float32).min),
  ),
  (
    *(jnp.linalg.inv, [[2, 2], [2, 2]], "custom_linear_solve of these", "x + epsilon"),
    lambda x: x + jnp.eye(2),
  ),
  (
    *(lambda x: -jnp.mean(nn.log_softmax(x)[:1]), [-np.inf, 1], "forward: It adds up an inf"),
    *("jnp.where(jnp.isfinite(x), x, 0)", lambda x: jnp.where(jnp.isfinite(x), x, 0)),
  ),
  (jnp.cosh, [99, 1], "cosh of 99 overflows float32", "jnp.clip", lambda x: jnp.clip(x, -9, 9)),
  (jax.lax.erf_inv, [0, 1], "erf_inv of 1", "jnp.where(allowed", lambda x: jnp.where(x < 1, x, 0)),
  (jax.grad(jnp.linalg.norm), [0, 0], "backward: div of 0.5", "jnp.where(allowed", jnp.ones_like),
  (jax.grad(lambda x: x[0] ** 0.5), [0], "backward: pow of 0", "jnp.where(allowed", jnp.ones_like),
  (
    *(lambda x: nn.relu(x) @ x, [[3e38, 1], [-1, 2]], "dot_general of these operands overflows"),
    *("jnp.clip", lambda x: jnp.clip(x, -9, 9)),
  ),
]


def test_what_a_report_advises_cures():
  for fn, x, cause, cure, cured in CURES:
    x = jnp.asarray(x, jnp.float32)
    found = mpjax.find_nonfinite(fn)(x)
    assert cause in f"{found.direction}: {found.cause}"
    assert found.cure.startswith(cure), cause
    assert not mpjax.find_nonfinite(lambda x, fn=fn, cured=cured: fn(cured(x)))(x), cause


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


class Covariance(nn.Module):
  """A matrix that a layer returns, which rounding to bfloat16 makes singular."""

  @nn.compact
  def __call__(self, x):
    smooth = nn.Dense(9, name="smooth", kernel_init=lambda *_: jnp.eye(9))
    return jnp.linalg.cholesky(smooth(x.reshape(-1)).reshape(3, 3))


def test_what_linear_algebra_does_not_take_may_come_of_rounding_and_a_rule_cures_it():
  factor = jnp.asarray([[1, 0, 0], [1, 0.03, 0], [1, 0, 0.03]])
  x = factor @ factor.T
  variables = Covariance().init(jax.random.key(0), x)

  def found(*rules):
    policied = mpjax.linen.with_policy(Covariance(), "mixed_bfloat16", rules)
    return mpjax.find_nonfinite(policied.apply)(variables, x)

  report = found()
  assert (report.operation, report.verdict) == ("cholesky", "value")
  assert "they come from add of Covariance/smooth, in bfloat16" in report.cause
  line, _, other = report.cure.partition("  #")
  assert other == " or x + epsilon * jnp.eye(n)"
  assert not found(eval(line, {"Rule": mpjax.Rule}))
  report = mpjax.find_nonfinite(jnp.linalg.cholesky)(-x)
  assert (report.cause.startswith("cholesky of these operands is NaN"), report.cure[:3]) == (
    True,
    "x +",
  )
