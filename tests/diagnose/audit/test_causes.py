"""Why values are float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnose.audit.causes import Causes
from mpjax._jaxpr.graph import Graph

pytestmark = pytest.mark.standard_promotion

HALF = jax.ShapeDtypeStruct((4, 4), "bfloat16")
SMALL = jax.ShapeDtypeStruct((4, 4), "float32")
UNDER_A_POLICY = frozenset(("parameter", "number", "filled"))


def why(fn, *args, neutral=frozenset()):
  graph = Graph(jax.make_jaxpr(fn)(*args), [f"x{i}" for i in range(len(args))])
  return Causes(graph, frozenset(), neutral).why(graph.results[0])


ARGUMENT = "argument", "x1", False
CAUSES = {
  "through a chain": (lambda x, y: x * jnp.tanh(y.reshape(16).reshape(4, 4)), *ARGUMENT),
  "an array before a number": (lambda x, y: x * np.float32(2) + y, *ARGUMENT),
  "an array before a cast": (lambda x, y: x.astype("float32") * y, *ARGUMENT),
  "astype": (lambda x, y: x.astype("float32"), "cast", "convert_element_type", False),
  "lax": (
    *(lambda x, y: jax.lax.convert_element_type(x, np.dtype("float32")), "cast"),
    *("convert_element_type", False),
  ),
  "a sum": (lambda x, y: x - jnp.sum(x, dtype="float32"), "operation", "reduce_sum", True),
  "a softmax of what is float32": (lambda x, y: jnp.exp(x + y), *ARGUMENT),
  "positions": (lambda x, y: x + jnp.arange(4.0), "operation", "iota", False),
  "integers": (
    *(lambda x, y: x * jnp.argsort(x).astype("float32"), "operation"),
    *("convert_element_type", False),
  ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause(name):
  fn, kind, called, deliberate = CAUSES[name]
  found = why(fn, HALF, SMALL)
  assert found is not None
  cause = (found.kind, found.name, found.deliberate, found.dtype)
  assert cause == (kind, called, deliberate, "float32")
  assert found.source is not None


def test_the_state_of_a_loop():
  def fn(x, y):
    return jax.lax.scan(lambda c, _: (c + x, None), y, length=3)[0]

  found = why(fn, HALF, SMALL)
  assert (found.kind, found.name, found.entry.name) == ("argument", "x1", "add")
  assert why(lambda x, y: y * 2, HALF, SMALL).entry is None
  filled = why(lambda x, y: fn(x, jnp.zeros((4, 4))), HALF, SMALL, neutral=UNDER_A_POLICY)
  assert (filled.kind, filled.name) == ("filled", "float32[4,4] of 0.0")
