import jax
import jax.numpy as jnp

from mpjax._diagnostics.nonfinite.sentinels import FlagProbe, sentinels_of, suspects
from mpjax._diagnostics.nonfinite.uses import can_break
from mpjax._diagnostics.runner import run
from mpjax._jaxprs.steps import body_of


def body(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), compiled=True)


def test_a_value_is_not_looked_at_if_a_sum_of_it_is():
  made = body(lambda x: jnp.sum(x * x + 1), jnp.ones(3))
  sentinels = sentinels_of(made)
  assert len(sentinels.numbers) == 1
  assert {sentinels.cover[slot] for step in made.steps for slot in step.outs} == {0}


def test_what_an_exponential_reads_is_looked_at():
  made = body(lambda x: jnp.exp(x - 1), jnp.ones(3))
  assert sentinels_of(made).numbers.keys() >= {made.steps[0].outs[0], made.steps[1].outs[0]}


def test_every_step_that_may_break_is_covered():
  def loss(x):
    y = jax.lax.scan(lambda c, _: (jnp.exp(jnp.sin(c)) * x, None), x, None, length=2)[0]
    return jnp.sum(jnp.where(y > 0, jnp.log(y), 0) / jnp.max(y))

  made = body(jax.grad(loss), jnp.ones(3))
  for inside in [made, *(b for step in made.every_step() for b in step.bodies)]:
    cover = sentinels_of(made).cover
    for step in filter(can_break, inside.steps):
      assert all(slot in cover for slot in step.outs)


def test_only_steps_that_lead_to_an_inf_are_suspects():
  def fn(x, y):
    return jnp.log(x) * 2, jnp.log(y) * 2

  x, y = jnp.ones(3), jnp.zeros(4)
  made = body(fn, x, y)
  sentinels = sentinels_of(made)
  flags = run(made, (x, y), FlagProbe(made, sentinels, lambda step, ins: ins))[1]
  first, *rest = suspects(made, sentinels, flags)
  assert first == [-1]  # The second argument, as far as the flags tell.
  names = {s.number: (s.eqn.primitive.name, s.eqn.invars[0].aval.shape) for s in made.steps}
  assert {names[n] for each in rest for n in each} == {
    ("log", (4,)),
    ("mul", (4,)),
  }
