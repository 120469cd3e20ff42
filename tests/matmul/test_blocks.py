"""Formats with scales in blocks: against NumPy, in gradients, transformations, and on shards."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax._matmul import block_dot
from mpjax._matmul.blocks import BlockRecipe, quantise_e4m3, quantise_nvfp4
from mpjax._matmul.protocol import Operand
from tests import format_oracle
from tests.format_oracle import dequantised, normal
from tests.programs import equations

# NVFP4 without what is random: see `test_random_options_of_nvfp4`.
PLAIN = {"stochastic_rounding": False, "hadamard": False}
FORMATS = {
  "mxfp8": mpjax.MXFP8(),
  "nvfp4": mpjax.NVFP4(**PLAIN),
  "float8": mpjax.Float8(scaling="block", skip=()),
}
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def cast(fun, format):
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=format)
  return mpjax.autocast(fun, policy, data_argnums=1)


def halves(seed, shape, largest=1.0):
  return normal(seed, shape, largest).astype(ml_dtypes.bfloat16)


def with_gradients(fun):
  """Returns a function of (w, x, g): result and gradients, for a gradient `g` in bfloat16."""

  def call(w, x, g):
    y, pull = jax.vjp(lambda w, x: fun(w, x).astype(jnp.bfloat16), w, x)
    return y, *pull(g)

  return call


def layer(w, x):
  return x.astype(jnp.float32) @ w


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


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@formats
def test_what_is_not_finite_is_not_clipped(format, bad):
  fun = jax.jit(with_gradients(cast(layer, format)))
  for name, index in (("w", 0), ("x", 1), ("g", 2)):
    args = [normal(1, (128, 128)), halves(0, (8, 128)), halves(2, (8, 128))]
    args[index][3, 5] = bad
    y, of_w, of_x = (np.asarray(each, np.float32) for each in fun(*args))
    reached = {"w": (y[:, 5], of_x[:, 3]), "x": (y[3], of_w[5]), "g": (of_x[3], of_w[:, 5])}[name]
    assert not any(np.any(np.isfinite(each)) for each in reached), name


@formats
def test_zeros_stay_zeros(format):
  fun = jax.jit(with_gradients(cast(layer, format)))
  w, x, g = normal(1, (128, 128)), halves(0, (8, 128)), halves(2, (8, 128))
  for args in ((0 * w, x, g), (w, 0 * x, g), (w, x, 0 * g)):
    found = fun(*args)
    expected = np.any(args[0]) and np.any(args[1]), np.any(args[1]) and np.any(args[2])
    assert (np.any(found[0]), np.any(found[1])) == expected
    assert np.any(found[2]) == (np.any(args[0]) and np.any(args[2]))


# Matmuls.


def stands_for(x, names, summed, format, is_weight=False):
  """What an operand is in the format, in float64; `summed` are the axes in blocks, in order."""
  order = [*(n for n in names if n not in summed), *summed]
  moved = np.transpose(np.asarray(x, np.float32), [names.index(n) for n in order])
  rows = moved.reshape(-1, int(np.prod(moved.shape[len(order) - len(summed) :])))
  block = BlockRecipe(format).block
  padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % block)))
  if isinstance(format, mpjax.Float8):
    sizes = (128 if is_weight else 1, 128)
    found = format_oracle.float8_blocks(padded, sizes, power_of_two=True)
  elif isinstance(format, mpjax.NVFP4):
    found = format_oracle.nvfp4(padded, (16 if is_weight and format.square_weights else 1, 16))
  else:
    found = format_oracle.mxfp8(padded, -1)
  wide = dequantised(*found)[:, : rows.shape[1]].reshape(moved.shape)
  return np.transpose(wide, [order.index(n) for n in names])


def check(found, formula, roundings, *operands):
  """Compares with float64: so many roundings to bfloat16, and n * 2^-24 of all products."""
  wanted = np.einsum(formula, *operands)
  terms = np.einsum(formula, *map(np.abs, operands))
  inputs, _, out = formula.partition("->")
  sizes = dict(zip(inputs.replace(",", ""), (*operands[0].shape, *operands[1].shape), strict=True))
  depth = np.prod([size for name, size in sizes.items() if name not in out])
  bound = roundings * 2.0**-8 * np.abs(wanted) + depth * 2.0**-24 * terms
  error = np.abs(np.asarray(found, np.float64) - wanted)
  assert np.all(error <= bound), np.max(error / bound)


FORMULAS = {
  "matmul": ("mk,kn->mn", (24, 128), (128, 256)),
  "batch of rows": ("bmk,kn->bmn", (2, 33, 128), (128, 128)),
  "out of heads": ("bthd,hde->bte", (2, 3, 4, 32), (4, 32, 128)),
  "into heads": ("btd,dhe->bthe", (2, 3, 128), (128, 4, 32)),
  "transposed": ("mk,nk->mn", (5, 128), (128, 128)),
  "experts": ("ebd,edf->ebf", (3, 6, 128), (3, 128, 128)),
}


@pytest.mark.parametrize(
  "format",
  [*FORMATS.values(), mpjax.NVFP4(square_weights=False, **PLAIN)],
  ids=[*FORMATS, "nvfp4 1 x 16"],
)
def test_an_einsum_and_its_gradients_are_those_of_dequantised_operands(format):
  def gradients(operands):
    def of_one(name, w, x, g):
      def fun(w, x):
        return jnp.einsum(FORMULAS[name][0], x.astype(jnp.float32), w)

      return with_gradients(cast(fun, format))(w, x, g)

    return {name: of_one(name, *each) for name, each in operands.items()}

  operands = {}
  for name, (formula, x, w) in FORMULAS.items():
    shape = jax.eval_shape(functools.partial(jnp.einsum, formula), np.ones(x), np.ones(w)).shape
    operands[name] = normal(1, w, 0.03), halves(0, x), halves(2, shape, 1e-3)
  for name, (y, of_w, of_x) in jax.jit(gradients)(operands).items():
    formula, (w, x, g) = FORMULAS[name][0], operands[name]
    left, right, out = re.split(",|->", formula)
    assert (of_w.dtype, of_x.dtype) == (np.float32, jnp.bfloat16)
    for found, product, roundings, (one, a), (other, b) in (
      (y, formula, 2, (left, x), (right, w)),
      (of_x, f"{out},{right}->{left}", 2, (out, g), (right, w)),
      (of_w, f"{left},{out}->{right}", 0, (left, x), (out, g)),
    ):
      result = product.partition("->")[2]
      pair = [
        stands_for(each, names, [n for n in names if n not in result], format, each is w)
        for each, names in ((a, one), (b, other))
      ]
      check(found, product, roundings, *pair)


@formats
def test_all_three_matmuls_have_operands_in_the_format(format):
  w, x, g = normal(1, (128, 256)), halves(0, (40, 128)), halves(2, (40, 256))
  fun = with_gradients(cast(layer, format))
  dots = [
    tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars))
    for eqn, _ in equations(jax.make_jaxpr(fun)(w, x, g))
    if eqn.primitive.name in ("block_scaled_dot", "dot_general")
  ]
  if isinstance(format, mpjax.NVFP4):
    values, scales, half = "float4_e2m1fn", "float8_e4m3fn", "float32"
  else:
    values, scales, half = "float8_e4m3fn", "float8_e8m0fnu", "bfloat16"
  operands = (values, values, scales, scales)
  assert sorted(dots) == sorted([(*operands, half), (*operands, half), (*operands, "float32")])


@formats
def test_cuda_is_given_matmuls_with_scales_in_blocks(format):
  w, x, g = normal(1, (128, 256)), halves(0, (40, 128)), halves(2, (40, 256))
  fun = jax.jit(with_gradients(cast(layer, format)))
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
  loss = cast(lambda w, x: jnp.sum(jnp.tanh(layer(w, x))), FORMATS["mxfp8"])
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
  found = jax.jit(with_gradients(cast(layer, FORMATS["mxfp8"])))(half, x, g)
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(
      one.astype(np.float32), other.astype(np.float32), rtol=2**-7, atol=2**-7
    )


@pytest.mark.parametrize("format", [mpjax.NVFP4(), FORMATS["float8"]], ids=["nvfp4", "float8"])
def test_both_passes_round_a_weight_alike(format):
  recipe, w = BlockRecipe(format), jnp.asarray(normal(0, (1, 128, 256)))
  forward = recipe.quantise(w, Operand((2,), "weight", "forward"))
  backward = recipe.quantise(w.swapaxes(1, 2), Operand((2,), "weight", "input_grad"))
  one, other = (np.asarray(block_dot.dequantised(*each[:2])) for each in (forward, backward))
  np.testing.assert_array_equal(one, other.swapaxes(1, 2))


def test_random_options_of_nvfp4():
  w, x, g = normal(1, (128, 64)), halves(0, (96, 128)), halves(2, (96, 64))
  exact = [np.asarray(each, np.float64) for each in with_gradients(layer)(w, x, g)]
  found = {}
  for name, options in {
    "plain": PLAIN,
    "rounding": {**PLAIN, "stochastic_rounding": True},
    "hadamard": {**PLAIN, "hadamard": True},
    "seed": {"seed": 1},
  }.items():
    fun = with_gradients(cast(layer, mpjax.NVFP4(**options)))
    found[name] = [np.asarray(each, np.float64) for each in jax.jit(fun)(w, x, g)]
    for one, other in zip(found[name], exact, strict=True):
      assert np.linalg.norm(one - other) < 0.3 * np.linalg.norm(other), name
  # Which of the result, the gradient of the weight and that of the input change.
  for name, changed in {"rounding": [1, 2], "hadamard": [1], "seed": [1, 2]}.items():
    pairs = zip(found[name], found["plain"], strict=True)
    assert [i for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)] == changed, name


# Groups.


@formats
def test_groups_are_those_of_each_expert(format):
  sizes = np.array([5, 0, 7, 1], np.int32)  # Of 16 rows, of which three are in no group.
  w, x, g = normal(1, (4, 128, 256), 0.03), halves(0, (16, 128)), halves(2, (16, 256), 1e-3)
  x[13:], g[13:] = np.nan, np.inf  # Rows of no group reach no result and no scale.

  def grouped(w, x):
    return lax.ragged_dot(x.astype(jnp.float32), w, sizes)

  fun = with_gradients(cast(grouped, format))
  found = jax.jit(fun)(w, x, g)
  x[13:], g[13:] = 0, 0
  forward = stands_for(x, "mk", "k", format), stands_for(w, "gkn", "k", format, True)
  of_x = stands_for(g, "mn", "n", format), stands_for(w, "gkn", "n", format, True)
  of_w = stands_for(x, "mk", "m", format), stands_for(g, "mn", "m", format)
  wanted = [np.zeros(each.shape) for each in found]
  for i, end in enumerate(np.cumsum(sizes)):
    here = slice(end - sizes[i], end)
    wanted[0][here] = forward[0][here] @ forward[1][i]
    wanted[1][i] = of_w[0][here].T @ of_w[1][here]
    wanted[2][here] = of_x[0][here] @ of_x[1][i].T
  for one, other, roundings in zip(found, wanted, (2, 0, 2), strict=True):
    bound = roundings * 2.0**-8 * np.abs(other) + 2.0**-18 * np.max(np.abs(other))
    assert np.all(np.abs(np.asarray(one, np.float64) - other) <= bound)
  name = BlockRecipe(format).name
  audit = mpjax.audit(fun)(w, x, g)
  assert [(row.dtype, row.reason) for row in audit.formats] == [(f"{name}, emulated", "")]
  assert f"100.0 % of the matmuls' FLOPs in {name}, emulated" in str(audit)
  assert audit.format_share == 1.0


# Transformations.


@formats
def test_under_transformations(format):
  fun = with_gradients(cast(layer, format))
  remat = with_gradients(jax.checkpoint(cast(layer, format)))
  args = normal(1, (2, 128, 128)), halves(0, (2, 8, 128)), halves(2, (2, 8, 128))
  mesh, spec = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")

  def on_one(*args):  # Of the one example that a device has.
    return jax.tree.map(lambda a: a[None], fun(*(a[0] for a in args)))

  def mapped(axes):
    given = [a if axis == 0 else a[0] for a, axis in zip(args, axes, strict=True)]
    return jax.vmap(fun, in_axes=axes), given

  ways = {
    "vmap": (jax.vmap(fun), args),
    "vmap of remat": (jax.vmap(remat), args),
    "one weight": mapped((None, 0, 0)),
    "one input": mapped((0, None, 0)),
    "one gradient": mapped((0, 0, None)),
    "scan": (lambda *args: lax.scan(lambda _, each: (None, fun(*each)), None, args)[1], args),
    "shard_map": (jax.shard_map(on_one, mesh=mesh, in_specs=spec, out_specs=spec), args),
  }

  def every_way(inputs):
    return {
      name: (ways[name][0](*each), [fun(*one) for one in examples(*each)])
      for name, each in inputs.items()
    }

  def examples(*given):
    shapes = (128, 128), (8, 128), (8, 128)
    for i in range(2):
      yield [a if a.shape == one else a[i] for a, one in zip(given, shapes, strict=True)]

  found = jax.jit(every_way)({name: given for name, (_, given) in ways.items()})
  for name, (results, each) in found.items():
    wanted = jax.tree.map(lambda *a: np.stack(a).astype(np.float32), *each)
    for one, other in zip(results, wanted, strict=True):
      # The compiler may leave out a rounding to bfloat16 in one of them.
      one = np.asarray(one, np.float32)
      np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  ("kind", "spec"),
  [
    (AxisType.Auto, ("d", None)),
    (AxisType.Auto, (None, "d")),
    # Sharded along its depth, the matmul itself would be ambiguous: JAX asks for an out_sharding.
    (AxisType.Explicit, (None, "d")),
  ],
  ids=str,
)
def test_sharded_weights_have_the_numbers_of_whole_ones(kind, spec):
  w, x, g = normal(1, (256, 128)), halves(0, (8, 256)), halves(2, (8, 128))
  fun = with_gradients(cast(layer, FORMATS["mxfp8"]))
  wanted = jax.jit(fun)(w, x, g)
  mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))

  def placed(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

  rows = ("d", None) if kind == AxisType.Auto else (None, spec[0])
  columns = ("d", None) if kind == AxisType.Auto else (None, spec[1])
  with jax.set_mesh(mesh):
    args = placed(w, *spec), placed(x, *rows), placed(g, *columns)
    compiled = jax.jit(fun).lower(*args).compile()
  for one, other in zip(compiled(*args), wanted, strict=True):
    np.testing.assert_allclose(
      np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2**-7, atol=1e-5
    )


# Which matmuls.


def test_sizes_are_multiples_of_a_block():
  for name, (fits, odd) in {"mxfp8": (96, 48), "nvfp4": (48, 40), "float8": (384, 192)}.items():
    recipe = BlockRecipe(FORMATS[name])
    assert recipe.why_not(fits, fits) is None
    assert recipe.why_not(odd, fits) == f"K={odd} is no multiple of {recipe.block}"
    assert recipe.why_not(fits, odd) == f"N={odd} is no multiple of {recipe.block}"


def test_an_audit_names_the_format_and_says_that_it_is_emulated():
  w, x = normal(1, (128, 256)), halves(0, (64, 128))

  def audited(**options):
    loss = cast(lambda w, x: jnp.sum(jnp.tanh(layer(w, x))), mpjax.MXFP8(**options))
    return mpjax.audit(jax.grad(loss, (0, 1)))(w, x)

  audit = audited()
  assert [(row.dtype, row.reason) for row in audit.formats] == [("mxfp8, emulated", "")]
  assert "100.0 % of the matmuls' FLOPs in mxfp8, emulated" in str(audit)
  rows = {(row.dtype, row.reason) for row in audited(input_grad="half").formats}
  assert rows == {("mxfp8, emulated", ""), ("", "input_grad=half")}


@formats
def test_zeros_have_finite_scales_and_reciprocals(format):
  # A CPU flushes a subnormal product of the scales to 0, whose reciprocal is inf.
  fun = cast(layer, format)
  assert not mpjax.find_nonfinite(fun)(
    normal(1, (128, 128)), np.zeros((8, 128), ml_dtypes.bfloat16)
  )


@formats
def test_without_jit_a_matmul_is_the_same(format):
  w, x, fun = normal(1, (128, 128)), halves(0, (8, 128)), cast(layer, format)
  wanted = fun(w, x)
  with jax.disable_jit():
    np.testing.assert_array_equal(fun(w, x), wanted)
