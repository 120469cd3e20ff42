"""Paths of modules as text, such as "encoder/block_0/mlp", and the globs that select some of them.

Layers of one kind have paths that differ in numbers alone: tables have one row for them, and rules
one glob.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from mpjax._core.leaves import Path
from mpjax._jaxpr.graph import Graph
from mpjax._jaxpr.locations import MODULE
from mpjax._policy.rules import glob_of, matches_glob, with_enclosing


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


def rule_paths_of(graph: Graph) -> dict[str, str]:
  """Returns by scope the path that rules match there. In a model it is relative to the root."""
  rule_paths = {each.where.path: each.where.marked(MODULE) for each in graph.operations}
  # JAX moves a constant out of a scan without the scopes around it, so its path is only a tail.
  tails = {path for path in rule_paths if any(other.endswith(f"/{path}") for other in rule_paths)}
  # A matmul is never a moved constant, so its path is a module.
  tails -= {each.where.path for each, *_ in graph.matmuls()}
  # A model under a policy marks its modules. Elsewhere the scope itself is the path.
  return {
    scope: scope if rule_path is None else rule_path
    for scope, rule_path in rule_paths.items()
    if scope not in tails
  }


def layers_of(paths: Iterable[str], others: Collection[str]) -> list[tuple[str, ...]]:
  """Returns paths in groups, of which one glob selects each.

  Layers that differ in their numbers alone are a group, unless their glob matches one of `others`.

  >>> layers_of(["block_0/mlp", "block_1/mlp", "head"], others=["block_0"])
  [('block_0/mlp', 'block_1/mlp'), ('head',)]
  """
  alike: dict[str, list[str]] = {}
  for path in paths:
    alike.setdefault(unnumbered(path), []).append(path)
  groups: list[tuple[str, ...]] = []
  for group in alike.values():
    glob = glob_of_layers(group)
    if any(matches_glob(glob, other) for other in others):
      groups += [(path,) for path in group]
    else:
      groups.append((*group,))
  return groups


def glob_of_layers(paths: Sequence[str]) -> str:
  """Returns a glob for paths that differ in numbers alone, with "*" where they do."""
  return merged([*map(glob_of, paths)])


def selector(paths: Sequence[str], rule_paths: Mapping[str, str]) -> str:
  """Returns the shortest glob that matches only the paths of a group of `layers_of`."""
  every = with_enclosing(rule_paths.values()) | {*paths}
  full = glob_of_layers(paths)
  names = full.split("/") if full else []
  # The last name is easiest to read. Then try longer tails.
  for glob in (f"**/{'/'.join(names[i:])}" for i in reversed(range(len(names)))):
    if {each for each in every if matches_glob(glob, each)} == {*paths}:
      return glob
  return full
