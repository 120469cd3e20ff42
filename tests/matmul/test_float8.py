"""Float8: scaled arrays against NumPy and `ml_dtypes`, derivatives, and what is traced."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax
from mpjax._matmul import float8
from mpjax._matmul.float8 import Float8Recipe, quantise
from mpjax._matmul.protocol import Operand
from tests.errors import refused
from tests.format_oracle import E4M3, E5M2, normal, quantised, scale_of
from tests.matmul.rig import FLOAT8
from tests.models.values import integral

ALL = {"skip": ()}


def policy(recipe, half="bfloat16"):
  return mpjax.Policy(compute_dtype=half, matmul=recipe)


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


ROLES = {"input": E4M3, "weight": E4M3, "gradient": E5M2}


@pytest.mark.parametrize(("scaling", "scales"), [("tensor", ()), ("row", (4, 1))])
@pytest.mark.parametrize("role", ROLES)
def test_gradients_are_e5m2_and_all_other_operands_e4m3(role, scaling, scales):
  # Gradients need the range of e5m2: with that of e4m3, small ones become 0.
  recipe = Float8Recipe(mpjax.Float8(scaling=scaling))
  found = recipe.quantise(normal(3, (4, 32)), Operand((1,), role, "input_grad"))
  assert (found.values.dtype, found.scale.shape) == (ROLES[role], scales)


# Matmuls.


@pytest.mark.slow
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_results_before_scaling_are_no_result_of_float16(half):
  # 448 * 448 * 64 is above what float16 holds; scaled, the result is 1.
  fun = mpjax.autocast(lambda w, x: x @ w, policy(mpjax.Float8(**ALL), half))
  y = fun(jnp.full((64, 16), 1 / 8), jnp.full((16, 64), 1 / 8))
  np.testing.assert_allclose(y, np.ones((16, 16)), rtol=2**-8)


WIDE = [name for name in FLOAT8 if "half" not in name]


@pytest.mark.parametrize("name", WIDE)
def test_a_loss_scale_is_invisible(name):
  # The scale of the gradient follows the loss scale, and the numbers in float8 are the same.
  fun = mpjax.autocast(
    lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])), policy(FLOAT8[name])
  )
  w = (normal(1, (32, 16), 0.3), normal(2, (16, 32), 0.3))
  gradient = jax.jit(jax.grad(lambda w, x, factor: fun(w, x) * factor, (0, 1)))
  plain, *scaled = (gradient(w, normal(0, (16, 32)), 2.0**exponent) for exponent in (0, -14, 24))
  for exponent, found in zip((-14, 24), scaled, strict=True):
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
      np.testing.assert_array_equal(np.asarray(one) * np.float32(2.0**exponent), other)


@pytest.mark.slow
def test_forward_mode():
  recipe = mpjax.Float8(power_of_two=True, **ALL)
  fun = mpjax.autocast(lambda w, x: x @ w, policy(recipe))
  x, w = integral(0, (16, 32), 2), integral(1, (32, 16), 2)
  t, u = integral(2, (32, 16), 2), integral(3, (16, 32), 2)
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
  fun = mpjax.autocast(lambda w: jnp.sum(jnp.tanh(jnp.tanh(w) @ w)), policy(FLOAT8["float8 row"]))
  got, fix = "a derivative of its gradient", '"mixed_bfloat16"'
  with refused(TypeError, "a matmul in float8", "first derivatives", got, fix):
    jax.make_jaxpr(twice(fun))(normal(1, (16, 16)))


@pytest.mark.parametrize(
  "options", [{}, {"weight_grad": "half"}, {"scaling": "row"}], ids=["tensor", "half", "row"]
)
def test_a_weight_that_a_batch_shares_has_one_matmul_for_its_gradient(options):
  # Added up after a matmul for each example, there would be a gradient for each in memory: as
  # there is with scales of rows, of which the sum is in float32.
  recipe = mpjax.Float8(power_of_two=True, **options, **ALL)
  fun = mpjax.autocast(lambda w, x: x @ w, policy(recipe))
  w, xs, g = (
    integral(1, (32, 16), 2),
    np.array(integral(0, (3, 4, 24, 32), 2)),
    integral(2, (3, 4, 24, 16), 2),
  )
  xs *= np.exp2(np.arange(-6, 6)).reshape(3, 4, 1, 1).astype(np.float32)
  xs[1, 2] = 0

  def loss(w, fun):
    both = jax.vmap(jax.vmap(fun, in_axes=(None, 0)), in_axes=(None, 0))
    return jnp.sum(both(w, xs) * g)

  found = jax.jit(jax.grad(lambda w: loss(w, fun)))(w)
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
