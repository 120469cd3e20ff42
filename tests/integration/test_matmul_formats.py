"""Every format: against NumPy, of zeros and of inf, in transformations, and on shards."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from tests.autocast.rig import under
from tests.format_oracle import normal
from tests.matmul.rig import (
  BLOCKS,
  FLOAT8,
  FORMATS,
  INT8,
  PLAIN,
  halves,
  layer,
  layer_in,
  operands,
  stands_for,
)
from tests.programs import equations, with_gradients

formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def check(found, formula, roundings, *operands):
  """Compares with float64: so many roundings to bfloat16, and n * 2^-24 of all products."""
  wanted = np.einsum(formula, *operands)
  terms = np.einsum(formula, *map(np.abs, operands))
  inputs, _, out = formula.partition("->")
  sizes = dict(zip(inputs.replace(",", ""), (*operands[0].shape, *operands[1].shape), strict=True))
  depth = np.prod([size for name, size in sizes.items() if name not in out])
  bound = roundings * 2.0**-8 * np.abs(wanted) + depth * 2.0**-24 * terms
  error = np.abs(np.asarray(found, np.float64) - wanted)
  assert error.shape == wanted.shape
  assert np.all(error <= bound), np.max(error / bound)


FORMULAS = {
  "matmul": ("mk,kn->mn", (24, 128), (128, 256)),
  "batch of rows": ("bmk,kn->bmn", (2, 33, 128), (128, 128)),
  "experts": ("xbd,xdf->xbf", (3, 6, 128), (3, 128, 128)),
  "transposed": ("mk,nk->mn", (5, 128), (128, 128)),
  "weight first": ("mk,kn->nm", (8, 128), (128, 128)),
  "out of heads": ("bthd,hde->bte", (2, 3, 4, 32), (4, 32, 128)),
  "into heads": ("btd,dhe->bthe", (2, 3, 128), (128, 4, 32)),
  "two sums apart": ("ahbk,khn->abn", (2, 4, 3, 32), (32, 4, 128)),
  "experts behind": ("bxd,dxf->bfx", (6, 3, 128), (128, 3, 128)),
}
IN_ALL = ("matmul", "batch of rows", "experts")
LAYOUTS = {**FORMATS, "nvfp4 1 x 16": mpjax.NVFP4(square_weights=False, **PLAIN)}
"""How axes become those of a matmul depends on the kind of format alone."""

IN_ALL_LAYOUTS = ("nvfp4", "float8 row", "float8 tensor, half", "int8 row, gradients")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_einsum_and_its_gradients_are_those_of_rounded_operands(name):
  format = LAYOUTS[name]
  formulas = FORMULAS if name in IN_ALL_LAYOUTS else IN_ALL

  def gradients(operands):
    def of_one(name, w, x, g):
      def fun(w, x):
        one, other, out = re.split(",|->", FORMULAS[name][0])
        x = x.astype(jnp.float32)
        if name == "weight first":
          return jnp.einsum(f"{other},{one}->{out}", w, x)
        return jnp.einsum(FORMULAS[name][0], x, w)

      return with_gradients(under(fun, matmul=format))(w, x, g)

    return {name: of_one(name, *each) for name, each in operands.items()}

  given = {}
  for key in formulas:
    formula, x, w = FORMULAS[key]
    shape = np.einsum(formula, np.ones(x), np.ones(w)).shape
    given[key] = normal(1, w, 0.03), halves(0, x), halves(2, shape, 1e-3)
  for key, (y, of_w, of_x) in jax.jit(gradients)(given).items():
    formula, (w, x, g) = FORMULAS[key][0], given[key]
    left, right, out = re.split(",|->", formula)
    assert (of_w.dtype, of_x.dtype) == (np.float32, jnp.bfloat16)
    # The result of int8 has one rounding.
    roundings = 1 if isinstance(format, mpjax.Int8) else 2
    names = {"input": (x, left), "weight": (w, right), "gradient": (g, out)}
    for matmul, found, product, count, roles in (
      ("forward", y, formula, roundings, ("input", "weight")),
      ("input_grad", of_x, f"{out},{right}->{left}", roundings, ("gradient", "weight")),
      ("weight_grad", of_w, f"{left},{out}->{right}", 0, ("input", "gradient")),
    ):
      result = product.partition("->")[2]
      summed = [n for n in names[roles[0]][1] if n not in result]
      pair = [stands_for(*names[role], summed, format, role, matmul) for role in roles]
      check(found, product, count, *pair)


@formats
def test_groups_are_those_of_each_expert(format):
  sizes = np.array([5, 0, 7, 1], np.int32)  # Of 16 rows, of which three are in no group.
  w = normal(1, (4, 128, 256), 0.03) * np.exp2(np.arange(4, dtype=np.float32))[:, None, None]
  x, g = halves(0, (16, 128)), halves(2, (16, 256), 1e-3)
  x[13:], g[13:] = np.nan, np.inf  # Rows of no group reach no result and no scale.

  def grouped(w, x):
    return lax.ragged_dot(x.astype(jnp.float32), w, sizes)

  found = jax.jit(with_gradients(under(grouped, matmul=format)))(w, x, g)
  x[13:], g[13:] = 0, 0

  def pair(matmul, summed, one, other):
    arrays = {"input": (x, "mk"), "weight": (w, "gkn"), "gradient": (g, "mn")}
    return [stands_for(*arrays[role], summed, format, role, matmul) for role in (one, other)]

  forward = pair("forward", "k", "input", "weight")
  of_x = pair("input_grad", "n", "gradient", "weight")
  of_w = pair("weight_grad", "m", "input", "gradient")
  wanted = [np.zeros(each.shape) for each in found]
  for i, end in enumerate(np.cumsum(sizes)):
    here = slice(end - sizes[i], end)
    wanted[0][here] = forward[0][here] @ forward[1][i]
    wanted[1][i] = of_w[0][here].T @ of_w[1][here]
    wanted[2][here] = of_x[0][here] @ of_x[1][i].T
  y, of_w, of_x = found
  assert (y.dtype, of_w.dtype, of_x.dtype) == (jnp.bfloat16, np.float32, jnp.bfloat16)
  assert not any(np.any(each) for each in (y[13:], of_w[1], of_x[13:]))
  roundings = 1 if isinstance(format, mpjax.Int8) else 2
  for one, other, count in zip(found, wanted, (roundings, 0, roundings), strict=True):
    bound = count * 2.0**-8 * np.abs(other) + 2.0**-18 * np.max(np.abs(other))
    assert np.all(np.abs(np.asarray(one, np.float64) - other) <= bound)


@formats
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_not_clipped(bad, format):
  # Clipped, an inf would be 448: a step with a wrong gradient that nobody notices.
  for name, index in (("w", 0), ("x", 1), ("g", 2)):
    args = operands(format)
    args[index][3, 5] = bad
    y, of_w, of_x = (np.asarray(each, np.float32) for each in layer_in(format)(*args))
    reached = {"w": (y[:, 5], of_x[:, 3]), "x": (y[3], of_w[5]), "g": (of_x[3], of_w[:, 5])}
    assert not any(np.any(np.isfinite(each)) for each in reached[name]), (bad, name)
    if name == "x" and getattr(format, "scaling", "") == "row":
      assert np.isfinite(y).all(axis=1).tolist() == [i != 3 for i in range(8)]


@formats
def test_zeros_stay_zeros(format):
  w, x, g = operands(format)
  for args in ((0 * w, x, g), (w, 0 * x, g), (w, x, 0 * g), (0 * w, 0 * x, g)):
    found = [np.asarray(each, np.float32) for each in layer_in(format)(*args)]
    of_w, of_x, of_g = map(np.any, args)
    assert [np.any(each) for each in found] == [of_w and of_x, of_x and of_g, of_w and of_g]
    assert all(np.all(np.isfinite(each)) for each in found)


BF16, E4M3, E5M2 = "bfloat16", "float8_e4m3fn", "float8_e5m2"


def dtypes_of_matmuls(format):
  """The dtypes of operands and results of the three matmuls of a layer."""
  if format in BLOCKS.values():
    in_float4 = isinstance(format, mpjax.NVFP4)
    values, scales = ("float4_e2m1fn", E4M3) if in_float4 else (E4M3, "float8_e8m0fnu")
    given = (values, values, scales, scales)
    half = "float32" if in_float4 else BF16
    return [(*given, half), (*given, half), (*given, "float32")]
  half = [(BF16, BF16, "float32")]
  if format in FLOAT8.values():
    of_w = half if format.weight_grad == "half" else [(E5M2, E4M3, "float32")]
    return [(E4M3, E4M3, BF16), (E5M2, E4M3, BF16), *of_w]
  in_int8 = ("int8", "int8", "int32")
  return [in_int8] * 3 if format.weight_grad == "int8" else [in_int8, (BF16, BF16, BF16), *half]


@formats
def test_all_three_matmuls_have_operands_in_the_format(format):
  eqns = equations(jax.make_jaxpr(with_gradients(under(layer, matmul=format)))(*operands(format)))
  dots = [eqn for eqn, _ in eqns if eqn.primitive.name in ("block_scaled_dot", "dot_general")]
  found = [tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)) for eqn in dots]
  assert sorted(found) == sorted(dtypes_of_matmuls(format))
  assert all(eqn.params.get("preferred_element_type", "") is not None for eqn in dots)


TRANSFORMED = [*BLOCKS, "float8 tensor", "float8 row, half", "int8 row"]
TRANSFORMED += [name for name in INT8 if "gradients" in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMED)
def test_under_transformations(name):
  format = FORMATS[name]
  fun = with_gradients(under(layer, matmul=format))
  remat = with_gradients(jax.checkpoint(under(layer, matmul=format)))
  args = operands(format, 2)
  mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

  def on_one(*args):  # Of the one example that a device has.
    return jax.tree.map(lambda a: a[None], fun(*(a[0] for a in args)))

  ways = {
    "vmap": jax.vmap(fun),
    "vmap of remat": jax.vmap(remat),
    "scan": lambda *args: lax.scan(lambda _, each: (None, fun(*each)), None, args)[1],
    "shard_map": jax.shard_map(on_one, mesh=mesh, in_specs=P("d"), out_specs=P("d")),
  }
  shared = {"one weight": (None, 0, 0), "one input": (0, None, 0)}
  if format in BLOCKS.values():  # XLA for CPUs cannot run this one in half.
    shared["one gradient"] = (0, 0, None)

  def given(i, axes):
    return [a[0 if axis is None else i] for a, axis in zip(args, axes, strict=True)]

  def every_way(*args):
    found = {name: way(*args) for name, way in ways.items()}
    for name, axes in shared.items():
      some = [a[0] if axis is None else a for a, axis in zip(args, axes, strict=True)]
      found[name] = jax.vmap(fun, axes)(*some)
    return found

  for name, results in jax.jit(every_way)(*args).items():
    examples = [layer_in(format)(*given(i, shared.get(name, (0, 0, 0)))) for i in range(2)]
    for one, *others in zip(results, *examples, strict=True):
      # The compiler may leave out a rounding to bfloat16 in one of them.
      one, other = np.asarray(one, np.float32), np.stack(others).astype(np.float32)
      np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-6, err_msg=name)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
ROWS, COLUMNS = P("d", None), P(None, "d")


@pytest.mark.parametrize(
  ("name", "kind", "specs"),
  [
    ("mxfp8", AUTO, (ROWS, ROWS, ROWS)),
    ("mxfp8", AUTO, (COLUMNS, ROWS, ROWS)),
    # Sharded along its depth, the matmul itself would be ambiguous: JAX asks for an out_sharding.
    ("mxfp8", EXPLICIT, (COLUMNS, P(None, None), COLUMNS)),
    ("int8 row, gradients", AUTO, (P(), ROWS, ROWS)),
    ("int8 row, gradients", EXPLICIT, (P(), ROWS, ROWS)),
  ],
  ids=str,
)
def test_sharded_operands_have_the_numbers_of_whole_ones(name, kind, specs):
  format = FORMATS[name]
  args, fun = operands(format), with_gradients(under(layer, matmul=format))
  wanted = layer_in(format)(*args)
  mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
  with jax.set_mesh(mesh):
    placed = [
      jax.device_put(each, NamedSharding(mesh, spec))
      for each, spec in zip(args, specs, strict=True)
    ]
    found = jax.jit(fun)(*placed)
  rtol, atol = (0, 0) if name.startswith("int8") else (2**-7, 1e-5)
  for one, other in zip(found, wanted, strict=True):
    one, other = (np.asarray(a, np.float32) for a in (one, other))
    np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("format", [BLOCKS["mxfp8"], BLOCKS["nvfp4"]], ids=["mxfp8", "nvfp4"])
def test_without_jit_a_matmul_is_the_same(format):
  w, x, _ = operands(format)
  fun = under(layer, matmul=format)
  wanted = jax.jit(fun)(w, x)
  with jax.disable_jit():
    np.testing.assert_array_equal(fun(w, x), wanted)
