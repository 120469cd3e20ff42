"""Wrappers of optax optimizers, and the functions that read their state."""

from mpjax.transforms._loss_scale_access import scale_loss, set_loss_scale, unscale
from mpjax.transforms._loss_scaling import loss_scaling
from mpjax.transforms._progress import check_progress, commit, loss_scaling_metrics
from mpjax.transforms._value_and_grad import value_and_grad

__all__ = [
  "check_progress",
  "commit",
  "loss_scaling",
  "loss_scaling_metrics",
  "scale_loss",
  "set_loss_scale",
  "unscale",
  "value_and_grad",
]
