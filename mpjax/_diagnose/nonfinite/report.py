"""What `mpjax.find_nonfinite` found, as fields and as text."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from mpjax._diagnose.report import Report, Section, power


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """The numbers of an array.

  Fields:
    name: "operand 0" and so on, "result", "argument" or "constant".
    dtype: its dtype.
    shape: its shape; on one device, inside of a `shard_map`.
    least: the smallest finite absolute value; NaN if none is finite.
    most: the largest finite absolute value; NaN if none is finite.
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
  """The first value of a function that was not finite though its operands were.

  It is false if there is none: `if mpjax.find_nonfinite(fn)(x): ...`.

  Args:
    operation: the primitive, as `jax.make_jaxpr` prints it; "argument" for an argument that came
      so, "constant" for an array that the function closes over; None if nothing was found.
    path: the module or named scope; of an argument its name, such as "params/w".
    direction: "forward" or "backward".
    source: the line of code, "model.py:57"; None if it is not known.
    iteration: the iteration of the loop, counted from 0 along its inputs, so that the backward pass
      of a layer has the number of the layer; a tuple in nested loops, None outside of loops.
    verdict: "scale" if the function is finite at a smaller loss scale, "value" if it is at none.
    finite_at: the largest power of two, as loss scale, at which it was run and all of it is finite,
      if the verdict is "scale".
    index: the first element that broke, in the shape of the result: under `vmap`, it says the lane.
    device: which device of a `shard_map`, as its positions along the axes of the mesh.
    operands: the ranges of the operands.
    result: the range of the result, with its dtype and shape.
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
    # The report is a condition in user code: false means that nothing was found.
    return self.operation is not None

  def sections(self) -> Sequence[Section]:
    # No operation broke, so there are no values to show.
    if not self:
      finite = "Every value that something computes with is finite."
      return [Section(lines=(finite, *self._scale_lines()))]
    # The place comes first, because it decides where the user looks.
    place = f"First value that is not finite: {' · '.join(self._place())}"
    # An argument that is not finite has a result and no operands.
    ranges = self.operands if self.result is None else (*self.operands, self.result)
    columns = ("value", "dtype and shape", "least |x|", "largest |x|", "inf", "NaN")
    return [
      Section(lines=(place, *self._scale_lines(), self.cause)),
      Section("Values", columns=columns, rows=tuple(map(_row, ranges))),
      Section("Verdict", lines=(self._verdict_line(),)),
      Section("Cure", lines=(self.cure,)),
    ]

  def _scale_lines(self) -> Sequence[str]:
    if self.loss_scale is None:
      return ()
    # A scale by hand counts no steps.
    if self.step is None:
      return (f"Loss scale {power(self.loss_scale)}.",)
    return (f"Step {self.step}, loss scale {power(self.loss_scale)}.",)

  def _place(self) -> Iterator[str]:
    """Yields the parts of the line that says where the value was computed."""
    yield from filter(None, (self.path, self.operation, self.direction, self.source))
    if self.iteration is not None:
      yield f"iteration {self.iteration}"
    if self.device is not None:
      yield "device " + ", ".join(f"{axis}={i}" for axis, i in self.device.items())

  def _verdict_line(self) -> str:
    if self.finite_at is not None:
      return f"The loss scale is too large: everything is finite at {power(self.finite_at)}."
    # A backward overflow without a known scale may come from a scale in the code, which was not
    # tried.
    if self.loss_scale is None and self.direction == "backward":
      return "The values are at fault, unless the loss is scaled: no argument holds a scale to try."
    return "The values are at fault: no loss scale helps."


def _row(numbers: Range) -> tuple[str, ...]:
  """Returns the cells of an array in the table of values."""
  # The type is written as in a jaxpr: "float16[2,3]".
  shape = ",".join(map(str, numbers.shape))
  # NaN means that the array has no finite element.
  least, most = ("-" if math.isnan(x) else f"{x:.3g}" for x in (numbers.least, numbers.most))
  dtype = f"{numbers.dtype}[{shape}]"
  return (numbers.name, dtype, least, most, f"{numbers.inf}", f"{numbers.nan}")
