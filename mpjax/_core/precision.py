"""How exactly the hardware multiplies: the values of `mpjax.Policy(precision=...)`."""

from typing import TypeAlias

import jax

from mpjax._core.errors import MpjaxTypeError, MpjaxValueError, nearest
from mpjax._core.types import DType

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
