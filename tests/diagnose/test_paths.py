import pytest

from mpjax._diagnose.paths import is_inside, is_within, relative_to, shared_names


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
