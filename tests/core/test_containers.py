"""Containers around other leaves: their order, type and identity."""

import jax.numpy as jnp
from flax.core import FrozenDict

from mpjax._core.containers import content_of, mapped


def test_a_container_in_two_places_is_one():
  held = [1]
  first, second = mapped(str, (held, {"again": held}))
  assert first == ["1"]
  assert second["again"] is first


def test_what_is_a_leaf():
  for leaf in (1, "text", jnp.ones(2), object(), iter([1]), (x for x in [1])):
    assert content_of(leaf) is None
  doubled = mapped(lambda x: x * 2, ([1], {"a": 2}), lambda x: isinstance(x, list))
  assert doubled == ([1, 1], {"a": 4})
  assert mapped(str, None) is None
  assert mapped(str, FrozenDict(b=None, a=())) == FrozenDict(b=None, a=())


def test_what_does_not_change_is_itself():
  tree = {"z": [1], "a": (2, {"b": 2})}
  assert mapped(lambda x: x, tree) is tree
  new = mapped(lambda x: x + (x == 1), tree)
  assert new["z"] == [2]
  assert new["a"] is tree["a"]
