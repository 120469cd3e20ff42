"""The report of `mpjax.compare`: the errors by module, as text, HTML, JSON and a picture."""

import collections
import dataclasses
import functools
import importlib
import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpjax._diagnose.compare.run import RanCall, RecordedRun, save
from mpjax._diagnose.paths import is_inside
from mpjax._diagnose.report import MOST, Report, Section, percent, rest, some
from mpjax._jaxpr.locations import Direction

FACTOR = 10.0
"""Two runs part at a module whose output error exceeds its input error by this factor."""

_SHOWN = 40
"""The most rows that are printed. The attributes hold all."""

LISTED = 4
"""The most errors or shapes in a sentence."""

_LONG = 12
"""The fewest characters of a shared path that is printed once for several rows."""

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


class Error(NamedTuple):
  """The relative error of an array or several, and whether it is inf because `g` has 0."""

  value: float
  is_zero_in_g: bool = False


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
    results: the errors of the floating arrays that the functions returned, by path.
    decisions: the shares of elements that differ in the integers and booleans that the functions
      returned, such as masks and indices, by path. Inside of modules only floating values are
      compared.
    arguments: the errors of the arguments that differ, or the shares of their elements for integers
      and booleans. Only arguments of saved runs can differ.
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
  decisions: Mapping[str, float]
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
    numbered = numbered_paths(self.rows)
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
    rows: list[tuple[str, ...]] = []
    for label, row in _tree(shown, numbered_paths(self.rows)):
      # A folder has no numbers.
      errors = ["", "", "", ""] if row is None else [_cell(row, name) for name in columns[1:-1]]
      if not differentiated:
        errors[2:] = "", ""
      is_first = row is not None and row is self.first
      rows.append((label, *errors, "first" if is_first else ""))

    lines = [self._verdict()]
    results = [
      f"{path} {_text(Error(error, path in self.zero_in_g))}"
      for path, error in self.results.items()
    ]
    if results:
      lines.append(f"Errors of what they return: {some(results, LISTED)}.")
    decided = [f"{path} {percent(share)}" for path, share in self.decisions.items() if share]
    if decided:
      lines.append(f"Integers and booleans that differ: {some(decided, LISTED)}.")
    if self.arguments:
      differing = [f"{name} {_text(Error(error))}" for name, error in self.arguments.items()]
      lines.append(f"The arguments differ: {some(differing, LISTED)}.")
    lines += self.notes
    if left := len(self.rows) - len(shown):
      equal = sum(map(_is_equal, self.rows)) - sum(map(_is_equal, shown))
      end = f" Equal to the bit: {equal}." if equal else ""
      lines.append(f"{left} rows more are in `.rows`.{end}")
    title = f"{self.names[0]} against {self.names[1]}"
    unmatched = Section("Not compared", (*self.unmatched[:MOST], *rest(self.unmatched)))
    return [Section(title, tuple(lines), columns, tuple(rows)), unmatched]

  def _verdict(self) -> str:
    # The three cases have the order of the rules of `first`.
    rule = f"10 times that of its inputs and 10 times {self.spacing:.1e}"
    row = self.first
    none = f"No module has an error of more than {rule}."
    if row is None:
      return none
    name = _label(row, row.path, numbered_paths(self.rows))
    output, inputs = _cell(row, "output"), _cell(row, "inputs")
    if is_above(row.output, row.inputs, self.spacing, self.arguments):
      errors = f"{output}, that of its inputs {inputs}"
      return f"They part at {name}: the error of its output is {errors}. It is more than {rule}."
    if is_own(row.output, row.inputs):
      text = f"They part at {name}: its inputs are equal to the bit, and the error of its output is"
      return f"{text} {output}. {none}"
    text = f"They part before {name}: the error of its inputs is {inputs}, and no module before it"
    return f"{text} has one like that. The code between is in no module that both have."


def is_above(error: float, others: float, spacing: float, arguments: Mapping[str, float]) -> bool:
  """Whether an error is far above the others and above rounding; false if the others are NaN."""
  # Rounding makes an error of the spacing, or of the arguments.
  least = max(spacing, *arguments.values(), 0.0)
  # `np.maximum` passes on NaN, and a comparison with NaN is false. Python's `max` would drop NaN.
  return bool(error > FACTOR * np.maximum(others, least))


def is_own(error: float, others: float) -> bool:
  """Whether there is an error although all is equal to the bit before."""
  return error > 0 and others == 0


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
    inside = [*itertools.takewhile(functools.partial(is_in_module, other=first), rows[1:])]
    after = rows[1 + len(inside) :]
    folder = _shared_folder([first, *after], path)
    if folder:  # A long path that several rows begin with is a line of its own.
      below = _below(rows, folder)
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


def _below(rows: Sequence[CompareRow], folder: str) -> list[CompareRow]:
  """Returns the first rows, as far as they are in a folder."""
  return [*itertools.takewhile(lambda row: row.path.startswith(folder), rows)]


def _shared_folder(rows: Sequence[CompareRow], outer: str) -> str:
  """Returns a long path that the first rows begin with; "" if they share none beyond `outer`."""
  # The beginnings of a path, up to each slash.
  names = rows[0].path.split("/")
  folders = ["/".join(names[:end]) + "/" for end in range(1, len(names))]
  for folder in folders:
    # A short folder does not justify a line of its own.
    if len(folder) - len(outer) < _LONG:
      continue
    below = _below(rows, folder)
    if len(below) < 2:
      return ""
    # The same rows may share a longer path, which saves more space.
    return [each for each in folders if len(_below(below, each)) == len(below)][-1]
  return ""


def is_in_module(row: CompareRow, other: CompareRow) -> bool:
  """Whether a row is of a module inside of another one, in the same iteration and pass."""
  # A module in a loop has more iterations than the module around the loop.
  same = row.iteration[: len(other.iteration)] == other.iteration
  return same and row.direction == other.direction and is_inside(row.path, other.path)


def _label(row: CompareRow, name: str, numbered: Numbered) -> str:
  """Returns the first cell of a row, with its path or the rest of it as its name."""
  iteration = "".join(f"[{i}]" for i in row.iteration)
  direction = " backward" if row.direction == "backward" else ""
  return name + iteration + call_text(row, numbered) + direction


def numbered_paths(calls: Iterable[CompareRow | RanCall]) -> Numbered:
  """Returns the paths that several calls have."""
  numbers = collections.defaultdict[tuple[str, Direction], set[int]](set)
  for each in calls:
    numbers[each.path, each.direction].add(each.call)
  return {path for path, every in numbers.items() if len(every) > 1}


def call_text(call: CompareRow | RanCall, numbered: Numbered) -> str:
  """Returns the number of a call for a label, from 1; "" if its path has no other call."""
  return f" (call {call.call + 1})" if (call.path, call.direction) in numbered else ""


def _cell(row: CompareRow, name: str) -> str:
  """Returns the cell of a column with an error."""
  return _text(Error(getattr(row, name), name in row.zero_in_g))


def _text(error: Error) -> str:
  if math.isnan(error.value):
    return "-"
  if error.is_zero_in_g:
    return "0 in g"
  return "not finite" if math.isinf(error.value) else f"{error.value:.2g}"
