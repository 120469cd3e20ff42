"""What is cast in a program without bodies, and what is left: read from the rewritten jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from tests import programs

HALVES = ("bfloat16", "float16")
BOTH = pytest.mark.parametrize("half", HALVES)

W = jnp.eye(3)
X = jnp.arange(6.0).reshape(2, 3)


def cast(fun, *args, half="bfloat16", **options):
  """Returns the jaxpr of `fun` under autocast."""
  return jax.make_jaxpr(mpjax.autocast(fun, half, **options))(*args)


def types(program, name):
  """Returns the dtypes of operands and first result of each equation of a primitive."""
  return [
    (*(str(v.aval.dtype) for v in eqn.invars), str(eqn.outvars[0].aval.dtype))
    for eqn, _ in programs.equations(program)
    if eqn.primitive.name == name
  ]


# Parameters, other values, and how often they are cast.


@BOTH
def test_a_parameter_is_cast_at_each_use(half):
  program = cast(lambda w, x: (x @ w) @ w, W, X, half=half)
  assert programs.converts(program) == {f"float32->{half}": 3, f"{half}->float32": 1}


def test_another_value_is_cast_once_for_all_who_read_it():
  def fun(w, x):
    total = jnp.exp(x)
    return total @ w, total @ (w + 1)

  (read,) = {p.invars[0] for p, _ in programs.equations(cast(fun, W, X)) if is_dot(p)}
  assert str(read.aval.dtype) == "bfloat16"


def test_a_half_value_is_widened_once_for_all_who_read_it():
  def fun(w, x):
    y = x @ w
    return jnp.exp(y), jnp.log(y), y.sum()

  assert programs.converts(cast(fun, W, X)) == {"float32->bfloat16": 2, "bfloat16->float32": 1}


def is_dot(eqn):
  return eqn.primitive.name == "dot_general"


SHARED = {
  "as it is": lambda w: w,
  "transposed": lambda w: w.T,
  "reshaped": lambda w: w.reshape(9).reshape(3, 3),
  "scaled": lambda w: 1.0 * w,
  "joined": lambda w: jnp.concatenate([w, w])[:3],
  "moved by a function": jax.jit(lambda w: w[:, ::-1][:, ::-1]),
  "chosen by a branch": lambda w: lax.cond(w[0, 0] > 0, lambda w: w * 1.0, lambda w: w, w),
  "by a rule": jax.custom_jvp(lambda w: w * 1.0),
  "behind a barrier": lambda w: lax.optimization_barrier((w, w))[0],
}


SHARED["by a rule"].defjvp(lambda primals, tangents: (primals[0] * 1.0, tangents[0]))


@BOTH
@pytest.mark.parametrize("made", SHARED)
def test_gradients_of_a_shared_parameter_add_in_float32(made, half):
  """2^k + 1 in float32; in half, where 2^k has the last place 2 at least, the one is lost."""
  big = {"bfloat16": 2.0**9, "float16": 2.0**12}[half]

  def fun(w, x):
    w = SHARED[made](w)
    return (x @ w).sum() * big + (x @ w).sum()

  x = jnp.asarray([[1.0, 0.0, 0.0]])
  grad = programs.run(jax.grad(mpjax.autocast(fun, half)), W, x)
  total = np.zeros((3, 3))
  where = np.s_[:, 0] if made == "transposed" else np.s_[0, :]
  total[where] = big + 1
  np.testing.assert_array_equal(grad, total)


def test_a_constant_is_cast_once():
  table = np.ones((3, 3), np.float32)
  program = cast(lambda x: (x @ jnp.asarray(table)) @ jnp.asarray(table), X)
  assert programs.converts(program)["float32->bfloat16"] <= 3

  constant = jnp.ones((3, 3))
  program = cast(lambda x: (x @ constant) @ constant, X)
  assert programs.converts(program)["float32->bfloat16"] == 2


def test_a_tracer_that_is_closed_over_is_a_parameter():
  def outer(w, x):
    return jnp.sum(mpjax.autocast(lambda x: (x @ w) @ w)(x))

  program = jax.make_jaxpr(outer)(W, X)
  assert programs.converts(program)["float32->bfloat16"] == 3


@pytest.mark.parametrize(
  "fun",
  [
    lambda w, x: jnp.exp(x @ w) @ w,
    lambda w, x: jnp.tanh(x @ w) @ w,
    lambda w, x: (x @ w).sum(-1, keepdims=True) * (x @ w),
    lambda w, x: jax.nn.softmax(x @ w) @ w,
    lambda w, x: jnp.where(x > 0, x @ w, 0.0) @ w,
    lambda w, x: jnp.split(jnp.sqrt(x @ w), 3, axis=1)[0] @ w[:1],
  ],
  ids=["exp", "tanh", "sum", "softmax", "where", "split"],
)
def test_no_value_goes_there_and_back(fun):
  made = {}
  for eqn, _ in programs.equations(cast(fun, W, X)):
    if eqn.primitive.name == "convert_element_type":
      (source,), (result,) = eqn.invars, eqn.outvars
      assert source not in made, "a cast of a cast"
      made[result] = source
  assert made


# Literals.


@pytest.mark.parametrize(
  ("number", "half", "dtype"),
  [
    (0.5, "bfloat16", "bfloat16"),
    (0.5, "float16", "float16"),
    (0.0, "float16", "float16"),
    (np.inf, "float16", "float16"),
    (-np.inf, "bfloat16", "bfloat16"),
    (1e-30, "bfloat16", "bfloat16"),
    (1e-30, "float16", "float32"),
    (1e-6, "float16", "float32"),
    (1e5, "bfloat16", "bfloat16"),
    (1e5, "float16", "float32"),
    (-65504.0, "float16", "float16"),
    (-65536.0, "float16", "float32"),
    (float(np.finfo(np.float32).min), "float16", "float32"),
    (float(np.finfo(np.float32).min), "bfloat16", "float32"),
    (-1e10, "float16", "float32"),
    (-1e10, "bfloat16", "bfloat16"),
  ],
)
def test_a_literal_decides_only_if_it_does_not_survive(number, half, dtype):
  program = cast(lambda w, x: (x @ w) * np.float32(number), W, X, half=half)
  assert types(program, "mul") == [(dtype, dtype, dtype)]


@pytest.mark.case("B018")
@BOTH
@pytest.mark.parametrize("number", [-1e9, -1e30, float(np.finfo(np.float32).min), -np.inf])
@pytest.mark.parametrize("how", ["where", "add"])
def test_masked_softmax_stays_finite(number, how, half):
  """A row without any allowed key too, but for -inf, where there is no number to give."""
  mask = np.asarray([[True, False, True], [False, False, False]])[: 1 if number == -np.inf else 2]

  def fun(w, x, mask):
    logits = x @ w
    if how == "where":
      return jax.nn.softmax(jnp.where(mask, logits, number))
    return jax.nn.softmax(logits + jnp.where(mask, 0.0, number))

  x = X[: len(mask)]
  weights = programs.run(mpjax.autocast(fun, half), W, x, mask)
  e = np.exp([0.0, 2.0])
  want = np.asarray([[e[0], 0, e[1]] / e.sum(), [1 / 3] * 3])[: len(mask)]
  if how == "add":
    # The largest logit is not masked away where all are: they are equal beside -1e9.
    want[1:] = programs.run(fun, W, x, mask)[1:]
  np.testing.assert_allclose(weights, want, rtol=2e-7, atol=0)

  gradient = programs.run(jax.grad(lambda *a: mpjax.autocast(fun, half)(*a).sum()), W, x, mask)
  assert np.isfinite(gradient).all()


# What decides a promotion.


def test_a_float32_bias_does_not_widen_its_layer():
  program = cast(lambda w, x, b: jnp.tanh(x @ w + b[None]), W, X, jnp.ones(3))
  assert types(program, "add") == [("bfloat16",) * 3]
  assert types(program, "tanh") == [("bfloat16",) * 2]


def test_a_mask_that_becomes_a_number_decides_nothing():
  mask = jnp.arange(3) > 0

  def fun(w, x, mask):
    return (x @ w) * mask.astype("float32")[None]

  assert types(cast(fun, W, X, mask), "mul") == [("bfloat16",) * 3]


GRID = jnp.arange(512.0)
GRIDS = {
  "numpy": lambda n: np.arange(n, dtype=np.float32),
  "integers": lambda n: jnp.arange(n).astype("float32"),
  "computed": lambda n: jnp.arange(n, dtype="float32"),
  "closed over": lambda n: GRID[:n],
}


def interpolated(xp, grid, rows, offset):
  """Returns rows read at positions between them: a grid, and an offset that a layer predicts."""
  place = grid + offset
  whole = xp.floor(place)
  rest = (place - whole)[:, None]
  row = xp.clip(whole.astype(int), 0, len(rows) - 2)
  return rows[row] * (1 - rest) + rows[row + 1] * rest


@pytest.mark.parametrize(
  "outside", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"]
)
@pytest.mark.parametrize(("number", "dtype"), [(0.5, "float16"), (1e-10, "float32")])
def test_a_number_that_is_closed_over_decides_only_if_it_does_not_survive(number, dtype, outside):
  """In a `jit` of the function's own too: an epsilon of 1e-10 was 0, and 0 / 0 a NaN."""
  constant = jnp.float32(number)
  inner = outside(lambda h: jnp.abs(h) + constant)
  program = cast(lambda w, x: inner(x @ w) @ w, W, X, half="float16")
  assert types(program, "add") == [(dtype,) * 3]


def test_a_number_survives_in_each_type_that_is_computed_in():
  constant, rule = jnp.float32(1e-6), mpjax.Rule("mixed_float16", path="head")

  def fun(w, x):
    with jax.named_scope("head"):
      return ((x @ w) * constant) @ w

  assert types(cast(fun, W, X, rules=[rule]), "mul") == [("float32",) * 3]


@BOTH
@pytest.mark.parametrize("name", [*GRIDS, "argument"])
def test_positions_on_a_grid_are_not_rounded(name, half):
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(512, 8)).astype(np.float32)
  w = (0.3 * rng.normal(size=(8, 1))).astype(np.float32)
  # A matmul of exact operands gives the offsets that the oracle has, but for their last digits.
  rows, w = (np.asarray(jnp.asarray(x, half).astype("float32")) for x in (rows, w))

  def fun(rows, w, grid):
    made = grid if name == "argument" else GRIDS[name](512)
    return interpolated(jnp, made, rows, (rows @ w)[:, 0]) @ jnp.eye(8)

  given = jnp.arange(512.0)
  options = {"data_argnums": 2} if name == "argument" else {}
  found = np.asarray(mpjax.autocast(fun, half, **options)(rows, w, given))
  exact = interpolated(
    np, np.arange(512.0), rows.astype(np.float64), (rows @ w.astype(float))[:, 0]
  )
  assert np.linalg.norm(found - exact) <= 0.01 * np.linalg.norm(exact)


def test_a_sum_decides():
  program = cast(lambda w, x: (x @ w) - x.sum(-1, keepdims=True), W, X)
  assert types(program, "sub") == [("float32",) * 3]


def test_what_is_made_of_parameters_alone_stays_as_exact_as_they_are():
  program = cast(lambda w, x: (w * 3 + w, x * 2), W, X)
  assert programs.converts(program) == {}
  np.testing.assert_array_equal(
    programs.run(mpjax.autocast(lambda x: x * 2), X + 1e-5), 2 * (X + 1e-5)
  )


def test_what_exp_reads_is_computed_in_float32():
  def fun(w, x):
    y = x @ w
    return jnp.exp(y - lax.stop_gradient(y.max(-1, keepdims=True)))

  program = cast(fun, W, X)
  assert types(program, "reduce_max") == [("float32",) * 2]
  assert types(program, "sub") == [("float32",) * 3]
  assert types(program, "exp") == [("float32",) * 2]


def test_what_a_product_reads_too_is_computed_in_half():
  def fun(w, x):
    y = (x @ w) * (x @ w)
    return jnp.exp(y), y @ w

  assert types(cast(fun, W, X), "mul") == [("bfloat16",) * 3]


@pytest.mark.case("A88")
@BOTH
def test_half_joined_with_float32_is_float32(half):
  program = cast(lambda w, x: jnp.concatenate([x @ w, jnp.exp(x)]), W, X, half=half)
  assert types(program, "concatenate") == [("float32",) * 3]
  program = cast(lambda w, x: jnp.concatenate([x @ w, x]), W, X, half=half)
  assert types(program, "concatenate") == [(half,) * 3], "a parameter has no say"


@pytest.mark.case("A78")
@BOTH
def test_an_assignment_keeps_the_type_of_its_buffer(half):
  row = X[0]
  program = cast(lambda w, x, row: (x @ w).at[0].set(jnp.exp(row)), W, X, row, half=half)
  assert types(program, "scatter") == [(half, "int32", half, half)]
  program = cast(lambda w, x: jnp.exp(x).at[0].set((x @ w)[0]), W, X, half=half)
  assert types(program, "scatter") == [("float32", "int32", "float32", "float32")]
  program = cast(lambda w, x: lax.dynamic_update_slice(x @ w, jnp.exp(x), (0, 0)), W, X, half=half)
  assert types(program, "dynamic_update_slice") == [(half, half, "int32", "int32", half)]


@pytest.mark.case("B050")
def test_operands_of_different_types_are_unified():
  program = cast(lambda w, x: lax.add(lax.dot(x, w), lax.exp(x)), W, X)
  assert types(program, "add") == [("float32",) * 3]
  program = cast(lambda w, x: lax.select(x > 0, lax.dot(x, w), lax.exp(x)), W, X)
  assert types(program, "select_n") == [("bool", "float32", "float32", "float32")]
  program = cast(lambda w, x: lax.dot(lax.exp(x), lax.dot(w, w)), W, X)
  assert {t for each in types(program, "dot_general") for t in each} == {"bfloat16"}
  program = cast(lambda w, x: lax.clamp(0.0, lax.dot(x, w), 1.0), W, X)
  assert types(program, "clamp") == [("bfloat16",) * 4]


# The user's own choices.


@BOTH
@pytest.mark.parametrize("chosen", HALVES)
def test_a_cast_to_half_in_the_source_stays(chosen, half):
  def fun(w, x):
    y = x.astype(chosen) * 2
    return y, y.astype("float32") + jnp.exp(x)

  program = cast(fun, W, X, half=half)
  assert types(program, "mul") == [(chosen,) * 3]
  assert programs.converts(program) == programs.converts(jax.make_jaxpr(fun)(W, X))


@BOTH
@pytest.mark.parametrize("chosen", HALVES)
def test_a_product_in_half_in_the_source_stays(chosen, half):
  program = cast(lambda w, x: x.astype(chosen) @ w.astype(chosen), W, X, half=half)
  assert types(program, "dot_general") == [(chosen,) * 3]
  assert programs.converts(program) == {f"float32->{chosen}": 2}


@BOTH
def test_rounding_in_the_source_is_carried_out(half):
  """1 + 2^-12 survives in neither half type."""

  def fun(x):
    return x.astype(half).astype("float32")

  assert programs.run(mpjax.autocast(fun, half), jnp.float32(1 + 2**-12)) == 1


def test_of_a_value_in_half_only_a_cast_to_another_half_type_is_left():
  def fun(w, x):
    return (x @ w).astype("bfloat16"), (x @ w).astype("float16")

  found = programs.converts(cast(fun, W, X))
  assert found == {"float32->bfloat16": 4, "bfloat16->float16": 1}


@pytest.mark.parametrize("precision", ["highest", "high", lax.Precision.HIGHEST, "float32"])
def test_a_product_of_high_precision_stays_in_float32(precision):
  program = cast(lambda w, x: jnp.dot(jnp.dot(x, w), w, precision=precision), W, X)
  assert types(program, "dot_general") == [("bfloat16",) * 3, ("float32",) * 3]


@pytest.mark.parametrize("precision", ["default", lax.Precision.DEFAULT, None])
def test_a_product_of_default_precision_does_not(precision):
  program = cast(lambda w, x: jnp.dot(x, w, precision=precision), W, X)
  assert types(program, "dot_general") == [("bfloat16",) * 3]


def test_a_product_that_is_to_give_float32_is_rounded_like_any_other():
  """`preferred_element_type` is what every jnp product has, so that it says nothing."""
  program = cast(lambda w, x: lax.dot(x, w, preferred_element_type=jnp.float32), W, X)
  assert types(program, "dot_general") == [("bfloat16",) * 3]
  kernel = jnp.ones((2, 3, 3))
  program = cast(
    lambda k, x: lax.conv_general_dilated(
      x[None],
      k,
      (1,),
      "SAME",
      preferred_element_type=jnp.float32,
      dimension_numbers=("NWC", "WIO", "NWC"),
    ),
    kernel,
    X,
  )
  assert types(program, "conv_general_dilated") == [("bfloat16",) * 3]


# What autocast never touches.


@pytest.mark.case("A71")
def test_other_types_are_left_alone():
  def fun(key, whole, flags, z):
    new, used = jax.random.split(key)
    bits = jax.random.bits(used, (3,))
    return new, bits, whole @ whole, flags & (whole[0] > 0), z @ z, jnp.exp(z), whole * 2

  args = (
    jax.random.key(0),
    jnp.eye(3, dtype="int32"),
    jnp.ones(3, bool),
    jnp.eye(3, dtype="complex64"),
  )
  assert str(cast(fun, *args)) == str(jax.make_jaxpr(fun)(*args))


@pytest.mark.case("A71")
def test_float64_is_left_alone():
  with jax.enable_x64(True):
    x = jnp.asarray(np.eye(3), "float64")
    program = cast(lambda x: jnp.exp(x @ x) * 2.0, x)
    assert str(program) == str(jax.make_jaxpr(lambda x: jnp.exp(x @ x) * 2.0)(x))

    def mixed(w, x):
      return (w @ w).astype("float64") @ x

    program = cast(mixed, W, x)
    assert types(program, "dot_general") == [("bfloat16",) * 3, ("float64",) * 3]
    assert jax.eval_shape(mpjax.autocast(mixed), W, x).dtype == "float64"


def test_the_same_random_numbers_are_drawn():
  def fun(key, w):
    return jax.random.normal(key, (2, 3)) @ w, jax.random.bernoulli(key, 0.5, (8,))

  key = jax.random.key(3)
  ours, theirs = mpjax.autocast(fun)(key, W), fun(key, W)
  np.testing.assert_array_equal(ours[1], theirs[1])
  want = np.asarray(jnp.asarray(theirs[0], "bfloat16"), np.float32)
  np.testing.assert_array_equal(ours[0], want)


# Results.


def test_results_have_the_types_that_they_have_without():
  def fun(w, x):
    y = x @ w
    return y, y.astype("float16"), y > 0, jnp.argmax(y), w, 2.0 * jnp.float32(1), x.sum(), y.T

  want = jax.tree.map(lambda a: (a.dtype, a.shape), jax.eval_shape(fun, W, X))
  found = jax.eval_shape(mpjax.autocast(fun), W, X)
  assert jax.tree.map(lambda a: (a.dtype, a.shape), found) == want


@pytest.mark.parametrize("number", [1, 2.5, 1j])
def test_weak_types_are_kept(number):
  def fun(x):
    weak = jnp.asarray(number)
    return weak, weak * 2, weak + 1, x

  plain, ours = jax.make_jaxpr(fun)(X), cast(fun, X)
  assert [v.weak_type for v in ours.out_avals] == [v.weak_type for v in plain.out_avals]
  assert any(v.weak_type for v in plain.out_avals)


def test_a_weak_argument_stays_weak():
  weak = jnp.asarray(2.0)
  assert weak.weak_type

  def fun(w, s):
    return (w @ w) * s, s, s * s, (s * s).astype("float32"), s.astype("float32")

  plain = jax.make_jaxpr(fun)(W, weak)
  ours = jax.make_jaxpr(mpjax.autocast(fun))(W, weak)
  weak_types = [False, True, True, False, False]
  assert [v.weak_type for v in ours.out_avals] == weak_types
  assert [v.weak_type for v in plain.out_avals] == weak_types
  assert types(ours, "mul")[0] == ("bfloat16",) * 3


def test_dead_results_are_written_as_they_were():
  def fun(w, x):
    lax.sort([x @ w, jnp.exp(x)], num_keys=1)
    values, _ = lax.top_k(x @ w, 2)
    return values

  program = cast(fun, W, X)
  assert types(program, "sort") == [("bfloat16", "float32", "bfloat16")]
  assert jax.eval_shape(mpjax.autocast(fun), W, X).dtype == "float32"


def test_operations_of_no_list_stay_in_the_types_they_were_traced_with():
  def fun(w, x):
    y = x @ w
    low = jnp.linalg.cholesky(y[:, :2] @ y[:, :2].T + 5 * jnp.eye(2))
    return low @ y, lax.reduce_precision(y, 5, 4)

  program = cast(fun, W, X)
  assert types(program, "cholesky") == [("float32", "float32")]
  assert types(program, "reduce_precision") == [("float32", "float32")]
  assert {t for each in types(program, "dot_general") for t in each} == {"bfloat16"}


# Scopes.


def test_what_leaves_its_scope_for_a_product_is_handed_on_in_half():
  """A norm in float32, one product behind a residual connection, and one reader without."""

  def fun(w, x):
    with jax.named_scope("norm"):
      scale = lax.rsqrt((x * x).sum(-1, keepdims=True))
      y = x * scale
    with jax.named_scope("dense"):
      z = jnp.tanh(y) @ w
    return z

  program = cast(fun, W, X)
  assert types(program, "mul")[-1] == ("float32",) * 3
  assert types(program, "tanh") == [("bfloat16",) * 2]

  def no_product(w, x):
    with jax.named_scope("norm"):
      y = x * lax.rsqrt((x * x).sum(-1, keepdims=True))
    return jnp.tanh(y), w

  assert types(cast(no_product, W, X), "tanh") == [("float32",) * 2]


@BOTH
def test_what_leaves_its_scope_is_read_as_it_is_on_the_way_to_float32(half):
  """Points go into a product, and behind a multiplication into sines, as in a radiance field."""

  def fun(w, origin, direction, t):
    with jax.named_scope("sample"):
      points = origin + direction * t
    with jax.named_scope("encode"):
      waves = [g(points * 2.0**k) for k in range(10) for g in (jnp.sin, jnp.cos)]
      return jnp.concatenate([points, *waves], -1) @ w

  rng = np.random.default_rng(0)
  args = [rng.uniform(size=shape).astype(np.float32) for shape in ((64, 3), (64, 3), (64, 1))]
  w = rng.normal(size=(63, 8)).astype(np.float32)
  whole = (x.astype(np.float64) for x in args)
  points = next(whole) + next(whole) * next(whole)
  waves = [g(points * 2.0**k) for k in range(10) for g in (np.sin, np.cos)]
  exact = np.concatenate([points, *waves], -1) @ w
  found = np.asarray(mpjax.autocast(fun, half)(w, *args))
  assert np.linalg.norm(found - exact) <= 0.005 * np.linalg.norm(exact)


def test_inside_of_its_scope_a_float32_value_stays():
  def fun(w, x):
    with jax.named_scope("block"):
      y = jnp.exp(x)
      with jax.named_scope("inner"):
        z = jnp.tanh(y)
      return z @ w

  assert types(cast(fun, W, X), "tanh") == [("float32",) * 2]


def test_parameters_belong_to_no_scope():
  def fun(w, x):
    with jax.named_scope("a"):
      y = w * 2.0
    with jax.named_scope("b"):
      return x @ y

  program = cast(fun, W, X)
  assert types(program, "mul") == [("float32",) * 3]


def test_equations_keep_their_source_lines_and_scopes():
  def fun(w, x):
    with jax.named_scope("first"):
      y = x @ w
    with jax.named_scope("second"):
      return jnp.exp(y)

  def places(program):
    return {
      eqn.primitive.name: (eqn.source_info.traceback, str(eqn.source_info.name_stack))
      for eqn in program.jaxpr.eqns
      if eqn.primitive.name in ("dot_general", "exp")
    }

  # The same function object, whose two traces start from two lines of this file.
  plain, ours = places(jax.make_jaxpr(fun)(W, X)), places(cast(fun, W, X))
  assert plain.keys() == ours.keys() == {"dot_general", "exp"}
  for name, scope in (("dot_general", "first"), ("exp", "second")):
    assert ours[name][1] == plain[name][1] == scope
    lines = [
      [(f.file_name, f.line_num) for f in where[name][0].frames if f.function_name.endswith("fun")]
      for where in (plain, ours)
    ]
    assert lines[0] == lines[1] != []
  assert "first/dot_general" in jax.jit(mpjax.autocast(fun)).lower(W, X).as_text(debug_info=True)


def test_casts_stand_where_they_are_read():
  def fun(w, x):
    with jax.named_scope("dense"):
      return x @ w

  scopes = [
    str(eqn.source_info.name_stack)
    for eqn in cast(fun, W, X).jaxpr.eqns
    if eqn.primitive.name == "convert_element_type"
  ]
  assert scopes[:2] == ["dense", "dense"]
