"""Calls of programs, as equations: of the types that the program has, and never traced again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxprs.autocast.evaluate import call_of, called, typed
from tests import programs


def program(x, y):
  return x + 1, x * y


X = np.float32(2)

CLOSED = jax.make_jaxpr(program)(X, X)


def names(fun, *args):
  return [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(*args).eqns]


def test_a_call_returns_what_the_program_does():
  def fun(x, y):
    return called(CLOSED, [x, y], "name")

  (eqn,) = jax.make_jaxpr(fun)(X, X).eqns
  assert eqn.params["name"] == "name"
  assert programs.bits(jax.jit(fun)(X, X)) == programs.bits(program(jnp.asarray(X), X))
  assert jax.grad(lambda x: fun(x, 5.0)[1])(X) == 5


@pytest.mark.parametrize(("inline", "want"), [(False, ["jit"]), (True, ["add", "mul"])])
def test_a_call_may_be_written_out(inline, want):
  jaxpr = CLOSED.jaxpr
  call = call_of(CLOSED, jaxpr.invars, jaxpr.outvars, "name", inline=inline)
  one = jaxpr.replace(eqns=[call])
  assert names(lambda x, y: jax.core.eval_jaxpr(one, (), x, y), X, X) == want


def test_operands_are_returned_where_they_have_the_types_that_are_asked_for():
  elementwise = jax.make_jaxpr(jnp.tanh)(X)
  assert names(lambda x: typed(elementwise, [x], "tanh"), X) == []
  other = jax.make_jaxpr(lambda x: x.astype("bfloat16"))(X)
  (eqn,) = jax.make_jaxpr(lambda x: typed(other, [x], "name"))(X).eqns
  assert (eqn.primitive.name, eqn.outvars[0].aval.dtype) == ("jit", "bfloat16")


def test_functions_with_rules_run_where_jit_is_disabled():
  def fun(x):
    return jax.nn.relu(x @ jnp.eye(3)).sum()

  x = jnp.arange(6.0).reshape(2, 3)
  with jax.disable_jit():
    value, grad = jax.value_and_grad(mpjax.autocast(fun))(x)
  assert value == 15
  np.testing.assert_array_equal(grad, (x > 0).astype("float32"))
