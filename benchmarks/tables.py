"""Tables in Markdown, and the places in a page that they belong to."""

import re
from collections.abc import Sequence


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
