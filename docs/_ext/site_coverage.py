"""Is every public name on a page of the API, and does the search find it?

Without Sphinx, `missing_from(pages)` says which names the text of the pages lacks: the tests call
it. In a build, a name that the pages or the index of the search lack is a warning, and so an error.

Public are the names of `__all__`, and of a class its methods, properties and fields. A field is
described by the `Args` of its class, and its entry in the index leads there.
"""

import dataclasses
import functools
import importlib
import json
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import mpjax

if TYPE_CHECKING:
  from sphinx.application import Sphinx
  from sphinx.environment import BuildEnvironment

DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception|module):: ([\w.]+)", re.MULTILINE)

CLASS = re.compile(
  r"^\.\. auto(?:class|exception):: (?P<name>[\w.]+).*\n(?P<options>(?: +:.*\n)*)", re.MULTILINE
)


def public_names() -> list[str]:
  """Returns the public modules, and the names that `__all__` lists of mpjax and of each of them."""
  parts = [getattr(mpjax, name) for name in dir(mpjax)]
  modules = [part for part in parts if isinstance(part, types.ModuleType)]
  names = [f"{part.__name__}.{name}" for part in (mpjax, *modules) for name in part.__all__]
  return [part.__name__ for part in modules] + names


def find(name: str) -> Any:
  """Returns what a name of `public_names` is."""
  module, _, rest = name.rpartition(".")
  return getattr(importlib.import_module(module), rest)


def members_of(cls: type) -> dict[str, type]:
  """Returns the public methods and properties of a class, each with the class of ours it is in."""
  found: dict[str, type] = {}
  for base in cls.__mro__:
    if base.__module__.split(".")[0] == "mpjax":
      for name, value in vars(base).items():
        if not name.startswith("_") and isinstance(value, MEMBERS) and name not in fields_of(cls):
          found.setdefault(name, base)
  return found


MEMBERS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)


def fields_of(cls: type) -> list[str]:
  """Returns the public fields of a dataclass or a NamedTuple."""
  fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
  names = [field.name for field in fields] or getattr(cls, "_fields", [])
  return [name for name in names if not name.startswith("_")]


def classes() -> dict[str, type]:
  """Returns the public classes by name."""
  named = {name: find(name) for name in public_names()}
  return {name: thing for name, thing in named.items() if isinstance(thing, type)}


def public_objects() -> list[str]:
  """Returns all that the index and the search must have: names, and what classes have."""
  inside = [f"{name}.{member}" for name, cls in classes().items() for member in members_of(cls)]
  fields = [f"{name}.{field}" for name, cls in classes().items() for field in fields_of(cls)]
  return ["mpjax", *public_names(), *inside, *fields]


def missing_from(pages: Iterable[str]) -> list[str]:
  """Returns the public names that no directive on the pages, given as text, documents."""
  text = "\n".join(pages)
  documented = set(DIRECTIVE.findall(text))
  options = {match["name"]: match["options"] for match in CLASS.finditer(text)}
  inside = [
    f"{name}.{member}"
    for name, cls in classes().items()
    for member, base in members_of(cls).items()
    if name in options
    and not (
      ":members:" in options[name] and (base is cls or ":inherited-members:" in options[name])
    )
  ]
  return [name for name in ["mpjax", *public_names()] if name not in documented] + inside


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
  _warn("is on no page of the API", [n for n in public_objects() if n not in documented])


def add_fields(app: "Sphinx", env: "BuildEnvironment") -> None:
  """Adds the fields of public classes to the index; they lead to the entry of their class."""
  objects = env.domains.python_domain.objects
  for name, cls in classes().items():
    if name in objects:
      entry = objects[name]._replace(objtype="attribute")
      for field in fields_of(cls):
        objects.setdefault(f"{name}.{field}", entry)


def skip(
  app: "Sphinx", what: str, name: str, thing: Any, skipped: bool, options: Any
) -> bool | None:
  """Skips the fields of a NamedTuple, which Python documents as "Alias for field number 0"."""
  return True if isinstance(thing, FIELD) else None


FIELD = type(vars(typing.NamedTuple("Pair", [("first", int)]))["first"])


def check_search(app: "Sphinx", error: Exception | None) -> None:
  """Warns of a public name that the search does not find."""
  if error or app.builder.name != "html":
    return
  text = (pathlib.Path(app.outdir) / "searchindex.js").read_text(encoding="utf-8")
  found = found_by_search(json.loads(text.removeprefix("Search.setIndex(").removesuffix(")")))
  _warn("is not found by the search", [n for n in public_objects() if n not in found])


def _warn(what: str, names: Iterable[str]) -> None:
  # Sphinx is there in a build alone: the tests do without it.
  from sphinx.util.logging import getLogger  # noqa: PLC0415

  for name in names:
    getLogger(__name__).warning("%s %s", name, what, type="mpjax", subtype="coverage")


def setup(app: "Sphinx") -> dict[str, bool]:
  """Connects the checks."""
  app.connect("autodoc-skip-member", skip)
  app.connect("env-updated", add_fields)
  app.connect("env-check-consistency", check_pages)
  app.connect("build-finished", check_search)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
