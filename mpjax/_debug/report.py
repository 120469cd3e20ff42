"""What all reports have in common: progress, and the same sections as text, HTML and JSON."""

import abc
import contextlib
import dataclasses
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

from rich.console import Console, Group
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from mpjax._core.frameworks import check_function
from mpjax._core.types import Args, Function, Kwargs, P
from mpjax._jaxpr.locations import Source
from mpjax._policy.policy import Policy

R = TypeVar("R")

Advance: TypeAlias = Callable[[int, int], None]
"""Takes the number of steps that are done, and of all, if that is known."""

WIDTH, MOST = 80, 12
"""Columns of a report as text, and rows of a table in it: JSON and the attributes have all."""


class Section(NamedTuple):
  """A part of a report.

  Fields:
    title: its heading; "" for none.
    lines: sentences, each a paragraph.
    columns: the names of those of its table; () for none. One without a cell is not shown.
    rows: the rows of the table, as many cells each as there are columns.
  """

  title: str = ""
  lines: tuple[str, ...] = ()
  columns: tuple[str, ...] = ()
  rows: tuple[tuple[str, ...], ...] = ()

  @classmethod
  def cut(
    cls, title: str, columns: str, rows: Sequence[Sequence[str]], lines: Sequence[str] = ()
  ) -> Self:
    """Returns one with the first rows, and how many more there are; `columns` have commas."""
    names = tuple(columns.split(", "))
    last = [(text, *[""] * (len(names) - 1)) for text in rest(rows)]
    return cls(title, tuple(lines), names, (*map(tuple, rows[:MOST]), *last))


def rest(rows: Sequence[object]) -> list[str]:
  return [f"… and {len(rows) - MOST} more"] if len(rows) > MOST else []


class Pending(Generic[P, R]):
  """A function that returns a report of a call, and says so where it is printed."""

  def __init__(
    self,
    where: str,
    fn: Callable[P, object],
    report: Callable[[Function, Args, Kwargs, Advance], R],
    fix: str,
  ) -> None:
    check_function(fn, where, fix)
    self._tool = where.removeprefix("mpjax.").partition("(")[0]
    self._fn, self._report = fn, report

  def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
    with progress(self._tool) as advance:
      return self._report(self._fn, args, kwargs, advance)

  def __repr__(self) -> str:
    name = getattr(self._fn, "__name__", type(self._fn).__name__)
    call = f"mpjax.{self._tool}({name})"
    return f"<{call}: call it with the arguments of {name}, as in {call}(*args)>"


class Report(abc.ABC):
  """A result that prints as text of 80 columns, and shows itself in notebooks."""

  @abc.abstractmethod
  def sections(self) -> Sequence[Section]:
    """Returns what is shown, in order."""

  def as_dict(self) -> Mapping[str, object]:
    """Returns what `to_json` writes: the fields and properties, whose rows become objects."""
    computed = (k for k, x in vars(type(self)).items() if isinstance(x, property) and k[0] != "_")
    return {**vars(self), **{name: getattr(self, name) for name in computed}}

  def __repr__(self) -> str:
    first = next(line for section in self.sections() for line in section.lines)
    return f"<{type(self).__name__}: {first}>"

  def __str__(self) -> str:
    lines = (line.rstrip() for line in self._printed().export_text().splitlines())
    return "\n".join(lines).strip("\n")

  def _repr_html_(self) -> str:
    # No colors: a page has those of the browser, light or dark.
    plain = TerminalTheme((255, 255, 255), (0, 0, 0), [(0, 0, 0)] * 8)
    return self._printed().export_html(code_format=_HTML, inline_styles=True, theme=plain)

  def to_html(self, path: str | pathlib.Path) -> None:
    """Writes a page of its own, which needs no network."""
    page = _PAGE.format(title=type(self).__name__, body=self._repr_html_())
    pathlib.Path(path).write_text(page, encoding="utf-8")

  def to_json(self) -> str:
    """Returns what was found as JSON."""
    return json.dumps(_json(self.as_dict()), indent=2, allow_nan=False)

  def _printed(self) -> Console:
    # A notebook would show an empty output beside the text.
    console = Console(
      width=WIDTH, file=io.StringIO(), record=True, force_terminal=False, force_jupyter=False
    )
    for title, lines, columns, rows in self.sections():
      if lines or rows:  # A heading says nothing alone.
        heading = [Text(), *[Text(title, style="bold")] * bool(title)]
        table = [_table(columns, rows)] * bool(rows)
        console.print(Group(*heading, *map(_paragraph, lines), *table), end="")
    return console


_HTML = "<pre style='line-height:1.4;overflow-x:auto'>{code}</pre>"
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="color-scheme" content="light dark"></head><body>{body}</body></html>
"""


def _json(value: Any) -> Any:
  """Returns a value that JSON can hold: rows are objects; NaN, policies and the like are text."""
  if hasattr(value, "_asdict") and not isinstance(value, Source):
    value = value._asdict()
  elif dataclasses.is_dataclass(value) and not isinstance(value, Policy):
    value = vars(value)
  if isinstance(value, Mapping):
    names = (" ".join(name) if isinstance(name, tuple) else str(name) for name in value)
    return dict(zip(names, map(_json, value.values()), strict=True))
  if isinstance(value, (tuple, list)):
    return [_json(each) for each in value]
  number = isinstance(value, (int, float)) and math.isfinite(value)
  text = value.pattern if isinstance(value, re.Pattern) else str(value)
  return value if number or value is None else text


def _paragraph(line: str) -> Table:
  """Returns a paragraph, all of whose lines are indented as its first one, or as its number."""
  text = re.sub(r"^(\d+\. )? *", "", line)
  indent = len(line) - len(text)
  grid = Table.grid()
  margin = [line[:indent]] * bool(indent)
  grid.add_row(*margin, _broken(text, WIDTH - indent))
  return grid


_NUMBER = re.compile(r"[<>]?\d|2\^|not finite|-?$")
"""How a cell of a column of numbers begins."""


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
  table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
  shown = [column for column in zip(columns, *rows, strict=True) if any(column[1:])]
  for name, *cells in shown:
    align = "right" if all(map(_NUMBER.match, cells)) else "left"
    table.add_column(name, justify=align, overflow="fold")
  # Columns that are wider than their share have what the others leave.
  left, widths = WIDTH - 2 * (len(shown) - 1), [max(map(len, column)) for column in shown]
  narrow = [width for width in widths if width * len(shown) <= left]
  width = max((left - sum(narrow)) // max(len(shown) - len(narrow), 1), 1)
  for row in [*zip(*shown, strict=True)][1:]:
    table.add_row(*(_broken(cell, width) for cell in row))
  return table


def _broken(text: str, width: int) -> Text:
  """Returns text that breaks after slashes where a word, such as a path, is longer than a line."""
  # As much of the word as fits, up to a slash, if all that is left of it does not fit. A name that
  # is longer than a line is broken anywhere, rather than cut off.
  fits = rf"(?=\S{{{width + 1}}})\S{{,{width - 1}}}/"
  return Text(re.sub(fits, r"\g<0>\n", text), overflow="fold")


def amount(number: float, unit: str = "") -> str:
  """Returns a count in three digits, such as "1.23 G"."""
  prefixes = ["", "k", "M", "G", "T", "P"]
  while abs(number) >= 999.5 and len(prefixes) > 1:
    number, (_, *prefixes) = number / 1000, prefixes
  text = f"{number:.3g}" if prefixes[0] else f"{number:.0f}"
  return f"{text} {prefixes[0]}{unit}".rstrip()


def percent(share: float) -> str:
  """Returns a share as per cent; 0 and 100 mean exactly that; "-" for NaN."""
  if math.isnan(share):
    return "-"
  text = f"{100 * share:.1f} %"
  if text == "100.0 %" and share < 1:
    return ">99.9 %"
  return "<0.1 %" if text == "0.0 %" and share > 0 else text


def power(scale: float) -> str:
  """Returns a loss scale as a power of two, if it is one."""
  exponent = math.log2(scale) if scale > 0 else math.nan
  return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


FIRST, EVERY, REDRAWN = 2.0, 5.0, 0.2
"""Seconds until something is shown, between the lines of a log, and until a bar is drawn again."""


@contextlib.contextmanager
def progress(task: str) -> Generator[Advance]:
  """Shows on stderr that a task runs, and what part of it is done."""
  is_line = sys.stderr.isatty() or Console(stderr=True).is_jupyter
  ended, start, steps = threading.Event(), time.monotonic(), [0, 0]

  def advance(done: int, total: int) -> None:
    steps[:] = done, total

  def show() -> None:
    wait, text = FIRST, ""
    while not ended.wait(wait):
      wait, (done, total) = REDRAWN if is_line else EVERY, steps
      bar = f" {'━' * min(30 * done // max(total, 1), 30):30}" * (is_line and total > 0)
      share = f" {done} of {total}," * (total > 0)
      text = f"{task}:{bar}{share} {time.monotonic() - start:.0f} s"
      sys.stderr.write(f"\r{text}" if is_line else f"{text}\n")
      sys.stderr.flush()
    sys.stderr.write(f"\r{' ' * len(text)}\r" * (is_line and bool(text)))

  thread = threading.Thread(target=show, daemon=True)
  thread.start()
  try:
    yield advance
  finally:
    ended.set()
    thread.join()
