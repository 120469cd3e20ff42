"""Lay out the tables and the paragraphs of a report in 80 columns.

No path or rule is cut. A folder that contains all modules of a table is printed once above it. So
is a reason that rows share. A path that is still too long is a line of its own above its row. A
rule that is too long is broken where Python allows it, so that it can be pasted.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mpjax._diagnose.paths import relative_to, shared_names

WIDTH = 80
"""The columns of a report as text."""

PATHS = ("module", "leaf", "parameter")
"""The names of columns with paths. If a table has one, it is the first column."""

REASONS = {
  "because of": "because of ",
  "in no format because": "in no format because ",
  "decided by": "decided by ",
  "risk": "",
}
"""The names of columns with reasons, which many rows share, and the words before such a reason."""

_GAP = 2
"""The spaces between two columns."""

_NUMBER = re.compile(r"[<>]?\d|2\^|not finite|-?$")
"""The beginning of a cell in a column of numbers."""

Row: TypeAlias = tuple[str, ...]


class Cells(NamedTuple):
  """The columns and the rows of a table."""

  columns: Row
  rows: tuple[Row, ...]

  @property
  def widths(self) -> tuple[int, ...]:
    """The width of the widest cell of each column."""
    return tuple(max(map(cell_len, cells)) for cells in zip(self.columns, *self.rows, strict=True))

  @property
  def fits(self) -> bool:
    """Whether each row is one line."""
    return sum(self.widths) + _GAP * (len(self.columns) - 1) <= WIDTH

  def position(self, names: Collection[str]) -> int | None:
    """Returns the position of the first column with one of some names; None without one."""
    return next((i for i, name in enumerate(self.columns) if name in names), None)

  def without(self, position: int) -> "Cells":
    """Returns the cells of the other columns."""
    columns, *rows = (row[:position] + row[position + 1 :] for row in (self.columns, *self.rows))
    return Cells(columns, tuple(rows))


def table(columns: Sequence[str], rows: Sequence[Row], most: int) -> Iterator[RenderableType]:
  """Yields the lines above a table, and the table.

  Args:
    columns: the names of the columns. A column without text in a printed row is left out.
    rows: all rows.
    most: the number of rows that are printed.

  >>> rows = [("bert/encoder/layer/attention/self/" + name, "7" + " 7" * 24) for name in "ab"]
  >>> from mpjax._diagnose.report import Report, Section
  >>> class Example(Report):
  ...   def sections(self):
  ...     return [Section("", (), ("module", "numbers"), tuple(rows))]
  >>> print(Example())
  Each module is in bert/encoder/layer/attention/self
  module                                            numbers
  a       7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7
  b       7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7
  """
  cells = Cells(tuple(columns), tuple(rows))
  reason = cells.position(REASONS)
  # A reason that all rows share is a line above the table. The hidden rows count as well.
  reasons = set() if reason is None else {row[reason] for row in rows}
  if reason is not None and len(rows) > 1 and len(reasons) == 1 and "" not in reasons:
    yield paragraph(f"All rows: {REASONS[cells.columns[reason]]}{cells.rows[0][reason]}")
    cells = cells.without(reason)
  # From here on only printed rows decide the layout. A column without text is left out. Backwards,
  # so that removing one leaves the positions of the others.
  cells = cells._replace(rows=cells.rows[:most])
  for position in reversed(range(len(cells.columns))):
    if not any(row[position] for row in cells.rows):
      cells = cells.without(position)
  path = cells.position(PATHS)
  # Each step below is taken only if a row is still wider than a line.
  if path is not None and not cells.fits:
    line, cells = _below_folder(cells)
    yield from map(paragraph, line)
  # Without groups, all rows are below the header.
  groups: Mapping[str, Sequence[Row]] = {"": cells.rows}
  reason = cells.position(REASONS)
  if path is not None and reason is not None and not cells.fits:
    words, without = REASONS[cells.columns[reason]], cells.without(reason)
    # Rows without a reason come first, and have no line above.
    by_reason = dict[str, list[Row]]({"": []})
    for row, others in zip(cells.rows, without.rows, strict=True):
      by_reason.setdefault(words + row[reason] if row[reason] else "", []).append(others)
    groups, cells = by_reason, without
  yield from _grid(cells, groups)


def _below_folder(cells: Cells) -> tuple[list[str], Cells]:
  """Returns a line with the folder of all paths, and the cells with the rest of the paths.

  The folder itself is "." in the rest. Names in parentheses, such as "(root)", are no paths.
  """
  paths = {row[0] for row in cells.rows if not row[0].startswith("(")}
  folder = "/".join(shared_names([path.split("/") for path in paths]))
  # A folder of a single path would leave "." in the table.
  if len(paths) < 2 or not folder:
    return [], cells
  rests = [relative_to(row[0], folder) or "." for row in cells.rows]
  own = ', which itself is "."' if "." in rests else ""
  rows = tuple((rest, *row[1:]) for rest, row in zip(rests, cells.rows, strict=True))
  return [f"Each {cells.columns[0]} is in {folder}{own}"], cells._replace(rows=rows)


def _grid(cells: Cells, groups: Mapping[str, Sequence[Row]]) -> Iterator[RenderableType]:
  """Yields a table in parts, between which are lines with reasons and long paths.

  Args:
    cells: all cells, which decide the widths of the columns.
    groups: the rows by the line above them; "" for none.
  """
  widths = _widths(cells)
  path = cells.position(PATHS)
  part = _part(cells, widths)
  # Lines between rows split the table into parts. Only the first part has the names.
  part.show_header = True
  for line, rows in groups.items():
    if line:
      yield from (part, paragraph(f"  {line}:"))
      part = _part(cells, widths)
    for row in rows:
      # The path is a line of its own, and its row begins with an empty cell.
      if path is not None and cell_len(row[0]) > widths[0]:
        yield from (part, paragraph(row[0]))
        part = _part(cells, widths)
        row = ("", *row[1:])
      first, *others = (broken(cell, width) for cell, width in zip(row, widths, strict=True))
      # The empty cells are the gaps between columns.
      part.add_row(first, *(cell for other in others for cell in ("", other)))
  yield part


def _part(cells: Cells, widths: Sequence[int]) -> Table:
  """Returns an empty table without a header, whose columns of numbers are aligned right."""
  part = Table(box=None, padding=0, header_style="dim", show_header=False)
  for name, width, *column in zip(cells.columns, widths, *cells.rows, strict=True):
    # A path may begin with a digit.
    is_number = name not in PATHS and all(map(_NUMBER.match, column))
    align = "right" if is_number else "left"
    if part.columns:  # Versions of Rich differ in whether a width has the padding of its column.
      part.add_column(width=_GAP)
    part.add_column(name, justify=align, overflow="fold", width=width)
  return part


def _widths(cells: Cells) -> list[int]:
  """Returns the widths of the columns. Where the text is too wide, the wide columns share a line.

  Paths get the space that the other columns leave, since a path can be a line of its own.
  """
  widths = [*cells.widths]
  if cells.fits:
    return widths
  first = cells.position(PATHS)
  if first is None:
    return _limited(widths, WIDTH)
  # The column of paths is at least as wide as its name.
  least = len(cells.columns[0])
  others = _limited(widths[1:], WIDTH - least - _GAP)
  return [max(WIDTH - sum(others) - _GAP * len(others), least), *others]


def _limited(widths: Sequence[int], available: int) -> list[int]:
  """Returns widths that fit: columns wider than an equal share divide the rest equally."""
  # Narrow columns keep their width. The wide ones share the rest equally.
  available -= _GAP * (len(widths) - 1)
  if sum(widths) <= available:
    return [*widths]
  narrow = [width for width in widths if width * len(widths) <= available]
  sharing = len(widths) - len(narrow)
  most = max((available - sum(narrow)) // max(sharing, 1), 1)
  return [min(width, most) for width in widths]


def paragraph(line: str) -> Table:
  """Returns a paragraph whose lines are indented as its first line, or as the text of an item."""
  # An item such as "1. " is indented by its number.
  text = re.sub(r"^(\d+\. )? *", "", line)
  margin = line[: len(line) - len(text)]
  # A grid with two columns indents every line of the text.
  cells = [margin] if margin else []
  grid = Table.grid()
  grid.add_row(*cells, broken(text, WIDTH - len(margin)))
  return grid


_STRING = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''

_RULE = re.compile(rf"(mpjax\.Rule\((?:{_STRING}|[^\"'()]|\((?:{_STRING}|[^\"'()])*\))*\),?)")
"""A rule as its `repr` writes it, and the comma after it in a tuple."""


def broken(text: str, width: int) -> Text:
  """Returns text whose paths break after slashes, and whose rules break as Python allows.

  Args:
    text: a cell or a paragraph.
    width: the width of a line.
  """
  if cell_len(text) <= width:
    return Text(text)
  # The longest part of a word that fits and ends in a slash, if the rest of the word is longer than
  # a line. A name without slashes is broken anywhere rather than cut off.
  fits = rf"(?=\S{{{width + 1}}})\S{{,{width - 1}}}/"
  # Between the rules, which have odd positions, is prose.
  parts = [part.strip() for part in _RULE.split(text)]
  lines = [
    broken_rule(part, width) if i % 2 else re.sub(fits, r"\g<0>\n", part)
    for i, part in enumerate(parts)
  ]
  return Text("\n".join(filter(None, lines)), overflow="fold")


_ATOM = r"(?:\\(?:x..|u.{4}|U.{8}|.)|[^\\])"
"""A character of a string as Python code, such as an escape."""

_ROOM = len("  path=re.compile(''),")
"""The most columns beside a string on a line of a broken rule."""


def broken_rule(code: str, width: int) -> str:
  """Returns the code of a rule on several lines if it is too long for one.

  Args:
    code: the `repr` of a rule.
    width: the width of a line.

  >>> print(broken_rule('mpjax.Rule("float32", path="encoder/layer/1/query")', 36))
  mpjax.Rule(
    "float32",
    path="encoder/layer/"
    "1/query"
  )
  """
  if cell_len(code) <= width:
    return code

  def line_break(match: re.Match[str]) -> str:
    text = match[0]
    if text == ", ":
      return ",\n  "
    # Python joins adjacent strings, so a long path may be broken into several.
    quote = text[0]
    pieces = _pieces(text[1:-1], max(width - _ROOM, 1))
    return "\n  ".join(f"{quote}{piece}{quote}" for piece in pieces)

  # The comma after a rule in a tuple stays behind the parenthesis.
  name, _, arguments = code.partition("(")
  arguments, _, comma = arguments.rpartition(")")
  # Strings are matched first, so a comma inside of a string breaks nothing.
  arguments = re.sub(rf"{_STRING}|, ", line_break, arguments)
  return f"{name}(\n  {arguments}\n){comma}"


def _pieces(text: str, most: int) -> list[str]:
  """Returns the parts of a string as code, which end after slashes unless a name is too long."""
  units: list[str] = []
  # A name keeps its slash. A name that is too long is broken between characters, never inside an
  # escape.
  for name in re.findall("[^/]*/|[^/]+", text):
    units += [name] if cell_len(name) <= most else re.findall(_ATOM, name)
  pieces = [""]
  for unit in units:
    if cell_len(pieces[-1]) + cell_len(unit) > most:
      pieces.append("")
    pieces[-1] += unit
  return [piece for piece in pieces if piece]
