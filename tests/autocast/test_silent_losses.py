"""What would go wrong without a word: no error, no NaN, only other numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests import programs

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
BOUNDS = {"bfloat16": 1.6e-2, "float16": 2e-3}
RNG = np.random.default_rng(0)


def normal(*shape):
  return RNG.normal(size=shape).astype(np.float32)


@BOTH
def test_a_loop_that_waits_for_convergence_ends(half):
  """Newton's square root; in half y * y never comes within 1e-5 of some numbers."""

  def turns(a, one):
    a = (a @ one)[0, 0]

    def turn(carry):
      y, _, n = carry
      new = 0.5 * (y + a / y)
      return new, jnp.abs(new * new - a), n + 1

    goes_on = lambda carry: (carry[1] > 1e-5) & (carry[2] < 1000)  # noqa: E731
    return jax.lax.while_loop(goes_on, turn, (a, jnp.float32(1), 0))[2]

  one = np.ones((1, 1), np.float32)
  fun = jax.jit(mpjax.autocast(turns, half))
  assert max(int(fun(np.full((1, 1), a, np.float32), one)) for a in np.linspace(2, 9, 30)) < 10


@BOTH
def test_the_state_of_a_solver_that_starts_in_an_encoder(half):
  w, x = normal(4, 4) / 2, normal(3, 4)

  def fun(x, w, n):
    return jax.lax.fori_loop(0, n, lambda _, c: c + 0.01 * jnp.tanh(c @ w), x @ w)

  found, expected = (jax.jit(f)(x, w, 100) for f in (mpjax.autocast(fun, half), fun))
  assert programs.error(found, expected) < BOUNDS[half]


@BOTH
def test_statistics_that_leave_a_named_scope_do_not_overflow(half):
  x, w = normal(3, 64), normal(64, 64) * 3 / 8

  def fun(x, w):
    h = (x @ w) * 100
    with jax.named_scope("statistics"):
      total = jnp.sum(h * h, -1, keepdims=True)
    return (h / jnp.sqrt(total)) @ w

  found, expected = (jax.jit(f)(x, w) for f in (mpjax.autocast(fun, half), fun))
  assert programs.error(found, expected) < BOUNDS[half]


@BOTH
def test_the_gradient_of_a_bias_is_a_float32_sum(half):
  bias, w, x = np.zeros((1, 4), np.float32), 1 + normal(4, 4) / 10, normal(4096, 4)

  def fun(bias, x, w):
    return jnp.sum((x @ w + bias) @ w)

  grad = jax.grad(mpjax.autocast(fun, half))
  sums = [
    str(eqn.invars[0].aval.dtype)
    for eqn, _ in programs.equations(jax.make_jaxpr(grad)(bias, x, w))
    if eqn.primitive.name == "reduce_sum"
  ]
  assert set(sums) == {"float32"}
  assert programs.error(grad(bias, x, w), jax.grad(fun)(bias, x, w)) < BOUNDS[half]


@BOTH
def test_a_decay_near_one_is_no_one(half):
  x, w = np.abs(normal(2000, 4)) + 1, np.abs(normal(4, 4))

  def fun(x, w):
    h = x @ w
    return jax.lax.scan(lambda c, x: (0.999 * c + 0.001 * x, None), h[0], h)[0]

  found, expected = (jax.jit(f)(x, w) for f in (mpjax.autocast(fun, half), fun))
  assert programs.error(found, expected) < BOUNDS[half]
