"""What reads a value, found backwards."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpjax
from mpjax._jaxprs.autocast.rewriter import (
  CALLER,
  EXACT,
  FACTOR,
  FULL,
  MATMUL,
  RETURNED,
  SUMMED,
  of_inputs,
  of_loop,
)
from mpjax._jaxprs.autocast.values import Settings
from mpjax._jaxprs.reader import inner_jaxprs

SETTINGS = Settings(policy=mpjax.Policy(compute_dtype="float16"), ops=mpjax.OpLists())
X = jnp.ones((3, 3))


LIST = FULL | EXACT
"""What an operation of the float32 list is."""


def readers(fun, *args, results=None, ops=None):
  """Returns what reads each argument of `fun`."""
  jaxpr = jax.make_jaxpr(fun)(*(args or (X,))).jaxpr
  given = SETTINGS if ops is None else Settings(policy=SETTINGS.policy, ops=ops)
  return of_inputs(jaxpr, tuple(results or (0,) * len(jaxpr.outvars)), given)


@pytest.mark.parametrize(
  ("fun", "want"),
  [
    (lambda x: x, 0),
    (lambda x: jnp.ones(3), 0),
    (lambda x: x @ x, MATMUL),
    (jnp.exp, LIST),
    (lambda x: x.sum(), LIST),
    (lambda x: lax.reduce_precision(x, 5, 5), LIST),
    (lambda x: (jnp.exp(x), x @ x), LIST | MATMUL),
    # Sums, comparisons, indices and integers take their operands as they are held; products too.
    (lambda x: x + 1, SUMMED),
    (lambda x: x > 0, EXACT),
    (lambda x: jnp.argmax(x), EXACT),
    (lambda x: lax.top_k(x, 2)[1], EXACT),
    (lambda x: x.astype(int), EXACT),
    (lambda x: 2 * x, FACTOR),
    # Behind operations in neither list, of any number; a sum alone ends what a rounding harms.
    (lambda x: jnp.tanh(2 * x.T)[:2] @ X, MATMUL | FACTOR),
    (lambda x: jnp.exp(jnp.tanh(2 * x.T)[:2]), LIST | FACTOR),
    (lambda x: lax.concatenate([x, jnp.exp(x)], 0) @ X, LIST | MATMUL),
    (lambda x: (x + 1) @ X, SUMMED | MATMUL),
    # A cast of the user's rounds.
    (lambda x: jnp.exp(x.astype("bfloat16")), 0),
    (lambda x: x.astype("bfloat16") @ X.astype("bfloat16"), MATMUL),
    # What reads the result of an operation of a list does not read its operands.
    (lambda x: jnp.exp(x) @ X, LIST),
    (lambda x: jnp.exp(x @ x), MATMUL),
    # What is thrown away is read by nothing.
    (lambda x: (jnp.tanh(x), x)[1], 0),
    # Bodies.
    (jax.jit(lambda x: x @ x), MATMUL),
    (lambda x: jax.jit(lambda x: 2 * x)(x) @ x, MATMUL | FACTOR),
    (lambda x: lax.cond(True, lambda x: x @ x, lambda x: x, x), MATMUL),
    (lambda x: lax.cond(True, jnp.exp, lambda x: x, x) @ X, LIST | MATMUL),
    (jax.checkpoint(lambda x: jnp.sin(x) + x @ x), LIST | MATMUL),
    # Decisions are as sums.
    (lambda x: jnp.floor(2 * x) @ X, SUMMED | FACTOR | MATMUL),
    (lambda x: jnp.exp(x - 1), LIST),
  ],
)
def test_of_an_argument(fun, want):
  assert readers(fun)[-1] == want


def test_of_what_reads_the_results():
  for outside in (0, MATMUL, FULL, EXACT, MATMUL | FULL):
    assert readers(lambda x: (-x, jnp.exp(x)), results=(outside, MATMUL)) == (outside | LIST,)
    assert readers(lambda x: x, results=(outside,)) == (outside,)
    assert readers(jax.jit(lambda x: -x), results=(outside,)) == (outside,)
    assert readers(jax.checkpoint(lambda x: -x), results=(outside,)) == (outside,)


def test_of_a_caller():
  # One that asks for float32 is seen through sums and what moves elements, and nothing else.
  for fun, want in (
    (lambda x: x.T, CALLER),
    (lambda x: x + 1, CALLER | SUMMED),
    (lambda x: x + 1 + x.T, CALLER | SUMMED),
    (lambda x: (x + 1, -x), RETURNED | CALLER | SUMMED),
    (lambda x: 2 * x, RETURNED | FACTOR),
    (lambda x: (x + 1) @ X, SUMMED | MATMUL),
  ):
    outs = jax.tree.leaves(jax.eval_shape(fun, X))
    assert readers(fun, results=(CALLER,) * len(outs)) == (want,)
  assert readers(lambda x: x + 1, results=(RETURNED,)) == (RETURNED | SUMMED,)


def chain(x, y, z):
  """Passes on what it carries, so that what reads the first reads the last."""

  def turn(carry, _):
    a, b, c = carry
    return (jnp.exp(a), -a, -b), c

  return lax.scan(turn, (x, y, z), None, length=3)


def test_of_a_carry_in_all_turns():
  # The third is what comes out after it was the second, which was the first. All are carried.
  held = (LIST | MATMUL, EXACT | MATMUL, EXACT | MATMUL)
  assert readers(chain, X, X, X, results=(0, 0, 0, MATMUL)) == (*held[:2], MATMUL)
  assert readers(chain, X, X, X, results=(0, 0, 0, 0)) == (LIST, EXACT, 0)
  found = inner_jaxprs(jax.make_jaxpr(chain)(X, X, X).eqns[0])
  assert found is not None
  (body,) = found
  assert of_loop(body, (0, 0, 0, MATMUL), SETTINGS) == (*held, MATMUL)


def test_of_what_a_while_loop_tests_and_turns():
  def fun(limit, w, y):
    return lax.while_loop(lambda y: y.sum() < jnp.exp(limit), lambda y: y @ w, y)

  assert readers(fun, 1.0, X, X) == (LIST, MATMUL, LIST | MATMUL)


def test_of_a_solver():
  def fun(a, b):
    return lax.custom_linear_solve(lambda v: a @ v, b, lambda _, b: b / jnp.diag(a))

  assert readers(fun, X, X[0]) == (LIST, LIST)
