"""Jaxprs and calls that are written without tracing."""

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax._jaxpr.calls import called, jaxpr_of

X = jnp.arange(6.0).reshape(2, 3)


def test_a_call_is_one_equation_and_nothing_inside_is_traced_again():
  traces = []

  def fun(x):
    traces.append(x)
    return jnp.sin(x) * 2

  closed = jax.make_jaxpr(fun)(X)
  program = jax.make_jaxpr(lambda x: called(closed, [x], "inner"))(X)
  (eqn,) = program.eqns
  assert (eqn.primitive.name, eqn.params["name"]) == ("jit", "inner")
  assert len(traces) == 1


def test_a_jaxpr_of_some_equations_is_what_they_compute():
  program = jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(X)
  first, _ = program.eqns
  part = jaxpr_of([first], first.invars, first.outvars)
  (result,) = jax.core.eval_jaxpr(part, (), X)
  np.testing.assert_array_equal(result, jnp.sin(X))


def test_functions_with_rules_run_where_jit_is_disabled():
  def fun(x):
    return jax.nn.relu(x @ jnp.eye(3)).sum()

  with jax.disable_jit():
    value, grad = jax.value_and_grad(mpjax.autocast(fun))(X)
  assert value == 15
  np.testing.assert_array_equal(grad, (X > 0).astype("float32"))
