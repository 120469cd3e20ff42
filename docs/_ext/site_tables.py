"""The tables of the migration guides without ids of tests, and with mpjax beside the feature.

In the Markdown the last two columns are "mpjax" and "test id": our tests read them. On the site the
ids would take half of the page, so that column is dropped, and where other systems are between a
feature and its line of mpjax, ours becomes the second.
"""

import re
from typing import Any

ENDING = ["mpjax", "test id"]
"""The last two headings of such a table."""

BAR = re.compile(r"(?<!\\)\|")
"""What divides cells; `\\|` is a bar within one."""


def for_readers(markdown: str) -> str:
  """Returns a page with its feature tables rearranged; no line moves."""
  lines = markdown.split("\n")
  fenced = inside = False
  for number, line in enumerate(lines):
    fenced ^= line.startswith("```")
    if fenced or not line.startswith("|"):
      inside = False
      continue
    feature, *others = [cell.strip() for cell in BAR.split(line.strip())[1:-1]]
    inside = inside or others[-2:] == ENDING
    if inside:
      *systems, ours, _ = others
      lines[number] = f"| {' | '.join([feature, ours, *systems])} |"
  return "\n".join(lines)


def setup(app: Any) -> dict[str, bool]:
  """Registers the extension."""

  def read(app: Any, name: str, source: list[str]) -> None:
    source[0] = for_readers(source[0])

  app.connect("source-read", read)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
