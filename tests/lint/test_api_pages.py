"""Every public name is on a page of the API, with its members."""

import inspect
import pathlib
import re
import runpy
import types
import typing

import pytest

import mpjax
from tests.lint.test_public_api import NAMES, resolve

ROOT = pathlib.Path(__file__).parents[2]


# A module of the site's own, which is on no path.
coverage = types.SimpleNamespace(**runpy.run_path(str(ROOT / "docs/_ext/site_coverage.py")))
PAGES = {page.name: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md")}


def test_every_public_name_is_on_one_page():
  assert sorted(coverage.public_names()) == sorted(NAMES)
  assert coverage.missing_from(PAGES.values()) == []
  documented = [name for page in PAGES.values() for name in coverage.DIRECTIVE.findall(page)]
  assert sorted(documented) == sorted(set(documented))


def test_the_index_says_of_each_name_of_mpjax_when_to_use_it():
  rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", PAGES["index.md"], re.MULTILINE)
  assert sorted(name for name, _, _ in rows) == sorted(mpjax.__all__)


def test_objects_are_what_a_user_can_write():
  found = coverage.public_objects()
  assert len(found) == len(set(found))
  # A class method, a method, a property, and a field.
  examples = ("Policy.parse", "Rule.matches", "reports.GroupRanges.lost_share", "OpLists.half")
  assert {f"mpjax.{name}" for name in examples} <= set(found)
  for name in found:
    thing = mpjax
    *path, last = name.split(".")[1:] or ["__name__"]
    for piece in path:
      thing = getattr(thing, piece)
    assert hasattr(thing, last) or last in coverage.fields_of(thing), name
  # Neither what a tuple has, nor what another library's base class has.
  assert not {"mpjax.TrainState.count", "mpjax.MpjaxError.add_note"} & set(found)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_without_a_name_or_the_members_of_a_class_is_noticed(name):
  entry = re.compile(rf":: {re.escape(name)}(?![\w.])")
  pages = [entry.sub(":: mpjax.other", page) for page in PAGES.values()]
  assert coverage.missing_from(pages) == [name]
  if isinstance(resolve(name), type):
    members = [f"{name}.{member}" for member in coverage.members_of(resolve(name))]
    entry = re.compile(rf"(auto(?:class|exception):: {re.escape(name)}\b.*\n)(?: +:.*\n)+")
    pages = [entry.sub(r"\1", page) for page in PAGES.values()]
    assert coverage.missing_from(pages) == members


def test_members_have_a_docstring():
  classes = {name: resolve(name) for name in NAMES if isinstance(resolve(name), type)}
  found = [
    f"{name}.{member}"
    for name, cls in classes.items()
    for member in coverage.members_of(cls)
    if not inspect.getdoc(inspect.getattr_static(cls, member))
  ]
  assert found == []


def types_in(hint: typing.Any) -> set[str]:
  """Returns the names of the classes of ours that an annotation holds."""
  ours = isinstance(hint, type) and hint.__module__.startswith("mpjax.")
  named = {hint.__name__} if ours else set[str]()
  return named.union(*map(types_in, typing.get_args(hint)))


def test_types_of_the_fields_of_reports_are_on_a_page():
  names = {n.rpartition(".")[2] for p in PAGES.values() for n in coverage.DIRECTIVE.findall(p)}
  for report in mpjax.reports.__all__:
    for hint in typing.get_type_hints(getattr(mpjax.reports, report)).values():
      assert types_in(hint) <= names, report
