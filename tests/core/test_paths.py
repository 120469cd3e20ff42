"""Paths of leaves."""

from typing import NamedTuple

import jax

import mpjax
from mpjax._core.paths import key_names, leaves_by_path


class Pair(NamedTuple):
  left: object
  right: object


def test_names_of_keys():
  tree = {"a/b": [1, (mpjax.TrainState,)]}
  paths = jax.tree_util.tree_leaves_with_path(tree)
  assert [key_names(path) for path, _ in paths] == [("a/b", "0"), ("a/b", "1", "0")]


def test_paths_do_not_tell_classes_apart():
  tree = {"a": Pair([1, (2,)], {"x": 3, "none": None}), "b": ()}
  plain = {"a": {"left": {"0": 1, "1": [2]}, "right": {"x": 3}}}
  paths = {"a/left/0": 1, "a/left/1/0": 2, "a/right/x": 3}
  assert leaves_by_path(tree, "f") == leaves_by_path(plain, "f") == paths
  assert leaves_by_path(paths, "f") == paths
  assert leaves_by_path(7, "f") == {"": 7}
