"""The rows of the tables of an audit, a type for each table, and how rows that are alike add up."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from mpjax._diagnose.paths import merged, path_of_layers, unnumbered
from mpjax._jaxpr.locations import Direction, Source


class Leak(NamedTuple):
  """Float32 operations where low precision was asked for, which have one cause.

  Args:
    path: the path of the module or named scope where a low-precision value became float32.
    operation: the name of the primitive that made it float32.
    direction: the pass.
    dtype: the dtypes of the operands of that operation.
    source: its line; None if unknown.
    reason: why it is float32.
    kind: the kind of the cause: "parameter", "argument", "constant", "number" (with a dtype, such
      as `np.float32(2)`), "filled" (an array filled with such a number), "cast" (in the user's
      code), "matmul" (with a `preferred_element_type`), "promotion" (a matmul that casts its
      operands), "operation" or "kernel".
    cause: the path of an argument, the type of a constant, or the name of an operation.
    fix: the cure.
    flops: the FLOPs of the float32 matmuls in all runs.
    nbytes: the bytes of the float32 results in all runs.
    times: the number of runs of float32 operations.
  """

  path: str
  operation: str
  direction: Direction
  dtype: str
  source: Source | None
  reason: str
  kind: str
  cause: str
  fix: str
  flops: int
  nbytes: int
  times: int


class Kernel(NamedTuple):
  """An operation that is not entered.

  Args:
    path: the path of the module or named scope.
    operation: the name of the primitive.
    direction: the pass.
    dtype: the dtype of its largest operand.
    source: the line; None if unknown.
    reason: "unknown" if it does not estimate its cost; "" if it does.
    flops: its estimate of its FLOPs in all runs; 0 without one.
    times: the number of runs.
  """

  path: str
  operation: str
  direction: Direction
  dtype: str
  source: Source | None
  reason: str
  flops: int
  times: int


class OnPurpose(NamedTuple):
  """The float32 matmuls of a module where float32 is asked for.

  Args:
    path: the path of the module or named scope.
    reason: the rule, the policy or the code that asks for it.
    flops: the FLOPs in all runs.
  """

  path: str
  reason: str
  flops: int


class Lossy(NamedTuple):
  """Operations in low precision that would be safer in float32.

  Args:
    path: the path of the module or named scope.
    operation: the name of the primitive.
    direction: the pass.
    dtype: the dtype in which precision is lost.
    source: the line; None if unknown.
    reason: what is lost.
  """

  path: str
  operation: str
  direction: Direction
  dtype: str
  source: Source | None
  reason: str


class Module(NamedTuple):
  """A module with matmuls.

  Args:
    path: the path of the module or named scope.
    dtype: the dtypes of its matmuls, separated by spaces.
    reason: the rule that decided, or the `dtype` that its policy overrules; "" for neither.
    params: the dtypes of its parameters, by falling number of elements.
    activations: likewise for the results of the forward pass.
    gradients: likewise for the results of the backward pass.
    flops: the FLOPs of its matmuls in all runs.
  """

  path: str
  dtype: str
  reason: str
  params: tuple[str, ...]
  activations: tuple[str, ...]
  gradients: tuple[str, ...]
  flops: int


class Format(NamedTuple):
  """The matmuls of a module that are in one format, or in none for one reason.

  Args:
    path: the path of the module or named scope.
    dtype: the format, and whether it is emulated; "" for none.
    reason: why they are in no format; "" if they are in one.
    flops: the FLOPs in all runs.
  """

  path: str
  dtype: str
  reason: str
  flops: int


class Primitive(NamedTuple):
  """The operations of one primitive in one dtype.

  Args:
    operation: the name of the primitive.
    dtype: the dtype in which it runs.
    nbytes: the bytes of the results in all runs.
    times: the number of runs.
  """

  operation: str
  dtype: str
  nbytes: int
  times: int


Row = TypeVar("Row", bound=NamedTuple)

_COUNTS = ("flops", "nbytes", "times")
"""The fields that are added up, in the order in which they decide which row is larger.

FLOPs cost the most time. Rows without matmuls are ordered by memory traffic.
"""

_DTYPES = ("params", "activations", "gradients")
"""The fields that hold dtypes, the dtype of the most elements first."""


def summed(rows: Iterable[Row]) -> tuple[Row, ...]:
  """Returns one row for rows that differ only in their counts. The largest come first."""
  # A row without its counts is the key, since records are hashable.
  groups: dict[Row, list[Row]] = {}
  for row in rows:
    groups.setdefault(_with(row, **dict.fromkeys(_COUNTS, 0)), []).append(row)
  return _largest_first(map(_sum, groups.values()))


def summed_over_layers(rows: Iterable[Row]) -> tuple[Row, ...]:
  """Returns one row for rows that also differ in the numbers of their paths: "block_* (4)"."""
  groups: dict[Row, list[Row]] = {}
  for row in rows:
    # Dtypes are ordered by their number of elements, which may differ between layers. A cause names
    # one layer's parameter, and a reason may name a rule with its number.
    key = _with(
      row,
      **dict.fromkeys(_COUNTS, 0),
      **{name: tuple(sorted(getattr(row, name, ()))) for name in _DTYPES},
      **{name: unnumbered(getattr(row, name, "")) for name in ("path", "reason")},
      cause="",
    )
    groups.setdefault(key, []).append(row)
  return _largest_first(
    _with(
      _sum(group),
      path=path_of_layers(getattr(row, "path", "") for row in group),
      reason=merged([getattr(row, "reason", "") for row in group]),
    )
    for group in groups.values()
  )


def _sum(group: Sequence[Row]) -> Row:
  """Returns the first row of a group with the counts of all rows."""
  counts = {name: sum(getattr(row, name, 0) for row in group) for name in _COUNTS}
  return _with(group[0], **counts)


def _largest_first(rows: Iterable[Row]) -> tuple[Row, ...]:
  return tuple(sorted(rows, key=lambda row: [-getattr(row, name, 0) for name in _COUNTS]))


def _with(row: Row, **values: Any) -> Row:
  """Returns a row with other values in those fields that it has."""
  return row._replace(**{name: x for name, x in values.items() if name in row._fields})
