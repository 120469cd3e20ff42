"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from mpjax._core.errors import (
  MpjaxAssertionError,
  MpjaxError,
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
)
from mpjax._core.float8 import Float8
from mpjax._core.full_precision import full_precision
from mpjax._core.policy import Policy
from mpjax._core.rules import Rule, default_rules
from mpjax._core.trees import all_finite
from mpjax._diagnostics.audit import Audit, audit
from mpjax._diagnostics.nonfinite import NonfiniteReport, find_nonfinite
from mpjax._diagnostics.ranges.measure import ranges
from mpjax._diagnostics.ranges.ranges_report import GroupRanges, RangesReport
from mpjax._diagnostics.tune.tune_report import TuneReport
from mpjax._diagnostics.tune.tuning import tune
from mpjax._io.conversion import convert
from mpjax._io.conversion_report import ConversionReport, LeafReport, conversion_report
from mpjax._jaxprs.autocast import autocast
from mpjax._jaxprs.op_lists import OpLists
from mpjax._opt_level import OptLevel, opt_level
from mpjax.transforms import (
  AccumulationState,
  LossScalingState,
  MasterWeightsState,
  MonitorState,
  TrainState,
  accumulate_gradients,
  apply_updates,
  check_loss_scaling,
  check_skipped_steps,
  last_step_finite,
  loss_scaling,
  loss_scaling_metrics,
  make_train_step,
  master_params,
  master_weights,
  monitor_counts,
  scale_loss,
  select_tree,
  set_loss_scale,
  set_master_params,
  state_dtype,
  unscale,
  value_and_grad,
)
from mpjax.transforms._loss_scale_config import DynamicLossScale, NoLossScale, StaticLossScale

if TYPE_CHECKING:
  from mpjax import checkpoints, linen, nnx

__version__ = "0.1.0"

__all__ = [
  "AccumulationState",
  "Audit",
  "ConversionReport",
  "DynamicLossScale",
  "Float8",
  "GroupRanges",
  "LeafReport",
  "LossScalingState",
  "MasterWeightsState",
  "MonitorState",
  "MpjaxAssertionError",
  "MpjaxError",
  "MpjaxRuntimeError",
  "MpjaxTypeError",
  "MpjaxValueError",
  "NoLossScale",
  "NonfiniteReport",
  "OpLists",
  "OptLevel",
  "Policy",
  "RangesReport",
  "Rule",
  "StaticLossScale",
  "TrainState",
  "TuneReport",
  "UnmatchedRuleError",
  "accumulate_gradients",
  "all_finite",
  "apply_updates",
  "audit",
  "autocast",
  "check_loss_scaling",
  "check_skipped_steps",
  "checkpoints",
  "conversion_report",
  "convert",
  "default_rules",
  "find_nonfinite",
  "full_precision",
  "last_step_finite",
  "linen",
  "loss_scaling",
  "loss_scaling_metrics",
  "make_train_step",
  "master_params",
  "master_weights",
  "monitor_counts",
  "nnx",
  "opt_level",
  "ranges",
  "scale_loss",
  "select_tree",
  "set_loss_scale",
  "set_master_params",
  "state_dtype",
  "tune",
  "unscale",
  "value_and_grad",
]

_ON_FIRST_USE = ("checkpoints", "linen", "nnx")
"""Modules that import Flax or Orbax, which others need not wait for."""


def __getattr__(name: str) -> ModuleType:
  if name not in _ON_FIRST_USE:
    raise AttributeError(f"module 'mpjax' has no attribute {name!r}")
  return importlib.import_module(f"mpjax.{name}")


def __dir__() -> list[str]:
  return sorted([*__all__, "__version__"])
