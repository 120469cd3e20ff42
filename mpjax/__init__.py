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
  from mpjax._compositions.by_framework import policy_scope, value_and_grad, with_policy
  from mpjax._compositions.opt_level import OptLevel, opt_level
  from mpjax._diagnostics.audit.audit_report import audit
  from mpjax._diagnostics.nonfinite.find import find_nonfinite
  from mpjax._diagnostics.ranges.measure import ranges
  from mpjax._diagnostics.tune.tuning import tune
  from mpjax._io.conversion import convert
  from mpjax._jaxprs.autocast import autocast
  from mpjax._jaxprs.op_lists import OpLists
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

__all__ = [
  "DynamicLossScale",
  "Float8",
  "MpjaxError",
  "NoLossScale",
  "OpLists",
  "OptLevel",
  "Policy",
  "Rule",
  "StaticLossScale",
  "TrainState",
  "accumulate_gradients",
  "all_finite",
  "apply_updates",
  "audit",
  "autocast",
  "check_loss_scaling",
  "check_skipped_steps",
  "convert",
  "find_nonfinite",
  "full_precision",
  "last_step_finite",
  "loss_scaling",
  "loss_scaling_metrics",
  "make_train_step",
  "master_params",
  "master_weights",
  "monitor",
  "monitor_counts",
  "opt_level",
  "policy_scope",
  "ranges",
  "scale_loss",
  "select_tree",
  "set_loss_scale",
  "set_master_params",
  "state_dtype",
  "tune",
  "unscale",
  "value_and_grad",
  "with_policy",
]

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
  "OptLevel": "mpjax._compositions.opt_level",
  "opt_level": "mpjax._compositions.opt_level",
  "value_and_grad": "mpjax._compositions.by_framework",
  "policy_scope": "mpjax._compositions.by_framework",
  "with_policy": "mpjax._compositions.by_framework",
}
"""The module of a name that is imported when it is first used, unless it is `mpjax.transforms`:
these import optax, Orbax or rich, or are large. The type checkers' imports are the same list."""

_ONE_AT_A_TIME = threading.RLock()
"""Held while modules are imported. Two threads that import modules of one package, each of which
needs the other's, otherwise see a deadlock or a module that is imported in part: both raise."""


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

  def __getattr__(name: str) -> object:
    if name not in (*__all__, *_MODULES):
      moved = _moved(name)
      if moved is None:
        inner = [f"{m}.{n}" for m in _MODULES if m in globals() for n in globals()[m].__all__]
        near = ", ".join(nearest(name, [*__all__, *_MODULES, *inner]))
        raise AttributeError(f"module 'mpjax' has no attribute {name!r}; the nearest are {near}")
      return moved
    module = f"mpjax.{name}" if name in _MODULES else _ON_FIRST_USE.get(name, "mpjax.transforms")
    with _ONE_AT_A_TIME:
      imported = importlib.import_module(module)
    return imported if name in _MODULES else getattr(imported, name)

  def _moved(name: str) -> object:
    for module in ("errors", "reports", "states") if name[0].isupper() else ():
      home = importlib.import_module(f"mpjax.{module}")
      new = "AuditReport" if name == "Audit" else name
      if new in home.__all__:
        warnings.warn(f"mpjax.{name} is mpjax.{module}.{new}", DeprecationWarning, stacklevel=3)
        return getattr(home, new)
    return None


def __dir__() -> list[str]:
  return sorted([*__all__, *_MODULES, "__version__"])
