import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnose.nonfinite.probes import FirstProbe, FlagProbe
from mpjax._diagnose.nonfinite.uses import can_break, uses_of
from mpjax._jaxpr.runner import run
from mpjax._jaxpr.steps import body_of


def body(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), compiled=True)


def test_a_value_is_not_looked_at_if_a_sum_of_it_is():
  made = body(lambda x: jnp.sum((x * x).reshape(2, 2) + 1), jnp.ones(4))
  sentinels = FlagProbe(made, uses_of(made).arguments).sentinels
  every = [slot for step in filter(can_break, made.steps) for slot in step.outs]
  assert {sentinels[slot] for slot in (*made.inputs, *every)} == {*made.outputs}


def test_what_an_exponential_reads_is_looked_at():
  made = body(lambda x: jnp.exp(x - 1), jnp.ones(3))
  assert {*FlagProbe(made, uses_of(made).arguments).sentinels.values()} >= {
    made.steps[0].outs[0],
    made.steps[1].outs[0],
  }


def test_every_step_that_may_break_is_covered():
  def loss(x):
    y = jax.lax.scan(lambda c, _: (jnp.exp(jnp.sin(c)) * x, None), x, None, length=2)[0]
    return jnp.sum(jnp.where(y > 0, jnp.log(y), 0) / jnp.max(y))

  made = body(jax.grad(loss), jnp.ones(3))
  for inside in [made, *(b for step in made.every_step() for b in step.bodies)]:
    cover = FlagProbe(made, uses_of(made).arguments).sentinels
    for step in filter(can_break, inside.steps):
      assert all(slot in cover for slot in step.outs)


def test_only_steps_that_lead_to_an_inf_are_suspects():
  def fn(x, y):
    return jnp.log(x) * 2, jnp.log(y) * 2

  x, y = jnp.ones(3), jnp.zeros(4)
  made = body(fn, x, y)
  probe = FlagProbe(made, uses_of(made).arguments)
  found = probe.suspects(run(made, (x, y), probe)[1])
  names = {s.number: (s.eqn.primitive.name, s.eqn.invars[0].aval.shape) for s in made.steps}
  # The second argument, as far as the flags tell.
  assert {names.get(n, n) for n in found} == {-1, ("log", (4,)), ("mul", (4,))}


@pytest.mark.slow
def test_the_earlier_iteration_comes_first_though_its_step_is_a_later_one():
  def body(c, x):
    return c + jnp.log(x[0]) + 1 / x[1], None

  xs = jnp.asarray([[1.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
  made = body_of(jax.make_jaxpr(lambda xs: jax.lax.scan(body, 0.0, xs)[0])(xs), compiled=True)
  found = run(made, [xs], FirstProbe(uses_of(made), range(-9, 100)))[1][0]
  numbers = {s.number: s.eqn.primitive.name for s in made.every_step()}
  assert numbers[int(found[0])] == "div"
  np.testing.assert_array_equal(found[1:], [1, -1])


def test_operands_and_results_of_one_iteration():
  def body(c, x):
    return c * x, None

  def fn(xs):
    return jax.lax.scan(body, jnp.float16(10), xs)[0]

  xs = jnp.asarray([2, 3, 100, 100], jnp.float16)
  made = body_of(jax.make_jaxpr(fn)(xs), compiled=True)
  step = list(made.every_step())[-1]
  first, place, rows, _ = run(made, [xs], FirstProbe(uses_of(made), {step.number}, step))[1]
  assert ([*map(int, first)], int(place)) == ([step.number, 3, -1], 0)
  # 10 * 2 * 3 * 100, what it is multiplied by, the inf, and what float32 makes of it.
  np.testing.assert_array_equal([row["most"] for row in rows], [6000, 100, np.nan, 600000])
  assert [int(row["inf"]) for row in rows] == [0, 0, 1, 0]
