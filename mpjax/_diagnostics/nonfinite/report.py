"""What `find_nonfinite` returns."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.dtypes import is_low_precision
from mpjax._diagnostics.report import Column, Report, Section, right
from mpjax._jaxprs.graph import Operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """The numbers of an array.

  Fields:
    name: what it is: an operand, the result, or the operation that it came from.
    dtype: its dtype.
    shape: its shape; on one device, inside of a `shard_map`.
    least: the least absolute value of those that are finite; NaN if none is.
    most: the largest.
    inf: how many are inf.
    nan: how many are NaN.
    value: the value at the element that broke; NaN where operands have no such element.
    path: the module or scope of the operation that it came from.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  least: float
  most: float
  inf: int
  nan: int
  value: float
  path: str = ""

  @property
  def size(self) -> int:
    """How many numbers there are."""
    return math.prod(self.shape)


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
    before: those of the results of the last operations before, the last one last.
    loss_scale: the loss scale, if one is in the arguments.
    step: how many steps it has seen.
    cause: why it is not finite, a sentence.
    cure: what to change, a line of code.
    notes: what else is to be known.

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
  before: tuple[Range, ...] = ()
  loss_scale: float | None = None
  step: int | None = None
  cause: str = ""
  cure: str = ""
  notes: tuple[str, ...] = ()

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
      text = "Every value that something computes with is finite."
      return [Section(lines=(text, *scale, *self.notes))]
    verdict = "The value's own: no loss scale helps."
    if self.finite_at is not None:
      verdict = f"The scale's fault: all is finite at {power(self.finite_at)}."
    elif self.operation in ("argument", "constant"):
      verdict = "The value's own: it came so, and no loss scale helps."
    about = f"First value that is not finite: {self._place()}"
    values = self.operands if self.result is None else (*self.operands, self.result)
    return [
      Section(lines=(about, *scale, self.cause)),
      _table("Values", "value", values),
      _table("The operations before it", "operation", self.before),
      Section("Verdict", lines=(verdict, *self.notes)),
      Section("Cure", lines=(self.cure,)),
    ]


def power(scale: float) -> str:
  """Returns a loss scale as a power of two, if it is one."""
  exponent = math.log2(scale) if scale > 0 else math.nan
  return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def _table(title: str, column: str, values: Sequence[Range]) -> Section:
  numbers = right("least", "largest", "inf", "NaN")
  columns = (Column(column, wide=True), Column("dtype and shape"), *numbers)
  rows = []
  for each in values:
    name = f"{each.path} · {each.name}" if each.path else each.name
    shape = ",".join(map(str, each.shape))
    numbers = ("-" if math.isnan(x) else f"{x:.3g}" for x in (each.least, each.most))
    rows.append((name, f"{each.dtype}[{shape}]", *numbers, f"{each.inf}", f"{each.nan}"))
  return Section(title, columns=columns, rows=tuple(rows))


def cause_and_cure(
  report: NonfiniteReport, wide: Range, rounded: Operation | None, in_float32: str
) -> tuple[str, str]:
  """Returns why the result of a step is not finite, and what to change.

  `wide` is its range computed in float32, `rounded` what was computed in low precision before an
  operation of linear algebra, and `in_float32` how that, or else the step, is in float32.
  """
  operation, operands = report.operation, report.operands
  result = report.result or wide
  dtype, largest = result.dtype, float(jnp.finfo(jnp.dtype(result.dtype)).max)
  if report.finite_at is not None:
    text, lower = f"It overflows {dtype} at this loss scale.", f"{report.finite_at:g}"
    if report.step is None:
      return text, f"loss_scale = {lower}  # {power(report.finite_at)}, or mpjax.DynamicLossScale()"
    call = f"opt_state = mpjax.set_loss_scale(opt_state, {lower})"
    return text, f"{call}  # {power(report.finite_at)}; DynamicLossScale gets there by itself"

  # What came of an inf which is itself no fault.
  bad, values = [x for x in operands if x.inf or x.nan], [x.value for x in operands]
  mask = f"jnp.where(mask, x, jnp.finfo(jnp.{dtype}).min)"
  if bad and not result.nan:
    text = "It adds up an inf that was no fault before, as of a mask, or of a label that is masked."
    return text, "jnp.where(jnp.isfinite(x), x, 0)  # before the sum, or other labels"
  if bad and 0 in values:
    text = (
      "It is 0 * inf. The inf itself did no harm before: it was discarded, or is a constant that "
      f"{dtype} cannot hold. Multiplied by 0, as a mask or a gradient is, it becomes NaN."
    )
    return text, (
      "x = jnp.where(mask, x, 1.0)  # before the operation whose inf is masked, or mask by "
      f"{mask} instead of a multiplication"
    )
  if len(bad) >= 2 or (bad and math.isinf(bad[0].value)):
    text = (
      "It is inf - inf: a row in which everything is masked by -inf has no largest element that "
      "is finite."
    )
    return text, f"x = {mask}  # instead of -jnp.inf"
  if bad:
    text = "A NaN came of operands that hold an inf."
    return text, "jnp.where(jnp.isfinite(x), x, 0)  # before it"

  # What float32 helps.
  if is_low_precision(jnp.dtype(dtype)) and wide.inf + wide.nan < result.inf + result.nan:
    text = (
      f"It overflows {dtype}: in float32 the largest of these values is {wide.most:.3g}, "
      f"and {dtype} ends at {largest:.5g}."
    )
    return text, f"{in_float32} or the policy mixed_bfloat16"
  if rounded is not None:
    low = next(v for v in (*rounded.results, *rounded.operands) if v.is_low)
    text = (
      f"{operation} is not defined for these operands, as for a matrix without an inverse. "
      f"{low.dtype} may be why: {rounded.name} of {rounded.where.path or 'this function'} rounds "
      "to it what they are computed from."
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
    text = f"{text} is {kind}: not defined, as a matrix without an inverse, or beyond its dtype."
    return text, "x + epsilon * jnp.eye(n)  # of a matrix; else smaller operands, an index inside"
  text = f"{text} is {kind} in every precision."
  # In a backward pass it is a slope, and the line has the operation whose slope it is.
  zero = 0 in values and report.direction == "forward"
  if zero and operation == p.div_p.name:
    return text, "x / jnp.where(y == 0, 1, y)  # or add an epsilon to the divisor"
  where = "jnp.where(x != 0, x, 1)" if zero else "jnp.where(allowed, x, safe)"
  return text, f"{where}  # as the operand of this line, and a jnp.where around its result"
