import pytest

import mpjax
from mpjax._diagnose.selectors import layers_of, selector

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
  found = selector([path], HOMES)
  assert found == expected
  rule = mpjax.Rule("float32", path=found)
  assert [scope for scope in SCOPES if rule.matches(None, scope)] == [path]


def test_layers_that_differ_in_numbers_share_a_glob():
  homes = {path: path for path in ("Net/block_0/mlp", "Net/block_1/mlp", "Net/head")}
  paths = [*homes][:2]
  assert layers_of(homes, ["Net/block_0", "Net"]) == [(*paths,), ("Net/head",)]
  assert selector(paths, homes) == "**/mlp"
  assert selector(paths, homes | {"mlp": "mlp"}) == "**/block_*/mlp"


def test_layers_share_no_glob_that_selects_another_path():
  assert layers_of(["block_0", "block_1"], ["block_2"]) == [("block_0",), ("block_1",)]
