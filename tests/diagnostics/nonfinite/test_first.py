import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.nonfinite.first import NONE, FirstProbe
from mpjax._diagnostics.nonfinite.scales import Implied
from mpjax._diagnostics.nonfinite.uses import uses_of
from mpjax._diagnostics.runner import run
from mpjax._jaxprs.steps import body_of


def first(fn, *args, only=range(-9, 100), rescale=lambda step, ins: ins):
  body = body_of(jax.make_jaxpr(fn)(*args), compiled=True)
  return run(body, args, FirstProbe(body, uses_of(body), only, rescale))[1], body


def test_only_the_steps_that_are_asked_for_are_looked_at():
  both, x = lambda x: jnp.log(x) + 1 / x, jnp.zeros(3)
  found, body = first(both, x)
  assert int(found.number) == body.steps[0].number
  found, body = first(both, x, only=[1])
  assert int(found.number) == 1 == body.steps[1].number


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
  assert int(first(fn, x)[0].number) == 0
  implied = functools.partial(Implied(8, {0: 1}).rescale, jnp.asarray(0.25, jnp.float32))
  assert int(first(fn, x, rescale=implied)[0].number) == NONE
