"""Names of dtypes, which of them mpjax computes in, how exactly and by what they are multiplied."""

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
"""Every accepted spelling. "float", "double" and None mean float64 to NumPy: too easy to write
by accident, so they are not here."""


def parse_dtype(dtype: DTypeLike | None, where: str) -> DType:
  """Returns the floating dtype that a name ("bf16"), a scalar type or a `np.dtype` names.

  `where` is the public call and argument, for the errors: a type or a value that is none.
  """
  expected, got, of_type = "a floating dtype such as 'float32'", repr(dtype), True
  if isinstance(dtype, str) and dtype in ("float", "double"):
    of_type = False
    fix = "NumPy reads this name as float64; write 'float32' (or 'float64' with jax_enable_x64)."
  elif dtype is None or dtype is float:
    fix = "NumPy reads it as float64; name the dtype, for example 'float32'."
  else:
    try:  # NumPy knows other names too, so that "int32" is named as what it is.
      parsed = jnp.dtype(NAMES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
      fix = "Pass a name, a jax.numpy scalar type or a numpy dtype."
      if isinstance(dtype, str):
        of_type, fix = False, f"Did you mean {alternatives(nearest(dtype, NAMES))}?"
    else:
      got = parsed.name
      if not jnp.issubdtype(parsed, jnp.floating):
        fix = "Integers, booleans, complex numbers and keys are never cast by a policy."
      elif parsed == np.float64 and jax.dtypes.canonicalize_dtype(parsed) != parsed:
        of_type = False
        fix = "Without jax_enable_x64 JAX would give float32; enable it or ask for 'float32'."
      else:
        return parsed
  if of_type:
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  raise MpjaxValueError(where, expected=expected, got=got, fix=fix)


MatmulPrecision: TypeAlias = jax.lax.Precision | jax.lax.DotAlgorithmPreset

_NAMES: dict[str, MatmulPrecision] = {
  **{preset.name: preset for preset in jax.lax.DotAlgorithmPreset},
  **{precision.name: precision for precision in jax.lax.Precision},
}
"""DEFAULT is both, and means the same."""

_SHORT = "'default', 'high', 'highest'"


def parse_precision(
  precision: object, compute: DType, weight_grad: DType | None
) -> MatmulPrecision:
  """Returns the precision that a name means, in any case; one of JAX's is returned as it is.

  A preset has to multiply, and add up, what a policy of these dtypes computes in.
  """
  expected = f"{_SHORT}, a jax.lax.Precision, or a jax.lax.DotAlgorithmPreset or its name"
  of_jax = isinstance(precision, (jax.lax.Precision, jax.lax.DotAlgorithmPreset))
  name = precision.name if of_jax else precision
  parsed = _NAMES.get(name.upper()) if isinstance(name, str) else None
  where, got = "mpjax.Policy(precision=...)", repr(precision)
  sums = getattr(parsed, "accumulation_type", None)
  if not isinstance(name, str):
    fix = 'Write precision="highest" for float32 multiplied as float32.'
    raise MpjaxTypeError(where, expected=expected, got=got, fix=fix)
  if parsed is None:
    near = [written(_NAMES[x]) for x in nearest(name.upper(), _NAMES)]
    fix = f"Did you mean {alternatives(near)}?"
  elif not takes(parsed, compute):
    got = f"{parsed.name} with compute_dtype={compute.name}"
    fitting = ", ".join(p.name for p in jax.lax.DotAlgorithmPreset if takes(p, compute))
    expected = f"{_SHORT}, or an algorithm for {compute.name}: {fitting}"
    fix = "Write one of these, or the compute_dtype that the name of the algorithm begins with."
  elif sums is not None and weight_grad is not None and DType(sums).itemsize < weight_grad.itemsize:
    got = f"{parsed.name} with compute_dtype={compute.name}"
    expected = f"an algorithm that adds up in {weight_grad.name}, as weight_grad_dtype asks for"
    fix = "Write one whose name ends so, or leave out weight_grad_dtype."
  else:
    return parsed
  raise MpjaxValueError(where, expected=expected, got=got, fix=fix)


def written(precision: MatmulPrecision) -> str:
  """Returns the name of a precision, as `parse_precision` takes it and JAX writes it."""
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
  (10, 0, "Blackwell", ("bfloat16", "float16", "float8")),
)
"""From which compute capability on, generation, and dtypes, the better one to train in first."""


class Hardware(NamedTuple):
  """What multiplies matrices, and in which low-precision dtypes, the better one to train in first.

  `float32_as` is what float32 is multiplied in, unless told by `jax_default_matmul_precision`.
  """

  units: str
  dtypes: tuple[str, ...] = ()
  float32_as: str = "float32"


def hardware_of(platform: str, capability: object = None) -> Hardware:
  """Returns what is known of a platform of JAX; `capability` is as in "8.0", for NVIDIA's."""
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
