import jax.numpy as jnp
import numpy as np

from mpjax._diagnose.compiled import compiled_as_written


def test_a_cast_and_back_rounds():
  def fn(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32) - x

  x = np.asarray([1 + 2**-9, 3.0], np.float32)
  error = compiled_as_written(fn)(x)
  assert error.tolist() == [-(2.0**-9), 0.0]


def test_an_overflow_is_not_left_out():
  run = compiled_as_written(lambda x: x.astype(jnp.float16).astype(jnp.float32))
  assert run(np.float32(1e5)) == np.inf
