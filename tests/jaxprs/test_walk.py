"""Walking jaxprs. That every equation is met is shown by what is counted: test_count.py."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax._jaxprs.walk import passed_through

PASSING = {
  "as it is": (lambda a, b: (b, a, b), [1, 0, 1]),
  "computed": (lambda a, b: (a + 1, b, a * 1), [None, 1, None]),
  "a constant": (lambda a, b: (1, b, jnp.ones(2)), [None, 1, None]),
  "jit": (lambda a, b: jax.jit(lambda x, y: (y, x + 1))(a, b), [1, None]),
  "jit in jit": (jax.jit(jax.jit(lambda a, b: (b, a))), [1, 0]),
  "checkpoint": (jax.checkpoint(lambda a, b: (jnp.sin(a), b)), [None, 1]),
  "one of them moved": (lambda a, b: jax.jit(lambda x, y: (y, x))(a + 1, b), [1, None]),
  # A loop may give back what it was given, or what it was given the time before.
  "scan": (lambda a, b: lax.scan(lambda c, _: ((c[1], c[1] + 1), None), (b, a), length=3)[0], 2),
  "cond": (lambda a, b: lax.cond(a > 0, lambda: a, lambda: b), 1),
}


@pytest.mark.parametrize("name", PASSING)
def test_which_results_are_arguments(name):
  fun, expected = PASSING[name]
  expected = [None] * expected if isinstance(expected, int) else expected
  program = jax.make_jaxpr(fun)(1.0, 2.0)
  assert passed_through(program) == expected
  assert passed_through(program.jaxpr) == expected
