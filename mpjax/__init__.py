"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

import importlib
from typing import TYPE_CHECKING, Any

from mpjax._errors import (
  MpjaxError,
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
)
from mpjax._loss_scale_config import DynamicLossScale, NoLossScale, StaticLossScale
from mpjax._policy import Policy
from mpjax._rules import Rule, default_rules
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

if TYPE_CHECKING:
  from mpjax import linen

__version__ = "0.1.0"

__all__ = [
  "DynamicLossScale",
  "MpjaxError",
  "MpjaxRuntimeError",
  "MpjaxTypeError",
  "MpjaxValueError",
  "NoLossScale",
  "Policy",
  "Rule",
  "StaticLossScale",
  "UnmatchedRuleError",
  "all_finite",
  "check_progress",
  "commit",
  "default_rules",
  "linen",
  "loss_scaling",
  "loss_scaling_metrics",
  "scale_loss",
  "set_loss_scale",
  "unscale",
  "value_and_grad",
]

_ON_FIRST_USE = ("linen",)
"""Folders that import Flax, which a user of the rest need not wait for."""


def __getattr__(name: str) -> Any:
  if name in _ON_FIRST_USE:
    return importlib.import_module(f"mpjax.{name}")
  raise AttributeError(f"module 'mpjax' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *_ON_FIRST_USE})
