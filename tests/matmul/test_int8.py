"""Int8: scaled arrays against NumPy, sums in int32, and what an audit says of them."""

import math

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._jaxpr.count import dot_axes
from mpjax._matmul.int8 import LARGEST, LONGEST, Int8Recipe, quantise
from tests.autocast.rig import matmuls, under
from tests.format_oracle import int8, normal
from tests.matmul.rig import INT8_GRADIENTS, layer, layer_in, operands
from tests.programs import equations, with_gradients

ROW = mpjax.Int8()


# Scaled arrays.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axes", [None, (0,), (1,), (0, 1)])
def test_quantised_numbers_are_those_of_numpy(dtype, axes):
  x = normal(3, (64, 96)) * np.exp2(np.arange(96) % 20 - 10).astype(np.float32)
  x[:, 4] = 0
  x = jnp.asarray(x, dtype)
  values, scale, _ = jax.jit(lambda x: quantise(x, axes))(x)
  wanted, of_numpy = int8(np.asarray(x, np.float32), axes)
  assert (values.dtype, scale.dtype) == (np.int8, np.float32)
  np.testing.assert_array_equal(values, wanted)
  np.testing.assert_array_equal(scale, of_numpy)
  largest = np.max(np.abs(np.asarray(values, np.int32)), axis=axes)
  assert set(np.ravel(largest)) <= {0, LARGEST}


# Matmuls.


def test_gradients_are_those_of_the_compute_dtype():
  w, x, g = operands(ROW)
  _, *found = layer_in(ROW)(w, x, g)
  half = under(layer, weight_grad_dtype="float32")
  _, *wanted = jax.jit(with_gradients(half))(w, x, g)
  for one, other in zip(found, wanted, strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


def test_sums_are_exact():
  # All products have one sign: sums in bfloat16 or float16 would lose the last digits.
  rng = np.random.default_rng(0)
  x, w = (rng.integers(100, 128, shape).astype(np.float32) for shape in ((4, 512), (512, 16)))
  x[:, 0] = w[0] = LARGEST
  np.testing.assert_array_equal(
    jax.jit(under(layer, matmul=ROW))(w, x), (x @ w).astype(ml_dtypes.bfloat16)
  )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axes", [None, (0,), (1,)])
def test_a_nan_reaches_the_scale(axes, dtype):
  # int8 has no NaN, and the maximum of an array on a CPU may lose one.
  x = normal(0, (64, 128)).astype(dtype)
  for place in ((0, 0), (17, 33), (63, 127)):
    for bad in (np.nan, -np.nan, np.inf):
      changed = x.copy()
      changed[place] = bad
      scale = np.asarray(quantise(changed, axes).scale)
      wanted = np.isfinite(changed).all(axis=axes, keepdims=axes is not None)
      np.testing.assert_array_equal(np.isfinite(scale), wanted)


def test_a_sum_that_may_overflow_stays_in_the_compute_dtype():
  recipe = Int8Recipe(mpjax.Int8())
  assert LARGEST**2 * LONGEST < 2**31 <= LARGEST**2 * (LONGEST + 1)
  assert recipe.why_not(133136, 16) is None
  assert recipe.why_not(133152, 16) == "K=133152 products may overflow int32"
  assert recipe.why_not(24, 16) == "K=24 is no multiple of 16"


@pytest.mark.slow
@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_gradients_of_long_sums_stay_in_the_compute_dtype(scaling):
  most, more = 133120, 133152  # Multiples of 32 around the longest sum.

  def loss(w, x):
    return jnp.sum(jnp.tanh(layer(w, x)))

  def experts(w, x):
    return jnp.sum(jnp.tanh(lax.ragged_dot(x.astype(jnp.float32), w, np.array([1, 2], np.int32))))

  def examples(w, x):
    return jnp.sum(jax.vmap(under(loss, matmul=format), (None, 0))(w, x))

  def sums_and_reasons(fun, w, x):
    fun = jax.grad(fun, (0, 1))
    args = jax.ShapeDtypeStruct(w, "float32"), jax.ShapeDtypeStruct(x, "bfloat16")
    eqns = [eqn for eqn, _ in equations(jax.make_jaxpr(fun)(*args))]
    sums = {sum_of(eqn) for eqn in eqns if eqn.invars and str(eqn.invars[0].aval.dtype) == "int8"}
    return sums - {1}, {row.reason for row in mpjax.audit(fun)(*args).formats} - {""}

  format = mpjax.Int8(scaling=scaling, **INT8_GRADIENTS)
  reason = f"{more} products may overflow int32"
  for fun, groups in ((under(loss, matmul=format), ()), (under(experts, matmul=format), (2,))):
    for rows, columns, sums, reasons in (
      (most, 16, {32, 16, most}, set()),
      (more, 16, {32, 16}, {reason}),
      (64, more, {32, 64}, {reason}),
    ):
      found = sums_and_reasons(fun, (*groups, 32, columns), (rows, 32))
      assert found == (sums, reasons), (groups, rows, columns)
  # With a scale for all of it, one matmul adds up examples too, unless these are too many.
  together = 2 if scaling == "tensor" else 1
  for count, sums in ((2, {32, 16, 66560 * together}), (3, {32, 16, 66560})):
    assert sums_and_reasons(examples, (32, 16), (count, 66560, 32)) == (sums, set())


def sum_of(eqn):
  """The length of the sums of a matmul; 1 for other operations."""
  if "dot" not in eqn.primitive.name:
    return 1
  return math.prod(eqn.invars[0].aval.shape[axis] for axis in dot_axes(eqn.params).contracted[0])


def test_gradients_of_a_symbolic_length_stay_in_the_compute_dtype():
  (rows,) = jax.export.symbolic_shape("b")
  w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 16), (rows, 32)))
  fun = jax.grad(
    lambda w, x: jnp.sum(jnp.tanh(under(layer, matmul=mpjax.Int8(**INT8_GRADIENTS))(w, x)))
  )
  exported = jax.export.export(jax.jit(fun), platforms=["cpu"])(w, x)
  half = jax.grad(lambda w, x: jnp.sum(jnp.tanh(under(layer, matmul=ROW)(w, x))))
  args = normal(1, (32, 16)), normal(0, (8, 32))
  np.testing.assert_array_equal(exported.call(*args), jax.jit(half)(*args))


# What an audit says.


def test_an_audit_names_int8():
  x, w = np.ones((8, 32), np.float32), {"up": normal(0, (32, 48)), "head": normal(1, (48, 10))}

  def loss(w, x):
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["head"]) ** 2)

  grad = jax.grad(mpjax.autocast(loss, "mixed_int8", data_argnums=1))
  audit = mpjax.audit(grad)(w, x)
  assert audit.flops["forward", "int8"] == 2 * 8 * 32 * 48
  assert (audit.half_share, audit.leaks) == (1.0, ())
  flops = {row.reason: row.flops for row in audit.formats}
  assert flops[""] == 2 * 8 * 32 * 48
  assert flops["N=10 is no multiple of 16"] == 3 * 2 * 8 * 48 * 10
  assert matmuls(grad, w, x).count(("bfloat16", "bfloat16")) == 4
