"""Why a value is not finite, and the line of code that changes it."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from mpjax._core.dtypes import is_low_precision
from mpjax._diagnostics.nonfinite.report import Range, power


class Fault(NamedTuple):
  """What was seen of a step that broke.

  Fields:
    operation: its primitive.
    path: its module or scope.
    operands: the ranges of its operands.
    result: that of its result.
    wide: the range of the result computed in float32; None if that is not known.
    finite_at: the largest loss scale at which it is finite, if one is.
    literals: the operands that are numbers in the code.
    from_state: whether the loss scale is in the state of an optimizer.
  """

  operation: str
  path: str
  operands: tuple[Range, ...]
  result: Range
  wide: Range | None
  finite_at: float | None
  from_state: bool


def cause_and_cure(fault: Fault) -> tuple[str, str]:
  """Returns why a value is not finite, and what to change."""
  result = fault.result
  low = is_low_precision(jnp.dtype(result.dtype))
  bad = [x for x in fault.operands if x.inf or x.nan]
  if fault.finite_at is not None:
    lower = f"{fault.finite_at:g}"
    text = f"It overflows {result.dtype} at this loss scale."
    if fault.from_state:
      return text, (
        f"opt_state = mpjax.set_loss_scale(opt_state, {lower})  # {power(fault.finite_at)}; "
        "DynamicLossScale gets there by itself"
      )
    return text, f"loss_scale = {lower}  # {power(fault.finite_at)}, or mpjax.DynamicLossScale()"
  if bad:
    return _of_inf(fault, bad)
  wide = fault.wide
  if low and wide is not None and wide.inf + wide.nan < result.inf + result.nan:
    limit = float(jnp.finfo(jnp.dtype(result.dtype)).max)
    text = (
      f"It overflows {result.dtype}: in float32 the largest of these values is {wide.most:.3g}, "
      f"and {result.dtype} ends at {limit:.5g}."
    )
    return text, f'Rule("float32", path="{pattern(fault.path)}")  # or the policy mixed_bfloat16'
  return _of_domain(fault)


def _of_inf(fault: Fault, bad: list[Range]) -> tuple[str, str]:
  """NaN that came of an inf which is itself no fault."""
  dtype = fault.result.dtype
  signs = {x.value for x in bad if x.value is not None and math.isinf(x.value)}
  zero = any(x.value == 0 for x in fault.operands)
  if zero:
    text = (
      "It is 0 * inf. The inf itself did no harm before: it was discarded, or is a constant that "
      f"{dtype} cannot hold. Multiplied by 0, as a mask or a gradient is, it becomes NaN."
    )
    return text, (
      "x = jnp.where(mask, x, 1.0)  # before the operation whose inf is masked, or mask by "
      f"jnp.where(mask, x, jnp.finfo(jnp.{dtype}).min) instead of a multiplication"
    )
  if len(bad) >= 2 or signs:
    text = (
      "It is inf - inf: a row in which everything is masked by -inf has no largest element that "
      "is finite."
    )
    return text, f"x = jnp.where(mask, x, jnp.finfo(jnp.{dtype}).min)  # instead of -jnp.inf"
  return "A NaN came of operands that hold an inf.", "jnp.where(jnp.isfinite(x), x, 0)  # before it"


def _of_domain(fault: Fault) -> tuple[str, str]:
  result, name = fault.result, fault.operation
  zero = any(x.least == 0 for x in fault.operands)
  what = "NaN" if result.nan and not result.inf else "inf"
  if fault.wide is None or fault.wide.inf or fault.wide.nan:
    text = f"{name} of these operands is {what} in every precision."
  else:
    text = f"{name} of these operands is {what}."
  if zero and len(fault.operands) > 1:
    return (
      f"{text} An operand holds 0.",
      "x / jnp.where(x == 0, 1, x)  # in the divisor, or add an epsilon",
    )
  if zero:
    return (
      f"{text} The operand holds 0.",
      "jnp.where(x > 0, x, 1)  # as the operand, with a jnp.where around the result too",
    )
  if result.dtype == "float32" and fault.wide is None and not result.nan:
    return f"It overflows {result.dtype}.", "jnp.clip(x, -limit, limit)  # of the operand"
  return (
    text,
    "jnp.where(allowed, x, 1)  # as the operand: it is outside of what the operation takes",
  )


def pattern(path: str) -> str:
  """Returns the path of a rule for a scope: a Flax model's class, which comes first, is left out."""
  first, _, rest = path.partition("/")
  return "**/" + (rest or first) if path else "**"
