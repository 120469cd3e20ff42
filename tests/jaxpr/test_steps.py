import jax
import jax.numpy as jnp

from mpjax._jaxpr.steps import body_of


def body(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), compiled=True)


def names(steps):
  return [step.eqn.primitive.name for step in steps]


def test_calls_are_written_out():
  inner = jax.jit(lambda x: jnp.sin(x) * 2)
  made = body(lambda x: inner(inner(x)), 1.0)
  assert names(made.steps) == ["sin", "mul", "sin", "mul"]
  assert [step.number for step in made.steps] == [0, 1, 2, 3]
  # What nothing reads is left out, and what remat computes again is kept apart.
  assert names(body(lambda x: (jnp.cos(x), jnp.sin(x))[1], 1.0).steps) == ["sin"]
  made = body(jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))), 1.0)
  assert "optimization_barrier" in names(made.steps)


def test_loops_hold_lists_of_their_own():
  def fn(x):
    return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]

  (step,) = body(fn, 1.0).steps
  assert names(step.bodies[0].steps) == ["sin"]
  assert body(lambda x: jax.vmap(fn)(x[None]), 1.0).depth == 1


def test_a_step_knows_what_it_is_in():
  steps = body(lambda x: jax.lax.cond(x > 0, jax.jit(jnp.sin), jnp.cos, x), 1.0)
  branch, *inside = list(steps.every_step())[-3:]
  assert [[each.number for each in step.enclosing()][-1] for step in inside] == [branch.number] * 2
  assert [step.holds for step in inside[0].enclosing()][-1] is branch.holds
  assert [*branch.enclosing()] == [branch]
