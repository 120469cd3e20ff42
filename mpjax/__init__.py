"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

import importlib
import threading
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
from mpjax._core.rules import Rule
from mpjax._core.trees import all_finite

if TYPE_CHECKING:
  from mpjax import checkpoints, linen, nnx
  from mpjax._diagnostics.audit import Audit, audit
  from mpjax._diagnostics.nonfinite import NonfiniteReport, find_nonfinite
  from mpjax._diagnostics.ranges.measure import ranges
  from mpjax._diagnostics.ranges.ranges_report import GroupRanges, RangesReport
  from mpjax._diagnostics.tune.tune_report import TuneReport
  from mpjax._diagnostics.tune.tuning import tune
  from mpjax._io.conversion import convert
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

__version__ = "0.1.0"

__all__ = [
  "AccumulationState",
  "Audit",
  "DynamicLossScale",
  "Float8",
  "GroupRanges",
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
  "convert",
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

_ON_FIRST_USE = {
  "mpjax._diagnostics.audit": ("Audit", "audit"),
  "mpjax._diagnostics.nonfinite": ("NonfiniteReport", "find_nonfinite"),
  "mpjax._diagnostics.ranges.measure": ("ranges",),
  "mpjax._diagnostics.ranges.ranges_report": ("GroupRanges", "RangesReport"),
  "mpjax._diagnostics.tune.tune_report": ("TuneReport",),
  "mpjax._diagnostics.tune.tuning": ("tune",),
  "mpjax._io.conversion": ("convert",),
  "mpjax._jaxprs.autocast": ("autocast",),
  "mpjax._jaxprs.op_lists": ("OpLists",),
  "mpjax._opt_level": ("OptLevel", "opt_level"),
  "mpjax.transforms": (
    "AccumulationState",
    "LossScalingState",
    "MasterWeightsState",
    "MonitorState",
    "TrainState",
    "accumulate_gradients",
    "apply_updates",
    "check_loss_scaling",
    "check_skipped_steps",
    "last_step_finite",
    "loss_scaling",
    "loss_scaling_metrics",
    "make_train_step",
    "master_params",
    "master_weights",
    "monitor_counts",
    "scale_loss",
    "select_tree",
    "set_loss_scale",
    "set_master_params",
    "state_dtype",
    "unscale",
    "value_and_grad",
  ),
  "mpjax.transforms._loss_scale_config": ("DynamicLossScale", "NoLossScale", "StaticLossScale"),
}
"""The module of each name that is imported when it is first used: these modules import optax, Orbax
or rich, or are large. The imports for type checkers, above, are the same list."""

_MODULE_OF = {name: module for module, names in _ON_FIRST_USE.items() for name in names}
_MODULES = ("checkpoints", "linen", "nnx")

_ONE_AT_A_TIME = threading.RLock()
"""Held while modules are imported. Two threads that import modules of one package, each of which
needs the other's, otherwise see a deadlock or a module that is imported in part: both raise."""


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

  def __getattr__(name: str) -> object:
    if name not in _MODULES and name not in _MODULE_OF:
      raise AttributeError(f"module 'mpjax' has no attribute {name!r}")
    with _ONE_AT_A_TIME:
      module = importlib.import_module(_MODULE_OF.get(name, f"mpjax.{name}"))
    return module if name in _MODULES else getattr(module, name)


def __dir__() -> list[str]:
  return sorted([*__all__, "__version__"])
