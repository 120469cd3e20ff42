"""Wrappers of optax optimizers, and the functions that read their state."""

from mpjax.transforms._accumulation import accumulate
from mpjax.transforms._apply_updates import apply_updates
from mpjax.transforms._check_loss_scaling import check_loss_scaling
from mpjax.transforms._loss_scale_access import scale_loss, set_loss_scale, unscale
from mpjax.transforms._loss_scaling import loss_scaling
from mpjax.transforms._master_weights import master_params, master_weights, set_master_params
from mpjax.transforms._progress import check_progress, commit, loss_scaling_metrics
from mpjax.transforms._value_and_grad import value_and_grad

__all__ = [
  "accumulate",
  "apply_updates",
  "check_loss_scaling",
  "check_progress",
  "commit",
  "loss_scaling",
  "loss_scaling_metrics",
  "master_params",
  "master_weights",
  "scale_loss",
  "set_loss_scale",
  "set_master_params",
  "unscale",
  "value_and_grad",
]
