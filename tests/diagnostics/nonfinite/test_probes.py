import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.nonfinite.probes import (
  NONE,
  CaptureProbe,
  FirstProbe,
  FlagProbe,
  sentinels_of,
  suspects,
)
from mpjax._diagnostics.nonfinite.scales import Scale
from mpjax._diagnostics.nonfinite.uses import Uses, can_break
from mpjax._jaxprs.runner import run
from mpjax._jaxprs.steps import body_of


def body(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), compiled=True)


def test_a_value_is_not_looked_at_if_a_sum_of_it_is():
  made = body(lambda x: jnp.sum((x * x).reshape(2, 2) + 1), jnp.ones(4))
  sentinels = sentinels_of(made)
  every = [slot for step in filter(can_break, made.steps) for slot in step.outs]
  assert {sentinels[slot] for slot in (*made.inputs, *every)} == {*made.outputs}


def test_what_an_exponential_reads_is_looked_at():
  made = body(lambda x: jnp.exp(x - 1), jnp.ones(3))
  assert {*sentinels_of(made).values()} >= {made.steps[0].outs[0], made.steps[1].outs[0]}


def test_every_step_that_may_break_is_covered():
  def loss(x):
    y = jax.lax.scan(lambda c, _: (jnp.exp(jnp.sin(c)) * x, None), x, None, length=2)[0]
    return jnp.sum(jnp.where(y > 0, jnp.log(y), 0) / jnp.max(y))

  made = body(jax.grad(loss), jnp.ones(3))
  for inside in [made, *(b for step in made.every_step() for b in step.bodies)]:
    cover = sentinels_of(made)
    for step in filter(can_break, inside.steps):
      assert all(slot in cover for slot in step.outs)


def test_only_steps_that_lead_to_an_inf_are_suspects():
  def fn(x, y):
    return jnp.log(x) * 2, jnp.log(y) * 2

  x, y = jnp.ones(3), jnp.zeros(4)
  made = body(fn, x, y)
  sentinels = sentinels_of(made)
  flags = run(made, (x, y), FlagProbe(made, sentinels, lambda step, ins: ins))[1]
  (found,) = suspects(made, sentinels, flags)
  names = {s.number: (s.eqn.primitive.name, s.eqn.invars[0].aval.shape) for s in made.steps}
  # The second argument, as far as the flags tell.
  assert {names.get(n, n) for n in found} == {-1, ("log", (4,)), ("mul", (4,))}


def first(fn, *args, only=range(-9, 100), rescale=lambda step, ins: ins):
  body = body_of(jax.make_jaxpr(fn)(*args), compiled=True)
  return run(body, args, FirstProbe(body, Uses(body), only, rescale))[1], body


def test_only_the_steps_that_are_asked_for_are_looked_at():
  both, x = lambda x: jnp.log(x) + 1 / x, jnp.zeros(3)
  found, body = first(both, x)
  assert int(found[0]) == body.steps[0].number
  found, body = first(both, x, only=[1])
  assert int(found[0]) == 1 == body.steps[1].number


def test_the_earlier_iteration_comes_first_though_its_step_is_a_later_one():
  def body(c, x):
    return c + jnp.log(x[0]) + 1 / x[1], None

  xs = jnp.asarray([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
  found, made = first(lambda xs: jax.lax.scan(body, 0.0, xs)[0], xs)
  numbers = {s.number: s.eqn.primitive.name for s in made.every_step()}
  assert numbers[int(found[0])] == "div"
  np.testing.assert_array_equal(found[1:], [1, -1])


def test_a_scale_may_be_another_one():
  def fn(x):
    return x * 8

  x = jnp.asarray(1e38, jnp.float32)
  assert int(first(fn, x)[0][0]) == 0
  implied = functools.partial(Scale(8, operands={0: 1}).of_operands, jnp.asarray(0.25, jnp.float32))
  assert int(first(fn, x, rescale=implied)[0][0]) == NONE


def test_operands_and_results_of_one_iteration():
  def body(c, x):
    return c * x, None

  def fn(xs):
    return jax.lax.scan(body, jnp.float16(10), xs)[0]

  xs = jnp.asarray([2, 3, 100, 100], jnp.float16)
  made = body_of(jax.make_jaxpr(fn)(xs), compiled=True)
  step = list(made.every_step())[-1]
  seen = run(made, [xs], CaptureProbe(made, step.number, (3,), -1))[1]
  assert bool(seen.hit)
  # 10 * 2 * 3 * 100, what it is multiplied by, the inf, and what float32 makes of it.
  np.testing.assert_array_equal(seen.sizes[:, 1], [6000, 100, -1, 600000])
  np.testing.assert_array_equal(seen.counts[:, 0], [0, 0, 1, 0])
  assert int(seen.broken) == 1
