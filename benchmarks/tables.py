"""What scripts show: a bar while they measure, tables in Markdown, and their places in a page."""

import re
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console, width: int = 0) -> Progress:
  """Returns a bar with a description, the steps done, and the time that they took.

  Args:
    console: where it is drawn.
    width: the least width of the description.
  """
  text = TextColumn(f"{{task.description:<{width}}}")
  return Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def table(rows: Sequence[Sequence[str]], texts: int = 1) -> str:
  """Returns rows, the first of which is the heading, in Markdown; the first columns are text."""
  heading = rows[0]
  line = ["---"] * texts + ["--:"] * (len(heading) - texts)
  return "\n".join("| " + " | ".join(row) + " |" for row in [heading, line, *rows[1:]])


def replaced(page: str, name: str, text: str) -> str:
  """Returns a page with another text between the marks `<!-- name -->` and `<!-- end of name -->`.

  Raises:
    ValueError: the page does not have them exactly once.
  """
  begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
  new = f"{begin}\n\n{text}\n\n{end}"
  page, count = re.subn(f"{begin}.*?{end}", lambda _: new, page, flags=re.DOTALL)
  if count != 1:
    raise ValueError(f"the page has {count} places for {name!r}")
  return page
