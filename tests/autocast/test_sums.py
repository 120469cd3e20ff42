"""What is added up in a derivative is added up in float32, and nothing more is saved for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._jaxpr import residual_bytes
from tests import programs

BOTH = pytest.mark.parametrize("half", ["bfloat16", "float16"])
W = jnp.eye(3)
ROWS = 4096


def summed(fun, *args):
  """Returns the dtypes of what is added up."""
  eqns = [eqn for eqn, _ in programs.equations(jax.make_jaxpr(fun)(*args))]
  return {str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "reduce_sum"}


@BOTH
@pytest.mark.parametrize(
  "add",
  [
    lambda y, b: y + b[None],
    lambda y, b: y - jnp.broadcast_to(b, y.shape),
    lambda y, b: y + (jnp.ones((1, 3)) @ jnp.diag(b)),
    lambda y, b: y + jnp.tanh(jnp.ones((1, 3)) @ jnp.diag(b))[:, None][0],
  ],
  ids=["bias", "repeated", "row of a matmul", "activation"],
)
def test_the_gradient_of_what_is_added_to_each_row_is_a_float32_sum(add, half):
  def fun(b, x):
    return jnp.sum((add(x @ jnp.eye(3), b) @ jnp.eye(3)) * 2.0**-8)

  b, x = jnp.full(3, 0.5), jnp.ones((ROWS, 3))
  # The derivative of the loss with respect to an element is 2^-8, exactly; so is each partial sum.
  found = programs.run(jax.grad(mpjax.autocast(fun, half)), b, x)
  plain = programs.run(jax.grad(fun), b, x)
  np.testing.assert_allclose(found, plain, rtol=float(jnp.finfo(half).eps))
  assert summed(jax.grad(mpjax.autocast(fun, half)), b, x) == {"float32"}


@BOTH
def test_a_scale_is_saved_as_small_as_it_is(half):
  """What multiplies is kept for the backward pass: broadcast it would be as large as the rows."""

  def fun(scale, x):
    return ((x @ jnp.eye(64)) * scale[None]) @ jnp.eye(64)

  def by_hand(scale, x):
    eye, x, scale = (a.astype(half) for a in (jnp.eye(64), x, scale))
    return ((x @ eye) * scale[None]) @ eye

  args = jnp.ones(64), jnp.ones((1024, 64))
  ours = residual_bytes(mpjax.autocast(fun, half), *args)
  assert ours <= residual_bytes(by_hand, *args) + 8192, "another kernel of 64 x 64 in half"


@BOTH
def test_the_maximum_of_an_axis_counts_its_places_in_float32(half):
  def fun(w, x):
    return jnp.exp((x @ w).max(0) * 1.0).sum()

  gradient = jax.grad(mpjax.autocast(fun, half), argnums=1)
  x = jnp.ones((1001, 3))
  assert summed(gradient, W, x) == {"float32"}
  found = programs.run(gradient, W, x)
  np.testing.assert_allclose(found, np.full((1001, 3), np.e / 1001), rtol=2 * jnp.finfo(half).eps)
