"""What `find_nonfinite` returns."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jax.extend.core import primitives as p

from mpjax._core.dtypes import is_low_precision
from mpjax._diagnostics.report import Column, Report, Section, right

Verdict: TypeAlias = Literal["scale", "value"]


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
    path: the module or scope of the operation that it came from.
    value: the value at the element that broke; None where operands have no such element.
  """

  name: str
  dtype: str
  shape: tuple[int, ...]
  least: float
  most: float
  inf: int
  nan: int
  path: str = ""
  value: float | None = None

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
    count: how many elements broke.
    device: which device of a `shard_map`, as its positions along the axes of the mesh.
    dtype: that of the result.
    shape: that of the result.
    operands: the ranges of the operands.
    result: that of the result.
    before: those of the results of the last operations before, the last one last.
    float32_value: the largest absolute value of the result if it is computed in float32.
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
  verdict: Verdict | None = None
  finite_at: float | None = None
  index: tuple[int, ...] | None = None
  count: int = 0
  device: Mapping[str, int] | None = None
  dtype: str | None = None
  shape: tuple[int, ...] | None = None
  operands: tuple[Range, ...] = ()
  result: Range | None = None
  before: tuple[Range, ...] = ()
  float32_value: float | None = None
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
    named = [self.path, self.operation, self.direction, self.source]
    parts = [part for part in named if part]
    if self.iteration is not None:
      parts.append(f"iteration {self.iteration}")
    if self.device is not None:
      parts.append("device " + ", ".join(f"{axis}={i}" for axis, i in self.device.items()))
    return " · ".join(parts)

  def sections(self) -> Sequence[Section]:
    """Returns what is printed."""
    if not self:
      text = "Every value that something computes with is finite."
      return [Section(lines=(text, *self._scale(), *self.notes))]
    about = f"First value that is not finite: {self._place()}"
    values = self.operands if self.result is None else (*self.operands, self.result)
    return [
      Section(lines=(about, *self._scale(), self.cause)),
      _table("Values", "value", values),
      _table("The operations before it", "operation", self.before),
      Section("Verdict", lines=(self._verdict(), *self.notes)),
      Section("Cure", lines=(self.cure,)),
    ]

  def _scale(self) -> tuple[str, ...]:
    if self.loss_scale is None:
      return ()
    step = "Loss" if self.step is None else f"Step {self.step}, loss"
    return (f"{step} scale {power(self.loss_scale)}.",)

  def _verdict(self) -> str:
    if self.finite_at is not None:
      return f"The scale's fault: all is finite at {power(self.finite_at)}."
    if self.operation in ("argument", "constant"):
      return "The value's own: it came so, and no loss scale helps."
    wide = self.float32_value
    if self.dtype is not None and wide is not None and _largest(self.dtype) < wide < math.inf:
      return (
        f"The value's own: in float32 it would be {wide:.3g} > {_largest(self.dtype):.5g}, the "
        f"largest number in {self.dtype}. No loss scale helps."
      )
    return "The value's own: no loss scale helps."


def _largest(dtype: str) -> float:
  return float(jnp.finfo(jnp.dtype(dtype)).max)


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
  report: NonfiniteReport, result: Range, wide: Range, selector: str
) -> tuple[str, str]:
  """Returns why the result of a step is not finite, and what to change.

  `wide` is its range computed in float32, and `selector` what selects the module in a rule.
  """
  dtype, path = result.dtype, report.path
  if report.finite_at is not None:
    text, lower = f"It overflows {dtype} at this loss scale.", f"{report.finite_at:g}"
    exponent = power(report.finite_at)
    if report.step is None:
      return text, f"loss_scale = {lower}  # {exponent}, or mpjax.DynamicLossScale()"
    call = f"opt_state = mpjax.set_loss_scale(opt_state, {lower})"
    return text, f"{call}  # {exponent}; DynamicLossScale gets there by itself"
  bad = [x for x in report.operands if x.inf or x.nan]
  if bad:
    return _of_inf(report, result, bad)
  if is_low_precision(jnp.dtype(dtype)) and wide.inf + wide.nan < result.inf + result.nan:
    text = (
      f"It overflows {dtype}: in float32 the largest of these values is {wide.most:.3g}, "
      f"and {dtype} ends at {_largest(dtype):.5g}."
    )
    if not path:
      return text, 'the policy "mixed_bfloat16", or a jax.named_scope here and a Rule with its path'
    # The outermost scope of a Flax model is called by its class. A rule on that would put all of
    # the model into float32, and in Linen it has no name.
    is_model = "/" not in path and path[:1].isupper()
    where = "mpjax.full_precision(fn)(x)  # for the code of this line,"
    rule = f'Rule("float32", path={selector})  #'
    return text, f"{where if is_model else rule} or the policy mixed_bfloat16"
  return _of_domain(report, result)


def _of_inf(report: NonfiniteReport, result: Range, bad: Sequence[Range]) -> tuple[str, str]:
  """NaN, or a sum that is inf, that came of an inf which is itself no fault."""
  if not result.nan:
    text = "It adds up an inf that was no fault before, as of a mask, or of a label that is masked."
    return text, "jnp.where(jnp.isfinite(x), x, 0)  # before the sum, or other labels"
  largest = f"jnp.where(mask, x, jnp.finfo(jnp.{result.dtype}).min)"
  if any(x.value == 0 for x in report.operands):
    text = (
      "It is 0 * inf. The inf itself did no harm before: it was discarded, or is a constant that "
      f"{result.dtype} cannot hold. Multiplied by 0, as a mask or a gradient is, it becomes NaN."
    )
    return text, (
      "x = jnp.where(mask, x, 1.0)  # before the operation whose inf is masked, or mask by "
      f"{largest} instead of a multiplication"
    )
  if len(bad) >= 2 or (bad[0].value is not None and math.isinf(bad[0].value)):
    text = (
      "It is inf - inf: a row in which everything is masked by -inf has no largest element that "
      "is finite."
    )
    return text, f"x = {largest}  # instead of -jnp.inf"
  return "A NaN came of operands that hold an inf.", "jnp.where(jnp.isfinite(x), x, 0)  # before it"


def _of_domain(report: NonfiniteReport, result: Range) -> tuple[str, str]:
  """What no wider dtype would help: operands that the operation does not take, or too large."""
  values, limit = [x.value for x in report.operands if x.value is not None], _largest(result.dtype)
  kind = "NaN" if result.nan and result.value is None else "inf"
  operands = " and ".join(f"{x:.3g}" for x in values) or "these operands"
  # No sum or matmul of small numbers overflows. Of one that does, parts may be inf - inf.
  overflows = any(x.most**2 * x.size > limit for x in report.operands)
  if values:
    # Of ordinary numbers inf is a pole, as that of `log1p` at -1.
    overflows = kind == "inf" and not (0 in values or all(1e-3 < abs(x) <= 1 for x in values))
  text = f"{report.operation} of {operands}"
  if overflows:
    text = f"{text} overflows {result.dtype}, which ends at {limit:.3g}."
    if report.operation == p.exp_p.name:
      return text, "jnp.exp(x - jnp.max(x))  # in a softmax; else jnp.minimum(x, limit) before it"
    return text, "jnp.clip(x, -limit, limit)  # of the operands, or another learning rate"
  if not values:
    text = f"{text} is {kind}: not defined, as a matrix without an inverse, or beyond its dtype."
    return text, "x + epsilon * jnp.eye(n)  # of a matrix; else smaller operands, an index inside"
  text = f"{text} is {kind} in every precision."
  # In a backward pass it is a slope, and the line has the operation whose slope it is.
  zero = 0 in values and report.direction == "forward"
  if zero and report.operation == p.div_p.name:
    return text, "x / jnp.where(y == 0, 1, y)  # or add an epsilon to the divisor"
  where = "jnp.where(x != 0, x, 1)" if zero else "jnp.where(allowed, x, safe)"
  return text, f"{where}  # as the operand of this line, and a jnp.where around its result"
