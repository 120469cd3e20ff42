"""The matmul of stacks of matrices with scales in blocks: its numbers, and where it runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._matmul.block_dot import Layout, block_dot, dequantised, stacked, unstacked
from mpjax._matmul.blocks import quantise_e4m3, quantise_nvfp4
from mpjax._matmul.protocol import Scaled
from tests.format_oracle import normal

FLOAT32 = np.dtype("float32")
QUANTISERS = {
  "mxfp8": functools.partial(quantise_e4m3, rows=1, block=32),
  "nvfp4": quantise_nvfp4,
  "float8": functools.partial(quantise_e4m3, rows=128, block=128),
}
quantisers = pytest.mark.parametrize("quantise", QUANTISERS.values(), ids=QUANTISERS)


def pair(quantise):
  return quantise(normal(0, (2, 128, 256))), quantise(normal(1, (2, 128, 256)))


def wide(scaled):
  return np.asarray(dequantised(*scaled[:2])).astype(np.float64)


@pytest.mark.slow
@quantisers
def test_a_result_is_that_of_float64(quantise):
  left, right = pair(quantise)
  found = jax.jit(lambda left, right: block_dot(left, right, FLOAT32))(left, right)
  operands = wide(left), wide(right)
  wanted = np.einsum("bmk,bnk->bmn", *operands)
  terms = np.einsum("bmk,bnk->bmn", *map(np.abs, operands))
  assert np.all(np.abs(found - wanted) <= 256 * 2.0**-24 * terms)
  np.testing.assert_array_equal(found, block_dot(left, right, FLOAT32))


@pytest.mark.slow
@quantisers
def test_dequantised_operands_are_exact(quantise):
  scaled = quantise(normal(0, (2, 128, 256)))
  values, scale = (np.asarray(each).astype(np.float64) for each in scaled[:2])
  for axis in (1, 2):
    scale = np.repeat(scale, values.shape[axis] // scale.shape[axis], axis=axis)
  np.testing.assert_array_equal(wide(scaled), values * scale)


def test_it_is_the_matmul_of_jax():
  left, right = pair(QUANTISERS["mxfp8"])

  def of_jax(left, right):
    arrays = left.values, right.values, left.scale, right.scale
    return jax.nn.scaled_matmul(*arrays, preferred_element_type=FLOAT32)

  try:
    wanted = jax.jit(of_jax)(left, right)
  except NotImplementedError:
    pytest.skip("jax.nn.scaled_matmul does not run on CPUs in this version of JAX")
  found = block_dot(left, right, FLOAT32)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 2)], ids=str)
def test_vmap_is_a_loop(axes):
  left, right = pair(QUANTISERS["mxfp8"])
  given, examples = [], [[], []]
  for side, (scaled, axis) in enumerate(zip((left, right), axes, strict=True)):
    each = [scaled, Scaled(jnp.flip(scaled.values, 1), jnp.flip(scaled.scale, 1))]
    examples[side] = each if axis is not None else [each[0]] * 2
    parts = zip(*(one[:2] for one in each), strict=True)
    mapped = Scaled(*(jnp.stack(part, axis=axis or 0) for part in parts))
    given.append(each[0] if axis is None else mapped)
  fun = jax.vmap(lambda left, right: block_dot(left, right, FLOAT32), in_axes=axes)
  wanted = [block_dot(*one, FLOAT32) for one in zip(*examples, strict=True)]
  np.testing.assert_allclose(fun(*given), np.stack(wanted), rtol=1e-6)


def test_an_operand_becomes_a_stack_and_back():
  x = np.arange(2 * 3 * 5 * 7, dtype=np.float32).reshape(2, 3, 5, 7)
  for layout, shape in {
    Layout((1,), (3,), (0, 2)): (3, 7, 32),
    Layout((), (0, 1), (3, 2)): (1, 6, 64),
    Layout((2, 0), (), (1, 3)): (10, 1, 32),
  }.items():
    found = stacked(jnp.asarray(x), layout, 32)
    assert found.shape == shape
    assert jnp.sum(found) == np.sum(x)
    np.testing.assert_array_equal(unstacked(found, layout, x.shape), x)


@pytest.mark.parametrize(
  ("values", "scales", "block", "native"),
  [
    ("float8_e4m3fn", "float8_e8m0fnu", 32, True),
    ("float8_e5m2", "float8_e8m0fnu", 64, True),
    ("float4_e2m1fn", "float8_e4m3fn", 16, True),
    ("float8_e4m3fn", "float8_e8m0fnu", 16, False),
    ("float8_e4m3fn", "float32", 32, False),
    ("int8", "float32", 32, False),
  ],
)
def test_what_cuda_multiplies(values, scales, block, native):
  operand = Scaled(jnp.zeros((1, 16, 128), values), jnp.ones((1, 16, 128 // block), scales))
  fun = jax.jit(lambda x: block_dot(x, x, FLOAT32))
  text = fun.trace(operand).lower(lowering_platforms=("cuda",)).as_text()
  assert ("__op$block_scaled_dot" in text, "dot_general" in text) == (native, not native)
