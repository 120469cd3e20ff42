"""Operations in low precision that would be safer in float32."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax

SIXTEEN = jax.ShapeDtypeStruct((256, 8), "float16")


def lossy(fn, *args):
  return [(x.operation, x.dtype, x.reason) for x in mpjax.audit(fn)(*(args or (SIXTEEN,))).lossy]


def test_exponentials_and_logarithms():
  assert lossy(jnp.exp) == [("exp", "float16", "less exact than in float32")]
  assert lossy(lambda x: jnp.exp(x.astype("float32"))) == []


def test_long_sums_and_no_short_ones():
  half = jnp.float16

  def sums(x, axis):
    return jax.lax.reduce_sum_p.bind(x, axes=(axis,), out_sharding=None)

  assert lossy(lambda x: sums(x, 0)) == [
    ("reduce_sum", "float16", "256 terms are added in low precision")
  ]
  assert lossy(lambda x: sums(x, 1)) == []
  assert lossy(lambda x: jnp.sum(x, axis=0, dtype="float32").astype(half)) == []


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2048), ("bfloat16", 256)])
def test_integers_that_become_low_precision(dtype, most):
  ids = jax.ShapeDtypeStruct((4,), "int32")
  found = lossy(lambda x: x.astype(dtype), ids)
  assert found == [("convert_element_type", dtype, f"integers above {most} are rounded")]
  assert lossy(lambda x: x.astype(dtype), jax.ShapeDtypeStruct((4,), "bool")) == []
  # Ids that come as floats, and are used as integers.
  found = lossy(lambda x: x.astype("int32"), jax.ShapeDtypeStruct((4,), dtype))
  reason = f"integers above {most} were rounded before this cast"
  assert found == [("convert_element_type", dtype, reason)]
  assert lossy(lambda x: x.astype("int8"), jax.ShapeDtypeStruct((4,), dtype)) == []
  assert lossy(lambda x: x.astype("int32"), jax.ShapeDtypeStruct((4,), "float32")) == []


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2048), ("bfloat16", 256)])
def test_integers_of_the_code_are_noted_if_the_cast_rounds_them(dtype, most):
  x, reason = jnp.ones((2, 2), dtype), f"integers above {most} are rounded"
  scalar = jnp.asarray(2 * most)
  assert lossy(lambda x: jnp.pad(x, 1, constant_values=0), x) == []
  exact = (0, -most, 2 * most)
  for number in exact:
    assert lossy(lambda x, n=number: jnp.full((2, 2), n).astype(dtype) * x, x) == []
  assert lossy(lambda x: scalar.astype(dtype) * x, x) == []
  found = lossy(lambda x: jnp.full((2, 2), most + 1).astype(dtype) * x, x)
  assert found == [("convert_element_type", dtype, reason)]
  # The next call may close over other ids.
  ids = jnp.arange(2)
  assert lossy(lambda x: x[0] * ids.astype(dtype), x) == [("convert_element_type", dtype, reason)]
  before = f"integers above {most} were rounded before this cast"
  for number, rows in ((most, []), (2 * most, [("convert_element_type", dtype, before)])):
    assert lossy(lambda x, n=number: x[0] * jnp.full(2, n, dtype).astype("int32"), ids) == rows


def test_an_integer_that_becomes_complex_causes_no_warning():
  # `irfft` casts a 0 to a complex number, and NumPy warns if that is made real.
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert not lossy(lambda x: jnp.fft.irfft(jnp.fft.rfft(x), 16), jnp.ones(16))


def test_a_causal_convolution_in_low_precision_has_no_note_on_integers():
  model = nnx.Conv(
    2, 2, (3,), padding="CAUSAL", dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
  )
  assert lossy(model, jnp.ones((1, 4, 2), jnp.bfloat16)) == []


@pytest.mark.parametrize(("dtype", "most"), [("float16", 2048), ("bfloat16", 256)])
def test_positions_that_are_counted_in_low_precision(dtype, most):
  found = lossy(lambda x: x + jnp.arange(most + 2, dtype=dtype), jnp.ones((1,), dtype))
  assert found == [("iota", dtype, f"integers above {most} are rounded")]
  assert lossy(lambda x: x + jnp.arange(most + 1, dtype=dtype), jnp.ones((1,), dtype)) == []


def test_numbers_that_low_precision_does_not_hold():
  assert lossy(lambda x: x / (x + jnp.float16(1e-8))) == [
    ("add", "float16", "a number may have become 0 in low precision")
  ]
  masked = lossy(
    lambda x, keep: x + keep.astype("float16") * jnp.float16(-jnp.inf), SIXTEEN, SIXTEEN
  )
  assert masked == [("mul", "float16", "a number became inf in low precision")]
  assert lossy(lambda x: jnp.where(x > 0, x, -jnp.inf)) == []
  assert lossy(lambda x: x == jnp.inf) == []
  # Nothing else is the neutral element of a maximum, of which each softmax has one.
  assert lossy(lambda x: jnp.max(x, initial=-jnp.inf) + jnp.min(x, initial=jnp.inf)) == []
  assert lossy(lambda x: jnp.maximum(x, jnp.float16(jnp.inf))) == [("max", *masked[0][1:])]


def test_an_epsilon_that_becomes_zero():
  add = ("add", "float16", "a number may have become 0 in low precision")
  assert lossy(lambda x: x / (x + 1e-8)) == [add]
  assert lossy(lambda x: x / jnp.maximum(x, 1e-8)) == [("max", *add[1:])]
  clip = ("convert_element_type", "float16", "1e-08 becomes 0")
  assert lossy(lambda x: x / jnp.clip(x, 1e-8)) == [clip]
  assert lossy(lambda x: x / (x + 1e-8), jax.ShapeDtypeStruct((8,), "bfloat16")) == []
  assert lossy(lambda x: jax.nn.relu(x) + jnp.maximum(x, 0) / 2) == []


MASK = np.where(np.tri(256, 8) > 0, 0, -1e9).astype(np.float32)
MASKS = {
  "where": lambda x, keep: jnp.where(keep, x, -1e9),
  "lowest of float32": lambda x, keep: jnp.where(keep, x, float(jnp.finfo("float32").min)),
  "added": lambda x, keep: x + jnp.where(keep, 0.0, -1e9).astype(x.dtype),
  "captured": lambda x, keep: x + jnp.asarray(MASK).astype(x.dtype),
  "transposed": lambda x, keep: x + jnp.full((8, 256), -1e9).T.astype(x.dtype),
  "joined": lambda x, keep: (
    x + jnp.concatenate([x.astype("float32")[8:], jnp.full((8, 8), -1e9)]).astype(x.dtype)
  ),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_becomes_infinite(name):
  keep = jax.ShapeDtypeStruct((256, 8), "bool")
  (risk,) = mpjax.audit(jax.named_scope("cell")(MASKS[name]))(SIXTEEN, keep).lossy
  assert risk.reason in ("-1e+09 becomes -inf", "-3.403e+38 becomes -inf")
  where = risk.operation, risk.dtype, risk.path, risk.direction
  assert where == ("convert_element_type", "float16", "cell", "forward")
  assert risk.source is not None
  assert risk.source.file.endswith("test_lossy.py")


def test_a_mask_under_autocast_or_of_the_own_lowest_number_stays_finite():
  keep = jax.ShapeDtypeStruct((256, 8), "bool")
  wide = jax.ShapeDtypeStruct((256, 8), "float32")
  assert lossy(mpjax.autocast(MASKS["where"], "mixed_float16"), wide, keep) == []
  assert lossy(lambda x, keep: jnp.where(keep, x, jnp.finfo(x.dtype).min), SIXTEEN, keep) == []


@pytest.mark.parametrize(
  ("columns", "lost"), [(8, ["-7e+04 becomes -inf"]), (2, []), (1, ["1e-09 becomes 0"])]
)
def test_of_a_constant_the_largest_number_counts(columns, lost):
  table = np.array([1e-9, 2.0, -7e4] + [0.0] * 5, np.float32)

  def fn(x):
    return x[0, :columns] + jnp.asarray(table[:columns]).astype(x.dtype)

  assert [reason for _, _, reason in lossy(fn)] == lost


def test_of_arithmetic_no_number_counts():
  assert lossy(lambda x: (x.astype("float32") * 1e9).astype(x.dtype)) == []


def test_what_bfloat16_holds_of_a_mask():
  keep, x = jax.ShapeDtypeStruct((256, 8), "bool"), jax.ShapeDtypeStruct((256, 8), "bfloat16")
  assert lossy(MASKS["where"], x, keep) == []
  (found,) = lossy(MASKS["lowest of float32"], x, keep)  # It rounds to the next power of two.
  assert found[2] == "-3.403e+38 becomes -inf"


# Functions that lose something if the dtype is low.
IN_A_DTYPE = {
  "an exponential": lambda x: jnp.exp(10 * x),
  "a sum": lambda x: jax.lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None),
  "positions": lambda x: jnp.arange(3000, dtype=x.dtype) + x[0],
  "an epsilon": lambda x: (x - x) / (x - x + 1e-8),
  "a masked row": lambda x: jax.nn.softmax(jnp.where(x > 2, x, -1e9)),
}


@pytest.mark.parametrize("name", IN_A_DTYPE)
def test_in_float32_a_row_is_gone_and_the_error_with_it(name):
  fn, x = IN_A_DTYPE[name], np.linspace(0.125, 1, 300)

  def error(dtype):
    result = np.asarray(fn(jnp.asarray(x, dtype)), np.float64)
    return np.nan_to_num(np.abs(result - exact), nan=np.inf).max()

  with jax.enable_x64():
    exact = np.asarray(fn(jnp.asarray(x)))
  assert lossy(fn, jax.ShapeDtypeStruct(x.shape, "float16"))
  assert lossy(fn, jax.ShapeDtypeStruct(x.shape, "float32")) == []
  assert error("float32") < 0.01 * error("float16")
