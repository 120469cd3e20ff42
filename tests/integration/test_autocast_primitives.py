"""Autocast of an operation is the operation on operands cast by hand, bit for bit.

The table of sample calls is tests/autocast/samples.py. Casting by hand is done here by
`astype`. All calls of a table are in one program, which is compiled once for each dtype.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs
from tests.autocast.rig import BOTH, rewritten
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
from tests.programs import cast
from tests.registered_primitives import alive

TABLES = {"half": HALF, "float32": FLOAT32, "promote": PROMOTE, "keep": KEEP}
CALLED = {**TABLES, "conditional": CONDITIONAL}


@pytest.mark.parametrize("part", TABLES)
def test_every_primitive_has_a_sample(part):
  listed = getattr(mpjax.OpLists(), part)
  here = listed & alive()  # Names of other versions of JAX are no primitives in this one.
  assert len(here) > 2
  assert here - NO_SAMPLE.keys() == TABLES[part].keys()


@pytest.mark.parametrize("table", CALLED.values())
def test_a_sample_calls_its_primitive(table):
  for name, sample in table.items():
    found = programs.dtypes_of(jax.make_jaxpr(sample.fun)(*sample.args), name)
    assert found, name
    assert found <= {"float32", "bool", "int32"}, name


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


def activation(x):
  """Returns `x` as the result of a matmul, which is in low precision under autocast."""
  return (jnp.broadcast_to(x[..., None], (*x.shape, 8)) @ jnp.full((8, 1), 1 / 8, x.dtype))[..., 0]


def float32_activation(x):
  """Returns the result of a matmul as an operation of the float32 list returns it."""
  return jax.lax.reduce_sum(activation(x)[None], (0,))


def under_autocast(fun, half):
  """Returns a function whose results widen nothing inside, and are cast to float32 outside."""
  inside = rewritten(fun, half, results=lambda out: out)
  return lambda *args: cast(inside(*args), "float32")


@BOTH
def test_matmuls_and_convolutions(half):
  # JAX gives the gradient of a weight the dtype of the weight.
  policy = dataclasses.replace(mpjax.Policy.parse(half), weight_grad_dtype=half)
  calls = {
    name: (
      mpjax.autocast(sample.fun, policy),
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ("part", "half"),
  [
    ("float32", "bfloat16"),
    # Twelve seconds of compilation for the same operations in float32.
    pytest.param("float32", "float16", marks=pytest.mark.accuracy),
    *((part, half) for part in ("promote", "keep") for half in programs.HALF),
  ],
)
def test_operations_on_activations(part, half):
  dtype = "float32" if part == "float32" else half
  keeps = part == "keep"

  def of_activations(sample, *args):
    return sample.fun(*map(activation, args))

  def by_hand(sample, *args):
    return cast(sample.fun(*cast(cast(args, half), dtype)), "float32")

  calls = {
    name: (
      under_autocast(functools.partial(of_activations, sample), half),
      functools.partial(by_hand, sample),
      sample,
    )
    for name, sample in TABLES[part].items()
  }
  # The gradient of a repeated or chosen value is a float32 sum, unlike that by hand.
  assert differing(calls, backward=not keeps) == []
  for name, (fun, _, sample) in calls.items():
    assert programs.half_share(jax.make_jaxpr(fun)(*sample.args)) == 1, name
  if not keeps:
    for name, found in result_types(calls).items():
      assert found in ({dtype}, {"bool"}), name


@pytest.mark.slow
@BOTH
def test_of_a_low_precision_and_a_float32_activation_the_widest_decides(half):
  def of_both(fun, first, *rest):
    return fun(activation(first), *map(float32_activation, rest))

  def by_hand(fun, *args):
    return fun(*cast(cast(args, half), "float32"))

  calls = {
    name: (
      mpjax.autocast(functools.partial(of_both, sample.fun), half),
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


def test_a_parameter_decides_nothing():
  def of_both(sample, first, parameter):
    return sample.fun(activation(first), parameter)

  for name, sample in PROMOTE.items():
    if len(sample.args) == 2 and name not in PASSED_ON:
      fun = under_autocast(functools.partial(of_both, sample), "bfloat16")
      found = programs.dtypes_of(jax.make_jaxpr(fun)(*sample.args), name)
      assert found <= {"bfloat16", "bool"}, name
