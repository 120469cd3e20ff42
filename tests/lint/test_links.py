"""Links of the pages lead to files that are there, and `make` knows the commands that they name."""

import pathlib
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

import mpjax

ROOT = pathlib.Path(__file__).parents[2]

SOURCES = {
  f.relative_to(ROOT).as_posix()
  for name in ("mpjax", "tests", "docs", "examples", "benchmarks")
  for f in (ROOT / name).rglob("*.py")
}
ELSEWHERE = ("comparison.md", "op_lists.md", "reliability.md")
"""Pages that name files of other projects."""

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]


class Block(NamedTuple):
  """A fenced block; `line` is that of its first line of content."""

  language: str
  line: int
  text: str


def blocks(markdown: str) -> Iterator[Block]:
  fence, language, start, lines = "", "", 0, []
  for number, line in enumerate(markdown.splitlines(), 1):
    match = re.match(r" *(```+|~~~+)\s*(.*?)\s*$", line)
    if fence:
      if match and match[1] == fence and not match[2]:
        yield Block(language, start, textwrap.dedent("\n".join(lines)) + "\n")
        fence = ""
      else:
        lines.append(line)
    elif match:
      fence, language, start, lines = match[1], match[2], number + 1, []
  if fence:
    raise ValueError(f"the block at line {start} is not closed")


def dead(page: pathlib.Path, text: str) -> Iterator[str]:
  """Yields what a page names that is not there: files, targets of the Makefile, public names."""
  for link in re.findall(r"\]\(([^)#\s]+)", text):
    if "://" not in link and not (page.parent / link).exists():
      yield link
  for file in re.findall(r"`([\w/]+\.py)`", text) if page.name not in ELSEWHERE else ():
    if not any(f"/{source}".endswith(f"/{file}") for source in SOURCES):
      yield file
  for name in re.findall(r"\bmpjax\.(\w+)", text) if page.name != "CHANGELOG.md" else ():
    if not (hasattr(mpjax, name) or any(f"mpjax/{name}" in source for source in SOURCES)):
      yield name
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  targets = re.findall(r"^([a-z-]+):", makefile, re.MULTILINE)
  for block in blocks(text):
    commands = re.findall(r"\bmake ([a-z-]+)", block.text) if block.language == "bash" else []
    yield from (f"make {command}" for command in commands if command not in targets)


def test_links_and_commands_lead_somewhere():
  assert len(PAGES) > 40
  found = {page: list(dead(page, page.read_text(encoding="utf-8"))) for page in PAGES}
  assert {page: names for page, names in found.items() if names} == {}


def test_what_leads_nowhere_is_found():
  text = "[a](README.md#x) [b](https://c.d) [e](f.md)\n```bash\nmake test\nmake tset\n```\n"
  text += "`_core/policy.py` `_core/polcy.py` mpjax.audit mpjax.adit mpjax.git"
  assert list(dead(ROOT / "README.md", text)) == [
    "f.md",
    "_core/polcy.py",
    "adit",
    "git",
    "make tset",
  ]
