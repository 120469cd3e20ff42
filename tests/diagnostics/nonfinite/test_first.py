import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.nonfinite.first import NONE, FirstProbe
from mpjax._diagnostics.nonfinite.interpreter import run
from mpjax._diagnostics.nonfinite.program import body_of


def first(fn, *args, only=range(100), factor=1.0, scaled=None):
  body = body_of(jax.make_jaxpr(fn)(*args), len(args))
  probe = FirstProbe(body.depth, only, scaled or {}, jnp.asarray(factor, jnp.float32))
  return run(body, args, probe, outermost=True)[1], body


def test_only_the_steps_that_are_asked_for_are_looked_at():
  both, x = lambda x: jnp.log(x) + 1 / x, jnp.zeros(3)
  found, body = first(both, x)
  assert int(found.number) == body.steps[0].number
  found, body = first(both, x, only=[2])
  assert int(found.number) == 2 == body.steps[1].number


def test_the_earlier_iteration_comes_first_though_its_step_is_a_later_one():
  def body(c, x):
    return c + jnp.log(x[0]) + 1 / x[1], None

  xs = jnp.asarray([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
  found, made = first(lambda xs: jax.lax.scan(body, 0.0, xs)[0], xs)
  numbers = {s.number: s.eqn.primitive.name for s in made.every_step()}
  assert numbers[int(found.number)] == "div"
  np.testing.assert_array_equal(found.iterations, [1])


def test_a_scale_may_be_another_one():
  def fn(x):
    return x * 8

  x = jnp.asarray(1e38, jnp.float32)
  assert int(first(fn, x)[0].number) == 1
  assert int(first(fn, x, factor=0.25, scaled={1: 1})[0].number) == NONE
