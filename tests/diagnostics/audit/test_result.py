"""Shares of what an audit found."""

import math

import jax
import jax.numpy as jnp

import mpjax

F8, BF16 = "float8_e4m3fn", "bfloat16"


def s(dtype):
  return jax.ShapeDtypeStruct((16, 16), dtype)


def test_shares():
  def fn(a, b, c):
    return jax.lax.dot(a, a, preferred_element_type=BF16), b @ b, c @ c, c @ c

  audit = mpjax.audit(fn)(s(F8), s(BF16), s("float32"))
  assert audit.float8_share == 0.25
  assert audit.half_share == 0.5


def test_integers_count_for_neither_side():
  audit = mpjax.audit(lambda a, b: (a @ a, b @ b))(s("int8"), s(BF16))
  assert audit.half_share == 1
  assert math.isnan(mpjax.audit(jnp.matmul)(s("int8"), s("int8")).half_share)
