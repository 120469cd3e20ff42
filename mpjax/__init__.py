"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

import importlib
from typing import TYPE_CHECKING, Any

from mpjax._autocast import autocast
from mpjax._conversion_report import ConversionReport, LeafReport, conversion_report
from mpjax._errors import (
  MpjaxError,
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
)
from mpjax._full_precision import full_precision
from mpjax._loss_scale_config import DynamicLossScale, NoLossScale, StaticLossScale
from mpjax._named_arrays import to_arrays
from mpjax._op_lists import OpLists
from mpjax._policy import Policy
from mpjax._rules import Rule, default_rules
from mpjax._tree import all_finite
from mpjax.conversion import convert
from mpjax.levels import OptLevel, opt_level
from mpjax.training import TrainState, make_train_step
from mpjax.transforms import (
  accumulate,
  apply_updates,
  check_loss_scaling,
  check_progress,
  commit,
  loss_scaling,
  loss_scaling_metrics,
  master_params,
  master_weights,
  scale_loss,
  set_loss_scale,
  set_master_params,
  unscale,
  value_and_grad,
)

if TYPE_CHECKING:
  from mpjax import linen, nnx
  from mpjax.checkpoints import restore_like

__version__ = "0.1.0"

__all__ = [
  "ConversionReport",
  "DynamicLossScale",
  "LeafReport",
  "MpjaxError",
  "MpjaxRuntimeError",
  "MpjaxTypeError",
  "MpjaxValueError",
  "NoLossScale",
  "OpLists",
  "OptLevel",
  "Policy",
  "Rule",
  "StaticLossScale",
  "TrainState",
  "UnmatchedRuleError",
  "accumulate",
  "all_finite",
  "apply_updates",
  "autocast",
  "check_loss_scaling",
  "check_progress",
  "commit",
  "conversion_report",
  "convert",
  "default_rules",
  "full_precision",
  "linen",
  "loss_scaling",
  "loss_scaling_metrics",
  "make_train_step",
  "master_params",
  "master_weights",
  "nnx",
  "opt_level",
  "restore_like",
  "scale_loss",
  "set_loss_scale",
  "set_master_params",
  "to_arrays",
  "unscale",
  "value_and_grad",
]

_ON_FIRST_USE = {"linen": "linen", "nnx": "nnx", "restore_like": "checkpoints"}
"""Names by module, of those that import Flax or Orbax, which others need not wait for."""


def __getattr__(name: str) -> Any:
  if name not in _ON_FIRST_USE:
    raise AttributeError(f"module 'mpjax' has no attribute {name!r}")
  module = importlib.import_module(f"mpjax.{_ON_FIRST_USE[name]}")
  return getattr(module, name, module)


def __dir__() -> list[str]:
  return sorted([*__all__, "__version__"])
