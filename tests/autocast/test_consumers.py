"""Flags of a value, found backwards from the operations that use it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._autocast.consumers import Flag, flags_of, flags_of_result
from mpjax._autocast.scopes import ScopedSettings, Settings, end_of_layer, end_of_policy
from mpjax._jaxpr.op_lists import OpLists
from mpjax._policy.active import Region

X = jnp.ones((8, 8))
B = jnp.ones(8)
FLOAT32 = np.dtype("float32")
BFLOAT16 = np.dtype(jnp.bfloat16)


def flags(fun, *args, results=None, ops=None):
  """Returns the flags of each argument of `fun`; no result is used unless `results` says so."""
  jaxpr = jax.make_jaxpr(fun)(*(args or (X,))).jaxpr
  settings = Settings(region=Region(mpjax.Policy(compute_dtype="float16")), ops=ops or OpLists())
  found, _ = flags_of(jaxpr, results or (0,) * len(jaxpr.outvars), (), ScopedSettings(settings))
  return tuple(found.of.get(v, 0) for v in jaxpr.invars)


ONE_OPERATION = {
  "nothing": (lambda x: jnp.ones(3), 0),
  "result": (lambda x: x, 0),
  "matmul": (lambda x: x @ x, 0),
  "float32 list": (jnp.exp, Flag.FLOAT32),
  "sum over axes": (lambda x: x.sum(), Flag.FLOAT32),
  "without a free axis": (lambda x: jnp.vdot(x[0], B), Flag.FLOAT32),
  "linear algebra": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), Flag.FLOAT32),
  "opaque": (lambda x: lax.reduce_precision(x, 5, 5), Flag.FLOAT32),
  "addition": (lambda x: x + 1, Flag.SUM),
  "addition of two arrays": (lambda x: x + X, Flag.SUM),
  "subtraction": (lambda x: x - 1, Flag.FLOAT32),
  "comparison": (lambda x: x > 0, Flag.FLOAT32),
  "argmax": (lambda x: jnp.argmax(x), Flag.FLOAT32),
  "top_k": (lambda x: lax.top_k(x, 2)[1], Flag.FLOAT32),
  "cast to integers": (lambda x: x.astype(int), Flag.FLOAT32),
  "rounding to integers": (jnp.floor, Flag.FLOAT32),
  "multiplication": (lambda x: 2 * x, Flag.PRODUCT),
  "division": (lambda x: x / 3, Flag.PRODUCT),
  "without a contracted axis": (lambda x: jnp.einsum("i,j->ij", x[0], B), Flag.PRODUCT),
  "move": (lambda x: x.T, 0),
  "maximum": (lambda x: jnp.maximum(x, 0), 0),
  "tanh": (jnp.tanh, 0),
  "matmul in float32": (lambda x: jnp.dot(x, X, precision="highest"), Flag.FLOAT32),
  "full_precision": (mpjax.full_precision(jnp.tanh), Flag.FLOAT32),
}


@pytest.mark.parametrize(("fun", "expected"), ONE_OPERATION.values(), ids=ONE_OPERATION)
def test_flags_of_the_operand_of(fun, expected):
  assert flags(fun) == (expected,)


def test_the_flags_of_all_consumers_add_up():
  assert flags(lambda x: (jnp.exp(x), x @ x, 2 * x)) == (Flag.FLOAT32 | Flag.PRODUCT,)


SEVERAL = {
  "arithmetic and moves": (lambda x: jnp.exp(jnp.tanh(2 * x.T)[:2]), Flag.FLOAT32 | Flag.PRODUCT),
  "functions that keep a dtype": (lambda x: jnp.maximum(jnp.abs(x), 0) + 1, Flag.SUM),
  "concatenation": (lambda x: jnp.exp(lax.concatenate([x, x], 0)), Flag.FLOAT32),
  "addition of a bias": (lambda x: jnp.exp(x + B[None]), Flag.FLOAT32 | Flag.SUM),
  "to a matmul": (lambda x: jnp.tanh(2 * x) @ X, Flag.PRODUCT),
  # The flags end.
  "a matmul": (lambda x: jnp.exp(x @ X), 0),
  "addition of two arrays": (lambda x: jnp.exp(2 * (x + X)), Flag.SUM),
  "the user's cast": (lambda x: jnp.exp(x.astype("bfloat16")), 0),
  "end of a layer": (lambda x: jnp.exp(end_of_layer(x, "bfloat16")), 0),
  "end of a policy": (lambda x: jnp.exp(end_of_policy(x, BFLOAT16)), 0),
  # A cast to float32 is none.
  "promotion": (lambda x: jnp.exp(x.astype("float32")), Flag.FLOAT32),
}


@pytest.mark.parametrize(("fun", "expected"), SEVERAL.values(), ids=SEVERAL)
def test_flags_behind(fun, expected):
  assert flags(fun) == (expected,)


def test_an_operation_that_the_user_has_moved_to_another_list():
  ops = OpLists().replace(half=["tanh"], float32=["mul"])
  assert flags(lambda x: jnp.exp(jnp.tanh(x)), ops=ops) == (0,)
  assert flags(lambda x: 2 * x, ops=ops) == (Flag.FLOAT32,)


# Results of the function and of the policy.


def test_the_dtype_of_a_result_decides_its_flags():
  assert flags_of_result(None, output=True) == Flag.PRODUCT
  assert flags_of_result(BFLOAT16, output=True) == 0
  assert flags_of_result(FLOAT32, output=False) == Flag.FLOAT32
  assert flags_of_result(FLOAT32, output=True) == Flag.OUTPUT
  assert flags(lambda x: end_of_policy(x, FLOAT32)) == (Flag.OUTPUT,)


OUTPUT = {
  # Moves and the addition of a bias pass the flag on; all else computes a function in float32.
  "moves": (lambda x: x.T.reshape(64), Flag.OUTPUT),
  "addition of a bias": (lambda x: x + B[None], Flag.OUTPUT | Flag.FLOAT32 | Flag.SUM),
  "end of a layer": (lambda x: end_of_layer(x, "bfloat16"), Flag.OUTPUT),
  "addition of two arrays": (lambda x: x + X, Flag.FLOAT32 | Flag.SUM),
  "difference of two arrays": (lambda x: x - X, Flag.FLOAT32),
  "multiplication": (lambda x: 2 * x, Flag.FLOAT32 | Flag.PRODUCT),
  "difference": (lambda x: x - B[None], Flag.OUTPUT | Flag.FLOAT32),
  "maximum": (lambda x: jnp.maximum(x, 0), Flag.FLOAT32),
}


@pytest.mark.parametrize(("fun", "expected"), OUTPUT.values(), ids=OUTPUT)
def test_a_float32_result_of_the_policy_behind(fun, expected):
  assert flags(fun, results=(Flag.OUTPUT,)) == (expected,)


# Jaxprs inside.


CALLS = {
  "jit": (jax.jit(lambda x: 2 * jnp.exp(x)), Flag.FLOAT32),
  "checkpoint": (jax.checkpoint(lambda x: x + 1), Flag.SUM),
  "custom_jvp": (jax.nn.silu, Flag.PRODUCT),
  "a result that is used": (lambda x: jnp.exp(jax.jit(lambda x: x.T)(x)), Flag.FLOAT32),
  "a result that is not": (lambda x: jax.jit(lambda x: (x.T, x @ x))(x)[1], 0),
  "cond": (lambda x: lax.cond(True, jnp.exp, lambda x: 2 * x, x), Flag.FLOAT32 | Flag.PRODUCT),
}


@pytest.mark.parametrize(("fun", "expected"), CALLS.values(), ids=CALLS)
def test_flags_of_the_operand_of_a_call(fun, expected):
  assert flags(fun) == (expected,)


def test_consumers_in_the_next_iterations_of_a_scan():
  def chain(x, y, z):
    turn = lambda c, _: ((jnp.exp(c[0]), c[0].T, c[1].T), c[2])  # noqa: E731
    return lax.scan(turn, (x, y, z), None, length=3)

  # The next iteration uses a carry in float32. Nothing uses the last.
  assert flags(chain, X, X, X) == (Flag.FLOAT32, Flag.FLOAT32, 0)
  # The stacked results use the last, and so the others one and two iterations later.
  expected = Flag.FLOAT32 | Flag.PRODUCT, Flag.FLOAT32 | Flag.PRODUCT, Flag.PRODUCT
  assert flags(chain, X, X, X, results=(0, 0, 0, Flag.PRODUCT)) == expected


def test_the_condition_of_a_while_loop_is_a_comparison():
  def until(limit, w, y):
    return lax.while_loop(lambda y: y[0, 0] < 2 * limit, lambda y: y @ w, y)

  assert flags(until, 1.0, X, X) == (Flag.FLOAT32 | Flag.PRODUCT, 0, Flag.FLOAT32)


def test_a_jaxpr_that_is_not_entered_takes_float32():
  def solved(a, b):
    return lax.custom_linear_solve(lambda v: a @ v, b, lambda _, b: b / jnp.diag(a))

  assert flags(solved, X, X[0]) == (Flag.FLOAT32, Flag.FLOAT32)


def test_a_flax_layer_ends_the_flags_of_its_consumers():
  # What a policy does of it: a sum of the result widens nothing before the end of the layer.
  layer = mpjax.with_policy(nn.Sequential([nn.Dense(8), lambda y: y - jnp.exp(y)]), "float16")
  program = jax.make_jaxpr(layer.apply)(layer.init(jax.random.key(0), X), X)
  bias = next(eqn for eqn in program.eqns if eqn.primitive.name == "add")
  assert [str(v.aval.dtype) for v in bias.invars] == ["float16"] * 2
