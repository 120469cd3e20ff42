"""The warning of linear algebra that takes an activation."""

import functools
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


highest = functools.partial(jnp.matmul, precision="highest")
EYE = jnp.eye(8)

# Activations that nothing has rounded, from a parameter `w` and an input `x`.
UNROUNDED = {
  "a chosen precision": lambda w, x: highest(w.T, w) + EYE,
  "an input": lambda w, x: highest(x[:8], w) + EYE,
  "few products": lambda w, x: x[:8, :4] @ w[:4] + EYE,
  "two matmuls": lambda w, x: highest(highest(w.T, w), w) + EYE,
  "arithmetic": lambda w, x: jnp.tanh(0.1 * highest(w, w)) + w + EYE,
  "jit": lambda w, x: jax.jit(highest)(w.T, w) + EYE,
  "cond": lambda w, x: jax.lax.cond(w[0, 0] > 0, highest, jnp.add, w, w) + EYE,
  "scan": lambda w, x: jax.lax.scan(lambda c, _: (highest(c, w), None), w, length=2)[0] + EYE,
}


@pytest.mark.parametrize("of", UNROUNDED.values(), ids=UNROUNDED)
def test_there_is_none_for_an_activation_that_is_not_rounded(of):
  mpjax.autocast(lambda w, x: jnp.linalg.inv(of(w, x)), data_argnums=1)(W, X)


def test_there_is_none_for_the_matmuls_of_expm():
  # JAX asks for the highest precision of the matmuls between its linear algebra.
  mpjax.autocast(lambda w: jax.scipy.linalg.expm(w - w.T))(W)


# Rounded in low precision, though the variable is float32.
ROUNDED = {
  "a cast up": lambda w, x: (w.astype("bfloat16") @ w.astype("bfloat16")).astype("float32"),
  "a cast down and up": lambda w, x: w.astype("bfloat16").astype("float32") + 1e-3 * EYE,
  "float32 behind it": lambda w, x: jnp.exp(w @ w) + EYE,
  "a chosen precision of it": lambda w, x: highest(w @ w, w),
  "few products of it": lambda w, x: x[:8, :4] @ (w @ w)[:4] + EYE,
  "one branch": lambda w, x: jax.lax.cond(w[0, 0] > 0, highest, jnp.matmul, w, w),
  "one iteration": lambda w, x: jax.lax.scan(lambda c, _: (highest(c, w @ w), None), w, length=2)[
    0
  ],
}


@pytest.mark.parametrize("of", ROUNDED.values(), ids=ROUNDED)
def test_it_is_there_for_a_float32_value_that_was_rounded(of):
  with pytest.warns(UserWarning, match="low-precision matmuls"):
    mpjax.autocast(lambda w, x: jnp.linalg.inv(of(w, x)), data_argnums=1)(W, X)
