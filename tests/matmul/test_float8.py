"""The numbers of float8: scaled arrays and matmuls, against NumPy, `ml_dtypes` and float64."""

import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax._matmul import float8
from mpjax._matmul.float8 import quantise
from tests.errors import refused
from tests.format_oracle import E4M3, E5M2, Oracle, normal, quantised, scale_of
from tests.programs import equations

ALL = {"skip": ()}
RECIPES = {
  "tensor": mpjax.Float8(**ALL),
  "tensor, power of two": mpjax.Float8(power_of_two=True, **ALL),
  "tensor, half": mpjax.Float8(weight_grad="half", **ALL),
  "row": mpjax.Float8(scaling="row", **ALL),
  "row, power of two": mpjax.Float8(scaling="row", power_of_two=True, **ALL),
  "row, half": mpjax.Float8(scaling="row", weight_grad="half", **ALL),
}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def policy(recipe, half="bfloat16"):
  return mpjax.Policy(compute_dtype=half, matmul=recipe)


def cast(fun, recipe):
  # Returns `fun(w, x)` with its matmuls in float8: `w` is a parameter, and `x` is none.
  return mpjax.autocast(fun, policy(recipe), data_argnums=1)


def check(found, oracle, roundings):
  # Compares with what float64 says: so many roundings to bfloat16, and sums in float32.
  wanted, terms = oracle
  found = np.asarray(found, np.float64)
  bound = roundings * 2.0**-8 * abs(wanted) + 2.0**-18 * terms
  assert found.shape == wanted.shape
  worst = np.max(abs(found - wanted) / bound)
  assert worst <= 1, worst


# Scaled arrays.


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("axes", [None, (0,), (1,), (0, 1)])
def test_quantised_numbers_are_those_of_numpy(dtype, power_of_two, axes):
  x = normal(3, (64, 96)) * np.exp2(np.arange(96) % 40 - 20).astype(np.float32)
  q, scale, _ = jax.jit(lambda x: quantise(x, dtype, axes, power_of_two))(x)
  wanted = scale_of(x, dtype, axes, power_of_two)
  np.testing.assert_array_equal(scale, wanted.reshape(scale.shape))
  assert q.dtype == dtype
  values = np.asarray(q).astype(np.float64) * np.asarray(scale, np.float64)
  np.testing.assert_array_equal(values, quantised(x, dtype, axes, power_of_two))
  # The largest number of each group is the largest of the format, or at least half of it.
  most = float(ml_dtypes.finfo(dtype).max)
  found = np.max(np.abs(np.asarray(q).astype(np.float32)), axis=axes)
  assert np.all(found <= most)
  assert np.all(found >= (most / 2 if power_of_two else most))


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16], ids=lambda low: low.__name__)
@pytest.mark.parametrize("axes", [None, (1,)])
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_the_largest_is_taken_in_the_dtype_of_the_array(low, axes, bad):
  # Not of a copy in float32, which XLA for a GPU would read once more.
  wide = normal(5, (32, 48))
  if bad is not None:
    wide[3, 4] = bad

  def fun(wide):
    return quantise(wide.astype(low), E4M3, axes, False)

  (reduced,) = (eqn for eqn in jax.make_jaxpr(fun)(wide).eqns if eqn.primitive.name == "reduce_max")
  assert reduced.invars[0].aval.dtype == low
  rounded = np.asarray(jnp.asarray(wide).astype(low)).astype(np.float32)
  largest = np.max(np.abs(rounded), axis=axes, keepdims=axes is not None)
  found = np.asarray(jax.jit(fun)(wide).scale)
  np.testing.assert_array_equal(found, largest * np.float32(1 / 448))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_powers_of_two_are_exact_where_a_logarithm_is_not(dtype):
  most = float(ml_dtypes.finfo(dtype).max)
  for exponent in range(-100, 111, 7):
    edge = np.float32(most * 2.0**exponent)
    beside = (np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf)))
    found = [float(quantise(jnp.full((2,), x), dtype, None, True).scale) for x in beside]
    assert found == [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]


# Matmuls.


FORMULAS = {
  "matmul": ("mk,kn->mn", (24, 48), (48, 32)),
  "batch of rows": ("bmk,kn->bmn", (2, 3, 32), (32, 16)),
  "transposed": ("mk,nk->mn", (5, 16), (32, 16)),
  "weight first": ("kn,mk->nm", (8, 16), (16, 32)),
  "out of heads": ("bthd,hde->bte", (2, 3, 4, 16), (4, 16, 32)),
  "into heads": ("btd,dhe->bthe", (2, 3, 16), (16, 4, 8)),
  "two sums apart": ("ahbk,khn->abn", (2, 4, 3, 8), (8, 4, 16)),
  "experts": ("ebd,edf->ebf", (3, 6, 16), (3, 16, 32)),
  "experts behind": ("bed,def->bfe", (6, 3, 16), (16, 3, 32)),
}


@recipes
def test_an_einsum_and_its_gradients_are_those_of_rounded_operands(recipe):
  def gradients(operands):
    return {name: gradient(FORMULAS[name][0], *each) for name, each in operands.items()}

  def gradient(formula, x, w):
    def fun(w, x):
      x = x.astype(jnp.float32)
      return jnp.einsum(formula, *((w, x) if formula.startswith("kn") else (x, w)))

    y, pull = jax.vjp(lambda w, x: cast(fun, recipe)(w, x).astype(jnp.bfloat16), w, x)
    g = jnp.asarray(normal(2, y.shape, 1e-3), jnp.bfloat16)
    return y, g, pull(g)

  # In bfloat16, so that what is multiplied is what the oracle is given.
  operands = {
    name: [normal(0, x).astype(ml_dtypes.bfloat16), normal(1, w, 0.03)]
    for name, (_, x, w) in FORMULAS.items()
  }
  for name, (y, g, (of_w, of_x)) in jax.jit(gradients)(operands).items():
    formula, (x, w) = FORMULAS[name][0], operands[name]
    left, right, out = re.split(",|->", formula)
    # The weight is the left one in some, and for the oracle the right one.
    oracle = Oracle(f"{right},{left}->{out}" if left == "kn" else formula, recipe)
    g = np.asarray(g)
    assert (of_w.dtype, of_x.dtype) == (np.float32, jnp.bfloat16)
    check(y, oracle.forward(x, w), 2)
    check(of_x, oracle.of_x(g, w), 2)
    check(of_w, oracle.of_w(g, x), 0)


@recipes
def test_zeros_stay_zeros(recipe):
  fun = mpjax.autocast(lambda w, x: x @ w, policy(recipe))
  x, w = normal(0, (16, 16)), normal(1, (16, 16))
  for a, b in ((0 * x, w), (x, 0 * w), (0 * x, 0 * w)):
    y, pull = jax.vjp(fun, b, a)
    assert not np.any(y)
    of_w, of_x = pull(jnp.ones_like(y))
    assert np.any(of_w) == np.any(a)
    assert np.any(of_x) == np.any(b)
    assert all(not np.any(each) for each in pull(jnp.zeros_like(y)))
    assert all(np.all(np.isfinite(each)) for each in (y, of_w, of_x))


@recipes
def test_what_is_not_finite_is_not_clipped(recipe):
  # Clipped, an inf would be 448: a step with a wrong gradient that nobody notices.
  fun = mpjax.autocast(lambda w, x: x @ w, policy(recipe))

  @jax.jit
  def gradients(w, x, cotangent):
    y, pull = jax.vjp(fun, w, x)
    return y, *pull(cotangent.astype(y.dtype))

  for bad, where in itertools.product((np.inf, -np.inf, np.nan), ("x", "w", "cotangent")):
    given = {"x": normal(0, (16, 32)), "w": normal(1, (32, 16)), "cotangent": normal(2, (16, 16))}
    given[where][3, 5] = bad
    y, of_w, of_x = map(np.asarray, gradients(**given))
    reached = {
      "x": (y[3], of_w[5]),
      "w": (y[:, 5], of_x[:, 3]),
      "cotangent": (of_x[3], of_w[:, 5]),
    }[where]
    assert not any(np.any(np.isfinite(each)) for each in reached), (bad, where)


def integers(seed, shape, largest):
  return np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(np.float32)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_results_before_scaling_are_no_result_of_float16(half):
  # 448 * 448 * 64 is above what float16 holds; scaled, the result is 1.
  fun = mpjax.autocast(lambda w, x: x @ w, policy(mpjax.Float8(**ALL), half))
  y = fun(jnp.full((64, 16), 1 / 8), jnp.full((16, 64), 1 / 8))
  np.testing.assert_allclose(y, np.ones((16, 16)), rtol=2**-8)


@pytest.mark.parametrize("exponent", [-14, 24])
@pytest.mark.parametrize("recipe", list(RECIPES.values())[:4], ids=list(RECIPES)[:4])
def test_a_loss_scale_is_invisible(recipe, exponent):
  # The scale of the gradient follows the loss scale, and the numbers in float8 are the same.
  fun = mpjax.autocast(lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])), policy(recipe))
  w = (normal(1, (32, 16), 0.3), normal(2, (16, 32), 0.3))
  x, factor = normal(0, (16, 32)), np.float32(2.0**exponent)
  plain = jax.jit(jax.grad(fun, (0, 1)))(w, x)
  scaled = jax.jit(jax.grad(lambda w, x: fun(w, x) * factor, (0, 1)))(w, x)
  for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(scaled), strict=True):
    np.testing.assert_array_equal(one * factor, other)


def dots(program):
  # The dtypes of the operands of each `dot_general`, and that of its result.
  eqns = [eqn for eqn, _ in equations(program) if eqn.primitive.name == "dot_general"]
  assert all(eqn.params["preferred_element_type"] is not None for eqn in eqns)
  return [tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)) for eqn in eqns]


FORWARD = ("float8_e4m3fn", "float8_e4m3fn", "bfloat16")
OF_X = ("float8_e5m2", "float8_e4m3fn", "bfloat16")
OF_W = ("float8_e5m2", "float8_e4m3fn", "float32")


@recipes
def test_all_three_matmuls_have_operands_in_float8(recipe):
  fun = cast(lambda w, x: jnp.sum(jnp.tanh(x.astype(jnp.float32) @ w)), recipe)
  w, x = normal(1, (32, 16)), normal(0, (16, 32)).astype(ml_dtypes.bfloat16)
  found = dots(jax.make_jaxpr(jax.grad(fun, (0, 1)))(w, x))
  half = ("bfloat16", "bfloat16", "float32")
  assert sorted(found) == sorted([FORWARD, OF_X, half if recipe.weight_grad == "half" else OF_W])


def test_forward_mode():
  recipe = mpjax.Float8(power_of_two=True, **ALL)
  fun = mpjax.autocast(lambda w, x: x @ w, policy(recipe))
  x, w = integers(0, (16, 32), 2), integers(1, (32, 16), 2)
  t, u = integers(2, (32, 16), 2), integers(3, (16, 32), 2)
  y, tangent = jax.jvp(fun, (w, x), (t, u))
  np.testing.assert_array_equal(y, x @ w)
  np.testing.assert_array_equal(tangent, x @ t + u @ w)
  columns = jax.vmap(lambda t: jax.jvp(lambda w: fun(w, x), (w,), (t,))[1])(np.stack([t, 2 * t]))
  np.testing.assert_array_equal(columns, np.stack([x @ t, 2 * (x @ t)]))


@pytest.mark.parametrize(
  "twice",
  [
    lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w) ** 2)),
    lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,)),
    lambda f: jax.grad(lambda w: jax.jvp(f, (w,), (w,))[1]),
    lambda f: lambda w: jax.jvp(lambda w: jax.jvp(f, (w,), (w,))[1], (w,), (w,)),
  ],
  ids=["reverse twice", "forward over reverse", "reverse over forward", "forward twice"],
)
def test_second_derivatives_are_refused(twice):
  # Tangents of float8 arrays are float8 without a scale: most of them would be 0.
  fun = mpjax.autocast(lambda w: jnp.sum(jnp.tanh(jnp.tanh(w) @ w)), policy(RECIPES["row"]))
  got, fix = "a derivative of its gradient", '"mixed_bfloat16"'
  with refused(TypeError, "a matmul in float8", "first derivatives", got, fix):
    jax.make_jaxpr(twice(fun))(normal(1, (16, 16)))


@pytest.mark.parametrize("recipe", [RECIPES["tensor"], RECIPES["row, half"]], ids=["tensor", "row"])
def test_vmap_is_a_loop(recipe):
  fun = mpjax.autocast(lambda w, x: x @ w, policy(recipe))
  ws, xs = normal(1, (3, 32, 16)), normal(0, (3, 16, 32))

  def both(w, x):
    y, pull = jax.vjp(fun, w, x)
    return y, *pull(jnp.asarray(normal(2, y.shape)))

  for axes in ((0, 0), (None, 0), (0, None)):
    given = [each if axis == 0 else each[0] for each, axis in zip((ws, xs), axes, strict=True)]
    found = jax.jit(jax.vmap(both, in_axes=axes))(*given)
    for i in range(3):
      one = [each[i] if axis == 0 else each for each, axis in zip(given, axes, strict=True)]
      for a, b in zip(found, jax.jit(both)(*one), strict=True):
        # The compiler may leave out a rounding to bfloat16 in one of them.
        np.testing.assert_allclose(a[i], b, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize(
  "options", [{}, {"weight_grad": "half"}, {"scaling": "row"}], ids=["tensor", "half", "row"]
)
def test_a_weight_that_a_batch_shares_has_one_matmul_for_its_gradient(options):
  # Added up after a matmul for each example, there would be a gradient for each in memory: as
  # there is with scales of rows, of which the sum is in float32.
  recipe = mpjax.Float8(power_of_two=True, **options, **ALL)
  fun = mpjax.autocast(lambda w, x: x @ w, policy(recipe))
  w, xs, g = (
    integers(1, (32, 16), 2),
    integers(0, (3, 4, 24, 32), 2),
    integers(2, (3, 4, 24, 16), 2),
  )
  xs *= np.exp2(np.arange(-6, 6)).reshape(3, 4, 1, 1).astype(np.float32)
  xs[1, 2] = 0

  def loss(w, fun):
    both = jax.vmap(jax.vmap(fun, in_axes=(None, 0)), in_axes=(None, 0))
    return jnp.sum(both(w, xs) * g)

  found = jax.grad(loss)(w, fun)
  np.testing.assert_array_equal(found, np.einsum("abmk,abmn->kn", xs.astype(np.float64), g))
  shapes = [
    tuple(v.aval.shape)
    for eqn in jax.make_jaxpr(jax.grad(lambda w: loss(w, fun)))(w).eqns
    for v in eqn.outvars
  ]
  of_examples = any(shape[-2:] in ((32, 16), (16, 32)) and len(shape) > 2 for shape in shapes)
  assert of_examples == ("scaling" in options)


def test_layers_of_one_kind_are_traced_once(monkeypatch):
  # Traced one by one, a gradient of 60 layers takes twice the time of one in bfloat16.
  calls = []

  def counting(*args):
    calls.append(args)
    return quantise(*args)

  monkeypatch.setattr(float8, "quantise", counting)

  def count(layers, size):
    def loss(ws, x):
      for w in ws:
        x = jnp.sin(x @ w)
      return jnp.sum(x)

    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((size, size), (16, size)))
    calls.clear()
    jax.make_jaxpr(jax.grad(mpjax.autocast(loss, policy(mpjax.Float8(**ALL)))))([w] * layers, x)
    return len(calls)

  # The first layer has another operand than the others: float32.
  assert 0 < count(2, 112) == count(6, 144)
