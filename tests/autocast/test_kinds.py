"""The rules of precision for programs that nobody wrote: drawn from operations of each kind."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import Literal

import mpjax
from mpjax._jaxpr.graph import Graph
from tests import programs
from tests.models.values import normal

X, W = normal(4, 4), normal(4, 4, seed=1)

# Matmuls, operations of the float32 list, sums, products, choices, moves and what keeps its dtype.
# Numbers stay in the range of float16.
UNARY = (
  lambda x, w: x @ w,
  lambda x, w: jnp.exp(jnp.tanh(x)),
  lambda x, w: jnp.broadcast_to(jnp.mean(x, 0, keepdims=True), x.shape),
  lambda x, w: x + 0.3,
  lambda x, w: 1 - x,
  lambda x, w: x * 0.3,
  lambda x, w: jnp.sqrt(jnp.abs(x) + 0.5),
  lambda x, w: jnp.tanh(x) * jnp.tanh(x),
  lambda x, w: jax.nn.softmax(x),
  lambda x, w: jnp.maximum(x, 0.1),
  lambda x, w: x[::-1].T,
  lambda x, w: jnp.sort(x, -1),
  lambda x, w: lax.reduce_max(x, axes=(0,))[None] + jnp.zeros((4, 4)),
)
BINARY = (
  lambda x, y: x + y,
  lambda x, y: x - y,
  lambda x, y: jnp.tanh(x) * y,
  lambda x, y: x / (2 + jnp.abs(y)),
  lambda x, y: jnp.where(x > y, x, y),
  lambda x, y: jnp.concatenate([x, y])[2:6],
  lambda x, y: x * y[:1],
  lambda x, y: x.at[1].set(y[0]),
)
# An operation, and which of the values so far it takes: data, a parameter, what a matmul returns.
STEP = st.tuples(
  st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 20), st.integers(0, 20)
)
STEPS = st.lists(STEP, min_size=1, max_size=6)


def extended(values: list[Any], steps: list[tuple[int, int, int]], w: Any) -> list[Any]:
  """Returns values, and the results of some steps from them."""
  values = list(values)
  for number, first, second in steps:
    x, y = values[-1 - first % len(values)], values[-1 - second % len(values)]
    if number < len(UNARY):
      values.append(UNARY[number](x, w))
    else:
      values.append(BINARY[number - len(UNARY)](x, y))
  return values


def inline(fun, values):
  return fun(*values)


def in_scope(fun, values):
  with jax.named_scope("helper"):
    return fun(*values)


def in_jit(fun, values):
  return jax.jit(fun)(*values)


def in_scan(fun, values):
  # The first two are scanned over, the others are constants of the body.
  rows = [x[None] for x in values[:2]]
  return lax.scan(lambda _, rows: (None, fun(*rows, *values[2:])), None, rows)[1][0]


WAYS = {"inline": inline, "scope": in_scope, "jit": in_jit, "scan": in_scan}


def evaluated(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
  """Evaluates a jaxpr operation by operation, so that no compiler joins two of them."""
  env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

  def read(atom: Any) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]

  for eqn in jaxpr.eqns:
    operands = [read(atom) for atom in eqn.invars]
    found = [eqn.params.get(key) for key in ("jaxpr", "call_jaxpr") if key in eqn.params]
    if eqn.primitive.name == "scan":
      first, count = programs.parts_of_scan(eqn)
      body = found[0]
      operands = [x if i < first + count else x[0] for i, x in enumerate(operands)]
      results = evaluated(body.jaxpr, body.consts, operands)
      results = [x if i < count else x[None] for i, x in enumerate(results)]
    elif found:
      inner = found[0]
      closed = getattr(inner, "consts", ())
      results = evaluated(getattr(inner, "jaxpr", inner), closed, operands)
    else:
      results = eqn.primitive.bind(*operands, **eqn.params)
      results = results if eqn.primitive.multiple_results else [results]
    env.update(zip(eqn.outvars, results, strict=True))
  return [read(atom) for atom in jaxpr.outvars]


@pytest.mark.standard_promotion
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@given(before=STEPS, after=STEPS)
def test_a_boundary_changes_no_bit(half, before, after):
  # The second half of a program inlined, in a scope, in a `jit`, and in a `scan` of length 1.
  def program(way):
    def fun(w, x):
      values = extended([x, w, x @ w], before, w)

      def rest(*values):
        return extended(list(values), after, values[1])[-1]

      return WAYS[way](rest, values)

    return fun

  found = {}
  for way in WAYS:
    made = jax.make_jaxpr(mpjax.autocast(program(way), half, data_argnums=1))(W, X)
    found[way] = np.asarray(evaluated(made.jaxpr, made.consts, (W, X))[0])
  for way, got in found.items():
    np.testing.assert_array_equal(got, found["inline"], err_msg=way)


def casts_for_some(graph: Graph) -> list[str]:
  """Returns the casts to low precision of what is read in float32 too, other than by a matmul."""
  # A parameter, and what is moved or computed of parameters alone, may be rounded for a sum with
  # what is rounded itself.
  params, wrong = set(graph.arguments[:1]), []
  for each in graph.operations:
    if all(v.kind == "literal" or v in params for v in each.operands):
      params |= set(each.results)
  for each in graph.operations:
    source, result = each.operands[0], each.results[0]
    if not (each.casts and source.is_wide and result.is_low) or source.kind == "literal":
      continue
    by = {reader.name for reader in result.consumers}
    if source in params or by <= {"dot_general"}:
      continue
    if len(source.consumers) > 1:
      wrong.append(f"{source.aval.str_short()} is rounded for {sorted(by)}")
    if source in graph.arguments:
      wrong.append(f"data is rounded for {sorted(by)}")
  return wrong


@pytest.mark.standard_promotion
@example(steps=[(0, 0, 0), (0, 0, 0), (11, 0, 0), (0, 0, 0), (1, 9, 0)])
@given(steps=STEPS)
def test_what_is_held_in_float32_is_rounded_for_matmuls_alone_or_for_all(steps):
  def fun(w, x):
    return extended([x, w, x @ w], steps, w)[-1]

  made = jax.make_jaxpr(mpjax.autocast(fun, "mixed_bfloat16", data_argnums=1))(W, X)
  assert casts_for_some(Graph(made)) == []
