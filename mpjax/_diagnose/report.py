"""The base of all reports: sections as text, HTML and JSON, and a display of progress."""

import abc
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import math
import pathlib
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar

from rich.console import Console, Group, RenderableType
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from mpjax._core.errors import MpjaxError, unfit_call
from mpjax._core.frameworks import check_function
from mpjax._core.types import Args, Function, Kwargs, P
from mpjax._core.wrappers import name_of
from mpjax._diagnose.call import with_model_as_argument
from mpjax._diagnose.tables import WIDTH, paragraph, table
from mpjax._jaxpr.locations import Source
from mpjax._policy.policy import Policy

R = TypeVar("R")

Advance: TypeAlias = Callable[[int, int], None]
"""Takes the number of done steps, and the number of all steps, which is 0 if unknown."""

MOST = 12
"""The most rows of a table in a report as text. JSON and the attributes have all rows."""


class Section(NamedTuple):
  """A part of a report: a heading, paragraphs, and a table.

  Fields:
    title: the heading; "" for none.
    lines: the paragraphs.
    columns: the names of the columns of the table; () for no table. An empty column is not shown.
      Those in `tables.PATHS` and `tables.REASONS` have paths and reasons.
    rows: the rows of the table, with one cell for each column.
    most: the number of rows that are printed; 0 for all.
  """

  title: str = ""
  lines: tuple[str, ...] = ()
  columns: tuple[str, ...] = ()
  rows: tuple[tuple[str, ...], ...] = ()
  most: int = 0

  @classmethod
  def cut(
    cls, title: str, columns: str, rows: Sequence[Sequence[str]], lines: Sequence[str] = ()
  ) -> Self:
    """Returns a section that prints the first `MOST` rows, and the number of the others.

    Args:
      title: the heading.
      columns: the names of the columns, separated by commas.
      rows: all rows.
      lines: the paragraphs above the table.
    """
    names = tuple(columns.split(", "))
    return cls(title, tuple(lines), names, tuple(map(tuple, rows)), MOST)


def rest(rows: Sequence[object], most: int = MOST) -> list[str]:
  """Returns a line with the number of rows that a report leaves out; [] if it shows all."""
  return [f"… and {len(rows) - most} more"] if len(rows) > most else []


def some(texts: Sequence[str], most: int) -> str:
  """Returns the first texts in a sentence, and how many more there are.

  >>> some(["a", "b", "c"], 2)
  'a, b and 1 more'
  """
  more = f" and {len(texts) - most} more" if len(texts) > most else ""
  return ", ".join(texts[:most]) + more


class Pending(Generic[P, R]):
  """A function that returns the report of a call. Its `repr` says that it has to be called.

  `report` takes the function and its arguments. With `model_first`, an NNX model that is called is
  the first argument.
  """

  def __init__(
    self,
    where: str,
    fn: Callable[P, object],
    report: Callable[[Function, Args, Kwargs, Advance], R],
    fix: str,
    *,
    model_first: bool = True,
  ) -> None:
    # Check before the arguments come, so that the traceback shows the line with the mistake.
    check_function(fn, where, fix)
    self._tool = where.removeprefix("mpjax.").partition("(")[0]
    self._fn, self._report, self._model_first = fn, report, model_first

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
    # A diagnostic may take minutes, so it shows on stderr that it runs.
    with progress(self._tool) as advance:
      try:
        fn, operands = self._fn, args
        if self._model_first:
          fn, operands = with_model_as_argument(fn, args)
        return self._report(fn, operands, kwargs, advance)
      except Exception as error:
        if not isinstance(error, MpjaxError):
          self._check_arguments(args, kwargs, error)
        raise

  def __repr__(self) -> str:
    return f"<{self._call}: call it with the arguments of {self._name}, as in {self._call}(*args)>"

  @property
  def _name(self) -> str:
    return name_of(self._fn)

  @property
  def _call(self) -> str:
    return f"mpjax.{self._tool}({self._name})"

  def _check_arguments(self, args: Args, kwargs: Kwargs, error: Exception) -> None:
    """Raises MpjaxTypeError if the arguments of a call that raised `error` do not fit the function.

    They are compared after the call, since the signature of a decorated function may be another.
    """
    try:
      # Some builtins and C functions have no signature.
      signature = inspect.signature(self._fn)
    except (TypeError, ValueError):
      return
    # The arguments without a default, as a call passes them.
    needed: list[str] = []
    for parameter in signature.parameters.values():
      if parameter.kind is parameter.VAR_POSITIONAL:
        needed.append(f"*{parameter.name}")
      elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
        is_keyword = parameter.kind is parameter.KEYWORD_ONLY
        needed.append(f"{parameter.name}=..." if is_keyword else parameter.name)
    try:
      signature.bind(*args, **kwargs)
      # A model such as `nnx.Sequential` takes `*args`, and fails inside without any.
      reason = "no argument" if needed and not args and not kwargs else ""
    except TypeError as unfit:
      reason = str(unfit)
    if reason:
      fix = f"Pass the arguments of {self._name} in the second call: {self._call}"
      fix += f"({', '.join(needed)})."
      raise unfit_call(f"{self._call}(*args)", signature, kwargs, reason, fix) from error


class Report(abc.ABC):
  """A result that prints as text of 80 columns, and as HTML in notebooks."""

  @abc.abstractmethod
  def sections(self) -> Sequence[Section]:
    """Returns the sections of the report, in order."""

  def as_dict(self) -> Mapping[str, object]:
    """Returns the fields and public properties, which `to_json` writes."""
    # Properties, such as `found.path`, are part of a report as much as its fields.
    attributes = vars(type(self)).items()
    properties = [name for name, x in attributes if isinstance(x, property)]
    public = [name for name in properties if not name.startswith("_")]
    return {**vars(self), **{name: getattr(self, name) for name in public}}

  def __repr__(self) -> str:
    # The first line says the result, also in a list of reports.
    first = next(line for section in self.sections() for line in section.lines)
    return f"<{type(self).__name__}: {first}>"

  def __str__(self) -> str:
    # Rich pads lines to the width of the console.
    lines = (line.rstrip() for line in self._printed().export_text().splitlines())
    return "\n".join(lines).strip("\n")

  def _repr_html_(self) -> str:
    # Without colors the page follows the light or dark mode of the browser.
    plain = TerminalTheme((255, 255, 255), (0, 0, 0), [(0, 0, 0)] * 8)
    return self._printed().export_html(code_format=_HTML, inline_styles=True, theme=plain)

  def to_html(self, path: str | pathlib.Path) -> None:
    """Writes the report as an HTML page, which needs no network."""
    page = _PAGE.format(title=type(self).__name__, body=self._repr_html_())
    pathlib.Path(path).write_text(page, encoding="utf-8")

  def to_json(self) -> str:
    """Returns the contents of the report as JSON."""
    return json.dumps(_json(self.as_dict()), indent=2, allow_nan=False)

  def _printed(self) -> Console:
    # With `force_jupyter=None` a notebook would show an empty output beside the text.
    console = Console(
      width=WIDTH, file=io.StringIO(), record=True, force_terminal=False, force_jupyter=False
    )
    for section in self.sections():
      if not section.lines and not section.rows:  # A section with only a heading is not shown.
        continue
      parts: list[RenderableType] = [Text()]
      if section.title:
        parts.append(Text(section.title, style="bold"))
      parts += map(paragraph, section.lines)
      if section.rows:
        # The table gets all rows, because a reason that all of them share is printed once.
        most = section.most or len(section.rows)
        parts += table(section.columns, section.rows, most)
        parts += map(Text, rest(section.rows, most))
      console.print(Group(*parts), end="")
    return console


# JupyterLab shows the `pre` of an output in a proportional font, and wraps it within words.
_HTML = (
  "<pre style='font-family:monospace;white-space:pre;word-break:normal;overflow-wrap:normal;"
  "line-height:1.4;overflow-x:auto'>{code}</pre>"
)
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="color-scheme" content="light dark"></head><body>{body}</body></html>
"""


def _json(value: Any) -> Any:
  """Returns a value as JSON holds it. Records become objects; NaN, policies and others, text."""
  named: Mapping[Any, Any] | None = None
  if isinstance(value, (Source, Policy)):
    pass  # A line of code is written as a list, and a policy as text.
  # Records and mappings become objects, before tuples become lists: a NamedTuple is a tuple.
  elif hasattr(value, "_asdict"):
    named = value._asdict()
  elif dataclasses.is_dataclass(value):
    named = vars(value)
  elif isinstance(value, Mapping):
    named = value
  if named is not None:
    # JSON has only text as keys.
    keys = (" ".join(name) if isinstance(name, tuple) else str(name) for name in named)
    return dict(zip(keys, map(_json, named.values()), strict=True))
  if isinstance(value, (tuple, list)):
    return [_json(each) for each in value]
  # JSON has no inf and no NaN.
  is_finite = isinstance(value, (int, float)) and math.isfinite(value)
  if value is None or is_finite:
    return value
  # A rule may have a regular expression as its path.
  return value.pattern if isinstance(value, re.Pattern) else str(value)


def amount(number: float, unit: str = "") -> str:
  """Returns a count in three digits, such as "1.23 G"."""
  prefixes = ["", "k", "M", "G", "T", "P"]
  thousands = 0
  # From 999.5 on, three digits round to 1000, which is the next prefix.
  while abs(number) >= 999.5 and thousands < len(prefixes) - 1:
    number /= 1000
    thousands += 1
  text = f"{number:.3g}" if thousands else f"{number:.0f}"
  return f"{text} {prefixes[thousands]}{unit}".rstrip()


def percent(share: float) -> str:
  """Returns a share in percent, "-" for NaN. Only exact shares are 0.0 and 100.0 %."""
  if math.isnan(share):
    return "-"
  # A share that only rounds to 0 or 100 % must not look exact.
  text = f"{100 * share:.1f} %"
  if text == "100.0 %" and share < 1:
    return ">99.9 %"
  return "<0.1 %" if text == "0.0 %" and share > 0 else text


def power(scale: float) -> str:
  """Returns a loss scale as a power of two, if it is one."""
  # NaN is no integer, so scales of 0 are written as they are.
  exponent = math.log2(scale) if scale > 0 else math.nan
  return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


FIRST, EVERY, REDRAWN = 2.0, 5.0, 0.2
"""Seconds before progress is first shown, between two lines of a log, and between two bars."""

_BAR = 30
"""The characters of a progress bar."""


@contextlib.contextmanager
def progress(task: str) -> Generator[Advance]:
  """Shows on stderr, or in a notebook, that a task runs, and how much of it is done."""
  # A log file cannot redraw a line.
  redraw = _redrawing()
  ended = threading.Event()
  start = time.monotonic()
  # The done steps and all steps. The thread reads the list that `advance` writes.
  steps = [0, 0]

  def advance(done: int, total: int) -> None:
    steps[:] = done, total

  def show() -> None:
    # A fast diagnostic ends before the first wait, and prints nothing.
    wait, text = FIRST, ""
    while not ended.wait(wait):
      wait = REDRAWN if redraw else EVERY
      done, total = steps
      count = bar = ""
      if total:
        count = f" {done} of {total},"
        filled = "━" * min(_BAR * done // total, _BAR)
        bar = f" {filled:{_BAR}}" if redraw else ""
      text = f"{task}:{bar}{count} {time.monotonic() - start:.0f} s"
      if redraw:
        redraw(text)
      else:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    # Remove the bar, so that the report follows a clean line.
    if redraw and text:
      redraw("")

  # A thread can show progress while XLA compiles. A daemon does not keep the process alive.
  thread = threading.Thread(target=show, daemon=True)
  thread.start()
  try:
    yield advance
  finally:
    ended.set()
    thread.join()


def _redrawing() -> Callable[[str], None] | None:
  """Returns a function that shows a line instead of the one before; None if nothing can."""
  if Console(stderr=True).is_jupyter:
    # A notebook stores everything that is printed. Only an output with an id can be replaced.
    output = importlib.import_module("IPython.display").DisplayHandle()
    show = iter((output.display,))
    return lambda text: next(show, output.update)({"text/plain": text}, raw=True)
  if not sys.stderr.isatty():
    return None
  drawn = [""]

  def redraw(text: str) -> None:
    sys.stderr.write(f"\r{' ' * len(drawn[0])}\r{text}")
    sys.stderr.flush()
    drawn[0] = text

  return redraw
