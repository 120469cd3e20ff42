"""The dtype of each operation: a group of tests for each row of the table in `operations.py`.

A case is a function of a parameter `w`, an input `x` and an activation `h` in low precision.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import mpjax
from mpjax._autocast.scopes import end_of_layer, end_of_policy
from tests import programs
from tests.autocast import checks
from tests.autocast.rig import BOTH, rewritten
from tests.models.values import normal
from tests.programs import bits

X, W = normal(8, 8), normal(8, 8, seed=1) / 2
LOW, F32 = "bfloat16", "float32"
LEAST = float(np.finfo(np.float32).min)

any_dtype = functools.partial(rewritten, results=lambda out: out)
"""A function under a compute dtype whose results may have any dtype, so that they widen nothing."""


def equations(fun, half=LOW, **options):
  """Returns the equations of a case under autocast; a matmul uses its result."""

  def whole(w, x):
    return fun(w, x, x @ w).reshape(-1, 8) @ w

  cast = mpjax.autocast(whole, half, data_argnums=1, **options)
  # The last reshape and matmul are not part of the case.
  return [eqn for eqn, _ in programs.equations(jax.make_jaxpr(cast)(W, X))]


def dtypes(eqn):
  """Returns the dtypes of the floating operands and results of an equation."""
  avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
  return {str(aval.dtype) for aval in avals if jnp.issubdtype(aval.dtype, jnp.floating)}


def runs_in(fun, name, half=LOW):
  """Returns the dtypes of the last operation of a primitive in a case."""
  return dtypes([eqn for eqn in equations(fun, half) if eqn.primitive.name == name][-1])


def of_matmul(fun, half=LOW):
  """Returns the dtypes of the matmul that a case ends with."""
  return dtypes([eqn for eqn in equations(fun, half) if eqn.primitive.name == "dot_general"][-2])


def cases(table):
  return pytest.mark.parametrize(("fun", "dtype"), table.values(), ids=table)


def operations(table):
  return pytest.mark.parametrize(("fun", "name", "dtype"), table.values(), ids=table)


# Matmuls.


def in_two(rows, w, x):
  """Returns an input and a parameter with two axes to contract, of 8 elements or `rows` alone."""
  columns = 8 // rows
  return x[:, : rows * columns].reshape(8, rows, columns), w[: rows * columns].reshape(
    rows, columns, 8
  )


MATMULS = {
  # name: a case that ends with a matmul, and its dtype.
  "input and parameter": (lambda w, x, h: x @ w, LOW),
  "parameters": (lambda w, x, h: w @ w, LOW),
  "activations": (lambda w, x, h: h @ h.T, LOW),
  "activation and input": (lambda w, x, h: h @ x, LOW),
  "float32 activation": (lambda w, x, h: (jnp.exp(h) + 1) @ w, LOW),
  "parameter and number": (lambda w, x, h: w @ jnp.ones((8, 8)), LOW),
  # As written.
  "inputs": (lambda w, x, h: x @ x, F32),
  "input and number": (lambda w, x, h: x @ jnp.ones((8, 8)), F32),
  "input and mask": (lambda w, x, h: (x > 0).astype("float32") @ x, F32),
  "numbers": (lambda w, x, h: (x > 0).astype("float32") @ jnp.ones((8, 8)), F32),
  # With fewer than eight products and an input among the operands.
  "eight products of an input": (lambda w, x, h: x[:, :8] @ w[:8], LOW),
  "seven products of an input": (lambda w, x, h: x[:, :7] @ w[:7], F32),
  "seven products of an activation and an input": (lambda w, x, h: h[:, :7] @ x[:7], F32),
  "seven products of an activation": (lambda w, x, h: h[:, :7] @ w[:7], LOW),
  "seven products of parameters": (lambda w, x, h: w[:, :7] @ w[:7], LOW),
  # With fewer than eight products, and two to seven rows or columns.
  "two rows": (lambda w, x, h: h[:2, :7] @ w[:7], F32),
  "seven columns": (lambda w, x, h: h[:, :7] @ w[:7, :7], F32),
  "seven columns of eight products": (lambda w, x, h: h @ w[:, :7], LOW),
  "a row": (lambda w, x, h: h[:1, :7] @ w[:7], LOW),
  "a vector": (lambda w, x, h: h[0, :7] @ w[:7], LOW),
  "a batch of two": (lambda w, x, h: jnp.einsum("bei,ein->ebn", *in_two(2, w, h)), LOW),
  "eight products over two axes": (
    lambda w, x, h: jnp.einsum("bij,ijn->bn", *in_two(4, w, x)),
    LOW,
  ),
  "seven products over two axes": (
    lambda w, x, h: jnp.einsum("bij,ijn->bn", *in_two(7, w, x)),
    F32,
  ),
}


@cases(MATMULS)
def test_a_matmul_of(fun, dtype):
  assert of_matmul(fun) == {dtype}


def test_a_convolution_of_an_input_sums_enough_products():
  def fun(w, x, h):
    return lax.conv(x[None, :1], w[None, :1, :3], (1,), "SAME")

  assert runs_in(fun, "conv_general_dilated") == {LOW}


def test_the_result_of_a_matmul_in_float32_is_an_activation():
  # So it is rounded for another matmul, and decides in a multiplication.
  seven = lambda w, x, h: x[:, :7] @ w[:7]  # noqa: E731
  assert of_matmul(lambda *args: seven(*args) @ args[0]) == {LOW}
  assert runs_in(lambda *args: seven(*args) * args[2], "mul") == {F32}


def outer(x, y):
  return jnp.einsum("i,j->ij", x, y)


WITHOUT_CONTRACTION = {
  "activations": (lambda w, x, h: outer(h[0], h[1]), LOW),
  "activation and parameter": (lambda w, x, h: outer(h[0], w[1]), LOW),
  "activation and input": (lambda w, x, h: outer(h[0], x[1]), F32),
  "before a float32 operation": (lambda w, x, h: jnp.exp(outer(h[0], h[1])), F32),
}


@pytest.mark.parametrize(("fun", "dtype"), WITHOUT_CONTRACTION.values(), ids=WITHOUT_CONTRACTION)
def test_a_matmul_without_a_contracted_axis_is_a_multiplication_of(fun, dtype):
  eqns = [eqn for eqn in equations(fun) if eqn.primitive.name == "dot_general"]
  assert dtypes(eqns[-2]) == {dtype}


def test_a_matmul_without_a_free_axis_is_a_sum():
  assert of_matmul(lambda w, x, h: jnp.vdot(h[0], w[0]) * h) == {F32}
  experts = lambda w, x, h: jnp.einsum("bi,bi->b", h, h)  # noqa: E731
  assert of_matmul(experts) == {F32}


# The float32 list.


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
def test_a_sum_of_low_precision_numbers_is_exact_in_float32(half):
  def fun(ones, one, zeros):
    return {name: add((ones @ one)[:, 0], zeros) for name, add in ADDED.items()}

  halves, pair = np.full((COUNT, 2), 0.5, np.float32), np.ones((2, 1), np.float32)
  args = halves, pair, np.zeros(COUNT, np.int32)
  found = programs.run(mpjax.autocast(fun, half), *args)
  assert found == dict.fromkeys(ADDED, COUNT)
  big = np.full((8, 2), 65504 / 2, np.float32)
  total = programs.run(mpjax.autocast(lambda x, w: (x @ w).sum(), half), big, args[1])
  assert total == 8 * float(jnp.asarray(65504, half)), "more than float16 holds"


# Anything else.

ANYTHING_ELSE = {
  # name: a case, the operation in question, and its dtype.
  "activation": (lambda w, x, h: jnp.tanh(h), "tanh", LOW),
  "activations": (lambda w, x, h: h * h, "mul", LOW),
  # Parameters and numbers decide nothing.
  "parameter in arithmetic": (lambda w, x, h: h * w, "mul", LOW),
  "parameter in a choice": (lambda w, x, h: jnp.maximum(h, w), "max", LOW),
  "parameter in a selection": (lambda w, x, h: jnp.where(x > 0, h, w), "select_n", LOW),
  "parameter in a comparison": (lambda w, x, h: jnp.where(h > w, h, 0), "gt", LOW),
  "parameter scaled": (lambda w, x, h: h * jnp.tanh(2 * w), "mul", LOW),
  "bias": (lambda w, x, h: h + w[:1], "add", LOW),
  "parameters alone": (lambda w, x, h: jnp.tanh(w), "tanh", F32),
  "parameter as a buffer": (lambda w, x, h: w.at[0].set(h[0]), "scatter", LOW),
  "number": (lambda w, x, h: 0.999 * h, "mul", LOW),
  "infinity": (lambda w, x, h: jnp.where(x > 0, h, -jnp.inf), "select_n", LOW),
  "mask": (lambda w, x, h: h * (x > 0).astype("float32"), "mul", LOW),
  "buffer of zeros": (lambda w, x, h: jnp.zeros((8, 8)).at[0].set(h[0]), "scatter", LOW),
  # A number that leaves the range.
  "large number": (lambda w, x, h: jnp.where(x > 0, h, LEAST), "select_n", F32),
  "large number in a mask": (
    lambda w, x, h: jnp.where(x > 9, h, jnp.where(x > 0, 0, LEAST)),
    *("select_n", F32),
  ),
  "small number": (lambda w, x, h: h * 1e-40, "mul", F32),
  # An input, and a float32 activation.
  "input": (lambda w, x, h: h * x, "mul", F32),
  "inputs alone": (lambda w, x, h: jnp.tanh(x), "tanh", F32),
  "input and parameter": (lambda w, x, h: x * w, "mul", F32),
  "input as a buffer": (lambda w, x, h: x.at[0].set(h[0]), "scatter", F32),
  "input written into an activation": (
    lambda w, x, h: lax.dynamic_update_slice(h, x[:1], (0, 0)),
    *("dynamic_update_slice", F32),
  ),
  "integers": (lambda w, x, h: jnp.maximum(h, jnp.arange(8).astype("float32")[None]), "max", F32),
  "computed positions": (lambda w, x, h: jnp.maximum(h, jnp.arange(8.0)[None]), "max", F32),
  "float32 activation": (lambda w, x, h: h * jnp.exp(h), "mul", F32),
  "moved float32 activation": (lambda w, x, h: h * jnp.exp(h).T[::-1], "mul", F32),
  "sum": (lambda w, x, h: h * h.sum(-1, keepdims=True), "mul", F32),
}


@operations(ANYTHING_ELSE)
def test_another_operation_of(fun, name, dtype):
  assert runs_in(fun, name) == {dtype}


@pytest.mark.parametrize(
  ("half", "number", "dtype"),
  [
    ("float16", 0.999, "float16"),
    ("float16", np.inf, "float16"),
    ("float16", 1e-10, F32),
    ("float16", 1e5, F32),
    ("bfloat16", 1e5, "bfloat16"),
    ("bfloat16", 1e-30, "bfloat16"),
    ("bfloat16", LEAST, F32),
  ],
)
@pytest.mark.parametrize(
  "outside", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"]
)
def test_the_range_of_a_number_decides_and_not_its_digits(outside, half, number, dtype):
  # A literal, or closed over: an epsilon of 1e-10 in a `jit` was 0, and 0 / 0 a NaN.
  constant = jnp.float32(number)
  for inner in (lambda h: jnp.maximum(h, constant), lambda h: jnp.maximum(h, np.float32(number))):
    called = outside(inner)
    assert runs_in(lambda w, x, h, called=called: called(h), "max", half) == {dtype}


def test_the_range_of_a_number_is_that_of_the_dtype_of_its_rule():
  constant, rule = jnp.float32(1e-6), mpjax.Rule("mixed_float16", path="head")

  def fun(w, x, h):
    with jax.named_scope("head"):
      return (x @ w) * constant

  (eqn,) = (eqn for eqn in equations(fun, rules=[rule]) if eqn.primitive.name == "mul")
  assert dtypes(eqn) == {F32}


# Arithmetic, which a consumer widens.

WIDENED = {
  "a float32 operation": (lambda w, x, h: jnp.exp(h * h), "mul", F32),
  "a sum over axes": (lambda w, x, h: (h * h).sum(0), "mul", F32),
  "behind arithmetic and moves": (lambda w, x, h: jnp.exp(jnp.tanh(h * h).T), "mul", F32),
  "a difference": (lambda w, x, h: 1 - jax.nn.sigmoid(h), "logistic", F32),
  "the difference itself": (lambda w, x, h: 1 - jax.nn.sigmoid(h), "sub", F32),
  "a comparison": (lambda w, x, h: jnp.where(h * h > 0.5, h, 0), "mul", F32),
  "a rounding to integers": (lambda w, x, h: jnp.floor(h * h), "mul", F32),
  "a softmax": (
    lambda w, x, h: jnp.exp(h - lax.stop_gradient(h.max(-1, keepdims=True))),
    *("sub", F32),
  ),
  "both a matmul and a float32 operation": (
    lambda w, x, h: jnp.exp(y := h * h) * (y @ w),
    *("mul", F32),
  ),
  # No consumer widens it.
  "a matmul": (lambda w, x, h: h * h, "mul", LOW),
  "a multiplication": (lambda w, x, h: jnp.tanh(h) * h, "tanh", LOW),
  # A function that keeps its dtype is no arithmetic.
  "no arithmetic": (lambda w, x, h: jnp.exp(jax.nn.relu(h)), "max", LOW),
  "behind a function that keeps its dtype": (
    lambda w, x, h: jnp.exp(jax.nn.relu(jnp.tanh(h))),
    *("tanh", F32),
  ),
}


@operations(WIDENED)
def test_arithmetic_runs_in_float32_for(fun, name, dtype):
  assert runs_in(fun, name) == {dtype}


ADDITIONS = {
  "activations": (lambda w, x, h: jnp.exp(h + h.T), "add", LOW),
  "activation and parameter": (lambda w, x, h: jnp.exp(h + w), "add", LOW),
  "gradients": (lambda w, x, h: jnp.exp(h + h.T), "add", LOW),
  # These are not widened, and float32 operands still decide.
  "activation and input": (lambda w, x, h: h + x, "add", F32),
  # A bias is no array: it has one axis that is longer than 1.
  "activation and bias": (lambda w, x, h: jnp.exp(h + w[:1]), "add", F32),
  "activation and number": (lambda w, x, h: jnp.exp(h + 1.5), "add", F32),
  "difference of activations": (lambda w, x, h: jnp.exp(h - h.T), "sub", F32),
  # What is added to an array is widened, except for an addition.
  "a bias in a branch": (lambda w, x, h: h.T + (h + w[:1]), "add", LOW),
  "a bias in a branch, before a norm": (lambda w, x, h: jnp.exp(h.T + (h + w[:1])), "add", LOW),
  "a number in a branch": (lambda w, x, h: h.T + 2 * (h + 1.5), "add", F32),
  "a mask": (lambda w, x, h: jnp.exp(h + jnp.where(x > 0, 0, -9.0)), "add", F32),
}


@operations(ADDITIONS)
def test_the_addition_of_two_arrays_is_not_widened(fun, name, dtype):
  assert runs_in(fun, name) == {dtype}


def test_parts_of_an_activation_are_taken_in_float32_variables_if_float32_uses_them():
  # Their gradients are added, in float32.
  fun = lambda w, x, h: jnp.exp(h[1:] - h[:-1])  # noqa: E731
  parts = [eqn for eqn in equations(fun) if eqn.primitive.name == "slice"]
  assert [dtypes(eqn) for eqn in parts] == [{F32}, {F32}]
  assert len({eqn.invars[0] for eqn in parts}) == 1  # It is cast once.
  assert runs_in(lambda w, x, h: h[:4] @ h, "slice") == {LOW}


def test_a_selection_runs_in_float32_if_a_float32_operation_uses_it():
  masked = lambda w, x, h: jnp.where(x > 0, h, -1e9)  # noqa: E731
  softmax = lambda w, x, h: jax.nn.softmax(masked(w, x, h))  # noqa: E731
  assert runs_in(softmax, "select_n") == {F32}
  assert runs_in(masked, "select_n") == {LOW}
  # A derivative rule selects zeros, which JAX saves.
  relu = mpjax.autocast(lambda w, x: jax.nn.relu(x @ w), LOW)
  program = jax.make_jaxpr(lambda w, x: jax.jvp(relu, (w, x), (w, x))[1])(W, X)
  chosen = [eqn for eqn, _ in programs.equations(program) if eqn.primitive.name == "select_n"]
  assert [dtypes(eqn) for eqn in chosen] == [{LOW}]


def test_an_integer_that_pads_an_activation_is_not_rounded():
  def fun(w, x, n):
    return jax.lax.pad(x @ w, n.astype("float32"), ((0, 1, 0), (0, 0, 0)))

  padded = mpjax.autocast(fun, "bfloat16")(W, X, jnp.int32(1001))
  np.testing.assert_array_equal(padded[-1], 1001)


def test_zero_and_minus_zero_are_two_numbers():
  joined = jax.jit(lambda h, c: jnp.concatenate([h, jnp.broadcast_to(c, h.shape)]))
  for number in (0.0, -0.0):
    fun = mpjax.autocast(lambda w, x, c=number: joined(x @ w, c), "bfloat16")
    assert np.signbit(fun(W, X)[-1, 0]) == np.signbit(number)


def test_a_matmul_with_a_precision_of_its_own_returns_an_activation():
  fun = lambda w, x, h: jnp.dot(x, w, precision="highest")  # noqa: E731
  assert of_matmul(fun) == {F32}
  assert of_matmul(lambda w, x, h: fun(w, x, h) @ fun(w, x, h)) == {LOW}


FLOAT32_RESULTS = {
  # Of a sigmoid that is rounded before, 1 - sigmoid(7) is 0.
  "arithmetic": lambda y, b: 1 - jax.nn.sigmoid(y),
  "arithmetic of arithmetic": lambda y, b: 1 - jnp.tanh(y) ** 2,
  "addition of two arrays": lambda y, b: y + y.T,
  "choice": jnp.maximum,
  "selection": lambda y, b: jnp.where(y > 4, y, b),
}


@pytest.mark.parametrize("fun", FLOAT32_RESULTS.values(), ids=FLOAT32_RESULTS)
def test_an_operation_that_computes_a_float32_result_of_the_policy_is_float32(fun):
  # Low-precision numbers whose sums need more digits, and parameters that do.
  logits = jnp.tile(jnp.asarray([[3.0, 1.0078125], [1, 7]]), (4, 4))
  b = jnp.full((8, 8), 5.00123)
  ends = any_dtype(lambda y, b, eye: end_of_policy(fun(y @ eye, b), jnp.dtype("float32")))
  np.testing.assert_array_equal(ends(logits, b, jnp.eye(8)), fun(logits, b))


def test_a_result_of_any_dtype_keeps_a_float32_activation_and_widens_nothing():
  found = jax.eval_shape(any_dtype(lambda w, x: (jnp.exp(x @ w), jnp.tanh(x @ w))), W, X)
  assert [y.dtype for y in found] == [F32, LOW]


# Rounding.

ROUNDED = {
  "matmuls": lambda w, x, h: jnp.exp(h),
  "moves before a matmul": lambda w, x, h: jnp.exp(h).T[::-1],
  "a function that keeps its dtype": lambda w, x, h: jnp.tanh(jax.nn.relu(jnp.exp(h))),
  "a selection": lambda w, x, h: jnp.where(x > 0, jnp.exp(h), h),
}
NOT_ROUNDED = {
  "a multiplication": lambda w, x, h: jnp.tanh(jnp.exp(h)) * h,
  "an addition": lambda w, x, h: jnp.tanh(jnp.exp(h)) + h,
  "a comparison": lambda w, x, h: jnp.where(jnp.tanh(jnp.exp(h)) > 1, x, 0),
  "a matmul and a multiplication": lambda w, x, h: (y := jnp.tanh(jnp.exp(h))) * (y @ w),
}


@pytest.mark.parametrize("fun", ROUNDED.values(), ids=ROUNDED)
def test_a_float32_activation_is_rounded_before(fun):
  eqns = equations(fun)
  exp = next(i for i, eqn in enumerate(eqns) if eqn.primitive.name == "exp")
  cast = eqns[exp + 1]
  assert cast.invars == eqns[exp].outvars
  assert dtypes(cast) == {F32, LOW}


@pytest.mark.parametrize("fun", NOT_ROUNDED.values(), ids=NOT_ROUNDED)
def test_a_float32_activation_is_not_rounded_before(fun):
  assert runs_in(fun, "tanh") == {F32}


def test_an_input_is_not_rounded_before_a_matmul_uses_it():
  assert runs_in(lambda w, x, h: jnp.tanh(x).T, "transpose") == {F32}


# Ends of layers and policies.


def test_the_end_of_a_policy_has_its_dtype_for_all_consumers_and_is_cast_once():
  for dtype in (F32, LOW):
    fun = any_dtype(lambda w, x, dtype=dtype: end_of_policy(x @ w, jnp.dtype(dtype)) + 1)
    assert jax.eval_shape(fun, W, X).dtype == dtype
  for fun, dtype, casts in (
    (lambda end, w, x: end(x @ w), LOW, {"float32->bfloat16": 2}),
    # A float32 activation is rounded, too, and a low-precision one is not cast there and back.
    (
      lambda end, w, x: jnp.exp(end(jnp.exp(x))),
      LOW,
      {"float32->bfloat16": 1, "bfloat16->float32": 1},
    ),
    # The ReLU runs in float32, because the policy returns it. Two matmuls take four operands.
    (
      lambda end, w, x: end(jax.nn.relu(x @ w)) @ w,
      F32,
      {"float32->bfloat16": 4, "bfloat16->float32": 1},
    ),
  ):
    end = functools.partial(end_of_policy, dtype=jnp.dtype(dtype))
    found = jax.make_jaxpr(any_dtype(functools.partial(fun, end)))(W, X)
    assert programs.converts(found) == casts


@pytest.mark.parametrize("dtype", [F32, LOW])
def test_the_end_of_a_policy_is_an_input_in_float32_and_an_activation_in_low_precision(dtype):
  end = lambda w, x, h, dtype=dtype: end_of_policy(h, jnp.dtype(dtype))  # noqa: E731
  assert of_matmul(lambda *args, end=end: end(*args) @ end(*args)) == {dtype}


@pytest.mark.parametrize(
  "layer", [lambda w, x, h: w / 3, lambda w, x, h: x, lambda w, x, h: jnp.exp(h) + h]
)
def test_the_end_of_a_layer_is_an_activation_in_the_compute_dtype(layer):
  # Of a parameter alone, of an input alone, and of a float32 activation.
  end = lambda *args, layer=layer: end_of_layer(layer(*args), LOW)  # noqa: E731
  assert runs_in(lambda *args, end=end: jnp.tanh(end(*args)), "tanh") == {LOW}
  assert of_matmul(lambda *args, end=end: end(*args) @ end(*args)) == {LOW}


def test_a_float32_result_of_the_policy_is_not_rounded_at_the_end_of_a_layer():
  def fun(w, x):
    return end_of_policy(end_of_layer((x @ w) / 3, LOW), jnp.dtype(F32))

  found = programs.converts(jax.make_jaxpr(any_dtype(fun))(W, X))
  # The operands of the matmul are cast, and its result.
  assert found == {"float32->bfloat16": 2, "bfloat16->float32": 1}


# Casts.

HALVES = ("bfloat16", "float16")


@BOTH
@pytest.mark.parametrize("chosen", HALVES)
def test_the_users_cast_to_low_precision_stays(chosen, half):
  def fun(w, x):
    y = x.astype(chosen) * 2
    return y, y.astype("float32") + jnp.exp(x), x.astype(chosen) @ w.astype(chosen)

  found = jax.make_jaxpr(mpjax.autocast(fun, half))(W, X)
  eqns = {eqn.primitive.name: dtypes(eqn) for eqn in found.eqns}
  assert eqns["mul"] == eqns["dot_general"] == {chosen}
  assert programs.converts(found) == programs.converts(jax.make_jaxpr(fun)(W, X))


def test_of_a_value_in_low_precision_only_a_cast_to_another_such_dtype_is_left():
  def fun(w, x):
    return (x @ w).astype("bfloat16"), (x @ w).astype("float16")

  found = programs.converts(jax.make_jaxpr(mpjax.autocast(fun))(W, X))
  assert found == {"float32->bfloat16": 4, "bfloat16->float16": 1}


def test_a_cast_to_float32_is_written_for_float32_consumers_alone():
  def fun(w, x, h):
    return jnp.tanh(h.astype("float32"))

  assert runs_in(fun, "tanh") == {LOW}


def test_a_matmul_that_the_user_casts_in_part_is_in_the_users_dtype():
  def mixed(w, x):  # JAX takes the two dtypes.
    return lax.dot(x.astype("float16"), w)

  found = jax.make_jaxpr(mpjax.autocast(mixed))(W, X)
  assert [p.dtypes for p in programs.products(found)] == [("float16",) * 2]
  assert [v.dtype for v in found.out_avals] == [jax.eval_shape(mixed, W, X).dtype]


def test_a_padded_array_keeps_its_dtype():
  # `jnp.pad` passes the number to its jitted body as an integer.
  def dtype(fun):
    return jax.eval_shape(any_dtype(fun), X, W).dtype

  assert dtype(lambda x, w: jnp.pad(x @ w, 1)) == LOW
  assert dtype(lambda x, w: jnp.pad(x @ w, 1, constant_values=-jnp.inf)) == LOW
  assert dtype(lambda x, w: jnp.pad(jnp.exp(x @ w), 1)) == F32
  found = any_dtype(lambda x: jnp.pad(x @ jnp.eye(8), 1, constant_values=2.5))(jnp.ones((2, 8)))
  assert np.array_equal(found, np.pad(np.ones((2, 8)), 1, constant_values=2.5))


# Operations that run as they were traced.


def test_the_users_precision_stays():
  highest = functools.partial(jnp.dot, precision="highest")
  assert of_matmul(lambda w, x, h: highest(h, w)) == {F32}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_float8"])
@pytest.mark.parametrize("result", ["bfloat16", "float64"])
def test_the_users_dtype_of_a_result_stays(result, policy):
  fun = functools.partial(lax.dot, preferred_element_type=result)
  with jax.enable_x64(True):
    a = jnp.full((128, 128), 2.0**40, jnp.float32)
    found = mpjax.autocast(fun, policy)(a, a)
    assert found.dtype == result
    np.testing.assert_array_equal(found, fun(a, a))


# Gradients that are sums over elements.

ROWS = 4096
EYE = jnp.eye(8)
ONES = jnp.ones((ROWS, 8))


def added_in_low_precision(fun, *args):
  """Returns the sums of low-precision numbers in a jaxpr: those that JAX refuses, and others."""
  with jax.allow_f16_reductions(False):
    return checks.sums(jax.make_jaxpr(fun)(*args))


def check_gradients(losses, half, *args):
  """Compares gradients with those in float32, where every term and every partial sum is exact."""
  casts = {name: jax.grad(mpjax.autocast(fun, half)) for name, fun in losses.items()}
  for name, fun in casts.items():
    assert added_in_low_precision(fun, *args) == [], name

  def each(*args):
    return {name: [fun(*args), jax.grad(losses[name])(*args)] for name, fun in casts.items()}

  for name, (found, wanted) in programs.run(each, *args).items():
    np.testing.assert_allclose(found, wanted, rtol=float(jnp.finfo(half).eps), err_msg=name)


ADD = {
  "bias": lambda y, b: y + b[None],
  "repeated": lambda y, b: y - jnp.broadcast_to(b, y.shape),
  "row of a matmul": lambda y, b: y + (jnp.ones((1, 8)) @ jnp.diag(b)),
  "activation": lambda y, b: y + jnp.tanh(jnp.ones((1, 8)) @ jnp.diag(b))[:, None][0],
  "tile": lambda y, b: y + jnp.tile(jnp.ones((1, 8)) @ jnp.diag(b), (ROWS, 1)),
}
MULTIPLY = {
  "scale": lambda y, b: y * b[None],
  "divisor": lambda y, b: y / b[None],
  "number": lambda y, b: y * b[0],
  "row of a matmul": lambda y, b: y * (jnp.ones((1, 8)) @ jnp.diag(b)),
  "outer product": lambda y, b: y[:, :1] * b[None],
  "maximum": lambda y, b: jnp.maximum(y - 1, b[None]),
}
BROADCAST = {**{f"add {k}": v for k, v in ADD.items()}, **MULTIPLY}


@pytest.mark.slow
@BOTH
def test_the_gradient_of_a_repeated_operand_is_summed_in_float32(half):
  def loss(name):
    return lambda b, x: jnp.sum((BROADCAST[name](x @ EYE, b) @ EYE) * 2.0**-8)

  check_gradients({name: loss(name) for name in BROADCAST}, half, jnp.full(8, 0.5), ONES)


@pytest.mark.parametrize("axes", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", ["bias", "scale", "divisor"])
def test_over_devices_these_gradients_are_summed_in_float32(name, axes):
  # The gradient of a replicated parameter is added up over the devices in the dtype of the sum.
  mesh = jax.make_mesh((4, 2), ("data", "model"), (axes,) * 2, devices=jax.devices("cpu")[:8])
  fun = lambda b, x: jnp.sum(({**ADD, **MULTIPLY}[name](x @ EYE, b) @ EYE) * 2.0**-8)  # noqa: E731
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((64, 8)), jax.P("data", None))
    for spec in [jax.P(None), jax.P("model")] if axes == AxisType.Explicit else [jax.P(None)]:
      b = jax.device_put(jnp.full(8, 0.5), spec)
      found = jax.grad(mpjax.autocast(fun, "bfloat16"))
      assert added_in_low_precision(found, b, x) == []
      ours, plain = jax.jit(found)(b, x), jax.jit(jax.grad(fun))(b, x)
      np.testing.assert_array_equal(ours, plain)
      assert ours.sharding == plain.sharding


@BOTH
def test_the_gradient_of_a_maximum_counts_its_positions_in_float32(half):
  losses = {
    "exp": lambda x: jnp.exp((x @ EYE).max(0) * 1.0).sum(),
    "matmul": lambda x: ((x @ EYE).max(0, keepdims=True) @ EYE).sum(),
    "minimum": lambda x: ((x @ EYE).min(0, keepdims=True) @ EYE).sum(),
    "segment": lambda x: (jax.ops.segment_max(x @ EYE, jnp.zeros(1001, int), 1) @ EYE).sum(),
  }
  check_gradients(losses, half, jnp.ones((1001, 8)))


@pytest.mark.slow
@BOTH
def test_the_gradient_of_rows_that_are_gathered_is_summed_in_float32(half):
  # A graph network uses each node in all of its edges, a decoder its encoder at each step.
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
      return jnp.sum((found @ jnp.ones((found.shape[-1], 8))) * 2.0**-8)

    return fun

  def decoded(x):
    keys = jnp.tanh((x - 1) @ EYE) + 1
    steps = lax.scan(lambda state, query: (state, query @ keys), 0.0, jnp.ones((ROWS, 1, 8)))
    return jnp.sum(steps[1] * 2.0**-8)

  losses = {**{name: gathered(read) for name, read in rows.items()}, "scan": decoded}
  check_gradients(losses, half, jnp.ones((8, 8)))


# Random numbers.


@pytest.mark.slow
def test_samples_in_low_precision_keep_their_bits():
  draw = jax.random

  def samples(key):
    return [
      each(key, shape=(64,), dtype=dtype)
      for dtype in HALVES
      for each in (
        *(draw.uniform, draw.normal, draw.gumbel, draw.exponential, draw.laplace, draw.logistic),
        *(draw.cauchy, functools.partial(draw.truncated_normal, lower=-1, upper=1)),
        functools.partial(draw.beta, a=0.5, b=2),
      )
    ]

  found, expected = (programs.run(f, draw.key(0)) for f in (mpjax.autocast(samples), samples))
  assert bits(found) == bits(expected)
