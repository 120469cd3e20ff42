import re

import pytest

import mpjax
from mpjax._diagnostics.selectors import named_scopes, prefixes, selector
from mpjax._jaxprs.locations import Location
from tests.diagnostics.tune.test_modules import SCOPES


@pytest.mark.parametrize(
  ("path", "expected"),
  [
    ("head", "**/head"),
    ("Net/a", "**/a"),
    ("Net/a/b", "**/a/b"),
    ("Net/b", "**/Net/b"),
    ("Net/c(1)", re.compile(re.escape("Net/c(1)"))),
    ("", ""),
    # Rules of Linen know the module inside of a method by its own name alone.
    ("Net/Net.encode/enc", "**/enc"),
    ("Net/rnn/cell.scan_fn/cell/hi", "**/cell/hi"),
  ],
)
def test_a_selector_selects_one_path(path, expected):
  found = selector(path, SCOPES)
  assert found == expected
  rule = mpjax.Rule("float32", path=found)
  assert [scope for scope in SCOPES if rule.matches(None, scope)] == [path]


def test_the_scopes_of_an_operation_and_those_around_them():
  where = Location(scopes=("Net", "mpjax.region=float16", "up"))
  assert named_scopes(where) == ("Net", "up")
  assert prefixes(named_scopes(where)) == {"", "Net", "Net/up"}
