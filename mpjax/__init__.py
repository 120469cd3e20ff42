"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

import importlib
import threading
import warnings
from typing import TYPE_CHECKING

from mpjax import errors as errors
from mpjax._core.active import full_precision
from mpjax._core.errors import MpjaxError, nearest
from mpjax._core.float8 import Float8
from mpjax._core.policy import Policy
from mpjax._core.rules import Rule
from mpjax._core.trees import all_finite

if TYPE_CHECKING:
  from mpjax import checkpoints as checkpoints
  from mpjax import linen as linen
  from mpjax import nnx as nnx
  from mpjax import reports as reports
  from mpjax import states as states
  from mpjax._compositions import OptLevel, opt_level, value_and_grad, with_policy
  from mpjax._diagnostics.audit.audit_report import audit
  from mpjax._diagnostics.nonfinite.find import find_nonfinite
  from mpjax._diagnostics.ranges.measure import ranges
  from mpjax._diagnostics.tune.tuning import tune
  from mpjax._io.conversion import convert
  from mpjax._jaxprs.autocast import autocast
  from mpjax._jaxprs.op_lists import OpLists
  from mpjax.linen import policy_scope
  from mpjax.transforms._accumulation import accumulate_gradients
  from mpjax.transforms._apply_updates import apply_updates
  from mpjax.transforms._check_loss_scaling import check_loss_scaling
  from mpjax.transforms._loss_scale import (
    DynamicLossScale,
    NoLossScale,
    StaticLossScale,
    set_loss_scale,
  )
  from mpjax.transforms._loss_scaling import loss_scaling
  from mpjax.transforms._masters import master_params, master_weights, set_master_params
  from mpjax.transforms._metrics import (
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
  from mpjax.transforms._value_and_grad import scale_loss, unscale

__version__ = "0.1.0"

__all__ = ["Float8", "OpLists", "Policy", "Rule"]
__all__ += ["autocast", "full_precision", "policy_scope", "with_policy"]
__all__ += ["DynamicLossScale", "NoLossScale", "StaticLossScale", "loss_scaling", "value_and_grad"]
__all__ += ["last_step_finite", "loss_scaling_metrics", "scale_loss", "set_loss_scale", "unscale"]
__all__ += ["master_params", "master_weights", "set_master_params", "state_dtype"]
__all__ += ["accumulate_gradients", "all_finite", "apply_updates", "select_tree"]
__all__ += ["OptLevel", "TrainState", "make_train_step", "opt_level"]
__all__ += ["audit", "find_nonfinite", "monitor", "monitor_counts", "ranges", "tune"]
__all__ += ["MpjaxError", "check_loss_scaling", "check_skipped_steps", "convert"]

_MODULES = ("checkpoints", "errors", "linen", "nnx", "reports", "states")
"""What `import *` leaves out: `errors` and `states` are names that users have themselves."""

_ON_FIRST_USE = {
  "_compositions": "OptLevel opt_level value_and_grad with_policy",
  "_diagnostics.audit.audit_report": "audit",
  "_diagnostics.nonfinite.find": "find_nonfinite",
  "_diagnostics.ranges.measure": "ranges",
  "_diagnostics.tune.tuning": "tune",
  "_io.conversion": "convert",
  "_jaxprs.autocast": "autocast",
  "_jaxprs.op_lists": "OpLists",
  "linen": "policy_scope",
  "transforms._accumulation": "accumulate_gradients",
  "transforms._apply_updates": "apply_updates",
  "transforms._check_loss_scaling": "check_loss_scaling",
  "transforms._loss_scale": "DynamicLossScale NoLossScale StaticLossScale set_loss_scale",
  "transforms._loss_scaling": "loss_scaling",
  "transforms._masters": "master_params master_weights set_master_params",
  "transforms._metrics": "check_skipped_steps last_step_finite loss_scaling_metrics monitor "
  "monitor_counts select_tree",
  "transforms._state_dtype": "state_dtype",
  "transforms._train_state": "TrainState",
  "transforms._train_step": "make_train_step",
  "transforms._value_and_grad": "scale_loss unscale",
}
"""The modules that are imported when one of their names is first used. The type checkers' imports
are the same list."""

_HOMES = {name: f"mpjax.{home}" for home, names in _ON_FIRST_USE.items() for name in names.split()}

_ONE_AT_A_TIME = threading.RLock()
"""Held while modules are imported: two threads that import modules of one package may deadlock."""


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

  def __getattr__(name: str) -> object:
    if name not in (*__all__, *_MODULES):
      # Names that have moved. One that Python itself asks for loads nothing.
      homes = ("errors", "reports", "states") if name[0].isupper() else ()
      inner = {n: m for m in homes for n in importlib.import_module(f"mpjax.{m}").__all__}
      new = "AuditReport" if name == "Audit" else name
      if new in inner:
        warnings.warn(f"mpjax.{name} is mpjax.{inner[new]}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"mpjax.{inner[new]}"), new)
      names = [*__all__, *_MODULES, *(f"{m}.{n}" for n, m in inner.items())]
      near = ", ".join(nearest(name, names))
      raise AttributeError(f"module 'mpjax' has no attribute {name!r}; the nearest are {near}")
    module = f"mpjax.{name}" if name in _MODULES else _HOMES[name]
    with _ONE_AT_A_TIME:
      imported = importlib.import_module(module)
    return imported if name in _MODULES else getattr(imported, name)


def __dir__() -> list[str]:
  return sorted([*__all__, *_MODULES, "__version__"])
