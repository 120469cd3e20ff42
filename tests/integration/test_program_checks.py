"""The checks of a program find what they are there to find, and nothing in a good program."""

import jax
import jax.numpy as jnp
import pytest

from tests import programs
from tests.autocast import checks
from tests.autocast.rig import BODIES

pytestmark = pytest.mark.standard_promotion

X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def half(x):
  return x.astype(jnp.bfloat16)


def full(x):
  return x.astype(jnp.float32)


def read_by_all(x):
  # Adds up the derivative with respect to `x` over the steps of a scan.
  return jax.lax.scan(lambda c, row: (c, row @ x), 0.0, jnp.ones((3, 4), x.dtype))[1].sum()


OPERATIONS = {
  "exp": jnp.exp,
  "pow": lambda x: x**1.5,
  "reduce_sum": lambda x: x + jax.lax.reduce_sum(x, (0, 1)),
  "cumsum": lambda x: jax.lax.cumsum(x, 0),
  "scatter-add": lambda x: x.at[jnp.array([0, 0])].add(x[:2]),
  "scatter-mul": lambda x: x.at[0].mul(x[1]),
  "sum over the steps of a scan": lambda x: x + jax.grad(read_by_all)(x),
}


@pytest.mark.parametrize("body", BODIES)
def test_half_sums_and_operations_of_the_float32_list_are_found_wherever_they_are(body):
  found = {checks.halves_of_float32: set(), checks.sums: set()}
  for name, operation in OPERATIONS.items():
    fun = BODIES[body](operation)
    for check, names in found.items():
      assert check(jax.make_jaxpr(fun)(X)) == [], name
      texts = check(jax.make_jaxpr(lambda x, fun=fun: fun(half(x)))(X))
      assert {text.partition(" of bfloat16")[0] for text in texts} <= {name}
      names.update({name} if texts else ())
  assert found[checks.halves_of_float32] == OPERATIONS.keys() - {"sum over the steps of a scan"}
  assert found[checks.sums] == OPERATIONS.keys() - {"exp", "pow", "scatter-mul"}


def at_each_use(w):
  # A parameter is cast at each of its uses, and one branch of two runs.

  def step(c, row):
    return full(half(c) @ half(w)) @ full(half(w).T), half(row[None]) + half(row[None])

  branch = jax.lax.cond(w[0, 0] > 0, lambda z: half(z) * 2, half, w)
  return jax.lax.scan(step, w, w)[0], half(w), half(w).T, branch, w.astype(jnp.float16)


def called(x):
  # A function that is called casts for itself.
  inner = jax.jit(lambda z: jnp.tanh(half(z)))
  return (lambda y: inner(y) + inner(y) + half(y))(jnp.exp(x))


BACK = "there and back: float32 -> bfloat16 -> float32 -> bfloat16"
TWICE = "2 times float32 -> bfloat16"
CASTS = {
  # name: a function, and the wasted casts in it.
  "at each use": (at_each_use, []),
  "called": (called, []),
  "over a call": (lambda x: jax.jit(lambda y: jnp.tanh(half(y)))(full(half(x))), [BACK]),
  "twice": (lambda x: (lambda y: half(y) @ half(y))(jnp.exp(x @ x)), [TWICE]),
}


@pytest.mark.parametrize(("fun", "wasted"), CASTS.values(), ids=CASTS)
def test_wasted_casts_are_found_and_no_others(fun, wasted):
  program = jax.make_jaxpr(fun)(X)
  assert checks.wasted_casts(program) == wasted
  assert wasted or checks.sums(program) == []
  assert programs.converts(program)


def test_a_product_and_an_output_in_another_type_are_named():
  def mixed(x):
    return jax.lax.dot(half(x), x, preferred_element_type=jnp.float32)

  found = checks.halves(jax.make_jaxpr(mixed)(X), "bfloat16")
  assert found == ["dot_general of bfloat16[4,4], float32[4,4]"]
  low = jax.make_jaxpr(lambda x: half(x) @ half(x))(X)
  assert [len(checks.halves(low, dtype)) for dtype in programs.HALF] == [0, 1]
  plain = lambda x: {"a": x, "b": x}  # noqa: E731
  for fun, wrong in (
    (plain, ""),
    (lambda x: {"a": x, "b": half(x)}, "['b']: bfloat16(4, 4)"),
    (lambda x: [x, x], "PyTreeDef([*, *])"),
  ):
    found = checks.changed_outputs(fun, plain, X)
    assert "".join(found).startswith(wrong)
    assert len(found) == bool(wrong)
