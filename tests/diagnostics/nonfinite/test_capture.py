import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.nonfinite.capture import CaptureProbe, in_float32
from mpjax._diagnostics.runner import run
from mpjax._jaxprs.steps import body_of


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


def test_a_matmul_in_float32():
  x = jnp.full((2, 2), 300, jnp.float16)
  made = body_of(jax.make_jaxpr(jnp.matmul)(x, x), compiled=True)
  outs = in_float32(made.steps[0], [x, x])
  assert outs is not None
  (found,) = outs
  np.testing.assert_array_equal(found, np.full((2, 2), 180000, np.float32))
  # What is float32 already is not computed again.
  x = jnp.ones((2, 2))
  assert (
    in_float32(body_of(jax.make_jaxpr(jnp.matmul)(x, x), compiled=True).steps[0], [x, x]) is None
  )
