import math
import re
import textwrap

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.errors import refused
from tests.models.values import normal

CALL = "mpjax.sensitivity(fn)(*args)"


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(4, name="head")(nn.gelu(nn.Dense(16, name="up")(x)))


X = normal(8, 8)
NET = mpjax.with_policy(Net(), "mixed_bfloat16")
PARAMS = Net().init(jax.random.key(0), X)["params"]


def loss(params, x, model=NET):
  return jnp.mean(model.apply({"params": params}, x) ** 2)


def step(params, opt_state, x):
  tx = mpjax.loss_scaling(optax.sgd(1e-3, momentum=0.9))
  value, grads = jax.value_and_grad(mpjax.scaled(loss, opt_state))(params, x)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, value


STATE = mpjax.loss_scaling(optax.sgd(1e-3, momentum=0.9)).init(PARAMS)


def residual(x, model=NET):
  return x + jnp.tile(model.apply({"params": PARAMS}, x), 2)


def physics_loss(params, x):
  """Has a gradient inside."""
  slopes = jax.grad(lambda x: jnp.sum(NET.apply({"params": params}, x)))(x)
  return jnp.mean((slopes - 1) ** 2)


KINDS = {
  "model": (NET.apply, ({"params": PARAMS}, X), "result"),
  "residual model": (residual, (X,), "result"),
  "loss with a gradient inside": (physics_loss, (PARAMS, X), "gradient"),
  "loss": (loss, (PARAMS, X), "gradient"),
  "gradient": (jax.grad(loss), (PARAMS, X), "result"),
  "step": (step, (PARAMS, STATE, X), "update"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("fn", "args", "of"), KINDS.values(), ids=KINDS)
def test_a_healthy_model_needs_no_cure(fn, args, of):
  report = mpjax.sensitivity(fn)(*args)
  assert (report.of, report.cures, report.not_followed) == (of, (), ())
  assert 1e-4 < report.predicted < 0.02
  assert 0.5 < report.predicted / report.measured < 2
  assert report.roundings[0].amplification < 3
  assert "nothing to do" in str(report)


@pytest.mark.slow
def test_the_measured_error_is_that_of_the_function_itself():
  report = mpjax.sensitivity(loss)(PARAMS, X)
  exact, low = (
    jax.tree.leaves(jax.grad(lambda p, model=model: loss(p, X, model))(PARAMS))
    for model in (Net(), NET)
  )
  difference = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(exact, low, strict=True))
  norm = sum(float(jnp.sum(a**2)) for a in exact)
  assert report.measured == pytest.approx(math.sqrt(difference / norm), rel=0.05)
  for a, b in zip(exact, report.exact, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_modules_are_named_and_contributions_add_as_squares():
  report = mpjax.sensitivity(loss)(PARAMS, X)
  assert {row.path for row in report.roundings} <= {"Net", "Net/up", "Net/head"}
  total = math.hypot(*(row.contribution for row in report.roundings))
  assert total == pytest.approx(report.predicted, rel=1e-6)
  assert [row.contribution for row in report.roundings] == sorted(
    (row.contribution for row in report.roundings), reverse=True
  )


class Cancels(nn.Module):
  """The head computes a difference of nearly equal numbers, in a layer of Flax."""

  @nn.compact
  def __call__(self, x):
    y = nn.Dense(8, name="up", kernel_init=nn.initializers.constant(1.0))(x)
    z = nn.Dense(8, name="far", bias_init=nn.initializers.constant(300.0))(y)
    return nn.Dense(4, name="head")(z - 300)


def gradient_error(model, low, params):
  def fn(model):
    return jax.tree.leaves(jax.grad(lambda p: jnp.sum(model.apply(p, X) ** 2))(params))

  pairs = [*zip(fn(model), fn(low), strict=True)]
  difference = sum(float(jnp.sum((a - b) ** 2)) for a, b in pairs)
  return math.sqrt(difference / sum(float(jnp.sum(a**2)) for a, _ in pairs))


@pytest.mark.slow
def test_the_rule_that_cures_a_flax_layer_has_the_error_that_was_promised():
  params = Cancels().init(jax.random.key(0), X)
  low = mpjax.with_policy(Cancels(), "mixed_bfloat16")
  report = mpjax.sensitivity(lambda p: jnp.sum(low.apply(p, X) ** 2))(params)
  before = gradient_error(Cancels(), low, params)
  assert report.roundings[0].path == "Cancels/far"
  assert report.roundings[0].amplification > 8
  rules = [eval(code, {"mpjax": mpjax}) for code in report.cures if code.startswith("mpjax.Rule")]
  assert rules
  cured = mpjax.with_policy(Cancels(), "mixed_bfloat16", rules)
  after = gradient_error(Cancels(), cured, params)
  assert after < before / 4
  assert 0.5 < report.measured_with_cures / after < 2
  assert 0.5 < report.predicted_with_cures / after < 2


def cures_of_layers(large):
  """The cures of a model with a layer for each angle, which is large or not."""

  class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
      for i, is_large in enumerate(large):
        y = nn.Dense(8, name=f"angle_{i}")(x)
        x = x + jnp.sin(100 * y if is_large else y)
      return x

  x = normal(4, 8)
  params = Layers().init(jax.random.key(0), x)
  model = mpjax.with_policy(Layers(), "mixed_bfloat16")
  return mpjax.sensitivity(lambda p: jnp.sum(model.apply(p, x)))(params).cures


@pytest.mark.slow
@pytest.mark.parametrize(
  ("large", "paths"),
  [((1, 1, 0, 0), ["angle_*"]), ((1, 0, 0, 0), ["angle_0"])],
  ids=["half", "fewer"],
)
def test_layers_of_a_kind_share_a_rule_if_half_of_them_need_it(large, paths):
  rules = [eval(code, {"mpjax": mpjax}) for code in cures_of_layers(large) if "Rule(" in code]
  assert [rule.path for rule in rules] == paths


@pytest.mark.slow
def test_roundings_that_are_small_alone_are_cured_as_a_row():
  weights = [normal(8, 8, seed=i) for i in range(9)]

  def angles(weights, x):
    return sum([jnp.sum(jnp.sin(2.5 * (x @ w))) for w in weights])

  report = mpjax.sensitivity(angles, "mixed_bfloat16")(weights, normal(4, 8))
  # No cast or matmul alone has more than 7.5.
  assert report.roundings[0].amplification > 8
  assert report.roundings[0].cure == report.cures[0]


def test_low_precision_that_nothing_reads_is_none():
  def fn(x):
    x.astype(jnp.bfloat16)
    return 2 * x

  with refused(ValueError, CALL, "low precision", "without a value", "policy="):
    mpjax.sensitivity(fn)(normal(4))


def test_a_policy_that_keeps_a_function_in_float32_makes_no_error():
  report = mpjax.sensitivity(mpjax.autocast(lambda x: jnp.sum(jnp.exp(x))))(normal(4))
  assert (report.predicted, report.measured, report.roundings, report.cures) == (0, 0, (), ())


# Each case is a function, the line of the culprit, and the arguments.
CASES = {
  "angle": ("angle = x @ w\nreturn jnp.sum(jnp.sin(40 * angle))", "angle = x @ w"),
  "orthogonality": ("gram = w.T @ w\nreturn jnp.sum((gram - jnp.eye(8)) ** 2)", "gram"),
  "stencil": ("y = x @ w\nz = y @ SECOND\nreturn jnp.sum(z**2)", "z = y @ SECOND"),
  "guard": (
    "y = x @ w\nz = jnp.maximum(y, 1 + 1e-6)\nreturn jnp.sum(jnp.arccosh(z))",
    "z = jnp.maximum",
  ),
}

SECOND = ((jnp.eye(8, k=1) - 2 * jnp.eye(8) + jnp.eye(8, k=-1)) * 64)[:, 1:-1]
ORTHOGONAL = jnp.linalg.qr(normal(8, 8))[0] + 1e-3 * normal(8, 8, seed=1)
SMOOTH = jnp.sin(jnp.arange(8.0)[:, None] / 8 + jnp.arange(8.0) / 8)


def written(tmp_path, body, name):
  """Returns a function from a file, whose lines a report can show and cures can change."""
  path = tmp_path / f"{name}.py"
  path.write_text(f"def fn(w, x):\n{textwrap.indent(body, '  ')}\n")
  names = {"jnp": jnp, "mpjax": mpjax, "SECOND": SECOND}
  exec(compile(path.read_text(), str(path), "exec"), names)
  return names["fn"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_obeying_the_cure_brings_the_error_to_the_promised_one(tmp_path, name):
  body, culprit = CASES[name]
  weights = {"orthogonality": ORTHOGONAL, "stencil": jnp.eye(8) + 1e-3 * normal(8, 8)}
  args = weights.get(name, normal(8, 8) / 2), SMOOTH
  fn = written(tmp_path, body, name)
  report = mpjax.sensitivity(mpjax.autocast(fn))(*args)
  lines = body.splitlines()
  assert report.cures
  for code in report.cures:
    target = code.split(" = ")[0] if " = " in code else "return"
    (i,) = [i for i, line in enumerate(lines) if line.startswith(target)]
    lines[i] = code
  assert any(line != old for line, old in zip(lines, body.splitlines(), strict=True))
  changed = [i for i, line in enumerate(body.splitlines()) if line.startswith(culprit)]
  assert all("full_precision" in lines[i] for i in changed)
  cured = written(tmp_path, "\n".join(lines), f"{name}_cured")
  exact, before, after = (
    np.asarray(jax.grad(f)(*args)) for f in (fn, mpjax.autocast(fn), mpjax.autocast(cured))
  )
  errors = [float(np.linalg.norm(x - exact) / np.linalg.norm(exact)) for x in (before, after)]
  assert errors[1] < 0.2 * errors[0] or not np.isfinite(errors[0])
  promised = max(report.predicted_with_cures, report.measured_with_cures)
  assert errors[1] <= 2 * promised + 1e-6


@pytest.mark.slow
def test_overflow_comes_first_and_is_cured():
  class Hot(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(8, name="hot", kernel_init=nn.initializers.constant(1e5))(x)
      return nn.Dense(4, name="head")(x / 1e5)

  params = Hot().init(jax.random.key(0), X)
  low = mpjax.with_policy(Hot(), "mixed_float16")
  report = mpjax.sensitivity(low.apply)(params, X)
  assert report.roundings[0].overflows
  assert report.measured == math.inf
  assert math.isfinite(report.measured_with_cures)
  assert "Values overflow" in str(report)
  rules = [eval(code, {"mpjax": mpjax}) for code in report.cures]
  cured = mpjax.with_policy(Hot(), "mixed_float16", rules)
  assert jnp.all(jnp.isfinite(cured.apply(params, X)))


class NNXNet(nnx.Module):
  def __init__(self, rngs):
    self.up, self.head = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

  def __call__(self, x):
    return self.head(nnx.gelu(self.up(x)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_arguments_may_be_passed_by_name(policy):
  def of_product(w, *, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

  found = mpjax.sensitivity(of_product, policy)(X, x=X)
  expected = mpjax.sensitivity(lambda w, x: of_product(w, x=x), policy)(X, X)
  assert (found.of, found.predicted) == ("gradient", expected.predicted)


@pytest.mark.slow
def test_a_plain_model_gets_the_policy_and_float16_a_loss_scale():
  model = NNXNet(nnx.Rngs(0))

  def tiny(model, x):
    return 1e-6 * jnp.mean(model(x) ** 2)

  report = mpjax.sensitivity(tiny, policy="mixed_float16")(model, X)
  assert report.of == "gradient"
  assert {row.path for row in report.roundings} >= {"up", "head"}
  assert 1e-5 < report.predicted < 3e-3
  assert mpjax.sensitivity(jnp.dot, policy="mixed_bfloat16")(X, X).predicted > 1e-4


@pytest.mark.slow
def test_a_step_that_writes_to_a_model_has_errors_of_its_update():
  model = NNXNet(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.loss_scaling(optax.sgd(1e-3)), wrt=nnx.Param)

  def nnx_step(model, optimizer, x):
    view = mpjax.with_policy(model, "mixed_bfloat16")
    scaled = mpjax.scaled(lambda view, x: jnp.mean(view(x) ** 2), optimizer)
    optimizer.update(model, nnx.grad(scaled)(view, x))

  report = mpjax.sensitivity(nnx_step)(model, optimizer, X)
  assert report.of == "update"
  assert 1e-4 < report.predicted < 0.05
  assert 0.5 < report.predicted / report.measured < 2


@pytest.mark.slow
def test_averages_of_a_step_hide_no_error_of_its_parameters():
  def step(params, average, x):
    @mpjax.autocast
    def angles(params):
      return jnp.mean(jnp.sin(40 * (x @ params)))

    # The average is larger than an update, and is exact.
    return params - 1e-3 * jax.grad(angles)(params), 0.9 * average + 100 * jnp.mean(x, 0)

  params = normal(8, 8)
  exact = jax.grad(lambda params: jnp.mean(jnp.sin(40 * (X @ params))))(params)
  report = mpjax.sensitivity(step)(params, jnp.ones(8), X)
  assert report.of == "update"
  (update,) = report.exact
  low = step(params, jnp.ones(8), X)[0] - params
  error = np.linalg.norm(low + 1e-3 * exact) / np.linalg.norm(1e-3 * exact)
  assert report.measured == pytest.approx(error, rel=0.5)
  assert error > 0.05
  np.testing.assert_allclose(update, params - 1e-3 * exact, rtol=1e-5)


@pytest.mark.slow
def test_an_average_of_parameters_is_no_update_though_it_has_their_tree():
  def step(average, params, x):
    loss = lambda params: jnp.mean(mpjax.autocast(jnp.dot)(x, params["w"]) ** 2)  # noqa: E731
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
    return jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), params

  average, params = {"w": normal(8, 8)}, {"w": normal(8, 8) + 1}
  report = mpjax.sensitivity(step)(average, params, X)
  assert report.of == "update"
  (update,) = report.exact
  np.testing.assert_allclose(update, step(average, params, X)[1]["w"], rtol=0.02)


@pytest.mark.slow
def test_text_json_and_html():
  report = mpjax.sensitivity(loss)(PARAMS, X)
  text = str(report)
  assert max(map(len, text.splitlines())) <= 80
  assert re.search(r"The gradient of loss has a relative error of 0\.00\d+", text)
  assert report.as_dict()["of"] == "gradient"
  assert "exact" not in report.as_dict()
  assert '"predicted"' in report.to_json()
  assert "Roundings by their contribution" in report._repr_html_()


def test_nothing_in_low_precision_and_results_that_are_not_finite():
  with refused(ValueError, CALL, "low precision", "without a value", "policy="):
    mpjax.sensitivity(jnp.dot)(X, X)
  with refused(ValueError, CALL, "finite in float32", "inf or NaN", "find_nonfinite"):
    mpjax.sensitivity(mpjax.autocast(lambda w, x: jnp.log(-jnp.abs(x @ w))))(X, X)
  with refused(ValueError, CALL, "a function in float32", "bfloat16", "the plain model"):
    mpjax.sensitivity(NET.apply, policy="mixed_float16")({"params": PARAMS}, X)


@pytest.mark.parametrize(
  ("fn", "got"),
  [
    (lambda w, x: jnp.argmax(x @ w, -1), "no floating result"),
    (lambda w, x: x[:0] @ w, "no floating result"),
    (lambda w, x: 0 * (x @ w), "only zeros"),
    (lambda w, x: w - 0 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "only zeros"),
  ],
  ids=["integers", "empty", "zeros", "no update"],
)
def test_nothing_is_an_error_relative_to_zeros(fn, got):
  with refused(ValueError, CALL, "that is not zero", got, "Return the numbers"):
    mpjax.sensitivity(fn, policy="mixed_bfloat16")(X, X)
