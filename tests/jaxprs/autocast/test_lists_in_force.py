"""The lists decide: ours unless the user's say otherwise, and nothing is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import autocast
from mpjax._jaxprs.walk import walk

HALF, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
X = jnp.eye(4)
OPS = mpjax.OpLists()


def operands(fn, name, ops, *args):
  """Returns the dtypes of the floating operands of every `name` in the autocast program."""
  program = jax.make_jaxpr(autocast(fn, "mixed_bfloat16", ops=ops))(*args)
  return [
    atom.aval.dtype
    for eqn, *_ in walk(program)
    if eqn.primitive.name == name
    for atom in eqn.invars
    if jnp.issubdtype(atom.aval.dtype, jnp.floating)
  ]


@pytest.mark.case("A90")
@pytest.mark.parametrize(
  ("name", "fn", "standard", "edit", "edited"),
  [
    ("tanh", lambda x: jnp.tanh(x @ x), HALF, {"float32": ["tanh"]}, F32),
    ("exp", lambda x: jnp.exp(x @ x), F32, {"half": ["exp"]}, HALF),
    ("exp", lambda x: jnp.exp(x @ x), F32, {"keep": ["exp"]}, HALF),
    ("dot_general", lambda x: x @ x, HALF, {"float32": ["dot_general"]}, F32),
    ("dot_general", lambda x: x @ x, HALF, {"opaque": ["dot_general"]}, F32),
    ("reduce_sum", lambda x: jnp.sum(x @ x), F32, {"keep": ["reduce_sum"]}, HALF),
    ("mul", lambda x: (x @ x) * (x @ x), HALF, {"float32": ["mul"]}, F32),
    ("sin", lambda x: jnp.sin(x @ x), F32, {"promote": ["sin"]}, HALF),
    (
      *("tanh", lambda x: jnp.tanh(x @ x), HALF),
      *({"conditional": {"tanh": lambda params: "float32"}}, F32),
    ),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_the_users_list_wins_both_ways(name, fn, standard, edit, edited):
  for ops, dtype in ((None, standard), (OPS.replace(**edit), edited)):
    found = operands(fn, name, ops, X)
    assert found
    assert set(found) == {dtype}


@pytest.mark.case("A70")
def test_a_loss_that_is_unsafe_in_half_runs_in_float32():
  """PyTorch refuses binary cross entropy of probabilities: 1 - p is 0 in half above 0.998."""

  def loss(x):
    p = jax.nn.sigmoid(8 * (x @ x))
    return -jnp.mean(jnp.log(p) + jnp.log1p(-p))

  for name in ("log", "log1p", "reduce_sum"):
    assert set(operands(loss, name, None, X)) == {F32}, name
  assert np.isfinite(autocast(loss, "mixed_bfloat16")(X))
