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
  from mpjax.transforms import (
    DynamicLossScale,
    NoLossScale,
    StaticLossScale,
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
    monitor,
    monitor_counts,
    scale_loss,
    select_tree,
    set_loss_scale,
    set_master_params,
    state_dtype,
    unscale,
  )

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
  "audit": "mpjax._diagnostics.audit.audit_report",
  "find_nonfinite": "mpjax._diagnostics.nonfinite.find",
  "ranges": "mpjax._diagnostics.ranges.measure",
  "tune": "mpjax._diagnostics.tune.tuning",
  "convert": "mpjax._io.conversion",
  "autocast": "mpjax._jaxprs.autocast",
  "OpLists": "mpjax._jaxprs.op_lists",
  "OptLevel": "mpjax._compositions",
  "opt_level": "mpjax._compositions",
  "value_and_grad": "mpjax._compositions",
  "policy_scope": "mpjax.linen",
  "with_policy": "mpjax._compositions",
}
"""The module of a name that is imported when it is first used, unless it is `mpjax.transforms`."""

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
      near = ", ".join(
        nearest(name, [*__all__, *_MODULES, *(f"{m}.{n}" for n, m in inner.items())])
      )
      raise AttributeError(f"module 'mpjax' has no attribute {name!r}; the nearest are {near}")
    module = f"mpjax.{name}" if name in _MODULES else _ON_FIRST_USE.get(name, "mpjax.transforms")
    with _ONE_AT_A_TIME:
      imported = importlib.import_module(module)
    return imported if name in _MODULES else getattr(imported, name)


def __dir__() -> list[str]:
  return sorted([*__all__, *_MODULES, "__version__"])
