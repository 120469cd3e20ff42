"""The checks of a program find what they are there to find, and nothing in a good program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import programs
from tests.jaxprs.autocast import checks
from tests.models.values import normal

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)
BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])


def traced(fun, *args):
  return jax.make_jaxpr(fun)(*(args or (X,)))


@BOTH
def test_a_product_with_one_float32_operand_is_found(half):
  def mixed(x):
    return jax.lax.dot(x.astype(half), x, preferred_element_type=jnp.float32)

  assert checks.halves(traced(lambda x: x.astype(half) @ x.astype(half)), half) == []
  (found,) = checks.halves(traced(mixed), half)
  assert found == f"dot_general of {half}[4,4], float32[4,4]"


@BOTH
def test_a_product_in_the_other_half_type_is_found(half):
  other = {"bfloat16": "float16", "float16": "bfloat16"}[half]
  program = traced(lambda x: x.astype(other) @ x.astype(other))
  assert programs.half_share(program) == 1
  assert len(checks.halves(program, half)) == 1


def with_jvp(fun):
  ruled = jax.custom_jvp(fun)
  ruled.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
  return ruled


def with_vjp(fun):
  ruled = jax.custom_vjp(fun)
  ruled.defvjp(lambda x: jax.vjp(fun, x), lambda pull, ct: pull(ct))
  return ruled


LOOPS = {
  "jit": lambda f, x: jax.jit(f)(x),
  "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
  "while": lambda f, x: jax.lax.while_loop(lambda c: jnp.all(c > 0), f, x),
  "cond": lambda f, x: jax.lax.cond(x[0, 0] > 0, f, jnp.tanh, x),
  "remat": lambda f, x: jax.checkpoint(f)(x),
  "custom_jvp": lambda f, x: with_jvp(f)(x),
  "custom_vjp": lambda f, x: with_vjp(f)(x),
}
OPERATIONS = {
  "exp": jnp.exp,
  "log": jnp.log,
  "pow": lambda x: x**1.5,
  "reduce_sum": lambda x: x + jax.lax.reduce_sum(x, (0, 1)),
  "cumsum": lambda x: jax.lax.cumsum(x, 0),
  "scatter-add": lambda x: x.at[0].add(x[1]),
  "scatter-mul": lambda x: x.at[0].mul(x[1]),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["exp", "scatter-add"])
def test_a_half_operation_of_the_float32_list_is_found_wherever_it_is(name, loop):
  _found_in_half_only(name, lambda x: LOOPS[loop](OPERATIONS[name], x))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", OPERATIONS)
def test_half_operations_of_the_float32_list_are_found(name):
  _found_in_half_only(name, OPERATIONS[name])


def _found_in_half_only(name, fun):
  assert checks.halves_of_float32(traced(fun)) == []
  found = checks.halves_of_float32(traced(lambda x: fun(x.astype(jnp.bfloat16))))
  assert {text.partition(" of ")[0] for text in found} == {name}


def half(x):
  return x.astype(jnp.bfloat16)


def read_by_all(x):
  """Adds up the derivative with respect to `x` over the steps of a scan."""
  return jax.lax.scan(lambda c, row: (c, row @ x), 0.0, jnp.ones((3, 4), x.dtype))[1].sum()


SUMS = {
  "reduce_sum": lambda x: jax.lax.reduce_sum(x, (0, 1)),
  "cumsum": lambda x: jax.lax.cumsum(x, 0),
  "scatter-add": lambda x: x.at[jnp.array([0, 0])].add(x[:2]),
  "sum over the steps of a scan": jax.grad(read_by_all),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_in_half_is_found_wherever_it_is(name, loop):
  def fun(x):
    return x + LOOPS[loop](lambda y: y + SUMS[name](y).sum(dtype=jnp.float32).astype(y.dtype), x)

  assert checks.sums(traced(fun)) == []
  found = checks.sums(traced(lambda x: fun(half(x))))
  assert {text.partition(" of bfloat16")[0] for text in found} == {name}


def test_what_is_no_sum_of_many_numbers_is_none():
  def fun(x):
    x = half(x)
    row = jax.lax.reduce_sum(x[:1], (0,))  # Of one row.
    carried = jax.lax.scan(lambda c, _: (c + jnp.tanh(c), None), x, None, length=3)[0]
    return row + x[0] + carried[0]

  assert checks.sums(traced(fun)) == []
  assert checks.sums(traced(jax.grad(lambda x: fun(x).astype("float32").sum()))) == []


def test_what_a_scan_casts_to_add_up_its_gradients_is_of_use():
  def fun(x):
    x = half(x)
    const = full(x @ x)
    return jax.lax.scan(lambda c, _: (c @ half(const), None), x, None, length=2)[0]

  assert checks.wasted_casts(traced(fun)) == []


def full(x):
  return x.astype(jnp.float32)


WASTED = {
  "a round trip": (lambda x: full(half(x)), "there and back: float32 -> bfloat16 -> float32"),
  "a round trip that begins in half": (
    lambda x: half(full(jnp.tanh(half(x)))),
    "there and back: bfloat16 -> float32 -> bfloat16",
  ),
  "a round trip over a call": (
    lambda x: jax.jit(lambda y: jnp.tanh(full(y)))(half(x)),
    "there and back: float32 -> bfloat16 -> float32",
  ),
  "a round trip out of a call": (
    lambda x: full(jax.jit(half)(x)),
    "there and back: float32 -> bfloat16 -> float32",
  ),
  "a cast made twice": (
    lambda x: (lambda y: half(y) @ half(y))(jnp.exp(x)),
    "2 times float32 -> bfloat16",
  ),
  "a cast made twice in a loop": (
    lambda x: jax.lax.scan(lambda c, _: (full(half(c) @ half(c)), None), x, None, length=2)[0],
    "2 times float32 -> bfloat16",
  ),
}


@pytest.mark.parametrize("name", WASTED)
def test_a_wasted_cast_is_found(name):
  fun, text = WASTED[name]
  assert text in checks.wasted_casts(traced(fun))


def test_a_parameter_is_cast_at_each_use():
  def fun(w, x):
    def step(c, row):
      return full(half(c) @ half(w)) @ full(half(w).T), half(row[None]) + half(row[None])

    return jax.lax.scan(step, x, w)[0], half(w), half(w).T

  program = traced(fun, X, X)
  assert checks.wasted_casts(program) == []
  assert len(checks.casts(program)) == 9


def test_a_function_that_is_called_casts_for_itself():
  inner = jax.jit(lambda z: jnp.tanh(half(z)))
  program = traced(lambda x: (lambda y: inner(y) + inner(y) + half(y))(jnp.exp(x)))
  assert checks.wasted_casts(program) == []
  assert len(checks.casts(program)) == 3


def test_casts_that_are_of_use_are_none():
  def fun(x, flag):
    y = half(x)
    z = full(y @ y) + x
    w = jax.lax.cond(flag, lambda z: half(z) * 2, half, z)  # one of the two runs
    return z, w, half(x[0]), x.astype(jnp.float16), flag.astype(jnp.float32), y.astype(int)

  program = traced(fun, X, jax.ShapeDtypeStruct((), bool))
  assert checks.wasted_casts(program) == []
  assert len(checks.casts(program)) == 6


@pytest.mark.parametrize(
  ("fun", "wrong"),
  [
    pytest.param(lambda x: {"a": x, "b": half(x)}, "['b']: bfloat16(4, 4)", id="dtype"),
    pytest.param(lambda x: {"a": x[0], "b": x}, "['a']: float32(4,)", id="shape"),
    pytest.param(lambda x: [x, x], "PyTreeDef([*, *])", id="structure"),
  ],
)
def test_a_changed_output_is_named(fun, wrong):
  def plain(x):
    return {"a": x, "b": x}

  assert checks.changed_outputs(plain, plain, X) == []
  (found,) = checks.changed_outputs(fun, plain, X)
  assert found.startswith(wrong)


def test_tracing_is_counted():
  counted = checks.Counted(lambda x: x + 1.0)
  fun = jax.jit(counted)
  x = normal(3)
  np.testing.assert_array_equal(fun(x), x + 1)
  fun(x)
  assert counted.calls == 1
  fun(x[:2])
  assert counted.calls == 2
