import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpjax._diagnostics.ranges.observed import run_observed
from mpjax._jaxprs.compat import bind


class Sum:
  """Adds up how many numbers every `sin` returned."""

  def visit(self, key, eqn, operands, state):
    results = bind(eqn, operands)
    if eqn.primitive.name == "sin":
      state = state + np.float32(results[0].size)
    return results, state

  def settled(self, state):
    return state

  def empty(self):
    return jnp.zeros(())

  def over_devices(self, state, axes):
    return jax.lax.psum(state, tuple(axes))

  def added(self, state, more):
    return state + more


def observed(fns, x):
  """Returns how often each function ran `sin`; all are compiled as one program, and checked."""
  programs = {name: jax.make_jaxpr(fn)(x) for name, fn in fns.items()}

  @jax.jit
  def run(x):
    return {
      name: run_observed(program, (x,), Sum(), jnp.zeros(())) for name, program in programs.items()
    }

  expected = jax.jit(lambda x: {name: jax.tree.leaves(fn(x)) for name, fn in fns.items()})(x)
  found = run(x)
  for name, (outs, _) in found.items():
    for out, wanted in zip(outs, expected[name], strict=True):
      np.testing.assert_array_equal(out, wanted, name)
  return {name: int(state) for name, (_, state) in found.items()}


def scanned(x):
  return jax.lax.scan(lambda c, y: (jnp.sin(c) + y, c), x, jnp.ones((5, 3)), reverse=True)


def while_loop(x):
  return jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))


def branches(x):
  return jax.lax.cond(x[0] > 0, jnp.sin, lambda x: jnp.sin(jnp.sin(x)), x)


def switched(x):
  return jax.lax.switch(2, [jnp.cos, jnp.cos, lambda x: jnp.sin(jnp.sin(x))], x)


@jax.custom_jvp
def custom(x):
  return jnp.sin(x)


custom.defjvp(lambda p, t: (custom(*p), t[0]))


@jax.custom_vjp
def custom_back(x):
  return jnp.sin(x)


custom_back.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.sin(jnp.sin(x)),))


def solved(x):
  """What is not entered runs."""
  return jax.lax.custom_linear_solve(lambda v: 2 * v, jnp.sin(x), lambda f, b: b / 2)


CASES = {
  "jit": (jax.jit(jnp.sin), 3),
  "scan": (scanned, 15),
  "while": (while_loop, 12),
  "cond": (branches, 3),
  "switch": (switched, 6),
  "remat": (jax.checkpoint(jnp.sin), 3),
  "custom_jvp": (custom, 3),
  "custom_vjp": (custom_back, 3),
  "backward rule": (jax.grad(lambda x: custom_back(x).sum()), 9),
  "vmap": (lambda x: jax.vmap(jnp.sin)(jnp.stack([x, x])), 6),
  "scan in scan": (lambda x: jax.lax.scan(lambda c, _: (scanned(c)[0], None), x, None, 2), 30),
  "grad of scan": (jax.grad(lambda x: scanned(x)[0].sum()), 15),
  "not entered": (solved, 3),
}


def test_equations_are_seen_as_often_as_they_run():
  fns = {name: fn for name, (fn, _) in CASES.items()}
  wanted = {name: times for name, (_, times) in CASES.items()}
  assert observed(fns, jnp.arange(1.0, 4.0)) == wanted


def test_shard_map():
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

  def one(x):
    y = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 2)[0]
    return jax.lax.psum(y, "a")

  mapped = {
    vma: jax.shard_map(one, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=vma)
    for vma in (True, False)
  }
  # Each device computes its own part, and those of "b" the same.
  assert observed(mapped, jnp.arange(4.0)) == dict.fromkeys(mapped, 4 * 2 * 2)
