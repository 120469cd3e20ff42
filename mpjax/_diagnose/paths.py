"""Paths of modules as text, such as "encoder/block_0/mlp": which are inside of which, or alike."""

import itertools
import re
from collections.abc import Iterable, Sequence

from mpjax._core.leaves import Path


def is_inside(path: str, outer: str) -> bool:
  """Whether a module is inside of another one; all but the root are inside of the root, "".

  >>> is_inside("block_1/mlp", "block_1"), is_inside("block_10", "block_1"), is_inside("mlp", "")
  (True, False, True)
  """
  if not outer:
    return path != ""
  # The slash keeps "block_1" from matching "block_10".
  return path.startswith(f"{outer}/")


def is_within(path: str, outer: str) -> bool:
  """Whether a module is another one, or inside of it.

  >>> is_within("block_1", "block_1"), is_within("block_1/mlp", "block_1"), is_within("", "")
  (True, True, True)
  """
  return path == outer or is_inside(path, outer)


def relative_to(path: str, outer: str) -> str:
  """Returns the path of a module in the one around it: "" for that one itself.

  A path that is not inside is returned as it is.

  >>> relative_to("block_1/mlp", "block_1"), relative_to("block_1", "block_1")
  ('mlp', '')
  """
  return f"{path}/".removeprefix(f"{outer}/").removesuffix("/")


def shared_names(paths: Sequence[Sequence[str]]) -> Path:
  """Returns the longest path that all paths begin with; paths are sequences of names.

  >>> shared_names([("block_1", "mlp", "up"), ("block_1", "mlp", "down")])
  ('block_1', 'mlp')
  """
  alike = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*paths, strict=False))
  return tuple(first for first, *_ in alike)


def unnumbered(name: str) -> str:
  """Returns a name with "*" for each number in it."""
  # Layers of one kind, such as "block_0" and "block_1", differ in numbers only.
  return re.sub(r"\d+", "*", name)


def merged(names: Sequence[str]) -> str:
  """Returns one name for names that differ only in numbers, with "*" where they differ."""
  # The names have as many numbers, so their parts correspond.
  parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
  return "".join(same[0] if len(set(same)) == 1 else "*" for same in parts)


def path_of_layers(paths: Iterable[str]) -> str:
  """Returns one path for layers that differ in their numbers alone, and how many there are.

  >>> path_of_layers(["block_0/mlp", "block_0/mlp", "block_1/mlp"]), path_of_layers([""])
  ('block_*/mlp (2)', '(root)')
  """
  # A module may have several rows, so count paths rather than rows.
  several = [*dict.fromkeys(paths)]
  count = f" ({len(several)})" if len(several) > 1 else ""
  return (merged(several) or "(root)") + count
