import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.nonfinite.interpreter import run
from mpjax._diagnostics.nonfinite.program import body_of
from mpjax._diagnostics.nonfinite.sentinels import FlagProbe


def loop(x):
  return jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x, reverse=True)


def until(x):
  return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * x), (0, x))


def lanes(x):
  return jax.vmap(lambda x: jax.lax.while_loop(lambda s: s < 3, lambda s: s * 1.5, x))(x)


def branch(x):
  return jax.lax.switch(jnp.argmax(x), [jnp.sin, jnp.cos, lambda x: x * 2], x)


def local(x):
  mesh = jax.make_mesh((3,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
  f = jax.shard_map(
    lambda x: x / jax.lax.psum(x, "i"), mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")
  )
  return f(x)


def test_results_are_those_of_the_functions():
  fns = [loop, until, lanes, branch, local, jax.grad(lambda x: loop(x)[0])]
  x = jnp.asarray([1.0, 2.0, 2.5])
  bodies = [body_of(jax.make_jaxpr(fn)(x), 1) for fn in fns]
  found = jax.jit(lambda x: [run(body, [x], FlagProbe(), outermost=True)[0] for body in bodies])(x)
  wanted = jax.jit(lambda x: [fn(x) for fn in fns])(x)
  for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_array_equal(got, want)
