"""The lists decide: ours unless the user's say otherwise, and nothing is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax import autocast
from mpjax._jaxprs.walk import walk

HALF, F32 = "bfloat16", "float32"
X = jnp.eye(4)


def operands(fn, name, ops, *args):
  """Returns the dtypes of the floating operands of every `name` in the autocast program."""
  program = jax.make_jaxpr(autocast(fn, "bfloat16", ops=ops))(*args)
  return {
    str(atom.aval.dtype)
    for eqn, *_ in walk(program)
    if eqn.primitive.name == name
    for atom in eqn.invars
    if jnp.issubdtype(atom.aval.dtype, jnp.floating)
  }


@pytest.mark.case("A90")
@pytest.mark.parametrize(
  ("name", "fn", "standard", "part", "edited"),
  [
    # A function of a half and a float32 operand; by ours, and by the user's list.
    ("dot_general", lambda h, f: h @ f.T, HALF, "float32", F32),
    ("dot_general", lambda h, f: h @ f.T, HALF, "promote", F32),
    ("dot_general", lambda h, f: h @ f.T, HALF, "opaque", F32),
    ("exp", lambda h, f: jnp.exp(h), F32, "half", HALF),
    ("exp", lambda h, f: jnp.exp(h), F32, "keep", HALF),
    ("exp", lambda h, f: jnp.exp(h), F32, "promote", HALF),
    ("log", lambda h, f: jnp.log(f), F32, "keep", F32),
    ("reduce_sum", lambda h, f: jnp.sum(h), F32, "keep", HALF),
    ("reduce_max", lambda h, f: f.max(0), F32, "half", HALF),
    ("tanh", lambda h, f: jnp.tanh(h), HALF, "float32", F32),
    ("tanh", lambda h, f: jnp.tanh(h), HALF, "opaque", F32),
    ("tanh", lambda h, f: jnp.tanh(h), HALF, "conditional", F32),
    ("add", lambda h, f: h + h, HALF, "float32", F32),
    ("mul", lambda h, f: f * f, F32, "half", HALF),
  ],
)
def test_the_users_list_wins_both_ways(name, fn, standard, part, edited):
  def both(x, w):
    # A product by an operation that stays as it is listed, so that the override is not in it.
    h = jax.lax.conv_general_dilated(x[None], w[:, :, None], (1,), "SAME")[0]
    return fn(h, jax.lax.cumsum(x))

  edit = {name: lambda params: F32} if part == "conditional" else [name]
  for ops, dtype in ((None, standard), (mpjax.OpLists().replace(**{part: edit}), edited)):
    assert operands(both, name, ops, X, X) == {dtype}


@pytest.mark.case("A70")
def test_a_loss_that_is_unsafe_in_half_runs_in_float32():
  # PyTorch refuses binary cross entropy of probabilities: 1 - p is 0 in half above 0.998.
  def loss(x):
    p = jax.nn.sigmoid(8 * (x @ x))
    return -jnp.mean(jnp.log(p) + jnp.log1p(-p))

  for name in ("log", "log1p", "reduce_sum"):
    assert operands(loss, name, None, X) == {F32}, name
  assert np.isfinite(autocast(loss, "mixed_bfloat16")(X))
