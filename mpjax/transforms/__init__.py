"""Wrappers of optax optimizers, the functions that read their state, and the training step."""

from mpjax.transforms._accumulation import accumulate_gradients
from mpjax.transforms._apply_updates import apply_updates
from mpjax.transforms._atomic_step import atomic_step
from mpjax.transforms._check_loss_scaling import check_loss_scaling
from mpjax.transforms._loss_scale import (
  AccumulationState,
  DynamicLossScale,
  LossScalingState,
  NoLossScale,
  StaticLossScale,
  set_loss_scale,
)
from mpjax.transforms._loss_scaling import loss_scaling
from mpjax.transforms._masters import (
  MasterWeightsState,
  master_params,
  master_weights,
  set_master_params,
)
from mpjax.transforms._metrics import (
  MonitorState,
  check_skipped_steps,
  last_step_finite,
  loss_scaling_metrics,
  monitor,
  monitor_counts,
  select_tree,
)
from mpjax.transforms._state_dtype import state_dtype
from mpjax.transforms._train_state import TrainState
from mpjax.transforms._train_step import make_train_step
from mpjax.transforms._value_and_grad import scale_loss, unscale, value_and_grad

__all__ = [
  "AccumulationState",
  "DynamicLossScale",
  "LossScalingState",
  "MasterWeightsState",
  "MonitorState",
  "NoLossScale",
  "StaticLossScale",
  "TrainState",
  "accumulate_gradients",
  "apply_updates",
  "atomic_step",
  "check_loss_scaling",
  "check_skipped_steps",
  "last_step_finite",
  "loss_scaling",
  "loss_scaling_metrics",
  "make_train_step",
  "master_params",
  "master_weights",
  "monitor",
  "monitor_counts",
  "scale_loss",
  "select_tree",
  "set_loss_scale",
  "set_master_params",
  "state_dtype",
  "unscale",
  "value_and_grad",
]
