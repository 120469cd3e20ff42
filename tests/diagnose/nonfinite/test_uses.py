import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnose.nonfinite.uses import can_break, newly_nonfinite, uses_of
from mpjax._jaxpr.steps import body_of


def body(fn, *args):
  return body_of(jax.make_jaxpr(fn)(*args), compiled=True)


def test_casts_of_constants_are_constants():
  made = body(lambda x: jnp.full(3, -1e9).astype(jnp.float16) + x, jnp.ones(3, jnp.float16))
  assert uses_of(made).literals == {slot for step in made.steps[:-1] for slot in step.outs}


INF, NAN = jnp.inf, jnp.nan


BIRTHS = [
  (jnp.add, ([1, INF, 1], [1, 1, NAN]), [False] * 3),
  (jnp.add, ([3e38, INF, INF], [3e38, -INF, INF]), [True, True, False]),
  (jnp.multiply, ([0, NAN, 1e30], [INF, 1, 1e30]), [True, False, True]),
  (jnp.log, ([0, -1, INF],), [True, True, False]),
  # A sum breaks in its own row: an inf that is added up is no mask.
  (lambda x: jnp.sum(x, 1), ([[3e38, 3e38], [INF, 1], [NAN, 1]],), [True, True, False]),
]


def test_an_element_breaks_where_its_own_operands_do_not():
  inputs = [[jnp.asarray(x, jnp.float32) for x in args] for _, args, _ in BIRTHS]
  steps = [body(fn, *args).steps[-1] for (fn, *_), args in zip(BIRTHS, inputs, strict=True)]

  def all_births(inputs):
    results = [fn(*args) for (fn, *_), args in zip(BIRTHS, inputs, strict=True)]
    return [newly_nonfinite(*each, [y]) for *each, y in zip(steps, inputs, results, strict=True)]

  for found, (*_, wanted) in zip(jax.jit(all_births)(inputs), BIRTHS, strict=True):
    np.testing.assert_array_equal(*found.values(), wanted)


BEYOND = jnp.asarray([5])

CAN_BREAK = {
  "a cast to float16": (lambda x: x.astype(jnp.float16), "float32"),
  "a cast to bfloat16": (lambda x: x.astype(jnp.bfloat16), "float32"),
  "an index that fills in NaN": (lambda x: jnp.take(x, BEYOND, mode="fill"), "float32"),
  "a cast of integers": (lambda x: x.astype(jnp.float16), "int32"),
}
NEVER = {
  "a cast to float32": (lambda x: x.astype(jnp.float32), "float16"),
  "a cast of small integers": (lambda x: x.astype(jnp.float16), "int8"),
  "tanh": (jnp.tanh, "float32"),
  "argsort": (jnp.argsort, "float32"),
  "reversed": (lambda x: x[::-1], "float32"),
  "an index that is clipped": (lambda x: jnp.take(x, BEYOND, mode="clip"), "float32"),
}


@pytest.mark.parametrize(("fn", "dtype"), CAN_BREAK.values(), ids=CAN_BREAK)
def test_what_can_break(fn, dtype):
  assert any(map(can_break, body(fn, jnp.ones(3, dtype)).steps))


@pytest.mark.parametrize(("fn", "dtype"), NEVER.values(), ids=NEVER)
def test_what_cannot_break(fn, dtype):
  assert not any(map(can_break, body(fn, jnp.ones(3, dtype)).steps))
