"""Numbers that are known before a function runs, and what low precision makes of them."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._diagnostics.audit.graph import Graph
from mpjax._diagnostics.audit.numbers import lost_number

X = jax.ShapeDtypeStruct((4,), "float32")
TABLE = np.array([1e-9, 2.0, -7e4], np.float32)


def lost(fn, dtype="float16"):
  graph = Graph(jax.make_jaxpr(fn)(X), ["x"])
  return lost_number(graph.results[0], np.dtype(dtype))


FILLED = {
  "literal": lambda x: jnp.full((4,), -1e9),
  "selected": lambda x: jnp.where(x > 0, x, -1e9),
  "joined": lambda x: jnp.concatenate([x, jnp.full((2, 2), -1e9).reshape(-1)]),
  "transposed": lambda x: jnp.full((4, 2), -1e9).T,
}


def test_numbers_are_followed_through_what_only_moves_them():
  for name, fn in FILLED.items():
    assert lost(fn) == "-1e+09 becomes -inf", name
    assert lost(fn, jnp.bfloat16) is None


def test_results_of_arithmetic_are_not_known():
  assert lost(lambda x: x) is None
  assert lost(lambda x: x * 1e9) is None
  assert lost(lambda x: jnp.where(x > 0, x, -jnp.inf)) is None


def test_of_a_constant_the_largest_counts():
  assert lost(lambda x: jnp.asarray(TABLE)) == "-7e+04 becomes -inf"
  assert lost(lambda x: jnp.asarray(TABLE[:2])) is None
  assert lost(lambda x: jnp.asarray(TABLE[:1])) == "1e-09 becomes 0"
