import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mpjax._diagnostics.runner import run
from mpjax._jaxprs.compat import bind
from mpjax._jaxprs.steps import body_of
from tests.diagnostics.test_on_host import CASES, scanned


def until(x):
  return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))


def lanes(x):
  return jax.vmap(lambda x: jax.lax.while_loop(lambda s: s < 3, lambda s: s * 1.5, x))(x)


def local(x):
  mesh = jax.make_mesh((3,), ("i",), axis_types=(AxisType.Auto,))
  return jax.shard_map(
    lambda x: x / jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")
  )(x)


class Sines:
  """Counts the sines that run, on all devices."""

  merges = True

  def watch(self, body, values, around):
    return SinesOfOne()

  def nothing(self):
    return jnp.zeros((), jnp.int32)

  def merge(self, one, other):
    return one + other

  def of_devices(self, states):
    return jnp.sum(states)


class SinesOfOne:
  def __init__(self):
    self.count = jnp.zeros((), jnp.int32)

  def compute(self, step, ins):
    self.count += int(step.eqn.primitive.name == "sin")
    return bind(step.eqn, ins)

  def inside(self, state):
    self.count += state

  def state(self):
    return self.count


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
