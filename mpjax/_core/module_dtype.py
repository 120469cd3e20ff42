"""The `dtype` field of modules."""

import dataclasses
import inspect
from typing import Any

import jax.numpy as jnp

from mpjax._core.dtypes import scalar_type
from mpjax._core.types import DType, Module

_MISSING = object()


def dtype_field(module: Module, dtype: DType, *, always: bool) -> dict[str, object]:
  """Returns the field `dtype` to set for the length of a call, if the module has one to set.

  A module whose own dtype (or `param_dtype`) is complex or an integer means what it says, and so
  does one whose field holds something that is no dtype.

  Args:
    module: a module.
    dtype: the dtype to set.
    always: set it in any case; else only where the module has one in low precision, which it would
      round to.
  """
  if not _has_dtype(module):
    return {}
  own = plain_attribute(module, "dtype")
  if not (_is_real(own) and _is_real(plain_attribute(module, "param_dtype"))):
    return {}
  if not always and (own is None or jnp.dtype(own).itemsize >= dtype.itemsize):
    return {}
  # Code compares with `is jnp.bfloat16`, or looks a name up: it gets what it had.
  return {"dtype": dtype.name if isinstance(own, str) else scalar_type(dtype)}


def _has_dtype(module: Module) -> bool:
  """Whether a module has a field `dtype`; where its class declares no fields, an attribute."""
  if dataclasses.is_dataclass(module):
    return any(field.name == "dtype" and field.init for field in dataclasses.fields(module))
  return plain_attribute(module, "dtype", _MISSING) is not _MISSING


def plain_attribute(module: Module, name: str, default: object = None) -> Any:
  """Returns an attribute that is a value, without running code of the user's; else `default`.

  A property of a module may call one of its methods, read a parameter, or set up submodules. It
  computes a dtype rather than holding one, so that there is nothing in it to set.
  """
  value = inspect.getattr_static(module, name, default)
  return default if hasattr(type(value), "__get__") else value


def _is_real(dtype: Any) -> bool:
  """Whether `dtype` is unset or a floating dtype."""
  if dtype is None:
    return True
  try:
    return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
  except TypeError:
    return False
