"""Every planted leak is found, where it is and why, and nothing else is a leak."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.autocast.programs import PROGRAMS
from tests.diagnose.planted_leaks import LEAKS, TABLE
from tests.models.catalogue import MODELS
from tests.models.papers import PAPERS
from tests.models.values import filled, normal, shapes
from tests.nnx import zoo

pytestmark = pytest.mark.standard_promotion

X = jax.ShapeDtypeStruct((16, 8), "bfloat16")


def assert_no_leak(fn, *args):
  audit = mpjax.audit(fn)(*args)
  assert audit.leaks == ()
  assert audit.half_share == 1


CAST = "Cast it where it is used: .astype(jnp.bfloat16)."
FIXES = {
  **dict.fromkeys(("argument", "constant", "filled"), CAST),
  "number": "Make it a Python number, float(...), which does not promote arrays.",
  "parameter": "Cast it, .astype(jnp.bfloat16), or give its layer dtype=jnp.bfloat16.",
}
REASONS = {
  "number": "of the float32 scalar {}",
  "cast": "of a cast to float32",
  **dict.fromkeys(("parameter", "argument", "constant", "filled"), "of {} ("),
}


@pytest.mark.parametrize("name", LEAKS)
def test_a_planted_leak_is_found_where_it_is_and_why(name):
  planted = LEAKS[name]
  fn, args = planted.make()
  (leak,) = mpjax.audit(fn)(*args).leaks
  assert (leak.operation, leak.kind) == (planted.operation, planted.kind)
  assert leak.path.endswith(planted.path)
  assert planted.name in leak.cause
  assert leak.reason.startswith(REASONS.get(planted.kind, leak.cause).format(leak.cause))
  assert leak.source is not None
  assert leak.source.file.endswith("planted_leaks.py")
  assert leak.source.line == planted.line
  assert leak.nbytes > 0
  assert leak.fix == FIXES.get(planted.kind, leak.fix) != ""


def promoting_dense(x, w, dtype):
  return nn.Dense(8, use_bias=False, dtype=dtype).apply({"params": {"kernel": w}}, x)


CURES = {
  FIXES["number"]: (
    lambda h, w: h / np.sqrt(np.float32(8)),
    lambda h, w: h / float(np.sqrt(np.float32(8))),
  ),
  CAST: (
    lambda h, w: h + TABLE,
    lambda h, w: h + TABLE.astype(jnp.bfloat16),
  ),
  "Cast the result back where float32 is no longer needed: .astype(jnp.bfloat16).": (
    lambda h, w: jnp.tanh(h.astype("float32")),
    lambda h, w: jnp.tanh(h.astype("float32")).astype(jnp.bfloat16),
  ),
  "It asks for preferred_element_type=float32: cast its result, .astype(jnp.bfloat16).": (
    lambda h, w: jnp.dot(h, w, preferred_element_type="float32"),
    lambda h, w: jnp.dot(h, w, preferred_element_type="float32").astype(jnp.bfloat16),
  ),
  "That call casts its operands: give it dtype=jnp.bfloat16, or operands of one dtype.": (
    lambda h, w: promoting_dense(h, w, dtype="float32").astype(jnp.bfloat16),
    lambda h, w: promoting_dense(h, w, dtype=jnp.bfloat16),
  ),
  "Cast the operands of that add: .astype(jnp.bfloat16).": (
    lambda h, w: h + jnp.sin(jnp.arange(8.0) * 99),  # The angles themselves bfloat16 rounds by 2.
    lambda h, w: h + jnp.sin(jnp.arange(8.0) * 99).astype(jnp.bfloat16),
  ),
}


@pytest.mark.parametrize("fix", CURES)
def test_each_cure_ends_its_leak_and_costs_no_more_than_low_precision(fix):
  x, w = normal(16, 8), normal(8, 8, seed=1) / 8**0.5
  half = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)

  def fn(x, w, op):
    return op(jnp.tanh(x @ w), w) @ w

  leaky, cured = (functools.partial(fn, op=op) for op in CURES[fix])
  (leak,) = mpjax.audit(leaky)(*half).leaks
  assert leak.fix == fix
  assert leak.reason.startswith(REASONS.get(leak.kind, leak.cause).format(leak.cause))
  assert_no_leak(cured, *half)
  exact = np.asarray(leaky(x, w), np.float32)
  error = np.abs(np.asarray(cured(*half), np.float32) - exact).max()
  assert error < 0.03 * np.abs(exact).max()


def test_a_parameter_whose_layer_has_the_dtype_is_no_leak():
  x = X.update(shape=(16, 8))

  def head(dtype):
    return lambda params, x: nn.Dense(8, dtype=dtype).apply({"params": params}, x)

  params = jax.eval_shape(nn.Dense(8).init, jax.random.key(0), x)["params"]
  (leak,) = mpjax.audit(head(None))(params, x).leaks
  assert leak.fix == FIXES["parameter"]
  audit = mpjax.audit(head(jnp.bfloat16))(params, x)
  assert (audit.half_share, audit.leaks) == (1, ())


def test_numbers_and_two_low_precisions_are_no_leak_under_autocast():
  """A float64 of NumPy is one by hand, as a float32 is, and a Python number is none."""

  def scaled(divisor):
    return lambda q, k: (q @ k.T / divisor) @ k

  (leak,) = mpjax.audit(scaled(np.sqrt(64)))(X, X).leaks
  assert (leak.kind, leak.cause, leak.operation) == ("number", "8.0", "div")
  assert leak.reason.endswith(str(leak.source))
  assert mpjax.audit(scaled(8.0))(X, X).leaks == ()
  for divisor in (np.sqrt(64), np.float32(8)):
    assert_no_leak(mpjax.autocast(scaled(divisor)), WIDE, WIDE)
  args = X, X.update(dtype="float16"), X.update(shape=(8, 8))
  assert_no_leak(mpjax.autocast(lambda x, other, w: (x * 2 + other) @ w), *args)


PUBLISHED = [
  *(f"linen/{name}" for name in (*PAPERS, "resnet", "bert", "optimized_lstm_rnn")),
  *(f"nnx/{name}" for name in zoo.MODELS),
  *(f"function/{name}" for name, made in PROGRAMS.items() if made.backward),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_no_false_leak_in_published_models_and_plain_functions(name):
  model = MODELS[name]
  call = model.call(model.ways[0], "mixed_float16")
  audit = mpjax.audit(jax.grad(lambda *args: jnp.sum(jax.tree.leaves(call(*args)[0])[0])))
  found = audit(*model.arguments())
  assert found.leaks == ()
  if not name.startswith("function/"):  # A function may ask for float32 itself.
    assert {x.reason for x in found.on_purpose} <= {"it sums fewer than 8 products of an input"}


def softmax_and_norm_by_hand(x, w):
  def norm(x):
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled.astype(x.dtype)

  logits = norm(x @ w) @ w
  return jax.nn.softmax(logits.astype(jnp.float32)).astype(x.dtype) @ w


def test_what_is_cast_up_and_back_by_hand_is_no_leak():
  w = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  assert mpjax.audit(softmax_and_norm_by_hand)(X, w).leaks == ()

  def loss(w, x):
    return softmax_and_norm_by_hand(x, w).astype(jnp.float32).sum()

  assert mpjax.audit(jax.grad(loss))(w, X).leaks == ()


def test_what_meets_statistics_of_a_norm_is_float32_anyway():
  def fn(x, w):
    h = x @ w
    wide = h * np.float32(0.5)
    scale = jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True, dtype=jnp.float32))
    return (wide * scale).astype(x.dtype) @ w

  assert_no_leak(fn, X, jax.ShapeDtypeStruct((8, 8), "bfloat16"))


def test_a_cast_up_is_a_leak_where_it_makes_something_else_float32():
  w = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  audit = mpjax.audit(lambda x, y, w: (x.astype("float32") + y).astype(x.dtype) @ w)
  for y, kind in ((X, "cast"), (WIDE, "argument")):
    assert [leak.kind for leak in audit(X, y, w).leaks] == [kind]
  both = mpjax.audit(lambda x, w: (x.astype("float32") + x.astype("float32")).astype(x.dtype) @ w)
  assert both(X, w).leaks == ()


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x):
    for norm in (nn.BatchNorm(use_running_average=True), nn.LayerNorm(), nn.RMSNorm()):
      x = norm(nn.Dense(8)(x))
    x = jnp.concatenate([self.param("cls", nn.initializers.ones, (16, 8)), nn.Dense(8)(x)])
    return nn.Dense(4)(x)


def test_no_false_leak_in_a_function_that_initializes():
  model = mpjax.linen.with_policy(Normed(), "mixed_bfloat16")
  # The forward pass of `init` runs in float32, and nothing reads its results.
  assert_no_leak(lambda key, x: model.apply(model.init(key, x), x), jax.random.key(0), X)


def test_no_false_leak_in_norms_with_statistics_of_training():
  x = jnp.ones((16, 8))
  variables = filled(shapes(Normed(), x))
  model = mpjax.linen.with_policy(Normed(), "mixed_bfloat16")
  stats, learned = variables["batch_stats"], variables["params"]
  assert_no_leak(lambda v, x: model.apply(v, x), variables, x)
  # Parameters are that in a tree of any name.
  assert_no_leak(lambda p, x: model.apply({"params": p, "batch_stats": stats}, x), learned, x)
  assert_no_leak(model.bind(variables), x)


WIDE = jax.ShapeDtypeStruct((16, 8), "float32")


def test_a_batch_in_float64_is_a_leak(set_flag):
  set_flag("jax_enable_x64", True)
  fast = mpjax.autocast(lambda w, x: w.astype(x.dtype) @ x)
  x = jax.ShapeDtypeStruct((8, 16), "float64")
  (leak,) = mpjax.audit(fast)(X.update(shape=(8, 8), dtype="float32"), x).leaks
  assert (leak.cause, leak.fix) == ("x", "No policy casts float64: cast the batch to float32.")
  assert_no_leak(fast, X.update(shape=(8, 8), dtype="float32"), x.update(dtype="float32"))


def test_leaks_come_the_costliest_first():
  def fn(x, w, a, b):
    h = (x @ w + a) @ w
    h = h.astype(jnp.bfloat16) + b
    return (h @ w) @ w

  w = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  first, second = mpjax.audit(fn)(X, w, WIDE, WIDE).leaks
  assert (first.cause, first.flops) == ("b", 2 * 2 * 16 * 8 * 8)
  assert (second.cause, second.flops) == ("a", 2 * 16 * 8 * 8)


def test_work_in_both_passes_counts_to_the_leak_of_the_forward_pass():
  def loss(w, x, table):
    return jnp.sum(((x @ w + table) @ w).astype(jnp.float32))

  w = jax.ShapeDtypeStruct((8, 8), "bfloat16")
  (leak,) = mpjax.audit(jax.value_and_grad(loss))(w, X, WIDE).leaks
  # Of the second matmul: the forward pass, and the gradients of both its operands.
  assert leak.direction == "forward"
  assert leak.flops == 3 * 2 * 16 * 8 * 8


def test_the_operations_of_one_line_are_one_leak():
  def fn(x, angles):
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * angles, b * angles], -1) @ jnp.ones((16, 16), jnp.bfloat16)

  angles = jax.ShapeDtypeStruct((8, 8), jnp.float32)
  (leak,) = mpjax.audit(fn)(jax.ShapeDtypeStruct((8, 16), jnp.bfloat16), angles).leaks
  assert (leak.operation, leak.cause) == ("mul", "angles")
  # What follows before a matmul, and that, are part of it: an add, a tanh and a matmul.
  (leak,) = mpjax.audit(lambda x, y: jnp.tanh(x + y) @ x.T)(X, WIDE).leaks
  assert (leak.operation, leak.times) == ("add", 3)


class Rotated(nn.Module):
  """Attention's scores of queries and keys that are turned by their positions (RoPE)."""

  interleaved: bool

  @nn.compact
  def __call__(self, x):
    angles = jnp.arange(64.0)[:, None] / 10000 ** (jnp.arange(8) / 8)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    q, k = (self.turned(nn.Dense(16, name=name)(x), cos, sin) for name in "qk")
    return nn.softmax(q @ k.T)

  def turned(self, x, cos, sin):
    a, b = (x[:, ::2], x[:, 1::2]) if self.interleaved else jnp.split(x, 2, -1)
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_positions_that_turn_queries_are_no_leak(interleaved):
  model, x = Rotated(interleaved), normal(64, 8)
  params = model.init(jax.random.key(0), x)
  for apply in (
    mpjax.linen.with_policy(model, "mixed_bfloat16").apply,
    mpjax.autocast(model.apply),
  ):
    assert_no_leak(jax.grad(lambda p, apply=apply: jnp.sum(apply(p, x) ** 2)), params)
