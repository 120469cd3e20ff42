"""Atoms and the same of another dtype, a walk over equations, and the jaxprs inside of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Literal, Primitive
from jax.sharding import PartitionSpec

import mpjax
from mpjax._jaxpr.compat import closed_over
from mpjax._jaxpr.count import flops_of
from mpjax._jaxpr.primitives import FACTS, HIGHER_ORDER, Holds, facts_of
from mpjax._jaxpr.reader import (
  donated,
  dtype_of,
  hides_matmul,
  inner_jaxprs,
  is_number,
  literal_as,
  opened,
  retyped,
  walk,
)
from mpjax._jaxpr.steps import body_of
from tests.autocast.rig import with_jvp, with_vjp
from tests.programs import s

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(d) for d in (jnp.bfloat16, "float16", "float32"))


def literal(number):
  """Returns a float32 literal as JAX writes it."""
  program = jax.make_jaxpr(lambda x: x * np.float32(number))(jnp.float32(1))
  (found,) = [atom for atom in program.eqns[0].invars if isinstance(atom, Literal)]
  return found


def test_a_literal_in_another_type():
  made = literal_as(literal(0.1), BFLOAT16)
  assert made.val.dtype == BFLOAT16
  assert float(made.val) == 0.10009765625
  assert (made.aval.dtype, made.aval.shape, made.aval.weak_type) == (BFLOAT16, (), False)


def test_a_variable_in_another_dtype_keeps_its_weak_type():
  weak = jax.make_jaxpr(lambda: jnp.asarray(2.0) * jnp.asarray(1.0))().jaxpr.eqns[0].outvars[0]
  assert weak.aval.weak_type
  made = retyped(weak, FLOAT16)
  assert made is not weak
  assert (made.aval.dtype, made.aval.shape, made.aval.weak_type) == (FLOAT16, (), True)


def test_the_dtype_of_anything():
  program = jax.make_jaxpr(lambda x, key: (x, key, 1))(jnp.ones(2, "int8"), jax.random.key(0))
  assert [str(dtype_of(v)) for v in program.jaxpr.outvars] == ["int8", "key<fry>", "int32"]
  token = jax.make_jaxpr(jax.lax.create_token)().jaxpr.outvars[0]
  assert dtype_of(token) is None


def square(x):
  """One product of 8x8 matrices: 1,024 operations."""
  return x @ x


@custom_vmap
def with_vmap(x):
  return square(x)


with_vmap.def_vmap(lambda size, batched, x: (jax.vmap(square)(x), True))


def turn(c, _):
  return square(c), None


def in_shard_map(x):
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  spec = PartitionSpec("a")
  body = jax.shard_map(lambda y: y @ y.T, mesh=mesh, in_specs=spec, out_specs=spec)
  return body(x)


NESTED = {
  "plain": (square, 1024, True),
  "jit": (jax.jit(square), 1024, True),
  "jit in jit": (jax.jit(lambda x: jax.jit(square)(x) + square(x)), 2048, True),
  # From jax 0.11 on an equation of its own.
  "traced": (jax.jit(square).trace(s(8, 8)), 1024, True),
  "remat": (jax.checkpoint(square), 1024, True),
  "scan": (lambda x: lax.scan(turn, x, None, length=5)[0], 5 * 1024, True),
  "scan in scan": (
    lambda x: lax.scan(lambda c, _: (lax.scan(turn, c, None, length=5)[0], None), x, length=3)[0],
    15 * 1024,
    True,
  ),
  "fori with known bounds": (lambda x: lax.fori_loop(0, 7, lambda _, c: square(c), x), 7168, True),
  "fori with unknown bounds": (
    lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda _, c: square(c), x),
    1024,
    False,
  ),
  "while": (lambda x: lax.while_loop(lambda c: jnp.sum(c @ c) < 9, square, x), 2048, False),
  "scan in while": (
    lambda x: lax.while_loop(
      lambda c: jnp.sum(c) < 9, lambda c: lax.scan(turn, c, None, length=5)[0], x
    ),
    5 * 1024,
    False,
  ),
  "cond": (lambda x: lax.cond(x[0, 0] > 0, square, lambda y: square(y) @ y, x), 3072, False),
  "custom_jvp": (with_jvp(square), 1024, True),
  "custom_vjp": (with_vjp(square), 1024, True),
  "custom_vmap": (with_vmap, 1024, True),
  "composite": (lax.composite(square, name="mpjax.square"), 1024, True),
  "linear_call": (
    lambda x: jax.custom_derivatives.linear_call(lambda r, v: r @ v, lambda r, v: r.T @ v, x, x),
    1024,
    True,
  ),
  # Into float32, which has a derivative of our own.
  "matmul_tangent": (
    lambda x: jax.jvp(mpjax.autocast(square, "mixed_bfloat16"), (x,), (x,))[1],
    3 * 1024,
    True,
  ),
  "activation_tangent": (
    lambda x: jax.jvp(mpjax.autocast(lambda x: square(jax.nn.gelu(square(x)))), (x,), (x,))[1],
    6 * 1024,
    True,
  ),
  # It runs as it was traced: two products of a matrix and a vector.
  "custom_linear_solve": (
    lambda x: lax.custom_linear_solve(lambda v: x @ v, x[0], lambda _, b: x @ (x.T @ b)),
    2 * 128,
    True,
  ),
  # Four rows on each device of the axis "a", 2 * 4 * 8 * 4, on four devices ("b" repeats the work).
  "shard_map": (in_shard_map, 4 * 256, True),
}


@pytest.mark.parametrize("name", NESTED)
def test_equations_are_met_wherever_they_are_written(name):
  fun, flops, certain = NESTED[name]
  program = jax.make_jaxpr(lambda x: fun(x))(s(8, 8))
  for each in (program, program.jaxpr):  # Closed or not.
    assert any(flops_of(eqn) for eqn in walk(each))
  matmuls = [step for step in body_of(program).every_step() if flops_of(step.eqn) is not None]
  assert sum(step.times * (flops_of(step.eqn) or 0) for step in matmuls) == flops
  assert all(step.certain is certain for step in matmuls)


def kernel(x, y):
  y[...] = x[...] * 2


OPAQUE_PROGRAMS = {
  "reduce": lambda x: lax.reduce(x, jnp.float32(0), lambda a, b: a + 2 * b, (0,)),
  "reduce_window": lambda x: lax.reduce_window(
    x, 0.0, lambda a, b: a + 2 * b, (2, 2), (1, 1), "SAME"
  ),
  "scatter-add": lambda x: x.at[0].add(1),
  "scatter": lambda x: x.at[0].set(1),
  "pallas_call": lambda x: pallas.pallas_call(kernel, out_shape=x)(x),
  "mpmd_map": lambda x: mosaic_gpu.kernel(kernel, out_type=x)(x),
}


@pytest.mark.parametrize("name", OPAQUE_PROGRAMS)
def test_programs_of_elements_and_blocks_are_no_operations_of_the_program(name):
  names = [eqn.primitive.name for eqn in walk(jax.make_jaxpr(OPAQUE_PROGRAMS[name])(s(8, 8)))]
  assert FACTS[name].holds in (Holds.BINARY, Holds.KERNEL)
  assert names.count(name) == 1
  assert "mul" not in names


W, X = s(3, 3), s(5, 3)


def read(eqn):
  """The jaxprs of an equation that this version can read."""
  found = inner_jaxprs(eqn)
  assert found is not None
  return found


def only(fun, *args, name):
  """The first equation of a primitive in the program of a function."""
  program = jax.make_jaxpr(fun)(*args)
  return next(eqn for eqn in walk(program) if eqn.primitive.name == name)


def scanned(w, start, xs):
  """One constant, two values carried, one input a step."""

  def step(carry, x):
    total, count = carry
    return (jnp.tanh(total @ w + x), count + 1), total

  return lax.scan(step, (start, 0), xs)


@pytest.mark.parametrize("name", [*NESTED, "gradient of a scan"])
def test_every_operand_that_is_read_has_the_type_that_is_expected_inside(name):
  # An independent check of the positions: shapes, but for the axis of a scan or of a device.
  gradient = jax.grad(lambda *args: jnp.sum(scanned(*args)[0][0]))
  fun, args = (gradient, (W, s(3), X)) if name not in NESTED else (NESTED[name][0], (s(8, 8),))
  seen = 0
  for eqn in walk(jax.make_jaxpr(lambda *args: fun(*args))(*args)):
    for inner in read(eqn):
      assert isinstance(opened(inner.program).eqns, list | tuple)
      for place, var in zip(inner.operands or (), inner.jaxpr.invars, strict=False):
        seen += 1
        given = eqn.invars[place].aval
        assert given.dtype == var.aval.dtype
        if eqn.primitive.name not in ("scan", "shard_map"):
          assert given.shape == var.aval.shape
      # What is carried comes out as it went in, and nothing else can: a step of a scan takes the
      # elements of its inputs, and a test of a loop has one result.
      carried = inner.jaxpr.invars[inner.carry.start : inner.carry.stop]
      after = inner.jaxpr.outvars[: len(carried)]
      assert [str(v.aval) for v in carried] == [str(v.aval) for v in after]
      if eqn.primitive.name == "scan":
        elements = inner.jaxpr.invars[inner.carry.stop :]
        assert [v.aval.shape[1:] for v in eqn.invars[inner.carry.stop :]] == [
          v.aval.shape for v in elements
        ]
        assert len(carried) + len(eqn.outvars[len(carried) :]) == len(inner.jaxpr.outvars)
  # Until jax 0.11 what was traced before is written out.
  assert seen or name in ("plain", "traced")


def test_each_higher_order_primitive_of_the_table_was_met():
  # All but those that this jax does not make, or has by another name.
  met = {
    eqn.primitive.name
    for fun, _, _ in NESTED.values()
    for eqn in walk(jax.make_jaxpr(lambda x, fun=fun: fun(x))(s(8, 8)))
  }
  assert {"remat2", "checkpoint"} & met
  old, new = (
    {"call", "closed_call", "checkpoint"},
    {"eval_jaxpr", "program_order", "call_hi_primitive"},
  )
  assert HIGHER_ORDER - met <= old | new | {"remat2"}


def test_parts_of_equations_that_are_functions():
  donating = only(lambda x, y: jax.jit(jnp.add, donate_argnums=1)(x, y), s(3), s(3), name="jit")
  assert donated(donating) == (False, True)
  assert donated(only(jax.checkpoint(jnp.sin), s(3), name="remat2")) == (False,)

  def closing(w, x):
    @jax.custom_vjp
    def f(x):
      return x @ w

    f.defvjp(lambda x: (x @ w, None), lambda _, g: (g @ w.T,))
    return f(x)

  assert closed_over(only(closing, W, s(3), name="custom_vjp_call")) == 1
  assert closed_over(only(NESTED["custom_vjp"][0], s(8, 8), name="custom_vjp_call")) == 0


def of_params(name, **params):
  """Returns an equation of a primitive that has these parameters in a newer JAX."""
  odd = Primitive(name)
  odd.def_abstract_eval(lambda x, **_: x)
  return only(lambda x: odd.bind(x, **params), s(3), name=name)


def test_a_primitive_of_another_library_is_not_known():
  inner = jax.make_jaxpr(jnp.sin)(s(3))
  assert inner_jaxprs(of_params("odd_call", deep=((1, (inner,)),))) is None
  assert inner_jaxprs(of_params("odd_call", deep=((1, ()),))) == ()


def test_an_object_that_shows_no_jaxpr_may_hide_a_matmul():
  eqn = of_params("call_hi_primitive", _prim=object())
  assert inner_jaxprs(eqn) is None
  assert hides_matmul(eqn)


@pytest.mark.parametrize(
  ("wrap", "flag"),
  [
    (with_jvp, "jax_custom_jvp3"),
    (with_vjp, "jax_custom_vjp3"),
    (jax.checkpoint, "jax_remat3"),
  ],
)
def test_an_object_that_shows_its_jaxpr_is_read_as_what_it_replaces(set_flag, wrap, flag):
  if not hasattr(jax.config, flag):
    pytest.skip(f"this version of JAX has no {flag}")

  def traced():
    # A new function: JAX may have the jaxpr without the flag.
    program = jax.make_jaxpr(wrap(lambda x: square(x)))(s(8, 8))
    return next(eqn for eqn in program.eqns if inner_jaxprs(eqn))

  plain = traced()
  set_flag(flag, True)
  eqn = traced()
  assert eqn.primitive.name == "call_hi_primitive"
  assert facts_of(eqn) is facts_of(plain)
  inner, expected = (inner for each in (eqn, plain) for inner in inner_jaxprs(each) or ())
  found, wanted = ([e.primitive for e in walk(x.program)] for x in (inner, expected))
  assert set(found) >= set(wanted)
  assert inner.operands == tuple(range(len(eqn.invars)))


def test_a_jaxpr_of_as_many_inputs_or_outputs_alone_does_not_fit():
  eqn = only(jax.checkpoint(lambda x, y: x + y), s(3), s(3), name="remat2")
  for fun, args in ((lambda x, y: (x, y), (s(3), s(3))), (lambda x: x, (s(3),))):
    changed = {**eqn.params, "jaxpr": jax.make_jaxpr(fun)(*args).jaxpr}
    assert inner_jaxprs(eqn.replace(params=changed)) is None
  assert inner_jaxprs(eqn) is not None


@pytest.mark.parametrize(
  "params",
  [
    lambda p: {k: v for k, v in p.items() if k not in ("num_consts", "ft_in")},
    lambda p: {**{k: v for k, v in p.items() if k != "ft_in"}, "num_consts": 7, "num_carry": 1},
    lambda p: {**p, "ft_in": object()},
    lambda p: {k: v for k, v in p.items() if k != "length"},
    lambda p: {**p, "jaxpr": jax.make_jaxpr(jnp.sin)(s(3))},
  ],
  ids=["no numbers", "wrong numbers", "another tree", "no length", "another jaxpr"],
)
def test_parameters_of_a_newer_jax_are_not_known_and_no_key_error(params):
  eqn = only(scanned, W, s(3), X, name="scan")
  changed = params(dict(eqn.params))
  if changed.get("num_consts") == 7:  # Numbers that do not fit are found only by their operands.
    changed["jaxpr"] = jax.make_jaxpr(jnp.sin)(s(3))
  assert inner_jaxprs(eqn.replace(params=changed)) is None


def test_a_literal_with_axes_is_no_number():
  scalar = jax.make_jaxpr(lambda x: x * 2.0)(1.0).eqns[0].invars[1]
  assert is_number(scalar)
  array = Literal(np.ones(3, np.float32), jax.typeof(jnp.ones(3)))
  assert not is_number(array)
  assert not is_number(jax.make_jaxpr(jnp.sin)(1.0).jaxpr.invars[0])
