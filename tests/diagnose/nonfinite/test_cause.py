import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    *(lambda x: -jnp.mean(nn.log_softmax(x)[:1]), [-np.inf, 1], "forward: It sums an inf"),
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fn", "x", "cause", "cure", "cured"), CURES, ids=[cause for _, _, cause, *_ in CURES]
)
def test_what_a_report_advises_cures(fn, x, cause, cure, cured):
  x = jnp.asarray(x, jnp.float32)
  found = mpjax.find_nonfinite(fn)(x)
  assert cause in f"{found.direction}: {found.cause}"
  assert found.cure.startswith(cure)
  assert not mpjax.find_nonfinite(lambda x: fn(cured(x)))(x)


def first_line(cure):
  return cure.partition("  #")[0]


def test_a_cast_or_bfloat16_cures_what_overflows_float16():
  x = jnp.full(2, 300, jnp.float16)
  found = mpjax.find_nonfinite(jnp.square)(x)
  assert found.cure.endswith('or the policy "mixed_bfloat16"')
  for cured in (eval(first_line(found.cure)), x.astype(jnp.bfloat16)):
    assert not mpjax.find_nonfinite(jnp.square)(cured)


class Overflowing(nn.Module):
  """A model whose own code overflows float16, in no layer."""

  careful: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(8, kernel_init=lambda *_: 300 * jnp.eye(8))(x)
    scaled = lambda x: x @ (300 * jnp.eye(8)) @ jnp.eye(8)  # noqa: E731
    return mpjax.full_precision(scaled)(x) if self.careful else scaled(x)


def test_a_region_or_bfloat16_cures_the_code_of_a_model():
  x = jnp.ones((1, 8))
  variables = Overflowing().init(jax.random.key(0), x)

  def found(policy="mixed_float16", **fields):
    model = mpjax.linen.with_policy(Overflowing(**fields), policy)
    return mpjax.find_nonfinite(model.apply)(variables, x)

  report = found()
  assert first_line(report.cure) == "mpjax.full_precision(fn)(x)"
  assert not found(careful=True)
  assert not found("mixed_bfloat16")


def test_a_rule_for_a_scope_that_is_named_cures_what_has_no_module():
  def fn(w, x):
    return x @ w @ w @ w

  def found(fn, rules=()):
    policied = mpjax.with_policy(fn, "mixed_float16", rules)
    return mpjax.find_nonfinite(policied)(jnp.full((8, 8), 300.0), jnp.ones((1, 8)))

  assert found(fn).cure.startswith("a jax.named_scope here and a Rule with its path")
  rule = mpjax.Rule("float32", path="product")
  assert not found(jax.named_scope("product")(fn), [rule])


def test_a_limit_cures_an_exponential_that_overflows():
  found = mpjax.find_nonfinite(jnp.exp)(jnp.float32(99))
  assert found.cure.endswith("else jnp.minimum(x, limit) before it")
  assert not mpjax.find_nonfinite(lambda x: jnp.exp(jnp.minimum(x, 80)))(jnp.float32(99))


def test_a_selection_cures_a_mask_that_multiplies_an_inf():
  x = jnp.asarray([0.0, 1.0])
  found = mpjax.find_nonfinite(lambda x: nn.softmax(x * MASK))(x)
  (selection,) = re.findall(r"mask by (.*) instead of a multiplication", found.cure)
  code = compile(selection, "cure", "eval")
  selected = lambda x: eval(code, {"jnp": jnp}, {"x": x, "mask": MASK > 0})  # noqa: E731
  assert not mpjax.find_nonfinite(lambda x: nn.softmax(selected(x)))(x)


@pytest.mark.slow
def test_a_dynamic_scale_gets_to_the_scale_that_a_report_names_by_itself():
  tx = mpjax.loss_scaling(optax.sgd(0.0))

  def step(w, opt_state):
    loss_fn = lambda w: jnp.sum(w.astype("float16") * 8).astype("float32")  # noqa: E731
    _, grads = jax.value_and_grad(mpjax.scaled(loss_fn, opt_state))(w)
    updates, opt_state = tx.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state

  w = jnp.ones(2)
  opt_state = tx.init(w)
  found = mpjax.find_nonfinite(step)(w, opt_state)
  assert "DynamicLossScale gets there by itself" in found.cure
  values = {"mpjax": mpjax, "opt_state": opt_state}
  exec(found.cure, values)
  assert not mpjax.find_nonfinite(step)(w, values["opt_state"])
  for _ in range(8):
    w, opt_state = step(w, opt_state)
  metrics = mpjax.loss_scaling_metrics(opt_state)
  assert metrics["loss_scale"] == found.finite_at
  assert not mpjax.find_nonfinite(step)(w, opt_state)


def test_the_check_of_the_data_that_a_report_advises_finds_the_argument():
  x = {"a": jnp.ones(2), "b": jnp.asarray([1.0, jnp.nan])}
  found = mpjax.find_nonfinite(lambda x: x["a"] + x["b"])(x)
  finite = {name: bool(eval(first_line(found.cure), {"jnp": jnp, "x": x[name]})) for name in x}
  assert (found.path, finite) == ("x/b", {"a": True, "b": False})


class Covariance(nn.Module):
  """A matrix that a layer returns, which rounding to bfloat16 makes singular."""

  @nn.compact
  def __call__(self, x):
    smooth = nn.Dense(9, name="smooth", kernel_init=lambda *_: jnp.eye(9))
    matrix = smooth(x.reshape(-1)).reshape(3, 3)
    return jax.lax.linalg.cholesky(matrix, symmetrize_input=False)


@pytest.mark.slow
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
