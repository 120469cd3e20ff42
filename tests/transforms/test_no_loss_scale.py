"""`NoLossScale` is a drop-in: what works with a scale works without one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.programs import bits

BOTH = pytest.mark.parametrize("config", [mpjax.StaticLossScale(1), mpjax.NoLossScale()], ids=str)


@pytest.mark.case("A94")
@BOTH
def test_none_and_integers_and_keys_work_with_a_scale_and_without(config):
  """`NoLossScale` is a drop-in: what a scaled optimizer takes it takes as well."""
  params = {"n": jnp.arange(2), "m": jnp.arange(1), "key": jax.random.key(0), "w": jnp.ones(2)}
  grads = {"n": np.zeros(2, jax.dtypes.float0), "m": None, "key": None, "w": jnp.ones(2)}
  params["none"] = grads["none"] = None
  plain = optax.sgd(0.5, momentum=0.5)
  tx = mpjax.loss_scaling(plain, config)
  state, control = tx.init(params), plain.init(params["w"])
  for _ in range(2):
    updates, state = tx.update(grads, state, params)
    expected, control = plain.update(jnp.ones(2), control, params["w"])
    assert jnp.array_equal(updates["w"], expected)
    params = mpjax.apply_updates(params, updates)
  assert (params["n"].tolist(), params["m"].tolist(), params["none"]) == ([0, 1], [0], None)
  assert jax.random.key_data(params["key"]).tolist() == [0, 0]


@BOTH
@pytest.mark.parametrize("odd", ["none", "integer"])
def test_none_and_integers_work_under_lookahead(odd, config):
  """Without a scale it was a ValueError of jax.tree.map."""
  integer = odd == "integer"
  params = {"w": jnp.ones(2), "b": jnp.arange(2) if integer else None}
  grads = {"w": jnp.ones(2), "b": np.zeros(2, jax.dtypes.float0) if integer else None}
  tx = mpjax.loss_scaling(optax.lookahead(optax.sgd(0.5), 2, 0.5), config)
  both = optax.LookaheadParams.init_synced(params)
  state, update = tx.init(both), jax.jit(tx.update)
  for _ in range(2):
    updates, state = update(grads, state, both)
    both = mpjax.apply_updates(both, updates)
  for part in both:  # Twice by 0.5, and then half way back to where it began.
    assert part["w"].tolist() == [0.5, 0.5]
    assert bits(part["b"]) == bits(params["b"])


@BOTH
@pytest.mark.parametrize("wrap", [lambda tx: tx, mpjax.master_weights], ids=["plain", "masters"])
def test_functions_among_the_parameters_are_left_alone(wrap, config):
  """As in Equinox: the model is the tree, and its gradients are None where it has functions."""
  model = {"activation": jnp.tanh, "w": jnp.ones(2)}
  grads = {"activation": None, "w": jnp.ones(2)}
  tx = wrap(mpjax.loss_scaling(optax.adamw(0.5), config))
  updates, _ = tx.update(grads, tx.init(model | {"activation": None}), model)
  plain = optax.adamw(0.5)
  expected, _ = plain.update(jnp.ones(2), plain.init(jnp.ones(2)), jnp.ones(2))
  assert updates["activation"] is None
  assert jnp.array_equal(updates["w"], expected)
  assert mpjax.apply_updates(model, updates)["activation"] is jnp.tanh
