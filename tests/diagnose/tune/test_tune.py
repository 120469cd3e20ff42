import contextlib
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Literal

import mpjax
from mpjax._diagnose.relative_errors import relative_error
from mpjax._diagnose.tune.rules import rules_for
from tests.diagnose.losses_to_tune import GAIN, KERNELS, Root, X, prepared, stack
from tests.errors import refused
from tests.models.values import filled, normal, shapes
from tests.programs import bits

HALF, WIDE = (mpjax.Policy.parse(name) for name in ("mixed_bfloat16", "float32"))


def error_of(loss_fn, args, rules, policy):
  exact = jax.tree.leaves(jax.jit(jax.grad(loss_fn))(*args))
  cast = mpjax.autocast(lambda *a: 64 * loss_fn(*a), policy, rules=rules)
  found = jax.tree.leaves(jax.jit(jax.grad(cast))(*args))
  return relative_error((a / 64, b) for a, b in zip(found, exact, strict=True))


@pytest.mark.slow
def test_a_budget_is_met_by_a_choice_without_a_needless_upgrade():
  loss_fn, *args = prepared(Root(gain=1.0))
  plain = mpjax.tune(loss_fn, "mixed_bfloat16", tolerance=1.0)(*args)
  assert (plain.rules, plain.half_share) == ((), 1)
  budget = 0.62 * plain.error
  report = mpjax.tune(loss_fn, "mixed_bfloat16", tolerance=budget)(*args)
  assert error_of(loss_fn, args, report.rules, "mixed_bfloat16") <= budget
  assert len(report.evaluations) <= report.bound
  paths = ("Root", "Root/a", "Root/b")
  rule_paths = {"Root": "", "Root/a": "a", "Root/b": "b", "": ""}
  chosen = [path for path in paths if rule_paths[path] in report.float32]
  assert 0 < len(chosen) < 3
  for path in chosen:
    fewer = {one: WIDE if one in chosen and one != path else HALF for one in paths}
    rules = rules_for(fewer, {path: path for path in ("", *paths)}, HALF)
    assert error_of(loss_fn, args, rules, "mixed_bfloat16") > 0.9 * budget


@pytest.mark.slow
def test_a_budget_that_no_module_meets():
  def loss_fn(w, x):
    with jax.named_scope("layer"):
      y = x @ w
    return jnp.sum(y**2)

  args = jnp.full((8, 8), 1.2345), jnp.full((2, 8), 0.777)
  tune = mpjax.tune(loss_fn, ("mixed_bfloat16", "mixed_float16"), tolerance=1e-9)
  report, again = tune(*args), tune(*args)
  assert (report.shares, report.error, report.headroom) == ({"float32": 1.0}, 0.0, math.inf)
  assert (report.evaluations, report.rules) == (again.evaluations, again.rules)
  plain = mpjax.tune(lambda w, x: jnp.sum((x @ w) ** 2), tolerance=1.0)(*args)
  assert "The function has no named scopes" in str(plain)


def pasted(report):
  """Returns the rules of a report as its printed lines give them."""
  text, names = str(report), dict[str, Any](mpjax=mpjax)
  start = text.index("import re\n") if "import re\n" in text else text.index("rules = (")
  exec(text[start : text.index("\n)", start) + 2], names)
  return names["rules"]


@pytest.mark.slow
def test_printed_rules_paste_into_linen_and_autocast(capsys):
  loss_fn, *args = prepared(Root())
  report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.01)(*args)
  assert f"at most {report.bound} measurements" in capsys.readouterr().out
  assert [rule.path for rule in report.rules] == ["", "**/a", "**/b"]
  assert pasted(report) == report.rules
  assert not np.isfinite(error_of(loss_fn, args, (), "mixed_float16"))
  assert error_of(loss_fn, args, report.rules, "mixed_float16") < 0.01
  model = mpjax.linen.with_policy(Root(), "mixed_float16", pasted(report), unmatched="raise")
  exact, low = (
    jax.grad(lambda v, m=m: 64 * loss_fn(v, args[1], m))(args[0]) for m in (Root(), model)
  )
  assert relative_error(zip(*map(jax.tree.leaves, (low, exact)), strict=True)) < 0.01


@pytest.mark.slow
def test_the_error_is_that_of_the_model_under_with_policy():
  # A layer rounds what it returns, bias and all, and the loss is of a small difference of it.
  x, kernel, bias = normal(16, 8), normal(8, 1, seed=1), jnp.full(1, 100.0)
  variables, linen = {"params": {"kernel": kernel, "bias": bias}}, nn.Dense(1)
  model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
  nnx.update(model, {"kernel": kernel, "bias": bias})

  def loss(y):
    return jnp.mean((y - 100 - 0.9 * x @ kernel) ** 2)

  def gradient(fn):
    return jax.tree.leaves(jax.grad(lambda v: loss(fn.apply(v, x)))(variables))

  pairs = zip(*map(gradient, (mpjax.with_policy(linen, "mixed_bfloat16"), linen)), strict=True)
  error = relative_error(pairs)
  tune = mpjax.tune(lambda v: loss(linen.apply(v, x)), tolerance=1e3)(variables)
  of_nnx = mpjax.tune(lambda model: loss(model(x)), tolerance=1e3)(model)
  cast = mpjax.tune(
    lambda v: loss(x @ v["params"]["kernel"] + v["params"]["bias"][None]), tolerance=1e3
  )
  assert [tune.error, of_nnx.error] == pytest.approx([error, error], rel=0.01)
  assert cast(variables).error != pytest.approx(error, rel=0.1)
  assert (tune.models, of_nnx.models, cast(variables).models) == (True, True, False)


class Head(Root): ...  # Another model, whose modules have the same paths.


@pytest.mark.slow
def test_a_rule_is_for_all_modules_that_it_picks_out_and_for_no_other_matmul():
  x, models = normal(4, 8), (Root(1.0), Head())
  variables = [filled(shapes(model, x)) for model in models]

  def loss_fn(variables, models=models, scale=1):
    y = (1e6 * models[0].apply(variables[0], x)) @ jnp.eye(8) / 1e6  # In no model: in float32.
    return scale * jnp.mean(models[1].apply(variables[1], y) ** 2)

  report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.01)(variables)
  assert [rule.path for rule in report.rules] == ["", "**/a", "**/b"]
  assert report.float32 == ("",)
  low = [mpjax.with_policy(model, "mixed_float16", pasted(report)) for model in models]
  exact, rounded = (jax.tree.leaves(jax.grad(loss_fn)(variables, m, 64)) for m in (models, low))
  assert relative_error(zip(rounded, exact, strict=True)) < 0.01


@pytest.mark.slow
def test_the_rule_for_a_model_of_one_module_is_one_for_all():
  model, x = nn.Dense(8), jnp.linspace(0, 1, 16).reshape(2, 8)
  variables = model.init(jax.random.key(0), x)
  report = mpjax.tune(lambda v, x: jnp.mean(model.apply(v, x) ** 2), tolerance=1e-9)(variables, x)
  (rule,) = pasted(report)
  low = mpjax.with_policy(model, "mixed_bfloat16", [rule])
  assert low.apply(variables, x).dtype == jnp.float32
  assert bits(low.apply(variables, x)) == bits(model.apply(variables, x))


@pytest.mark.slow
def test_the_report_begins_with_the_error_that_each_module_causes():
  class Stream(nn.Module):
    @nn.compact
    def __call__(self, x):
      for i in range(2):
        x = x + nn.Dense(8, name=f"layer_{i}")(nn.LayerNorm()(x))
      return x

  loss_fn, *args = prepared(Stream())
  report = mpjax.tune(loss_fn, tolerance=1.0)(*args)
  errors = {module.path: module.error for module in report.modules}
  assert min(errors["layer_0"], errors["layer_1"]) > 1e-4
  assert math.hypot(*errors.values()) == pytest.approx(report.plain.predicted)
  text = " ".join(str(report).split())
  assert text.startswith("Error that each module causes in bfloat16")
  assert f"Without rules, bfloat16 has an error of {report.error:.2g}." in text


@pytest.mark.slow
def test_the_report_says_what_its_rules_buy():
  loss_fn, *args = prepared(Root(gain=1.0))
  plain = mpjax.tune(loss_fn, tolerance=1.0)(*args)
  report = mpjax.tune(loss_fn, tolerance=0.9 * plain.error)(*args)
  text = " ".join(str(report).split())
  assert f"take the error from {plain.error:.2g} to {report.error:.2g}, and move" in text
  advised = float(text.partition("With tolerance=")[2].split()[0])
  assert mpjax.tune(loss_fn, tolerance=advised)(*args).rules == ()


# Each advice is obeyed: a model of NNX, with and without scopes, and a function.


class NNXHot(nnx.Module):
  def __init__(self):
    self.kernel = nnx.Param(jnp.zeros((16, 16)))

  def __call__(self, x):
    return (x * GAIN) @ self.kernel[...] / GAIN


class NNXStack(nnx.Module):
  def __init__(self, is_scoped):
    self.a, self.b = (nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0)) for _ in "ab")
    self.hot = self.tied = NNXHot()
    self.is_scoped = is_scoped
    for name, kernel in KERNELS.items():
      getattr(self, name).kernel[...] = kernel

  def __call__(self, x):
    with jax.named_scope("net") if self.is_scoped else contextlib.nullcontext():
      return self.b(self.tied(nnx.relu(self.a(x))))


def as_it_is(model):
  return model


def tune_by_params(loss, params, policy, **options):
  return mpjax.tune(lambda params: loss(params, as_it_is), policy, **options)(params)


def of_nnx(is_scoped):
  graph, params = nnx.split(NNXStack(is_scoped))

  def loss(params, wrap):
    return jnp.mean(wrap(nnx.merge(graph, params))(X) ** 2)

  def tune(policy, **options):
    return mpjax.tune(lambda m: jnp.mean(m(X) ** 2), policy, **options)(NNXStack(is_scoped))

  return params, loss, tune


def of_function():
  def loss(params, wrap):
    return jnp.mean(wrap(stack)(params, X) ** 2)

  return KERNELS, loss, functools.partial(tune_by_params, loss, KERNELS)


MODELS = {
  "nnx": functools.partial(of_nnx, False),
  "nnx with a scope": functools.partial(of_nnx, True),
  "function": of_function,
}


def tuned(kind, policy, **options):
  """Returns the report of a model, and the gradients in float32 and under what it says."""
  params, loss, tune = MODELS[kind]()
  report = tune(policy, **options)
  rules = pasted(report) if report.rules else ()

  def with_policy(model):
    return mpjax.with_policy(model, report.policy, rules)

  exact, low = (
    jax.make_jaxpr(jax.grad(lambda params, w=wrap: report.loss_scale * loss(params, w)))(params)
    for wrap in (as_it_is, with_policy)
  )
  return report, exact, low, jax.tree.leaves(params)


def evaluated(jaxpr, consts, args, numbers):
  """Returns the results of a jaxpr by NumPy's copies, and adds float16 magnitudes to `numbers`."""
  values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
  for eqn in jaxpr.eqns:
    ins = [x.val if isinstance(x, Literal) else values[x] for x in eqn.invars]
    inner = next((x for x in eqn.params.values() if hasattr(x, "jaxpr")), None)
    if inner is None:
      inner = next((x for x in eqn.params.values() if hasattr(x, "eqns")), None)
    if inner is not None:
      program = getattr(inner, "jaxpr", inner)
      outs = evaluated(program, getattr(inner, "consts", ()), ins, numbers)
    else:
      outs = eqn.primitive.bind(*ins, **eqn.params)
      outs = outs if eqn.primitive.multiple_results else [outs]
    for x in outs:
      if x.dtype == jnp.float16:
        numbers.append(float(np.abs(np.asarray(x).astype(np.float64)).max()))
    values.update(zip(eqn.outvars, outs, strict=True))
  return [x.val if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "headroom"), [*((kind, 8) for kind in MODELS), ("function", 1)])
def test_the_advised_rules_have_the_error_and_headroom_that_were_promised(kind, headroom):
  report, exact, low, leaves = tuned(kind, "mixed_float16", tolerance=0.01, headroom=headroom)
  numbers = []
  of_float32 = evaluated(exact.jaxpr, exact.consts, leaves, [])
  found = evaluated(low.jaxpr, low.consts, leaves, numbers)
  assert relative_error(zip(found, of_float32, strict=True)) == pytest.approx(
    report.error, rel=0.05
  )
  assert 65504 / max(numbers) == pytest.approx(report.headroom, rel=1e-3)
  assert report.headroom >= headroom
  rows = {row.path: row for row in report.modules if row.flops_share}
  assert {*rows} == {*KERNELS}
  assert 2 < rows["hot"].headroom < 8
  assert report.float32 == (("hot",) if headroom == 8 else ())


@pytest.mark.slow
def test_each_module_gets_the_first_format_that_is_exact_enough():
  float8 = "p=float32,c=bfloat16,o=float32,matmul=float8:skip=none"
  policies = (float8, "mixed_bfloat16")
  plain, *_ = tuned("nnx", policies, tolerance=1.0)
  assert (plain.shares, plain.rules) == ({"float8": 1.0}, ())
  report, exact, low, leaves = tuned("nnx", policies, tolerance=0.7 * plain.error)
  assert set(report.shares) == {"float8", "bfloat16"}
  # With an output dtype, results inside the model would be inputs in float32.
  assert {str(rule.policy) for rule in report.rules} == {"params=float32,compute=bfloat16"}
  found, of_float32 = (evaluated(x.jaxpr, x.consts, leaves, []) for x in (low, exact))
  error = relative_error(zip(found, of_float32, strict=True))
  assert error == pytest.approx(report.error, rel=0.05)
  assert error <= 0.7 * plain.error


@pytest.mark.slow
def test_a_policy_for_all_modules_is_the_policy_without_rules():
  def loss_fn(w):
    with jax.named_scope("layer"):
      return jnp.mean((X @ w) ** 2)

  policies = ("mixed_bfloat16", "mixed_float16")
  report = mpjax.tune(loss_fn, policies, tolerance=1e-3, headroom=1)(KERNELS["a"])
  assert (str(report.policy), report.rules) == (str(mpjax.Policy.parse("fp16")), ())
  assert 'policy = "mixed_float16"' in str(report)
  assert len(report.evaluations) <= report.bound


@pytest.mark.slow
def test_a_module_without_matmuls_that_has_too_little_headroom():
  def loss(kernels, x):
    with jax.named_scope("a"):
      y = x @ kernels["a"]
    with jax.named_scope("gain"):
      y = y * 6e4
      y = y / 6e4
    with jax.named_scope("b"):
      return jnp.mean((y @ kernels["b"]) ** 2)

  report = mpjax.tune(loss, "mixed_float16", tolerance=0.01)(KERNELS, X)
  assert report.rules == (mpjax.Rule("float32_highest", path="**/gain"),)
  assert report.half_share == 1
  assert report.headroom >= 8
  assert "gain" in str(report).partition("Rules")[0]


class Normed(nnx.Module):
  def __init__(self, rngs):
    self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
    self.norm = nnx.BatchNorm(16, rngs=rngs)

  def __call__(self, x):
    for layer in self.layers:
      x = 300 * jnp.tanh(self.norm(layer(x)))
    return x


@pytest.mark.slow
def test_the_headroom_of_modules_is_measured_where_float16_does_not_overflow():
  # The squares in the statistics of the norm are beyond float16, and are in float32.
  tune = mpjax.tune(
    lambda model, x: jnp.mean(model(x) ** 2), ("mixed_bfloat16", "mixed_float16"), tolerance=3e-3
  )
  report = tune(Normed(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (32, 16)))
  headroom = {module.path: module.headroom for module in report.modules}
  assert (report.policy.compute_dtype, report.rules) == (jnp.float16, ())
  assert min(headroom["norm"], headroom["layers/0"], headroom["layers/1"]) >= report.headroom


@pytest.mark.parametrize(
  ("policy", "tolerance", "where", "expected", "got", "fix"),
  [
    ("float32", 0.1, "policy", "bfloat16 or float16", "float32", "Write"),
    (("mixed_float8", "float32"), 0.1, "policy", "or several", "float32", "Write"),
    (("bf16", "mixed_bfloat16"), 0.1, "policy", "that differ", "bf16", "Name each once"),
    ((), 0.1, "policy", "or several", "()", "Write"),
    ("mixed_bfloat16", 0, "tolerance", "positive", "0", "tolerance=0.01"),
    ("mixed_bfloat16", math.inf, "tolerance", "positive", "inf", "tolerance=0.01"),
    ("mixed_bfloat16", True, "tolerance", "positive", "True", "tolerance=0.01"),
    ("mixed_bfloat16", "a", "tolerance", "positive", "'a'", "Write"),
  ],
)
def test_a_policy_or_tolerance_that_is_none(policy, tolerance, where, expected, got, fix):
  with refused(ValueError, f"mpjax.tune({where})", expected, got, fix):
    mpjax.tune(jnp.sum, policy, tolerance=tolerance)


@pytest.mark.parametrize("headroom", [0.5, math.inf, math.nan, True, "8"])
def test_a_headroom_that_is_none(headroom):
  with refused(ValueError, "mpjax.tune(headroom)", "from 1 on", repr(headroom), "headroom=16"):
    mpjax.tune(jnp.sum, tolerance=0.1, headroom=headroom)
