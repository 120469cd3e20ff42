"""What None for a gradient means where an update is that of several micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

WINDOWS_OF_TWO = {
  "accumulate": lambda inner: mpjax.accumulate_gradients(inner, 2),
  "of a function": lambda inner: mpjax.accumulate_gradients(inner, lambda done: 2),
  "masters": lambda inner: mpjax.master_weights(mpjax.accumulate_gradients(inner, 2)),
  "of masters": lambda inner: mpjax.accumulate_gradients(mpjax.master_weights(inner), 2),
  "chain": lambda inner: optax.chain(optax.clip(9.0), mpjax.accumulate_gradients(inner, 2)),
  "MultiSteps": lambda inner: optax.MultiSteps(inner, 2).gradient_transformation(),
}


@pytest.mark.parametrize("config", [mpjax.StaticLossScale(1), mpjax.NoLossScale(), None], ids=str)
@pytest.mark.parametrize("name", WINDOWS_OF_TWO)
def test_none_in_one_micro_batch_does_not_lose_the_gradient_of_the_window(name, config):
  """Where it was the last one, all that the others had given was thrown away."""
  tx = WINDOWS_OF_TWO[name](optax.sgd(1.0))
  if config is not None:
    tx = mpjax.loss_scaling(tx, config)
  elif name in ("chain", "MultiSteps"):
    tx = mpjax.accumulate_gradients(tx, 1)  # optax by itself raises on None
  half = "masters" in name
  one = jnp.ones(1, jnp.bfloat16 if half else jnp.float32)
  start = {"a": one, "b": one, "z": jnp.ones(1)}
  whole = {"a": one, "b": one, "z": -jnp.zeros(1)}
  update = jax.jit(tx.update)
  for order in ([{**whole, "b": None}, whole], [whole, {**whole, "b": None}]):
    params, state = start, tx.init(start)
    for grads in order:
      updates, state = update(grads, state, params)
      params = optax.apply_updates(params, updates)
    assert {key: x.item() for key, x in params.items()} == {"a": 0, "b": 0.5, "z": 1}
    if half:
      assert mpjax.master_params(state)["b"] == 0.5


def test_a_gradient_of_minus_zero_is_not_taken_for_none():
  tx = mpjax.accumulate_gradients(optax.add_decayed_weights(1.0), 2)
  params = {"w": jnp.ones(2), "z": jnp.ones(1, jnp.complex64)}
  zero = {"w": jnp.asarray([-0.0, 0.0]), "z": -jnp.zeros(1, jnp.complex64)}
  nothing = {"w": None, "z": None}
  update = jax.jit(tx.update)
  for first, wanted in ((zero, 1), (nothing, 0)):
    _, state = update(first, tx.init(params), params)
    updates, state = update(nothing, state, params)
    assert updates["w"].tolist() == [wanted] * 2
    assert updates["z"].tolist() == [wanted]
    for _ in range(2):  # The next window begins anew.
      updates, state = update(nothing, state, params)
    assert np.all(np.signbit(updates["w"]) & (np.asarray(updates["w"]) == 0))
