"""The state of `loss_scaling` goes through flax's and orbax's checkpoints like any optax state."""

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint
import pytest

import mpjax

PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
CONFIG = mpjax.DynamicLossScale(init_scale=64, growth_interval=3, hysteresis=2)
TX = mpjax.loss_scaling(optax.adam(0.1), CONFIG)


def after(flags, state=None):
  state = TX.init(PARAMS) if state is None else state
  for flag in flags:
    grads = jax.tree.map(lambda p, f=flag: jnp.ones_like(p) * (1.0 if f else jnp.nan), PARAMS)
    _, state = TX.update(grads, state, PARAMS)
  return state


def by_flax(state, target, tmp_path):
  return flax.serialization.from_bytes(target, flax.serialization.to_bytes(state))


def by_orbax(state, target, tmp_path):
  with orbax.checkpoint.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    return checkpointer.restore(tmp_path / "state", target)


@pytest.mark.case("A49", "A58", "A39", "A40", "A64")
@pytest.mark.parametrize("through", [by_flax, by_orbax])
def test_only_a_state_of_the_same_configuration_restores(through, tmp_path):
  # Whatever its start; also one without a scale.
  adam = optax.adam(0.1)
  for number, other in enumerate((mpjax.DynamicLossScale(), mpjax.StaticLossScale(64))):
    (tmp_path / str(number)).mkdir()
    target = mpjax.loss_scaling(adam, other).init(PARAMS)
    with pytest.raises((ValueError, KeyError)):
      through(after([1]), target, tmp_path / str(number))
  start = mpjax.DynamicLossScale(init_scale=2, growth_interval=3, hysteresis=2)
  target = mpjax.loss_scaling(adam, start).init(PARAMS)
  (tmp_path / "start").mkdir()
  restored = through(after([0, 0]), target, tmp_path / "start")
  assert mpjax.loss_scaling_metrics(restored)["loss_scale"] == 32
  tx = mpjax.loss_scaling(adam, mpjax.NoLossScale())
  restored = through(tx.init(PARAMS), tx.init(PARAMS), tmp_path)
  assert jax.tree.structure(restored) == jax.tree.structure(tx.init(PARAMS))
