"""What all reports have in common: the same sections as text, as HTML and as JSON."""

import abc
import html
import io
import json
import math
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns of a report as text."""

_NUMBER = re.compile(r"\d+\. ")
"""How an item of a numbered list begins."""

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None


class Cell(NamedTuple):
  """An entry of a table, with what it is sorted by where that is not its text."""

  text: str
  key: float | None = None


class Column(NamedTuple):
  """A column of a table."""

  name: str
  align: Literal["left", "right"] = "left"
  wide: bool = False  # It takes the width that the others leave, and breaks its lines.


class Section(NamedTuple):
  """A part of a report.

  Fields:
    title: its heading; "" for none.
    lines: sentences, each a paragraph.
    columns: those of its table; () for none.
    rows: the rows of the table, as many cells each as there are columns.
    folded: whether HTML shows it closed at first.
    footer: sentences that come after the table.
  """

  title: str = ""
  lines: tuple[str, ...] = ()
  columns: tuple[Column, ...] = ()
  rows: tuple[tuple[Cell | str, ...], ...] = ()
  folded: bool = False
  footer: tuple[str, ...] = ()


class Report(abc.ABC):
  """A result that prints as text of 80 columns, and shows itself in notebooks."""

  @abc.abstractmethod
  def sections(self) -> Sequence[Section]:
    """Returns what is shown, in order."""

  @abc.abstractmethod
  def as_dict(self) -> Mapping[str, Json]:
    """Returns what `to_json` writes."""

  def __str__(self) -> str:
    return as_text(self.sections())

  def _repr_html_(self) -> str:
    return f"<style>{_STYLE}</style>{as_html(self.sections())}"

  def to_html(self, path: str | pathlib.Path) -> None:
    """Writes a page of its own, which needs no network: tables sort by a click on a heading."""
    pathlib.Path(path).write_text(page(type(self).__name__, self.sections()), encoding="utf-8")

  def to_json(self) -> str:
    """Returns what was found as JSON."""
    return json.dumps(_strict(self.as_dict()), indent=2, allow_nan=False)


def _strict(value: Json) -> Json:
  """Returns a value that JSON can hold: it has no NaN and no inf."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, Mapping):
    return {str(name): _strict(each) for name, each in value.items()}
  if isinstance(value, Sequence) and not isinstance(value, str):
    return [_strict(each) for each in value]
  return value


def as_text(sections: Sequence[Section], width: int = WIDTH) -> str:
  """Returns sections as text that no terminal of `width` columns breaks."""
  console = Console(
    width=width,
    file=io.StringIO(),
    force_terminal=False,
    force_jupyter=False,  # A notebook would show an empty output beside the text.
    color_system=None,
    legacy_windows=False,
  )
  with console.capture() as capture:
    console.print(Group(*(part for each in sections for part in _parts(each))), end="")
  lines = [line.rstrip() for line in capture.get().splitlines()]
  return "\n".join(lines).strip("\n")


def progress_console(*, stderr: bool = False) -> Console:
  """Returns a console that draws progress in a terminal alone.

  rich takes a notebook for one, since Jupyter sets FORCE_COLOR: each frame would be a line of its
  own there.
  """
  stream = sys.stderr if stderr else sys.stdout
  is_terminal = stream is not None and stream.isatty()
  return Console(stderr=stderr, force_jupyter=False, force_terminal=is_terminal)


def _parts(section: Section) -> list[Text | Table | Padding]:
  parts: list[Text | Table | Padding] = [Text()]
  if section.title:
    parts.append(Text(section.title, style="bold"))
  # A long path without spaces is broken anywhere, rather than cut off.
  parts += map(_line, section.lines)
  if section.rows:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, align, wide in section.columns:
      table.add_column(name, justify=align, overflow="fold", ratio=1 if wide else None)
    for row in section.rows:
      table.add_row(*(Text(_cell(each).text, overflow="fold") for each in row))
    parts.append(table)
  return [*parts, *map(_line, section.footer)]


def _line(line: str) -> Padding | Table:
  """Returns a paragraph, all of whose lines are indented as its first one, or as its number."""
  number = _NUMBER.match(line)
  if number:
    grid = Table.grid()
    grid.add_row(number[0], Text(line[number.end() :], overflow="fold"))
    return grid
  text = line.lstrip(" ")
  return Padding(Text(text, overflow="fold"), (0, 0, 0, len(line) - len(text)))


def _cell(cell: Cell | str) -> Cell:
  return cell if isinstance(cell, Cell) else Cell(cell)


def as_html(sections: Sequence[Section]) -> str:
  """Returns sections as a fragment of HTML."""
  return '<div class="mpjax-report">' + "".join(map(_section, sections)) + "</div>"


def _section(section: Section) -> str:
  body = _paragraphs(section.lines)
  if section.rows:
    heads = "".join(
      f'<th class="{_class(column)}">{html.escape(column.name)}</th>' for column in section.columns
    )
    rows = "".join(f"<tr>{_row(section.columns, row)}</tr>" for row in section.rows)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    body += f'<div class="scroll">{table}</div>{_paragraphs(section.footer)}'
  if not section.title:
    return f"<section>{body}</section>"
  opened = "" if section.folded else " open"
  return f"<details{opened}><summary>{html.escape(section.title)}</summary>{body}</details>"


def _paragraphs(lines: Sequence[str]) -> str:
  """Returns lines that are indented as they are in text, those that are broken too."""
  found = []
  for line in lines:
    text = line.lstrip(" ")
    kind = ' class="item"' if _NUMBER.match(line) else ""
    indent = f' style="margin-left:{len(line) - len(text)}ch"' if text != line else ""
    found.append(f"<p{kind}{indent}>{html.escape(text)}</p>")
  return "".join(found)


def _row(columns: Sequence[Column], row: Sequence[Cell | str]) -> str:
  cells = []
  for column, cell in zip(columns, map(_cell, row), strict=True):
    key = "" if cell.key is None else f' data-key="{cell.key!r}"'
    cells.append(f'<td class="{_class(column)}"{key}>{html.escape(cell.text)}</td>')
  return "".join(cells)


def _class(column: Column) -> str:
  return f"{column.align} wide" if column.wide else column.align


def page(title: str, sections: Sequence[Section]) -> str:
  """Returns sections as a page of HTML."""
  return (
    f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
    '</title><meta name="viewport" content="width=device-width"><meta name="color-scheme" '
    f'content="light dark"><style>{_STYLE}{_PAGE_STYLE}</style></head><body>{as_html(sections)}'
    f"<script>{_SORT}</script></body></html>"
  )


_STYLE = """
.mpjax-report{font:14px/1.45 system-ui,sans-serif;max-width:72rem}
.mpjax-report p{margin:.25em 0;overflow-wrap:anywhere}
.mpjax-report .item{margin-top:.7em;padding-left:3ch;text-indent:-3ch;font-weight:600}
.mpjax-report summary{font-weight:600;font-size:1.1em;margin:1em 0 .3em;cursor:pointer}
.mpjax-report .scroll{overflow-x:auto}
.mpjax-report table{border-collapse:collapse;font:inherit;font-variant-numeric:tabular-nums}
.mpjax-report th,.mpjax-report td{padding:.2em 1.2em .2em 0;vertical-align:top;
border-bottom:1px solid #8884;white-space:nowrap}
.mpjax-report .wide{white-space:normal;overflow-wrap:anywhere;min-width:12em}
.mpjax-report th{font-weight:400;opacity:.75}
.mpjax-report .left{text-align:left}.mpjax-report .right{text-align:right}
"""

_PAGE_STYLE = """
body{margin:2rem auto;padding:0 1rem;max-width:72rem}
.mpjax-report th{cursor:pointer}
.mpjax-report th[data-up="1"]::after{content:" \\25b4"}
.mpjax-report th[data-up="0"]::after{content:" \\25be"}
@media (prefers-color-scheme:dark){body{background:#14161a;color:#e4e6ea}}
"""

_SORT = """
document.querySelectorAll('th').forEach(th=>th.addEventListener('click',()=>{
const column=[...th.parentNode.children].indexOf(th),body=th.closest('table').tBodies[0];
const up=th.dataset.up!=='1';
for(const each of th.parentNode.children)delete each.dataset.up;th.dataset.up=up?'1':'0';
const key=row=>{const cell=row.cells[column],number=parseFloat(cell.dataset.key);
return cell.dataset.key===undefined?cell.textContent:isNaN(number)?-Infinity:number};
[...body.rows].sort((a,b)=>{const x=key(a),y=key(b);
return (x<y?-1:x>y?1:0)*(up?1:-1)}).forEach(row=>body.append(row))}));
"""


def amount(number: float, unit: str = "") -> str:
  """Returns a count in three digits, such as "1.23 G"."""
  for prefix in ("", "k", "M", "G", "T", "P"):
    if abs(number) < 999.5 or prefix == "P":
      break
    number /= 1000
  text = f"{number:.0f}" if not prefix else f"{number:.3g}"
  return f"{text} {prefix}{unit}".rstrip()


def percent(share: float) -> str:
  """Returns a share as per cent, of which 0 and 100 mean exactly that; "-" for NaN."""
  if math.isnan(share):
    return "-"
  text = f"{100 * share:.1f}"
  if text == "100.0" and share < 1:
    return ">99.9 %"
  return "<0.1 %" if text == "0.0" and share > 0 else f"{text} %"
