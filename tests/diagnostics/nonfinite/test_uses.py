import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.nonfinite.uses import Uses, births, can_break, direction_of
from mpjax._jaxprs.graph import Graph
from mpjax._jaxprs.steps import body_of

X = jnp.ones(3)


def test_casts_of_constants_are_constants():
  body = body_of(jax.make_jaxpr(lambda x: x + jnp.asarray(-1e9).astype(x.dtype))(X), compiled=True)
  assert not Uses(body).constants & set(body.inputs)


INF, NAN = jnp.inf, jnp.nan


def last_step(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), compiled=True).steps[-1]


BIRTHS = [
  (jnp.add, ([1, INF, 1], [1, 1, NAN]), [False] * 3),
  (jnp.add, ([3e38, INF, INF], [3e38, -INF, INF]), [True, True, False]),
  (jnp.multiply, ([0, NAN, 1e30], [INF, 1, 1e30]), [True, False, True]),
  (jnp.log, ([0, -1, INF],), [True, True, False]),
  # A sum breaks in its own row: an inf that is added up is no mask.
  (lambda x: jnp.sum(x, 1), ([[3e38, 3e38], [INF, 1], [NAN, 1]],), [True, True, False]),
]


def test_an_element_breaks_where_its_own_operands_do_not():
  inputs = [[jnp.asarray(x, jnp.float32) for x in args] for _, args, _ in BIRTHS]
  steps = [last_step(fn, *args) for (fn, *_), args in zip(BIRTHS, inputs, strict=True)]

  def all_births(inputs):
    results = [fn(*args) for (fn, *_), args in zip(BIRTHS, inputs, strict=True)]
    return [births(*each, [y]) for *each, y in zip(steps, inputs, results, strict=True)]

  for found, (*_, wanted) in zip(jax.jit(all_births)(inputs), BIRTHS, strict=True):
    np.testing.assert_array_equal(*found.values(), wanted)


def test_what_can_break():
  breaks = {
    "float32": [lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.bfloat16)],
    "int32": [lambda x: x.astype(jnp.float16)],
  }
  breaks["float32"].append(lambda x: jnp.take(x, jnp.asarray([5]), mode="fill"))
  never = {
    "float16": [lambda x: x.astype(jnp.float32)],
    "int32": [lambda x: x.astype(jnp.float32)],
    "float32": [jnp.tanh, jnp.argsort, lambda x: x[::-1]],
  }
  never["float32"].append(lambda x: jnp.take(x, jnp.asarray([5]), mode="clip"))
  for wanted, table in ((True, breaks), (False, never)):
    for dtype, fns in table.items():
      x = jnp.ones(3, dtype)
      for fn in fns:
        steps = body_of(jax.make_jaxpr(fn)(x), compiled=True).steps
        assert any(map(can_break, steps)) == wanted, (dtype, jax.make_jaxpr(fn)(x))


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


def test_what_a_forward_rule_keeps_for_the_backward_pass_is_no_slope():
  # It is what the derivative of a root is, on a line of its own.
  @jax.custom_vjp
  def root(x):
    return jnp.sqrt(x)

  def forward(x):
    root = jax.lax.sqrt(x)
    kept = 0.5 / root
    return root, kept

  root.defvjp(forward, lambda kept, g: (g * kept,))
  assert ("div", "forward") in directions(jax.grad(root), 2.0)


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
