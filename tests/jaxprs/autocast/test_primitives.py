"""Invariant I13: autocast of an operation is the operation on operands cast by hand, bit for bit.

The table of sample calls is tests/jaxprs/autocast/samples.py. Casting by hand is done here by
`astype`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpjax
from mpjax._jaxprs.primitives import FACTS
from tests import programs
from tests.jaxprs.autocast.samples import (
  CONDITIONAL,
  FLOAT32,
  HALF,
  KEEP,
  NO_SAMPLE,
  PASSED_ON,
  PROMOTE,
  unit,
)
from tests.registered_primitives import alive

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
TABLES = {"half": HALF, "float32": FLOAT32, "promote": PROMOTE, "keep": KEEP}
CALLED = {**TABLES, "conditional": CONDITIONAL}


@pytest.mark.parametrize("part", TABLES)
def test_every_primitive_has_a_sample(part):
  listed = getattr(mpjax.OpLists(), part)
  here = listed & alive()  # Names of other versions of JAX are no primitives in this one.
  assert len(here) > 2
  assert here - NO_SAMPLE.keys() == TABLES[part].keys()


@pytest.mark.parametrize(
  ("part", "name"),
  [(part, name) for part, table in CALLED.items() for name in table],
)
def test_a_sample_calls_its_primitive(part, name):
  sample = CALLED[part][name]
  program = jax.make_jaxpr(sample.fun)(*sample.args)
  assert programs.dtypes_of(program, name) <= {"float32", "bool", "int32"}
  assert programs.dtypes_of(program, name)


def cast(tree, dtype):
  """Casts what is floating; the result of a comparison is not."""
  return jax.tree.map(
    lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
  )


def forward_and_vjp(fun, args, smooth=None):
  """Returns the outputs of `fun`, and the cotangents of the arguments that have any."""
  smooth = range(len(args)) if smooth is None else smooth

  def of_smooth(*some):
    given = dict(zip(smooth, some, strict=True))
    return fun(*[given.get(i, x) for i, x in enumerate(args)])

  if not smooth:
    return fun(*args), ()
  outs, pull = jax.vjp(of_smooth, *(args[i] for i in smooth))
  # Cotangents that a half type must round.
  cotangents = jax.tree.map(lambda x: jnp.asarray(unit(*x.shape, seed=7), x.dtype), outs)
  return outs, pull(cotangents)


def same(fun, by_hand, sample):
  """Asserts that two functions have the same outputs and cotangents, in float32."""

  def both(*args):
    return [forward_and_vjp(f, args, sample.smooth) for f in (fun, by_hand)]

  got, want = programs.run(both, *sample.args)
  assert {str(x.dtype) for x in jax.tree.leaves(want)} <= {"float32", "bool"}
  assert programs.bits(got) == programs.bits(want)


def behind_a_product(x):
  """Returns `x` as a half operation hands it on: rounded, and in half under autocast."""
  return (x[..., None] @ jnp.ones((1, 1), x.dtype))[..., 0]


def behind_a_sum(x):
  """Returns `x` as an operation of the float32 list hands it on."""
  return jax.lax.reduce_sum(x[None], (0,))


@pytest.mark.case("I13", "A69")
@BOTH
@pytest.mark.parametrize("name", HALF)
def test_half_operations(name, half):
  sample = HALF[name]
  fun = mpjax.autocast(sample.fun, half)
  same(fun, lambda *args: cast(sample.fun(*cast(args, half)), "float32"), sample)
  program = jax.make_jaxpr(lambda *args: forward_and_vjp(fun, args))(*sample.args)
  assert {dtype for p in programs.products(program) for dtype in p.dtypes} == {half}


@pytest.mark.case("I13", "A69")
@BOTH
@pytest.mark.parametrize("name", FLOAT32)
def test_float32_operations_of_half_operands(name, half):
  sample = FLOAT32[name]

  def behind(*args):
    return sample.fun(*map(behind_a_product, args))

  def by_hand(*args):
    return sample.fun(*cast(cast(args, half), "float32"))

  fun = mpjax.autocast(behind, half)
  same(fun, by_hand, sample)
  program = jax.make_jaxpr(fun)(*sample.args)
  assert programs.half_share(program) == 1
  assert programs.dtypes_of(program, name) == {"float32"}


@pytest.mark.case("I13", "A69", "A78")
@BOTH
@pytest.mark.parametrize("name", PROMOTE)
def test_promoting_operations_of_half_operands(name, half):
  sample = PROMOTE[name]

  def behind(*args):
    return sample.fun(*map(behind_a_product, args))

  def by_hand(*args):
    return cast(sample.fun(*cast(args, half)), "float32")

  fun = mpjax.autocast(behind, half)
  same(fun, by_hand, sample)
  assert programs.dtypes_of(jax.make_jaxpr(fun)(*sample.args), name) <= {half, "bool"}


def is_power(name):
  """Whether it grows faster than its operand: in float32, as test_powers.py shows."""
  degree = FACTS[name].degree
  return degree is not None and degree([1], {}) > 1


def behind_both(name, half):
  """Returns the sample on a half operand first and float32 ones after it, and that by hand."""
  fun = PROMOTE[name].fun

  def behind(first, *rest):
    return fun(behind_a_product(first), *map(behind_a_sum, rest))

  def by_hand(first, *rest):
    return fun(cast(cast(first, half), "float32"), *rest)

  return mpjax.autocast(behind, half), by_hand


@pytest.mark.case("I13", "A69", "A78")
@BOTH
@pytest.mark.parametrize("name", [name for name in PROMOTE if name not in PASSED_ON])
def test_promoting_operations_of_both_take_the_widest(name, half):
  fun, by_hand = behind_both(name, half)
  same(fun, by_hand, PROMOTE[name])
  program = jax.make_jaxpr(fun)(*PROMOTE[name].args)
  assert programs.dtypes_of(program, name) <= {"float32", "bool"}


@pytest.mark.case("I13", "A69")
@BOTH
@pytest.mark.parametrize("name", PASSED_ON)
def test_what_is_passed_on_keeps_its_own_type(name, half):
  fun, by_hand = behind_both(name, half)
  same(fun, by_hand, PROMOTE[name])
  program = jax.make_jaxpr(fun)(*PROMOTE[name].args)
  types = [
    [str(var.aval.dtype) for var in eqn.outvars]
    for eqn, _ in programs.equations(program)
    if eqn.primitive.name == name
  ]
  assert {dtype for found in types for dtype in found} == {half, "float32"}


@pytest.mark.case("I13", "A69")
@BOTH
@pytest.mark.parametrize("name", [name for name in KEEP if not is_power(name)])
def test_what_keeps_the_type_of_a_half_operand(name, half):
  """Forward: the gradient of a repeated or chosen value is a float32 sum, unlike that by hand."""
  sample = KEEP[name]

  def behind(*args):
    return sample.fun(*map(behind_a_product, args))

  def both(*args):
    return mpjax.autocast(behind, half)(*args), cast(sample.fun(*cast(args, half)), "float32")

  got, want = programs.run(both, *sample.args)
  assert programs.bits(got) == programs.bits(want)


@pytest.mark.case("I13")
@BOTH
@pytest.mark.parametrize("name", [n for n in PROMOTE if len(PROMOTE[n].args) == 2])
def test_a_parameter_does_not_decide_what_promotes(name, half):
  sample = PROMOTE[name]

  def between(first, parameter):
    # As the result of the whole, it would be a parameter that comes back changed: float32.
    results = jax.tree.leaves(sample.fun(behind_a_product(first), parameter))
    found = jnp.concatenate([jnp.ravel(x) for x in results])
    return found[None] @ found[:, None] if found.dtype != bool else found

  program = jax.make_jaxpr(mpjax.autocast(between, half))(*sample.args)
  assert programs.dtypes_of(program, name) <= {half, "bool"}


# The same over shapes and dtypes. Each call is compiled, so there are few of them.

SIZES = st.integers(0, 4)
ELEMENTWISE = ["exp", "log", "rsqrt", "erf_inv", "sin", "lgamma"]
REDUCTIONS = {
  "reduce_sum": jax.lax.reduce_sum,
  "reduce_prod": jax.lax.reduce_prod,
  "cumsum": lambda x, axes: jax.lax.cumsum(x, axes[0]),
  "cumlogsumexp": lambda x, axes: jax.lax.cumlogsumexp(x, axes[0]),
}
HALVES = st.sampled_from(["bfloat16", "float16"])
FEW = settings(max_examples=25)


def drawn(shape, dtype, seed):
  return jnp.asarray(unit(*shape, seed=seed), dtype)


def agree(fun, by_hand, args, half):
  """Asserts equal bits, and the dtypes that there are without autocast."""

  def both(*args):
    return [forward_and_vjp(f, args) for f in (mpjax.autocast(fun, half), by_hand)]

  got, want = programs.run(both, *args)
  assert programs.bits(got) == programs.bits(want)
  plain = jax.eval_shape(lambda *args: forward_and_vjp(fun, args), *args)
  types = [(x.dtype, x.shape) for x in jax.tree.leaves(plain)]
  assert [(x.dtype, x.shape) for x in jax.tree.leaves(got)] == types


@pytest.mark.case("I13")
@FEW
@given(HALVES, st.lists(SIZES, max_size=2), SIZES, SIZES, SIZES, st.booleans())
def test_products_of_any_shape(half, batch, rows, terms, columns, in_half):
  """Operands come in float32, or in the half type already."""
  dims = tuple(range(len(batch)))
  numbers = (((len(batch) + 1,), (len(batch),)), (dims, dims))
  dtype = half if in_half else "float32"
  args = (drawn((*batch, rows, terms), dtype, 0), drawn((*batch, terms, columns), dtype, 1))

  def fun(x, y):
    return jax.lax.dot_general(x, y, numbers)

  agree(fun, lambda *args: fun(*cast(args, half)).astype(dtype), args, half)


@pytest.mark.case("I13")
@settings(max_examples=12)
@given(
  HALVES,
  st.lists(st.integers(3, 6), min_size=1, max_size=2),
  st.integers(1, 2),
  st.integers(1, 3),
  st.sampled_from(["SAME", "VALID"]),
)
def test_convolutions_of_any_shape(half, space, stride, features, padding):
  space_letters = "HW"[: len(space)]
  numbers = (f"N{space_letters}C", f"{space_letters}IO", f"N{space_letters}C")
  kernel = [3] * len(space)
  args = (drawn((2, *space, 2), "float32", 0), drawn((*kernel, 2, features), "float32", 1))

  def fun(x, kernel):
    return jax.lax.conv_general_dilated(
      x, kernel, [stride] * len(space), padding, dimension_numbers=numbers
    )

  agree(fun, lambda *args: fun(*cast(args, half)).astype("float32"), args, half)


@pytest.mark.case("I13")
@FEW
@given(HALVES, st.sampled_from(ELEMENTWISE), st.lists(SIZES, max_size=3), st.booleans())
def test_elementwise_float32_operations_of_any_shape(half, name, shape, in_half):
  fun = FLOAT32[name].fun
  args = (drawn(shape, half if in_half else "float32", 0),)
  agree(fun, _in_float32(fun), args, half)


@pytest.mark.case("I13", "B051")
@FEW
@given(
  HALVES,
  st.sampled_from(sorted(REDUCTIONS)),
  st.lists(st.integers(1, 4), min_size=1, max_size=3),
  st.integers(0, 2),
  st.booleans(),
)
def test_reductions_of_any_shape(half, name, shape, axis, in_half):
  fun = functools.partial(REDUCTIONS[name], axes=(axis % len(shape),))
  args = (drawn(shape, half if in_half else "float32", 0),)
  agree(fun, _in_float32(fun), args, half)


def _in_float32(fun):
  return lambda x: fun(x.astype("float32")).astype(x.dtype)


# Accuracy of each half operation.


@pytest.mark.case("A87")
@BOTH
@pytest.mark.parametrize("name", HALF)
def test_half_operations_are_within_a_hundredth_of_float32(name, half):
  sample = HALF[name]

  def both(*args):
    return mpjax.autocast(sample.fun, half)(*args), sample.fun(*args)

  got, want = programs.run(both, *sample.args)
  # Two roundings of operands and one of the result, each by half a unit in the last place.
  last_place = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[half]
  np.testing.assert_allclose(got, want, rtol=min(0.01, 3 * last_place))
  assert math.isfinite(np.sum(got))
