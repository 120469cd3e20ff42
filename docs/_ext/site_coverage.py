"""Is every public name on a page of the API, and does the search find it?

Without Sphinx, `missing_from(pages)` says which names the text of the pages lacks: the tests call
it. In a build, a name that the pages or the index of the search lack is a warning, and so an error.
"""

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import mpjax

if TYPE_CHECKING:
  from sphinx.application import Sphinx
  from sphinx.environment import BuildEnvironment

DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception|module):: ([\w.]+)", re.MULTILINE)


def public_names() -> list[str]:
  """Returns the names that `__all__` lists, of mpjax and of its public modules."""
  modules = [mpjax, mpjax.linen, mpjax.nnx, mpjax.checkpoints]
  return [f"{module.__name__}.{name}" for module in modules for name in module.__all__]


def missing_from(pages: Iterable[str]) -> list[str]:
  """Returns the public names that no directive on the pages, given as text, documents."""
  documented = {name for page in pages for name in DIRECTIVE.findall(page)}
  return [name for name in public_names() if name not in documented]


def found_by_search(index: Mapping[str, Any]) -> set[str]:
  """Returns the full names of Python objects in the index of the search."""
  return {
    f"{prefix}.{entry[-1]}" if prefix else entry[-1]
    for prefix, entries in index["objects"].items()
    for entry in entries
  }


def check_pages(app: "Sphinx", env: "BuildEnvironment") -> None:
  """Warns of a public name that no page documents."""
  documented = env.domains.python_domain.objects
  _warn("is on no page of the API", [n for n in public_names() if n not in documented])


def check_search(app: "Sphinx", error: Exception | None) -> None:
  """Warns of a public name that the search does not find."""
  if error or app.builder.name != "html":
    return
  text = (pathlib.Path(app.outdir) / "searchindex.js").read_text(encoding="utf-8")
  found = found_by_search(json.loads(text.removeprefix("Search.setIndex(").removesuffix(")")))
  _warn("is not found by the search", [n for n in public_names() if n not in found])


def _warn(what: str, names: Iterable[str]) -> None:
  # Sphinx is there in a build alone: the tests do without it.
  from sphinx.util.logging import getLogger  # noqa: PLC0415

  for name in names:
    getLogger(__name__).warning("%s %s", name, what, type="mpjax", subtype="coverage")


def setup(app: "Sphinx") -> dict[str, bool]:
  """Connects the checks."""
  app.connect("env-check-consistency", check_pages)
  app.connect("build-finished", check_search)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
