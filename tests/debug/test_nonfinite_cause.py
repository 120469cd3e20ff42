import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

pytestmark = pytest.mark.standard_promotion


MASK = jnp.asarray([-jnp.inf, 1])
# Each cure is obeyed, on the operand.
CURES = [
  *(
    (fn, [0, 1], f"{name} of 0", "jnp.where(x != 0", lambda x: jnp.where(x != 0, x, 1))
    for fn, name in ((jnp.log, "forward: log"), (lambda x: x**-1.0, "forward: pow"))
  ),
  (lambda x: x[0] / x[1], [2, 0], "div of 2 and 0", "jnp.where(x != 0", lambda x: x.at[1].set(1)),
  (jnp.exp, [99, 1], "exp of 99 overflows float32", "jnp.exp(x - jnp", lambda x: x - jnp.max(x)),
  (lambda x: x * MASK, [0, 1], "0 * inf", "x = jnp.where(mask", lambda x: jnp.where(x == 0, 1, x)),
  (
    *(nn.softmax, [-np.inf, -np.inf], "inf - inf", "x = jnp.where(mask, x, jnp.finfo"),
    lambda x: jnp.maximum(x, jnp.finfo(jnp.float32).min),
  ),
  (
    *(jnp.linalg.inv, [[2, 2], [2, 2]], "triangular_solve of these", "x + epsilon"),
    lambda x: x + jnp.eye(2),
  ),
  (
    *(lambda x: -jnp.mean(nn.log_softmax(x)[:1]), [-np.inf, 1], "forward: It adds up an inf"),
    *("jnp.where(jnp.isfinite(x), x, 0)", lambda x: jnp.where(jnp.isfinite(x), x, 0)),
  ),
  (jnp.cosh, [99, 1], "cosh of 99 overflows float32", "jnp.clip", lambda x: jnp.clip(x, -9, 9)),
  (jax.lax.erf_inv, [0, 1], "erf_inv of 1", "jnp.where(allowed", lambda x: jnp.where(x < 1, x, 0)),
  (jax.grad(jnp.linalg.norm), [0, 0], "backward: div of 0.5", "jnp.where(allowed", jnp.ones_like),
  (
    *(jax.grad(lambda x: jnp.sum(x * jnp.linalg.norm(x))), [0, 0], "backward: It is 0 * inf"),
    *("jnp.where(allowed", jnp.ones_like),
  ),
  (
    *(jax.grad(lambda x: jnp.sum(jax.scipy.special.entr(x))), [0, 1], "backward: log of 0"),
    *("jnp.where(allowed", jnp.ones_like),
  ),
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


class Covariance(nn.Module):
  """A matrix that a layer returns, which rounding to bfloat16 makes singular."""

  @nn.compact
  def __call__(self, x):
    smooth = nn.Dense(9, name="smooth", kernel_init=lambda *_: jnp.eye(9))
    matrix = smooth(x.reshape(-1)).reshape(3, 3)
    return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)


def test_what_linear_algebra_does_not_take_may_come_of_rounding_and_a_rule_cures_it():
  factor = jnp.asarray([[1, 0, 0], [1, 0.03, 0], [1, 0, 0.03]])
  x = factor @ factor.T
  variables = Covariance().init(jax.random.key(0), x)

  def found(*rules):
    policied = mpjax.linen.with_policy(Covariance(), "mixed_bfloat16", rules)
    return mpjax.find_nonfinite(policied.apply)(variables, x)

  with pytest.warns(UserWarning, match="cholesky.* takes the result of low-precision"):
    report = found()
  assert (report.operation, report.verdict) == ("cholesky", "value")
  assert "they come from add of Covariance/smooth, in bfloat16" in report.cause
  line, _, other = report.cure.partition("  #")
  assert other == " or x + epsilon * jnp.eye(n)"
  assert not found(eval(line, {"mpjax": mpjax}))
  report = mpjax.find_nonfinite(jnp.linalg.cholesky)(-x)
  assert (report.cause.startswith("cholesky of these operands is NaN"), report.cure[:3]) == (
    True,
    "x +",
  )
