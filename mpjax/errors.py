"""The errors that mpjax raises. Each is `mpjax.MpjaxError`, and the built-in one of its name.

>>> import mpjax
>>> issubclass(mpjax.errors.MpjaxTypeError, TypeError)
True
"""

from mpjax._core.errors import (
  MpjaxAssertionError,
  MpjaxRuntimeError,
  MpjaxTypeError,
  MpjaxValueError,
  UnmatchedRuleError,
)

__all__ = [
  "MpjaxAssertionError",
  "MpjaxRuntimeError",
  "MpjaxTypeError",
  "MpjaxValueError",
  "UnmatchedRuleError",
]
