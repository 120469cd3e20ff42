import jax
import jax.numpy as jnp

from mpjax._diagnostics.nonfinite.passes import direction_of
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.steps import body_of


def directions(fn, *args):
  graph = Graph(body_of(jax.make_jaxpr(fn)(*args), compiled=True))
  return [(each.name, direction_of(graph, each)) for each in graph.computing()]


def test_a_slope_that_leaves_a_scan_belongs_to_the_backward_pass():
  def fn(xs):
    return jax.lax.scan(lambda c, x: (c + jnp.sqrt(x), None), 0.0, xs)[0]

  assert ("div", "backward") in directions(jax.grad(fn), jnp.ones(3))


def test_comparisons_and_what_has_no_derivative_have_no_slope():
  def fn(x):
    above = jax.lax.nextafter(*[jax.lax.stop_gradient(x)] * 2)
    return jnp.sin(jnp.where((x > 0) & (x < above), x, jax.lax.sqrt(x)))

  assert ("div", "backward") in directions(jax.grad(fn), 2.0)


def test_without_a_gradient_all_is_forward():
  assert set(directions(lambda x: 0.5 / jnp.sqrt(x), 1.0)) == {
    ("sqrt", "forward"),
    ("div", "forward"),
  }


def test_a_value_that_is_its_own_slope_belongs_to_the_forward_pass():
  for wrap in (lambda f: f, jax.jit):
    # Of the gradient alone nothing in the forward pass reads the exponential.
    assert ("exp", "forward") in directions(jax.grad(wrap(jnp.exp)), 1.0)
    assert ("sqrt", "forward") in directions(jax.grad(wrap(jnp.sqrt)), 1.0)
    found = directions(jax.grad(wrap(jax.lax.sqrt)), 1.0)
    assert {("sqrt", "forward"), ("div", "backward")} <= set(found)
