"""Find out why an operation returned an inf or a NaN, and advise a change.

The first rule that fits gives the advice: a smaller loss scale makes all of it finite; an operand
was not finite, which did no harm before; float32 has a finite result; an operation of linear
algebra takes rounded operands; else the operands themselves are at fault, in every precision.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.types import is_low_precision
from mpjax._diagnose.nonfinite.report import NonfiniteReport, Range
from mpjax._diagnose.report import power
from mpjax._jaxpr.graph import Operation


class Advice(NamedTuple):
  """Two fields of a report."""

  cause: str  # a sentence
  cure: str  # a line of code


class Alternatives(NamedTuple):
  """Measurements of the operation, and of the operations before it."""

  in_float32: Range  # the result if the operation runs in float32
  rounded: Operation | None  # the last low-precision operation before one of linear algebra
  code: str  # runs that, or else the operation, in float32, and begins a comment


_AROUND = "# as the operand, or divisor, of this line, and a jnp.where around its result"


def advice(report: NonfiniteReport, alternatives: Alternatives) -> Advice:
  """Returns why the result of an operation is not finite, and what to change."""
  result = report.result or alternatives.in_float32
  # The order matters: a smaller scale is the simplest cure, and operands come before results.
  nonfinite = [each for each in report.operands if each.inf or each.nan]
  wide = alternatives.in_float32
  # Float32 need not make everything finite: a mask may hold other infs.
  fewer_in_float32 = wide.inf + wide.nan < result.inf + result.nan
  if report.finite_at is not None:
    return _smaller_scale(report, report.finite_at, result)
  if nonfinite:
    return _of_nonfinite_operands(report, result, nonfinite)
  if is_low_precision(jnp.dtype(result.dtype)) and fewer_in_float32:
    return _of_low_precision(result, alternatives)
  if alternatives.rounded is not None:
    return _of_rounding(report, alternatives.rounded, alternatives.code)
  return _of_values(report, result)


def _smaller_scale(report: NonfiniteReport, finite_at: float, result: Range) -> Advice:
  cause = f"It overflows {result.dtype} at this loss scale."
  exponent = power(finite_at)
  # A scale by hand is a number in the code. A state of mpjax is changed by `set_loss_scale`.
  if report.step is None:
    cure = f"loss_scale = {finite_at:g}  # {exponent}, or mpjax.DynamicLossScale()"
  else:
    call = f"opt_state = mpjax.states.set_loss_scale(opt_state, {finite_at:g})"
    cure = f"{call}  # {exponent}; DynamicLossScale gets there by itself"
  return Advice(cause, cure)


def _of_nonfinite_operands(
  report: NonfiniteReport, result: Range, nonfinite: Sequence[Range]
) -> Advice:
  """Returns advice on an inf that did no harm before, such as one in a mask."""
  # The smallest finite number masks like -inf, and minus itself it is 0.
  mask = f"jnp.where(mask, x, jnp.finfo(jnp.{result.dtype}).min)"
  # Elementwise operations know the operands at the element that broke.
  meets_zero = result.nan > 0 and 0 in [each.value for each in report.operands]
  if meets_zero and report.direction == "backward":
    return Advice(
      "It is 0 * inf: a gradient of 0 times a slope at a pole, as of a root at 0.",
      f"jnp.where(allowed, x, safe)  {_AROUND}",
    )
  if meets_zero:
    return Advice(
      "It is 0 * inf. The inf did no harm before: it was discarded, or is a constant beyond "
      f"{result.dtype}.",
      "x = jnp.where(mask, x, 1.0)  # before the operation whose inf is masked, or mask by "
      f"{mask} instead of a multiplication",
    )
  # Two operands are not finite, or the one that is not is inf at the element that broke.
  meets_inf = len(nonfinite) > 1 or math.isinf(nonfinite[0].value)
  if result.nan and meets_inf:
    return Advice(
      "It is inf - inf: a row that is masked by -inf entirely has no finite element.",
      f"x = {mask}  # instead of -jnp.inf",
    )
  return Advice(
    "It sums an inf that did no harm before, such as that of a mask or of a masked label.",
    "jnp.where(jnp.isfinite(x), x, 0)  # before it, or other labels",
  )


def _of_low_precision(result: Range, alternatives: Alternatives) -> Advice:
  dtype = result.dtype
  largest = alternatives.in_float32.most
  return Advice(
    f"It overflows {dtype}: in float32 the largest of these values is {largest:.3g}, "
    f"and {dtype} ends at {_largest(dtype):.5g}. Later casts to {dtype} may overflow too. Bfloat16 "
    "has the range of float32.",
    f'{alternatives.code} or the policy "mixed_bfloat16"',
  )


def _of_rounding(report: NonfiniteReport, rounded: Operation, code: str) -> Advice:
  """Returns advice on linear algebra: rounding may have made a matrix singular or indefinite."""
  # `_rounded_before` chose an operation with a low-precision operand or result.
  low = next(v for v in (*rounded.results, *rounded.operands) if v.is_low)
  return Advice(
    f"{report.operation} is not defined for these operands, as for a matrix without an inverse. "
    f"Rounding may be why: they come from {rounded.name} of {rounded.where.path}, in {low.dtype}.",
    f"{code} or x + epsilon * jnp.eye(n)",
  )


def _of_values(report: NonfiniteReport, result: Range) -> Advice:
  """Returns advice on operands that are out of the domain, or too large, in every precision."""
  # An unknown operand, as of a sum or a matmul, has the value NaN.
  values = [each.value for each in report.operands if not math.isnan(each.value)]
  kind = _kind_of_number(result)
  shown = " and ".join(f"{x:.3g}" for x in values) if values else "these operands"
  text = f"{report.operation} of {shown}"
  if _overflows(report, result, values, kind):
    return _of_overflow(report, text, result.dtype)
  if not values:
    return Advice(
      f"{text} is {kind}: not defined, as of a matrix without an inverse, or beyond its dtype.",
      "x + epsilon * jnp.eye(n)  # of a matrix; else smaller operands, an index inside",
    )
  # In a backward pass the operation is a slope. The line computes another function, such as a root.
  is_known = 0 in values and report.direction == "forward"
  selection = "x != 0, x, 1" if is_known else "allowed, x, safe"
  return Advice(f"{text} is {kind} in every precision.", f"jnp.where({selection})  {_AROUND}")


def _kind_of_number(result: Range) -> str:
  """Returns the text of the element that broke: "NaN", "inf" or "-inf"."""
  if result.nan and math.isnan(result.value):
    return "NaN"
  return "-inf" if result.value < 0 else "inf"


def _overflows(report: NonfiniteReport, result: Range, values: Sequence[float], kind: str) -> bool:
  """Whether large operands are the cause, rather than a pole such as that of `log1p` at -1.

  If the operands at the element that broke are known, an inf is a pole where one of them is 0, or
  all are from 1e-3 to 1. They are not known for a sum or a matmul, which takes many. That overflows
  if one of its operands could: its largest element squared, times its size, exceeds the dtype. NaN
  may then be inf - inf.
  """
  if not values:
    # A sum of n products is at most n times the largest square.
    largest = _largest(result.dtype)
    return any(each.most**2 * math.prod(each.shape) > largest for each in report.operands)
  # Such numbers overflow nowhere, so an inf of them is a pole.
  is_ordinary = all(1e-3 < abs(x) <= 1 for x in values)
  return kind != "NaN" and 0 not in values and not is_ordinary


def _of_overflow(report: NonfiniteReport, text: str, dtype: str) -> Advice:
  cause = f"{text} overflows {dtype}, which ends at {_largest(dtype):.3g}."
  # `exp` of a large number is most often a softmax without its maximum subtracted.
  if report.operation == p.exp_p.name:
    cure = "jnp.exp(x - jnp.max(x))  # in a softmax; else jnp.minimum(x, limit) before it"
  else:
    cure = "jnp.clip(x, -limit, limit)  # of the operands, or another learning rate"
  return Advice(cause, cure)


def _largest(dtype: str) -> float:
  return float(jnp.finfo(jnp.dtype(dtype)).max)
