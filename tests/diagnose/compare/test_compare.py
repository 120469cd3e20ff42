import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.errors import refused

LAYERS, WIDTH, AT = 5, 8, 3


def rounded(x):
  """Returns float32 numbers with the 8 bits of bfloat16, by casts, as an author writes them."""
  return x.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.fixture(scope="module")
def x():
  return jnp.asarray(np.random.default_rng(0).normal(size=(3, WIDTH)), jnp.float32)


class Block(nn.Module):
  rounds: bool

  @nn.compact
  def __call__(self, x):
    y = jnp.tanh(nn.Dense(WIDTH, name="up")(x))
    if self.rounds:
      y = rounded(y)
    return x + nn.Dense(WIDTH, name="down")(y)


class Net(nn.Module):
  at: int = -1

  @nn.compact
  def __call__(self, x):
    for i in range(LAYERS):
      x = Block(i == self.at, name=f"block_{i}")(x)
    return nn.Dense(2, name="head")(x)


def linen_loss(at):
  return lambda variables, x: jnp.mean(Net(at).apply(variables, x) ** 2)


class Layer(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.rounds = False

  def __call__(self, x):
    y = jnp.tanh(self.up(x))
    return x + (rounded(y) if self.rounds else y)


class Model(nnx.Module):
  def __init__(self):
    self.layers = nnx.List([Layer(nnx.Rngs(i)) for i in range(LAYERS)])

  def __call__(self, x, at):
    for i, layer in enumerate(self.layers):
      layer.rounds = i == at
      x = layer(x)
    return x


def nnx_loss(at):
  return lambda model, x: jnp.mean(model(x, at) ** 2)


def stack(at, scoped=True):
  """Returns a loss of plain layers, which are in scopes or on one line."""

  def layer(w, x, rounds):
    return rounded(jnp.tanh(x @ w)) if rounds else jnp.tanh(x @ w)

  def loss_fn(ws, x):
    for i, w in enumerate(ws):
      with jax.named_scope(f"layer_{i}" if scoped else ""):
        x = layer(w, x, i == at)
    return jnp.mean(x**2), {"last": x}

  return loss_fn


@pytest.fixture(scope="module")
def weights():
  return [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / 3 for i in range(LAYERS)]


@pytest.mark.slow
def test_a_planted_rounding_is_found_in_linen(x):
  variables = Net().init(jax.random.key(0), x)
  report = mpjax.compare(linen_loss(AT), linen_loss(-1))(variables, x)
  # The rounding is the block's own: what its second layer takes is wrong already.
  assert report.first.path == f"Net/block_{AT}"
  rows = {row.path: row for row in report.rows}
  assert all(rows[f"Net/block_{i}"].output == 0 for i in range(AT))
  assert rows[f"Net/block_{AT}/down"].inputs > 1e-4
  # The backward pass goes through all layers below.
  assert all(rows[f"Net/block_{i}"].cotangent > 1e-5 for i in range(AT))
  assert all(rows[f"Net/block_{i}/up"].gradient > 1e-5 for i in range(LAYERS))
  assert report.unmatched == ()
  assert mpjax.compare(linen_loss(-1))(variables, x).first is None


@pytest.mark.parametrize("scoped", [True, False])
def test_a_planted_rounding_is_found_in_a_function(x, weights, scoped):
  report = mpjax.compare(stack(AT, scoped), stack(-1, scoped))(weights, x)
  if scoped:
    assert (report.first.path, report.first.call) == (f"layer_{AT}", 0)
  else:  # Each layer is a call of the same line, and the rounding is of another one.
    assert report.first.path.startswith("test_compare.py:")
    assert report.first.call == AT + 1
    assert "They part before test_compare.py:" in str(report)
    assert len(report.unmatched) == 1


def relative(a, b):
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_errors_are_those_of_numpy_in_float64(x, weights):
  report = mpjax.compare(stack(AT), stack(-1))(weights, x)

  def forward(at):
    outputs, y = [], np.asarray(x, np.float64)
    for i, w in enumerate(weights):
      y = np.tanh(y @ np.asarray(w, np.float64))
      y = y.astype(ml_dtypes.bfloat16).astype(np.float64) if i == at else y
      outputs.append(y)
    return outputs

  def backward(outputs):
    """Returns the cotangents of the layers, and the gradients of their weights."""
    cotangent = 2 * outputs[-1] / outputs[-1].size
    cotangents, gradients = [cotangent], []
    for i in reversed(range(LAYERS)):
      before = outputs[i - 1] if i else np.asarray(x, np.float64)
      rounds = outputs[i].astype(ml_dtypes.bfloat16).astype(np.float64)
      if np.array_equal(rounds, outputs[i]):  # The transpose of a cast is one, too.
        cotangent = cotangent.astype(ml_dtypes.bfloat16).astype(np.float64)
        inside = np.tanh(before @ np.asarray(weights[i], np.float64))
      else:
        inside = outputs[i]
      slope = cotangent * (1 - inside**2)
      gradients.append(before.T @ slope)
      cotangent = slope @ np.asarray(weights[i], np.float64).T
      cotangents.append(cotangent)
    return cotangents[:LAYERS][::-1], gradients[::-1]

  outputs = forward(AT), forward(-1)
  (cotangents, gradients), (others, exact) = map(backward, outputs)
  for i, row in enumerate(report.rows[:LAYERS]):
    assert row.path == f"layer_{i}"
    if i < AT:
      assert row.output == 0
    else:
      assert row.output == pytest.approx(relative(outputs[0][i], outputs[1][i]), rel=1e-2)
    if i != AT:  # There the cotangent is that of the value before it was rounded.
      assert row.cotangent == pytest.approx(relative(cotangents[i], others[i]), rel=2e-2)
    assert row.gradient == pytest.approx(relative(gradients[i], exact[i]), rel=2e-2)
  assert report.results["result/1/last"] == report.rows[LAYERS - 1].output


@pytest.mark.slow
def test_a_policy_is_compared_with_float32(x, weights):
  variables = Net().init(jax.random.key(0), x)
  linen = mpjax.compare(linen_loss(-1), policy="mixed_bfloat16")(variables, x)
  by_hand = mpjax.with_policy(Net(), "mixed_bfloat16")
  other = mpjax.compare(lambda v, x: jnp.mean(by_hand.apply(v, x) ** 2), linen_loss(-1))
  assert linen.rows[:-1] == other(variables, x).rows  # The loss is on another line.
  assert linen.spacing == 2.0**-7
  assert linen.first is None
  assert 1e-4 < linen.rows[0].output < 0.1
  assert linen.names == ("<lambda> under mixed_bfloat16", "<lambda>")
  model = mpjax.compare(nnx_loss(-1), policy="mixed_float16")(Model(), x)
  assert 1e-5 < model.rows[0].output < 0.01
  function = mpjax.compare(stack(-1), policy="mixed_bfloat16")(weights, x)
  assert 1e-4 < function.rows[0].output < 0.1


def test_a_module_that_overflows_is_the_first(weights):
  def loss_fn(w, x):
    with jax.named_scope("safe"):
      y = x @ w
    with jax.named_scope("hot"):
      y = ((y * 3e3) @ w) / 3e3
    return jnp.mean(y**2)

  w, x = 9 * jnp.eye(8), 3 + jnp.arange(16.0).reshape(2, 8) / 16
  report = mpjax.compare(loss_fn, policy="mixed_float16")(w, x)
  assert (report.first.path, report.first.output) == ("hot", np.inf)
  assert "not finite" in str(report)


def test_functions_that_return_anything_have_no_gradients(x, weights):
  def fn(at):
    return lambda ws, x: stack(at)(ws, x)[1]["last"]

  report = mpjax.compare(fn(AT), fn(-1))(weights, x)
  assert report.first.path == f"layer_{AT}"
  assert all(np.isnan(row.cotangent) and np.isnan(row.gradient) for row in report.rows)
  assert "cotangent" not in str(report)


def test_integers_and_booleans_are_compared_by_the_share_that_differs():
  scores = jnp.asarray([[0.5, 0.501], [0.25, 1.0], [2.0, 1.0], [0.75, 0.751]])

  def decide(rounds):
    def fn(scores):
      scores = rounds(scores)
      return {"token": jnp.argmax(scores, -1), "mask": scores > 0.5, "rows": len(scores)}

    return fn

  report = mpjax.compare(decide(rounded), decide(lambda x: x))(scores)
  # In bfloat16 the scores of the first and of the last row are equal, and the first one wins.
  assert report.decisions == {"result/token": 0.5, "result/mask": 0.125}
  assert report.results == {}
  assert "that differ: result/mask 12.5 %, result/token 50.0 %." in " ".join(str(report).split())
  same = mpjax.compare(decide(rounded), decide(rounded))(scores)
  assert set(same.decisions.values()) == {0.0}
  assert "that differ" not in str(same)


def test_saved_runs_of_other_tokens_do_not_part_at_a_module(tmp_path):
  table = jax.random.normal(jax.random.key(0), (4, 3))

  def embed(tokens, key):
    with jax.named_scope("embed"):
      return jnp.tanh(table[tokens])

  for name, tokens in (("f", [0, 1, 2]), ("g", [0, 3, 2])):
    run = mpjax.compare(embed)(jnp.asarray(tokens, jnp.uint8), jax.random.key(0))
    run.save(tmp_path / name)
  report = mpjax.compare(tmp_path / "f", tmp_path / "g")()
  assert report.arguments == {"args[0]": 1 / 3}
  assert report.results["result"] > 0
  assert report.first is None


def test_a_step_that_differentiates_has_rows_of_its_backward_pass(x, weights):
  def step(at):
    loss_fn = stack(at)
    return lambda ws, x: jax.grad(loss_fn, has_aux=True)(ws, x)[0]

  report = mpjax.compare(step(AT), step(-1))(weights, x)
  assert report.first.path == f"layer_{AT}"
  rows = [row for row in report.rows if row.direction == "backward" and "layer" in row.path]
  assert [row.path for row in rows] == [f"layer_{i}" for i in reversed(range(LAYERS))]
  assert all(row.output > 1e-5 for row in rows)


def test_a_gradient_that_is_a_sum_of_0_is_no_fault(x):
  class Normed(nnx.Module):
    def __init__(self):
      self.dense = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
      self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
      return self.norm(self.dense(x))

  def step(model, x):
    return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

  report = mpjax.compare(step, policy="mixed_float16")(Normed(), x)
  assert report.first is None
  assert report.results["result/norm/bias"] > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_planted_rounding_is_found_in_two_models_in_half_precision(x, policy):
  # The error is less than 10 times the spacing of either dtype.
  f, g = (lambda model, x, at=at: model(x, at) for at in (AT, -1))
  report = mpjax.compare(f, g)(mpjax.with_policy(Model(), policy), x)
  assert report.first.path == f"layers/{AT}"
  assert 0 < report.first.output < 10 * report.spacing
  assert report.first.inputs == 0
  text = " ".join(str(report).split())
  assert f"They part at layers/{AT}: its inputs are equal to the bit" in text
  # The rounding of a policy, or of another dtype, is meant.
  assert mpjax.compare(nnx_loss(-1), policy=policy)(Model(), x).first is None


def test_losses_may_make_views_themselves(x):
  def loss_under(policy):
    return lambda model, x: jnp.mean(mpjax.with_policy(model, policy)(x, -1) ** 2)

  report = mpjax.compare(loss_under("mixed_bfloat16"), loss_under("float32"))(Model(), x)
  assert {row.path for row in report.rows} >= {"layers/0/up", "layers/4/up"}
  assert 0 < report.results["result"] < 0.01


def test_two_policies_round_each_in_its_way(x):
  model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
  f, g = (mpjax.with_policy(model, policy) for policy in ("mixed_bfloat16", "mixed_float16"))
  report = mpjax.compare(f, g)(jnp.tile(x, 2))
  assert report.rows[0].output > 0
  assert report.first is None


def test_a_function_with_a_policy_already_is_refused(x, weights):
  model = mpjax.with_policy(Model(), "mixed_float16")
  where = "mpjax.compare(f, policy=policy)(*args)"
  low = "a function in float32"
  with refused(ValueError, where, low, "float16 in layers/0", "the plain model"):
    mpjax.compare(nnx_loss(-1), policy="mixed_float16")(model, x)
  fn = mpjax.autocast(stack(-1), "mixed_bfloat16")
  with refused(ValueError, where, low, "bfloat16 in layer_0", "the plain model"):
    mpjax.compare(fn, policy="mixed_float16")(weights, x)


def test_a_function_that_rounds_itself_has_a_policy_too(x, weights):
  report = mpjax.compare(stack(AT), policy="mixed_float16")(weights, x)
  assert report.rows[0].output > 0


def test_a_gradient_of_0_in_the_reference_is_said(weights):
  def f(ws, x):
    with jax.named_scope("layer"):
      return jnp.mean((x @ ws[0]) ** 2)

  def g(ws, x):
    with jax.named_scope("layer"):
      return jnp.mean((x @ jax.lax.stop_gradient(ws[0])) ** 2)

  report = mpjax.compare(f, g)(weights[:1], jnp.ones((1, WIDTH)))
  (row,) = (row for row in report.rows if row.gradient == np.inf)
  assert row.zero_in_g == ("gradient",)
  assert "0 in g" in str(report)
  assert "not finite" not in str(report)


def test_functions_that_close_over_models_are_told_to_take_them(x):
  model = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
  advice = "Pass the model as an argument"
  assert advice in mpjax.compare(lambda x: jnp.mean(model(x)))(x).notes[0]
  assert mpjax.compare(lambda model, x: jnp.mean(model(x)))(model, x).notes == ()


def test_calls_are_counted_from_1_and_only_where_there_are_several(weights):
  def several(w, x):
    for _ in range(2):
      with jax.named_scope("twice"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("once"):
      return jnp.sum(x)

  report = mpjax.compare(several)(weights[0], jnp.ones((1, WIDTH)))
  assert [row.call for row in report.rows] == [0, 1, 0]
  labels = [line[:14].rstrip() for line in str(report).splitlines()[-3:]]
  assert labels == ["twice (call 1)", "twice (call 2)", "once"]


def test_a_model_is_a_function_too(x):
  model = nnx.Sequential(
    nnx.Linear(WIDTH, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 2, rngs=nnx.Rngs(1))
  )
  report = mpjax.compare(model, policy="mixed_bfloat16")(x)
  assert [row.path for row in report.rows] == ["layers/0", "layers/1"]
  assert 1e-4 < report.rows[1].output < 0.1


def test_a_gradient_that_does_not_exist_is_said(x, weights):
  def loss_fn(ws, x):
    with jax.named_scope("loop"):
      x = jax.lax.while_loop(lambda x: jnp.sum(x) < 1, lambda x: x @ ws[0] + 1, x)
    return jnp.mean(x)

  report = mpjax.compare(loss_fn)(weights, x)
  assert report.rows[0].path == "loop"
  assert "No gradients: ValueError" in report.notes[0]


def test_what_is_not_in_both_is_listed(x, weights):
  def f(ws, x):
    with jax.named_scope("layer_0"):
      x = jnp.tanh(x @ ws[0])
    with jax.named_scope("more"):
      return jnp.mean(x**2)

  def g(ws, x):
    with jax.named_scope("layer_0"):
      x = jnp.tanh(x @ ws[0])[:2]
    with jax.named_scope("other"):
      return jnp.mean(x**2)

  report = mpjax.compare(f, g)(weights, x)
  assert report.rows == ()
  assert report.unmatched == (
    "layer_0: its outputs have the shapes [3, 8] and [2, 8].",
    "more is only in f.",
    "other is only in g.",
  )
  assert "Not compared" in str(report)


def test_saved_runs_have_the_table_of_the_functions(tmp_path, x, weights):
  files = [tmp_path / "f.npz", tmp_path / "g.npz"]
  for at, file in zip((AT, -1), files, strict=True):
    mpjax.compare(stack(at))(weights, x).save(file)
  saved = mpjax.compare(*files)()
  here = mpjax.compare(stack(AT), stack(-1))(weights, x)
  assert repr(saved.rows) == repr(here.rows)
  assert str(saved).splitlines()[1:] == str(here).splitlines()[1:]
  assert saved.names == ("f.npz", "g.npz")
  with refused(TypeError, "mpjax.compare(saved_runs)(*args)", "no arguments", "too many", "()."):
    mpjax.compare(*files)(weights, x)
  other = mpjax.compare(stack(-1), str(files[1]))(weights, x + 0.1)
  assert other.arguments.keys() == {"args[1]"}
  assert "The arguments differ: args[1]" in str(other)
  assert other.first is None  # Other arguments are why.


def test_an_error_of_a_function_beside_a_saved_run_is_its_own(tmp_path, x, weights):
  def failing(weights, x):
    raise ValueError("of the function")

  file = tmp_path / "run.npz"
  mpjax.compare(stack(-1))(weights, x).save(file)
  compared = mpjax.compare(file, failing)
  assert repr(compared).startswith("<mpjax.compare(failing): ")
  with pytest.raises(ValueError, match="of the function"):
    compared(weights, x)
  with refused(TypeError, "mpjax.compare(failing)(*args)", "weights, x", "'x'", "(weights, x)"):
    compared(weights)


def test_wrong_calls(tmp_path, x, weights):
  loss_fn = stack(-1)
  function = "a function of arrays, or the file"
  with refused(TypeError, "mpjax.compare(f)", function, "3", "mpjax.compare(f, g)"):
    mpjax.compare(3)
  with refused(TypeError, "mpjax.compare(g)", function, "3", "mpjax.compare(f, g)"):
    mpjax.compare(loss_fn, 3)
  either = "either a policy or g"
  with refused(ValueError, "mpjax.compare(f, policy=", either, "both", "Leave out g"):
    mpjax.compare(loss_fn, loss_fn, policy="mixed_bfloat16")
  with refused(ValueError, "mpjax.compare(f, policy=", either, "the file 'run.npz'", "Leave"):
    mpjax.compare("run.npz", policy="mixed_bfloat16")
  with refused(TypeError, "mpjax.compare(f, g)", "concrete", "traced", "outside of jax.jit"):
    jax.jit(mpjax.compare(loss_fn))(weights, x)
  np.savez(tmp_path / "other.npz", x=np.ones(2))
  with refused(ValueError, "mpjax.compare(path)", "CompareReport.save", "other.npz", "Write"):
    mpjax.compare(loss_fn, tmp_path / "other.npz")(weights, x)


def test_a_function_in_int8_is_compared():
  # The spacing is a step of the largest number, 127.
  w, x = np.eye(32, dtype=np.float32), np.ones((16, 32), np.float32)
  report = mpjax.compare(lambda w, x: jnp.mean((x @ w) ** 2), policy="mixed_int8")(w, x)
  assert report.spacing == 1 / 127
