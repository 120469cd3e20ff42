import contextlib
import functools
import itertools
import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.extend.core import Literal

import mpjax
from mpjax._debug.selectors import rule_paths_of
from mpjax._debug.tune import (
  Goal,
  TunedCall,
  Tuner,
  cost_of,
  modules_of,
  prepare,
  reference_of,
  rows_of,
  rules_for,
  streams_of,
)
from mpjax._debug.tune_errors import relative_error
from mpjax._debug.tune_report import Evaluation
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.steps import body_of
from tests import programs
from tests.errors import refused
from tests.models.values import filled, normal, shapes
from tests.programs import bits

HALF, HALF16, WIDE = (
  mpjax.Policy.parse(name) for name in ("mixed_bfloat16", "mixed_float16", "float32")
)
DOT = "dot_general"


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
  budget = 0.62 * plain.error
  report = mpjax.tune(loss_fn, "mixed_bfloat16", tolerance=budget)(*args)
  assert report.error <= budget
  assert len(report.evaluations) <= report.bound
  paths, good = ("Root", "Root/a", "Root/b"), []
  for chosen in (set(some) for n in range(4) for some in itertools.combinations(paths, n)):
    rule_paths = {path: path for path in ("", *paths)}
    rules = rules_for({path: WIDE if path in chosen else HALF for path in paths}, rule_paths, HALF)
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

  pairs = zip(*map(gradient, (linen, mpjax.with_policy(linen, "mixed_bfloat16"))), strict=True)
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


def test_a_rule_is_for_all_modules_that_it_picks_out_and_for_no_other_matmul():
  x, models = normal(4, 8), (Root(1.0), Head())
  variables = [filled(shapes(model, x)) for model in models]

  def loss_fn(variables, models=models, scale=1):
    y = (1e6 * models[0].apply(variables[0], x)) @ jnp.eye(8) / 1e6  # In no model: in float32.
    return scale * jnp.mean(models[1].apply(variables[1], y) ** 2)

  report = mpjax.tune(loss_fn, "mixed_float16", tolerance=0.01)(variables)
  assert [rule.path for rule in report.rules] == [re.compile("(Head|Root)?"), "**/a", "**/b"]
  assert report.float32 == ("Root", "Head")
  low = [mpjax.with_policy(model, "mixed_float16", pasted(report)) for model in models]
  exact, rounded = (jax.tree.leaves(jax.grad(loss_fn)(variables, m, 64)) for m in (models, low))
  assert relative_error(zip(exact, rounded, strict=True)) < 0.01


def test_the_rule_for_a_model_of_one_module_is_one_for_all():
  model, x = nn.Dense(4), jnp.linspace(0, 1, 8).reshape(2, 4)
  variables = model.init(jax.random.key(0), x)
  report = mpjax.tune(lambda v, x: jnp.mean(model.apply(v, x) ** 2), tolerance=1e-9)(variables, x)
  (rule,) = pasted(report)
  low = mpjax.with_policy(model, "mixed_bfloat16", [rule])
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


def test_a_row_has_the_gradients_of_what_is_inside_too():
  w, flops = np.arange(1.0, 9), {"net": 0, "net/a": 6, "net/b": 2}
  pairs = {"net/a": [(w, 1.01 * w)], "net/emb": [(w, w)]}  # A table is no row of its own.
  net, a = rows_of(flops, {"net": 0.1}, pairs, {"net", "net/a"})
  np.testing.assert_allclose([net.gradient, a.gradient], [0.01 / np.sqrt(2), 0.01], rtol=1e-4)
  assert net[:2] + net[3:5] == ("net", 0.1, 0, True)
  assert (a.path, np.isnan(a.forward), *a[3:5]) == ("net/a", True, 0.75, False)


def test_a_residual_stream_adds_a_value_and_what_modules_inside_compute_from_it():
  def layer(name, x):
    with jax.named_scope(name):
      return jnp.tanh(x)

  def model(x, bias):
    with jax.named_scope("residual"):
      x = x + layer("a", 2 * x)
    with jax.named_scope("gated"):
      x = jax.nn.silu(layer("gate", x)) * layer("up", x)
    with jax.named_scope("sum"):  # Neither is computed from the other.
      x = layer("a", x) + layer("b", x)
    with jax.named_scope("biased"):
      x = layer("a", x) + bias
    with jax.named_scope("polynomial"):  # No module is inside.
      return x + x**2

  graph = Graph(jax.make_jaxpr(model)(X, X))
  assert streams_of(graph) == {"residual"}


def test_the_share_of_float32_decides_among_choices_and_then_the_preferred_format():
  policies = tuple(map(mpjax.Policy.parse, ("mixed_int8", "mixed_bfloat16", "mixed_float16")))

  def cost(others=(), policies=policies, policy=policies[0], **shares):
    choice = Evaluation((), (), 0.0, 1.0, policy, 8.0, dict(others), shares, {})
    return cost_of(policies, {"a": 4, "b": 6}, choice)

  wide = cost(int8=0.9, float32=0.1)
  ranked = [
    cost(int8=0.4, bfloat16=0.6),
    cost({"a": policies[1]}, int8=0.4, bfloat16=0.6),
    cost(bfloat16=1.0),
    cost(float16=1.0),
    wide,
  ]
  assert ranked == sorted(ranked)
  assert len(set(ranked)) == 5
  # Bfloat16 beside int8 is not preferred to float16, so that the choice with fewer rules is.
  int8, _, float16 = policies
  all_float16 = cost(policies=(int8, float16), policy=float16, float16=1.0)
  assert all_float16 < cost({"a": float16}, (int8, float16), float16=0.6, bfloat16=0.4)


@pytest.mark.parametrize(
  ("error", "headroom", "is_reached"),
  [(0.1, 8.0, True), (0.1001, 8.0, False), (0.1, 7.999, False), (math.nan, 8.0, False)],
)
def test_a_goal_is_reached_at_its_limits(error, headroom, is_reached):
  choice = Evaluation((), (), error, 1.0, HALF, headroom, {}, {}, {})
  assert Goal(0.1, 8.0).is_reached(choice) == is_reached


CALL = "mpjax.tune(loss_fn, policy)(*args)"
LOW = {
  "a policy": (lambda: mpjax.with_policy(nn.Dense(4), "mixed_bfloat16"), "bfloat16 in Dense"),
  "a dtype": (lambda: nn.Dense(4, dtype=jnp.float16), "float16 in Dense"),
  "parameters": (lambda: nn.Dense(4, param_dtype=jnp.float16), "float16 in its arguments"),
}


@pytest.mark.parametrize(("build", "got"), LOW.values(), ids=LOW)
@pytest.mark.standard_promotion
def test_what_is_low_already_is_refused(build, got):
  model, x = build(), jnp.ones((2, 8))
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


# Each advice is obeyed: a model of NNX, with and without scopes, and a function.

X = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (16, 16)), jnp.float32)
KERNELS = {name: normal(16, 16, seed=i) / 4 for i, name in enumerate(("a", "hot", "b"))}
GAIN = 3000.0
"""It brings the values of the module "hot" to a fourth of the largest float16 number."""


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


def stack(kernels, x):
  with jax.named_scope("a"):
    x = jax.nn.relu(x @ kernels["a"])
  with jax.named_scope("hot"):
    x = (x * GAIN) @ kernels["hot"] / GAIN
  with jax.named_scope("b"):
    return x @ kernels["b"]


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


@pytest.mark.parametrize(("kind", "headroom"), [*((kind, 8) for kind in MODELS), ("function", 1)])
def test_the_advised_rules_have_the_error_and_headroom_that_were_promised(kind, headroom):
  report, exact, low, leaves = tuned(kind, "mixed_float16", tolerance=0.01, headroom=headroom)
  numbers = []
  of_float32 = evaluated(exact.jaxpr, exact.consts, leaves, [])
  found = evaluated(low.jaxpr, low.consts, leaves, numbers)
  assert relative_error(zip(of_float32, found, strict=True)) == pytest.approx(
    report.error, rel=0.05
  )
  assert 65504 / max(numbers) == pytest.approx(report.headroom, rel=1e-3)
  assert report.headroom >= headroom
  rows = {row.path: row for row in report.modules if row.flops_share}
  assert [*rows] == [*KERNELS]
  assert 2 < rows["hot"].headroom < 8
  assert report.float32 == (("hot",) if headroom == 8 else ())


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
  error = relative_error(zip(of_float32, found, strict=True))
  assert error == pytest.approx(report.error, rel=0.05)
  assert error <= 0.7 * plain.error


def test_the_progress_counts_the_measurements_that_are_announced():
  loss_fn, *args = prepared(Root())
  policy, goal, steps = mpjax.Policy.parse("mixed_bfloat16"), Goal(1e-9, 1.0), []
  tuned = TunedCall((policy,), goal, loss_fn, args, {}, lambda *step: steps.append(step))
  loss = prepare(tuned)
  tuner = Tuner(loss, reference_of(loss))
  assert steps == []
  tuner.measure({})
  tuner.search()
  assert steps == [(i + 1, loss.bound) for i in range(len(tuner.evaluations))]
  assert 1 < len(steps) <= loss.bound


class Scores(nnx.Module):
  def __init__(self):
    self.q, self.k = (nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2))

  def __call__(self, x):
    return self.q(x) @ self.k(x).T


def test_rules_keep_matmuls_of_results_of_modules_in_low_precision():
  def loss(model):
    return jnp.mean(model(normal(32, 64)) ** 2)

  model = Scores()
  mxfp8, float16 = policies = tuple(map(mpjax.Policy.parse, ("mixed_mxfp8", "mixed_float16")))
  goal = Goal(0.1, 8.0)
  tuned_loss = prepare(TunedCall(policies, goal, loss, (model,), {}, lambda step, steps: None))
  tuner = Tuner(tuned_loss, reference_of(tuned_loss))
  low = tuner.measure({})
  tuner.measure({"q": float16, "k": float16, "": mxfp8})
  plain, choice = tuner.evaluations
  assert plain.formats == {"q": ("mxfp8",), "k": ("mxfp8",), "": ("bfloat16",)}
  assert choice.formats == {"q": ("float16",), "k": ("float16",), "": ("bfloat16",)}
  assert [str(rule.policy) for rule in choice.rules] == ["params=float32,compute=float16"] * 2
  assert choice.half_share == 1 == pytest.approx(sum(choice.shares.values()))
  in_model = mpjax.with_policy(model, choice.policy, choice.rules)
  assert mpjax.audit(nnx.grad(loss))(in_model).half_share == 1
  assert jax.eval_shape(in_model, normal(32, 64)).dtype == jnp.float32
  # Matmuls in blocks have another primitive than those in float32.
  assert all(0.01 < row.forward < 0.1 for row in tuner.rows(low))


def test_a_policy_for_all_modules_is_the_policy_without_rules():
  report, *_ = tuned("function", ("mixed_bfloat16", "mixed_float16"), tolerance=1e-3, headroom=1)
  assert (str(report.policy), report.rules) == (str(mpjax.Policy.parse("fp16")), ())
  assert 'policy = "mixed_float16"' in str(report)
  assert len(report.evaluations) <= report.bound


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
  assert report.rules == (mpjax.Rule("float32", path="**/gain"),)
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


def test_the_headroom_of_modules_is_measured_where_float16_does_not_overflow():
  # The squares in the statistics of the norm are beyond float16, and are in float32.
  tune = mpjax.tune(
    lambda model, x: jnp.mean(model(x) ** 2), ("mixed_bfloat16", "mixed_float16"), tolerance=3e-3
  )
  report = tune(Normed(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (32, 16)))
  headroom = {module.path: module.headroom for module in report.modules}
  assert (report.policy.compute_dtype, report.rules) == (jnp.float16, ())
  assert min(headroom["norm"], headroom["layers/0"], headroom["layers/1"]) >= report.headroom


def test_more_headroom_lowers_the_loss_scale():
  def scale(headroom):
    tune = mpjax.tune(
      lambda k: jnp.sum(stack(k, X)), "mixed_float16", tolerance=1, headroom=headroom
    )
    return tune(KERNELS).loss_scale

  assert scale(32) == scale(8) / 4


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


def kernel_of(x, w):
  """Returns a product by a kernel, whose derivatives are kernels too."""

  def product(x, w):
    def body(x, w, out):
      out[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(x, w)

  @jax.custom_vjp
  def multiply(x, w):
    return product(x, w)

  multiply.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda kept, bar: (product(bar, kept[1].T), product(kept[0].T, bar)),
  )
  return multiply(x, w)


def untouched(w, x):
  return mpjax.full_precision(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)


def of_complex(w, x):
  return jnp.mean(jnp.abs(jax.lax.complex(x, x) @ w.astype(complex)) ** 2)


UNMEASURABLE = {
  "no matmul": (lambda w, x: jnp.mean(jnp.tanh(w) * w), "computes in bfloat16", "without such"),
  "full precision": (untouched, "computes in bfloat16", "without such"),
  "complex": (of_complex, "computes in bfloat16", "without such"),
  "a kernel": (lambda w, x: jnp.mean(kernel_of(x, w) ** 2), "computes in bfloat16", "pallas_call"),
  "constant": (lambda w, x: jnp.sum(jnp.sign(x @ w)), "not zero", "norm 0.0"),
  "not finite": (lambda w, x: jnp.sum(jnp.log(-jnp.abs(x @ w))), "a finite loss", "of nan"),
}


def test_a_loss_of_no_floating_parameter():
  with refused(ValueError, CALL, "not zero", "no floating", "mpjax.ranges"):
    mpjax.tune(lambda w: jnp.sum(w.astype(jnp.float32)), tolerance=0.1)(jnp.arange(3))


@pytest.mark.parametrize(("loss", "expected", "got"), UNMEASURABLE.values(), ids=UNMEASURABLE)
def test_a_loss_of_which_nothing_can_be_measured(loss, expected, got):
  with refused(ValueError, CALL, expected, got, "mpjax."):
    mpjax.tune(loss, tolerance=0.1)(normal(8, 8), normal(4, 8, seed=1))


def test_a_loss_that_differs_from_call_to_call():
  random = np.random.default_rng(0)

  def of_trace(w, x):
    return jnp.mean((x @ w + random.normal(size=(4, 8)).astype("float32")) ** 2)

  def of_run(w, x):
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    noise = io_callback(lambda: random.normal(size=(4, 8)).astype("float32"), shape)
    return jnp.mean((x @ w + noise) ** 2)

  for loss in (of_trace, of_run):
    with refused(ValueError, CALL, "the same gradient", "differ by", "as an argument"):
      mpjax.tune(loss, tolerance=0.1)(normal(8, 8), normal(4, 8, seed=1))


def test_random_numbers_of_a_key_or_of_a_model_are_the_same_in_each_call():
  key = jax.random.key(0)
  model = nnx.Sequential(
    nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
    nnx.Dropout(0.5, rngs=nnx.Rngs(1)),
    nnx.BatchNorm(8, rngs=nnx.Rngs(2)),
  )
  x = normal(4, 8)
  noisy = mpjax.tune(
    lambda w: jnp.mean((x @ w + jax.random.normal(key, (4, 8))) ** 2), tolerance=1.0
  )
  assert 0 < noisy(normal(8, 8)).error < 0.02
  assert 0 < mpjax.tune(lambda m: jnp.mean((m(x) - x) ** 2), tolerance=1.0)(model).error < 0.05


def test_kernels_beside_matmuls_are_named():
  report = mpjax.tune(lambda w, x: jnp.mean(kernel_of(x @ w, w) ** 2), tolerance=0.1)(
    normal(8, 8), normal(4, 8, seed=1)
  )
  assert report.kernels == ("",)
  assert "Kernels of (no scope) ran in float32" in " ".join(str(report).split())


def test_a_loss_that_is_no_scalar_or_has_no_argument_by_position():
  tune = mpjax.tune(lambda *w, x: jnp.sum(x) if not w else x @ w[0], tolerance=0.1)
  where, fix = "mpjax.tune(loss_fn)", "take the mean"
  for args, got in (((), "no argument by position"), ((jnp.ones((3, 2)),), "float32[4, 2]")):
    with refused(TypeError, where, "a floating scalar", got, fix):
      tune(*args, x=jnp.ones((4, 3)))


def test_modules_with_their_flops_forward_and_backward():
  def loss(w, x):
    with jax.named_scope("outer"):
      y = x @ w
      with jax.named_scope("inner"):
        y = jnp.einsum("ij,jk->ik", y, w)
      y = jax.lax.scan(lambda c, _: (c @ w, None), y, None, 3)[0]
    return jnp.sum(y)

  args = jnp.ones((4, 4)), jnp.ones((2, 4))
  flops = modules_of(body_of(jax.make_jaxpr(jax.value_and_grad(loss))(*args)))
  one = 2 * 2 * 4 * 4
  # The gradient by `x` is not needed.
  assert flops["outer/inner"] == 3 * one
  assert flops["outer"] == 2 * one + 3 * 3 * one
  assert set(flops) == {"outer", "outer/inner", ""}
  assert flops[""] == 0


SCOPES = ("", "Net", "Net/a", "Net/a/b", "Net/b", "Net/c(1)", "head", "Net/rnn/cell/hi")
HOMES = dict(zip(SCOPES, SCOPES, strict=True))


def test_modules_inside_of_a_chosen_one_keep_the_policy():
  rules = rules_for({"Net/a": WIDE, "Net/a/b": HALF, "Net/b": HALF}, HOMES, HALF)
  assert [rule.path for rule in rules] == ["**/a", "**/a/b"]
  assert rules[1].policy == HALF
  rules = rules_for({"Net/a": WIDE, "Net/a/b": WIDE, "Net/b": HALF}, HOMES, HALF)
  assert [rule.path for rule in rules] == ["**/a"]
  # In low precision results stay as they were computed; a module in float32 takes float32.
  rules = rules_for({"Net": HALF, "Net/a": HALF16, "Net/b": WIDE, "Net/b/c": HALF16}, HOMES, HALF)
  dtypes = {rule.path: str(rule.policy.output_dtype) for rule in rules}
  assert dtypes == {"**/a": "None", "**/Net/b": "float32", "**/c": "float32"}
  rules = rules_for({"Net": WIDE, "Net/a/b": WIDE, "Net/a": HALF}, HOMES, HALF)
  assert [rule.path for rule in rules] == ["**/Net", "**/a/b", "**/a"]


def test_rules_for_methods_select_the_same_in_linen_and_in_autocast():
  class Net(nn.Module):
    def setup(self):
      self.emb, self.enc = nn.Embed(5, 8), nn.Dense(8)

    def encode(self, x):
      return self.enc(self.emb(x))

    @nn.compact
    def __call__(self, x):
      return self.emb.attend(nn.RNN(nn.LSTMCell(8), name="rnn")(self.encode(x)))

  x = jnp.ones((1, 2), int)
  variables = jax.eval_shape(Net().init, jax.random.key(0), x)
  body = body_of(jax.make_jaxpr(jax.grad(lambda v: jnp.sum(Net().apply(v, x))))(variables))
  chosen = ["Net/emb", "Net/enc", "Net/rnn/LSTMCell_0/hi"]
  formats = {path: WIDE if path in chosen else HALF for path in modules_of(body)}
  rules = rules_for(formats, rule_paths_of(Graph(body)), HALF)
  for apply in (
    mpjax.with_policy(Net(), HALF, rules=rules, unmatched="raise").apply,
    mpjax.autocast(Net().apply, HALF, rules=rules),
  ):
    equations = programs.equations(jax.make_jaxpr(apply)(variables, x))
    matmuls = [eqn.outvars[0].aval.dtype for eqn, _ in equations if eqn.primitive.name == DOT]
    assert (matmuls.count("float32"), matmuls.count("bfloat16")) == (3, 7)
