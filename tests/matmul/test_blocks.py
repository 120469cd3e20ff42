"""Formats with scales in blocks: scaled arrays against NumPy, and where matmuls run."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._matmul import block_dot
from mpjax._matmul.blocks import quantise_e4m3, quantise_nvfp4
from mpjax._matmul.protocol import Operand
from mpjax._matmul.recipes import recipe_of
from tests import format_oracle
from tests.autocast.rig import under
from tests.format_oracle import dequantised, normal
from tests.matmul.rig import BLOCKS, PLAIN, blocks, halves, layer, operands
from tests.programs import with_gradients

# Scaled arrays.

QUANTISERS = {
  "mxfp8": (lambda x: quantise_e4m3(x, 1, 32), lambda x: format_oracle.mxfp8(x, -1)),
  **{
    f"nvfp4 {rows} x 16": (
      functools.partial(quantise_nvfp4, rows=rows),
      functools.partial(format_oracle.nvfp4, sizes=(1, rows, 16)),
    )
    for rows in (1, 16)
  },
  **{
    f"float8 {rows} x 128": (
      functools.partial(quantise_e4m3, rows=rows, block=128),
      functools.partial(format_oracle.float8_blocks, sizes=(1, rows, 128), power_of_two=True),
    )
    for rows in (1, 128)
  },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("quantise", "oracle"), QUANTISERS.values(), ids=QUANTISERS)
def test_quantised_numbers_are_those_of_numpy(quantise, oracle, dtype):
  x = normal(0, (2, 256, 256)) * np.exp2(np.arange(256) % 40 - 20).astype(np.float32)
  x[0, 3, :64], x[1, 128:, :128] = 0, 0
  x[1, 8] *= np.float32(1e-30)
  for i, exponent in enumerate(range(-9, 9)):  # Beside the edges of powers of two.
    edge = np.float32(448 * 2.0**exponent)
    x[1, 9 + i, :64:32] = np.nextafter(edge, np.float32(np.inf)), edge
  x = jnp.asarray(x, dtype)
  for found, wanted in zip(jax.jit(quantise)(x), oracle(np.asarray(x, np.float32)), strict=False):
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), wanted)


# Matmuls.


@blocks
def test_cuda_is_given_matmuls_with_scales_in_blocks(format):
  w, x, g = normal(1, (128, 256)), halves(0, (40, 128)), halves(2, (40, 256))
  fun = jax.jit(with_gradients(under(layer, matmul=format)))
  text = fun.trace(w, x, g).lower(lowering_platforms=("cuda",)).as_text()
  calls = [line for line in text.splitlines() if "__op$block_scaled_dot" in line]
  of_float4 = isinstance(format, mpjax.NVFP4)
  values, scales, unit = (
    ("f4E2M1FN", "f8E4M3FN", 16) if of_float4 else ("f8E4M3FN", "f8E8M0FNU", 32)
  )
  tokens = 128 if isinstance(format, mpjax.Float8) else -(-40 // unit) * unit
  shapes = [(40, 256, 128), (40, 128, 256), (128, 256, tokens)]
  for rows, columns, depth in shapes:
    types = [f"tensor<1x{n}x{depth}x{values}>" for n in (rows, columns)]
    types += [f"tensor<1x{n}x{depth // unit}x{scales}>" for n in (rows, columns)]
    swapped = [types[1], types[0], types[3], types[2]]
    pattern = "|".join(re.escape(f"({', '.join(each)})") for each in (types, swapped))
    assert sum(re.search(pattern, line) is not None for line in calls) == 1, (rows, columns)
  assert len(calls) == 3
  assert "stablehlo.dot_general" not in text


def test_what_is_kept_for_the_backward_pass_is_in_the_format():
  w, x = normal(1, (128, 256)), halves(0, (64, 128))
  loss = under(lambda w, x: jnp.sum(jnp.tanh(layer(w, x))), matmul=BLOCKS["mxfp8"])
  audit = mpjax.audit(jax.grad(loss, (0, 1)))(w, x)
  elements = w.size + x.size
  assert audit.residual_bytes["float8_e4m3fn"] == elements
  assert audit.residual_bytes["float8_e8m0fnu"] == elements // 32


def test_blocks_of_float8_are_those_of_mxfp8():
  """Scales are powers of two: an operand of the one is an operand of the other."""
  x = normal(0, (1, 128, 256))
  values, scale = (np.asarray(a).astype(np.float64) for a in quantise_e4m3(x, 128, 128)[:2])
  assert scale.shape == (1, 1, 2)
  ours = dequantised(values, scale)
  np.testing.assert_array_equal(ours, ours.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_results_are_those_of_jax():
  configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
  w, x, g = normal(1, (128, 64)), halves(0, (96, 128)), halves(2, (96, 64))

  def of_jax(w, x):
    numbers = (((1,), (0,)), ((), ()))
    return jax.nn.scaled_dot_general(x, w, numbers, jnp.bfloat16, configs)

  try:
    wanted = jax.jit(with_gradients(of_jax))(w.astype(ml_dtypes.bfloat16), x, g)
  except NotImplementedError:
    pytest.skip("jax.nn.scaled_dot_general does not run on CPUs in this version of JAX")
  # In bfloat16 for both: JAX does not take the weight in float32.
  half = w.astype(ml_dtypes.bfloat16).astype(np.float32)
  found = jax.jit(with_gradients(under(layer, matmul=BLOCKS["mxfp8"])))(half, x, g)
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(
      one.astype(np.float32), other.astype(np.float32), rtol=2**-7, atol=2**-7
    )


@pytest.mark.slow
@pytest.mark.parametrize("format", [mpjax.NVFP4(), BLOCKS["float8 block"]], ids=["nvfp4", "float8"])
def test_both_passes_round_a_weight_alike(format):
  recipe, w = recipe_of(format), jnp.asarray(normal(0, (1, 128, 256)))
  forward = recipe.quantise(w, Operand((2,), "weight", "forward"))
  backward = recipe.quantise(w.swapaxes(1, 2), Operand((2,), "weight", "input_grad"))
  one, other = (np.asarray(block_dot.dequantised(*each[:2])) for each in (forward, backward))
  np.testing.assert_array_equal(one, other.swapaxes(1, 2))


@pytest.mark.slow
def test_random_options_of_nvfp4():
  w, x, g = normal(1, (128, 64)), halves(0, (96, 128)), halves(2, (96, 64))
  options = {
    "plain": PLAIN,
    "rounding": {**PLAIN, "stochastic_rounding": True},
    "hadamard": {**PLAIN, "hadamard": True},
    "seed": {"seed": 1},
  }
  layers = {name: under(layer, matmul=mpjax.NVFP4(**each)) for name, each in options.items()}
  layers["exact"] = layer

  @jax.jit
  def each_layer(*args):
    return {name: with_gradients(fun)(*args) for name, fun in layers.items()}

  found = jax.tree.map(lambda a: np.asarray(a, np.float64), each_layer(w, x, g))
  exact = found.pop("exact")
  for name, results in found.items():
    for one, other in zip(results, exact, strict=True):
      assert np.linalg.norm(one - other) < 0.3 * np.linalg.norm(other), name
  # Which of the result, the gradient of the weight and that of the input change.
  for name, changed in {"rounding": [1, 2], "hadamard": [1], "seed": [1, 2]}.items():
    pairs = zip(found[name], found["plain"], strict=True)
    assert [i for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)] == changed, name


@pytest.mark.parametrize("format", [mpjax.NVFP4(), mpjax.NVFP4(hadamard=False)], ids=str)
def test_forward_mode_multiplies_by_the_operand_before_the_hadamard_transform(format):
  w, x, t = normal(1, (128, 64)), halves(0, (96, 128)), normal(2, (128, 64))
  tangent = jax.jit(lambda w: jax.jvp(lambda w: under(layer, matmul=format)(w, x), (w,), (t,))[1])
  exact = np.asarray(x, np.float64) @ t
  assert np.linalg.norm(tangent(w) - exact) < 0.2 * np.linalg.norm(exact)


@pytest.mark.parametrize("format", [mpjax.NVFP4(), mpjax.NVFP4(hadamard=False)], ids=str)
def test_groups_of_any_size_have_gradients_of_their_own(format):
  sizes = np.array([20, 30, 14], np.int32)
  w, x, t = normal(1, (3, 64, 64)), halves(0, (64, 64)), normal(2, (64, 64))

  def loss(w, x):
    return jnp.sum(t * jax.lax.ragged_dot(jnp.asarray(x, jnp.float32), w, sizes))

  found, exact = (jax.jit(jax.grad(fun))(w, x) for fun in (under(loss, matmul=format), loss))
  assert np.linalg.norm(found - exact) < 0.3 * np.linalg.norm(exact)


# Which matmuls.


def test_sizes_are_multiples_of_a_block():
  for name, (fits, odd) in {
    "mxfp8": (96, 48),
    "nvfp4": (48, 40),
    "float8 block": (384, 192),
  }.items():
    recipe = recipe_of(BLOCKS[name])
    assert recipe.why_not(fits, fits) is None
    assert recipe.why_not(odd, fits) == f"K={odd} is no multiple of {recipe.block}"
    assert recipe.why_not(fits, odd) == f"N={odd} is no multiple of {recipe.block}"


def test_an_audit_names_the_format_and_says_that_it_is_emulated():
  w, x = normal(1, (128, 256)), halves(0, (64, 128))

  def audited(**options):
    loss = under(lambda w, x: jnp.sum(jnp.tanh(layer(w, x))), matmul=mpjax.MXFP8(**options))
    return mpjax.audit(jax.grad(loss, (0, 1)))(w, x)

  audit = audited()
  assert [(row.dtype, row.reason) for row in audit.formats] == [("mxfp8, emulated", "")]
  assert "100.0 % of the matmuls' FLOPs in mxfp8, emulated" in str(audit)
  rows = {(row.dtype, row.reason) for row in audited(input_grad="half").formats}
  assert rows == {("mxfp8, emulated", ""), ("", "input_grad=half")}


@blocks
def test_an_audit_names_the_format_of_groups(format):
  def grouped(w, x):
    return lax.ragged_dot(x.astype(jnp.float32), w, np.array([5, 0, 7, 1], np.int32))

  args = normal(1, (4, 128, 256)), halves(0, (16, 128)), halves(2, (16, 256))
  audit = mpjax.audit(with_gradients(under(grouped, matmul=format)))(*args)
  name = f"{recipe_of(format).name}, emulated"
  assert [(row.dtype, row.reason) for row in audit.formats] == [(name, "")]
  assert f"100.0 % of the matmuls' FLOPs in {name}" in str(audit)
  assert audit.format_share == 1.0


@blocks
def test_zeros_have_finite_scales_and_reciprocals(format):
  # A CPU flushes a subnormal product of the scales to 0, whose reciprocal is inf.
  w, x, _ = operands(format)
  assert not mpjax.find_nonfinite(under(layer, matmul=format))(w, 0 * x)
