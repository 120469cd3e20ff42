"""Mixed precision for JAX: policies for models, loss scaling for optimizers, nothing global."""

from mpjax._errors import (
  MpjaxError,
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
)
from mpjax._tree import all_finite

__version__ = "0.1.0"

__all__ = [
  "MpjaxError",
  "MpjaxRuntimeError",
  "MpjaxTypeError",
  "MpjaxValueError",
  "UnmatchedRuleError",
  "all_finite",
]
