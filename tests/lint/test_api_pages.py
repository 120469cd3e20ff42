"""Every public name is on a page of the API, and its docstring says all that the page shows."""

import importlib.util
import inspect
import pathlib
import re
from types import ModuleType

import pytest

import mpjax
from tests.lint.test_public_api import NAMES, members, resolve

ROOT = pathlib.Path(__file__).parents[2]


def load(name: str) -> ModuleType:
  """Returns a module of the site's own, which are on no path."""
  spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/_ext/{name}.py")
  assert spec
  assert spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


coverage = load("site_coverage")
PAGES = {page.name: page.read_text(encoding="utf-8") for page in ROOT.glob("docs/api/*.md")}


def returns_fault(name, thing) -> list[str]:
  """A function says what it returns, in its summary or in a section."""
  if isinstance(thing, type) or inspect.signature(thing).return_annotation is None:
    return []
  doc = inspect.getdoc(thing) or ""
  says = re.search(r"^(Returns|Whether)\b", doc, re.MULTILINE)
  return [] if says else [f"{name} lacks Returns:"]


def test_the_names_are_the_reviewed_ones():
  assert sorted(coverage.public_names()) == sorted(NAMES)


def test_every_public_name_is_on_a_page():
  assert coverage.missing_from(PAGES.values()) == []


def test_no_name_is_on_two_pages():
  documented = [name for page in PAGES.values() for name in coverage.DIRECTIVE.findall(page)]
  assert sorted(documented) == sorted(set(documented))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_missing_a_name_is_noticed(name):
  pages = [
    re.sub(rf":: {re.escape(name)}(?![\w.])", ":: mpjax.other", page) for page in PAGES.values()
  ]
  assert coverage.missing_from(pages) == [name]


CLASSES = [name for name in NAMES if isinstance(resolve(name), type)]


def test_objects_are_what_a_user_can_write():
  found = coverage.public_objects()
  assert len(found) == len(set(found))
  methods = {"TrainState.create", "Policy.parse", "Policy.cast_to_compute", "Rule.matches"}
  reports = {"GroupRanges.lost_share", "Audit.to_html"}
  fields = {"Policy.param_dtype", "TrainState.opt_state", "OpLists.half"}
  assert {f"mpjax.{name}" for name in methods | reports | fields} <= set(found)
  for name in found:
    thing = mpjax
    *path, last = name.split(".")[1:] or ["__name__"]
    for piece in path:
      thing = getattr(thing, piece)
    assert hasattr(thing, last) or last in coverage.fields_of(thing), name
  # Neither what a tuple has, nor what another library's base class has.
  assert not {"mpjax.TrainState.count", "mpjax.MpjaxError.add_note"} & set(found)


@pytest.mark.parametrize("name", CLASSES)
def test_a_page_without_the_members_of_a_class_is_noticed(name):
  members = [f"{name}.{member}" for member in coverage.members_of(resolve(name))]
  entry = re.compile(rf"(auto(?:class|exception):: {re.escape(name)}\b.*\n)(?: +:.*\n)+")
  pages = [entry.sub(r"\1", page) for page in PAGES.values()]
  assert coverage.missing_from(pages) == members


@pytest.mark.parametrize("name", CLASSES)
def test_each_method_and_property_says_what_it_is(name):
  cls = resolve(name)
  members = coverage.members_of(cls)
  assert [
    member for member in members if not inspect.getdoc(inspect.getattr_static(cls, member))
  ] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_says_what_the_function_returns(name):
  assert [
    fault for key, thing in members(name).items() for fault in returns_fault(key, thing)
  ] == []


def test_the_check_of_results_can_fail():
  def silent(x: int) -> int:
    """Does it."""
    return x

  assert returns_fault("silent", silent) == ["silent lacks Returns:"]


def test_the_search_is_read_as_sphinx_writes_it():
  index = {"objects": {"": [[0, 0, 0, "-", "mpjax"]], "mpjax": [[3, 1, 1, "", "tune"]]}}
  assert coverage.found_by_search(index) == {"mpjax", "mpjax.tune"}
