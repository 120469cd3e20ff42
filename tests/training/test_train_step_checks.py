"""What a step refuses before it is traced. The arguments' own errors are in test_train_step.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.training._train_step_checks import check_call, check_dtypes
from tests.errors import check_error


def loss_fn(params, model_state, batch, rng):
  return jnp.mean((batch @ params.astype(batch.dtype)) ** 2), (model_state, {})


@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*stored in half")
def test_moments_that_would_change_their_dtype():
  """Without a scale the optimizer sees half parameters as they are, and float32 gradients."""
  tx = mpjax.loss_scaling(optax.adam(0.5), mpjax.NoLossScale())
  state = mpjax.TrainState.create(jnp.ones(3, jnp.bfloat16), tx)
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    mpjax.make_train_step(loss_fn, tx)(state, jnp.ones((2, 3)))
  check_error(
    excinfo,
    where="mpjax.make_train_step(tx): the state of the optimizer",
    expected="dtypes that it had before the step",
    got="float32[3] for bfloat16[3]",
    fix="mpjax.master_weights",
    builtin=ValueError,
  )


def test_a_state_of_the_same_kind_is_left_alone():
  state = {"mu": jnp.ones(3), "count": jnp.int32(0)}
  check_dtypes(jax.tree.map(lambda x: x + x, state), state)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_rows_of_a_micro_batch_fill_the_devices_that_their_type_names(devices, axis_type):
  """With automatic axes the type does not say where the rows are."""
  mesh = jax.make_mesh((4,), ("data",), (axis_type,), devices=devices[:4])
  tx = mpjax.loss_scaling(optax.sgd(0.5), mpjax.StaticLossScale(8))
  state = mpjax.TrainState.create(jnp.ones(3), tx)
  batch = jax.device_put(np.ones((8, 3), np.float32), jax.NamedSharding(mesh, jax.P("data")))

  def check(batch):
    check_call(state, batch, 4, 0, None, "nearest")
    return batch

  if axis_type == jax.sharding.AxisType.Auto:
    jax.eval_shape(check, batch)
    return
  with pytest.raises(mpjax.MpjaxError) as excinfo:
    jax.eval_shape(check, batch)
  check_error(
    excinfo,
    where="mpjax.make_train_step(accumulate=4): step(batch)",
    expected="fills all devices",
    got="shape [8, 3] at the root",
    fix="Choose a batch size that is a multiple",
    builtin=ValueError,
  )
