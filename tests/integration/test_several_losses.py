"""A scale for each loss: two optimizers, one optimizer of two or three losses, and all around."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.programs import bits

PARAMS = {"w": jnp.asarray([1.0, -0.0, 3.0]), "b": jnp.asarray([-0.5])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_scaling_the_sum_is_all_that_is_added(dtype):
  """And half gradients stay half, as those of one loss: inner has made its state for them."""
  inner = optax.adam(0.1)
  tx = mpjax.loss_scaling(inner, dict.fromkeys("abc", mpjax.NoLossScale()))
  params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
  state, plain_state = tx.init(params), inner.init(params)
  grads = {"a": params, "b": jax.tree.map(lambda p: p + 1, params), "c": params}
  updates, new = tx.update(grads, state, params, loss=jnp.nan)
  total = jax.tree.map(
    lambda *g: jnp.asarray(sum(np.asarray(x, np.float32) for x in g), dtype), *grads.values()
  )
  expected, expected_state = inner.update(total, plain_state, params)
  assert bits((updates, new.inner_state)) == bits((expected, expected_state))
  assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
  for name in "abc":
    found = mpjax.loss_scaling_metrics(new, name=name)
    assert (found["loss_scale"], found["finite"], found["total"]) == (1, True, 0)
  if dtype == "float32":
    program = jax.make_jaxpr(lambda g, s, p: tx.update(g, s, p)[0])(grads, state, params)
    ours = jax.make_jaxpr(
      lambda g, s, p: inner.update(jax.tree.map(lambda a, b, c: a + b + c, *g.values()), s, p)[0]
    )(grads, plain_state, params)
    assert str(program) == str(ours)
  grads["b"]["w"] = None
  assert not mpjax.loss_scaling_metrics(new, name="a")["skipped"]
  tx.update(grads, state, params)


def test_integers_and_line_searches_without_scaling():
  params = {"w": jnp.ones(2), "n": jnp.arange(2)}
  seen = []

  def update(updates, state, params=None, *, grad=None, **extra_args):
    seen.append((updates, grad))
    return updates, state

  inner = optax.GradientTransformationExtraArgs(lambda p: optax.EmptyState(), update)
  tx = mpjax.loss_scaling(inner, dict.fromkeys("ab", mpjax.NoLossScale()))
  nothing = np.zeros(2, jax.dtypes.float0)
  grads = {"a": {"w": jnp.ones(2), "n": nothing}, "b": {"w": jnp.ones(2), "n": nothing}}
  updates, _ = tx.update(grads, tx.init(params), params, grad=grads)
  for tree in (updates, *seen[0]):
    assert tree["w"].tolist() == [2, 2]
    assert tree["n"] is nothing
