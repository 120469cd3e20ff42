"""Autocast of an operation is the operation on operands cast by hand, bit for bit.

The table of sample calls is tests/autocast/samples.py. Casting by hand is done here by
`astype`. All calls of a table are in one program, which is compiled once for each dtype.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxpr.primitives import FACTS
from tests import programs
from tests.autocast.rig import BOTH
from tests.autocast.samples import (
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

TABLES = {"half": HALF, "float32": FLOAT32, "promote": PROMOTE, "keep": KEEP}
CALLED = {**TABLES, "conditional": CONDITIONAL}


@pytest.mark.parametrize("part", TABLES)
def test_every_primitive_has_a_sample(part):
  listed = getattr(mpjax.OpLists(), part)
  here = listed & alive()  # Names of other versions of JAX are no primitives in this one.
  assert len(here) > 2
  assert here - NO_SAMPLE.keys() == TABLES[part].keys()


def test_a_sample_calls_its_primitive():
  for table in CALLED.values():
    for name, sample in table.items():
      found = programs.dtypes_of(jax.make_jaxpr(sample.fun)(*sample.args), name)
      assert found, name
      assert found <= {"float32", "bool", "int32"}, name


def cast(tree, dtype):
  # Casts what is floating; the result of a comparison is not.
  return jax.tree.map(
    lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
  )


def forward_and_vjp(fun, args, smooth=None):
  # Returns the outputs of `fun`, and the cotangents of the arguments that have any.
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


def differing(calls, backward=True):
  """Returns the names of calls whose outputs or cotangents differ in a bit, or are not float32.

  Args:
    calls: the function under autocast, the same cast by hand, and the sample, by name.
    backward: whether cotangents are compared too.
  """

  def each(args):
    return {
      name: [
        forward_and_vjp(fun, args[name], sample.smooth if backward else ())
        for fun in (ours, by_hand)
      ]
      for name, (ours, by_hand, sample) in calls.items()
    }

  found = programs.run(each, {name: sample.args for name, (*_, sample) in calls.items()})
  types = {name: {str(x.dtype) for x in jax.tree.leaves(want)} for name, (_, want) in found.items()}
  return [
    name
    for name, (got, want) in found.items()
    if programs.bits(got) != programs.bits(want) or not types[name] <= {"float32", "bool", "int32"}
  ]


def result_types(calls):
  # Returns the dtypes of the results of each primitive in the program of its call.
  return {
    name: {
      str(v.aval.dtype)
      for eqn, _ in programs.equations(jax.make_jaxpr(ours)(*sample.args))
      if eqn.primitive.name == name
      for v in eqn.outvars
    }
    for name, (ours, _, sample) in calls.items()
  }


def behind_a_product(x):
  # Returns `x` as a half operation hands it on: rounded, and in half under autocast.
  return (jnp.broadcast_to(x[..., None], (*x.shape, 2)) @ jnp.full((2, 1), 0.5, x.dtype))[..., 0]


def behind_a_sum(x):
  # Returns `x` as an operation of the float32 list hands it on.
  return jax.lax.reduce_sum(x[None], (0,))


@BOTH
def test_half_operations(half):
  calls = {
    name: (
      mpjax.autocast(sample.fun, half),
      lambda *args, fun=sample.fun: cast(fun(*cast(args, half)), "float32"),
      sample,
    )
    for name, sample in HALF.items()
  }
  assert differing(calls) == []
  # Two roundings of operands and one of the result, each by half a unit in the last place.
  last_place = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[half]
  for fun, _, sample in calls.values():
    program = jax.make_jaxpr(functools.partial(forward_and_vjp, fun))(sample.args)
    assert {dtype for p in programs.products(program) for dtype in p.dtypes} == {half}
    got, want = programs.run(lambda *args: (fun(*args), sample.fun(*args)), *sample.args)  # noqa: B023
    np.testing.assert_allclose(got, want, rtol=min(0.01, 3 * last_place))


def is_power(name):
  """Whether it grows faster than its operand: in float32, as test_powers.py shows."""
  degree = FACTS[name].degree
  return degree is not None and degree([1], {}) > 1


@BOTH
@pytest.mark.parametrize("part", ["float32", "promote", "keep"])
def test_operations_of_half_operands(part, half):
  dtype = "float32" if part == "float32" else half
  keeps = part == "keep"

  def behind(sample, *args):
    return sample.fun(*map(behind_a_product, args))

  def by_hand(sample, *args):
    return cast(sample.fun(*cast(cast(args, half), dtype)), "float32")

  calls = {
    name: (
      mpjax.autocast(functools.partial(behind, sample), half),
      functools.partial(by_hand, sample),
      sample,
    )
    for name, sample in TABLES[part].items()
    if not (keeps and is_power(name))
  }
  # The gradient of a repeated or chosen value is a float32 sum, unlike that by hand.
  assert differing(calls, backward=not keeps) == []
  for name, (fun, _, sample) in calls.items():
    program = jax.make_jaxpr(fun)(*sample.args)
    becomes_an_index = any(jnp.issubdtype(aval.dtype, jnp.integer) for aval in program.out_avals)
    assert programs.half_share(program) == (not becomes_an_index), name
  if not keeps:
    for name, found in result_types(calls).items():
      assert found in ({dtype}, {"bool"}), name


@BOTH
def test_promoting_operations_of_both_take_the_widest(half):
  def behind(fun, first, *rest):
    return fun(behind_a_product(first), *map(behind_a_sum, rest))

  def by_hand(fun, first, *rest):
    return fun(cast(cast(first, half), "float32"), *rest)

  calls = {
    name: (
      mpjax.autocast(functools.partial(behind, sample.fun), half),
      functools.partial(by_hand, sample.fun),
      sample,
    )
    for name, sample in PROMOTE.items()
  }
  assert differing(calls) == []
  for name, found in result_types(calls).items():
    # What is passed on keeps its own dtype.
    wanted = {half, "float32"} if name in PASSED_ON else {"float32"}
    assert found in (wanted, {"bool"}), name


def test_a_parameter_decides_products_and_nothing_else_that_promotes():
  # A product is rounded once; a sum or a choice between what is rounded is, as by hand.
  def between(sample, first, parameter):
    results = jax.tree.leaves(sample.fun(behind_a_product(first), parameter))
    found = jnp.concatenate([jnp.ravel(x) for x in results])
    return found[None] @ found[:, None] if found.dtype != bool else found

  for name, sample in PROMOTE.items():
    if len(sample.args) == 2:
      fun = mpjax.autocast(functools.partial(between, sample), "bfloat16")
      found = programs.dtypes_of(jax.make_jaxpr(fun)(*sample.args), name)
      product = FACTS[name].role == "product"
      assert found <= {"float32" if product else "bfloat16", "bool"}, name
