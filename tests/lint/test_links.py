"""Links of the pages lead to files that are there, and `make` knows the commands that they name."""

import pathlib
import re
import runpy
import textwrap
import types
from collections.abc import Iterator
from typing import NamedTuple

import optax
import pytest

import mpjax
from tests.lint.test_layout import RANKS, part

ROOT = pathlib.Path(__file__).parents[2]

SOURCES = {
  f.relative_to(ROOT).as_posix()
  for name in ("mpjax", "tests", "docs", "examples", "benchmarks")
  for f in (ROOT / name).rglob("*.py")
}
ELSEWHERE = ("comparison.md", "op_lists.md")
"""Pages that name files of other projects."""

_OURS = (f for f in SOURCES if f.startswith("mpjax/"))
WORDS = set(re.findall(r"\w+", " ".join((ROOT / f).read_text(encoding="utf-8") for f in _OURS)))
"""What pages about the design may name: all words of our code."""

FOLDER = ROOT / "docs" / "design"
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
  if page.parent == FOLDER and page.name not in ELSEWHERE:
    folders = [ROOT / folder for folder in re.findall(r"`(mpjax/[\w/]*)`", text)]
    files = re.findall(r"`(\w+\.py)`", text)
    yield from (x for x in files if not any((folder / x).exists() for folder in folders))
    names = re.findall(r"`(\w*[a-z]_\w+)`", text)
    yield from (x for x in names if x not in WORDS and not hasattr(optax, x))
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
  text += "`_policy/policy.py` `_core/polcy.py` mpjax.audit mpjax.adit mpjax.git"
  assert list(dead(ROOT / "README.md", text)) == [
    "f.md",
    "_core/polcy.py",
    "adit",
    "git",
    "make tset",
  ]
  text = "In `mpjax/nnx/`, `_graph.py` and `scaled.py`: `body_of`, `body_off`, `zero_nans`."
  assert list(dead(FOLDER / "nnx.md", text)) == ["scaled.py", "body_off"]


picture = types.SimpleNamespace(**runpy.run_path(str(FOLDER / "architecture_picture.py")))


@pytest.mark.parametrize(("name", "theme"), picture.THEMES.items())
def test_the_picture_is_current(name, theme):
  drawn = (FOLDER / f"architecture-{name}.svg").read_text(encoding="utf-8")
  assert drawn == picture.svg(theme), "run `python docs/design/architecture_picture.py`"
  assert "Reading jaxprs" in re.sub(r"<[^>]+>", " ", drawn)


def test_every_part_is_drawn_below_what_imports_it():
  edges = picture.edges()
  rows = picture.rows(edges)
  depth = {name: d for d, row in enumerate(rows) for name in row}
  assert sorted(depth) == sorted(RANKS)
  assert all(depth[a] < depth[b] for a, b in edges)
  assert part("mpjax/_core/errors.py") == rows[-1][0]
