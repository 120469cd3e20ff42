"""Why a value is float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._diagnostics.audit.causes import Causes, better_low
from mpjax._jaxprs.graph import Graph

pytestmark = pytest.mark.standard_promotion

HALF = jax.ShapeDtypeStruct((4, 4), "bfloat16")
WIDE = jax.ShapeDtypeStruct((4, 4), "float32")
BY_HAND = frozenset()
UNDER_A_POLICY = frozenset(("parameter", "number"))


def why(fn, *args, neutral=BY_HAND, parameters=frozenset()):
  graph = Graph(jax.make_jaxpr(fn)(*args), [f"x{i}" for i in range(len(args))])
  causes = Causes(graph, frozenset(parameters), frozenset(neutral))
  return causes.why(graph.results[0])


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


def test_the_cause():
  for name, (fn, kind, called, deliberate) in CAUSES.items():
    found = why(fn, HALF, WIDE)
    assert found is not None
    cause = (found.cause.kind, found.cause.name, found.deliberate, found.cause.dtype)
    assert cause == (kind, called, deliberate, "float32"), name
    assert found.cause.source is not None


def test_under_a_policy_parameters_and_numbers_decide_nothing():
  def norm(x, scale):
    return x * jnp.sum(x, dtype="float32") * scale

  by_hand = why(norm, HALF, WIDE, parameters={"x1"})
  policied = why(norm, HALF, WIDE, parameters={"x1"}, neutral=UNDER_A_POLICY)
  assert by_hand.cause.kind == "parameter"
  assert policied.deliberate
  assert policied.cause.name == "reduce_sum"


def test_the_state_of_a_loop():
  def fn(x, y):
    return jax.lax.scan(lambda c, _: (c + x, None), y, length=3)[0]

  found = why(fn, HALF, WIDE)
  assert (found.cause.kind, found.cause.name, found.entry.name) == ("argument", "x1", "add")
  assert why(lambda x, y: y * 2, HALF, WIDE).entry is None
  filled = why(lambda x, y: fn(x, jnp.zeros((4, 4))), HALF, WIDE, neutral=UNDER_A_POLICY)
  assert "filled with 0.0" in filled.cause.name
  assert filled.neutral


def test_what_would_better_be_in_low_precision():
  def fn(x, y):
    logits, hidden = x + y, x * y
    return jnp.exp(logits), hidden.astype("bfloat16")

  graph = Graph(jax.make_jaxpr(fn)(HALF, WIDE), ["x", "y"])
  causes = Causes(graph, frozenset(), BY_HAND)
  results = {each.name: each.results[0] for each in graph.computing()}
  low = better_low(graph, causes, ())
  assert results["mul"] in low
  assert results["add"] not in low
  assert results["add"] in better_low(graph, causes, [results["add"]])
