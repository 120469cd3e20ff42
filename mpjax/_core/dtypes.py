"""Names of dtypes, and which of them mpjax computes in."""

from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, nearest
from mpjax._core.types import Class, DType, DTypeLike

_FLOAT8 = (
  "float8_e3m4",
  "float8_e4m3",
  "float8_e4m3b11fnuz",
  "float8_e4m3fn",
  "float8_e4m3fnuz",
  "float8_e5m2",
  "float8_e5m2fnuz",
  "float8_e8m0fnu",
)

NAMES: dict[str, str] = {
  **{name: name for name in ("float16", "bfloat16", "float32", "float64", *_FLOAT8)},
  **{"f16": "float16", "fp16": "float16", "half": "float16", "bf16": "bfloat16"},
  **{"f32": "float32", "fp32": "float32", "full": "float32", "f64": "float64", "fp64": "float64"},
}
"""Every accepted spelling. "float", "double" and None mean float64 to NumPy: too easy to write
by accident, so they are not here."""


def parse_dtype(dtype: DTypeLike, where: str) -> DType:
  """Returns the floating dtype that a name ("bf16"), a scalar type or a `np.dtype` names.

  `where` is the public call and argument, for the errors: a type or a value that is none.
  """
  expected = "a floating dtype such as 'float32', 'bfloat16' or 'float16'"
  if isinstance(dtype, str):
    if dtype in NAMES:
      found = jnp.dtype(NAMES[dtype])
    elif dtype in ("float", "double"):
      fix = "NumPy reads this name as float64; write 'float32' (or 'float64' with jax_enable_x64)."
      raise MpjaxValueError(where, expected=expected, got=repr(dtype), fix=fix)
    else:
      found = _other_dtype(dtype)
      if found is None:
        near = " or ".join(map(repr, nearest(dtype, NAMES)))
        fix = f"Did you mean {near}?"
        raise MpjaxValueError(where, expected=expected, got=repr(dtype), fix=fix)
  elif dtype is None or dtype is float:
    fix = "NumPy reads it as float64; name the dtype, for example 'float32'."
    raise MpjaxTypeError(where, expected=expected, got=repr(dtype), fix=fix)
  else:
    found = _other_dtype(dtype)
    if found is None:
      fix = "Pass a name, a jax.numpy scalar type or a numpy dtype."
      raise MpjaxTypeError(where, expected=expected, got=repr(dtype), fix=fix)
  if not jnp.issubdtype(found, jnp.floating):
    fix = "Integers, booleans, complex numbers and keys are never cast by a policy."
    raise MpjaxTypeError(where, expected=expected, got=found.name, fix=fix)
  if found == np.float64 and jax.dtypes.canonicalize_dtype(found) != found:
    fix = "Without jax_enable_x64 JAX would give float32 silently; enable it or ask for 'float32'."
    raise MpjaxValueError(where, expected=expected, got="float64", fix=fix)
  return found


def _other_dtype(dtype: object) -> DType | None:
  """Returns what NumPy makes of `dtype` (so that "int32" is named as such), or None."""
  try:
    return jnp.dtype(cast(DTypeLike, dtype))
  except TypeError:
    return None


def scalar_type(dtype: DType) -> Class:
  """Returns the `jax.numpy` scalar type (`jnp.bfloat16`), which code compares by `is`."""
  return getattr(jnp, dtype.name)


FLOAT32 = np.dtype("float32")

HALVES = frozenset(map(np.dtype, (jnp.bfloat16, jnp.float16)))
"""The dtypes of 16 bits. A dtype is of low precision if it is one of them, or narrower."""

HALF_NAMES = tuple(sorted(dtype.name for dtype in HALVES))


def is_low_precision(dtype: DType) -> bool:
  """Whether `dtype` is floating and narrower than float32: bfloat16, float16 or 8 bits."""
  return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < FLOAT32.itemsize


def is_float8(dtype: DType) -> bool:
  """Whether `dtype` is one of the 8-bit floating formats."""
  return dtype.name in _FLOAT8
