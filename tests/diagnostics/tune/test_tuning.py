import itertools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._diagnostics.tune.modules import relative_error, rules_for
from mpjax._diagnostics.tune.tuning import rows_of
from tests import programs
from tests.errors import refused
from tests.models.values import filled, shapes
from tests.programs import bits


class Root(nn.Module):
  """A model whose root has a matmul, of numbers that may be too large for float16."""

  gain: float = 1e3

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(8, name="a")(x)
    kernel = self.param("kernel", nn.initializers.lecun_normal(), (8, 8))
    y = (self.gain * x) @ (self.gain * kernel) / self.gain**2
    return x + nn.Dense(8, name="b")(y)


def prepared(model):
  """Returns a loss of a model, or of another one, and its arguments."""
  x = jnp.asarray(np.random.default_rng(0).uniform(1, 4, (4, 8)), jnp.float32)

  def loss_fn(variables, x, wrapped=None):
    return jnp.mean((wrapped or model).apply(variables, x) ** 2)

  return loss_fn, filled(shapes(model, x)), x


def error_of(loss_fn, args, rules, policy):
  exact = jax.tree.leaves(jax.jit(jax.grad(loss_fn))(*args))
  cast = mpjax.autocast(lambda *a: 64 * loss_fn(*a), policy, rules=rules)
  found = jax.tree.leaves(jax.jit(jax.grad(cast))(*args))
  return relative_error((b, a / 64) for a, b in zip(found, exact, strict=True))


def test_a_budget_is_met_by_the_cheapest_of_all_choices():
  loss_fn, *args = prepared(Root(gain=1.0))
  plain = mpjax.tune(loss_fn, "mixed_bfloat16", tolerance=1.0)(*args)
  assert (plain.rules, plain.half_share) == ((), 1)
  budget = 0.5 * plain.error
  report = mpjax.tune(loss_fn, "mixed_bfloat16", tolerance=budget)(*args)
  assert report.error <= budget
  assert len(report.evaluations) <= report.bound
  paths, good = ("Root", "Root/a", "Root/b"), []
  for chosen in (set(some) for n in range(4) for some in itertools.combinations(paths, n)):
    rules = rules_for(chosen, {*paths} - chosen, ("", *paths), mpjax.Policy.parse("mixed_bfloat16"))
    if error_of(loss_fn, args, rules, "mixed_bfloat16") <= budget:
      cast = mpjax.autocast(loss_fn, "mixed_bfloat16", rules=rules)
      good.append(programs.half_share(jax.make_jaxpr(jax.grad(cast))(*args)))
  assert 0 < report.half_share == max(good) < 1


def test_a_budget_that_no_module_meets():
  def loss_fn(w, x):
    with jax.named_scope("layer"):
      y = x @ w
    return jnp.sum(y**2)

  args = jnp.full((4, 4), 1.2345), jnp.full((2, 4), 0.777)
  tune = mpjax.tune(loss_fn, "mixed_bfloat16", tolerance=1e-9)
  report, again = tune(*args), tune(*args)
  assert report.error <= 1e-9
  assert report.half_share == 0
  assert (report.evaluations, report.rules) == (again.evaluations, again.rules)
  plain = mpjax.tune(lambda w, x: jnp.sum((x @ w) ** 2), tolerance=1.0)(*args)
  assert "The function has no named scopes" in str(plain)


def pasted(report):
  """Returns the rules of a report as its printed lines give them."""
  names: dict[str, Any] = {"mpjax": mpjax}
  text = str(report)
  start = text.index("import re\n") if "import re\n" in text else text.index("rules = (")
  exec(text[start : text.index("\n)") + 2], names)
  return names["rules"]


def test_printed_rules_paste_into_linen_and_autocast(capsys):
  loss_fn, *args = prepared(Root())
  report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.01)(*args)
  assert f"at most {report.bound} measurements" in capsys.readouterr().out
  assert [rule.path for rule in report.rules] == [re.compile("(Root)?"), "**/a", "**/b"]
  assert pasted(report) == report.rules
  assert not np.isfinite(error_of(loss_fn, args, (), "mixed_float16"))
  assert error_of(loss_fn, args, report.rules, "mixed_float16") < 0.01
  model = mpjax.linen.with_policy(Root(), "mixed_float16", pasted(report), unmatched="raise")
  exact, low = (
    jax.grad(lambda v, m=m: 64 * loss_fn(v, args[1], m))(args[0]) for m in (Root(), model)
  )
  assert relative_error(zip(*map(jax.tree.leaves, (exact, low)), strict=True)) < 0.01


def test_the_rule_for_a_model_of_one_module_is_one_for_all():
  model, x = nn.Dense(4), jnp.linspace(0, 1, 8).reshape(2, 4)
  variables = model.init(jax.random.key(0), x)
  report = mpjax.tune(lambda v, x: jnp.mean(model.apply(v, x) ** 2), tolerance=1e-9)(variables, x)
  (rule,) = pasted(report)
  low = mpjax.linen.with_policy(model, "mixed_bfloat16", [rule], unmatched="raise")
  assert low.apply(variables, x).dtype == jnp.float32
  assert bits(low.apply(variables, x)) == bits(model.apply(variables, x))


def test_the_report_begins_with_the_error_by_module():
  class Stream(nn.Module):
    @nn.compact
    def __call__(self, x):
      for i in range(2):
        x = x + nn.Dense(8, name=f"layer_{i}")(nn.LayerNorm()(x))
      return x

  loss_fn, *args = prepared(Stream())
  report = mpjax.tune(loss_fn, tolerance=1.0)(*args)
  rows = {module.path: module for module in report.modules}
  assert rows["Stream"].is_stream
  assert "Stream (residual stream)" in str(report)
  for path in ("Stream", "Stream/layer_0", "Stream/layer_1"):
    assert 1e-4 < rows[path].forward < 0.02
    assert 1e-4 < rows[path].gradient < 0.05
  assert rows["Stream"].gradient == pytest.approx(report.error)
  assert np.isnan(rows["Stream"].alone)


def test_a_row_has_the_gradients_of_what_is_inside_too():
  w, flops = np.arange(1.0, 9), {"net": 0, "net/a": 6, "net/b": 2}
  pairs = {"net/a": [(w, 1.01 * w)], "net/emb": [(w, w)]}  # A table is no row of its own.
  net, a = rows_of(flops, {"net": 0.1}, pairs, {"net/a": 0.2})
  np.testing.assert_allclose([net.gradient, a.gradient], [0.01 / np.sqrt(2), 0.01], rtol=1e-4)
  assert net[:2] + net[3:] == ("net", 0.1, 0, pytest.approx(np.nan, nan_ok=True), True)
  assert (a.path, np.isnan(a.forward), *a[3:]) == ("net/a", True, 0.75, 0.2, False)


def dense(**dtypes):
  return nn.Dense(4, **dtypes)


CALL = "mpjax.tune(loss_fn, policy)(*args)"
LOW = {
  "a policy": (lambda: mpjax.linen.with_policy(dense(), "mixed_bfloat16"), "bfloat16 in Dense"),
  "a dtype": (lambda: dense(dtype=jnp.float16), "float16 in Dense"),
  "parameters": (lambda: dense(param_dtype=jnp.float16), "float16 in its arguments"),
}


@pytest.mark.parametrize("name", LOW)
@pytest.mark.standard_promotion
def test_what_is_low_already_is_refused(name):
  build, got = LOW[name]
  model, x = build(), jnp.ones((2, 4))
  tune = mpjax.tune(lambda v, x: jnp.mean(model.apply(v, x) ** 2), tolerance=0.1)
  with refused(ValueError, CALL, "a loss in float32", got, "the plain model"):
    tune(model.init(jax.random.key(0), x), x)


@jax.custom_vjp
def frugal(x, w):
  return x @ w


frugal.defvjp(
  lambda x, w: (x @ w, (x.astype("bfloat16"), w)),
  lambda kept, g: (g @ kept[1].T, kept[0].astype("float32").T @ g),
)


def test_a_loss_in_float32_may_keep_low_precision_for_its_backward_pass():
  w, x = jax.random.normal(jax.random.key(0), (2, 4, 4))
  report = mpjax.tune(lambda w, x: jnp.sum(frugal(x, w) ** 2), tolerance=0.1)(w, x)
  assert 0 < report.error < 0.02


class HotLinear(nnx.Module):
  def __init__(self, rngs):
    self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

  def __call__(self, x):
    return ((1e3 * x) @ (1e3 * self.kernel[...])) * 1e-6


class Layers(nnx.Module):
  def __init__(self, rngs):
    self.first = nnx.Linear(4, 4, rngs=rngs)
    self.hot = HotLinear(rngs)
    self.last = nnx.Linear(4, 4, rngs=rngs)

  def __call__(self, x):
    return self.last(nnx.relu(self.hot(nnx.relu(self.first(x)))))


def test_a_model_of_nnx_without_named_scopes():
  model, x = Layers(nnx.Rngs(0)), jnp.full((2, 4), 2.5)

  def loss_fn(model, x):
    return jnp.sum(model(x) ** 2)

  report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.02)(model, x)
  assert report.rules == (mpjax.Rule("float32", path="**/hot"),)
  assert "mpjax.with_policy" in " ".join(str(report).split())
  policied = mpjax.nnx.with_policy(model, "mixed_float16", report.rules)
  assert np.isfinite(policied(x)).all()
  assert not np.isfinite(mpjax.nnx.with_policy(model, "mixed_float16")(x)).all()


@pytest.mark.parametrize(
  ("policy", "tolerance", "where", "expected", "got", "fix"),
  [
    ("float32", 0.1, "policy", "bfloat16 or float16", "float32", "Write"),
    ("mixed_bfloat16", 0, "tolerance", "positive", "0", "tolerance=0.01"),
    ("mixed_bfloat16", "a", "tolerance", "positive", "'a'", "Write"),
  ],
)
def test_errors(policy, tolerance, where, expected, got, fix):
  with refused(ValueError, f"mpjax.tune({where})", expected, got, fix):
    mpjax.tune(jnp.sum, policy, tolerance=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_a_gradient_of_zero_or_of_no_parameter(dtype):
  tune = mpjax.tune(lambda w: jnp.sum(0.0 * w.astype(jnp.float32)), tolerance=0.1)
  with refused(ValueError, CALL, "not zero", "norm 0.0", "mpjax.ranges"):
    tune(jnp.ones(3, dtype))


def test_a_loss_that_is_no_scalar_or_has_no_argument_by_position():
  tune = mpjax.tune(lambda *w, x: jnp.sum(x) if not w else x @ w[0], tolerance=0.1)
  where, fix = "mpjax.tune(loss_fn)", "take the mean"
  for args, got in (((), "no argument by position"), ((jnp.ones((3, 2)),), "float32[4, 2]")):
    with refused(TypeError, where, "a floating scalar", got, fix):
      tune(*args, x=jnp.ones((4, 3)))
