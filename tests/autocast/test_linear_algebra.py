"""The warning of linear algebra that takes an activation."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import mpjax

W, X = jnp.eye(8), jnp.ones((16, 8))


def solved(w, x):
  h = x @ w
  gram = h.T @ h + jnp.eye(8)
  return jnp.linalg.solve(gram, h.T)


def test_it_is_at_the_line_of_the_user():
  with pytest.warns(UserWarning, match="low-precision matmuls.*full_precision") as caught:
    mpjax.autocast(solved)(W, X)
  last = inspect.getsourcelines(solved)[1] + 3
  assert [(each.filename, each.lineno) for each in caught] == [(__file__, last)]
  assert "lu, custom_linear_solve takes" in str(caught[0].message)


def test_it_is_there_in_a_jit_too():
  with pytest.warns(UserWarning, match="low-precision matmuls") as caught:
    jax.jit(mpjax.autocast(jax.jit(solved)))(W, X)
  assert {each.filename for each in caught} == {__file__}


@pytest.mark.parametrize(
  "fn",
  [
    mpjax.full_precision(solved),
    lambda w, x: jnp.linalg.cholesky(w + jnp.eye(8)) @ x.T,
    lambda w, x: jnp.linalg.eigh(x.T @ x)[1] @ w,
  ],
  ids=["full_precision", "a parameter", "inputs"],
)
def test_there_is_none_without_an_activation(fn):
  mpjax.autocast(fn, data_argnums=1)(W, X)  # Warnings are errors.
