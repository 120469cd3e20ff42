"""All devices decide alike: by `axis_name` in a shard_map, and by the partitioner.

`test_sharded_training.py` trains with `make_train_step` for 200 steps with faults, in all ways.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

AUTO = jax.sharding.AxisType.Auto


@pytest.mark.case("B129", "I6")
@pytest.mark.parametrize("how", ["automatic", "shard_map"])
def test_sharded_parameters_a_nan_on_one_device_skips_everywhere(devices, how):
  # No averaging here: each device owns a part, and only the flag has to travel.
  mesh = jax.make_mesh((4,), ("data",), (AUTO,), devices=devices)
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  params, axis = jax.device_put(jnp.ones(8), sharding), "data" if how == "shard_map" else None
  scale = mpjax.DynamicLossScale(init_scale=16.0)
  tx = mpjax.loss_scaling(optax.sgd(0.5, momentum=0.5), scale, axis_name=axis)
  state, update = tx.init(params), lambda grads, state, params: tx.update(grads, state, params)
  if axis:
    own = jax.P("data"), jax.tree.map(lambda x: jax.P("data") if x.shape else jax.P(), state)
    specs = {"in_specs": (*own, jax.P("data")), "out_specs": own}
    update = jax.shard_map(update, mesh=mesh, **specs)
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

  def update(state, grads):
    updates, state = tx.update(grads, state)
    return updates, mpjax.loss_scaling_metrics(state)

  specs = {"in_specs": (jax.P(), jax.P("x", "y")), "out_specs": (jax.P("x", "y"), jax.P())}
  update = jax.jit(jax.shard_map(update, mesh=mesh, **specs))
  for value, bad_updates in ((2.0, 1), (np.nan, 0)):
    grads = jnp.zeros((2, 2)).at[1, 0].set(value)
    updates, metrics = update(tx.init(jnp.zeros(())), grads)
    assert not np.any(updates)
    assert (metrics["skipped"], metrics["bad_updates"]) == (1, bad_updates)
