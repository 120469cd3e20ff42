"""Look into the state of an optimizer, and change it: scales, masters, counts and the inner state.

>>> import jax.numpy as jnp, mpjax, optax
>>> isinstance(mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2)), mpjax.states.LossScalingState)
True
"""

from mpjax._diagnose.monitor import monitor_counts
from mpjax._optim.find_scale import inner_state, set_loss_scale
from mpjax._optim.states import (
  AccumulationState,
  LossScalingState,
  MasterWeightsState,
  MonitorState,
)
from mpjax._optim.wrappers.master_weights import master_params, set_master_params

__all__ = ["AccumulationState", "LossScalingState", "MasterWeightsState", "MonitorState"]
__all__ += ["inner_state", "master_params", "monitor_counts"]
__all__ += ["set_loss_scale", "set_master_params"]
