"""What the readers of a value want, found backwards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from mpjax._jaxprs.autocast.uses import FULL, HALF, demands, of_inputs, of_loop
from mpjax._jaxprs.autocast.values import Settings

SETTINGS = Settings(compute=np.dtype("float16"), ops=mpjax.OpLists())
X = jnp.ones((3, 3))


def wants(fun, *args, results=None, ops=None):
  """Returns what is wanted of each argument of `fun`."""
  jaxpr = jax.make_jaxpr(fun)(*(args or (X,))).jaxpr
  given = SETTINGS if ops is None else Settings(compute=SETTINGS.compute, ops=ops)
  return of_inputs(jaxpr, tuple(results or (0,) * len(jaxpr.outvars)), given)


@pytest.mark.parametrize(
  ("fun", "want"),
  [
    (lambda x: x, 0),
    (lambda x: jnp.ones(3), 0),
    (lambda x: x + 1, 0),
    (lambda x: x @ x, HALF),
    (jnp.exp, FULL),
    (lambda x: x.sum(), FULL),
    (lambda x: lax.reduce_precision(x, 5, 5), FULL),
    (lambda x: (jnp.exp(x), x @ x), FULL | HALF),
    # Behind operations without an opinion, of any number.
    (lambda x: jnp.tanh(2 * x.T - 1)[:2] @ X, HALF),
    (lambda x: jnp.exp(jnp.tanh(2 * x.T - 1)[:2]), FULL),
    (lambda x: lax.concatenate([x, jnp.exp(x)], 0) @ X, FULL | HALF),
    # What stands behind an operation of a list wants nothing of what is before it.
    (lambda x: jnp.exp(x) @ X, FULL),
    (lambda x: jnp.exp(x @ x), HALF),
    # What is thrown away wants nothing.
    (lambda x: (x + 1, x)[1], 0),
    # Bodies.
    (jax.jit(lambda x: x @ x), HALF),
    (lambda x: jax.jit(lambda x: 2 * x)(x) @ x, HALF),
    (jax.checkpoint(jnp.sin), FULL),
    (lambda x: lax.cond(True, lambda x: x @ x, lambda x: x, x), HALF),
    (lambda x: lax.cond(True, jnp.exp, lambda x: x, x) @ X, FULL | HALF),
    (lambda x: jax.nn.relu(x) @ x, HALF),
  ],
)
def test_of_an_argument(fun, want):
  assert wants(fun)[-1] == want


def test_of_what_is_wanted_outside():
  for want in (0, HALF, FULL, HALF | FULL):
    before = want
    assert wants(lambda x: (x * 2, jnp.exp(x) + 0), results=(want, HALF)) == (before | FULL,)
    assert wants(lambda x: x, results=(want,)) == (want,)
    assert wants(jax.jit(lambda x: x + 1), results=(want,)) == (before,)


def test_of_edited_lists():
  assert wants(jnp.tanh, ops=mpjax.OpLists().replace(float32=["tanh"])) == (FULL,)
  assert wants(jnp.tanh, ops=mpjax.OpLists().replace(half=["tanh"])) == (HALF,)
  assert wants(jnp.exp, ops=mpjax.OpLists().replace(keep=["exp"])) == (0,)


def test_of_what_a_branch_is_chosen_by():
  def fun(flag, x):
    return lax.switch(flag, [jnp.exp, lambda x: x @ x, lambda x: x], x)

  assert wants(fun, 1, X)[1] == FULL | HALF


def test_of_every_variable_of_a_program():
  def fun(x):
    y = x * 2
    z = jnp.exp(y)
    return z @ z, y

  jaxpr = jax.make_jaxpr(fun)(X).jaxpr
  found = demands(jaxpr, (0, 0), SETTINGS)
  (x,), (y, z, _) = jaxpr.invars, [eqn.outvars[0] for eqn in jaxpr.eqns]
  assert found == {x: FULL, y: FULL, z: HALF}


def chain(x, y, z):
  """Passes on what it carries, so that what is wanted of the first is wanted of the last."""

  def turn(carry, _):
    a, b, c = carry
    return (jnp.exp(a), a + 0, b + 0), c

  return lax.scan(turn, (x, y, z), None, length=3)


def test_of_a_carry_in_all_turns():
  # The third is what comes out after it was the second, which was the first.
  assert wants(chain, X, X, X, results=(0, 0, 0, HALF)) == (FULL | HALF, HALF, HALF)
  assert wants(chain, X, X, X, results=(0, 0, 0, 0)) == (FULL, 0, 0)
  body = jax.make_jaxpr(chain)(X, X, X).eqns[0].params["jaxpr"].jaxpr
  assert of_loop(body, range(3), (0, 0, 0, HALF), SETTINGS) == (FULL | HALF, HALF, HALF, HALF)


def test_of_what_a_loop_reads():
  def fun(w, rows, y):
    return lax.scan(lambda y, row: (y @ w, jnp.exp(row)), y, rows)

  assert wants(fun, X, X, X) == (HALF, FULL, HALF)


def test_of_what_a_while_loop_tests_and_turns():
  def fun(limit, w, y):
    return lax.while_loop(lambda y: y.sum() < jnp.exp(limit), lambda y: y @ w, y)

  assert wants(fun, 1.0, X, X) == (FULL, HALF, FULL | HALF)


def test_of_a_solver():
  def fun(a, b):
    return lax.custom_linear_solve(lambda v: a @ v, b, lambda _, b: b / jnp.diag(a))

  assert wants(fun, X, X[0]) == (FULL, FULL)
