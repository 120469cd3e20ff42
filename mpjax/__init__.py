"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

from mpjax._errors import (
  MpjaxError,
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
)
from mpjax._loss_scale_config import DynamicLossScale, NoLossScale, StaticLossScale
from mpjax._tree import all_finite
from mpjax.transforms import (
  check_progress,
  commit,
  loss_scaling,
  loss_scaling_metrics,
  scale_loss,
  set_loss_scale,
  unscale,
  value_and_grad,
)

__version__ = "0.1.0"

__all__ = [
  "DynamicLossScale",
  "MpjaxError",
  "MpjaxRuntimeError",
  "MpjaxTypeError",
  "MpjaxValueError",
  "NoLossScale",
  "StaticLossScale",
  "UnmatchedRuleError",
  "all_finite",
  "check_progress",
  "commit",
  "loss_scaling",
  "loss_scaling_metrics",
  "scale_loss",
  "set_loss_scale",
  "unscale",
  "value_and_grad",
]
