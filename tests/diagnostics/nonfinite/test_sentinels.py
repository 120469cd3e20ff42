import jax
import jax.numpy as jnp

from mpjax._diagnostics.nonfinite.births import can_break
from mpjax._diagnostics.nonfinite.interpreter import run
from mpjax._diagnostics.nonfinite.program import body_of
from mpjax._diagnostics.nonfinite.sentinels import FlagProbe, sentinels_of, suspects


def body(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), len(args))


def test_a_value_is_not_looked_at_if_a_sum_of_it_is():
  made = body(lambda x: jnp.sum(x * x + 1), jnp.ones(3))
  sentinels = sentinels_of(made, True)
  assert len(sentinels.groups) == 1
  assert {sentinels.cover[slot] for step in made.steps for slot in step.outs} == {(1, 0)}


def test_what_an_exponential_reads_is_looked_at():
  made = body(lambda x: jnp.exp(x - 1), jnp.ones(3))
  found = [slot for group in sentinels_of(made, True).groups.values() for slot in group]
  assert set(found) >= {made.steps[0].outs[0], made.steps[1].outs[0]}


def test_every_step_that_may_break_is_covered():
  def loss(x):
    y = jax.lax.scan(lambda c, _: (jnp.exp(jnp.sin(c)) * x, None), x, None, length=2)[0]
    return jnp.sum(jnp.where(y > 0, jnp.log(y), 0) / jnp.max(y))

  made = body(jax.grad(loss), jnp.ones(3))
  for inside in [made, *(b for step in made.every_step() for b in step.bodies)]:
    cover = sentinels_of(inside).cover
    for step in filter(can_break, inside.steps):
      assert all(slot in cover for slot in step.outs)


def test_only_steps_that_lead_to_an_inf_are_suspects():
  def fn(x, y):
    return jnp.log(x) * 2, jnp.log(y) * 2

  x, y = jnp.ones(3), jnp.zeros(4)
  made = body(fn, x, y)
  flags = run(made, (x, y), FlagProbe(), outermost=True)[1]
  first, *rest = suspects(made, flags)
  assert first == [1]  # The second argument, as far as the flags tell.
  names = {s.number: (s.eqn.primitive.name, s.eqn.invars[0].aval.shape) for s in made.steps}
  assert {names[n] for each in rest for n in each} == {
    ("log", (4,)),
    ("mul", (4,)),
  }
