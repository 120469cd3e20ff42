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


_AROUND = "# as the operand, or divisor, of this line, and a jnp.where around its result"


def advice(
  report: NonfiniteReport, in_float32: Range, rounded: Operation | None, code: str
) -> Advice:
  """Returns why the result of an operation is not finite, and what to change.

  Args:
    report: what is known of the operation.
    in_float32: its result if it runs in float32.
    rounded: the last low-precision operation before one of linear algebra.
    code: runs that, or else the operation, in float32, and begins a comment.
  """
  result = report.result or in_float32
  dtype = result.dtype
  # The order matters: a smaller scale is the simplest cure, and operands come before results.
  if report.finite_at is not None:
    exponent = power(report.finite_at)
    # A scale by hand is a number in the code. A state of mpjax is changed by `set_loss_scale`.
    if report.step is None:
      cure = f"loss_scale = {report.finite_at:g}  # {exponent}, or mpjax.DynamicLossScale()"
    else:
      call = f"opt_state = mpjax.states.set_loss_scale(opt_state, {report.finite_at:g})"
      cure = f"{call}  # {exponent}; DynamicLossScale gets there by itself"
    return Advice(f"It overflows {dtype} at this loss scale.", cure)
  nonfinite = [each for each in report.operands if each.inf or each.nan]
  if nonfinite:
    return _of_nonfinite_operands(report, result, nonfinite)
  # Float32 need not make everything finite: a mask may hold other infs.
  fewer_in_float32 = in_float32.inf + in_float32.nan < result.inf + result.nan
  if is_low_precision(jnp.dtype(dtype)) and fewer_in_float32:
    return Advice(
      f"It overflows {dtype}: in float32 the largest of these values is {in_float32.most:.3g}, "
      f"and {dtype} ends at {_largest(dtype):.5g}. Later casts to {dtype} may overflow too. "
      "Bfloat16 has the range of float32.",
      f'{code} or the policy "mixed_bfloat16"',
    )
  # Rounding may have made a matrix singular or indefinite.
  if rounded is not None:
    # `rounded` has a low-precision operand or result.
    low = next(v.dtype for v in (*rounded.results, *rounded.operands) if v.is_low)
    return Advice(
      f"{report.operation} is not defined for these operands, as for a matrix without an inverse. "
      f"Rounding may be why: they come from {rounded.name} of {rounded.where.path}, in {low}.",
      f"{code} or x + epsilon * jnp.eye(n)",
    )
  return _of_values(report, result)


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


def _of_values(report: NonfiniteReport, result: Range) -> Advice:
  """Returns advice on operands that are out of the domain, or too large, in every precision."""
  # An unknown operand, as of a sum or a matmul, has the value NaN.
  values = [each.value for each in report.operands if not math.isnan(each.value)]
  # The element that broke.
  kind = "-inf" if result.value < 0 else "inf"
  if result.nan and math.isnan(result.value):
    kind = "NaN"
  shown = " and ".join(f"{x:.3g}" for x in values) if values else "these operands"
  text = f"{report.operation} of {shown}"
  if _overflows(report, result, values, kind):
    # `exp` of a large number is most often a softmax without its maximum subtracted.
    if report.operation == p.exp_p.name:
      cure = "jnp.exp(x - jnp.max(x))  # in a softmax; else jnp.minimum(x, limit) before it"
    else:
      cure = "jnp.clip(x, -limit, limit)  # of the operands, or another learning rate"
    dtype = result.dtype
    return Advice(f"{text} overflows {dtype}, which ends at {_largest(dtype):.3g}.", cure)
  if not values:
    return Advice(
      f"{text} is {kind}: not defined, as of a matrix without an inverse, or beyond its dtype.",
      "x + epsilon * jnp.eye(n)  # of a matrix; else smaller operands, an index inside",
    )
  # In a backward pass the operation is a slope. The line computes another function, such as a root.
  is_known = 0 in values and report.direction == "forward"
  selection = "x != 0, x, 1" if is_known else "allowed, x, safe"
  return Advice(f"{text} is {kind} in every precision.", f"jnp.where({selection})  {_AROUND}")


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


def _largest(dtype: str) -> float:
  return float(jnp.finfo(jnp.dtype(dtype)).max)
