import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpjax._jaxpr.runner import Look, Observer, _joined, run, run_on_host
from mpjax._jaxpr.steps import body_of
from tests.autocast.rig import with_jvp


def observed(fn, x):
  """Returns how many numbers every `sin` returned, and checks what the function returns."""
  program, sines = jax.make_jaxpr(fn)(x), []

  def pick(step, operands, results):
    return [operands[0], results[0]] if step.eqn.primitive.name == "sin" else ()

  def see(step, picked):
    assert step.eqn.primitive.name == "sin"
    operand, result = picked
    np.testing.assert_allclose(result, np.sin(operand), rtol=1e-6)
    sines.append(np.size(result))

  outs = run_on_host(body_of(program), (x,), Look(pick=pick, see=see))
  # One operation alone and among others may differ in the last bit.
  for out, expected in zip(outs, jax.tree.leaves(fn(x)), strict=True):
    np.testing.assert_allclose(out, expected, rtol=1e-5)
  return sum(sines)


def scanned(x):
  return jax.lax.scan(lambda c, y: (jnp.sin(c) + y, c), x, jnp.ones((5, 3)), reverse=True)


def while_loop(x):
  return jax.lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))


def branches(x):
  return jax.lax.cond(x[0] > 0, jnp.sin, lambda x: jnp.sin(jnp.sin(x)), x)


def switched(x):
  return jax.lax.switch(2, [jnp.cos, jnp.cos, lambda x: jnp.sin(jnp.sin(x))], x)


def with_keys(x):
  keys = jax.lax.scan(lambda c, key: (c, jax.random.split(key)[0]), 0, jax.random.split(KEY, 3))[1]
  return jnp.sin(x), jax.random.normal(keys[0])


@jax.custom_vjp
def custom_back(x):
  return jnp.sin(x)


custom_back.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.sin(jnp.sin(x)),))


def solved(x):
  """What is not entered runs."""
  return jax.lax.custom_linear_solve(lambda v: 2 * v, jnp.sin(x), lambda f, b: b / 2)


KEY = jax.random.key(0)
CASES = {
  "jit": (jax.jit(jnp.sin), 3),
  "scan": (scanned, 15),
  "no iteration": (lambda x: jax.lax.scan(lambda c, y: (jnp.sin(c), y), x, x[:0]), 0),
  "keys": (with_keys, 3),
  "while": (while_loop, 12),
  "cond": (branches, 3),
  "switch": (switched, 6),
  "remat": (jax.checkpoint(jnp.sin), 3),
  "custom_jvp": (with_jvp(jnp.sin), 3),
  "custom_vjp": (custom_back, 3),
  "backward rule": (jax.grad(lambda x: custom_back(x).sum()), 9),
  "lanes of a while": (lambda x: jax.vmap(lambda x: while_loop(x)[1])(x), 12),
  "vmap": (lambda x: jax.vmap(jnp.sin)(jnp.stack([x, x])), 6),
  "while in scan": (lambda x: jax.lax.scan(lambda c, _: (while_loop(c)[1], c), x, None, 2), 24),
  "cond in while": (
    lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, branches(c[1])), (0, x)),
    6,
  ),
  "scan in scan": (lambda x: jax.lax.scan(lambda c, _: (scanned(c)[0], None), x, None, 2), 30),
  "grad of scan": (jax.grad(lambda x: scanned(x)[0].sum()), 15),
  "not entered": (solved, 3),
}


@pytest.mark.slow
def test_equations_are_seen_as_often_as_they_run():
  x = jnp.arange(1.0, 4.0)
  assert {name: observed(fn, x) for name, (fn, _) in CASES.items()} == {
    name: times for name, (_, times) in CASES.items()
  }


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
  mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

  def one(x):
    y = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 2)[0]
    y = jax.lax.cond(jnp.sum(y) > 9, jnp.cos, lambda x: 2 * x, y)
    return jax.lax.psum(y, "a")

  mapped = jax.shard_map(one, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=check_vma)
  # Each device computes its own part, and those of "b" the same.
  assert observed(mapped, jnp.arange(4.0)) == 4 * 2 * 2


def until(x):
  return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))


def lanes(x):
  return jax.vmap(lambda x: jax.lax.while_loop(lambda s: s < 3, lambda s: s * 1.5, x))(x)


def local(x):
  mesh = jax.make_mesh((3,), ("i",), axis_types=(AxisType.Auto,))
  return jax.shard_map(
    lambda x: x / jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")
  )(x)


class Sines(Observer):
  """Counts the sines that run, on all devices."""

  def nothing(self):
    return jnp.zeros((), jnp.int32)

  def merge(self, one, other):
    return one + other

  def of_devices(self, seen):
    return jnp.sum(seen)

  def look(self, step, ins, outs):
    self.seen += int(step.eqn.primitive.name == "sin")


def test_under_jit_results_are_those_of_the_functions():
  fns = [scanned, until, lanes, CASES["cond"][0], local, CASES["grad of scan"][0]]
  x = jnp.asarray([1.0, 2.0, 2.5])
  bodies = [body_of(jax.make_jaxpr(fn)(x), compiled=True) for fn in fns]
  got = jax.jit(lambda x: [run(body, [x], Sines())[0] for body in bodies])(x)
  expected = jax.jit(lambda x: [fn(x) for fn in fns])(x)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_array_equal(a, b)


def test_under_jit_equations_are_seen_as_often_as_they_run():
  x = jnp.arange(1.0, 4.0)
  names = ("scan", "while", "cond", "switch", "while in scan", "cond in while", "scan in scan")
  bodies = {name: body_of(jax.make_jaxpr(CASES[name][0])(x)) for name in names}
  counts = jax.jit(lambda x: {name: run(body, [x], Sines())[1] for name, body in bodies.items()})(x)
  assert {name: 3 * int(count) for name, count in counts.items()} == {
    name: CASES[name][1] for name in names
  }


def test_iterations_are_joined_where_the_first_alone_is_no_tracer():
  joined = jax.jit(lambda x: _joined([jnp.zeros(1), x]))(jnp.ones(1))
  assert joined.tolist() == [0, 1]
