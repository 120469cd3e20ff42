"""All devices decide alike: by `axis_name` in a shard_map, and by the partitioner.

`test_sharded_training.py` trains with `make_train_step` for 200 steps with faults, in all ways.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

DEVICES = 4
CONFIG = {"init_scale": 16.0}
TX = mpjax.loss_scaling(
  optax.sgd(0.5, momentum=0.5), mpjax.DynamicLossScale(**CONFIG), axis_name="data"
)
ALONE = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), mpjax.DynamicLossScale(**CONFIG))
AUTO = jax.sharding.AxisType.Auto


@pytest.mark.case("B129", "I6")
@pytest.mark.parametrize("how", ["automatic", "shard_map"])
def test_sharded_parameters_a_nan_on_one_device_skips_everywhere(devices, how):
  # No averaging here: each device owns a part, and only the flag has to travel.
  mesh = jax.make_mesh((DEVICES,), ("data",), (AUTO,), devices=devices)
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  params = jax.device_put(jnp.ones(8), sharding)
  tx = TX if how == "shard_map" else ALONE
  state = tx.init(params)
  spec = jax.tree.map(lambda x: jax.P("data") if x.shape else jax.P(), state)

  def update(grads, state, params):
    return tx.update(grads, state, params)

  if how == "shard_map":
    update = jax.shard_map(
      update,
      mesh=mesh,
      in_specs=(jax.P("data"), spec, jax.P("data")),
      out_specs=(jax.P("data"), spec),
    )
  update = jax.jit(update)
  for position in (0, 5, 7):
    grads = jax.device_put(jnp.ones(8).at[position].set(jnp.nan), sharding)
    updates, after = update(grads, state, params)
    assert not np.any(updates)
    assert mpjax.loss_scaling_metrics(after)["loss_scale"] == 8
    assert jax.tree.leaves(after.inner_state)[0].tolist() == [0] * 8
  updates, after = update(jax.device_put(jnp.ones(8), sharding), state, params)
  assert np.all(np.asarray(updates) < 0)


@pytest.mark.case("B126", "A51")
def test_two_axes_and_check_updates(devices):
  mesh = jax.make_mesh((2, 2), ("x", "y"), (AUTO, AUTO), devices=devices)
  tx = mpjax.loss_scaling(
    optax.scale(3e38), mpjax.StaticLossScale(1), axis_name=("x", "y"), check_updates=True
  )

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(jax.P(), jax.P("x", "y")),
    out_specs=(jax.P("x", "y"), jax.P()),
  )
  def update(state, grads):
    updates, state = tx.update(grads, state)
    return updates, mpjax.loss_scaling_metrics(state)

  for value, bad_updates in ((2.0, 1), (np.nan, 0)):
    grads = jnp.zeros((2, 2)).at[1, 0].set(value)
    updates, metrics = update(tx.init(jnp.zeros(())), grads)
    assert not np.any(updates)
    assert (metrics["skipped"], metrics["bad_updates"]) == (1, bad_updates)
