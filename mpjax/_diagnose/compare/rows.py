"""Compare two runs: the errors of the modules that both have, and the first module where they part.

Values are matched rather than steps: calls of modules by path, pass and number, and their outputs
by the module that made them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpjax._core.types import NumpyArray, is_inexact
from mpjax._diagnose.compare.modules import Loop
from mpjax._diagnose.compare.report import (
  LISTED,
  CompareReport,
  CompareRow,
  Error,
  call_text,
  is_above,
  is_in_module,
  is_own,
  numbered_paths,
)
from mpjax._diagnose.compare.run import Kept, RanCall, RecordedRun
from mpjax._diagnose.paths import is_within
from mpjax._diagnose.relative_errors import RelativeErrors, relative_errors
from mpjax._diagnose.report import some


def compared(run: RecordedRun, reference: RecordedRun, spacing: float = 0.0) -> CompareReport:
  """Returns the report of a run and the one that it is compared with.

  Args:
    run: the run.
    reference: the other one.
    spacing: at least the distance of numbers at 1, see `CompareReport`.

  Returns:
    The report.
  """
  errors = _Errors(run, reference)
  numbered = numbered_paths([*run.calls, *reference.calls])
  # Calls are matched by path, pass and number. What remains is in one run alone.
  others = {(call.path, call.direction, call.call): call for call in reference.calls}
  unmatched = list[str]()
  placed: list[_Placed] = []
  for call in run.calls:
    name = call.path + call_text(call, numbered)
    other = others.pop((call.path, call.direction, call.call), None)
    if other is None:
      unmatched.append(f"{name} is only in {run.name}.")
      continue
    placed += errors.rows(call, other)
    # Order does not matter, because outputs are paired by maker and shape.
    shapes = [sorted(value.shape for value in each.outputs) for each in (call, other)]
    if _lengths(call) != _lengths(other):
      both = f"{_lengths(call)} and {_lengths(other)}"
      unmatched.append(f"{name}: its loops have {both} iterations.")
    elif shapes[0] != shapes[1]:
      both = " and ".join(some([str([*shape]) for shape in each], LISTED) for each in shapes)
      unmatched.append(f"{name}: its outputs have the shapes {both}.")
  for call in others.values():
    unmatched.append(f"{call.path}{call_text(call, numbered)} is only in {reference.name}.")
  placed.sort(key=lambda each: each.first)

  of_arguments, shares = errors.of(run.arguments, reference.arguments)
  every_argument = {name: error.value for name, error in of_arguments.items()} | shares
  arguments = {name: error for name, error in every_argument.items() if error > 0}
  results, decisions = errors.of(run.results, reference.results)
  # Rounding is meant where a policy asks for it, and differs between dtypes and machines.
  is_meant = spacing > 0 or run.spacing != reference.spacing or run.machine != reference.machine
  spacing = max(spacing, run.spacing, reference.spacing)
  # An error far above rounding is the better evidence, so it is tried first.
  first = _first(placed, functools.partial(is_above, spacing=spacing, arguments=arguments))
  if first is None and not is_meant and not arguments:
    first = _first(placed, is_own)
  # Both runs often fail for the same reason, which is said once.
  notes = dict.fromkeys(f"No gradients: {each.note}" for each in (run, reference) if each.note)
  return CompareReport(
    names=(run.name, reference.name),
    rows=tuple(each.row for each in placed),
    first=first,
    results={path: error.value for path, error in results.items()},
    decisions=decisions,
    arguments=arguments,
    unmatched=tuple(unmatched),
    spacing=spacing,
    notes=tuple(notes),
    run=run,
    zero_in_g=tuple(path for path, error in results.items() if error.is_zero_in_g),
  )


class _Placed(NamedTuple):
  """A row, and where it begins and ends in the order of execution."""

  row: CompareRow
  first: tuple[float, ...]
  last: tuple[float, ...]


def _lengths(call: RanCall) -> tuple[int, ...]:
  return tuple(loop.length for loop in call.loops)


class _Errors(NamedTuple):
  """Two runs whose arrays are compared."""

  run: RecordedRun
  reference: RecordedRun

  def of(
    self, keys: Mapping[str, str], others: Mapping[str, str]
  ) -> tuple[dict[str, Error], dict[str, float]]:
    """Returns the errors of arrays that both runs have, and the shares of integers that differ."""
    errors, shares = dict[str, Error](), dict[str, float]()
    # Only names in both are compared. `unmatched` is about modules.
    for name in keys:
      pair = self._pair(keys[name], others.get(name, ""))
      if pair is None or pair[0].shape != pair[1].shape:
        continue
      if any(map(is_inexact, pair)):
        errors[name] = _at(relative_errors([pair]), ())
      else:
        # The distance between two indices, such as two tokens, means nothing.
        shares[name] = float(np.mean(pair[0] != pair[1])) if pair[0].size else 0.0
    return errors, shares

  def rows(self, call: RanCall, other: RanCall) -> Iterator[_Placed]:
    """Yields a row for each iteration of a call that both runs have."""
    lengths = _lengths(call)
    outputs = _alike(call.outputs, other.outputs)
    if lengths != _lengths(other) or not outputs:
      return
    keys = [(a.key, b.key) for a, b in outputs]
    if call.direction == "forward":
      output = self._largest(keys, lengths)
    else:
      # Outputs of a backward pass include gradients that are 0 except for rounding. Such a gradient
      # alone would have a huge relative error, so all of them have one error together.
      pairs = [self._pair(*each) for each in keys]
      output = relative_errors([pair for pair in pairs if pair is not None], len(lengths))
    keys = [(a.key, b.key) for a, b in _alike(call.inputs, other.inputs)]
    # A call that takes only arguments of the function has exact inputs.
    inputs = self._largest(keys, lengths) if call.inputs else _same_everywhere(0.0, lengths)
    cotangent = self._largest([(a.cotangent, b.cotangent) for a, b in outputs], lengths)
    # Outside of loops there is one empty index, and so one row.
    for index in np.ndindex(lengths):
      gradient = Error(math.nan)
      # The gradient of a shared parameter is a sum over its calls. Only the first call shows it.
      if call.direction == "forward" and call.call == 0:
        gradient = self._gradient(call.path, index)
      errors = {
        "output": _at(output, index),
        "inputs": _at(inputs, index),
        "cotangent": _at(cotangent, index),
        "gradient": gradient,
      }
      row = CompareRow(
        path=call.path,
        call=call.call,
        iteration=index,
        **{name: error.value for name, error in errors.items()},
        direction=call.direction,
        zero_in_g=tuple(name for name, error in errors.items() if error.is_zero_in_g),
      )
      order = _order(call.loops, index)
      # If two calls end with the same step, the inner call comes first. Its path is longer.
      last = (*order, call.last, math.inf, -len(call.path))
      yield _Placed(row, (*order, call.first, -1, len(call.path)), last)

  def _pair(self, key: str, other: str) -> tuple[NumpyArray, NumpyArray] | None:
    a, b = self.run.arrays.get(key), self.reference.arrays.get(other)
    return None if a is None or b is None else (a, b)

  def _largest(self, keys: Iterable[tuple[str, str]], lengths: tuple[int, ...]) -> RelativeErrors:
    """Returns the largest error of some pairs, for each iteration; NaN without pairs."""
    pairs = (self._pair(*each) for each in keys)
    errors = [relative_errors([pair], len(lengths)) for pair in pairs if pair is not None]
    if not errors:
      return _same_everywhere(math.nan, lengths)
    # Report "0 in g" only if no error is inf for another reason, such as an overflow.
    zero = [each.of_zero | np.isfinite(each.values) for each in errors]
    largest = np.max([each.values for each in errors], axis=0)
    return RelativeErrors(largest, np.isinf(largest) & np.all(zero, axis=0))

  def _gradient(self, path: str, index: tuple[int, ...]) -> Error:
    """Returns the error of the gradients of a module, and of those inside, in an iteration."""
    # Gradients are matched by the path of the parameter, and belong to its first reader.
    others = {each.leaf: each for each in self.reference.gradients}
    pairs: list[tuple[NumpyArray, NumpyArray]] = []
    for each in self.run.gradients:
      if not is_within(each.path, path) or each.leaf not in others:
        continue
      pair = self._pair(each.key, others[each.leaf].key)
      if pair is None or pair[0].shape != pair[1].shape:
        continue
      # Each iteration of a scan over layers has its own slice of the gradient.
      if each.stacked and len(index) == each.stacked:
        pairs.append((pair[0][index], pair[1][index]))
      # A parameter that all iterations share is in the row of the first iteration.
      elif not any(index):
        pairs.append(pair)
    return _at(relative_errors(pairs), ()) if pairs else Error(math.nan)


def _at(errors: RelativeErrors, index: tuple[int, ...]) -> Error:
  """Returns the error of one iteration."""
  return Error(float(errors.values[index]), bool(errors.of_zero[index]))


def _same_everywhere(error: float, lengths: tuple[int, ...]) -> RelativeErrors:
  return RelativeErrors(np.full(lengths, error), np.zeros(lengths, bool))


def _alike(values: Sequence[Kept], others: Sequence[Kept]) -> list[tuple[Kept, Kept]]:
  """Returns the values of two calls that are the same: of one maker and shape, or of one shape."""
  # The maker identifies a value. If code between modules differs, the shape is the next best sign.
  pairs = [*_paired(values, others, lambda value: (value.maker, value.shape))]
  own, theirs = ({pair[side] for pair in pairs} for side in (0, 1))
  left = [x for x in values if x not in own], [x for x in others if x not in theirs]
  return [*pairs, *_paired(*left, lambda value: value.shape)]


def _paired(
  values: Sequence[Kept], others: Sequence[Kept], same: Callable[[Kept], object]
) -> Iterator[tuple[Kept, Kept]]:
  """Yields pairs for which `same` returns the same, in order, if there are as many in both."""
  for kind in dict.fromkeys(map(same, values)):
    own, theirs = ([x for x in each if same(x) == kind] for each in (values, others))
    # Different counts leave open which values belong together.
    if len(own) == len(theirs):
      yield from zip(own, theirs, strict=True)


def _order(loops: Sequence[Loop], index: Sequence[int]) -> tuple[float, ...]:
  """Returns when an iteration runs: numbers of loops, and how many iterations come before."""
  pairs = zip(loops, index, strict=True)
  # The index is the position along the axis. A reverse scan begins with the last one.
  places = ((loop.number, loop.length - 1 - i if loop.reverse else i) for loop, i in pairs)
  return tuple(itertools.chain(*places))


def _first(placed: Sequence[_Placed], parts: Callable[[float, float], bool]) -> CompareRow | None:
  """Returns the row of the module where two runs part, or before which they do.

  Args:
    placed: all rows.
    parts: whether an error shows that the runs part, given the error before.
  """
  # Modules are nested, so their beginnings and ends are sorted together: when it is, whether it is
  # an end, and the row. At one time, beginnings come before ends. The row is no part of the order.
  events = [(each.first, False, each.row) for each in placed]
  events += [(each.last, True, each.row) for each in placed]
  largest = 0.0
  parted = list[CompareRow]()
  is_backward = False
  for _, ends, row in sorted(events, key=lambda event: event[:2]):
    # After the forward pass, inputs are also cotangents, which no module has returned.
    is_backward |= row.direction == "backward"
    if ends and parts(row.output, row.inputs):
      # The parted inputs of modules inside come from the code of this module.
      outside = (each for each in parted if not is_in_module(each, row))
      return next(outside, row)
    if ends:
      # Later inputs may have the largest error of any output so far.
      largest = max(largest, row.output)
    elif not is_backward and parts(row.inputs, largest):
      # No module before has such an error, so it comes from code between the modules.
      parted.append(row)
  return next(iter(parted), None)
