"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

import importlib
import threading
from typing import TYPE_CHECKING

from mpjax import errors as errors
from mpjax._core.errors import MpjaxError
from mpjax._matmul.blocks import MXFP8, NVFP4
from mpjax._matmul.float8 import Float8
from mpjax._matmul.int8 import Int8
from mpjax._policy.full_precision import full_precision
from mpjax._policy.other_names import hint
from mpjax._policy.policy import Policy
from mpjax._policy.rules import Rule

# Type checkers and editors read these imports. At run time each name is imported on first use.
if TYPE_CHECKING:
  from mpjax import checkpoints as checkpoints
  from mpjax import linen as linen
  from mpjax import nnx as nnx
  from mpjax import reports as reports
  from mpjax import states as states
  from mpjax._autocast.autocast import autocast
  from mpjax._autocast.kernels import low_precision
  from mpjax._diagnose.audit.audit import audit
  from mpjax._diagnose.check_skipped_steps import check_skipped_steps
  from mpjax._diagnose.compare.compare import compare
  from mpjax._diagnose.monitor import monitor
  from mpjax._diagnose.nonfinite.find_nonfinite import find_nonfinite
  from mpjax._diagnose.ranges.ranges import ranges
  from mpjax._diagnose.sensitivity.sensitivity import sensitivity
  from mpjax._diagnose.tune.tune import tune
  from mpjax._io.convert import convert
  from mpjax._jaxpr.op_lists import OpLists
  from mpjax._optim.check_loss_scaling import check_loss_scaling
  from mpjax._optim.find_scale import keep_if_skipped, loss_scaling_metrics, step_applied
  from mpjax._optim.loss_scale import (
    DynamicLossScale,
    NoLossScale,
    SkipNonfinite,
    StaticLossScale,
  )
  from mpjax._optim.scaled import scaled
  from mpjax._optim.step.train_state import TrainState
  from mpjax._optim.step.train_step import make_train_step
  from mpjax._optim.wrappers.accumulation import accumulate_gradients
  from mpjax._optim.wrappers.apply_updates import apply_updates
  from mpjax._optim.wrappers.loss_scaling import loss_scaling
  from mpjax._optim.wrappers.master_weights import master_weights
  from mpjax._optim.wrappers.state_dtype import state_dtype
  from mpjax._with_policy import with_policy
  from mpjax.linen import policy_scope

__version__ = "0.1.0"

# One line for each topic.
__all__ = ["OpLists", "Policy", "Rule"]
__all__ += ["MXFP8", "NVFP4", "Float8", "Int8"]
__all__ += ["autocast", "full_precision", "low_precision", "policy_scope", "with_policy"]
__all__ += ["DynamicLossScale", "NoLossScale", "SkipNonfinite", "StaticLossScale", "loss_scaling"]
__all__ += ["apply_updates", "scaled"]
__all__ += ["check_skipped_steps", "keep_if_skipped", "loss_scaling_metrics", "step_applied"]
__all__ += ["accumulate_gradients", "master_weights", "state_dtype"]
__all__ += ["TrainState", "check_loss_scaling", "make_train_step"]
__all__ += ["audit", "compare", "find_nonfinite", "monitor", "ranges"]
__all__ += ["sensitivity", "tune"]
__all__ += ["MpjaxError", "convert"]

_MODULES = ("checkpoints", "errors", "linen", "nnx", "reports", "states")
"""What `import *` leaves out: `errors` and `states` are names that users have themselves."""

_HOMES = {
  "audit": "mpjax._diagnose.audit.audit",
  "compare": "mpjax._diagnose.compare.compare",
  "find_nonfinite": "mpjax._diagnose.nonfinite.find_nonfinite",
  "ranges": "mpjax._diagnose.ranges.ranges",
  "sensitivity": "mpjax._diagnose.sensitivity.sensitivity",
  "tune": "mpjax._diagnose.tune.tune",
  "convert": "mpjax._io.convert",
  "low_precision": "mpjax._autocast.kernels",
  "autocast": "mpjax._autocast.autocast",
  "OpLists": "mpjax._jaxpr.op_lists",
  "policy_scope": "mpjax.linen",
  "accumulate_gradients": "mpjax._optim.wrappers.accumulation",
  "apply_updates": "mpjax._optim.wrappers.apply_updates",
  "check_loss_scaling": "mpjax._optim.check_loss_scaling",
  "check_skipped_steps": "mpjax._diagnose.check_skipped_steps",
  "DynamicLossScale": "mpjax._optim.loss_scale",
  "NoLossScale": "mpjax._optim.loss_scale",
  "SkipNonfinite": "mpjax._optim.loss_scale",
  "StaticLossScale": "mpjax._optim.loss_scale",
  "loss_scaling": "mpjax._optim.wrappers.loss_scaling",
  "master_weights": "mpjax._optim.wrappers.master_weights",
  "keep_if_skipped": "mpjax._optim.find_scale",
  "loss_scaling_metrics": "mpjax._optim.find_scale",
  "step_applied": "mpjax._optim.find_scale",
  "monitor": "mpjax._diagnose.monitor",
  "scaled": "mpjax._optim.scaled",
  "state_dtype": "mpjax._optim.wrappers.state_dtype",
  "TrainState": "mpjax._optim.step.train_state",
  "make_train_step": "mpjax._optim.step.train_step",
  "with_policy": "mpjax._with_policy",
}
"""The module of each name that is imported when the name is first used. The imports for type
checkers are the same list."""

_ONE_AT_A_TIME = threading.RLock()
"""Held while modules are imported: two threads that import modules of one package may deadlock."""


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

  def __getattr__(name: str) -> object:
    if name not in (*__all__, *_MODULES):
      # A name that Python itself asks for, such as __path__, loads nothing.
      # A name may have moved into a submodule, so look for the nearest there as well.
      homes = () if name.startswith("_") else ("errors", "reports", "states")
      inner = [f"{m}.{n}" for m in homes for n in importlib.import_module(f"mpjax.{m}").__all__]
      meant = hint(name, [*__all__, *_MODULES, *inner])
      raise AttributeError(f"module 'mpjax' has no attribute {name!r}; {meant}")
    module = f"mpjax.{name}" if name in _MODULES else _HOMES[name]
    with _ONE_AT_A_TIME:
      imported = importlib.import_module(module)
    return imported if name in _MODULES else getattr(imported, name)


def __dir__() -> list[str]:
  return sorted([*__all__, *_MODULES, "__version__"])
