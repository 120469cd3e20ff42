import math

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._debug.headroom import in_float16, watch_float16_values, watch_float32_values
from mpjax._jaxpr.runner import run_on_host
from mpjax._jaxpr.steps import body_of


def seen(watch, fn, *args):
  """Returns what was seen by module while a function ran."""
  largest = {}
  run_on_host(body_of(jax.make_jaxpr(fn)(*args)), args, watch(largest))
  return largest


def test_the_largest_float16_value_of_each_module():
  def fn(x):
    with jax.named_scope("a"):
      y = x.astype(jnp.float16) * 3
    with jax.named_scope("b"):
      return jax.lax.scan(lambda c, _: (c * -2, None), y, None, 4)[0].astype(jnp.float32) * 1e9

  x = jnp.asarray([1.0, -2.5, 0.0])
  assert seen(watch_float16_values, fn, x) == {"a": 7.5, "b": 120.0}
  assert in_float16(120.0) == 65504 / 120


def test_a_value_that_overflows_and_the_values_after_it():
  def fn(x):
    with jax.named_scope("cast"):
      y = x.astype(jnp.float16)
    with jax.named_scope("product"):
      z = (x / 100).astype(jnp.float16) * 100
    with jax.named_scope("after"):
      return y + z

  largest = seen(watch_float16_values, fn, jnp.asarray([7e4, 2.0]))
  assert (largest["cast"], largest["product"], largest["after"]) == (math.inf, math.inf, 4.0)
  assert in_float16(largest["cast"]) == 0


def test_masks_and_divisions_by_zero_are_no_overflow():
  def fn(x):
    masked = jnp.where(x > 1, x, -jnp.inf)
    return jnp.where(jnp.isinf(masked), 1 / (x - x), masked)

  assert seen(watch_float16_values, fn, jnp.asarray([0.5, 3], jnp.float16)) == {"": 3.0}
  # The quotient is infinite in float16 alone.
  assert seen(watch_float16_values, lambda x: 1 / x, jnp.float16(1e-7)) == {"": math.inf}


def test_empty_and_integer_arrays():
  assert seen(watch_float16_values, lambda x: x[:0] * 2, jnp.ones(3, jnp.float16)) == {"": 0.0}
  assert seen(watch_float16_values, lambda x: x + 1, jnp.arange(3)) == {}
  assert in_float16(0.0) == math.inf


def test_operands_of_matmuls_count_in_float32():
  body = body_of(jax.make_jaxpr(jnp.dot)(np.ones((2, 2)), np.ones((2, 2))))
  numbers = {step.number for step in body.every_step()}
  largest = {}
  values = jnp.full((2, 2), -50.0), jnp.eye(2)
  run_on_host(body, values, watch_float32_values(largest, numbers))
  assert largest == {"": 50.0}
  ignored = {}
  run_on_host(body, values, watch_float32_values(ignored, ()))
  assert ignored == {}
