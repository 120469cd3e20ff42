"""The report of `mpjax.compare`: the errors by module, as text, HTML, JSON and a picture."""

import collections
import dataclasses
import functools
import importlib
import itertools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpjax._core.types import NumpyArray
from mpjax._diagnose.compare.modules import Loop
from mpjax._diagnose.compare.run import Gradient, Kept, RanCall, RecordedRun, save
from mpjax._diagnose.paths import is_inside, is_within
from mpjax._diagnose.relative_errors import RelativeErrors, relative_errors
from mpjax._diagnose.report import MOST, Report, Section, rest
from mpjax._jaxpr.locations import Direction

FACTOR = 10.0
"""Two runs part at a module whose output error exceeds its input error by this factor."""

_SHOWN = 40
"""The most rows that are printed. The attributes hold all."""

_LONG = 12
"""The fewest characters of a shared path that is printed once for several rows."""

CallKey: TypeAlias = tuple[str, Direction, int]

Numbered: TypeAlias = Collection[tuple[str, Direction]]
"""The paths and passes with several calls, whose labels have the number of the call."""


class CompareRow(NamedTuple):
  """The relative errors of one call of a module, the norm of a difference over the norm in `g`.

  Fields:
    path: the path of the module; of a function without scopes a line, such as "model.py:12".
    call: how many calls of this path came before.
    iteration: the number of the iteration of each loop around it; () outside of loops.
    output: the largest error of its outputs; inf if one run alone is not finite, or if `g` has 0.
      In a backward pass, the error of all outputs together.
    inputs: the largest error of its inputs, without parameters; 0 if all are arguments of the
      function, NaN if the two calls take other shapes.
    cotangent: the error of the gradient by its outputs; NaN without one.
    gradient: the error of the gradient by its parameters and those inside, together; NaN without
      one. It is in the row of the first call, and of the first iteration if all share the
      parameter.
    direction: "forward", or "backward" in a function that computes gradients itself.
    zero_in_g: the names of the errors that are inf because `g` has 0 where `f` has not.
  """

  path: str
  call: int
  iteration: tuple[int, ...]
  output: float
  inputs: float
  cotangent: float
  gradient: float
  direction: Direction = "forward"
  zero_in_g: tuple[str, ...] = ()


class _Error(NamedTuple):
  """The relative error of an array or several, and whether it is inf because `g` has 0."""

  value: float
  is_zero_in_g: bool = False


def _at(errors: RelativeErrors, index: tuple[int, ...]) -> _Error:
  """Returns the error of one iteration."""
  return _Error(float(errors.values[index]), bool(errors.of_zero[index]))


class _Placed(NamedTuple):
  """A row, and where it begins and ends in the order of execution."""

  row: CompareRow
  first: tuple[float, ...]
  last: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CompareReport(Report):
  """Where two runs differ, see `mpjax.compare`.

  Args:
    names: the names of the function and of the reference.
    rows: the errors of each module, in the order in which they begin.
    first: the first module, in the order of execution, whose output has an error of more than 10
      times that of its inputs and 10 times `spacing`; or whose inputs have one that no module
      before has, since other code is between. If there is none: the first module whose output
      differs although its inputs are equal to the bit, or whose inputs differ although all outputs
      before are equal. That needs two runs with equal arguments, on one machine, whose matmuls run
      in one dtype, and no policy, because the rounding of a policy is meant. None if there is
      none.
    results: the errors of what the functions returned, by path.
    arguments: the errors of the arguments that differ. Only those of saved runs do.
    unmatched: a sentence for each module that one run alone has, or both with other shapes.
    spacing: the distance from 1 to the next number, of the dtype that most matmuls run in, or of
      the compute dtype of the policy. The largest counts.
    notes: further sentences, such as why there are no gradients.
    run: the run of the function, which `save` writes.
    zero_in_g: the names among `results` whose error is inf because `g` returns 0.

  >>> import jax, jax.numpy as jnp, mpjax
  >>> def f(w, x):
  ...   with jax.named_scope("up"):
  ...     return jnp.sum(x @ w)
  >>> report = mpjax.compare(f, policy="mixed_bfloat16")(jnp.eye(2), jnp.asarray([1.0, 1.001]))
  >>> report.rows[0].path, report.first
  ('up', None)
  """

  names: tuple[str, str]
  rows: tuple[CompareRow, ...]
  first: CompareRow | None
  results: Mapping[str, float]
  arguments: Mapping[str, float]
  unmatched: tuple[str, ...]
  spacing: float
  notes: tuple[str, ...]
  run: RecordedRun = dataclasses.field(repr=False)
  zero_in_g: tuple[str, ...] = ()

  def as_dict(self) -> Mapping[str, object]:
    return {k: x for k, x in super().as_dict().items() if k != "run"}

  def save(self, path: str | os.PathLike[str]) -> None:
    """Writes the run of the function, for `mpjax.compare(g, path)` in another process.

    Args:
      path: a file, such as "run.npz".
    """
    save(self.run, path)

  def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
    """Draws the errors of the modules, in the order of execution.

    Args:
      path: a file to write, such as "compare.png"; None writes none.

    Returns:
      The figure of matplotlib.

    Raises:
      ImportError: matplotlib is not installed.
    """
    # Matplotlib is optional and slow to import.
    plt = importlib.import_module("matplotlib.pyplot")
    numbered = _numbered(self.rows)
    rows = self.rows[:: len(self.rows) // 80 + 1]  # As many as can be read, evenly from all.
    # Thinning may drop the first module, which the picture marks. Keep the order of the rows.
    if self.first is not None and self.first not in rows:
      rows = tuple(row for row in self.rows if row in (*rows, self.first))
    size = (10, 1.5 + 0.22 * len(rows))
    figure, axis = plt.subplots(figsize=size, layout="constrained", facecolor="white")
    places = np.arange(len(rows))
    kinds = (("output", "o"), ("inputs", "|"), ("cotangent", "^"), ("gradient", "s"))
    for number, (kind, marker) in enumerate(kinds):
      errors = np.asarray([getattr(row, kind) for row in rows], float)
      # A logarithmic axis has no place for 0, inf and NaN.
      seen = np.isfinite(errors) & (errors > 0)
      if seen.any():
        style = {"label": kind, "color": f"C{number}", "alpha": 0.8}
        axis.semilogx(errors[seen], places[seen], marker, **style)
    axis.axvline(FACTOR * self.spacing, color="0.6", linewidth=1, linestyle="--")
    if self.first is not None:
      axis.axhline(rows.index(self.first), color="C3", linewidth=1.1)
      # The transform makes 1 the right edge, while the height stays that of the row.
      axis.text(1, rows.index(self.first), "first", color="C3", fontsize=8, ha="right")
      axis.texts[-1].set_transform(axis.get_yaxis_transform())
    axis.set_yticks(places, [_label(row, row.path, numbered)[-46:] for row in rows], fontsize=7.5)
    # Execution runs from top to bottom.
    axis.invert_yaxis()
    axis.set_xlabel("relative error, if it is not 0; dashed: 10 times the spacing of numbers at 1")
    if axis.get_legend_handles_labels()[0]:
      # A legend inside of the axes would cover points.
      figure.legend(loc="outside lower left", ncols=len(kinds), fontsize=8)
    figure.suptitle(f"{self.names[0]} against {self.names[1]}", x=0.01, ha="left", weight="bold")
    if path is not None:
      figure.savefig(path, dpi=150)
    # A notebook would show an open figure twice: at the end of the cell, and as its result.
    plt.close(figure)
    return figure

  def sections(self) -> list[Section]:
    columns = ("module", "output", "inputs", "cotangent", "gradient", "")
    shown = _shown(self.rows, self.first)
    # Without gradients, both columns are empty and therefore not shown.
    differentiated = any(not math.isnan(row.cotangent) for row in shown)
    tree = _tree(shown, _numbered(self.rows))
    rows = [(label, *self._cells(row, differentiated)) for label, row in tree]
    lines = [self._verdict(), *self._differences(), *self.notes, *_omitted(self.rows, shown)]
    title = f"{self.names[0]} against {self.names[1]}"
    unmatched = Section("Not compared", (*self.unmatched[:MOST], *rest(self.unmatched)))
    return [Section(title, tuple(lines), columns, tuple(rows)), unmatched]

  def _cells(self, row: CompareRow | None, differentiated: bool) -> tuple[str, ...]:
    """Returns the cells of a row after the first one; empty ones for a line without numbers."""
    if row is None:
      return ("",) * 5
    forward = [_cell(row, "output"), _cell(row, "inputs")]
    backward = [_cell(row, "cotangent"), _cell(row, "gradient")] if differentiated else ["", ""]
    return (*forward, *backward, "first" if row is self.first else "")

  def _verdict(self) -> str:
    # The three cases have the order of the rules of `first`.
    rule = f"10 times that of its inputs and 10 times {self.spacing:.1e}"
    row = self.first
    none = f"No module has an error of more than {rule}."
    if row is None:
      return none
    name = _label(row, row.path, _numbered(self.rows))
    output, inputs = _cell(row, "output"), _cell(row, "inputs")
    if _is_above(row.output, row.inputs, self._least):
      errors = f"{output}, that of its inputs {inputs}"
      return f"They part at {name}: the error of its output is {errors}. It is more than {rule}."
    if _is_own(row.output, row.inputs):
      text = f"They part at {name}: its inputs are equal to the bit, and the error of its output is"
      return f"{text} {output}. {none}"
    text = f"They part before {name}: the error of its inputs is {inputs}, and no module before it"
    return f"{text} has one like that. The code between is in no module that both have."

  @property
  def _least(self) -> float:
    """The error that rounding makes."""
    return max(self.spacing, *self.arguments.values(), 0.0)

  def _differences(self) -> Iterator[str]:
    results = [
      f"{path} {_text(_Error(error, path in self.zero_in_g))}"
      for path, error in self.results.items()
    ]
    if results:
      yield f"Errors of what they return: {_some(results)}."
    if self.arguments:
      differing = [f"{name} {_text(_Error(error))}" for name, error in self.arguments.items()]
      yield f"The arguments differ: {_some(differing)}."


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
  # Calls are matched by path, pass and number. What remains is in one run alone.
  others = {_key(call): call for call in reference.calls}
  unmatched = list[str]()
  placed: list[_Placed] = []
  name_of = functools.partial(_name, numbered=_numbered([*run.calls, *reference.calls]))
  for call in run.calls:
    other = others.pop(_key(call), None)
    if other is None:
      unmatched.append(f"{name_of(call)} is only in {run.name}.")
    else:
      placed += errors.rows(call, other)
      unmatched += _mismatches(call, other, name_of(call))
  unmatched += [f"{name_of(call)} is only in {reference.name}." for call in others.values()]
  arguments = {
    name: x.value for name, x in errors.of(run.arguments, reference.arguments) if x.value > 0
  }
  results = dict(errors.of(run.results, reference.results))
  # Rounding is meant where a policy asks for it, and differs between dtypes and machines.
  is_meant = spacing > 0 or run.spacing != reference.spacing or run.machine != reference.machine
  spacing = max(spacing, run.spacing, reference.spacing)
  placed.sort(key=lambda each: each.first)
  least = max(spacing, *arguments.values(), 0.0)  # The error of rounding, or of the arguments.
  # An error far above rounding is the better evidence, so it is tried first.
  first = _first(placed, functools.partial(_is_above, least=least))
  if first is None and not is_meant and not arguments:
    first = _first(placed, _is_own)
  # Both runs often fail for the same reason, which is said once.
  notes = dict.fromkeys(f"No gradients: {each.note}" for each in (run, reference) if each.note)
  return CompareReport(
    names=(run.name, reference.name),
    rows=tuple(each.row for each in placed),
    first=first,
    results={path: error.value for path, error in results.items()},
    arguments=arguments,
    unmatched=tuple(unmatched),
    spacing=spacing,
    notes=tuple(notes),
    run=run,
    zero_in_g=tuple(path for path, error in results.items() if error.is_zero_in_g),
  )


def _key(call: RanCall) -> CallKey:
  return call.path, call.direction, call.call


def _name(call: RanCall, numbered: Numbered) -> str:
  return call.path + _call_text(call, numbered)


def _mismatches(call: RanCall, other: RanCall, name: str) -> Iterator[str]:
  """Yields why all or some outputs of two calls cannot be compared."""
  if _lengths(call) != _lengths(other):
    yield f"{name}: its loops have {_lengths(call)} and {_lengths(other)} iterations."
    return
  # Order does not matter, because outputs are paired by maker and shape.
  shapes = [sorted(value.shape for value in each.outputs) for each in (call, other)]
  if shapes[0] != shapes[1]:
    both = " and ".join(map(_shapes, shapes))
    yield f"{name}: its outputs have the shapes {both}."


def _lengths(call: RanCall) -> tuple[int, ...]:
  return tuple(loop.length for loop in call.loops)


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
  return _some([str([*shape]) for shape in shapes])


def _some(texts: Sequence[str]) -> str:
  more = len(texts) - 4
  first = ", ".join(texts[:4])
  return f"{first} and {more} more" if more > 0 else first


class _Errors(NamedTuple):
  """Two runs whose arrays are compared."""

  run: RecordedRun
  reference: RecordedRun

  def of(self, keys: Mapping[str, str], others: Mapping[str, str]) -> Iterator[tuple[str, _Error]]:
    """Yields the names and errors of arrays that both runs have."""
    # Only names in both are compared. `unmatched` is about modules.
    for name in keys:
      pair = self._pair(keys[name], others.get(name, ""))
      if pair is not None and pair[0].shape == pair[1].shape:
        yield name, _at(relative_errors([pair]), ())

  def rows(self, call: RanCall, other: RanCall) -> Iterator[_Placed]:
    """Yields a row for each iteration of a call that both runs have."""
    lengths = _lengths(call)
    outputs = _alike(call.outputs, other.outputs)
    if lengths != _lengths(other) or not outputs:
      return
    output = self._output(outputs, call, lengths)
    pairs = ((a.key, b.key) for a, b in _alike(call.inputs, other.inputs))
    # A call that takes only arguments of the function has exact inputs.
    inputs = self._largest(pairs, lengths) if call.inputs else _same_everywhere(0.0, lengths)
    pairs = ((a.cotangent, b.cotangent) for a, b in outputs)
    cotangent = self._largest(pairs, lengths)
    # Outside of loops there is one empty index, and so one row.
    for index in np.ndindex(lengths):
      gradient = _Error(math.nan)
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

  def _output(
    self, outputs: Iterable[tuple[Kept, Kept]], call: RanCall, lengths: tuple[int, ...]
  ) -> RelativeErrors:
    """Returns the error of the outputs of a call, for each iteration."""
    keys = [(a.key, b.key) for a, b in outputs]
    if call.direction == "forward":
      return self._largest(keys, lengths)
    # Outputs of a backward pass include gradients that are 0 except for rounding. Such a gradient
    # alone would have a huge relative error.
    pairs = [self._pair(*each) for each in keys]
    return relative_errors([pair for pair in pairs if pair is not None], len(lengths))

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

  def _gradient(self, path: str, index: tuple[int, ...]) -> _Error:
    """Returns the error of the gradients of a module, and of those inside, in an iteration."""
    # Gradients are matched by the path of the parameter, and belong to its first reader.
    others = {each.leaf: each for each in self.reference.gradients}
    pairs: list[tuple[NumpyArray, NumpyArray]] = []
    for each in self.run.gradients:
      if not is_within(each.path, path) or each.leaf not in others:
        continue
      pair = self._pair(each.key, others[each.leaf].key)
      part = None if pair is None else _part(each, pair, index)
      if part is not None:
        pairs.append(part)
    return _at(relative_errors(pairs), ()) if pairs else _Error(math.nan)


def _part(
  gradient: Gradient, pair: tuple[NumpyArray, NumpyArray], index: tuple[int, ...]
) -> tuple[NumpyArray, NumpyArray] | None:
  """Returns the gradients of one iteration, of a parameter that both runs have."""
  if pair[0].shape != pair[1].shape:
    return None
  # Each iteration of a scan over layers has its own slice of the gradient.
  if gradient.stacked and len(index) == gradient.stacked:
    return pair[0][index], pair[1][index]
  # A parameter that all iterations share is in the row of the first iteration.
  return None if any(index) else pair


def _alike(values: Sequence[Kept], others: Sequence[Kept]) -> list[tuple[Kept, Kept]]:
  """Returns the values of two calls that are the same: of one maker and shape, or of one shape."""
  # The maker identifies a value. If code between modules differs, the shape is the next best sign.
  pairs = [*_paired(values, others, _by_maker)]
  own, theirs = ({pair[side] for pair in pairs} for side in (0, 1))
  left = [x for x in values if x not in own], [x for x in others if x not in theirs]
  return [*pairs, *_paired(*left, _by_shape)]


def _paired(
  values: Sequence[Kept], others: Sequence[Kept], same: Callable[[Kept], object]
) -> Iterator[tuple[Kept, Kept]]:
  """Yields pairs for which `same` returns the same, in order, if there are as many in both."""
  for kind in dict.fromkeys(map(same, values)):
    own, theirs = ([x for x in each if same(x) == kind] for each in (values, others))
    # Different counts leave open which values belong together.
    if len(own) == len(theirs):
      yield from zip(own, theirs, strict=True)


def _by_maker(value: Kept) -> tuple[str, tuple[int, ...]]:
  return value.maker, value.shape


def _by_shape(value: Kept) -> tuple[int, ...]:
  return value.shape


def _same_everywhere(error: float, lengths: tuple[int, ...]) -> RelativeErrors:
  return RelativeErrors(np.full(lengths, error), np.zeros(lengths, bool))


def _order(loops: Sequence[Loop], index: Sequence[int]) -> tuple[float, ...]:
  """Returns when an iteration runs: numbers of loops, and how many iterations come before."""
  pairs = zip(loops, index, strict=True)
  # The index is the position along the axis. A reverse scan begins with the last one.
  places = ((loop.number, loop.length - 1 - i if loop.reverse else i) for loop, i in pairs)
  return tuple(itertools.chain(*places))


def _is_above(error: float, others: float, least: float) -> bool:
  """Whether an error is far above the others and above rounding; false if the others are NaN."""
  # `np.maximum` passes on NaN, and a comparison with NaN is false. Python's `max` would drop NaN.
  return bool(error > FACTOR * np.maximum(others, least))


def _is_own(error: float, others: float) -> bool:
  """Whether there is an error although all is equal to the bit before."""
  return error > 0 and others == 0


class _Event(NamedTuple):
  """The beginning or the end of a call, in the order of execution."""

  when: tuple[float, ...]
  ends: bool
  row: CompareRow


def _first(placed: Sequence[_Placed], parts: Callable[[float, float], bool]) -> CompareRow | None:
  """Returns the row of the module where two runs part, or before which they do.

  Args:
    placed: all rows.
    parts: whether an error shows that the runs part, given the error before.
  """
  # Modules are nested, so their beginnings and ends are sorted together.
  events = [_Event(each.first, False, each.row) for each in placed]
  events += [_Event(each.last, True, each.row) for each in placed]
  largest = 0.0
  parted = list[CompareRow]()
  is_backward = False
  # At one time, beginnings come before ends. The row is no part of the order.
  for event in sorted(events, key=lambda event: event[:2]):
    row = event.row
    # After the forward pass, inputs are also cotangents, which no module has returned.
    is_backward |= row.direction == "backward"
    if event.ends and parts(row.output, row.inputs):
      # The parted inputs of modules inside come from the code of this module.
      outside = (each for each in parted if not _is_inside(each, row))
      return next(outside, row)
    if event.ends:
      # Later inputs may have the largest error of any output so far.
      largest = max(largest, row.output)
    elif not is_backward and parts(row.inputs, largest):
      # No module before has such an error, so it comes from code between the modules.
      parted.append(row)
  return next(iter(parted), None)


def _shown(rows: Sequence[CompareRow], first: CompareRow | None) -> list[CompareRow]:
  """Returns the rows that are printed.

  Those with an error come before others, then those of outer modules, then those near the first.
  """
  # Show as many levels of modules as fit. `counts` has the number of erring rows up to each level.
  depths = [row.path.count("/") for row in rows]
  erring = [depth for depth, row in zip(depths, rows, strict=True) if not _is_equal(row)] or depths
  counts = (sum(depth <= most for depth in erring) for most in range(max(depths, default=0) + 1))
  fitting = sum(1 for count in counts if count <= _SHOWN)
  place = next((i for i, row in enumerate(rows) if row is first), 0)

  def rank(i: int) -> tuple[bool, int, int]:
    # Of rows without an error, show the outer modules first.
    is_equal = _is_equal(rows[i])
    return is_equal, depths[i] if is_equal else depths[i] >= fitting, abs(i - place)

  ranked = sorted(range(len(rows)), key=rank)
  return [rows[i] for i in sorted(ranked[:_SHOWN])]


def _is_equal(row: CompareRow) -> bool:
  """Whether the inputs and outputs of a module are equal to the bit."""
  return row.output == 0 and not row.inputs > 0


def _omitted(rows: Sequence[CompareRow], shown: Sequence[CompareRow]) -> Iterator[str]:
  """Yields how many rows are not printed, and how many of these have equal outputs."""
  left = len(rows) - len(shown)
  equal = sum(map(_is_equal, rows)) - sum(map(_is_equal, shown))
  if left:
    yield f"{left} rows more are in `.rows`." + (f" Equal to the bit: {equal}." if equal else "")


def _tree(
  rows: Sequence[CompareRow],
  numbered: Numbered,
  around: CompareRow | None = None,
  path: str = "",
  depth: int = 0,
) -> Iterator[tuple[str, CompareRow | None]]:
  """Yields the rows with labels. Rows inside of a module are indented below it.

  Args:
    rows: the rows inside of `around`, in order.
    numbered: the paths whose calls have numbers.
    around: a row; None at the top.
    path: the path that their labels leave out.
    depth: how far they are indented.
  """
  while rows:
    first = rows[0]
    # Rows are in the order of execution, so those inside of a module follow it directly.
    inside = [*itertools.takewhile(functools.partial(_is_inside, other=first), rows[1:])]
    after = rows[1 + len(inside) :]
    folder = _shared_folder([first, *after], path)
    if folder:  # A long path that several rows begin with is a line of its own.
      below = [*itertools.takewhile(functools.partial(_is_in_folder, folder=folder), rows)]
      yield "  " * depth + folder.removeprefix(path), None
      yield from _tree(below, numbered, around, folder, depth + 1)
      rows = rows[len(below) :]
      continue
    # The row around has the outer iterations in its label already.
    iteration = first.iteration if around is None else first.iteration[len(around.iteration) :]
    inner = first._replace(iteration=iteration)
    yield "  " * depth + _label(inner, first.path.removeprefix(path), numbered), first
    yield from _tree(inside, numbered, first, f"{first.path}/", depth + 1)
    rows = after


def _is_in_folder(row: CompareRow, folder: str) -> bool:
  return row.path.startswith(folder)


def _shared_folder(rows: Sequence[CompareRow], outer: str) -> str:
  """Returns a long path that the first rows begin with; "" if they share none beyond `outer`."""
  for folder in _folders(rows[0].path):
    # A short folder does not justify a line of its own.
    if len(folder) - len(outer) < _LONG:
      continue
    below = [*itertools.takewhile(functools.partial(_is_in_folder, folder=folder), rows)]
    if len(below) < 2:
      return ""
    # The same rows may share a longer path, which saves more space.
    shared = [each for each in _folders(rows[0].path) if all(_is_in_folder(x, each) for x in below)]
    return shared[-1]
  return ""


def _folders(path: str) -> Iterator[str]:
  """Yields the beginnings of a path, up to each slash."""
  names = path.split("/")
  return ("/".join(names[:end]) + "/" for end in range(1, len(names)))


def _is_inside(row: CompareRow, other: CompareRow) -> bool:
  """Whether a row is of a module inside of another one, in the same iteration and pass."""
  # A module in a loop has more iterations than the module around the loop.
  same = row.iteration[: len(other.iteration)] == other.iteration
  return same and row.direction == other.direction and is_inside(row.path, other.path)


def _label(row: CompareRow, name: str, numbered: Numbered) -> str:
  """Returns the first cell of a row, with its path or the rest of it as its name."""
  iteration = "".join(f"[{i}]" for i in row.iteration)
  direction = " backward" if row.direction == "backward" else ""
  return name + iteration + _call_text(row, numbered) + direction


def _numbered(calls: Iterable[CompareRow | RanCall]) -> Numbered:
  """Returns the paths that several calls have."""
  numbers = collections.defaultdict[tuple[str, Direction], set[int]](set)
  for each in calls:
    numbers[each.path, each.direction].add(each.call)
  return {path for path, every in numbers.items() if len(every) > 1}


def _call_text(call: CompareRow | RanCall, numbered: Numbered) -> str:
  """Returns the number of a call for a label, from 1; "" if its path has no other call."""
  return f" (call {call.call + 1})" if (call.path, call.direction) in numbered else ""


def _cell(row: CompareRow, name: str) -> str:
  """Returns the cell of a column with an error."""
  return _text(_Error(getattr(row, name), name in row.zero_in_g))


def _text(error: _Error) -> str:
  if math.isnan(error.value):
    return "-"
  if error.is_zero_in_g:
    return "0 in g"
  return "not finite" if math.isinf(error.value) else f"{error.value:.2g}"
