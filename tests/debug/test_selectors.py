import pytest

import mpjax
from mpjax._debug.selectors import selector

SCOPES = ("", "Net", "Net/a", "Net/a/b", "Net/b", "Net/c(1)", "head", "Net/rnn/cell/hi")
HOMES = dict(zip(SCOPES, SCOPES, strict=True))


@pytest.mark.parametrize(
  ("path", "expected"),
  [
    ("head", "**/head"),
    ("Net/a", "**/a"),
    ("Net/a/b", "**/a/b"),
    ("Net/b", "**/Net/b"),
    ("Net/c(1)", "**/c[(]1[)]"),
    ("", ""),
    ("Net/rnn/cell/hi", "**/hi"),
  ],
)
def test_a_selector_selects_one_path(path, expected):
  found = selector(path, HOMES)
  assert found == expected
  rule = mpjax.Rule("float32", path=found)
  assert [scope for scope in SCOPES if rule.matches(None, scope)] == [path]
