import re

import pytest

import mpjax
from mpjax._diagnostics.selectors import selector
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
    ("Net/rnn/cell/hi", "**/hi"),
  ],
)
def test_a_selector_selects_one_path(path, expected):
  found = selector(path, SCOPES)
  assert found == expected
  rule = mpjax.Rule("float32", path=found)
  assert [scope for scope in SCOPES if rule.matches(None, scope)] == [path]
