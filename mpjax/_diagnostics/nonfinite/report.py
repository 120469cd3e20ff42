"""What `find_nonfinite` returns."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.dtypes import is_low_precision
from mpjax._diagnostics.report import Report, Section
from mpjax._jaxprs.graph import Operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """The numbers of an array.

  Fields:
    name: what it is: an operand or the result.
    dtype: its dtype.
    shape: its shape; on one device, inside of a `shard_map`.
    least: the least absolute value of those that are finite; NaN if none is.
    most: the largest.
    inf: how many are inf.
    nan: how many are NaN.
    value: the value at the element that broke; NaN where operands have no such element.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  least: float
  most: float
  inf: int
  nan: int
  value: float


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NonfiniteReport(Report):
  """Where the first value of a function was not finite though what it came from was.

  False if there is none: `if mpjax.find_nonfinite(fn)(x): ...`. Printed, it says all of this.

  Args:
    operation: the primitive, as `jax.make_jaxpr` prints it; "argument" for an argument that came
      so, "constant" for an array that the function closes over; None if nothing was found.
    path: the module or named scope; of an argument its name, such as "params['w']".
    direction: "forward" or "backward".
    source: the line of code, "model.py:57"; None if it is not known.
    iteration: that of the loop, counted from 0 along its inputs (so that the backward pass of a
      layer has the number of the layer); a tuple for loops inside of one another, None outside.
    verdict: "scale" if the function is finite at a smaller loss scale, "value" if it is at none.
    finite_at: the largest power of two, as loss scale, at which it was run and all of it is finite,
      if the verdict is "scale".
    index: the first element that broke, in the shape of the result: under `vmap`, it says the lane.
    device: which device of a `shard_map`, as its positions along the axes of the mesh.
    operands: the ranges of the operands.
    result: that of the result, with its dtype and shape.
    loss_scale: the loss scale, if one is in the arguments.
    step: how many steps it has seen.
    cause: why it is not finite, a sentence.
    cure: what to change, a line of code.

  >>> import jax.numpy as jnp, mpjax
  >>> found = mpjax.find_nonfinite(lambda x: jnp.sum(x * x))(jnp.asarray([300.0], jnp.float16))
  >>> bool(found), found.operation, found.direction, found.verdict
  (True, 'mul', 'forward', 'value')
  """

  operation: str | None = None
  path: str = ""
  direction: Literal["forward", "backward"] | None = None
  source: str | None = None
  iteration: int | tuple[int, ...] | None = None
  verdict: Literal["scale", "value"] | None = None
  finite_at: float | None = None
  index: tuple[int, ...] | None = None
  device: Mapping[str, int] | None = None
  operands: tuple[Range, ...] = ()
  result: Range | None = None
  loss_scale: float | None = None
  step: int | None = None
  cause: str = ""
  cure: str = ""

  def __bool__(self) -> bool:
    return self.operation is not None

  def __repr__(self) -> str:
    if not self:
      return "NonfiniteReport(nothing found)"
    return f"NonfiniteReport({self._place()}, verdict={self.verdict!r})"

  def _place(self) -> str:
    parts = [part for part in (self.path, self.operation, self.direction, self.source) if part]
    if self.iteration is not None:
      parts.append(f"iteration {self.iteration}")
    if self.device is not None:
      parts.append("device " + ", ".join(f"{axis}={i}" for axis, i in self.device.items()))
    return " · ".join(parts)

  def sections(self) -> Sequence[Section]:
    """Returns what is printed."""
    scale = ()
    if self.loss_scale is not None:
      step = "Loss" if self.step is None else f"Step {self.step}, loss"
      scale = (f"{step} scale {power(self.loss_scale)}.",)
    if not self:
      return [Section(lines=("Every value that something computes with is finite.", *scale))]
    verdict = "The value's own: no loss scale helps."
    if self.finite_at is not None:
      verdict = f"The scale's fault: all is finite at {power(self.finite_at)}."
    elif self.loss_scale is None and self.direction == "backward":
      verdict = "The value's own, unless the loss is scaled: no argument holds a loss scale to try."
    columns = ("value", "dtype and shape", "least", "largest", "inf", "NaN")
    rows = []
    for each in (*self.operands, *filter(None, [self.result])):
      shape = f"{each.dtype}[{','.join(map(str, each.shape))}]"
      numbers = ("-" if math.isnan(x) else f"{x:.3g}" for x in (each.least, each.most))
      rows.append((each.name, shape, *numbers, f"{each.inf}", f"{each.nan}"))
    return [
      Section(lines=(f"First value that is not finite: {self._place()}", *scale, self.cause)),
      Section("Values", columns=columns, rows=tuple(rows)),
      Section("Verdict", lines=(verdict,)),
      Section("Cure", lines=(self.cure,)),
    ]


def power(scale: float) -> str:
  """Returns a loss scale as a power of two, if it is one."""
  exponent = math.log2(scale) if scale > 0 else math.nan
  return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def cause_and_cure(
  report: NonfiniteReport, wide: Range, rounded: Operation | None, in_float32: str
) -> tuple[str, str]:
  """Returns why the result of a step is not finite, and what to change.

  `wide` is its range computed in float32, `rounded` what was computed in low precision before an
  operation of linear algebra, and `in_float32` the code by which that, or else the step, is not.
  """
  operation, operands, result = report.operation, report.operands, report.result or wide
  dtype, largest = result.dtype, float(jnp.finfo(jnp.dtype(result.dtype)).max)
  if report.finite_at is not None:
    text, exponent = f"It overflows {dtype} at this loss scale.", power(report.finite_at)
    call = f"opt_state = mpjax.set_loss_scale(opt_state, {report.finite_at:g})"
    if report.step is None:
      return text, f"loss_scale = {report.finite_at:g}  # {exponent}, or mpjax.DynamicLossScale()"
    return text, f"{call}  # {exponent}; DynamicLossScale gets there by itself"

  values, infs = [x.value for x in operands], [x for x in operands if x.inf or x.nan]
  mask = f"jnp.where(mask, x, jnp.finfo(jnp.{dtype}).min)"
  if infs and result.nan and 0 in values:
    text = "It is 0 * inf, of an inf that did no harm before: discarded, or a constant beyond "
    cure = "x = jnp.where(mask, x, 1.0)  # before the operation whose inf is masked, or mask by "
    return f"{text}{dtype}.", f"{cure}{mask} instead of a multiplication"
  if infs and result.nan and (len(infs) > 1 or math.isinf(infs[0].value)):
    text = "It is inf - inf: a row all of which is masked by -inf has no finite element."
    return text, f"x = {mask}  # instead of -jnp.inf"
  if infs:
    text = "It adds up an inf that was no fault before, as of a mask, or of a label that is masked."
    return text, "jnp.where(jnp.isfinite(x), x, 0)  # before it, or other labels"

  if is_low_precision(jnp.dtype(dtype)) and wide.inf + wide.nan < result.inf + result.nan:
    text = f"It overflows {dtype}: in float32 the largest of these values is {wide.most:.3g}"
    return (
      f"{text}, and {dtype} ends at {largest:.5g}.",
      f"{in_float32} or the policy mixed_bfloat16",
    )
  if rounded is not None:
    low = next(v for v in (*rounded.results, *rounded.operands) if v.is_low)
    text = (
      f"{operation} is not defined for these operands, as for a matrix without an inverse. "
      f"Rounding may be why: they come from {rounded.name} of {rounded.where.path}, in {low.dtype}."
    )
    return text, f"{in_float32} or x + epsilon * jnp.eye(n)"

  # What no wider dtype would help: operands that the operation does not take, or too large.
  values = [x for x in values if not math.isnan(x)]
  kind = "NaN" if result.nan and math.isnan(result.value) else "inf"
  text = f"{operation} of {' and '.join(f'{x:.3g}' for x in values) or 'these operands'}"
  # No sum or matmul of small numbers overflows. Of one that does, parts may be inf - inf.
  overflows = any(x.most**2 * math.prod(x.shape) > largest for x in operands)
  if values:
    # Of ordinary numbers inf is a pole, as that of `log1p` at -1.
    overflows = kind == "inf" and not (0 in values or all(1e-3 < abs(x) <= 1 for x in values))
  if overflows:
    text = f"{text} overflows {dtype}, which ends at {largest:.3g}."
    if operation == p.exp_p.name:
      return text, "jnp.exp(x - jnp.max(x))  # in a softmax; else jnp.minimum(x, limit) before it"
    return text, "jnp.clip(x, -limit, limit)  # of the operands, or another learning rate"
  if not values:
    text = f"{text} is {kind}: not defined, as of a matrix without an inverse, or beyond its dtype."
    return text, "x + epsilon * jnp.eye(n)  # of a matrix; else smaller operands, an index inside"
  text = f"{text} is {kind} in every precision."
  # In a backward pass it is a slope, and the line has the operation whose slope it is.
  zero = 0 in values and report.direction == "forward"
  if zero and operation == p.div_p.name:
    return text, "x / jnp.where(y == 0, 1, y)  # or add an epsilon to the divisor"
  where = "jnp.where(x != 0, x, 1)" if zero else "jnp.where(allowed, x, safe)"
  return text, f"{where}  # as the operand of this line, and a jnp.where around its result"
