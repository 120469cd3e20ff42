"""Notebooks to download: every page with cells becomes an .ipynb that runs on a hosted machine.

The page stays the source. The notebook has its text and code, and one cell in front that installs
mpjax. Links to other pages lead to the site, if it has an address, and are text otherwise.
"""

import json
import pathlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from sphinx.application import Sphinx

CELL = re.compile(r"^```\{code-cell\} ipython3\n(.*?)^```\n", re.MULTILINE | re.DOTALL)

INSTALL = """# Before the first release, name a checkout: '/path/to/mpjax[reports,plot]'
%pip install --quiet 'mpjax[reports,plot]'"""


def is_notebook(text: str) -> bool:
  """Whether a page has cells."""
  return CELL.search(text) is not None


def notebook(text: str) -> dict[str, Any]:
  """Returns the notebook of a page, in the format of Jupyter (nbformat 4)."""
  body = re.sub(r"\A---\n.*?^---\n", "", text, flags=re.MULTILINE | re.DOTALL)
  body = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", body)
  title, _, rest = body.lstrip().partition("\n")
  pieces = CELL.split(rest)
  cells = [_markdown(title), _code(INSTALL)]
  for i, piece in enumerate(pieces):
    if i % 2:
      # Options of a cell are lines of `:name: value` at its top.
      cells.append(_code(re.sub(r"\A(:.*\n)+\n?", "", piece).rstrip()))
    elif piece.strip():
      cells.append(_markdown(piece.strip()))
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  return {
    "cells": [{**cell, "id": f"cell-{i}"} for i, cell in enumerate(cells)],
    "metadata": {"kernelspec": kernel},
    "nbformat": 4,
    "nbformat_minor": 5,
  }


def _markdown(text: str) -> dict[str, Any]:
  return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(text: str) -> dict[str, Any]:
  rest = {"execution_count": None, "metadata": {}, "outputs": []}
  return {"cell_type": "code", **rest, "source": text}


def setup(app: "Sphinx") -> dict[str, bool]:
  """Writes the notebooks beside their pages when the site has been built."""

  def write(app: "Sphinx", error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
      for page in pathlib.Path(app.srcdir).glob("docs/tutorials/*.md"):
        text = page.read_text(encoding="utf-8")
        if is_notebook(text):
          target = pathlib.Path(app.outdir) / "docs" / "tutorials" / f"{page.stem}.ipynb"
          target.write_text(json.dumps(notebook(text), indent=1), encoding="utf-8")

  app.connect("build-finished", write)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
