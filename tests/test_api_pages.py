"""Every public name is on a page of the API, and its docstring says all that the page shows."""

import importlib.util
import inspect
import pathlib
import re
from types import ModuleType

import pytest

from tests.test_public_api import NAMES, members

ROOT = pathlib.Path(__file__).parent.parent


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
