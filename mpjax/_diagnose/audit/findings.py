"""The rows of an audit, and how it adds up rows that are alike."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mpjax._diagnose.paths import merged, path_of_layers, unnumbered
from mpjax._jaxpr.locations import Direction, Source

DTYPES = ("params", "activations", "gradients")
"""The fields of a `Finding` that hold dtypes."""


class Finding(NamedTuple):
  """Operations of a module that are alike. Fields that a list does not use have their default.

  Args:
    path: the path of the module or named scope. For a leak it is the place where a low-precision
      value became float32.
    operation: the name of the primitive; with `compiled=`, of the HLO instruction.
    direction: the pass.
    dtype: the dtype in which the operation runs, or which a collective sends. For a leak or a
      kernel: the dtypes of its operands. For a matmul: its format, and whether that is emulated.
    source: the line; None if unknown.
    reason: the reason of the row. For a leak: why it is float32. For a module: the rule that
      decided, or the `dtype` that its policy overrules. For a matmul: why it is in no format, ""
      if it is in one.
    kind: the kind of the cause of a leak: "parameter", "argument", "constant", "number" (with a
      dtype, such as `np.float32(2)`), "filled" (an array filled with such a number), "cast" (in the
      user's code), "matmul" (with a `preferred_element_type`), "promotion" (a matmul that casts its
      operands), "operation" or "kernel".
    cause: the cause of a leak: the path of an argument, the type of a constant, or the name of an
      operation.
    fix: the cure of a leak.
    params: the dtypes of the parameters of a module, by falling number of elements.
    activations: likewise for the results of the forward pass.
    gradients: likewise for the results of the backward pass.
    flops: the FLOPs of matmuls in all runs.
    nbytes: the bytes of the results in all runs; of a collective, those on one device.
    times: the number of runs.
  """

  path: str
  operation: str = ""
  direction: Direction = "forward"
  dtype: str = ""
  source: Source | None = None
  reason: str = ""
  kind: str = ""
  cause: str = ""
  fix: str = ""
  params: tuple[str, ...] = ()
  activations: tuple[str, ...] = ()
  gradients: tuple[str, ...] = ()
  flops: int = 0
  nbytes: int = 0
  times: int = 0


def summed(rows: Iterable[Finding]) -> tuple[Finding, ...]:
  """Returns one row for rows that differ only in their counts. The largest come first."""
  return _largest_first([_sum(group) for group in _groups(rows, _without_counts)])


def summed_over_layers(rows: Iterable[Finding]) -> tuple[Finding, ...]:
  """Returns one row for rows that also differ in the numbers of their paths: "block_* (4)"."""
  return _largest_first([_sum_of_layers(group) for group in _groups(rows, _without_numbers)])


def _groups(
  rows: Iterable[Finding], key: Callable[[Finding], Finding]
) -> Iterable[Sequence[Finding]]:
  """Returns the rows that have the same key, in the order of the first row of each group."""
  # A row without its counts is the key, since records are hashable.
  groups: dict[Finding, list[Finding]] = {}
  for row in rows:
    groups.setdefault(key(row), []).append(row)
  return groups.values()


def _without_counts(row: Finding) -> Finding:
  return row._replace(flops=0, nbytes=0, times=0)


def _without_numbers(row: Finding) -> Finding:
  """Returns a row without the numbers by which layers differ."""
  # Dtypes are ordered by their number of elements, which may differ between layers.
  dtypes = {name: tuple(sorted(getattr(row, name))) for name in DTYPES}
  # A cause names one layer's parameter, and a reason may name a rule with its number.
  path, reason = unnumbered(row.path), unnumbered(row.reason)
  return _without_counts(row)._replace(path=path, reason=reason, cause="", **dtypes)


def _sum(group: Sequence[Finding]) -> Finding:
  """Returns the first row of a group with the counts of all rows."""
  # All other fields are equal in the group.
  return group[0]._replace(
    flops=sum(row.flops for row in group),
    nbytes=sum(row.nbytes for row in group),
    times=sum(row.times for row in group),
  )


def _sum_of_layers(group: Sequence[Finding]) -> Finding:
  """Returns the sum of a group, whose path says how many layers it has."""
  path = path_of_layers(row.path for row in group)
  return _sum(group)._replace(path=path, reason=merged([row.reason for row in group]))


def _largest_first(rows: Iterable[Finding]) -> tuple[Finding, ...]:
  # FLOPs cost the most time. Rows without matmuls are ordered by memory traffic.
  return tuple(sorted(rows, key=lambda row: (-row.flops, -row.nbytes, -row.times)))
