"""Names of dtypes, precisions of matmuls, and the low-precision dtypes that hardware multiplies."""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, alternatives, nearest
from mpjax._core.types import DType, DTypeLike

_FLOAT8 = ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")

NAMES: dict[str, str] = {
  **{name: name for name in ("float16", "bfloat16", "float32", "float64")},
  **{f"float8_{form}": f"float8_{form}" for form in _FLOAT8},
  **{"f16": "float16", "fp16": "float16", "half": "float16", "bf16": "bfloat16"},
  **{"f32": "float32", "fp32": "float32", "full": "float32", "f64": "float64", "fp64": "float64"},
}
"""All accepted spellings of a dtype, beside its name in NumPy. "float", "f8" and None are left out:
NumPy reads them as float64, and users write them by accident."""

_FLOATING = "a floating dtype such as 'float32'"


def parse_dtype(dtype: DTypeLike | None, where: str) -> DType:
  """Returns the floating dtype of a name ("bf16"), a scalar type or a `np.dtype`.

  Args:
    dtype: the argument of a public call.
    where: that call and the argument, for errors.

  Raises:
    MpjaxValueError: an unknown name, or float64 without `jax_enable_x64`.
    MpjaxTypeError: the dtype is not floating, or the argument names no dtype.
  """
  if dtype is None or dtype is float:
    fix = "NumPy reads it as float64; name the dtype, for example 'float32'."
    raise MpjaxTypeError(where, expected=_FLOATING, got=repr(dtype), fix=fix)
  try:
    # NumPy knows more names than `NAMES`. The error for "int32" then says that it is not floating.
    parsed = jnp.dtype(NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
  except TypeError:
    if isinstance(dtype, str):
      fix = f"Did you mean {alternatives(nearest(dtype, NAMES))}?"
      raise MpjaxValueError(where, expected=_FLOATING, got=repr(dtype), fix=fix) from None
    fix = "Pass a name, a jax.numpy scalar type or a numpy dtype."
    raise MpjaxTypeError(where, expected=_FLOATING, got=repr(dtype), fix=fix) from None
  if not jnp.issubdtype(parsed, jnp.floating):
    never = "Integers, booleans, complex numbers and keys are never cast by a policy"
    fix = f"{never}, and your version of JAX has no arrays of other dtypes."
    raise MpjaxTypeError(where, expected=_FLOATING, got=parsed.name, fix=fix)
  # NumPy reads "f8" and "float" as float64, but users who write them mean float8 and float32.
  if isinstance(dtype, str) and dtype not in NAMES and dtype != parsed.name:
    fix = f"NumPy reads this name as {parsed.name}; write 'float32', or another name in full."
    raise MpjaxValueError(where, expected=_FLOATING, got=repr(dtype), fix=fix)
  # Without `jax_enable_x64` JAX would silently use float32 in its place.
  if parsed == np.float64 and jax.dtypes.canonicalize_dtype(parsed) != parsed:
    fix = "Without jax_enable_x64 JAX would give float32; enable it or ask for 'float32'."
    raise MpjaxValueError(where, expected=_FLOATING, got=parsed.name, fix=fix)
  return parsed


MatmulPrecision: TypeAlias = jax.lax.Precision | jax.lax.DotAlgorithmPreset

_NAMES: dict[str, MatmulPrecision] = {
  **{preset.name: preset for preset in jax.lax.DotAlgorithmPreset},
  **{precision.name: precision for precision in jax.lax.Precision},
}
"""The precisions of JAX by name. Both classes have a DEFAULT, of which the precision is taken."""

_SHORT = "'default', 'high', 'highest'"


def parse_precision(
  precision: object, compute: DType, weight_grad_dtype: DType | None
) -> MatmulPrecision:
  """Returns the precision of JAX of an argument of `mpjax.Policy`.

  Args:
    precision: the argument: a precision, a preset, or the name of one in any case.
    compute: the compute dtype of the policy. A preset must multiply it.
    weight_grad_dtype: the dtype of weight gradients, or None. A preset must add up in it.

  Raises:
    MpjaxValueError: an unknown name, or a preset that does not fit the dtypes.
    MpjaxTypeError: the argument is neither a name nor a precision.
  """
  where = "mpjax.Policy(precision=...)"
  is_parsed = isinstance(precision, (jax.lax.Precision, jax.lax.DotAlgorithmPreset))
  name = precision.name if is_parsed else precision
  expected = f"{_SHORT}, a jax.lax.Precision, or a jax.lax.DotAlgorithmPreset or its name"
  if not isinstance(name, str):
    fix = 'Write precision="highest" for float32 multiplied as float32.'
    raise MpjaxTypeError(where, expected=expected, got=repr(precision), fix=fix)
  parsed = _NAMES.get(name.upper())
  if parsed is None:
    near = [written(_NAMES[x]) for x in nearest(name.upper(), _NAMES)]
    fix = f"Did you mean {alternatives(near)}?"
    raise MpjaxValueError(where, expected=expected, got=repr(precision), fix=fix)
  got = f"{parsed.name} with compute_dtype={compute.name}"
  if not takes(parsed, compute):
    fitting = ", ".join(p.name for p in jax.lax.DotAlgorithmPreset if takes(p, compute))
    expected = f"{_SHORT}, or an algorithm for {compute.name}: {fitting}"
    fix = "Write one of these, or the compute_dtype that the name of the algorithm begins with."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  # Only a preset has it. The matmul of a weight gradient sums in this dtype, whatever it returns.
  accumulation = getattr(parsed, "accumulation_type", None)
  if accumulation is None or weight_grad_dtype is None:
    return parsed
  if DType(accumulation).itemsize < weight_grad_dtype.itemsize:
    expected = (
      f"an algorithm that adds up in {weight_grad_dtype.name}, as weight_grad_dtype asks for"
    )
    fix = "Write one whose name ends in this dtype, or leave out weight_grad_dtype."
    raise MpjaxValueError(where, expected=expected, got=got, fix=fix)
  return parsed


def written(precision: MatmulPrecision) -> str:
  """Returns the name of a precision, as `parse_precision` accepts it and JAX writes it."""
  # JAX writes presets in upper case, and the precisions "default", "high" and "highest" in lower.
  is_preset = isinstance(precision, jax.lax.DotAlgorithmPreset)
  return precision.name if is_preset else precision.name.lower()


def takes(precision: MatmulPrecision, dtype: DType | None) -> bool:
  """Whether a matmul of operands in a dtype can have a precision."""
  if isinstance(precision, jax.lax.Precision):
    return True
  return dtype is not None and dtype in (precision.supported_lhs_types or ())


_TENSOR_CORES: tuple[tuple[int, int, str, tuple[str, ...]], ...] = (
  (7, 0, "Volta", ("float16",)),
  (7, 5, "Turing", ("float16",)),
  (8, 0, "Ampere", ("bfloat16", "float16")),
  (8, 9, "Ada", ("bfloat16", "float16", "float8")),
  (9, 0, "Hopper", ("bfloat16", "float16", "float8")),
  (10, 0, "Blackwell", ("bfloat16", "float16", "float8", "mxfp8", "nvfp4")),
)
"""Generations of Tensor Cores: the first compute capability, the name, and the supported dtypes and
formats. The better dtype for training comes first."""


class Hardware(NamedTuple):
  """The units of a device that multiply matrices."""

  units: str  # their name
  dtypes: tuple[str, ...] = ()  # the low-precision dtypes they multiply, the better one first
  # The format in which they multiply float32 without `jax_default_matmul_precision`.
  float32_as: str = "float32"


def hardware_of(platform: str, capability: object = None) -> Hardware:
  """Returns the hardware of a platform of JAX, on GPUs by their compute capability ("8.0")."""
  if platform == "tpu":
    return Hardware("matrix units of a TPU", ("bfloat16",), "bfloat16")
  if platform == "cpu":
    return Hardware("a CPU: no Tensor Cores")
  major, _, minor = str(capability).partition(".")
  if not major.isdecimal():
    return Hardware("not known to mpjax")
  version = (int(major), int(minor) if minor.isdecimal() else 0)
  # The table is in ascending order, so the last row is the newest generation of the device.
  rows = [row for row in _TENSOR_CORES if row[:2] <= version]
  if not rows:
    return Hardware(f"no Tensor Cores (compute capability {capability})")
  *_, name, dtypes = rows[-1]
  units = f"Tensor Cores of the {name} generation (compute capability {capability})"
  # TF32 came with Ampere, as bfloat16 did.
  return Hardware(units, dtypes, "TF32" if "bfloat16" in dtypes else "float32")
