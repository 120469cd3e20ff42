"""What is cast in a program without bodies, and what is left: read from the rewritten jaxpr."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from tests import programs
from tests.autocast.rig import BOTH, with_jvp
from tests.models.values import normal

HALVES = ("bfloat16", "float16")

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


def result(program, name):
  """Returns the dtype of the results of a primitive."""
  (found,) = programs.dtypes_of(program, name)
  return found


# Parameters, other values, and how often they are cast.


def test_a_parameter_is_cast_at_each_use():
  assert programs.converts(cast(lambda w, x: (x @ w) @ w, W, X)) == {
    "float32->bfloat16": 3,
    "bfloat16->float32": 1,
  }

  def outer(w, x):  # A tracer that is closed over is a parameter too.
    return jnp.sum(mpjax.autocast(lambda x: (x @ w) @ w)(x))

  assert programs.converts(jax.make_jaxpr(outer)(W, X))["float32->bfloat16"] == 3


def test_another_value_is_cast_once_for_all_who_read_it():
  def narrowed(w, x):
    total = jnp.exp(x)
    return total @ w, total @ (w + 1)

  eqns = (eqn for eqn, _ in programs.equations(cast(narrowed, W, X)))
  (read,) = {eqn.invars[0] for eqn in eqns if eqn.primitive.name == "dot_general"}
  assert str(read.aval.dtype) == "bfloat16"

  def widened(w, x):
    y = x @ w
    return jnp.exp(y), jnp.log(y), y.sum()

  assert programs.converts(cast(widened, W, X)) == {"float32->bfloat16": 2, "bfloat16->float32": 1}


def test_powers_are_written_right_before_the_operation_that_reads_them():
  # XLA for GPUs reads less for a batch norm's gradients then. Also of what the user has cast.
  def moments(w, x):
    square = (y := (x @ w).astype("bfloat16")) * y
    return y.sum(), (square * square).sum()

  names = [eqn.primitive.name for eqn in cast(moments, W, X).eqns]
  assert names.index("reduce_sum") < names.index("custom_jvp_call")


SHARED = {
  "as it is": lambda w: w,
  "transposed": lambda w: w.T,
  "reshaped": lambda w: w.reshape(9).reshape(3, 3),
  "scaled": lambda w: 1.0 * w,
  "joined": lambda w: jnp.concatenate([w, w])[:3],
  "added to data": lambda w: w + np.zeros((3, 3), np.float32),
  "split off data": lambda w: jnp.split(jnp.tile(w, (2, 1)) + np.zeros((6, 3), np.float32), 2)[1],
  "moved by a function": jax.jit(lambda w: w[:, ::-1][:, ::-1]),
  "chosen by a branch": lambda w: lax.cond(w[0, 0] > 0, lambda w: w * 1.0, lambda w: w, w),
  "by a rule": with_jvp(lambda w: w * 1.0),
  "behind a barrier": lambda w: lax.optimization_barrier((w, w))[0],
}


@BOTH
def test_gradients_of_a_shared_parameter_add_in_float32(half):
  # 2^k + 1 in float32; in half, where 2^k has the last place 2 at least, the one is lost.
  big = {"bfloat16": 2.0**9, "float16": 2.0**12}[half]

  def loss(w, x, made):
    w = made(w)
    return (x @ w).sum() * big + (x @ w).sum()

  def gradients(w, x):
    cast = {
      name: mpjax.autocast(lambda w, x, made=made: loss(w, x, made), half)
      for name, made in SHARED.items()
    }
    return {name: jax.grad(fun)(w, x) for name, fun in cast.items()}

  found = programs.run(gradients, W, jnp.asarray([[1.0, 0.0, 0.0]]))
  assert found.keys() == SHARED.keys()
  for name, gradient in found.items():
    total = np.zeros((3, 3))
    total[np.s_[:, 0] if name == "transposed" else np.s_[0, :]] = big + 1
    np.testing.assert_array_equal(gradient, total, err_msg=name)


def test_a_constant_is_cast_once_for_all_matmuls_and_not_rounded_elsewhere():
  kernel, shift = normal(4, 4, seed=1) / 2, normal(1, 4, seed=2)

  def fun(x):
    h = x @ kernel + shift
    return jnp.tanh(h @ kernel + shift) * shift

  program = cast(fun, normal(3, 4))
  assert result(program, "dot_general") == "bfloat16"
  assert result(program, "add") == result(program, "mul") == "float32"
  # The input, the kernel, and the first sum to half; the results of the two matmuls to float32.
  assert programs.converts(program) == {"float32->bfloat16": 3, "bfloat16->float32": 2}

  def of_numpy(x):
    return (x @ jnp.asarray(table)) @ jnp.asarray(table)

  table = np.ones((3, 3), np.float32)
  assert programs.converts(cast(of_numpy, X))["float32->bfloat16"] <= 3


# Literals.


@pytest.mark.parametrize(
  "outside", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"]
)
def test_a_number_decides_only_if_it_is_not_exact(outside):
  # A literal, or closed over: an epsilon of 1e-10 in a `jit` was 0, and 0 / 0 a NaN.
  for number, half, dtype in (
    (0.5, "float16", "float16"),
    (np.inf, "float16", "float16"),
    (1e-10, "float16", "float32"),
    (1e5, "float16", "float32"),
    (1e-30, "bfloat16", "float32"),
    (float(np.finfo(np.float32).min), "bfloat16", "float32"),
  ):
    constant = jnp.float32(number)
    for inner in (lambda h: jnp.abs(h) + constant, lambda h: jnp.abs(h) + np.float32(number)):  # noqa: B023
      called = outside(inner)
      program = cast(lambda w, x: called(x @ w) @ w, W, X, half=half)  # noqa: B023
      assert types(program, "add") == [(dtype,) * 3], (number, half)


def test_a_number_survives_in_each_type_that_is_computed_in():
  constant, rule = jnp.float32(1e-6), mpjax.Rule("mixed_float16", path="head")

  def fun(w, x):
    with jax.named_scope("head"):
      return ((x @ w) * constant) @ w

  assert types(cast(fun, W, X, rules=[rule]), "mul") == [("float32",) * 3]


@BOTH
def test_masked_softmax_stays_finite(half):
  # A row without any allowed key too, but for -inf, where there is no number to give.
  numbers = [-1e9, -1e30, float(np.finfo(np.float32).min), -np.inf]
  mask = np.asarray([[True, False, True], [False, False, False]])

  def where(w, x, mask, number):
    return jax.nn.softmax(jnp.where(mask, x @ w, number))

  def add(w, x, mask, number):
    return jax.nn.softmax(x @ w + jnp.where(mask, 0.0, number))

  cases = list(itertools.product(numbers, (where, add)))

  def each(w, x, mask):
    found = []
    for number, fun in cases:
      rows = 1 if number == -np.inf else 2
      plain = functools.partial(fun, number=number)
      cast, args = mpjax.autocast(plain, half), (w, x[:rows], mask[:rows])
      gradient = jax.grad(lambda w, x, mask, cast=cast: cast(w, x, mask).sum())(*args)
      found.append((cast(*args), plain(*args), gradient))
    return found

  e = np.exp([0.0, 2.0])
  for (number, fun), found in zip(cases, programs.run(each, W, X, mask), strict=True):
    weights, plain, gradient = found
    # The largest logit is not masked away where all are: they are equal beside -1e9.
    want = [[e[0], 0, e[1]] / e.sum(), plain[-1] if fun is add else np.full(3, 1 / 3)]
    np.testing.assert_allclose(weights, want[: len(weights)], 2e-7, 0, err_msg=f"{fun} {number}")
    assert np.isfinite(gradient).all()


# In which dtype an operation is computed.

LEAST = np.finfo(np.float32).min
GRID = jnp.arange(3.0)
GRIDS = {
  "numpy": lambda: np.arange(3, dtype=np.float32),
  "integers": lambda: jnp.arange(3).astype("float32"),
  "computed": lambda: jnp.arange(3, dtype="float32"),
  "closed over": lambda: GRID,
}


def softmax_by_hand(w, x, b):
  y = x @ w
  return jnp.exp(y - lax.stop_gradient(y.max(-1, keepdims=True)))


def read_by_both(w, x, b):
  y = (x @ w) * (x @ w)
  return jnp.exp(y), y @ w


def asked_for_float32(w, x, b):
  # `preferred_element_type` is what every jnp product has, so that it says nothing.
  how = {"dimension_numbers": ("NWC", "WIO", "NWC"), "preferred_element_type": jnp.float32}
  found = lax.conv_general_dilated(x[None], w[None], (1,), "SAME", **how)
  return lax.dot(x, w, preferred_element_type=jnp.float32), found


def factorized(w, x, b):
  y = x @ w
  low = jnp.linalg.cholesky(y[:, :2] @ y[:, :2].T + 5 * jnp.eye(2))
  return low @ y, lax.reduce_precision(y, 5, 4)


def scanned(turn, start):
  return lax.scan(lambda c, _: turn(c), start, None, length=2)


HALF, F32 = "bfloat16", "float32"
COMPUTED = {
  # name: a function of parameters w, x and b, and the dtypes of all that its operations read and
  # return: of all of a name, or one by one.
  "a mask by the largest number, returned": (
    lambda w, x, b: jnp.where(x[:, :1] > 0, x @ w, LEAST),
    {"select_n": F32},
  ),
  "a mask by the largest number, inside": (
    lambda w, x, b: jax.nn.softmax(jnp.where(x[:, :1] > 0, x @ w, LEAST)),
    {"select_n": HALF},
  ),
  # A cast would make -inf of one of them, and NaN of a row of these.
  "a mask by two numbers": (
    lambda w, x, b: jax.nn.softmax(jnp.where(x > 9, x @ w, jnp.where(x > 0, 0, LEAST))),
    {"select_n": F32},
  ),
  # What is no number of the data decides nothing.
  "a bias": (lambda w, x, b: jnp.tanh(x @ w + b[None]) @ w, {"add": HALF, "tanh": HALF}),
  "flags": (lambda w, x, b: (x @ w) * (b > 0).astype("float32")[None], {"mul": HALF}),
  **{
    f"noise, {draw.__name__}": (
      lambda w, x, b, draw=draw: jnp.minimum(x @ w, draw(jax.random.key(0), x.shape)) @ w,
      {"min": HALF},
    )
    for draw in (jax.random.normal, jax.random.uniform, jax.random.gumbel)
  },
  # It is not rounded before a matmul.
  **{
    f"a grid, {name}": (
      lambda w, x, b, make=make: jnp.minimum(x @ w, make()[None]) @ w,
      {"min": F32},
    )
    for name, make in GRIDS.items()
  },
  "an activation": (lambda w, x, b: jnp.tanh(jax.nn.relu(x @ w)), {"max": HALF, "tanh": HALF}),
  "an activation of a sum": (
    lambda w, x, b: jnp.tanh(jax.nn.relu(lax.reduce_sum(x[None], (0,)))) @ w,
    {"max": F32, "tanh": F32},
  ),
  # What reads a value decides in what it is computed.
  "a softmax": (softmax_by_hand, {"reduce_max": F32, "sub": F32, "exp": F32}),
  "read by a matmul and an exponential": (read_by_both, {"mul": F32}),
  "read by a matmul": (lambda w, x, b: ((x @ w) * (x @ w)) @ w, {"mul": HALF}),
  "a sum decides": (lambda w, x, b: (x @ w) - x.sum(-1, keepdims=True), {"sub": F32}),
  # An assignment keeps the dtype of its buffer.
  "set in low": (lambda w, x, b: (x @ w).at[0].set(jnp.exp(x[0])), {"scatter": HALF}),
  "set in float32": (lambda w, x, b: jnp.exp(x).at[0].set((x @ w)[0]), {"scatter": F32}),
  "a slice set in low": (
    lambda w, x, b: lax.dynamic_update_slice(x @ w, jnp.exp(x), (0, 0)),
    {"dynamic_update_slice": HALF},
  ),
  "results in float32": (asked_for_float32, {"dot_general": HALF, "conv_general_dilated": HALF}),
  # Operations of no list stay in the dtypes that they were traced with, and matmuls beside them.
  "linear algebra": (
    factorized,
    {"cholesky": F32, "reduce_precision": F32, "dot_general": (HALF, F32, F32)},
  ),
  # A stream that starts in low precision stays in it.
  "a stream": (
    lambda w, x, b: scanned(lambda y: (y + jax.nn.relu(y @ w), None), x @ w)[0],
    {"add": HALF, "max": HALF},
  ),
  # The state of a while loop is in float32: nothing is kept of it for a backward pass, and whether
  # it ends may hang on its last bits.
  "a while loop": (
    lambda w, x, b: lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y - jnp.tanh(y @ w), x @ w),
    {"sub": F32, "dot_general": HALF},
  ),
  "a loop of a number": (
    lambda w, x, b: lax.fori_loop(0, jnp.int32(2), lambda i, y: y - jnp.tanh(y @ w), x @ w),
    {"sub": F32, "dot_general": HALF},
  ),
  # What the next iteration alone reads, in an exponential.
  "read by the next step": (
    lambda w, x, b: scanned(lambda c: ((x @ w) * 3.0, jnp.exp(c)), x @ w)[1],
    {"mul": F32, "dot_general": HALF},
  ),
  "read by the next iteration": (
    lambda w, x, b: lax.while_loop(
      lambda s: s[1][0, 0] > 2, lambda s: ((x @ w) * 3.0, jnp.exp(s[0])), (x @ w, x)
    )[1],
    {"mul": F32, "dot_general": HALF},
  ),
}


@pytest.mark.parametrize(("fun", "wanted"), COMPUTED.values(), ids=COMPUTED)
def test_operations_are_computed_in(fun, wanted):
  program = cast(fun, W, X, jnp.ones(3))
  for name, dtypes in wanted.items():
    found = [{d for d in each if "float" in d} for each in types(program, name)]
    dtypes = (dtypes,) * len(found) if isinstance(dtypes, str) else dtypes
    assert found, name
    assert found == [{d} for d in dtypes], name


@pytest.mark.parametrize("given", ["float32", "bfloat16"])
def test_the_gradient_of_an_input_has_its_dtype(given):
  gradient = jax.grad(lambda x: mpjax.autocast(jnp.tanh)(x).astype("float32").sum())
  assert jax.eval_shape(gradient, jax.ShapeDtypeStruct((3, 4), given)).dtype == given


READERS = {
  "product": lambda h, w: h @ w,
  "exp": lambda h, w: jnp.exp(h),
  "sum": lambda h, w: h.sum(),
  "tanh": lambda h, w: jnp.tanh(h),
}


def test_the_order_of_operations_does_not_change_the_casts():
  counts = set()
  x, w = normal(3, 4), normal(4, 4, seed=1)
  for names in itertools.permutations(READERS):

    def fun(x, w, names=names):
      for h in (x @ w, lax.reduce_sum(x[None], (0,))):
        found = {name: READERS[name](h, w) for name in names}
      return [found[name] for name in READERS]

    counts.add(tuple(sorted(programs.converts(cast(fun, x, w)).items())))
  assert len(counts) == 1


def test_operands_of_different_types_are_unified():
  program = cast(lambda w, x: lax.select(x > 0, lax.dot(x, w), lax.exp(x)), W, X)
  assert types(program, "select_n") == [("bool", "float32", "float32", "float32")]
  program = cast(lambda w, x: lax.dot(lax.exp(x), lax.dot(w, w)), W, X)
  assert {t for each in types(program, "dot_general") for t in each} == {"bfloat16"}
  for most, dtype in ((1.0, "bfloat16"), (1 - 1e-6, "float32")):
    program = cast(lambda w, x: lax.clamp(0.0, lax.dot(x, w), most), W, X)  # noqa: B023
    assert types(program, "clamp") == [(dtype,) * 4]

  def mixed(x, w):  # Which JAX takes silently.
    return lax.dot(x.astype("bfloat16"), w)

  plain = jax.make_jaxpr(mixed)(X, W)
  assert [p.dtypes for p in programs.products(plain)] == [("bfloat16", "float32")]
  program = cast(mixed, X, W)
  assert [p.dtypes for p in programs.products(program)] == [("bfloat16",) * 2]
  assert [v.dtype for v in program.out_avals] == [v.dtype for v in plain.out_avals]


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
  program = cast(lambda w, x: x.astype(chosen) @ w.astype(chosen), W, X, half=half)
  assert types(program, "dot_general") == [(chosen,) * 3]


def test_of_a_value_in_half_only_a_cast_to_another_half_type_is_left():
  def fun(w, x):
    return (x @ w).astype("bfloat16"), (x @ w).astype("float16")

  found = programs.converts(cast(fun, W, X))
  assert found == {"float32->bfloat16": 4, "bfloat16->float16": 1}


# What autocast never touches.


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


# The lists decide: ours unless the user's say otherwise, and nothing is refused.


def operands(fn, name, ops, x):
  """Returns the dtypes of the floating operands of a primitive under some lists."""
  found = types(cast(fn, x, ops=ops), name)
  return {dtype for *each, _ in found for dtype in each if "float" in dtype}


@pytest.mark.parametrize(
  ("name", "fn", "standard", "part", "edited"),
  [
    # A function of a half and a float32 operand; by ours, and by the user's list.
    ("dot_general", lambda h, f: h @ f.T, HALF, "float32", F32),
    ("dot_general", lambda h, f: h @ f.T, HALF, "promote", F32),
    ("dot_general", lambda h, f: h @ f.T, HALF, "opaque", F32),
    ("exp", lambda h, f: jnp.exp(h), F32, "half", HALF),
    ("exp", lambda h, f: jnp.exp(h), F32, "keep", HALF),
    ("exp", lambda h, f: jnp.exp(h), F32, "promote", HALF),
    ("log", lambda h, f: jnp.log(f), F32, "keep", F32),
    ("reduce_sum", lambda h, f: jnp.sum(h), F32, "keep", HALF),
    ("reduce_max", lambda h, f: f.max(0), F32, "half", HALF),
    ("tanh", lambda h, f: jnp.tanh(h), HALF, "float32", F32),
    ("tanh", lambda h, f: jnp.tanh(h), HALF, "opaque", F32),
    ("tanh", lambda h, f: jnp.tanh(h), HALF, "conditional", F32),
    ("add", lambda h, f: h + h, HALF, "float32", F32),
    ("mul", lambda h, f: f * f, F32, "half", HALF),
  ],
)
def test_the_users_list_wins_both_ways(name, fn, standard, part, edited):
  def both(x):
    # A matmul by an operation that stays as it is listed, so that the override is not in it.
    h = jax.lax.conv_general_dilated(x[None], x[:, :, None], (1,), "SAME")[0]
    return fn(h, jax.lax.cumsum(x))

  edit = {name: lambda params: F32} if part == "conditional" else [name]
  for ops, dtype in ((None, standard), (mpjax.OpLists().replace(**{part: edit}), edited)):
    assert operands(both, name, ops, jnp.eye(4)) == {dtype}


def test_a_loss_that_is_unsafe_in_half_runs_in_float32():
  # PyTorch refuses binary cross entropy of probabilities: 1 - p is 0 in half above 0.998.
  def loss(x):
    p = jax.nn.sigmoid(8 * (x @ x))
    return -jnp.mean(jnp.log(p) + jnp.log1p(-p))

  for name in ("log", "log1p", "reduce_sum"):
    assert operands(loss, name, None, jnp.eye(4)) == {F32}, name
  assert np.isfinite(mpjax.autocast(loss)(jnp.eye(4)))


# Results.


def test_weak_types_are_kept():
  def fun(x, s):
    weak = [jnp.asarray(number) for number in (1, 2.5, 1j)]
    made = [(each, each * 2, each + 1) for each in weak]
    carried = lax.scan(lambda c, _: (c * 2, None), 1.0, length=2)[0]
    strong = (s * s).astype("float32"), s.astype("float32")
    return made, x, (x @ x.T) * s, s, s * s, *strong, carried

  args = X, jnp.asarray(2.0)
  plain, ours = jax.make_jaxpr(fun)(*args), cast(fun, *args)
  weak_types = [True] * 9 + [False, False, True, True, False, False, True]
  assert [v.weak_type for v in ours.out_avals] == weak_types
  assert [v.weak_type for v in plain.out_avals] == weak_types


def test_dead_results_are_written_as_they_were():
  def fun(w, x):
    lax.sort([x @ w, jnp.exp(x)], num_keys=1)
    values, _ = lax.top_k(x @ w, 2)
    return values

  assert types(cast(fun, W, X), "sort") == [("bfloat16", "float32", "bfloat16")]
  assert jax.eval_shape(mpjax.autocast(fun), W, X).dtype == "float32"


# Scopes.


def test_equations_keep_their_source_lines_and_scopes():
  def fun(w, x):
    with jax.named_scope("first"):
      y = x @ w
    with jax.named_scope("second"):
      return jnp.exp(y)

  def places(program):
    found = {}
    for eqn in program.jaxpr.eqns:
      frames = eqn.source_info.traceback.frames
      lines = [f.line_num for f in frames if f.function_name.endswith("fun")]
      found.setdefault(eqn.primitive.name, (str(eqn.source_info.name_stack), lines))
    return found

  plain, ours = places(jax.make_jaxpr(fun)(W, X)), places(cast(fun, W, X))
  assert plain["dot_general"] == ours["dot_general"]
  assert plain["exp"] == ours["exp"]
  assert (ours["dot_general"][0], ours["exp"][0]) == ("first", "second")
  # A cast has the scope of its reader.
  assert ours["convert_element_type"][0] == "first"


# What would go wrong without a word: no error, no NaN, only other numbers.


@BOTH
def test_an_argument_that_is_kept_keeps_its_bits(half):
  # A hand-written skip, a branch, a maximum: in half, 1.00123 would be another number.
  def fun(ok, w, x):
    new = x @ w
    return jnp.where(ok, new, w), jax.lax.cond(ok, lambda: new, lambda: w), jnp.maximum(w, new)

  w = np.full((3, 3), 1.00123, np.float32)
  for kept in jax.jit(mpjax.autocast(fun, half))(np.asarray(False), w, -np.ones((3, 3), "f")):
    np.testing.assert_array_equal(kept, w)


@BOTH
def test_an_optimizer_step_inside_moves_the_parameters(half):
  # Each update is below half the distance of two numbers in half.
  x, y, w = np.ones((4, 1), np.float32), np.full((4, 1), 2.0, np.float32), np.ones((1, 1), "f")

  def step(w):
    return w - 1e-5 * jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)

  new = jax.jit(mpjax.autocast(step, half))(w)
  np.testing.assert_array_equal(new, w + np.float32(1e-5) * np.float32(2))


@pytest.mark.parametrize("result", ["bfloat16", "float64"])
def test_a_product_of_a_chosen_type_keeps_it(result):
  def fun(a, b):
    return jax.lax.dot(a, b, preferred_element_type=result)

  with jax.enable_x64(True):
    a = jnp.full((2, 2), 2.0**40, jnp.float32)
    found = mpjax.autocast(fun, "mixed_float16")(a, a)
    assert found.dtype == result
    np.testing.assert_array_equal(found, fun(a, a))
