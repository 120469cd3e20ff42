"""The states of the transformations of optimizers, for code that looks into an optimizer state.

>>> import jax.numpy as jnp, mpjax, optax
>>> isinstance(mpjax.loss_scaling(optax.sgd(0.1)).init(jnp.ones(2)), mpjax.states.LossScalingState)
True
"""

from mpjax._optim.loss_scale import AccumulationState, LossScalingState
from mpjax._optim.masters import MasterWeightsState
from mpjax._optim.metrics import MonitorState

__all__ = ["AccumulationState", "LossScalingState", "MasterWeightsState", "MonitorState"]
