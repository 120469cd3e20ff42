"""Casts that a jaxpr has already, and sums of derivatives, which are in float32."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import mpjax
from mpjax._autocast import at_rest, leaving
from tests import programs
from tests.autocast import checks
from tests.autocast.rig import BOTH, rewritten

X = jnp.ones((2, 3))
W = jnp.ones((3, 3))


cast = functools.partial(rewritten, results=lambda out: out)


def result(fun):
  return jax.eval_shape(cast(fun), X, W).dtype


def test_a_padded_array_keeps_its_dtype():
  # `jnp.pad` passes the number to its jitted body as an integer.
  assert result(lambda x, w: jnp.pad(x @ w, 1)) == jnp.bfloat16
  assert result(lambda x, w: jnp.pad(x @ w, 1, constant_values=-jnp.inf)) == jnp.bfloat16
  assert result(lambda x, w: jnp.pad(jnp.exp(x), 1)) == jnp.float32
  padded = jnp.pad(X @ W, 1, constant_values=2.5)
  assert np.array_equal(cast(lambda x, w: jnp.pad(x @ w, 1, constant_values=2.5))(X, W), padded)


def test_what_leaves_a_module_has_its_dtype_for_its_readers_and_is_cast_once():
  for dtype in ("float32", "bfloat16"):
    assert result(lambda x, w: leaving(x @ w, jnp.dtype(dtype)) + 1) == dtype  # noqa: B023
  for fun, dtype, casts in (
    (lambda left, x, w: left(x @ w), "bfloat16", {"float32->bfloat16": 2}),
    # What is read in float32 is rounded, too, and what is low is not cast there and back.
    (
      lambda left, x, w: jnp.exp(left(jnp.exp(x))),
      "bfloat16",
      {"float32->bfloat16": 1, "bfloat16->float32": 1},
    ),
    (lambda left, x, w: left(jax.nn.relu(x @ w)) @ w, "float32", {"float32->bfloat16": 3}),
  ):
    left = functools.partial(leaving, dtype=jnp.dtype(dtype))
    program = jax.make_jaxpr(cast(functools.partial(fun, left)))(X, W)
    assert programs.converts(program) == casts


def test_the_result_of_a_layer_is_rounded_unless_it_leaves_in_float32():
  # Of a parameter alone, and of a parameter into which something low is written.
  for layer in (lambda x, w: x / 3, lambda x, w: x.at[0].set((x @ w)[0])):
    read = jax.make_jaxpr(cast(lambda x, w: jnp.tanh(at_rest(layer(x, w), "bfloat16"))))(X, W)  # noqa: B023
    assert programs.dtypes_of(read, "tanh") == {"bfloat16"}
  left = lambda x, w: leaving(at_rest((x @ w) / 3, "bfloat16"), jnp.dtype("float32"))  # noqa: E731
  # Of the operands of the matmul, and of what it returns.
  found = programs.converts(jax.make_jaxpr(cast(left))(X, W))
  assert found == {"float32->bfloat16": 2, "bfloat16->float32": 1}


@pytest.mark.parametrize("number", [0.0, 1.5])
def test_an_array_of_one_number_is_made_in_the_dtype_that_it_is_read_in(number):
  def fun(x, w):
    y = x @ w
    return jax.lax.select(y > 0, y, jnp.full_like(y, number))

  program = jax.make_jaxpr(cast(fun))(X, W)
  assert programs.converts(program) == {"float32->bfloat16": 2}  # The operands of the matmul.
  y = np.asarray(cast(jnp.matmul)(X, W), np.float32)
  np.testing.assert_array_equal(cast(fun)(X, W), np.where(y > 0, y, np.float32(number)))


# What is added up in a derivative is added up in float32.

ROWS = 4096
EYE = jnp.eye(3)
ONES = jnp.ones((ROWS, 3))


def added_in_half(fun, *args):
  # Returns the sums of low-precision numbers in a jaxpr: what JAX refuses, and other sums.
  with jax.allow_f16_reductions(False):
    return checks.sums(jax.make_jaxpr(fun)(*args))


def check_gradients(losses, half, *args):
  # Compares gradients with those in float32, where every term and every partial sum is exact.
  casts = {name: jax.grad(mpjax.autocast(fun, half)) for name, fun in losses.items()}
  for name, fun in casts.items():
    assert added_in_half(fun, *args) == [], name

  def each(*args):
    return {name: [fun(*args), jax.grad(losses[name])(*args)] for name, fun in casts.items()}

  for name, (found, wanted) in programs.run(each, *args).items():
    np.testing.assert_allclose(found, wanted, rtol=float(jnp.finfo(half).eps), err_msg=name)


# What is added up in a program.

COUNT = 5000
ADDED = {
  # Of ones that a matmul returned: bfloat16 counts to 256, float16 to 2048.
  "sum": lambda ones, zeros: ones.sum(),
  "mean": lambda ones, zeros: ones.mean() * COUNT,
  "cumsum": lambda ones, zeros: jnp.cumsum(ones)[-1],
  "scan": lambda ones, zeros: lax.scan(lambda c, x: (c + x, None), 0.0, ones)[0],
  "fori": lambda ones, zeros: lax.fori_loop(0, COUNT, lambda i, c: c + ones[i], 0.0),
  "while": lambda ones, zeros: lax.while_loop(
    lambda s: s[0] < COUNT, lambda s: (s[0] + 1, s[1] + ones[s[0]]), (0, 0.0)
  )[1],
  "scatter-add": lambda ones, zeros: jnp.zeros(3).at[zeros].add(ones)[0],
  "segment_sum": lambda ones, zeros: jax.ops.segment_sum(ones, zeros, num_segments=2)[0],
}


@BOTH
def test_sums_do_not_lose_what_half_accumulation_loses(half):
  def fun(ones, one, zeros):
    return {name: add((ones @ one)[:, 0], zeros) for name, add in ADDED.items()}

  halves, pair = np.full((COUNT, 2), 0.5, np.float32), np.ones((2, 1), np.float32)
  args = halves, pair, np.zeros(COUNT, np.int32)
  found = programs.run(mpjax.autocast(fun, half), *args)
  assert found == dict.fromkeys(ADDED, COUNT)
  big = np.full((2, 2), 65504 / 2, np.float32)
  total = programs.run(mpjax.autocast(lambda x, w: (x @ w).sum(), half), big, args[1])
  assert total == 2 * float(jnp.asarray(65504, half)), "more than float16 holds"


# What is broadcast.

ADD = {
  "bias": lambda y, b: y + b[None],
  "repeated": lambda y, b: y - jnp.broadcast_to(b, y.shape),
  "row of a matmul": lambda y, b: y + (jnp.ones((1, 3)) @ jnp.diag(b)),
  "activation": lambda y, b: y + jnp.tanh(jnp.ones((1, 3)) @ jnp.diag(b))[:, None][0],
  "tile": lambda y, b: y + jnp.tile(jnp.ones((1, 3)) @ jnp.diag(b), (ROWS, 1)),
}
MULTIPLY = {
  "scale": lambda y, b: y * b[None],
  "divisor": lambda y, b: y / b[None],
  "number": lambda y, b: y * b[0],
  "row of a matmul": lambda y, b: y * (jnp.ones((1, 3)) @ jnp.diag(b)),
  "outer product": lambda y, b: y[:, :1] * b[None],
  "maximum": lambda y, b: jnp.maximum(y - 1, b[None]),
}
BROADCAST = {**{f"add {k}": v for k, v in ADD.items()}, **MULTIPLY}


@BOTH
def test_the_gradient_of_what_every_row_reads_is_a_float32_sum(half):
  def loss(name):
    return lambda b, x: jnp.sum((BROADCAST[name](x @ EYE, b) @ EYE) * 2.0**-8)

  check_gradients({name: loss(name) for name in BROADCAST}, half, jnp.full(3, 0.5), ONES)


@BOTH
@pytest.mark.parametrize(
  ("fun", "oracle"),
  [
    (lambda y, b: y * b[None], np.multiply),
    (lambda y, b: y / b[None], np.divide),
    (lambda y, b: jnp.maximum(y, b[None]), np.maximum),
  ],
  ids=["scale", "divisor", "maximum"],
)
def test_a_factor_that_is_a_parameter_is_not_rounded(fun, oracle, half):
  b = np.linspace(0.1, 0.7, 3, dtype=np.float32)
  x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
  exact = oracle(np.asarray(jnp.asarray(x, half), np.float64), b.astype(np.float64))
  found = mpjax.autocast(lambda b, x: fun(x @ EYE, b), half)(b, x)
  # XLA's division by what is repeated is that by its reciprocal.
  np.testing.assert_array_max_ulp(found, exact.astype(np.float32), maxulp=oracle is np.divide)


@pytest.mark.parametrize("axes", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", ["bias", "scale", "divisor"])
def test_over_devices_these_sums_are_in_float32_too(name, axes):
  # The gradient of a replicated parameter is added up over the devices in the dtype of the sum.
  mesh = jax.make_mesh((4, 2), ("data", "model"), (axes,) * 2, devices=jax.devices("cpu")[:8])
  fun = lambda b, x: jnp.sum(({**ADD, **MULTIPLY}[name](x @ jnp.eye(4), b) @ jnp.eye(4)) * 2.0**-8)  # noqa: E731
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((64, 4)), jax.P("data", None))
    for spec in [jax.P(None), jax.P("model")] if axes == AxisType.Explicit else [jax.P(None)]:
      b = jax.device_put(jnp.full(4, 0.5), spec)
      found = jax.grad(mpjax.autocast(fun, "bfloat16"))
      assert added_in_half(found, b, x) == []
      ours, plain = jax.jit(found)(b, x), jax.jit(jax.grad(fun))(b, x)
      np.testing.assert_array_equal(ours, plain)
      assert ours.sharding == plain.sharding


# What is chosen and gathered.


@BOTH
def test_the_maximum_of_an_axis_counts_its_places_in_float32(half):
  losses = {
    "exp": lambda x: jnp.exp((x @ EYE).max(0) * 1.0).sum(),
    "matmul": lambda x: ((x @ EYE).max(0, keepdims=True) @ EYE).sum(),
    "minimum": lambda x: ((x @ EYE).min(0, keepdims=True) @ EYE).sum(),
    "segment": lambda x: (jax.ops.segment_max(x @ EYE, jnp.zeros(1001, int), 1) @ EYE).sum(),
  }
  check_gradients(losses, half, jnp.ones((1001, 3)))


@BOTH
def test_the_gradient_of_what_is_read_often_is_a_float32_sum(half):
  # A graph network reads each node for all of its edges, a decoder its encoder at each step.
  ids = jnp.zeros(ROWS, int)
  rows = {
    "plain": lambda y: y[ids],
    "two axes": lambda y: y[ids, ids][:, None],
    "take": lambda y: jnp.take(y, ids, axis=0),
    "take_along_axis": lambda y: jnp.take_along_axis(y, ids[:, None], 0),
  }

  def gathered(read):
    def fun(x):
      found = read(x @ EYE)
      return jnp.sum((found @ jnp.ones((found.shape[-1], 3))) * 2.0**-8)

    return fun

  def decoded(x):
    keys = jnp.tanh((x - 1) @ EYE) + 1
    steps = lax.scan(lambda state, query: (state, query @ keys), 0.0, jnp.ones((ROWS, 1, 3)))
    return jnp.sum(steps[1] * 2.0**-8)

  losses = {**{name: gathered(read) for name, read in rows.items()}, "scan": decoded}
  check_gradients(losses, half, jnp.ones((3, 3)))


def test_a_float32_caller_gets_what_is_computed_of_values_at_rest_unrounded():
  # By hand in float32 from the logits that the matmul returns: at rest 1 - sigmoid(7) is 0.
  logits = jnp.asarray([3.0, 5, 6, 7])
  for fun in (
    lambda y: 1 - jax.nn.sigmoid(y),
    lambda y: 1 - jnp.tanh(y) ** 2,
    lambda y: jax.nn.sigmoid(y),
    lambda y: jax.nn.sigmoid(y) - jax.nn.sigmoid(y + 1),
  ):
    policy = cast(lambda y, eye, fun=fun: leaving(fun(y @ eye), jnp.dtype("float32")))
    np.testing.assert_array_equal(policy(logits, jnp.eye(4)), fun(logits))


def test_a_matmul_that_sums_nothing_multiplies():
  angle = lambda t, f: jnp.sin(jnp.einsum("i,j->ij", t, f))  # noqa: E731
  positions, frequencies = jnp.arange(1000.0, 1008), 10000.0 ** -jnp.linspace(0, 1, 4)
  exact = jnp.sin(positions[:, None] * frequencies[None])
  np.testing.assert_array_equal(cast(angle)(positions, frequencies), exact)
  # For a matmul alone it is one too: experts are given their tokens like that.
  experts = jax.make_jaxpr(cast(lambda x, w: jnp.einsum("ij,k->ijk", x, w[0]) @ w))(X, W)
  assert programs.half_share(experts) == 1


POSITIONS = {
  "sine": lambda y: jnp.sin(jnp.concatenate([2 * y.T, y.T])),
  "phase": lambda y: jnp.exp(lax.complex(jnp.zeros_like(y), y)),
  "index": lambda y: jnp.arange(99)[jnp.floor(y).astype(int)],
  "rank": lambda y: lax.top_k(y, 2)[1],
  "wrapped": lambda y: y % 1,
  "nearest image": lambda y: y - jnp.round(y),
  "sinc": jnp.sinc,
  "arc": lambda y: jnp.arccos(1 - y / jnp.max(y) / 999),
  "factorization": lambda y: jnp.linalg.svd(y)[1],
  "solution": lambda y: jnp.linalg.solve(y.T @ y, y.T),
}
GRID = 99 * jnp.linspace(0, 1, 12).reshape(4, 3)


@pytest.mark.parametrize("fun", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_float8"])
def test_matmuls_of_data_that_become_a_position_are_in_float32(fun, policy):
  rotated = lambda x: fun((x @ (EYE + x[:3] / 999)) @ jnp.asarray(np.eye(3) + 0.1))  # noqa: E731
  found = mpjax.autocast(rotated, policy, data_argnums=0)(GRID)
  np.testing.assert_array_equal(found, rotated(GRID))


def test_a_matmul_of_data_that_becomes_an_angle_is_low_and_in_float32():
  sines = mpjax.autocast(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w), data_argnums=0)
  layers = mpjax.with_policy(nn.Sequential([nn.Dense(3), jnp.sin] * 2), "mixed_bfloat16")
  weights = layers.init(jax.random.key(0), GRID)
  for program in (jax.make_jaxpr(sines)(GRID, W), jax.make_jaxpr(layers.apply)(weights, GRID)):
    assert [set(p.dtypes) for p in programs.products(program)] == [{"float32"}, {"bfloat16"}]
  for angle in (
    lambda x, w: lax.ragged_dot(x, w[None], jnp.asarray([4])),  # Sizes are no floating operand.
    lambda x, w: jnp.linalg.norm(x @ w, axis=-1),
    lambda x, w: jnp.cumsum(x @ w, axis=0) + lax.dot(jnp.cumsum(x > 1, axis=0), w),
  ):
    fun = lambda x, w, angle=angle: jnp.sin(angle(x, w))  # noqa: E731
    args = GRID / 7, W / 3  # In no low precision.
    np.testing.assert_array_equal(mpjax.autocast(fun, data_argnums=0)(*args), fun(*args))


NEAREST = {"argmin": jnp.argmin, "argsort": jnp.argsort, "top_k": lambda d, _: lax.top_k(-d, 2)[1]}


@pytest.mark.parametrize("chosen", NEAREST)
@pytest.mark.parametrize("codebook", ["state", "parameter", "low"])
def test_a_matmul_that_becomes_an_index_alone_is_in_float32_unless_all_is_low(chosen, codebook):
  # As by hand, where JAX promotes a low activation and a float32 codebook.
  def codes(w, codes, x):
    z = x @ w
    codes = codes @ w if codebook == "low" else codes
    squares = jnp.sum(z**2, -1, keepdims=True) + jnp.sum(codes**2, -1)[None]
    return NEAREST[chosen](squares - 2 * z @ codes.T, -1)

  data = (1, 2) if codebook == "state" else 2
  program = jax.make_jaxpr(mpjax.autocast(codes, data_argnums=data))(W, X, GRID)
  *layers, distances = [p.dtypes for p in programs.products(program)]
  assert {dtype for dtypes in layers for dtype in dtypes} == {"bfloat16"}
  assert set(distances) == ({"bfloat16"} if codebook == "low" else {"float32"})


def test_what_is_also_read_as_a_number_is_low_though_an_index_is_chosen_of_it():
  # The logits of a classifier, of which the loss and the accuracy are computed.
  def loss(w, x):
    logits = x @ w
    return jax.nn.log_softmax(logits)[..., 0].sum(), jnp.argmax(logits, -1)

  program = jax.make_jaxpr(mpjax.autocast(loss, data_argnums=1))(W, GRID)
  assert programs.half_share(program) == 1
  # But places in an image, of a frame that a layer predicts: by hand JAX promotes it, and its sum.
  # What is computed in float32 is not rounded before, though it is moved, and more than once.
  turned = lambda y: functools.reduce(lambda y, _: y.T, range(500), y / 999)  # noqa: E731
  for frame in (lambda y: y / 4096 + jnp.eye(4, 3), turned):
    at = lambda y, x, frame=frame: (frame(y.astype("float32")) @ x.T) % 1.0  # noqa: E731
    found = mpjax.autocast(lambda w, x, at=at: at(x @ w, x), data_argnums=1)(W, GRID)
    np.testing.assert_array_equal(found, at(GRID.astype("bfloat16") @ W.astype("bfloat16"), GRID))


def test_a_comparison_of_data_alone_reads_a_float32_matmul():
  near = mpjax.autocast(lambda x: (x**2).sum(-1)[None] - 2 * x @ x.T < 8.0, data_argnums=0)
  assert programs.half_share(jax.make_jaxpr(near)(GRID)) == 0
  gate = mpjax.autocast(lambda w, x: jnp.where(x @ w > 0, x, 0.0), data_argnums=1)
  assert programs.half_share(jax.make_jaxpr(gate)(W, GRID)) == 1
