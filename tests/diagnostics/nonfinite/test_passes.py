import jax
import jax.numpy as jnp
import pytest

from mpjax._diagnostics.nonfinite.passes import direction_of
from mpjax._diagnostics.nonfinite.program import body_of


def directions(fn, *args):
  body = body_of(jax.make_jaxpr(fn)(*args), len(args))
  return [(s.eqn.primitive.name, direction_of(body, s)) for s in body.every_step() if not s.bodies]


def test_a_slope_belongs_to_the_backward_pass():
  found = directions(jax.value_and_grad(lambda x: jnp.sqrt(x)), 1.0)
  assert found == [("sqrt", "forward"), ("div", "backward"), ("mul", "backward")]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_inside_of_calls_as_well(wrap):
  found = directions(jax.value_and_grad(wrap(lambda x: jnp.sqrt(x))), 1.0)
  assert ("sqrt", "forward") in found
  assert ("div", "backward") in found or wrap is jax.checkpoint


def test_a_slope_that_leaves_a_scan_belongs_to_the_backward_pass():
  def fn(xs):
    return jax.lax.scan(lambda c, x: (c + jnp.sqrt(x), None), 0.0, xs)[0]

  assert ("div", "backward") in directions(jax.grad(fn), jnp.ones(3))


def test_without_a_gradient_all_is_forward():
  assert set(directions(lambda x: 0.5 / jnp.sqrt(x), 1.0)) == {
    ("sqrt", "forward"),
    ("div", "forward"),
  }


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_value_that_is_its_own_slope_belongs_to_the_forward_pass(wrap):
  # Of the gradient alone nothing in the forward pass reads the exponential.
  assert ("exp", "forward") in directions(jax.grad(wrap(jnp.exp)), 1.0)
  assert ("sqrt", "forward") in directions(jax.grad(wrap(jnp.sqrt)), 1.0)
  assert ("sqrt", "forward") in directions(jax.grad(wrap(jax.lax.sqrt)), 1.0)
  assert ("div", "backward") in directions(jax.grad(wrap(jax.lax.sqrt)), 1.0)
