"""Matmuls in int8: against NumPy, in transformations, and what an audit says of them."""

import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax._jaxpr.count import dot_axes
from mpjax._matmul.int8 import LARGEST, LONGEST, Int8Recipe, quantise
from tests.autocast.rig import matmuls
from tests.format_oracle import int8, normal
from tests.programs import equations

ALL = {"input_grad": "int8", "weight_grad": "int8"}
FORMATS = {
  "row": mpjax.Int8(),
  "tensor": mpjax.Int8(scaling="tensor"),
  "row, gradients": mpjax.Int8(**ALL),
  "tensor, gradients": mpjax.Int8(scaling="tensor", **ALL),
}
formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def cast(fun, format=FORMATS["row"]):
  policy = mpjax.Policy(compute_dtype="bfloat16", matmul=format)
  return mpjax.autocast(fun, policy, data_argnums=1)


def halves(seed, shape, largest=1.0):
  return normal(seed, shape, largest).astype(ml_dtypes.bfloat16)


def layer(w, x):
  return x.astype(jnp.float32) @ w


def with_gradients(fun):
  """Returns a function of (w, x, g): result and gradients, for a gradient `g` in bfloat16."""

  def call(w, x, g):
    y, pull = jax.vjp(lambda w, x: fun(w, x).astype(jnp.bfloat16), w, x)
    return y, *pull(g)

  return call


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


FORMULAS = {
  "matmul": ("mk,kn->mn", (24, 48), (48, 32)),
  "transposed": ("mk,nk->mn", (5, 16), (32, 16)),
  "out of heads": ("bthd,hde->bte", (2, 3, 4, 16), (4, 16, 32)),
  "experts behind": ("bed,def->bfe", (6, 3, 16), (16, 3, 32)),
}


def product(formula, one, other, scaling):
  """An einsum of two arrays in int8, in float64; of None for the scaling, one that is not in it."""
  left, right, out = re.split(",|->", formula)

  def stands_for(x, names, others):
    if scaling is None:
      return x.astype(np.float64)
    summed = tuple(i for i, name in enumerate(names) if name in others and name not in out)
    values, scale = int8(x.astype(np.float32), summed if scaling == "row" else None)
    return values * scale

  return np.einsum(formula, stands_for(one, left, right), stands_for(other, right, left))


@formats
def test_an_einsum_and_its_gradients_are_those_of_rounded_operands(format):
  def gradients(operands):
    def of_one(name, w, x, g):
      return with_gradients(cast(lambda w, x: jnp.einsum(FORMULAS[name][0], x, w), format))(w, x, g)

    return {name: of_one(name, *each) for name, each in operands.items()}

  operands = {}
  for name, (formula, x, w) in FORMULAS.items():
    shape = jax.eval_shape(functools.partial(jnp.einsum, formula), np.ones(x), np.ones(w)).shape
    operands[name] = halves(1, w, 0.03), halves(0, x), halves(2, shape, 1e-3)
  for name, found in jax.jit(gradients)(operands).items():
    formula, (w, x, g) = FORMULAS[name][0], operands[name]
    left, right, out = re.split(",|->", formula)
    backward = format.scaling if format.weight_grad == "int8" else None
    wanted = (
      product(formula, x, w, format.scaling),
      product(f"{left},{out}->{right}", x, g, backward),
      product(f"{out},{right}->{left}", g, w, backward),
    )
    for one, other in zip(found, wanted, strict=True):
      # One rounding to bfloat16, and sums in float32.
      bound = 2.0**-8 * np.abs(other) + 2.0**-16 * np.max(np.abs(other))
      assert np.all(np.abs(np.asarray(one, np.float64) - other) <= bound), name


def test_gradients_are_those_of_the_compute_dtype():
  w, x, g = normal(1, (32, 16)), halves(0, (8, 32)), halves(2, (8, 16))
  _, *found = jax.jit(with_gradients(cast(layer)))(w, x, g)
  weight_in_float32 = mpjax.Policy(compute_dtype="bfloat16", weight_grad_dtype="float32")
  half = mpjax.autocast(layer, weight_in_float32, data_argnums=1)
  _, *wanted = jax.jit(with_gradients(half))(w, x, g)
  for one, other in zip(found, wanted, strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


def test_sums_are_exact():
  # All products have one sign: sums in bfloat16 or float16 would lose the last digits.
  rng = np.random.default_rng(0)
  x, w = (rng.integers(100, 128, shape).astype(np.float32) for shape in ((4, 512), (512, 16)))
  x[:, 0] = w[0] = LARGEST
  np.testing.assert_array_equal(jax.jit(cast(layer))(w, x), (x @ w).astype(ml_dtypes.bfloat16))


@formats
def test_operands_are_int8_and_sums_int32(format):
  w, x, g = normal(1, (32, 16)), halves(0, (8, 32)), halves(2, (8, 16))
  gradients = with_gradients(cast(layer, format))
  dots = [
    tuple(v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars))
    for eqn, _ in equations(jax.make_jaxpr(gradients)(w, x, g))
    if eqn.primitive.name == "dot_general"
  ]
  in_int8, in_half = ("int8", "int8", "int32"), ("bfloat16", "bfloat16")
  if format.weight_grad == "int8":
    assert dots == [in_int8] * 3
  else:
    assert sorted(dots) == [(*in_half, "bfloat16"), (*in_half, "float32"), in_int8]


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_clipped():
  fun = cast(layer)
  x, w = halves(0, (8, 32)), normal(1, (32, 16))
  for a, b in ((0 * x, w), (x, 0 * w)):
    assert not np.any(fun(b, a))
  for bad in (np.inf, -np.inf, np.nan):
    x = halves(0, (8, 32))
    x[3, 5] = bad
    assert np.isfinite(np.asarray(fun(w, x), np.float32)).all(axis=1).tolist() == [
      i != 3 for i in range(8)
    ]


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


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_gradients_of_long_sums_stay_in_the_compute_dtype(scaling):
  most, more = 133120, 133152  # Multiples of 32 around the longest sum.

  def loss(w, x):
    return jnp.sum(jnp.tanh(layer(w, x)))

  def experts(w, x):
    return jnp.sum(jnp.tanh(lax.ragged_dot(x.astype(jnp.float32), w, np.array([1, 2], np.int32))))

  def examples(w, x):
    return jnp.sum(jax.vmap(cast(loss, format), (None, 0))(w, x))

  def sums_and_reasons(fun, w, x):
    fun = jax.grad(fun, (0, 1))
    args = jax.ShapeDtypeStruct(w, "float32"), jax.ShapeDtypeStruct(x, "bfloat16")
    eqns = [eqn for eqn, _ in equations(jax.make_jaxpr(fun)(*args))]
    sums = {sum_of(eqn) for eqn in eqns if eqn.invars and str(eqn.invars[0].aval.dtype) == "int8"}
    return sums - {1}, {row.reason for row in mpjax.audit(fun)(*args).formats} - {""}

  format = mpjax.Int8(scaling=scaling, **ALL)
  reason = f"{more} products may overflow int32"
  for fun, groups in ((cast(loss, format), ()), (cast(experts, format), (2,))):
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
  fun = jax.grad(lambda w, x: jnp.sum(jnp.tanh(cast(layer, FORMATS["row, gradients"])(w, x))))
  exported = jax.export.export(jax.jit(fun), platforms=["cpu"])(w, x)
  half = jax.grad(lambda w, x: jnp.sum(jnp.tanh(cast(layer)(w, x))))
  args = normal(1, (32, 16)), normal(0, (8, 32))
  np.testing.assert_array_equal(exported.call(*args), jax.jit(half)(*args))


# Groups.


@formats
def test_groups_are_those_of_each_expert(format):
  sizes = np.array([5, 0, 7, 1], np.int32)  # Of 16 rows, of which three are in no group.
  w, x, g = normal(1, (4, 32, 48), 0.03), halves(0, (16, 32)), halves(2, (16, 48), 1e-3)
  x[13:], g[13:] = np.nan, np.inf  # Rows of no group reach no result and no scale.
  found = jax.jit(with_gradients(cast(lambda w, x: lax.ragged_dot(x, w, sizes), format)))(w, x, g)
  x[13:], g[13:] = 0, 0

  def stands_for(a, axis, in_int8=True):
    if not in_int8:
      return a.astype(ml_dtypes.bfloat16).astype(np.float64)
    values, scale = int8(a.astype(np.float32), (axis,) if format.scaling == "row" else None)
    return values * scale

  both = format.weight_grad == "int8"
  wanted = [np.zeros(each.shape) for each in found]
  for i, end in enumerate(np.cumsum(sizes)):
    here = slice(end - sizes[i], end)
    wanted[0][here] = stands_for(x, 1)[here] @ stands_for(w, 1)[i]
    wanted[1][i] = stands_for(x, 0, both)[here].T @ stands_for(g, 0, both)[here]
    wanted[2][here] = stands_for(g, 1, both)[here] @ stands_for(w, 2, both)[i].T
  for one, other in zip(found, wanted, strict=True):
    bound = 2.0**-8 * np.abs(other) + 2.0**-16 * np.max(np.abs(other))
    assert np.all(np.abs(np.asarray(one, np.float64) - other) <= bound)


# Transformations.


@formats
def test_under_transformations(format):
  fun = with_gradients(cast(layer, format))
  remat = with_gradients(jax.checkpoint(cast(layer, format)))
  args = normal(1, (2, 32, 16)), halves(0, (2, 8, 32)), halves(2, (2, 8, 16))
  mesh, spec = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d")

  def on_one(*args):  # Of the one example that a device has.
    return jax.tree.map(lambda a: a[None], fun(*(a[0] for a in args)))

  ways = {
    "vmap": jax.vmap(fun),
    "vmap of remat": jax.vmap(remat),
    "scan": lambda *args: lax.scan(lambda _, each: (None, fun(*each)), None, args)[1],
    "shard_map": jax.shard_map(on_one, mesh=mesh, in_specs=spec, out_specs=spec),
  }

  def all_ways(*args):
    return {name: way(*args) for name, way in ways.items()}, [
      fun(*(a[i] for a in args)) for i in range(2)
    ]

  found, examples = jax.jit(all_ways)(*args)
  wanted = jax.tree.map(lambda *a: np.stack(a).astype(np.float32), *examples)
  for name, results in found.items():
    for one, other in zip(results, wanted, strict=True):
      # The compiler may leave out a rounding to bfloat16 in one of them.
      one = np.asarray(one, np.float32)
      np.testing.assert_allclose(one, other, rtol=2**-7, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_operands_have_the_numbers_of_whole_ones(kind):
  w, x, g = normal(1, (32, 16)), halves(0, (8, 32)), halves(2, (8, 16))
  fun = with_gradients(cast(layer, FORMATS["row, gradients"]))
  wanted = jax.jit(fun)(w, x, g)
  mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
  with jax.set_mesh(mesh):
    places = (PartitionSpec(), PartitionSpec("d"), PartitionSpec("d"))
    args = [
      jax.device_put(each, NamedSharding(mesh, spec))
      for each, spec in zip((w, x, g), places, strict=True)
    ]
    found = jax.jit(fun)(*args)
  for one, other in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(one, other)


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
