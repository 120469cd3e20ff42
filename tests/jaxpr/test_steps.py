import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._jaxpr.runner import Observer, run
from mpjax._jaxpr.steps import body_of, pieces_of


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


def test_pieces_compute_what_the_body_computes():
  def fn(x, y):
    z = jnp.sin(x) * y
    z = jax.lax.scan(lambda c, _: (jnp.cos(c) + x, None), z, None, length=3)[0]
    return jnp.exp(z) - jnp.asarray([1.0, 2.0])

  x, y = jnp.ones(2), jnp.asarray([3.0, 4.0])
  made = body(fn, x, y)
  pieces = pieces_of(made, 2)
  assert [names(piece.steps) for piece in pieces] == [["sin", "mul"], ["scan"], ["exp", "sub"]]
  env = {**made.consts, **dict(zip(made.inputs, (x, y), strict=True))}
  for piece in pieces[:-1]:
    outs = run(piece, [env[slot] for slot in piece.inputs], Observer())[0]
    env |= zip(piece.outputs, outs, strict=True)
  # The results of the body itself are those of no piece.
  last = dataclasses.replace(pieces[-1], outputs=made.outputs)
  (result,), _ = run(last, [env[slot] for slot in last.inputs], Observer())
  np.testing.assert_array_equal(result, fn(x, y))


def test_no_piece_ends_while_memory_is_written_in_place():
  def fn(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return jnp.sin(jnp.sin(ref[...]))

  first, *others = pieces_of(body(fn, jnp.ones(2)), 1)
  assert "sin" not in names(first.steps)
  assert [name for piece in others for name in names(piece.steps)] == ["sin", "sin"]
