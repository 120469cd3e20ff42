"""`llms.txt`, the list of pages for language models, made whenever the site is built.

The format is that of llmstxt.org: a title, a summary, and for each part of the site its pages with
one sentence each. Titles, sentences and the order are those of the pages themselves.
"""

import pathlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from sphinx.application import Sphinx

TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def llms_text(root: pathlib.Path) -> str:
  """Returns the text for the pages that `docs/index.md` of a checkout leads to."""
  index = root / "docs" / "index.md"
  title, summary = title_and_summary(index)
  lines = [f"# {title}", "", f"> {summary}"]
  for caption, pages in toctrees(root, index):
    lines += ["", f"## {caption}", ""]
    for page in pages:
      lines += [_line(root, inner) for inner in (page, *pages_below(root, page))]
  return "\n".join(lines) + "\n"


def _line(root: pathlib.Path, page: pathlib.Path) -> str:
  title, summary = title_and_summary(page)
  address = page.relative_to(root).with_suffix(".html").as_posix()
  return f"- [{title}]({address})" + (f": {summary}" if summary else "")


def title_and_summary(page: pathlib.Path) -> tuple[str, str]:
  """Returns the heading of a page, and the first sentence below it without markup."""
  text = re.sub(
    r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
  )
  # A notebook begins with its settings.
  _, title, rest = re.split(r"^# (.*)$", text, maxsplit=1, flags=re.MULTILINE)
  paragraphs = [part for part in rest.strip().split("\n\n") if re.match(r"[`*\w]", part)]
  first = " ".join(paragraphs[0].split()) if paragraphs else ""
  plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first)
  return re.sub("[`*]", "", title), re.split(r"(?<=[.:]) ", plain)[0].rstrip(":")


def toctrees(root: pathlib.Path, page: pathlib.Path) -> Iterator[tuple[str, list[pathlib.Path]]]:
  """Yields the caption and the pages of each table of contents of a page."""
  for block in TOCTREE.findall(page.read_text(encoding="utf-8")):
    caption = re.search(r"^:caption: (.*)$", block, re.MULTILINE)
    names = [line for line in block.split("\n") if line and not line.startswith(":")]
    folders = (root if name.startswith("/") else page.parent for name in names)
    files = [folder / f"{name.strip('/')}.md" for folder, name in zip(folders, names, strict=True)]
    yield caption[1] if caption else "", [file for file in files if file.exists()]


def pages_below(root: pathlib.Path, page: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields the pages that the tables of contents of a page lead to, at any depth."""
  for _, pages in toctrees(root, page):
    for inner in pages:
      yield inner
      yield from pages_below(root, inner)


def setup(app: "Sphinx") -> dict[str, bool]:
  """Writes the file when the site has been built."""

  def write(app: "Sphinx", error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
      text = llms_text(pathlib.Path(app.srcdir))
      (pathlib.Path(app.outdir) / "llms.txt").write_text(text, encoding="utf-8")

  app.connect("build-finished", write)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
