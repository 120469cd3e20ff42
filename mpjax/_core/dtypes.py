"""Names of dtypes, which of them mpjax computes in, how exactly and by what they are multiplied."""

from typing import NamedTuple, TypeAlias

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
  if isinstance(dtype, str) and dtype in ("float", "double"):
    fix = "NumPy reads this name as float64; write 'float32' (or 'float64' with jax_enable_x64)."
    raise MpjaxValueError(where, expected=expected, got=repr(dtype), fix=fix)
  if dtype is None or dtype is float:
    fix = "NumPy reads it as float64; name the dtype, for example 'float32'."
    raise MpjaxTypeError(where, expected=expected, got=repr(dtype), fix=fix)
  try:  # NumPy knows other names too, so that "int32" is named as what it is.
    parsed = jnp.dtype(NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
  except TypeError:
    if isinstance(dtype, str):
      fix = f"Did you mean {' or '.join(map(repr, nearest(dtype, NAMES)))}?"
      raise MpjaxValueError(where, expected=expected, got=repr(dtype), fix=fix) from None
    fix = "Pass a name, a jax.numpy scalar type or a numpy dtype."
    raise MpjaxTypeError(where, expected=expected, got=repr(dtype), fix=fix) from None
  if not jnp.issubdtype(parsed, jnp.floating):
    fix = "Integers, booleans, complex numbers and keys are never cast by a policy."
    raise MpjaxTypeError(where, expected=expected, got=parsed.name, fix=fix)
  if parsed == np.float64 and jax.dtypes.canonicalize_dtype(parsed) != parsed:
    fix = "Without jax_enable_x64 JAX would give float32 silently; enable it or ask for 'float32'."
    raise MpjaxValueError(where, expected=expected, got="float64", fix=fix)
  return parsed


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


MatmulPrecision: TypeAlias = jax.lax.Precision | jax.lax.DotAlgorithmPreset

_NAMES: dict[str, MatmulPrecision] = {
  **{preset.name: preset for preset in jax.lax.DotAlgorithmPreset},
  **{precision.name: precision for precision in jax.lax.Precision},
}
"""DEFAULT is both, and means the same."""

_SHORT = "'default', 'high', 'highest'"


def parse_precision(precision: object, where: str) -> MatmulPrecision:
  """Returns the precision that a name means, in any case; one of JAX's is returned as it is."""
  expected = f"{_SHORT}, a jax.lax.Precision, or a jax.lax.DotAlgorithmPreset or its name"
  if isinstance(precision, (jax.lax.Precision, jax.lax.DotAlgorithmPreset)):
    return _NAMES[precision.name]
  if not isinstance(precision, str):
    fix = 'Write precision="highest" for float32 that is multiplied as float32.'
    raise MpjaxTypeError(where, expected=expected, got=repr(precision), fix=fix)
  if precision.upper() not in _NAMES:
    near = " or ".join(repr(written(_NAMES[name])) for name in nearest(precision.upper(), _NAMES))
    raise MpjaxValueError(
      where, expected=expected, got=repr(precision), fix=f"Did you mean {near}?"
    )
  return _NAMES[precision.upper()]


def written(precision: MatmulPrecision) -> str:
  """Returns the name of a precision, as `parse_precision` takes it and JAX writes it."""
  is_preset = isinstance(precision, jax.lax.DotAlgorithmPreset)
  return precision.name if is_preset else precision.name.lower()


def takes(precision: MatmulPrecision, dtype: DType | None) -> bool:
  """Whether a matmul of operands in a dtype can have a precision."""
  if isinstance(precision, jax.lax.Precision):
    return True
  return dtype is not None and dtype in (precision.supported_lhs_types or ())


def check_precision(
  precision: MatmulPrecision, compute: DType, weight_grad: DType | None, where: str
) -> None:
  """Raises MpjaxValueError if a preset does not multiply, or add up, what a policy computes in."""
  if isinstance(precision, jax.lax.Precision):
    return
  got = f"{precision.name} with compute_dtype={compute.name}"
  if not takes(precision, compute):
    fitting = [p.name for p in jax.lax.DotAlgorithmPreset if takes(p, compute)]
    raise MpjaxValueError(
      where,
      expected=f"{_SHORT}, or an algorithm for {compute.name}: {', '.join(fitting)}",
      got=got,
      fix="Write one of these, or the compute_dtype that the name of the algorithm begins with.",
    )
  sums = precision.accumulation_type
  if weight_grad is not None and sums is not None and DType(sums).itemsize < weight_grad.itemsize:
    raise MpjaxValueError(
      where,
      expected=f"an algorithm that adds up in {weight_grad.name}, as weight_grad_dtype asks for",
      got=got,
      fix="Write one whose name ends so, or leave out weight_grad_dtype.",
    )


_TENSOR_CORES: tuple[tuple[int, int, str, tuple[str, ...]], ...] = (
  (7, 0, "Volta", ("float16",)),
  (7, 5, "Turing", ("float16",)),
  (8, 0, "Ampere", ("bfloat16", "float16")),
  (8, 9, "Ada", ("bfloat16", "float16", "float8")),
  (9, 0, "Hopper", ("bfloat16", "float16", "float8")),
  (10, 0, "Blackwell", ("bfloat16", "float16", "float8")),
)
"""From which compute capability on, generation, and dtypes, the better one to train in first."""


class Hardware(NamedTuple):
  """The units of a device that multiply matrices.

  Fields:
    units: what they are, in words.
    dtypes: the low-precision dtypes that they multiply, the better one to train in first.
    float32_as: the dtype in which they multiply float32 unless told otherwise, see
      `jax_default_matmul_precision`.
  """

  units: str
  dtypes: tuple[str, ...] = ()
  float32_as: str = "float32"


def hardware_of(platform: str, capability: object = None) -> Hardware:
  """Returns what is known of a device.

  `platform` is that of a `jax.Device`, `capability` the compute capability of NVIDIA's, "8.0" say.
  """
  if platform == "tpu":
    return Hardware("matrix units of a TPU", ("bfloat16",), "bfloat16")
  if platform == "cpu":
    return Hardware("a CPU: no Tensor Cores")
  major, _, minor = str(capability).partition(".")
  if not major.isdecimal():
    return Hardware("not known to mpjax")
  at = (int(major), int(minor) if minor.isdecimal() else 0)
  rows = [row for row in _TENSOR_CORES if row[:2] <= at]
  if not rows:
    return Hardware(f"no Tensor Cores (compute capability {capability})")
  *_, name, dtypes = rows[-1]
  units = f"Tensor Cores of the {name} generation (compute capability {capability})"
  return Hardware(units, dtypes, "TF32" if "bfloat16" in dtypes else "float32")
