import pytest

import mpjax
from mpjax._diagnose.paths import (
  is_inside,
  is_within,
  layers_of,
  relative_to,
  selector,
  shared_names,
)


@pytest.mark.parametrize(
  ("path", "outer", "expected"),
  [
    ("a/b", "a", True),
    ("a/b/c", "a/b", True),
    ("a", "a", False),
    ("ab", "a", False),
    ("b/a", "a", False),
    ("a", "", True),
    ("", "", False),
    ("", "a", False),
  ],
)
def test_a_module_is_inside_of_those_around_it(path, outer, expected):
  assert is_inside(path, outer) is expected
  assert is_within(path, outer) is (expected or path == outer)


@pytest.mark.parametrize(
  ("path", "outer", "expected"),
  [
    ("a/b", "a", "b"),
    ("a/b/c", "a/b", "c"),
    ("a", "a", ""),
    ("ab", "a", "ab"),
    ("b/a", "a", "b/a"),
    ("a/b", "", "a/b"),
    ("", "", ""),
  ],
)
def test_a_path_is_relative_to_a_module_around_it(path, outer, expected):
  assert relative_to(path, outer) == expected


@pytest.mark.parametrize(
  ("paths", "expected"),
  [
    (["a/b/c", "a/b/d"], "a/b"),
    (["a/b", "a"], "a"),
    (["a", "ab"], ""),
    (["a/b/c", "d/b/c"], ""),
    (["a/b"], "a/b"),
  ],
)
def test_paths_share_the_names_that_all_begin_with(paths, expected):
  assert "/".join(shared_names([path.split("/") for path in paths])) == expected


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
