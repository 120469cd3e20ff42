"""What `find_nonfinite` returns."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import Primitive
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
    about = (f"First value that is not finite: {self._place()}", *self._scale(), self.cause)
    parts = [Section(lines=tuple(filter(None, about)))]
    values = [*self.operands, *([self.result] if self.result else [])]
    if values:
      parts.append(_table("Values", values, with_path=False))
    if self.before:
      parts.append(_table("The operations before it", self.before, with_path=True))
    parts.append(Section("Verdict", lines=(self._verdict(), *self.notes)))
    if self.cure:
      parts.append(Section("Cure", lines=(self.cure,)))
    return parts

  def _scale(self) -> tuple[str, ...]:
    if self.loss_scale is None:
      return ()
    step = "" if self.step is None else f"Step {self.step}, "
    text = f"{step}loss scale {power(self.loss_scale)}."
    return (text[0].upper() + text[1:],)

  def _verdict(self) -> str:
    if self.verdict == "scale":
      at = "" if self.finite_at is None else f": all is finite at {power(self.finite_at)}"
      return f"The scale's fault{at}."
    if self.verdict is None:
      return "Whether a smaller loss scale would help could not be decided."
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
  return (
    f"2^{exponent:.0f}" if exponent == round(exponent, 9) and exponent % 1 == 0 else f"{scale:g}"
  )


def _table(title: str, values: Sequence[Range], *, with_path: bool) -> Section:
  columns = (
    Column("operation" if with_path else "value", wide=True),
    Column("dtype and shape"),
    *right("least", "largest", "inf", "NaN"),
  )
  rows = []
  for each in values:
    name = f"{each.path} · {each.name}" if with_path and each.path else each.name
    shape = ",".join(map(str, each.shape))
    numbers = ("-" if math.isnan(x) else f"{x:.3g}" for x in (each.least, each.most))
    rows.append((name, f"{each.dtype}[{shape}]", *numbers, f"{each.inf}", f"{each.nan}"))
  return Section(title, columns=columns, rows=tuple(rows))


class Fault(NamedTuple):
  """What was seen of a step that broke."""

  primitive: Primitive
  backward: bool  # its pass
  path: str  # its module or scope
  selector: str  # what selects that in a rule, as one writes it
  operands: tuple[Range, ...]
  result: Range
  wide: Range | None  # that of the result computed in float32; None if that is not known
  finite_at: float | None  # the largest loss scale at which it is finite, if one is
  from_state: bool  # whether the loss scale is in the state of an optimizer


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
    text = (
      f"It overflows {result.dtype}: in float32 the largest of these values is {wide.most:.3g}, "
      f"and {result.dtype} ends at {_largest(result.dtype):.5g}."
    )
    if not fault.path:
      return text, 'the policy "mixed_bfloat16", or a jax.named_scope here and a Rule with its path'
    # The outermost scope of a Flax model is called by its class. A rule on that would put all of
    # the model into float32, and in Linen it has no name.
    if "/" not in fault.path and fault.path[:1].isupper():
      return text, (
        "mpjax.full_precision(fn)(x)  # for the code of this line, or the policy mixed_bfloat16"
      )
    return text, f'Rule("float32", path={fault.selector})  # or the policy mixed_bfloat16'
  return _of_domain(fault)


def _of_inf(fault: Fault, bad: list[Range]) -> tuple[str, str]:
  """NaN, or a sum that is inf, that came of an inf which is itself no fault."""
  dtype = fault.result.dtype
  if not fault.result.nan:
    text = "It adds up an inf that was no fault before, as of a mask, or of a label that is masked."
    return text, "jnp.where(jnp.isfinite(x), x, 0)  # before the sum, or other labels"
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
  """What no wider dtype would help: operands that the operation does not take, or too large."""
  result, operands = fault.result, "these operands"
  kind = "NaN" if result.nan and result.value is None else "inf"
  values, limit = [x.value for x in fault.operands if x.value is not None], _largest(result.dtype)
  # No sum or matmul of small numbers overflows. Of one that does, parts may be inf - inf.
  overflows = any(x.most**2 * x.size > limit for x in fault.operands)
  if values:
    operands = " and ".join(f"{x:.3g}" for x in values)
    # Of ordinary numbers inf is a pole, as that of `log1p` at -1.
    ordinary = 0 in values or all(1e-3 < abs(x) <= 1 for x in values)
    overflows = kind == "inf" and not ordinary
  text = f"{fault.primitive.name} of {operands}"
  if overflows:
    text = f"{text} overflows {result.dtype}, which ends at {limit:.3g}."
    if fault.primitive is p.exp_p:
      return text, "jnp.exp(x - jnp.max(x))  # in a softmax; else jnp.minimum(x, limit) before it"
    return text, "jnp.clip(x, -limit, limit)  # of the operands, or another learning rate"
  if not values:
    text = f"{text} is {kind}: not defined, as a matrix without an inverse, or beyond its dtype."
    return text, "x + epsilon * jnp.eye(n)  # of a matrix; else smaller operands, an index inside"
  text = f"{text} is {kind} in every precision."
  # In a backward pass it is a slope, and the line has the operation whose slope it is.
  zero = 0 in values and not fault.backward
  if zero and fault.primitive is p.div_p:
    return text, "x / jnp.where(y == 0, 1, y)  # or add an epsilon to the divisor"
  where = "jnp.where(x != 0, x, 1)" if zero else "jnp.where(allowed, x, safe)"
  return text, f"{where}  # as the operand of this line, and a jnp.where around its result"
