import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnostics.nonfinite.births import births, can_break
from mpjax._diagnostics.nonfinite.program import body_of

INF, NAN = jnp.inf, jnp.nan


def last_step(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), len(args)).steps[-1]


@pytest.mark.parametrize(
  ("fn", "args", "wanted"),
  [
    (jnp.add, ([1, INF, 1], [1, 1, NAN]), [False] * 3),
    (jnp.add, ([3e38, INF, INF], [3e38, -INF, INF]), [True, True, False]),
    (jnp.multiply, ([0, NAN, 1e30], [INF, 1, 1e30]), [True, False, True]),
    (jnp.log, ([0, -1, INF],), [True, True, False]),
  ],
)
def test_an_element_breaks_where_its_own_operands_do_not(fn, args, wanted):
  arrays = [jnp.asarray(x, jnp.float32) for x in args]
  step = last_step(fn, *arrays)
  (found,) = births(step, arrays, [fn(*arrays)])
  np.testing.assert_array_equal(found, wanted)


def test_a_sum_breaks_in_its_own_row():
  x = jnp.asarray([[3e38, 3e38], [INF, 1], [INF, -INF]], jnp.float32)
  step = last_step(lambda x: jnp.sum(x, axis=1), x)
  np.testing.assert_array_equal(births(step, [x], [jnp.sum(x, axis=1)])[0], [True, False, True])


@pytest.mark.parametrize(
  ("fn", "dtype", "wanted"),
  [
    (lambda x: x.astype(jnp.float16), jnp.float32, True),
    (lambda x: x.astype(jnp.float32), jnp.float16, False),
    (lambda x: x.astype(jnp.float16), jnp.int32, True),
    (lambda x: x.astype(jnp.float32), jnp.int32, False),
    (lambda x: x.astype(jnp.bfloat16), jnp.float32, True),
    (jnp.tanh, jnp.float32, False),
    (lambda x: x[::-1], jnp.float32, False),
    (jnp.argsort, jnp.float32, False),
    (lambda x: jnp.take(x, jnp.asarray([5]), mode="fill"), jnp.float32, True),
    (lambda x: jnp.take(x, jnp.asarray([5]), mode="clip"), jnp.float32, False),
  ],
)
def test_what_can_break(fn, dtype, wanted):
  x = jnp.ones(3, dtype)
  steps = body_of(jax.make_jaxpr(fn)(x), 1).steps
  assert any(map(can_break, steps)) == wanted
