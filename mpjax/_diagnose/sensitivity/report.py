"""The report of `mpjax.sensitivity`: the predicted error, and the roundings that cause it."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import primitives as p

from mpjax._core.types import NumpyArray
from mpjax._diagnose.paths import path_of_layers, unnumbered
from mpjax._diagnose.report import Report, Section, percent
from mpjax._jaxpr.locations import Direction, Source

THRESHOLD = 8.0
"""The largest amplification that needs no cure.

It is below 4 in the 47 healthy models of docs/sensitivity_measured.md. Of the 25 delicate
programs on that page, three have a rounding above 8.
"""


_ABRUPT = 3.0
"""The ratio of the predicted and the measured error above which the first order says little."""


class RoundingRow(NamedTuple):
  """The roundings of one kind of operation, at a line of a module.

  Args:
    path: the path of the module, of its named scopes, or of its parameters.
    source: the line; None if unknown.
    operation: the name of the primitive.
    direction: the pass.
    dtype: the format that the values are rounded to.
    contribution: the relative change of the result that they cause. Values that overflow are left
      out.
    amplification: the contribution over the error of one rounding.
    overflows: whether a value is too large for the format. The printed contribution is then inf.
    cure: the change that avoids the roundings, as code; "" if none is needed.
  """

  path: str
  source: Source | None
  operation: str
  direction: Direction
  dtype: str
  contribution: float = 0.0
  amplification: float = 0.0
  overflows: bool = False
  cure: str = ""


class DecisionRow(NamedTuple):
  """An operation without a derivative: a comparison, an index, an integer, or a kernel.

  Args:
    path: the path of the module, of its named scopes, or of its parameters.
    source: the line; None if unknown.
    operation: the name of the primitive.
    share: the share of its results that differ from float32; NaN if it is not followed.
  """

  path: str
  source: Source | None
  operation: str
  share: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SensitivityReport(Report):
  """The error that low precision causes in the result of a function, see `mpjax.sensitivity`.

  Args:
    name: the name of the function.
    of: what the errors are relative to: "gradient" of a loss, "update" of the parameters of
      a step, or "result".
    predicted: the relative error of the result, added up from all roundings and decisions. Values
      that overflow are left out.
    measured: the relative error with all roundings made, one operation after the other. It is inf
      if the result is not finite.
    by_decisions: the part of the error that comes from decisions that differ.
    roundings: the roundings, by contribution. Those that overflow come first.
    decisions: the comparisons, indices and integers that differ, by share.
    cures: the changes that the rows above the threshold need, as code.
    predicted_with_cures: the predicted error with all of them.
    measured_with_cures: the relative error that is measured with all of them.
    cured_share: the share of the matmuls' FLOPs in low precision that the cures move to float32.
    not_followed: kernels, and operations that cannot be differentiated. The prediction does not
      count roundings of their operands.
    exact: the arrays of the result in float32, as NumPy arrays.

  >>> import jax.numpy as jnp, mpjax
  >>> report = mpjax.sensitivity(mpjax.autocast(jnp.dot))(jnp.eye(8) / 3, jnp.eye(8))
  >>> report.of, report.cures, 0.0005 < report.predicted < 0.005
  ('result', (), True)
  """

  name: str
  of: str
  predicted: float
  measured: float
  by_decisions: float
  roundings: tuple[RoundingRow, ...]
  decisions: tuple[DecisionRow, ...]
  cures: tuple[str, ...]
  predicted_with_cures: float
  measured_with_cures: float
  cured_share: float
  not_followed: tuple[DecisionRow, ...]
  exact: tuple[NumpyArray, ...]

  def as_dict(self) -> Mapping[str, object]:
    # The results may be as large as the model.
    return {name: x for name, x in super().as_dict().items() if name != "exact"}

  def sections(self) -> list[Section]:
    return [self._errors(), self._cures(), self._decisions(), self._not_followed()]

  def _errors(self) -> Section:
    """Returns the predicted error, and the table of roundings."""
    first = f"The {self.of} of {self.name} has a relative error of {_text(self.predicted)}, as "
    first += "predicted from its roundings. With all of them made, "
    if math.isfinite(self.measured):
      lines = [f"{first}it is {_text(self.measured)}."]
    else:
      lines = [f"{first}the {self.of} is not finite."]
    decides = self.by_decisions > self.predicted / 2
    low, high = sorted((self.predicted, self.measured))
    is_abrupt = math.isfinite(high) and high > _ABRUPT * low
    if any(row.overflows for row in self.roundings):
      lines.append("Values overflow. See the first rows.")
    elif not self.cures and not math.isfinite(self.measured):
      lines.append("Find where it comes from: print(mpjax.find_nonfinite(fn)(*args)).")
    elif not self.cures:
      end = "." if decides or is_abrupt else ": nothing to do."
      lines.append(f"No rounding is amplified more than {THRESHOLD:.0f} times{end}")
    if is_abrupt:
      lines.append(
        f"The two errors differ by more than {_ABRUPT:.0f} times: the {self.of} changes abruptly "
        "within one rounding. Trust the measured error."
      )
      if self.of == "update":
        lines.append("The first update of Adam does so. Pass the optimizer state of a later step.")
    if decides:
      lines.append(
        f"Decisions that differ, see below, cause an error of {_text(self.by_decisions)} alone."
      )
    if self.not_followed:
      lines.append("The prediction is a lower bound: some operations are not followed.")
    groups: dict[tuple[object, ...], list[RoundingRow]] = {}
    for row in self.roundings:
      key = unnumbered(row.path), row.source, row.operation, row.direction, row.dtype
      groups.setdefault(key, []).append(row)

    def contribution(group: Sequence[RoundingRow]) -> float:
      return math.hypot(*(row.contribution for row in group))

    def rank(group: Sequence[RoundingRow]) -> tuple[bool, float]:
      return not any(row.overflows for row in group), -contribution(group)

    rows = [
      (
        path_of_layers(row.path for row in group),
        f"{_OPERATIONS.get(group[0].operation, group[0].operation)} "
        f"{_DIRECTIONS[group[0].direction]}".rstrip(),
        group[0].dtype,
        "inf" if any(row.overflows for row in group) else f"{contribution(group):.1g}",
        f"{max(row.amplification for row in group):.2g}",
        str(group[0].source or "-"),
      )
      for group in sorted(groups.values(), key=rank)
    ]
    columns = "module, operation, to, contribution, amplified, line"
    return Section.cut("Roundings by their contribution", columns, rows, lines)

  def _cures(self) -> Section:
    if not self.cures:
      return Section()
    first = f"With these changes the predicted error is {_text(self.predicted_with_cures)}, and "
    first += f"the measured one {_text(self.measured_with_cures)}. They move "
    lines = [f"{first}{percent(self.cured_share)} of the matmuls' FLOPs to float32."]
    for i, code in enumerate(self.cures, 1):
      # A rule is not written at the line.
      source = next((row.source for row in self.roundings if row.cure == code), None)
      is_at_line = source is not None and not code.startswith("mpjax.Rule")
      lines.append(f"{i}. {source}: {code}" if is_at_line else f"{i}. {code}")
    return Section(
      f"Cures of roundings that are amplified more than {THRESHOLD:.0f} times", tuple(lines)
    )

  def _decisions(self) -> Section:
    rows = [
      (row.path or "(root)", row.operation, percent(row.share), str(row.source or "-"))
      for row in self.decisions
    ]
    lines = ["Comparisons and indices have no derivative. The share of their results that differ:"]
    return Section.cut("Decisions", "module, operation, differ, line", rows, lines if rows else ())

  def _not_followed(self) -> Section:
    rows = [
      (row.path or "(root)", row.operation, str(row.source or "-")) for row in self.not_followed
    ]
    lines = ["These operations have no derivative, so roundings of their operands are not counted."]
    title = "Operations that are not followed"
    return Section.cut(title, "module, operation, line", rows, lines if rows else ())


_OPERATIONS = {
  p.convert_element_type_p.name: "cast",
  p.dot_general_p.name: "matmul",
  p.conv_general_dilated_p.name: "convolution",
}
"""Shorter words for the names of primitives."""

_DIRECTIONS = {"forward": "", "backward": "backward", "recomputed": "again"}
"""The pass of a rounding, as a table shows it."""


def _text(error: float) -> str:
  return f"{error:.2g}" if math.isfinite(error) else "not finite"
